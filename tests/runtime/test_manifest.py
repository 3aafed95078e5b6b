"""The manifest: its frozen keys, its repair, and what a second run may skip."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from acted_run import ActedRun, Part, job_info
from builders import finished_jobs

from gfgen.errors import OutputError
from gfgen.runtime.core.observer import JobInfo, JobOutcome
from gfgen.runtime.files.index import ManifestIndex
from gfgen.runtime.files.manifest import (
    ManifestWriter,
    ended_at,
    read_files,
    read_manifest,
)
from gfgen.runtime.ipc.content import Content

FROZEN_KEYS = [
    "version", "id", "status", "file", "size_bytes", "sha256", "prompt", "negative_prompt", "image", "model",
    "family", "tag", "priority", "seed", "shape_asked", "shape", "rounded", "steps", "scales",
    "spec_hash", "job_file", "timings", "deadline_s", "met_deadline", "layouts", "error", "warnings",
    "written_at",
]  # fmt: skip
FROZEN_TIMINGS = ["arrival_s", "started_s", "ended_s", "latency_s", "busy_s", "rank_s", "stages_s"]


def outcome(info: JobInfo, **changes: Any) -> JobOutcome:
    plain = JobOutcome(
        info=info,
        status="done",
        arrival_s=1.0,
        started_s=2.0,
        ended_s=5.0,
        deadline_s=6.0,
        busy_s=2.5,
        layouts=("[0]", "[1,2] u2"),
        timings={"encode": 0.5, "denoise": 2.0},
        written=Content(5, "hash") if changes.get("status", "done") == "done" else None,
    )
    return replace(plain, **changes)


def write(folder: Path, *outcomes: JobOutcome) -> Path:
    writer = ManifestWriter(folder / "manifest.jsonl", now=lambda: 0.0)
    for each in outcomes:
        writer.ended(each)
    writer.close()
    return folder / "manifest.jsonl"


def test_keys_of_a_line_are_frozen(tmp_path: Path) -> None:
    path = write(tmp_path, outcome(job_info("a")))
    entry = json.loads(path.read_text())
    assert list(entry) == FROZEN_KEYS
    assert list(entry["timings"]) == FROZEN_TIMINGS
    assert entry["version"] == 1
    later = read_manifest(write(tmp_path, outcome(job_info("a"), first_uses_s=1.5)))["a"]
    assert list(later["timings"]) == [*FROZEN_TIMINGS, "first_uses_s"], "only of jobs with such tasks"


def test_shape_is_that_of_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, outcome(job_info("a"), made=(9, 128, 256)))
    shape = json.loads(path.read_text())["shape"]
    assert (shape["frames"], shape["height"], shape["width"]) == (9, 128, 256)
    assert list(shape) == ["width", "height", "frames", "fps"]


def test_line_says_what_was_asked_what_ran_and_how_it_went(tmp_path: Path) -> None:
    entry = read_manifest(write(tmp_path, outcome(job_info("a", asked_height=60))))["a"]
    assert entry["rounded"] == "96x60 -> 96x64"
    assert entry["shape_asked"] == {"width": None, "height": 60, "frames": None, "fps": None}
    assert entry["shape"] == {"width": 96, "height": 64, "frames": 9, "fps": 8}
    assert entry["timings"]["latency_s"] == 4.0
    assert entry["timings"]["stages_s"] == {"encode": 0.5, "denoise": 2.0}
    assert (entry["deadline_s"], entry["met_deadline"]) == (6.0, True)
    assert (entry["size_bytes"], entry["sha256"]) == (5, "hash")
    assert entry["scales"] == {"guidance_scale": 5.0}
    assert entry["layouts"] == ["[0]", "[1,2] u2"]


def test_failed_job_has_its_reason_and_no_file(tmp_path: Path) -> None:
    failed = outcome(job_info("a"), status="failed", error="denoise 1: out of memory", started_s=None)
    entry = read_manifest(write(tmp_path, failed))["a"]
    assert (entry["status"], entry["error"]) == ("failed", failed.error)
    assert (entry["file"], entry["size_bytes"]) == (None, None)
    assert entry["met_deadline"] is False


def test_rounding_note_is_absent_when_nothing_was_rounded() -> None:
    info = job_info("a", asked_height=64)
    assert info.rounding is None
    assert replace(info, asked=replace(info.asked, frames=10)).rounding == "10 -> 9 frames"


def test_latest_line_of_a_job_counts(tmp_path: Path) -> None:
    write(tmp_path, outcome(job_info("a"), status="failed", error="x"), outcome(job_info("b")))
    path = write(tmp_path, outcome(job_info("a")))
    assert {name: entry["status"] for name, entry in read_manifest(path).items()} == {
        "a": "done",
        "b": "done",
    }
    assert len(path.read_text().splitlines()) == 3


def test_torn_last_line_is_passed_over_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = write(tmp_path, outcome(job_info("a")), outcome(job_info("b")))
    torn = path.read_bytes()[:-40]
    path.write_bytes(torn)
    assert list(read_manifest(path)) == ["a"]
    write(tmp_path, outcome(job_info("c")))
    assert list(read_manifest(path)) == ["a", "c"]


SPOILT_LINES = (
    "[1]",
    "null",
    '{"version": 99, "id": "a"}',
    '{"version": 1}',
    '{"version": 1, "id": ["a"]}',
    '{"version": 1, "id": "a", "status"',
    "\udcff",
)


@pytest.mark.parametrize("line", SPOILT_LINES)
def test_lines_that_are_not_ours_count_as_absent_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    path = write(tmp_path, outcome(job_info("b")))
    path.write_bytes(line.encode("utf-8", "surrogateescape") + b"\n" + path.read_bytes())
    assert list(read_manifest(path)) == ["b"]
    assert "manifest.jsonl: no manifest lines, ignored: 1, such as " in caplog.text


def test_many_lines_that_are_not_ours_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, outcome(job_info("b")))
    path.write_bytes(b"<html>\n" * 3 + path.read_bytes())
    assert list(read_manifest(path)) == ["b"]
    assert ManifestIndex(tmp_path).get("b")
    assert [each.getMessage() for each in caplog.records] == [
        f"{path}: no manifest lines, ignored: 3, such as '<html>'"
    ] * 2


def test_a_job_whose_line_lost_its_keys_runs_again(tmp_path: Path) -> None:
    info = job_info("a")
    (tmp_path / "a.mp4").write_bytes(b"12345")
    path = write(tmp_path, outcome(info))
    assert finished_jobs(path, [info])
    whole = json.loads(path.read_text())
    for key in ("status", "file", "size_bytes", "spec_hash"):
        path.write_text(json.dumps({name: value for name, value in whole.items() if name != key}))
        assert not finished_jobs(path, [info])


def test_a_line_whose_end_an_editor_took_away_still_counts(tmp_path: Path) -> None:
    path = write(tmp_path, outcome(job_info("a")))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    write(tmp_path, outcome(job_info("b")))
    assert list(read_manifest(path)) == ["a", "b"]


def test_prompt_in_any_script_stays_on_one_line(tmp_path: Path) -> None:
    prompt = "\u96ea\n\u2028\x85\ud800 end"
    path = write(tmp_path, outcome(job_info("a", prompt=prompt)), outcome(job_info("b")))
    assert read_manifest(path)["a"]["prompt"] == prompt.replace("\ud800", "?")
    assert len(path.read_bytes().split(b"\n")) == 3


def test_jobs_that_are_done_unchanged_and_still_there_are_finished(tmp_path: Path) -> None:
    info = job_info("a")
    (tmp_path / "a.mp4").write_bytes(b"12345")
    path = write(tmp_path, outcome(info))
    assert finished_jobs(path, [info, job_info("other")]) == {"a"}


def test_changed_failed_moved_or_damaged_jobs_are_not_finished(tmp_path: Path) -> None:
    info = job_info("a")
    (tmp_path / "a.mp4").write_bytes(b"12345")
    path = write(tmp_path, outcome(info))
    assert not finished_jobs(path, [replace(info, spec_hash="other")])
    assert not finished_jobs(path, [replace(info, file="elsewhere.mp4")])
    (tmp_path / "a.mp4").write_bytes(b"123")
    assert not finished_jobs(path, [info])
    (tmp_path / "a.mp4").unlink()
    assert not finished_jobs(path, [info])
    (tmp_path / "a.mp4").write_bytes(b"12345")
    write(tmp_path, outcome(info, status="failed", error="x"))
    assert not finished_jobs(path, [info])


def test_no_manifest_means_nothing_is_finished(tmp_path: Path) -> None:
    assert finished_jobs(tmp_path / "manifest.jsonl", [job_info("a")]) == frozenset()


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*manifest\.jsonl"):
        ManifestWriter(tmp_path / "file" / "manifest.jsonl")


def test_whole_run_leaves_a_line_for_each_job(tmp_path: Path) -> None:
    parts = [Part(job_info("a")), Part(job_info("b"), fails=True)]
    ActedRun(parts, num_ranks=1, observers=[ManifestWriter(tmp_path / "manifest.jsonl")]).play()
    entries = read_manifest(tmp_path / "manifest.jsonl")
    assert {name: entry["status"] for name, entry in entries.items()} == {"a": "done", "b": "failed"}


def test_an_index_says_what_a_manifest_does_that_is_read_at_once(tmp_path: Path) -> None:
    path, index = tmp_path / "manifest.jsonl", ManifestIndex(tmp_path)
    assert (index.get("a"), index.counts()) == (None, {})

    def check() -> None:
        index.catch_up()
        lines = read_manifest(path)
        assert {name: found for name in "abc" if (found := index.get(name))} == lines
        assert index.counts() == Counter(each["status"] for each in lines.values())

    write(tmp_path, outcome(job_info("a")), outcome(job_info("b"), status="failed", error="x"))
    check()
    write(tmp_path, outcome(job_info("b")), outcome(job_info("c")))
    check()
    assert (index.get("b") or {})["status"] == "done"
    with path.open("ab") as file:
        file.write(b'{"version": 1, "id": "to')  # a line that is being written
    check()


def test_an_index_reads_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lines = write(tmp_path, *[outcome(job_info(f"job {idx}")) for idx in range(20)]), []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda line: lines.append(line) or loads(line))
    index = ManifestIndex(tmp_path)
    for _ in range(50):
        index.catch_up()
    write(tmp_path, outcome(job_info("one more")))
    index.catch_up()
    assert (index.counts(), len(lines)) == ({"done": 21}, 21)


def test_fields_of_pipelines_and_several_files_have_keys_where_they_are_used(tmp_path: Path) -> None:
    info = job_info("a")
    info = replace(info, spec=replace(info.spec, args={"strength": 0.5}, sigmas=[1.0]))
    files = (("a-1.png", 3, "one"), ("a-2.png", 4, "two"))
    path = write(tmp_path, outcome(info, files=files, written=Content(3, "one")))
    entry = json.loads(path.read_text())
    assert list(entry) == [*FROZEN_KEYS, "args", "sigmas", "outputs"]
    assert (entry["file"], entry["size_bytes"], entry["args"]) == ("a-1.png", 3, {"strength": 0.5})
    assert entry["outputs"][1] == {"file": "a-2.png", "size_bytes": 4, "sha256": "two"}
    assert read_files(path, name="a-2.png") == read_files(path)
    assert read_files(path, name="other.png") == {}
    assert {name: line["sha256"] for name, line in read_files(path).items()} == {
        "a-1.png": "one",
        "a-2.png": "two",
    }


def test_a_job_with_several_files_is_finished_while_all_of_them_are_there(tmp_path: Path) -> None:
    info = replace(job_info("a"), file="a.png")
    files = (("a-1.png", 3, "one"), ("a-2.png", 4, "two"))
    path = write(tmp_path, outcome(info, files=files, written=Content(3, "one")))
    for name, size_bytes, _ in files:
        (tmp_path / name).write_bytes(b"x" * size_bytes)
    assert finished_jobs(path, [info]) == {"a"}
    assert finished_jobs(path, [replace(info, file="b.png")]) == frozenset()
    (tmp_path / "a-2.png").unlink()
    assert finished_jobs(path, [info]) == frozenset()


def test_several_files_in_a_subfolder_are_named_with_it(tmp_path: Path) -> None:
    info = replace(job_info("a"), file="S/a.png")
    files = (("a-1.png", 3, "one"), ("a-2.png", 4, "two"))
    path = write(tmp_path, outcome(info, files=files, written=Content(3, "one")))
    assert [each["file"] for each in json.loads(path.read_text())["outputs"]] == ["S/a-1.png", "S/a-2.png"]
    (tmp_path / "S").mkdir()
    for name, size_bytes, _ in files:
        (tmp_path / "S" / name).write_bytes(b"x" * size_bytes)
    assert finished_jobs(path, [info]) == {"a"}


def test_a_line_can_say_what_the_job_was_made_with(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    writer = ManifestWriter(path, made_with=lambda info: {"weights": info.job_id})
    writer.ended(outcome(job_info("a")))
    writer.close()
    entry = json.loads(path.read_text())
    assert list(entry) == [*FROZEN_KEYS, "made_with"]
    assert entry["made_with"] == {"weights": "a"}


def test_memory_is_in_mebibytes_and_a_line_says_when_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path, outcome(job_info("a"), peak_bytes=3 * 2**19))
    entry = json.loads(path.read_text())
    assert (entry["peak_memory_mb"], entry["written_at"]) == (1.5, "1970-01-01T00:00:00Z")
    assert ended_at(entry | {"written_at": "1970-01-02T00:00:01Z"}) == 86401.0
    assert ended_at({}) == 0.0


def test_memory_has_one_digit_after_the_point(tmp_path: Path) -> None:
    path = write(tmp_path, outcome(job_info("a"), peak_bytes=1234567))
    assert json.loads(path.read_text())["peak_memory_mb"] == 1.2
