"""A run as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    process 1 "ranks"     a lane per rank, named after its node on a cluster; a slice per
                          (dispatch, rank), waits and moves before it; lanes for the writers
    process 2 "jobs"      a span per job, from its arrival to its end

A job's slices are tied together by flow arrows. The file is the array form of the format,
whose end may be missing, so it opens even if the run was killed; `close` completes it.
Source: "Trace Event Format" (Google, 2016), the reference that both viewers name.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from gfgen.errors import OutputError
from gfgen.layout import Layout
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.ipc.messages import MemoryUse

logger = logging.getLogger(__name__)

RANKS_PID, JOBS_PID = 1, 2
MAX_WRITERS = 100
FIRST_WRITER_TID = 100 * MAX_WRITERS  # above all ranks: nodes that join get new numbers; once it was 100
SHORT_PROMPT_CHARS = 80
MIN_SLICE_S = 10e-6  # waits and moves below this are in the slice's args only

_encode = json.JSONEncoder().encode
Args = Mapping[str, Any]


@dataclass(slots=True)
class _JobLane:
    number: int
    info: JobInfo
    id_text: str = field(init=False)  # as JSON; the entries of steps, most of the file, are joined texts
    prompt_text: str = field(init=False)
    has_arrived: bool = False
    has_ended: bool = False
    last_place: tuple[int, float] | None = None  # lane and time in its latest slice, where its flow goes on

    def __post_init__(self) -> None:
        self.id_text = _encode(self.info.job_id)
        self.prompt_text = _encode(self.info.spec.prompt[:SHORT_PROMPT_CHARS])


class _TraceFile:
    """The array of entries. After an error it ends with a warning, and the run goes on."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream: TextIO | None = path.open("w", encoding="ascii")
        except OSError as error:
            raise OutputError(f"cannot write the trace {path}: {error.strerror}") from error
        self._path = path
        self._separator = "[\n"

    def write(self, entry: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(self._separator + entry)
        except OSError as error:
            self._give_up(self._stream, error)
        self._separator = ",\n"

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            stream.write("\n]\n" if self._separator == ",\n" else "[]\n")
            stream.close()
        except OSError as error:
            self._give_up(stream, error)

    def _give_up(self, stream: TextIO, error: OSError) -> None:
        logger.warning("the trace %s ends early: %s", self._path, error.strerror)
        self._stream = None
        with suppress(OSError):  # it tries to write its buffer again
            stream.close()


class TraceWriter(Observer):
    def __init__(self, path: Path, *, is_simulated: bool = False) -> None:
        self._file = _TraceFile(path)
        self._is_simulated = is_simulated
        self._jobs: dict[str, _JobLane] = {}
        self._dispatches: dict[int, Dispatch] = {}
        self._latest: dict[int, tuple[float, float]] = {}  # by lane: the latest slice; they never overlap
        self._num_open = 0
        self._last_s = 0.0

    # Observer ----------------------------------------------------------------------------

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self._jobs = {info.job_id: _JobLane(number, info) for number, info in enumerate(jobs, start=1)}
        self._name("process", "ranks", place=0)
        self._name("process", "jobs", pid=JOBS_PID, place=1)
        for rank in range(num_ranks):
            self._name_lane(rank, f"rank {rank}")
        args: dict[str, Any] = {"policy": policy, "num_ranks": num_ranks, "num_jobs": len(jobs)}
        if self._is_simulated:
            args["simulated"] = True
        self._instant("run", 0.0, scope="g", args=args)

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        first = len(self._jobs) + 1
        self._jobs |= {info.job_id: _JobLane(number, info) for number, info in enumerate(jobs, start=first)}

    def node_joined(self, node: str, ranks: range) -> None:
        for rank in ranks:
            self._name_lane(rank, f"node {node}, rank {rank}")

    def node_left(self, node: str) -> None:
        self._instant(f"node {node} is gone", self._last_s, scope="g", args={"node": node})

    def dispatched(self, dispatch: Dispatch) -> None:
        self._dispatches[dispatch.number] = dispatch

    def applied(self, event: Event) -> None:
        self._last_s = max(self._last_s, event.time_s)
        match event:
            case events.TaskDone():
                self._task_done(event)
            case events.TaskFailed():
                self._task_failed(event)
            case events.OutputWritten():
                self._output_written(event)
            case events.JobArrived():
                self._arrived(event)
            case events.JobTimedOut() | events.JobCancelled() if self._is_open(event.job_id):
                what = "cancelled" if isinstance(event, events.JobCancelled) else "timed out"
                self._instant(f"{event.job_id} {what}", event.time_s, args={"job": event.job_id})
            case events.OutputFailed() | events.FramesLost():
                args = {"job": event.job_id, "reason": event.reason}
                self._instant(f"{event.job_id} not written", event.time_s, args=args)
            case events.RankLost():
                args = {"reason": event.reason}
                self._instant(f"rank {event.rank} lost", event.time_s, lane=event.rank, args=args)
            case events.PolicyChanged():
                args = {"policy": event.policy, "reason": event.reason}
                self._instant(f"policy {event.policy}", event.time_s, scope="g", args=args)
            case events.ModelsChanged() | events.LoadFailed():
                names = ", ".join(event.models)
                change = {"models": list(event.models), "reason": event.reason}
                what = f"models {names}" if isinstance(event, events.ModelsChanged) else f"{names} not loaded"
                self._instant(what, event.time_s, scope="g", args=change)
            case events.RankLoaded():
                start_s = event.time_s - event.load_s
                self._slice('"load models"', event.rank, start_s, event.time_s, "{}")
            case events.StopRequested():
                signal = {"signal": event.signal_number}
                self._instant("stop requested", event.time_s, scope="g", args=signal)

    def ended(self, outcome: JobOutcome) -> None:
        job = self._jobs.get(outcome.info.job_id)
        if job is None:
            return
        deadline_s = outcome.deadline_s
        if outcome.met_deadline is False and deadline_s is not None:
            args = {"job": outcome.info.job_id, "late_s": round(outcome.ended_s - deadline_s, 6)}
            self._instant(f"{outcome.info.job_id} missed its deadline", max(0.0, deadline_s), args=args)
        self._end_job(job, outcome.ended_s, status=outcome.status, outcome=outcome)

    def measured(self, use: Mapping[int, MemoryUse]) -> None:
        for rank, taken in sorted(use.items()):
            args = {**asdict(taken), "device_peaks": dict(taken.device_peaks)}
            self._instant("memory", self._last_s, lane=rank, args=args)

    def close(self) -> None:
        """Complete the file; jobs that are still open are marked unfinished."""
        for job in self._jobs.values():
            if job.has_arrived and not job.has_ended:
                self._end_job(job, self._last_s, status="unfinished")
        self._file.close()

    # Slices ------------------------------------------------------------------------------

    def _task_done(self, event: events.TaskDone) -> None:
        dispatch = self._dispatches.pop(event.dispatch)
        job_id, job = dispatch.task.job_id, self._jobs[dispatch.task.job_id]
        task_args, name = _task_args(dispatch, job), f'"{dispatch.task} {job.id_text[1:]}'
        for times in event.times:
            moving_s = times.started_s - times.moved_s
            if times.waited_s >= MIN_SLICE_S:
                self._gap(f"wait {job_id}", times.rank, start_s=moving_s - times.waited_s, end_s=moving_s)
            if times.moved_s >= MIN_SLICE_S:
                self._gap(f"move {job_id}", times.rank, start_s=moving_s, end_s=times.started_s)
            waited_ms, moved_ms = round(times.waited_s * 1e3, 3), round(times.moved_s * 1e3, 3)
            args = f'{task_args}, "waited_ms": {waited_ms}, "moved_ms": {moved_ms}'
            if times.idle_s is not None:
                args += f', "idle_ms": {round(times.idle_s * 1e3, 3)}'
            if times.is_first_use:
                args += ', "first_use": true'
            self._slice(name, times.rank, times.started_s, times.ended_s, args + "}")
            if times.rank == dispatch.layout.ranks[0]:
                self._flow(job, times.rank, (times.started_s + times.ended_s) / 2)

    def _task_failed(self, event: events.TaskFailed) -> None:
        dispatch = self._dispatches.pop(event.dispatch)
        if event.void:
            return
        args = json.loads(_task_args(dispatch, self._jobs[dispatch.task.job_id]) + "}")
        args["reason"] = event.reason
        name = f"{dispatch.task.job_id}: {dispatch.task} failed"
        for rank in dispatch.layout.ranks:
            self._instant(name, event.time_s, lane=rank, args=args)

    def _output_written(self, event: events.OutputWritten) -> None:
        start_s, lane = event.time_s - event.write_s, FIRST_WRITER_TID + event.writer
        if lane not in self._latest:
            self._name_lane(lane, f"writer {event.writer}")
        job = self._jobs[event.job_id]
        args = {"job": event.job_id, "stage": "write", "file": event.path, "size_bytes": event.size_bytes}
        name = _encode(f"write {event.job_id}")
        self._slice(name, lane, start_s, event.time_s, _encode(args))
        self._flow(job, lane, (start_s + event.time_s) / 2)

    def _gap(self, name: str, lane: int, *, start_s: float, end_s: float) -> None:
        if end_s - max(start_s, self._latest.get(lane, (0.0, 0.0))[1]) >= MIN_SLICE_S:
            self._slice(_encode(name), lane, start_s, end_s, "{}")

    def _slice(self, name: str, lane: int, start_s: float, end_s: float, args: str) -> None:
        """Write a slice; name and args are JSON. The name's first word is the category."""
        latest_start_s, latest_end_s = self._latest.get(lane, (0.0, 0.0))
        if start_s >= latest_start_s:
            start_s = max(start_s, latest_end_s)
            end_s = max(start_s, end_s)
            self._latest[lane] = (start_s, end_s)
        else:  # another rank of the layout ended this dispatch later
            end_s = min(end_s, latest_start_s)
        # The duration is a difference of rounded ends, so that neighbours never overlap.
        ts = round(start_s * 1e6, 3)
        dur = round(round(end_s * 1e6, 3) - ts, 3)
        category = name.partition(" ")[0]
        self._file.write(
            f'{{"ph": "X", "name": {name}, "cat": {category}", "pid": {RANKS_PID}, "tid": {lane}, '
            f'"ts": {ts}, "dur": {dur}, "args": {args}}}'
        )

    def _flow(self, job: _JobLane, lane: int, time_s: float, *, is_last: bool = False) -> None:
        """Continue the job's arrow in the slice that was just written, or end it in the latest one."""
        phase, binding = ("f", ', "bp": "e"') if is_last else ("s" if job.last_place is None else "t", "")
        self._file.write(
            f'{{"ph": "{phase}", "name": "job", "cat": "flow", "id": {job.number}, "pid": {RANKS_PID}, '
            f'"tid": {lane}, "ts": {round(time_s * 1e6, 3)}{binding}}}'
        )
        job.last_place = lane, time_s

    # Jobs --------------------------------------------------------------------------------

    def _arrived(self, event: events.JobArrived) -> None:
        job = self._jobs[event.job_id]
        if job.has_arrived:
            return
        job.has_arrived = True
        self._instant(f"{event.job_id} arrives", event.time_s, args={"job": event.job_id})
        spec = job.info.spec
        args = {"job": event.job_id, "prompt": spec.prompt[:SHORT_PROMPT_CHARS], "tag": spec.tag}
        self._write(_span("b", job) | {"ts": _us(event.time_s), "args": args})
        self._count_open(event.time_s, change=1)

    def _end_job(
        self, job: _JobLane, time_s: float, *, status: str, outcome: JobOutcome | None = None
    ) -> None:
        job.has_ended = True
        if job.last_place is not None:
            self._flow(job, *job.last_place, is_last=True)
        args: dict[str, Any] = {"job": job.info.job_id, "status": status, "file": job.info.file}
        if outcome is not None:
            args |= {"deadline_s": outcome.deadline_s, "met_deadline": outcome.met_deadline}
            args |= {"error": outcome.error, "layouts": list(outcome.layouts)}
        self._write(_span("e", job) | {"ts": _us(time_s), "args": args})
        self._count_open(time_s, change=-1)

    def _is_open(self, job_id: str) -> bool:
        return job_id in self._jobs and not self._jobs[job_id].has_ended

    def _count_open(self, time_s: float, *, change: int) -> None:
        self._num_open += change
        entry = {"ph": "C", "name": "open jobs", "pid": JOBS_PID, "tid": 0, "ts": _us(time_s)}
        self._write(entry | {"args": {"jobs": self._num_open}})

    # Single events -----------------------------------------------------------------------

    def _instant(
        self, name: str, time_s: float, *, args: Args, scope: str = "p", lane: int | None = None
    ) -> None:
        pid = JOBS_PID if scope == "p" and lane is None else RANKS_PID
        entry = {"ph": "i", "name": name, "pid": pid, "tid": lane or 0, "ts": _us(time_s)}
        self._write(entry | {"s": scope if lane is None else "t", "args": args})

    def _name(self, kind: str, name: str, *, pid: int = RANKS_PID, lane: int = 0, place: int) -> None:
        for key, args in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
            self._write({"ph": "M", "name": f"{kind}_{key}", "pid": pid, "tid": lane, "args": args})

    def _name_lane(self, lane: int, name: str) -> None:
        self._name("thread", name, lane=lane, place=lane)

    def _write(self, entry: Args) -> None:
        self._file.write(_encode(entry))


def _task_args(dispatch: Dispatch, job: _JobLane) -> str:
    task, source = dispatch.task, dispatch.source
    step = "null" if task.step is None else task.step
    source_text = "null" if source is None else f'"{_text_of(source)}"'
    return (
        f'{{"job": {job.id_text}, "prompt": {job.prompt_text}, "stage": "{task.stage}", "step": {step}, '
        f'"layout": "{_text_of(dispatch.layout)}", "ranks": {list(dispatch.layout.ranks)}, '
        f'"dispatch": {dispatch.number}, "source": {source_text}, '
        f'"moved_bytes": {dispatch.moved_bytes if dispatch.transfers else 0}'
    )


@functools.lru_cache(maxsize=1024)
def _text_of(layout: Layout) -> str:
    """Kept, since the same few layouts come again at every step."""
    return str(layout)


def _span(phase: str, job: _JobLane) -> dict[str, Any]:
    return {"ph": phase, "name": job.info.job_id, "cat": "job", "id": job.number, "pid": JOBS_PID, "tid": 0}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
