"""Trace files: valid Chrome trace events, and the same run when read back."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from acted_run import ActedRun, Part, batch, job_info

from gfgen.cli.shown.timeline import joined, merged, read_timeline, tasks_of_jobs
from gfgen.errors import InputError
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.trace import FIRST_WRITER_TID, TraceWriter
from gfgen.runtime.ipc.messages import MemoryUse

NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "i": {"name", "pid", "tid", "ts", "s", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "b": {"name", "cat", "id", "pid", "tid", "ts", "args"},
    "e": {"name", "cat", "id", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "t": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
Entries = list[dict[str, Any]]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve jobs on four ranks, some on two at a time; one fails."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    ActedRun(batch(12, max_degree=2), num_ranks=4, observers=[TraceWriter(path)]).play()
    return path


@pytest.fixture(scope="module")
def entries(trace: Path) -> Entries:
    loaded: Entries = json.loads(trace.read_text())
    return loaded


def of(entries: Entries, *phases: str) -> Entries:
    return [entry for entry in entries if entry["ph"] in phases]


def test_every_event_has_what_its_phase_needs(entries: Entries) -> None:
    for entry in entries:
        missing = NEEDED[entry["ph"]] - entry.keys()
        assert not missing, (entry, missing)
    assert {entry["ph"] for entry in entries} == NEEDED.keys()


def test_lanes_are_named_after_ranks_and_writers(entries: Entries) -> None:
    names = {e["tid"]: e["args"]["name"] for e in of(entries, "M") if e["name"] == "thread_name"}
    assert {tid: names[tid] for tid in range(4)} == {tid: f"rank {tid}" for tid in range(4)}
    assert names[FIRST_WRITER_TID] == "writer 0"
    assert {(e["pid"], e["tid"]) for e in of(entries, "X")} <= {(1, tid) for tid in names}


def test_slices_of_a_lane_do_not_overlap(entries: Entries) -> None:
    ended_at: dict[int, float] = defaultdict(float)
    for entry in sorted(of(entries, "X"), key=lambda entry: (entry["tid"], entry["ts"], entry["dur"])):
        assert entry["ts"] >= ended_at[entry["tid"]] - 1e-3  # rounded to nanoseconds
        ended_at[entry["tid"]] = entry["ts"] + entry["dur"]


def test_task_has_a_slice_on_each_of_its_ranks(entries: Entries) -> None:
    tasks = [entry for entry in of(entries, "X") if "dispatch" in entry["args"]]
    lanes = defaultdict(set)
    for entry in tasks:
        lanes[entry["args"]["dispatch"], tuple(entry["args"]["ranks"])].add(entry["tid"])
    assert all(seen == set(ranks) for (_, ranks), seen in lanes.items())
    assert any(len(seen) == 2 for seen in lanes.values())
    first = next(entry for entry in tasks if entry["args"]["stage"] == "denoise")
    assert first["name"] == f"denoise {first['args']['step']} {first['args']['job']}"
    assert {"job", "prompt", "stage", "step", "layout", "dispatch", "waited_ms", "moved_ms"} <= first[
        "args"
    ].keys()


def test_flow_of_each_job_starts_once_and_ends_once_inside_slices(entries: Entries) -> None:
    spans = defaultdict(list)
    for entry in of(entries, "X"):
        spans[entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    flows = Counter((entry["id"], entry["ph"]) for entry in of(entries, "s", "f"))
    assert flows == {(number, phase): 1 for number in range(1, 13) for phase in "sf"}
    for entry in of(entries, "s", "t", "f"):
        assert any(start <= entry["ts"] <= end for start, end in spans[entry["tid"]]), entry


def test_open_jobs_are_counted_down_to_none(entries: Entries) -> None:
    counts = [entry["args"]["jobs"] for entry in of(entries, "C")]
    assert counts[-1] == 0
    assert max(counts) > 1


def test_arrivals_failures_and_missed_deadlines_are_marked(entries: Entries) -> None:
    names = [entry["name"] for entry in of(entries, "i")]
    assert sum(name.endswith(" arrives") for name in names) == 12
    assert any(name.endswith("denoise 1 failed") for name in names)
    assert any(name.endswith(" missed its deadline") for name in names)


def test_other_events_are_marked(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.json")
    writer.began((job_info("a"),), num_ranks=1, policy="srtf")
    for event in (
        events.PolicyChanged(1.0, "fcfs", "it failed"),
        events.StopRequested(2.0, 15),
        events.RankLost(3.0, 0, 1, "killed"),
        events.JobTimedOut(4.0, "a"),
        events.OutputFailed(5.0, "a", "disk full"),
    ):
        writer.applied(event)
    writer.close()
    marks = of(json.loads((tmp_path / "t.json").read_text()), "i")
    assert [mark["name"] for mark in marks[1:]] == [
        "policy fcfs",
        "stop requested",
        "rank 0 lost",
        "a timed out",
        "a not written",
    ]


def test_first_uses_are_marked_on_the_ranks_whose_they_are(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.json")
    writer.began((job_info("a"),), num_ranks=2, policy="srtf")
    writer.dispatched(Dispatch(1, Task("a", 2, Stage.DENOISE, 0), Layout((0, 1), ulysses=2), 0.0, 0.0, 1.0))
    times = (events.RankTimes(0, 0.0, 1.0, is_first_use=True), events.RankTimes(1, 0.0, 1.0))
    writer.applied(events.TaskDone(1.0, 1, times))
    writer.close()
    slices = of(json.loads((tmp_path / "t.json").read_text()), "X")
    assert [each["args"].get("first_use") for each in slices] == [True, None]


def test_what_ranks_took_of_memory_is_in_the_trace(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    writer.began((), num_ranks=2, policy="srtf")
    writer.measured({1: MemoryUse(7, {"wan": 5}, 6, 2, {"wan 64x64 decode": 3})})
    writer.close()
    (found,) = [e for e in json.loads((tmp_path / "trace.json").read_text()) if e["name"] == "memory"]
    assert (found["tid"], found["ts"]) == (1, 0.0)
    assert found["args"] == {
        "host_bytes": 7,
        "device_peaks": {"wan": 5},
        "reserved_bytes": 6,
        "arena_bytes": 2,
        "task_peaks": {"wan 64x64 decode": 3},
    }


def test_a_file_is_on_the_lane_of_the_writer_that_wrote_it(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.json")
    writer.began((job_info("a"), job_info("b"), job_info("c")), num_ranks=1, policy="srtf")
    for time_s, job_id, idx in ((1.0, "a", 1), (2.0, "b", 0), (3.0, "c", 1)):
        writer.applied(events.OutputWritten(time_s, job_id, f"{job_id}.png", 1, 0.5, writer=idx))
    writer.close()
    written = json.loads((tmp_path / "t.json").read_text())
    assert [(e["name"], e["tid"]) for e in of(written, "X")] == [
        ("write a", FIRST_WRITER_TID + 1),
        ("write b", FIRST_WRITER_TID + 0),
        ("write c", FIRST_WRITER_TID + 1),
    ]
    names = [e["args"]["name"] for e in of(written, "M") if e["name"] == "thread_name"]
    assert names == ["rank 0", "writer 1", "writer 0"]


def test_reading_gives_the_run_back(trace: Path) -> None:
    timeline = read_timeline(trace)
    assert (timeline.policy, timeline.num_ranks, len(timeline.jobs)) == ("srtf", 4, 12)
    assert Counter(job.status for job in timeline.jobs.values()) == {"done": 11, "failed": 1}
    done = next(job for job in timeline.jobs.values() if job.met_deadline)
    mine = [slice_ for slice_ in timeline.tasks if slice_.job_id == done.job_id]
    assert [slice_.stage for slice_ in mine][:2] == ["encode", "prepare"]
    assert mine[-1].stage == "decode"
    assert [block.stage for block in timeline.writes if block.job_id == done.job_id] == ["write"]


def test_run_that_ends_early_leaves_valid_json_with_unfinished_jobs(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.json")
    writer.began((job_info("a"),), num_ranks=1, policy="srtf")
    writer.applied(events.JobArrived(0.5, "a"))
    writer.close()
    json.loads((tmp_path / "t.json").read_text())
    assert read_timeline(tmp_path / "t.json").jobs["a"].status == "unfinished"


def test_trace_that_was_never_begun_is_valid(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "t.json").close()
    assert json.loads((tmp_path / "t.json").read_text()) == []
    assert not read_timeline(tmp_path / "t.json").tasks


def test_killed_run_leaves_a_trace_that_can_be_read(trace: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.json"
    torn.write_text(trace.read_text()[: -len(trace.read_text()) // 3])
    timeline = read_timeline(torn)
    assert timeline.num_ranks == 4
    assert 0 < len(timeline.tasks) < len(read_timeline(trace).tasks)


@pytest.mark.parametrize(
    "content", [b"hello", b"{}", b'{"a": 1}', b'[{"ph": "X", "args": {"stage": 1}}]', b"\xff\xfe"]
)
def test_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(InputError, match=r"t\.json"):
        read_timeline(tmp_path / "t.json")


def test_trace_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(Path("/dev/full"))
    ActedRun(batch(12), num_ranks=4, observers=[writer]).play()
    assert "the trace /dev/full ends early: No space left on device" in caplog.text


def test_blocks_join_neighbouring_ranks_and_steps_of_a_job_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    ActedRun([Part(job_info("a"), degree=4)], num_ranks=4, observers=[TraceWriter(path)]).play()
    timeline = read_timeline(path)
    blocks = list(joined(timeline.tasks))
    assert [block.lanes for block in blocks] == [(0, 0), (0, 0), *[(0, 3)] * 4, (0, 0)]
    assert [(s.stage, s.lanes) for s in merged(blocks)] == [
        ("encode", (0, 0)),
        ("decode", (0, 0)),
        ("denoise", (0, 3)),
    ]
    assert len(tasks_of_jobs(blocks)["a"]) == 7
    assert [block.lanes for block in timeline.writes] == [(0, 0)]


def test_waits_moves_and_sources_of_a_task_are_told_in_microseconds(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.json")
    writer.began((job_info("a"),), num_ranks=2, policy="srtf")
    step = Dispatch(1, Task("a", 2, Stage.DENOISE, 0), Layout.single(0), 0.0, 0.0, 1.0)
    writer.dispatched(step)
    writer.dispatched(replace(step, number=2, source=Layout.single(1)))
    writer.applied(events.TaskDone(2.0, 1, (events.RankTimes(0, 1.0, 2.0, waited_s=0.25, moved_s=0.5),)))
    writer.applied(events.TaskDone(3.0, 2, (events.RankTimes(0, 2.0, 3.0, waited_s=1e-6, moved_s=1e-6),)))
    writer.close()
    slices = of(json.loads((tmp_path / "t.json").read_text()), "X")
    found = [(each["cat"], each["ts"], each["dur"]) for each in slices]
    assert found == [
        ("wait", 250_000.0, 250_000.0),
        ("move", 500_000.0, 500_000.0),
        ("denoise", 1_000_000.0, 1_000_000.0),
        ("denoise", 2_000_000.0, 1_000_000.0),
    ]
    assert [each["args"]["source"] for each in slices[2:]] == [None, str(Layout.single(1))]


def test_a_missed_deadline_is_marked_with_how_late_the_job_is(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.json")
    info = job_info("a")
    writer.began((info, job_info("b")), num_ranks=1, policy="srtf")
    writer.applied(events.JobArrived(0.25, "a"))
    writer.ended(JobOutcome(info, "done", ended_s=3.0, deadline_s=1.25))
    writer.measured({0: MemoryUse(7, {}, 6, 2, {})})
    writer.close()
    marks = {each["name"]: each for each in of(json.loads((tmp_path / "t.json").read_text()), "i")}
    assert marks["a missed its deadline"]["args"]["late_s"] == 1.75
    assert marks["a missed its deadline"]["ts"] == 1_250_000.0
