"""The progress of a run on standard error: bars on a terminal, otherwise log lines, or nothing."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from gfgen import log
from gfgen.cli.shown.board import AboveBars, Board, Line, has_cursor
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.log import FILE_ONLY
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.predict.forecast import Forecast, forecast
from gfgen.snapshot import Snapshot
from gfgen.system.wording import counted, in_words, on_clock

logger = logging.getLogger(__name__)

REDRAW_S = 0.1
TICK_S = 0.5
FORECAST_S = 0.5
CHEAP_FORECAST_JOBS = 64
"""With more open jobs, forecasts are limited to one per FORECAST_S."""
SUMMARY_S = 30.0


def make_progress(*, quiet: bool, log_json: bool = False, stream: TextIO | None = None) -> Observer:
    """Bars on a terminal, otherwise log records; only failures if `quiet`."""
    stream = stream or sys.stderr
    if quiet:
        return NoProgress()
    if log_json or not has_cursor(stream):
        return LineProgress()
    return BarProgress(stream)


def make_file_progress(*, quiet: bool, log_json: bool = False, stream: TextIO | None = None) -> Observer:
    """Lines for the log file, unless `make_progress` already logs them."""
    if log_json or not (quiet or has_cursor(stream or sys.stderr)):
        return Observer()
    return LineProgress(only_to_file=True, with_failures=not quiet)


class NoProgress(Observer):
    def ended(self, outcome: JobOutcome) -> None:
        if outcome.status == "failed":
            logger.error("%s", outcome_line(outcome))


class LineProgress(Observer):
    """Logs the start and end of each job, and the state of the batch every SUMMARY_S.

    For JSON logs, each record has the values of its line as fields.
    """

    refresh_s = 1.0

    def __init__(self, *, only_to_file: bool = False, with_failures: bool = True) -> None:
        self._marks = FILE_ONLY if only_to_file else {}
        self._with_failures = with_failures
        self._batch = RunProgress()
        self._nodes: dict[int, str] = {}
        """By rank, if it is one of a node."""
        self._next_summary_s = SUMMARY_S

    def node_joined(self, node: str, ranks: range) -> None:
        self._nodes |= dict.fromkeys(ranks, node)

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self._batch.began(jobs, policy=policy)
        self._tell(
            self._batch.headline(num_ranks),
            event="run_began",
            jobs=len(jobs),
            skipped=self._batch.num_skipped,
            ranks=num_ranks,
            policy=policy,
        )

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        self._batch.added(jobs)

    def dispatched(self, dispatch: Dispatch) -> None:
        if not self._batch.dispatched(dispatch):
            return
        job_id, task, layout = dispatch.task.job_id, dispatch.task, dispatch.layout
        what, event = f"started {job_id}", "job_started"
        if task.index > 0:
            what, event = f"resumed {job_id} at {task}", "job_resumed"
        where, node = ranks_text(layout), self._nodes.get(layout.ranks[0])
        fields: dict[str, Any] = {} if node is None else {"node": node}
        where += "" if node is None else f" of node {node}"
        self._tell(
            f"{what} on {where}", event=event, job=job_id, task=str(task), ranks=layout.ranks, **fields
        )

    def ended(self, outcome: JobOutcome) -> None:
        self._batch.ended(outcome)
        has_failed = outcome.status == "failed"
        if outcome.status != "skipped" and (self._with_failures or not has_failed):
            level = logging.ERROR if has_failed else logging.INFO
            self._tell(outcome_line(outcome), level=level, **outcome_fields(outcome))

    def refreshed(self, snapshot: Snapshot) -> None:
        if snapshot.now_s < self._next_summary_s:
            return
        self._next_summary_s = snapshot.now_s + SUMMARY_S
        predicted = forecast(snapshot, policy=self._batch.policy)
        self._tell(
            self._batch.text(snapshot.now_s, predicted),
            event="run_stands",
            ended=self._batch.num_ended,
            failed=self._batch.num_failed,
            jobs=self._batch.num_jobs,
            left_s=None if predicted.end_s is None else round(predicted.end_s - snapshot.now_s, 1),
        )

    def _tell(self, line: str, *, level: int = logging.INFO, **fields: Any) -> None:
        logger.log(level, "%s", line, extra={**self._marks, **log.fields(**fields)})


class BarProgress(Observer):
    """A bar for the batch and one for each running job, below the lines of ended jobs.

    Callers draw at most every REDRAW_S, and a thread draws between calls. `_lock` guards everything. Until
    `close`, log records of `gfgen` to the same stream go above the bars.
    """

    refresh_s = REDRAW_S

    def __init__(self, stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._now = now
        self._lock = threading.RLock()
        self._batch = RunProgress()
        self._board: Board | None = None
        self._snapshot: Snapshot | None = None
        self._seen_at = self._drawn_at = self._predicted_at = -1e9
        self._predicted = Forecast({}, frozenset())
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        with self._lock:
            self._batch.began(jobs, policy=policy)
            self._board = Board(self._stream, num_slots=num_ranks)
            self._board.write(self._batch.headline(num_ranks))
            self._redirect_log(self._board)
        self._ticker.start()

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        with self._lock:
            self._batch.added(jobs)

    def dispatched(self, dispatch: Dispatch) -> None:
        with self._lock:
            self._batch.dispatched(dispatch)

    def ended(self, outcome: JobOutcome) -> None:
        with self._lock:
            self._batch.ended(outcome)
            if self._board is not None and outcome.status != "skipped":
                self._board.write(outcome_line(outcome))

    def refreshed(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._snapshot, self._seen_at = snapshot, self._now()
            if self._seen_at - self._drawn_at >= REDRAW_S:
                self._draw()

    def close(self) -> None:
        self._closed.set()
        if self._ticker.is_alive():
            self._ticker.join()
        with self._lock:
            for handler, stream in self._redirected:
                handler.setStream(stream)
            self._redirected.clear()
            if self._board is not None:
                self._board.close()
                self._board = None

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            with self._lock:
                if self._now() - self._drawn_at >= TICK_S:
                    self._draw()

    def _draw(self) -> None:
        if self._board is None or self._snapshot is None:
            return
        self._drawn_at = self._now()
        is_small = len(self._snapshot.open) + len(self._snapshot.busy) <= CHEAP_FORECAST_JOBS
        if is_small or self._drawn_at - self._predicted_at >= FORECAST_S:
            self._predicted_at = self._drawn_at
            self._predicted = forecast(self._snapshot, policy=self._batch.policy)
        now_s = self._snapshot.now_s + self._drawn_at - self._seen_at
        batch = self._batch
        head = Line("batch", batch.num_ended, batch.num_jobs, batch.text(now_s, self._predicted))
        running = {running.task.job_id for running in self._snapshot.running}
        lines = [
            job.line(now_s, self._predicted, is_running=job.info.job_id in running)
            for job in batch.shown(running)
        ]
        self._board.draw([head, *lines])

    def _redirect_log(self, board: Board) -> None:
        for handler in logging.getLogger("gfgen").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                self._redirected.append((handler, handler.setStream(AboveBars(board, self._lock))))


@dataclass(slots=True)
class ShownJob:
    info: JobInfo
    task: Task
    layout: Layout

    def line(self, now_s: float, predicted: Forecast, *, is_running: bool) -> Line:
        steps = self.info.num_tasks - 3
        what = f"step {self.task.step + 1}/{steps}" if self.task.step is not None else str(self.task.stage)
        end_s = predicted.ends_s.get(self.info.job_id)
        is_decoded = self.task.stage is Stage.DECODE and not is_running
        left = "writing" if is_decoded else "" if end_s is None else f"{on_clock(end_s - now_s)} left"
        late = "  will be late" if self.info.job_id in predicted.late else ""
        text = f"{what:<12} {ranks_text(self.layout):<10} {left}{late}"
        return Line(self.info.job_id, self.task.index, self.info.num_tasks, text)


class RunProgress:
    def __init__(self) -> None:
        self.policy = ""
        self.num_jobs = 0
        self.num_ended = 0
        self.num_failed = 0
        self.num_skipped = 0
        self.num_missed = 0
        self._infos: dict[str, JobInfo] = {}
        self._started: dict[str, ShownJob] = {}

    def began(self, jobs: tuple[JobInfo, ...], *, policy: str) -> None:
        self.policy, self.num_jobs = policy, len(jobs)
        self._infos = {info.job_id: info for info in jobs}

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        self.num_jobs += len(jobs)
        self._infos |= {info.job_id: info for info in jobs}

    def dispatched(self, dispatch: Dispatch) -> bool:
        """Returns whether this is the job's first task."""
        job_id = dispatch.task.job_id
        is_first = job_id not in self._started
        if job_id in self._infos:
            self._started[job_id] = ShownJob(self._infos[job_id], dispatch.task, dispatch.layout)
        return is_first

    def ended(self, outcome: JobOutcome) -> None:
        if outcome.status == "skipped":
            self.num_skipped += 1
            return
        self._started.pop(outcome.info.job_id, None)
        self._infos.pop(outcome.info.job_id, None)
        self.num_ended += 1
        self.num_failed += outcome.status == "failed"
        self.num_missed += outcome.status == "done" and outcome.met_deadline is False

    def shown(self, running: set[str]) -> list[ShownJob]:
        return sorted(self._started.values(), key=lambda job: job.info.job_id not in running)

    def headline(self, num_ranks: int) -> str:
        text = f"{counted(self.num_jobs, 'job')} on {counted(num_ranks, 'rank')}"
        text += "" if self.policy == "auto" else f", policy {self.policy}"
        return text + (f"; {self.num_skipped} done before and skipped" if self.num_skipped else "")

    def text(self, now_s: float, predicted: Forecast) -> str:
        count = f"{self.num_ended}/{self.num_jobs} jobs"
        num_late = self.num_missed + len(predicted.late)
        notes = [f"{self.num_failed} failed"] if self.num_failed else []
        notes += [f"{num_late} late"] if num_late else []
        yet_to_come = self.num_jobs - self.num_ended - len(self._started.keys() | predicted.ends_s.keys())
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
    file = f"{outcome.files[0][0]} to {outcome.files[-1][0]}" if outcome.files else info.file
    line = f"done {info.job_id}: {file} in {in_words(outcome.ended_s - outcome.arrival_s)}"
    if outcome.deadline_s is None:
        return line
    margin = in_words(abs(outcome.deadline_s - outcome.ended_s))
    return f"{line}, {margin} before its deadline" if outcome.met_deadline else f"{line}, {margin} too late"


def outcome_fields(outcome: JobOutcome) -> dict[str, Any]:
    known = {
        "event": f"job_{outcome.status}",
        "job": outcome.info.job_id,
        "latency_s": round(outcome.ended_s - outcome.arrival_s, 3),
        "met_deadline": outcome.met_deadline,
        "file": outcome.info.file if outcome.status == "done" and not outcome.files else None,
        "files": [name for name, _, _ in outcome.files] or None,
        "error": outcome.error,
    }
    return {key: value for key, value in known.items() if value is not None}


def ranks_text(layout: Layout) -> str:
    """Such as 'rank 0' or 'ranks 0,2,3'."""
    return f"rank{'s' if layout.degree > 1 else ''} {','.join(map(str, layout.ranks))}"
