"""`gfgen check` and `gfgen run --dry-run`: what a run would do, without starting anything."""

from __future__ import annotations

import hashlib
import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gfgen.cli import run as run_module
from gfgen.cli.main import main
from gfgen.runtime.core.devices import CUDA, Devices, Gpu
from gfgen.runtime.core.metrics import Summary

FOX = {"id": "fox", "prompt": "a red fox", "model": "tiny-qwen-image", "size": "64x64", "steps": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_models):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path: Path, *jobs: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))


def gfgen(capsys, *arguments: object) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def checked(capsys, *arguments: object) -> dict[str, Any]:
    code, out, err = gfgen(capsys, "check", *arguments, "--device", "cpu", "--json")
    report: dict[str, Any] = json.loads(out)
    assert code == (2 if report["problems"] else 0), err
    return report


def finished(folder: Path, monkeypatch, capsys, *jobs: dict[str, Any], status: str = "done") -> None:
    """Make the manifest that a run of jobs.jsonl leaves in outputs/jobs, with one file of 4 bytes per job."""
    put(folder / "jobs.jsonl", *jobs)
    found = []

    def run_jobs(session: object, admitted: Any, options: object, claims: Any) -> Summary:
        found.extend(admitted)
        return Summary()

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "run_jobs", run_jobs)
        gfgen(capsys, "run", "jobs.jsonl", "--device", "cpu")
    lines = []
    for job in found:
        info = job.info
        line = {"version": 1, "id": info.job_id, "status": status, "spec_hash": info.spec_hash}
        line |= {"file": info.file, "size_bytes": 4, "job_file": "../../jobs.jsonl"}
        lines.append(line | {"sha256": hashlib.sha256(b"done").hexdigest()})
        (folder / "outputs/jobs").mkdir(parents=True, exist_ok=True)
        if status == "done":
            (folder / "outputs/jobs" / info.file).write_bytes(b"done")
    put(folder / "outputs/jobs/manifest.jsonl", *lines)


def test_nothing_is_started_and_nothing_is_written(capsys, folder):
    put(folder / "jobs.jsonl", FOX)
    for command in (("check", "jobs.jsonl"), ("run", "--dry-run", "jobs.jsonl")):
        code, out, _ = gfgen(capsys, *command, "--device", "cpu")
        assert code == 0
        assert out.splitlines()[:3] == [
            "jobs.jsonl: 1 job, no problem",
            "jobs      1 new",
            "output    outputs/jobs/",
        ]
        assert "memory    weights of tiny-qwen-image" in out
    assert os.listdir() == ["jobs.jsonl"]


def test_every_problem_is_listed_with_the_jobs_that_are_right(capsys, folder):
    put(folder / "jobs.jsonl", FOX, {"stpes": 4}, FOX | {"id": "owl", "frames": 3})
    report = checked(capsys, "jobs.jsonl")
    assert [(each["line"], each["field"]) for each in report["problems"]] == [
        (2, "stpes"),
        (2, "prompt"),
        (3, "frames"),
    ]
    assert report["counts"]["new"] == 1
    code, out, _ = gfgen(capsys, "check", "jobs.jsonl", "--skip-invalid", "--device", "cpu")
    assert code == 0
    assert "jobs.jsonl: 2 jobs, 3 problems" in out


def test_more_than_twenty_problems_are_listed_and_what_is_accepted_once(capsys, folder):
    put(folder / "jobs.jsonl", *[FOX | {"id": f"fox-{idx}", "steps": -idx} for idx in range(50)])
    _, out, _ = gfgen(capsys, "check", "jobs.jsonl", "--device", "cpu")
    assert [line for line in out.splitlines() if "steps" in line] == [
        "  line 1: steps = 0: a whole number from 1 to 1,000",
        *(f"  line {idx + 1}: steps = {-idx}: as in line 1" for idx in range(1, 50)),
    ]


