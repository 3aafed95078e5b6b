"""How a run or a server stands: the same for both, as JSON and as text."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gfgen.job.reader import JobSource
from gfgen.system.wording import counted, in_words, on_clock

ENDED = ("ended", "stopped", "killed")
"""States of a run that does not live any more."""
COUNTS = ("jobs", "done", "skipped", "failed", "cancelled", "running", "waiting")
MIN_ID, MAX_ID, COLUMNS_BEHIND = 12, 40, 56
"""Columns of a job's id, and of what stands behind it."""
MAX_RECENT = 5
BAR = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    target: str
    kind: str
    """run or server"""
    state: str
    """Of a run: loading, running, stopping, or one of ENDED. Of a server: loading, ready or draining."""
    pid: int | None = None
    started_at: float | None = None
    written_at: float | None = None
    policy: str | None = None
    watched: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Some of COUNTS. Those of a run that has ended are of all runs in its folder."""
    ends_at: float | None = None
    ranks: Sequence[Mapping[str, Any]] = ()
    jobs: Sequence[Mapping[str, Any]] = ()
    """Open jobs, running ones first; not all of many."""
    recent: Sequence[Mapping[str, Any]] = ()
    """The last jobs that ended, oldest first."""

    @property
    def is_live(self) -> bool:
        return self.state not in ENDED

    def lines(self, *, now: float, columns: int = 80, rows: int | None = None) -> list[str]:
        """The text, on at most `rows` lines: the ranks, then as many jobs as there is room for."""
        room = 10**6 if rows is None else rows
        lines = [self._headline(now), *self._counts(now)]
        lines += [f"takes job files from {self.watched}"] if self.watched and self.is_live else []
        ranks = list(_rank_lines(self.ranks))
        lines += _cut(ranks, room - len(lines) - 6, "rank")
        recent = [_recent_line(row, now) for row in self.recent[-MAX_RECENT:]]
        num_jobs = room - len(lines) - len(recent) - 3
        if self.jobs and num_jobs > 0:
            lines += ["", *self._job_lines(now, num_jobs, columns)]
        if recent and len(lines) + 2 < room:
            lines += ["", *recent[-max(1, room - len(lines) - 1) :]]
        return [line if len(line) <= columns else f"{line[: columns - 1]}~" for line in lines[:room]]

    def _headline(self, now: float) -> str:
        parts = [f"{self.target}: {self.state}"]
        if not self.is_live:
            when = "" if self.written_at is None else f" at {_clock(self.written_at, now)}"
            how = {"ended": "its last run ended", "stopped": "its last run was stopped"}
            parts = [f"{self.target}: nothing runs; {how.get(self.state, 'its last run was killed')}{when}"]
        elif self.started_at is not None:
            parts = [f"{parts[0]} for {in_words(max(0.0, now - self.started_at))}"]
        parts += [f"process {self.pid}"] if self.pid is not None and self.is_live else []
        parts += [f"policy {self.policy}"] if self.policy and self.is_live else []
        return ", ".join(parts)

    def _counts(self, now: float) -> Iterator[str]:
        counts = self.counts
        if not counts:
            return
        named = [f"{counts[name]:,} {name}" for name in COUNTS[1:] if counts.get(name)]
        num_ended = sum(counts.get(name, 0) for name in ("done", "failed", "cancelled"))
        num_jobs = counts.get("jobs")
        texts = [", ".join(named) or "no jobs"]
        if self.ends_at is not None and self.is_live and self.ends_at > now:
            texts.append(f"{on_clock(self.ends_at - now)} left, until {_clock(self.ends_at, now)}")
        if num_jobs:
            filled = round(BAR * num_ended / num_jobs)
            yield f"[{'#' * filled}{'.' * (BAR - filled)}] {num_ended:,}/{num_jobs:,}  {'; '.join(texts)}"
        else:
            yield "; ".join(texts)
        num_left = counts.get("running", 0) + counts.get("waiting", 0)
        if not self.is_live and num_left:
            yield f"{counted(num_left, 'job')} left: run the same command again to go on"

    def _job_lines(self, now: float, most: int, columns: int) -> Iterator[str]:
        room = min(MAX_ID, max(MIN_ID, columns - COLUMNS_BEHIND))
        width = min(room, max(len("job"), *(len(_name(row)) for row in self.jobs)))
        yield f"{'job':<{width}} {'state':<7} {'stage':<7} {'step':>7} {'ranks':<7} {'left':>7}  deadline"
        num_open = self.counts.get("running", 0) + self.counts.get("waiting", 0)
        shown = self.jobs[: most - 1] if most <= len(self.jobs) or num_open > len(self.jobs) else self.jobs
        for row in shown:
            yield _job_line(row, width, now)
        if num_open > len(shown):
            yield f"and {num_open - len(shown):,} more"


def _name(row: Mapping[str, Any]) -> str:
    """The id in the job file, by which people know the job of a batch; otherwise its own."""
    return str(row.get("name") or row["id"])


def _job_line(row: Mapping[str, Any], width: int, now: float) -> str:
    name, ranks = _name(row), ",".join(map(str, row["ranks"]))
    name = name if len(name) <= width else f"{name[: width - 1]}~"
    step = f"{row['step']}/{row['steps']}" if row["step"] or row["state"] == "running" else ""
    left = "" if row["ends_at"] is None else on_clock(row["ends_at"] - now)
    due = "" if row["deadline_at"] is None else on_clock(row["deadline_at"] - now)
    if row["deadline_at"] is not None and row["deadline_at"] < now:
        due = "passed"
    elif row["is_late"]:
        due += " late"
    stage = row["stage"] or ""
    return f"{name:<{width}} {row['state']:<7} {stage:<7} {step:>7} {ranks:<7} {left:>7}  {due}".rstrip()


def _rank_lines(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for node, its_ranks in itertools.groupby(ranks, lambda rank: rank.get("node")):
        if node is not None:
            yield f"node {node}"
        for rank in its_ranks:
            what = f" {rank['stage']} of {rank.get('name') or rank['job']}" if rank["job"] else ""
            yield f"rank {rank['rank']:<3} {rank['state']}{what}"


def _recent_line(row: Mapping[str, Any], now: float) -> str:
    reason = f": {row['error']}" if row["error"] and row["status"] == "failed" else ""
    latency = "" if row["latency_s"] is None else f" after {in_words(row['latency_s'])}"
    return f"{_clock(row['ended_at'], now)} {row['status']} {_name(row)}{latency}{reason}"


def _cut(lines: list[str], most: int, noun: str) -> list[str]:
    if len(lines) <= max(1, most):
        return lines
    kept = lines[: max(0, most - 1)]
    return [*kept, f"and {counted(len(lines) - len(kept), f'more {noun}')}"]


def _clock(moment: float, now: float) -> str:
    """The time of day, with the date if that is another one."""
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)


@dataclass(frozen=True, slots=True)
class Cancelled:
    ids: Sequence[str]
    num_cancelled: int
    unmatched: Sequence[str]


@dataclass(frozen=True, slots=True)
class Submitted:
    num_jobs: int
    text: str
    problems: Sequence[str] = ()
    answer: Any = None


class Target(Protocol):
    def status(self) -> RunStatus:
        """Raises: InputError if there is no run or server."""

    def cancel(self, patterns: Sequence[str]) -> Cancelled:
        """Cancel the open jobs whose id is one of these, or matches a pattern."""

    def submit(self, source: JobSource) -> Submitted: ...
