"""A trace file: its tasks and writes as blocks on lanes, its jobs and its run."""

from __future__ import annotations

import contextlib
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
class Block:
    """A task on one rank or on neighbouring ones; or the write of a file by a writer."""

    job_id: str
    stage: str
    lanes: tuple[int, int]
    """The first and the last of its ranks, or its writer."""
    start_s: float
    end_s: float
    dispatch: int | None = None

    @property
    def middle(self) -> float:
        return sum(self.lanes) / 2

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
    """Blocks are in order of their start, one for each rank of a task; jobs in order of their arrival."""

    tasks: tuple[Block, ...]
    writes: tuple[Block, ...]
    jobs: dict[str, TracedJob] = field(default_factory=dict)
    policy: str = ""
    num_ranks: int = 0
    is_simulated: bool = False


def read_timeline(path: Path) -> Timeline:
    """Read a trace, complete or not. Raises InputError when there is no trace."""
    blocks: list[Block] = []
    jobs: dict[str, TracedJob] = {}
    policy, num_ranks, is_simulated = "", 0, False
    try:
        for entry in _entries(path):
            phase = entry.get("ph")
            if phase == "X" and "stage" in entry["args"]:
                blocks.append(_block(entry))
            elif phase in ("b", "e") and entry.get("cat") == "job":
                args, time_s = entry["args"], entry["ts"] / 1e6
                job = jobs.get(args["job"], TracedJob(args["job"]))
                if phase == "b":
                    new = {"prompt": args.get("prompt", ""), "arrival_s": time_s}
                else:
                    new = {"ended_s": time_s, "status": args["status"]}
                    new |= {name: args.get(name) for name in ("deadline_s", "met_deadline")}
                jobs[job.job_id] = replace(job, **new)
            elif phase == "i" and entry.get("name") == "run":
                policy, num_ranks = entry["args"]["policy"], entry["args"]["num_ranks"]
                is_simulated = entry["args"].get("simulated", False)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a trace that gfgen run --trace wrote ({error!r})") from error
    blocks.sort(key=lambda block: (block.start_s, block.lanes))
    for block in blocks:
        jobs.setdefault(block.job_id, TracedJob(block.job_id, arrival_s=block.start_s))
    tasks = tuple(block for block in blocks if block.stage != WRITE)
    writes = tuple(block for block in blocks if block.stage == WRITE)
    num_ranks = max([num_ranks, *(block.lanes[1] + 1 for block in tasks)])
    return Timeline(tasks, writes, jobs, policy, num_ranks, is_simulated)


def _entries(path: Path) -> Iterable[TraceEvent]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise InputError(f"cannot read the trace {path}: {reason}") from error
    try:
        loaded = json.loads(text)
    except ValueError:  # of a run that was killed, the complete lines
        loaded = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                loaded.append(json.loads(line.rstrip(",")))
    found = loaded if isinstance(loaded, list) else []
    entries = [entry for entry in found if isinstance(entry, dict) and "ph" in entry]
    if not entries and text.strip() not in ("", "[", "[]"):
        raise InputError(f"{path}: not a trace; expected a file that gfgen run --trace wrote")
    return entries


def _block(entry: TraceEvent) -> Block:
    args, start_us = entry["args"], entry["ts"]
    lane = entry["tid"] % MAX_WRITERS if args["stage"] == WRITE else entry["tid"]
    end_us = start_us + entry["dur"]
    return Block(args["job"], args["stage"], (lane, lane), start_us / 1e6, end_us / 1e6, args.get("dispatch"))


def joined(tasks: Iterable[Block]) -> Iterator[Block]:
    """One block per dispatch and group of neighbouring ranks."""
    by_dispatch: dict[tuple[int | None, str], list[Block]] = defaultdict(list)
    for task in tasks:
        by_dispatch[task.dispatch, task.job_id].append(task)
    for parts in by_dispatch.values():
        ranked = enumerate(sorted(parts, key=lambda part: part.lanes))
        for _, group in itertools.groupby(ranked, key=lambda pair: pair[1].lanes[0] - pair[0]):
            near = [part for _, part in group]
            start_s, end_s = min(part.start_s for part in near), max(part.end_s for part in near)
            lanes = near[0].lanes[0], near[-1].lanes[1]
            yield replace(near[0], lanes=lanes, start_s=start_s, end_s=end_s)


def merged(blocks: Iterable[Block]) -> Iterator[Block]:
    """Join consecutive blocks of a job on the same lanes, with the longest one's stage, for a label."""
    runs: list[list[Block]] = []
    for block in sorted(blocks, key=lambda block: (block.lanes, block.start_s)):
        before = runs[-1][-1] if runs else None
        is_same = before is not None and (before.job_id, before.lanes) == (block.job_id, block.lanes)
        if before is not None and is_same and block.start_s - before.end_s < 0.2 * block.duration_s:
            runs[-1].append(block)
        else:
            runs.append([block])
    for run in runs:
        longest = max(run, key=lambda block: block.duration_s)
        yield replace(longest, start_s=run[0].start_s, end_s=run[-1].end_s)


def tasks_of_jobs(blocks: Iterable[Block]) -> dict[str, list[list[Block]]]:
    """By job: its tasks in their order, each with its blocks from above."""
    by_job: dict[str, dict[int, list[Block]]] = defaultdict(lambda: defaultdict(list))
    for block in sorted(blocks, key=lambda block: (block.dispatch or 0, block.lanes)):
        by_job[block.job_id][block.dispatch or 0].append(block)
    return {job_id: list(tasks.values()) for job_id, tasks in by_job.items()}


def lanes_of(parts: Sequence[Block]) -> list[tuple[int, int]]:
    return [part.lanes for part in parts]