def test_a_time_of_day_that_has_passed_since_the_first_arrival_is_late(capsys, folder, monkeypatch):
    an_hour_ago = (datetime.now(UTC) - timedelta(hours=1)).strftime("%H:%M UTC")
    finished(folder, monkeypatch, capsys, FOX | {"deadline": an_hour_ago}, status="failed")
    (line,) = (folder / "outputs/jobs/manifest.jsonl").read_text().splitlines()
    arrival = {
        "event": "JobArrived",
        "time_s": 0,
        "job_id": "fox",
        "spec_hash": json.loads(line)["spec_hash"],
    }
    for hours, is_late in ((0, False), (8, True)):
        header = {
            "gfgen_journal": 2,
            "started_at": time.time() - hours * 3600,
            "job_file": "../../jobs.jsonl",
        }
        put(folder / "outputs/jobs/journal.jsonl", header, arrival)
        told = checked(capsys, "jobs.jsonl")["warnings"]
        assert ["has passed; fox runs anyway and counts as late" in text for text in told] == [True] * is_late
    assert not checked(capsys, "jobs.jsonl", "--force")["warnings"]


def test_the_space_of_files_is_estimated(capsys, folder, monkeypatch):
    put(folder / "jobs.jsonl", FOX, FOX | {"id": "owl", "output": "owl.jpg"})
    report = checked(capsys, "jobs.jsonl")
    raw = 64 * 64 * 3
    assert report["space"]["files_bytes"] == 2 * 4096 + raw + raw // 4
    assert report["space"]["free_bytes"] > 0
    monkeypatch.setattr("gfgen.cli.check.free_bytes", lambda folder: 10_000)
    _, out, _ = gfgen(capsys, "check", "jobs.jsonl", "--device", "cpu")
    (line,) = [line for line in out.splitlines() if line.startswith("space ")]
    assert "is free: " in line
    assert line.endswith(" may be missing")


def test_jobs_are_counted_by_what_a_run_does_with_them(capsys, folder, monkeypatch):
    owl, hen, cat = (FOX | {"id": name} for name in ("owl", "hen", "cat"))
    finished(folder, monkeypatch, capsys, FOX, owl, hen, cat)
    (folder / "outputs/jobs/hen.png").unlink()
    (folder / "outputs/jobs/cat.png").write_bytes(b"edited")
    (folder / "outputs/jobs/elk.png").write_bytes(b"mine")
    put(folder / "jobs.jsonl", FOX, owl | {"steps": 3}, hen, FOX | {"id": "new"}, FOX | {"id": "elk"}, cat)
    report = checked(capsys, "jobs.jsonl")
    assert report["counts"] == {"new": 1, "left": 0, "done": 1, "changed": 1, "again": 1, "colliding": 2}
    assert (report["changed"], report["again"]) == (["owl"], {"hen": "its file is gone"})
    assert [each["line"] for each in report["problems"]] == [5, 6]
    report = checked(capsys, "jobs.jsonl", "--overwrite", "--force")
    assert report["again"] == {"fox": "--force", "hen": "its file is gone", "cat": "--force"}


def test_jobs_of_a_stopped_run_are_left(capsys, folder, monkeypatch):
    finished(folder, monkeypatch, capsys, FOX, FOX | {"id": "owl"})
    (folder / "outputs/jobs/owl.png").unlink()
    manifest = folder / "outputs/jobs/manifest.jsonl"
    fox, owl = map(json.loads, manifest.read_text().splitlines())
    arrivals = [
        {"event": "JobArrived", "time_s": 0, "job_id": each["id"], "spec_hash": each["spec_hash"]}
        for each in (fox, owl)
    ]
    put(folder / "outputs/jobs/journal.jsonl", {"gfgen_journal": 2, "started_at": 1.0}, *arrivals)
    put(manifest, fox)
    put(folder / "jobs.jsonl", FOX, FOX | {"id": "owl"}, FOX | {"id": "hen"})
    counts = checked(capsys, "jobs.jsonl")["counts"]
    assert {name: count for name, count in counts.items() if count} == {"done": 1, "left": 1, "new": 1}
    _, out, _ = gfgen(capsys, "check", "jobs.jsonl", "--device", "cpu")
    assert "jobs      1 new, 1 begun by a run, 1 done" in out.splitlines()


def test_failed_jobs_are_made_again_and_can_be_selected(capsys, folder, monkeypatch):
    finished(folder, monkeypatch, capsys, FOX, status="failed")
    put(folder / "jobs.jsonl", FOX, FOX | {"id": "owl"})
    assert checked(capsys, "jobs.jsonl")["counts"]["new"] == 1
    report = checked(capsys, "jobs.jsonl", "--failed")
    assert report["counts"] == {"new": 0, "left": 0, "done": 0, "changed": 0, "again": 1, "colliding": 0}
    assert report["again"] == {"fox": "it failed"}
    report = checked(capsys, "jobs.jsonl", "--failed", "--only", "owl")
    assert report["warnings"] == ["--failed: none of these jobs has failed in outputs/jobs"]


