"""A trace file: its slices, jobs and run, and the slices as bars on lanes."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gfgen.errors import InputError
from gfgen.runtime.files.trace import MAX_WRITERS

TraceEvent = dict[str, Any]
WRITE = "write"


@dataclass(frozen=True, slots=True)
class Slice:
    """One task on one rank, or one file's write (stage "write", a writer and no rank)."""

    job_id: str
    stage: str
    rank: int | None
    writer: int | None
    start_s: float
    end_s: float
    dispatch: int | None
    ranks: tuple[int, ...]

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class TracedJob:
    job_id: str
    prompt: str = ""
    arrival_s: float = 0.0
    ended_s: float | None = None
    status: str = "unfinished"
    deadline_s: float | None = None
    met_deadline: bool | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Slices are in order of their start, jobs in order of their arrival."""

    slices: tuple[Slice, ...]
    jobs: dict[str, TracedJob] = field(default_factory=dict)
    policy: str = ""
    num_ranks: int = 0
    is_simulated: bool = False


def read_timeline(path: Path) -> Timeline:
    """Read a trace, complete or not. Raises InputError when there is no trace."""
    slices: list[Slice] = []
    jobs: dict[str, TracedJob] = {}
    policy, num_ranks, is_simulated = "", 0, False
    try:
        for entry in _entries(path):
            phase = entry.get("ph")
            if phase == "X" and "stage" in entry["args"]:
                slices.append(_slice(entry))
            elif phase in ("b", "e") and entry.get("cat") == "job":
                job_id = entry["args"]["job"]
                jobs[job_id] = _job(jobs.get(job_id, TracedJob(job_id)), entry)
            elif phase == "i" and entry.get("name") == "run":
                policy, num_ranks = entry["args"]["policy"], entry["args"]["num_ranks"]
                is_simulated = entry["args"].get("simulated", False)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a trace that gfgen run --trace wrote ({error!r})") from error
    slices.sort(key=lambda slice_: (slice_.start_s, -1 if slice_.rank is None else slice_.rank))
    num_ranks = max([num_ranks, *(slice_.rank + 1 for slice_ in slices if slice_.rank is not None)])
    for slice_ in slices:
        jobs.setdefault(slice_.job_id, TracedJob(slice_.job_id, arrival_s=slice_.start_s))
    return Timeline(tuple(slices), jobs, policy, num_ranks, is_simulated)


def _entries(path: Path) -> Iterable[TraceEvent]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise InputError(f"cannot read the trace {path}: {reason}") from error
    try:
        loaded = json.loads(text)
    except ValueError:
        loaded = _complete_lines(text)
    if isinstance(loaded, dict):
        loaded = loaded.get("traceEvents")
    found = loaded if isinstance(loaded, list) else []
    entries = [entry for entry in found if isinstance(entry, dict) and "ph" in entry]
    if not entries and text.strip() not in ("", "[", "[]"):
        raise InputError(f"{path}: not a trace; expected a file that gfgen run --trace wrote")
    return entries


def _complete_lines(text: str) -> list[TraceEvent]:
    entries = []
    for line in text.splitlines():
        try:
            entry = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _slice(entry: TraceEvent) -> Slice:
    args = entry["args"]
    is_write = args["stage"] == WRITE
    start_us = entry["ts"]
    return Slice(
        job_id=args["job"],
        stage=args["stage"],
        rank=None if is_write else entry["tid"],
        writer=entry["tid"] % MAX_WRITERS if is_write else None,
        start_s=start_us / 1e6,
        end_s=(start_us + entry["dur"]) / 1e6,
        dispatch=args.get("dispatch"),
        ranks=tuple(args.get("ranks", ())),
    )


def _job(job: TracedJob, entry: TraceEvent) -> TracedJob:
    args, time_s = entry["args"], entry["ts"] / 1e6
    if entry["ph"] == "b":
        return replace(job, prompt=args.get("prompt", ""), arrival_s=time_s)
    return replace(
        job,
        ended_s=time_s,
        status=args["status"],
        deadline_s=args.get("deadline_s"),
        met_deadline=args.get("met_deadline"),
    )


@dataclass(frozen=True, slots=True)
class PlotBlock:
    """One rectangle: a task on neighbouring lanes, or a write."""

    job_id: str
    stage: str
    first_lane: int
    last_lane: int
    start_s: float
    end_s: float
    dispatch: int | None

    @property
    def lanes(self) -> tuple[int, int]:
        return self.first_lane, self.last_lane

    @property
    def middle(self) -> float:
        return (self.first_lane + self.last_lane) / 2

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def task_blocks(timeline: Timeline) -> Iterator[PlotBlock]:
    """One rectangle per dispatch and group of neighbouring ranks; lanes are ranks."""
    by_dispatch: dict[tuple[int | None, str], list[tuple[int, Slice]]] = defaultdict(list)
    for slice_ in timeline.slices:
        if slice_.rank is not None:
            by_dispatch[slice_.dispatch, slice_.job_id].append((slice_.rank, slice_))
    for (dispatch, job_id), parts in by_dispatch.items():
        parts.sort(key=lambda part: part[0])
        for _, run in itertools.groupby(enumerate(parts), key=lambda pair: pair[1][0] - pair[0]):
            neighbours = [part for _, part in run]
            yield PlotBlock(
                job_id=job_id,
                stage=neighbours[0][1].stage,
                first_lane=neighbours[0][0],
                last_lane=neighbours[-1][0],
                start_s=min(slice_.start_s for _, slice_ in neighbours),
                end_s=max(slice_.end_s for _, slice_ in neighbours),
                dispatch=dispatch,
            )


def write_blocks(timeline: Timeline) -> Iterator[PlotBlock]:
    """One rectangle per write, on the lane of its writer below the ranks."""
    for slice_ in timeline.slices:
        if slice_.writer is None:
            continue
        lane = timeline.num_ranks + slice_.writer
        yield PlotBlock(slice_.job_id, WRITE, lane, lane, slice_.start_s, slice_.end_s, None)


def merged(blocks: Iterable[PlotBlock]) -> Iterator[PlotBlock]:
    """Join consecutive blocks of a job on the same lanes, with the longest one's stage, for a label."""
    current: PlotBlock | None = None
    longest_s = 0.0
    for block in sorted(blocks, key=lambda block: (block.lanes, block.start_s)):
        if current is not None and _continues(current, block):
            stage = block.stage if block.duration_s > longest_s else current.stage
            longest_s = max(longest_s, block.duration_s)
            current = replace(current, stage=stage, end_s=block.end_s, dispatch=block.dispatch)
            continue
        if current is not None:
            yield current
        current, longest_s = block, block.duration_s
    if current is not None:
        yield current


def tasks_of_jobs(blocks: Iterable[PlotBlock]) -> dict[str, list[list[PlotBlock]]]:
    by_job: dict[str, dict[int, list[PlotBlock]]] = defaultdict(lambda: defaultdict(list))
    for block in blocks:
        by_job[block.job_id][block.dispatch or 0].append(block)
    return {job_id: [tasks[number] for number in sorted(tasks)] for job_id, tasks in by_job.items()}


def lanes_of(parts: Sequence[PlotBlock]) -> list[tuple[int, int]]:
    return sorted(part.lanes for part in parts)


def _continues(before: PlotBlock, after: PlotBlock) -> bool:
    is_same = before.job_id == after.job_id and before.lanes == after.lanes
    return is_same and after.start_s - before.end_s < 0.2 * after.duration_s
