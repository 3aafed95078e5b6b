"""`gfgen run` with real workers and tiny models; where signals come, as a process of its own."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from commands import gfgen

from gfgen.runtime.files.outputs import read_metadata

HERE = Path(__file__).resolve().parents[1]
JOBS = [
    {"id": "fox", "prompt": "a red fox", "model": "tiny-qwen-image", "size": "64x64", "steps": 3},
    {"id": "sea", "prompt": "the sea", "model": "tiny-wan", "size": "70x64", "frames": 6, "steps": 3},
]


@pytest.fixture
def folder(tmp_path, tiny_models):
    with (tmp_path / "night.jsonl").open("w") as file:
        for job in JOBS:
            file.write(json.dumps(job) + "\n")
    return tmp_path


def start(folder, *arguments, module="gfgen"):
    command = [sys.executable, "-m", module, "run", "night.jsonl", "--ranks", "2", *arguments]
    env = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def run(folder, *arguments):
    """(exit code, standard output, standard error)."""
    return gfgen(folder, "run", "night.jsonl", "--ranks", "2", *arguments)


def manifest(folder):
    lines = (folder / "outputs/night/manifest.jsonl").read_text().splitlines()
    return {entry["id"]: entry for entry in map(json.loads, lines)}


def test_a_job_file_becomes_files_a_second_run_skips_them_and_a_third_makes_what_has_changed(folder):
    code, out, err = run(folder, "--trace", "trace.json")
    assert code == 0, err
    assert out.splitlines()[-1] == "files and manifest.jsonl are in outputs/night/"
    outputs = sorted(os.listdir(folder / "outputs/night"))
    assert outputs == [".gfgen.live.json", "fox.png", "journal.jsonl", "manifest.jsonl", "sea.mp4"]
    entries = manifest(folder)
    assert {entry["status"] for entry in entries.values()} == {"done"}
    assert "70x64" in entries["sea"]["rounded"]
    assert json.loads((folder / "trace.json").read_text())

    before = {name: (folder / "outputs/night" / name).stat().st_mtime_ns for name in ("fox.png", "sea.mp4")}
    code, out, err = run(folder, "--trace", "again.json")
    assert code == 0
    assert "2 skipped" in out
    assert "--trace has no effect" in err
    after = {name: (folder / "outputs/night" / name).stat().st_mtime_ns for name in before}
    assert before == after

    owl = JOBS[0] | {"id": "owl"}
    with (folder / "night.jsonl").open("w") as file:
        file.writelines(json.dumps(job) + "\n" for job in (JOBS[0] | {"prompt": "an old fox"}, JOBS[1], owl))
    third = start(folder)
    assert any("starting 2 ranks" in line for line in third.stderr)
    (folder / "outputs/night/owl.png").write_text("mine")  # after admission, and before any file is written
    _, err = third.communicate(timeout=120)
    assert third.returncode == 1
    assert "outputs/night/owl.png: another file got this name during the run and was kept" in err
    assert (folder / "outputs/night/owl.png").read_text() == "mine"
    entries = manifest(folder)
    assert {name: entry["status"] for name, entry in entries.items()} == {
        "fox": "done", "sea": "done", "owl": "failed",
    }  # fmt: skip
    for name in ("fox", "sea"):
        content = (folder / "outputs/night" / entries[name]["file"]).read_bytes()
        assert entries[name]["sha256"] == hashlib.sha256(content).hexdigest()
        assert entries[name]["job_file"] == "../../night.jsonl"
    assert (folder / "outputs/night/fox.png").stat().st_mtime_ns > before["fox.png"]
    assert (folder / "outputs/night/sea.mp4").stat().st_mtime_ns == before["sea.mp4"]


def test_a_video_becomes_a_file_of_another_format_or_a_folder_of_frames(folder):
    sea = JOBS[1]
    jobs = [
        sea | {"id": "editor", "output": "editor.mov"},
        sea | {"id": "web", "format": "webm"},
        sea | {"id": "frames", "format": "png", "frames": 9},
        sea | {"id": "deep", "format": "png16"},
        JOBS[0] | {"id": "one", "format": "png16"},
    ]
    (folder / "night.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    _, _, err = run(folder)
    assert "done frames: frames/0001.png to 0009.png" in err
    outputs, entries = folder / "outputs/night", manifest(folder)
    names = [f"frames/000{number}.png" for number in range(1, 10)]
    assert [each["file"] for each in entries["frames"]["outputs"]] == names
    files = {entry["file"] for entry in entries.values()}
    assert files == {"editor.mov", "web.webm", names[0], "deep/0001.png", "one.png"}
    for name in ("deep/0001.png", "deep/0005.png", "one.png"):
        assert (outputs / name).read_bytes()[24] == 16, "bits per colour"
        assert read_metadata(outputs / name)["format"] == "png16"
    assert sorted(os.listdir(outputs / "frames")) == [Path(name).name for name in names]
    line = read_metadata(outputs / names[1])
    assert (line["format"], line["frames"]) == ("png", 9)

    (outputs / names[2]).unlink()
    assert "4 skipped" in run(folder)[1]
    (folder / "night.jsonl").write_text("".join(json.dumps(job | {"frames": 5}) + "\n" for job in jobs[2:3]))
    run(folder)
    assert sorted(os.listdir(outputs / "frames")) == [Path(name).name for name in names[:5]]
    assert [each["file"] for each in manifest(folder)["frames"]["outputs"]] == names[:5]


def test_models_that_do_not_fit_into_memory_together_take_turns(folder):
    """Their weights are 13.0 and 6.9 MB."""
    code, out, err = run(folder, "--memory", "18MB", "--log-json")
    assert code == 0, err
    assert "not all models fit together: they take turns, tiny-qwen-image first" in err
    events = Counter(json.loads(line).get("event") for line in err.splitlines())
    assert (events["run_began"], events["job_started"], events["job_done"]) == (1, len(JOBS), len(JOBS))
    ended = json.loads(out)
    assert (ended["event"], ended["jobs"]["done"], ended["model_changes"]["times"]) == (
        "run_ended", len(JOBS), 1,
    )  # fmt: skip
    assert {"time", "level", "logger", "message"} < ended.keys()
    assert (ended["num_ranks"], ended["stopped_by"], ended["policy_fault"]) == (2, None, None)
    assert ended["waited_share"] >= 0
    assert ended["memory"]["host_bytes"] > 0
    assert {entry["status"] for entry in manifest(folder).values()} == {"done"}
    events = (folder / "outputs/night/journal.jsonl").read_text()
    assert events.count('"ModelsChanged"') == 1
    assert events.count('"RankLoaded"') in (1, 2)  # the other may have done all before this one is ready


def test_a_model_that_does_not_fit_at_all_is_refused_with_the_numbers(folder):
    code, _, err = run(folder, "--memory", "12MB")
    assert code == 2
    assert "tiny-qwen-image on 2 ranks: at least 13.0 MB of memory needed, 12.0 MB available" in err


LONG = JOBS[1] | {"id": "long", "steps": 100}


ONE_RANK_A_STEP = ("--policy", "srtf")
"""So that files are the same bit by bit: on several ranks their number decides what is rounded."""


def interrupt(folder, *numbers, options=(), module="gfgen"):
    """Start the run, and send signals when the first file is there, and the other job is in its steps."""
    process = start(folder, *options, module=module)
    deadline = time.monotonic() + 60
    journal = folder / "outputs/night/journal.jsonl"
    while not (folder / "outputs/night/fox.png").exists() or journal.read_text().count('"TaskDone"') < 10:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.1)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, err


def test_a_stopped_run_goes_on_at_the_step_where_it_stopped(folder):
    (folder / "night.jsonl").write_text(f"{json.dumps(JOBS[0])}\n{json.dumps(LONG)}\n")
    code, err = interrupt(folder, signal.SIGINT, options=ONE_RANK_A_STEP)
    assert code == 130
    assert "run the same command again to go on" in err
    assert os.listdir(folder / "outputs/night/.resume") == ["long.state"]
    code, _, err = run(folder, *ONE_RANK_A_STEP)
    assert code == 0, err
    assert re.search(r"resumed long at denoise [1-9]\d* on rank", err)
    rounded, resumed = manifest(folder)["long"]["warnings"]
    assert re.fullmatch(r"rounded by .*: 70x64 -> 64x64, 6 -> 5 frames", rounded)
    assert re.fullmatch(r"resumed at denoise [1-9]\d*", resumed)
    assert sorted(os.listdir(folder / "outputs/night")) == [
        ".gfgen.live.json",
        "fox.png",
        "journal.jsonl",
        "long.mp4",
        "manifest.jsonl",
    ]
    stopped = (folder / "outputs/night/long.mp4").read_bytes()
    run(folder, *ONE_RANK_A_STEP, "--output", "undisturbed")
    assert (folder / "undisturbed/long.mp4").read_bytes() == stopped


def fake(folder):
    """Jobs of workers that compute nothing: how signals end a run is the same."""
    common = {"prompt": "a fox", "model": "fake-image"}
    jobs = ({"id": "fox", "steps": 3}, {"id": "long", "steps": 200, "flow_shift": 0.05})
    (folder / "night.jsonl").write_text("".join(json.dumps(common | job) + "\n" for job in jobs))


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGXCPU, signal.SIGXCPU), 152),
    ],
    ids=["twice", "xcpu"],
)
def test_signals_stop_the_run_with_one_line(folder, numbers, code):
    fake(folder)
    returned, err = interrupt(folder, *numbers, options=ONE_RANK_A_STEP, module="fake_run")
    assert returned == code
    assert err.splitlines()[-1].startswith("gfgen: stopped")
    is_kept = numbers != (signal.SIGINT, signal.SIGINT)
    assert os.path.exists(folder / "outputs/night/.resume/long.state") or not is_kept


def test_with_json_lines_a_stopped_run_ends_with_its_events(folder):
    fake(folder)
    options = ["--log-json", "--log-file", "run.log"]
    returned, err = interrupt(folder, signal.SIGUSR1, options=options, module="fake_run")
    assert returned == 138
    last = json.loads(err.splitlines()[-1])
    assert (last["event"], last["exit_code"]) == ("stopped", 138)
    entries = [json.loads(line) for line in (folder / "run.log").read_text().splitlines()]
    (ended,) = [entry for entry in entries if entry.get("event") == "run_ended"]
    assert (ended["stopped_by"], ended["jobs"]["done"], ended["jobs"]["unfinished"]) == ("SIGUSR1", 1, 1)


def test_a_signal_while_the_models_load_stops_the_run_with_one_line(folder):
    process = start(folder)
    assert any("starting 2 ranks" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("gfgen: stopped while the models were loading")
    assert "Traceback" not in err


def test_valid_jobs_of_a_faulty_file_run_when_asked_to(folder):
    with (folder / "night.jsonl").open("a") as file:
        file.write('{"promt": "oops"}\n')
    code, out, err = run(folder, "--skip-invalid", "--quiet")
    assert code == 1
    assert "line 3: promt: not a field; did you mean prompt?" in err
    assert out == "files and manifest.jsonl are in outputs/night/\n"
    assert {entry["status"] for entry in manifest(folder).values()} == {"done"}
