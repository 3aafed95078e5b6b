"""The progress of a run on standard error: bars on a terminal, otherwise log lines, or nothing."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, TextIO

from gfgen import log
from gfgen.cli.shown.board import Board, Line, has_cursor
from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.log import FILE_ONLY
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer, RunView
from gfgen.runtime.simulate.forecast import Forecast, forecast
from gfgen.snapshot import Snapshot
from gfgen.system.wording import counted, in_words, on_clock

logger = logging.getLogger(__name__)

REDRAW_S = 0.1
FORECAST_S = 0.5
CHEAP_FORECAST_JOBS = 64
"""With more open jobs, bars are drawn every FORECAST_S."""
SUMMARY_S = 30.0


def progress_of(
    *, quiet: bool, log_json: bool = False, has_file: bool = True, stream: TextIO | None = None
) -> list[Observer]:
    """Bars on a terminal, with log records for the log file alone; otherwise log records; if `quiet`, only
    failures, and the other records for the log file."""
    stream = stream or sys.stderr
    if not quiet and (log_json or not has_cursor(stream)):
        return [LineProgress()]
    shown: Observer = FailureProgress() if quiet else BarProgress(stream)
    return [shown, *([LineProgress(only_to_file=True, with_failures=not quiet)] if has_file else [])]


class FailureProgress(Observer):
    def ended(self, outcome: JobOutcome) -> None:
        if outcome.status == "failed":
            logger.error("%s", outcome_line(outcome))


class LineProgress(Observer):
    """Logs the start and end of each job, and every SUMMARY_S the batch; for JSON with fields."""

    refresh_s = 1.0

    def __init__(self, *, only_to_file: bool = False, with_failures: bool = True) -> None:
        self._marks = FILE_ONLY if only_to_file else {}
        self._with_failures = with_failures
        self._started: set[str] = set()
        self._next_summary_s = SUMMARY_S

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        counts = {"jobs": self.view.num_jobs, "skipped": self.view.num_skipped, "ranks": num_ranks}
        self._tell(headline(self.view), event="run_began", **counts, policy=policy)

    def dispatched(self, dispatch: Dispatch) -> None:
        if dispatch.task.job_id in self._started:
            return
        self._started.add(dispatch.task.job_id)
        task, ranks = dispatch.task, dispatch.layout.ranks
        what, event = f"started {task.job_id}", "job_started"
        if task.index > 0:
            what, event = f"resumed {task.job_id} at {task}", "job_resumed"
        text, fields = f"{what} on {ranks_text(dispatch.layout)}", dict[str, Any]()
        if (node := self.view.ranks[ranks[0]].node) is not None:
            text, fields = f"{text} of node {node}", {"node": node}
        self._tell(text, event=event, job=task.job_id, task=str(task), ranks=ranks, **fields)

    def ended(self, outcome: JobOutcome) -> None:
        self._started.discard(outcome.info.job_id)
        has_failed = outcome.status == "failed"
        if self._with_failures or not has_failed:
            is_one = outcome.status == "done" and not outcome.files
            known = {
                "latency_s": round(outcome.ended_s - outcome.arrival_s, 3),
                "met_deadline": outcome.met_deadline,
                "file": outcome.info.file if is_one else None,
                "files": outcome.file_names if outcome.files else None,
                "error": outcome.error,
            }
            known = {name: value for name, value in known.items() if value is not None}
            about = {"event": f"job_{outcome.status}", "job": outcome.info.job_id, **known}
            level = logging.ERROR if has_failed else logging.INFO
            self._tell(outcome_line(outcome), level=level, **about)

    def refreshed(self, snapshot: Snapshot) -> None:
        if snapshot.now_s < self._next_summary_s:
            return
        self._next_summary_s = snapshot.now_s + SUMMARY_S
        view, predicted = self.view, forecast(snapshot, policy=self.view.policy)
        counts = {"ended": num_ended(view), "failed": view.num_ended["failed"], "jobs": view.num_jobs}
        left_s = None if predicted.end_s is None else round(predicted.end_s - snapshot.now_s, 1)
        text = progress_text(view, snapshot.now_s, predicted)
        self._tell(text, event="run_stands", **counts, left_s=left_s)

    def _tell(self, line: str, *, level: int = logging.INFO, **fields: Any) -> None:
        logger.log(level, "%s", line, extra={**self._marks, **log.fields(**fields)})


class BarProgress(Observer):
    """A bar for the batch and for each running job; log records go above them."""

    refresh_s = REDRAW_S

    def __init__(self, stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._board = Board(stream or sys.stderr)
        self._now, self._drawn_at = now, -1e9
        self._redirected: list[logging.StreamHandler[Any]] = []

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        board = self._board
        board.num_slots = num_ranks
        board.write(headline(self.view))
        for handler in logging.getLogger("gfgen").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is board.stream:
                self._redirected.append(handler)
                handler.setStream(board)

    def ended(self, outcome: JobOutcome) -> None:
        self._board.write(outcome_line(outcome))

    def refreshed(self, snapshot: Snapshot) -> None:
        is_large = len(snapshot.open) + len(snapshot.busy) > CHEAP_FORECAST_JOBS
        if self._now() - self._drawn_at < (FORECAST_S if is_large else REDRAW_S):
            return
        self._drawn_at = self._now()
        view, running = self.view, {running.task.job_id for running in snapshot.running}
        predicted = forecast(snapshot, policy=view.policy)
        text = progress_text(view, snapshot.now_s, predicted)
        lines = [Line("batch", num_ended(view), view.num_jobs, text)]
        for job_id, last in sorted(view.started.items(), key=lambda each: each[0] not in running):
            is_running = job_id in running
            lines.append(job_line(view.open[job_id], last, snapshot.now_s, predicted, is_running=is_running))
        self._board.draw(lines)

    def close(self) -> None:
        for handler in self._redirected:
            handler.setStream(self._board.stream)
        self._redirected.clear()
        self._board.close()


def job_line(info: JobInfo, last: Dispatch, now_s: float, predicted: Forecast, *, is_running: bool) -> Line:
    task, job_id, num_tasks = last.task, info.job_id, info.num_tasks
    what = f"step {task.step + 1}/{num_tasks - 3}" if task.step is not None else str(task.stage)
    end_s = predicted.ends_s.get(job_id)
    is_decoded = task.stage is Stage.DECODE and not is_running
    left = "writing" if is_decoded else "" if end_s is None else f"{on_clock(end_s - now_s)} left"
    late = "  will be late" if job_id in predicted.late else ""
    text = f"{what:<12} {ranks_text(last.layout):<10} {left}{late}"
    return Line(job_id, task.index, num_tasks, text)


def headline(view: RunView) -> str:
    text = f"{counted(view.num_jobs, 'job')} on {counted(len(view.ranks), 'rank')}"
    text += "" if view.policy == "auto" else f", policy {view.policy}"
    return text + (f"; {view.num_skipped} done before and skipped" if view.num_skipped else "")


def num_ended(view: RunView) -> int:
    return view.num_ended.total()


def progress_text(view: RunView, now_s: float, predicted: Forecast) -> str:
    """Such as '5/12 jobs  0:07  0:12 left, 1 failed'."""
    count = f"{num_ended(view)}/{view.num_jobs} jobs"
    num_failed, num_late = view.num_ended["failed"], view.num_missed + len(predicted.late)
    notes = [f"{num_failed} failed"] if num_failed else []
    notes += [f"{num_late} late"] if num_late else []
    seen = view.started.keys() | predicted.ends_s.keys()
    yet_to_come = view.num_jobs - num_ended(view) - len(seen) - len(view.backlog)
    notes += [f"{yet_to_come} yet to come"] if yet_to_come > 0 else []
    rest = "" if predicted.end_s is None else f"{on_clock(predicted.end_s - now_s)} left"
    return "  ".join(part for part in (count, on_clock(now_s), rest, ", ".join(notes)) if part)


def outcome_line(outcome: JobOutcome) -> str:
    """Such as 'done fox-1: fox-1.mp4 in 12.3 s, 2.1 s before its deadline'."""
    info = outcome.info
    if outcome.status == "failed":
        return f"failed {info.job_id}: {outcome.error}"
    if outcome.status == "cancelled":
        return f"cancelled {info.job_id}"
    first, last = outcome.file_names[0], outcome.file_names[-1]
    file = first if first == last else f"{first} to {PurePath(last).name}"
    line = f"done {info.job_id}: {file} in {in_words(outcome.ended_s - outcome.arrival_s)}"
    if outcome.made and (difference := info.difference(outcome.made)):
        line = f"{line} ({difference})"
    if outcome.deadline_s is None:
        return line
    margin = in_words(abs(outcome.deadline_s - outcome.ended_s))
    return f"{line}, {margin} before its deadline" if outcome.met_deadline else f"{line}, {margin} too late"


def ranks_text(layout: Layout) -> str:
    """Such as 'rank 0' or 'ranks 0,2,3'."""
    return f"rank{'s' if layout.degree > 1 else ''} {','.join(map(str, layout.ranks))}"