def test_rounding_warnings_and_fields_of_all_jobs_are_shown(capsys, folder):
    defaults = {"defaults": {"model": "tiny-qwen-image", "steps": 4}}
    late = {"id": "late", "prompt": "a fox", "size": "70x64", "deadline": "2020-01-01T00:00+00:00"}
    put(folder / "jobs.jsonl", defaults, late)
    report = checked(capsys, "jobs.jsonl", "--seed", "3")
    assert report["overrides"] == {"seed": 3}
    assert report["defaults"] == {"jobs.jsonl": {"model": "tiny-qwen-image", "steps": 4}}
    assert report["rounded"] == {"late": "70x64 -> 64x64"}
    assert any("has passed; late runs anyway" in text for text in report["warnings"])
    assert "line 2: rounded by tiny-qwen-image: 70x64 -> 64x64" in report["warnings"]
    code, out, _ = gfgen(capsys, "check", "jobs.jsonl", "--seed", "3", "--device", "cpu")
    assert code == 0
    lines = out.splitlines()
    assert "fields    seed = 3 on all jobs, by options" in lines
    assert any("steps = 4 where a line of jobs.jsonl has no value, by its defaults" in line for line in lines)
    _, out, _ = gfgen(capsys, "check", "jobs.jsonl", "--seed", "3.0", "-n", "1e1", "--device", "cpu")
    assert "fields    seed = 3, num_images = 1e1 on all jobs, by options" in out.splitlines()


def test_the_end_is_predicted_where_a_profile_knows_the_models(capsys, folder, monkeypatch):
    put(
        folder / "jobs.jsonl",
        {"prompt": "a red circle", "deadline": "9h"},
        {"prompt": "x", "deadline": 0.001},
        {"id": "short", "prompt": "x", "timeout": 0.001},
    )
    prediction = checked(capsys, "jobs.jsonl")["prediction"]
    assert prediction["unknown"] is None
    assert prediction["seconds"] > 0
    assert (len(prediction["late"]), prediction["deadlines"]) == (1, 2)
    assert prediction["timed_out"] == ["short"]
    monkeypatch.setattr("gfgen.cli.check.known_here", lambda jobs, ranks: None)
    assert "this machine has no profile" in checked(capsys, "jobs.jsonl")["prediction"]["unknown"]


def test_prompts_texts_and_several_files_are_checked_too(capsys, folder):
    (folder / "more.txt").write_text("a {red|blue} star\n")
    put(folder / "jobs.jsonl", {"prompt": "a red circle"})
    report = checked(capsys, "more.txt", "jobs.jsonl", "-p", "a square", "--vary", "--steps", 2)
    assert report["counts"]["new"] == 4
    assert report["output"] == "outputs/more"
    assert "more.txt: read as one prompt per line" in report["notes"]
    code, out, _ = gfgen(capsys, "check", "-p", "a star", "--device", "cpu")
    assert (code, out.splitlines()[0]) == (0, "-p: 1 job, no problem")
    assert "outputs/prompts/" in out


def test_each_of_several_files_owns_the_files_of_its_jobs(capsys, folder, monkeypatch):
    finished(folder, monkeypatch, capsys, FOX)
    put(folder / "more.jsonl", FOX | {"id": "owl"})
    put(folder / "jobs.jsonl", FOX | {"steps": 3})
    assert checked(capsys, "jobs.jsonl", "more.jsonl")["counts"]["changed"] == 1
    put(folder / "jobs.jsonl", FOX | {"id": "hen"})
    put(folder / "more.jsonl", FOX | {"steps": 3})
    (problem,) = checked(capsys, "jobs.jsonl", "more.jsonl")["problems"]
    assert (problem["file"], problem["line"]) == ("more.jsonl", 1)
    assert "job fox of jobs.jsonl made it" in problem["text"]


@pytest.mark.parametrize("option", [("--only", "fox"), ("-p", "a fox"), ("--failed",), ("--dry-run",)])
def test_options_for_job_files_are_refused_for_a_watched_folder(capsys, folder, option):
    (folder / "inbox").mkdir()
    code, _, err = gfgen(capsys, "run", "--watch", "inbox", *option)
    assert code == 2
    assert "--watch" in err


def test_without_jobs_there_is_a_hint(capsys, folder):
    code, _, err = gfgen(capsys, "check")
    assert code == 2
    assert "name a job file" in err
    assert len(err.splitlines()) == 1


def test_a_simulated_line_of_a_manifest_is_no_finished_job(capsys, folder):
    put(folder / "jobs.jsonl", FOX)
    line = {"version": 1, "id": "fox", "status": "done", "simulated": True, "spec_hash": "x", "file": None}
    put(folder / "outputs/jobs/manifest.jsonl", line)
    assert checked(capsys, "jobs.jsonl")["counts"]["new"] == 1


def test_finished_jobs_that_were_made_with_other_versions_or_weights_are_named(capsys, folder, monkeypatch):
    finished(folder, monkeypatch, capsys, FOX, FOX | {"id": "owl"})
    path = folder / "outputs/jobs/manifest.jsonl"
    fox, owl = map(json.loads, path.read_text().splitlines())
    fox["made_with"] = {
        "versions": {"torch": "1.0"},
        "weights": "sha256 0",
        "device": "cpu",
        "vae_dtype": "auto",
    }
    put(path, fox, owl)
    found = checked(capsys, "jobs.jsonl")["made_with_others"]
    assert list(found) == ["fox"]
    assert [text.partition(" (now")[0] for text in found["fox"]] == ["torch 1.0", "weights sha256 0"]
    code, out, _ = gfgen(capsys, "check", "jobs.jsonl", "--device", "cpu")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("done ")]
    assert line.endswith(": fox; --force makes them again")


def test_a_streamed_model_is_told_with_its_slowdown_and_the_prediction_counts_the_reads(
    capsys, folder, monkeypatch
):
    monkeypatch.setattr("gfgen.session.memory.available_bytes", lambda: 128 * 10**9)
    picture = {"prompt": "a fox", "model": "qwen-image", "size": "1024x1024", "steps": 20}
    put(folder / "one.jsonl", picture)
    put(folder / "eight.jsonl", *[picture | {"id": f"fox-{number}"} for number in range(8)])

    def report(name: str, gpu_gb: int) -> dict[str, Any]:
        devices = Devices(CUDA, 1, (Gpu("NVIDIA H200", gpu_gb * 10**9),))
        monkeypatch.setattr("gfgen.session.ranks.choose_devices", lambda *_, **__: devices)
        code, out, err = gfgen(capsys, "check", name, "--random-weights", "--json")
        assert code == 0, err
        return json.loads(out)  # type: ignore[no-any-return]

    streamed = report("one.jsonl", 24)
    assert (
        "38.8 GB are streamed from main memory, which takes a forward at least 0.49 s" in streamed["notes"][0]
    )
    assert any("a step of qwen-image takes 2" in note for note in streamed["notes"])
    lone_s, resident_s = (report("one.jsonl", size)["prediction"]["seconds"] for size in (24, 141))
    assert lone_s - resident_s == pytest.approx(20 * (0.49 - 0.23), rel=0.1)
    eight_s = report("eight.jsonl", 24)["prediction"]["seconds"]
    assert eight_s < 8 * resident_s * 1.1, "they share their reads"


def test_the_prediction_counts_the_loading_of_models_that_take_turns(capsys, folder, monkeypatch):
    monkeypatch.setattr("gfgen.session.memory.available_bytes", lambda: 128 * 10**9)
    fields = {"prompt": "a fox", "size": "832x480", "steps": 2}
    models = {"qwen-image": {}, "wan2.2-ti2v-5b": {"frames": 49}}
    put(folder / "two.jsonl", *[fields | {"model": name} | each for name, each in models.items()])
    seconds = []
    for gpu_gb in (141, 80, 40):
        devices = Devices(CUDA, 1, (Gpu("NVIDIA H200", gpu_gb * 10**9),))
        monkeypatch.setattr("gfgen.session.ranks.choose_devices", lambda *_, found=devices, **__: found)
        code, out, err = gfgen(capsys, "check", "two.jsonl", "--random-weights", "--json")
        assert code == 0, err
        found = json.loads(out)
        told = "loading of models that take turns is at 1 GB a second, which is an estimate"
        assert (told in found["notes"]) is (gpu_gb < 141)
        seconds.append(found["prediction"]["seconds"])
    assert seconds[1] == pytest.approx(seconds[0] + 24.2, abs=0.5), "of Wan, which comes second"
    assert seconds[2] > seconds[1]
