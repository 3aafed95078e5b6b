"""What a run tells other processes, and what they ask of it: `gfgen status`, `top` and `cancel`."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from gfgen.graph import Stage
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.files.live import REQUESTS_NAME, open_requests, write_live
from gfgen.runtime.predict.forecast import Forecast, forecast
from gfgen.snapshot import JobView, RunningTask, Snapshot

logger = logging.getLogger(__name__)

MAX_ROWS = 100
"""Open jobs in the record; the rest is counted."""
MAX_RECENT = 10
MAX_ANSWERS = 8
MAX_NAMED = 1_000
"""Ids in an answer."""
MAX_FORECAST_JOBS = 300
"""With more open jobs the run's end is predicted from the sum of their work, since the loop waits for it."""
MAX_AT_ONCE = 32
"""Jobs cancelled in one turn of the loop."""
SUM_S = 10.0
_WAKE = b"\n"


class LiveRun(Observer):
    """Keeps the live record of a run, and takes requests to cancel jobs.

    The control loop calls everything here.
    """

    refresh_s = 1.0

    def __init__(self, folder: Path, *, started_at: float, watched: Path | None = None) -> None:
        self._folder, self._started_at = folder, started_at
        self._watched = None if watched is None else str(watched.absolute())
        self._open: dict[str, JobInfo] = {}
        self._counts: Counter[str] = Counter()
        self._recent: deque[dict[str, Any]] = deque(maxlen=MAX_RECENT)
        self._answers: deque[dict[str, Any]] = deque(maxlen=MAX_ANSWERS)
        self._unwanted: deque[str] = deque()
        """Jobs to cancel in the next turns."""
        self._policy, self._deciding = "", ""
        self._ranks: dict[int, str | None] = {}
        """The node of each rank, on a cluster."""
        self._last: dict[int, Dispatch] = {}
        """By rank."""
        self._state = "running"
        self._rows: dict[str, Any] = {"ends_at": None, "ranks": [], "jobs": []}
        self._next_sum_s = 0.0
        self._many_end_at: float | None = None
        self._written = ""
        self._is_given_up = False
        self._rest = b""
        """The beginning of a request."""
        self._fd = -1
        try:
            self._fd = open_requests(folder)
        except OSError as error:
            logger.info("no requests from outside: this file system has no pipes (%s)", error.strerror)

    @property
    def takes_requests(self) -> bool:
        return self._fd >= 0

    # Requests -------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._fd

    def take_events(self, now_s: float) -> Sequence[Event]:
        """The requests as events, a limited number in each turn."""
        for line in self._lines():
            try:
                request = json.loads(line)
                self._cancel(list(map(str, request["cancel"])), key=str(request["request"]))
            except (ValueError, KeyError, TypeError):
                logger.warning("%s: a line there is no request; it is ignored", REQUESTS_NAME)
        taken = [self._unwanted.popleft() for _ in range(min(MAX_AT_ONCE, len(self._unwanted)))]
        if self._unwanted:
            with contextlib.suppress(BlockingIOError):  # full of requests: these wake the loop, too
                os.write(self._fd, _WAKE)
        return [events.JobCancelled(now_s, job_id) for job_id in taken]

    def _lines(self) -> Iterator[bytes]:
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._fd, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        return filter(None, lines)

    def _cancel(self, patterns: Sequence[str], *, key: str) -> None:
        found: dict[str, None] = {}
        unmatched = []
        for pattern in patterns:
            ids = [pattern] if pattern in self._open else matching(self._open, pattern)
            found |= dict.fromkeys(ids)
            unmatched += [] if ids else [pattern]
        self._unwanted += found
        answer = {"cancelled": list(found)[:MAX_NAMED], "num_cancelled": len(found), "unmatched": unmatched}
        self._answers.append({"request": key, **answer})
        self._write()

    # What happens ---------------------------------------------------------------------------------

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self._policy = self._deciding = policy
        self._ranks = dict.fromkeys(range(num_ranks))
        self.added(jobs)
        self._write()

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        self._open |= {info.job_id: info for info in jobs}
        self._counts["jobs"] += len(jobs)

    def node_joined(self, node: str, ranks: range) -> None:
        self._ranks |= dict.fromkeys(ranks, node)

    def node_left(self, node: str) -> None:
        self._ranks = {rank: name for rank, name in self._ranks.items() if name != node}
        self._last = {rank: last for rank, last in self._last.items() if rank in self._ranks}

    def dispatched(self, dispatch: Dispatch) -> None:
        for rank in dispatch.layout.ranks:
            self._last[rank] = dispatch

    def applied(self, event: Event) -> None:
        match event:
            case events.StopRequested() | events.ClosingTime():
                self._state = "stopping"
            case events.PolicyChanged():
                self._deciding = event.policy
            case _:
                pass

    def ended(self, outcome: JobOutcome) -> None:
        self._counts[outcome.status] += 1
        if outcome.status == "skipped":
            return
        self._open.pop(outcome.info.job_id, None)
        self._recent.append(
            {
                "id": outcome.info.job_id,
                "status": outcome.status,
                "ended_at": round(self._started_at + outcome.ended_s, 3),
                "latency_s": round(outcome.ended_s - outcome.arrival_s, 3),
                "error": outcome.error,
            }
        )

    def refreshed(self, snapshot: Snapshot) -> None:
        predicted = Forecast({}, frozenset())
        if len(snapshot.open) + len(snapshot.busy) <= MAX_FORECAST_JOBS:
            predicted = forecast(snapshot, policy=self._deciding)
        running = self._running(snapshot)
        self._rows = {
            "ends_at": self._ends_at(snapshot, predicted),
            "ranks": self._rank_rows(snapshot, running),
            "jobs": self._job_rows(snapshot, running, predicted),
        }
        self._write()

    def close(self) -> None:
        """Write the last state, and take no more requests."""
        self._state = "stopped" if self._open else "ended"
        self._rows = {"ends_at": None, "ranks": [], "jobs": []}
        self._write()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                (self._folder / REQUESTS_NAME).unlink()
            os.close(self._fd)
            self._fd = -1

    # The record -----------------------------------------------------------------------------------

    def _write(self) -> None:
        """Replace the record if it has changed; a disk that refuses it ends the record, not the run."""
        running = sum(row["state"] == "running" for row in self._rows["jobs"])
        open_counts = {"running": running, "waiting": max(0, len(self._open) - running)}
        record = {
            "pid": os.getpid(),
            "started_at": round(self._started_at, 3),
            "state": self._state,
            "policy": self._policy,
            "deciding": self._deciding,
            "watched": self._watched,
            "counts": {
                name: self._counts[name] for name in ("jobs", "skipped", "done", "failed", "cancelled")
            }
            | open_counts,
            **self._rows,
            "recent": list(self._recent),
            "answers": list(self._answers),
        }
        if self._is_given_up or (text := json.dumps(record)) == self._written:
            return
        self._written = text
        try:
            write_live(self._folder, record | {"written_at": round(time.time(), 3)})
        except OSError as error:
            self._is_given_up = True
            logger.warning("gfgen status shows no more of this run: %s", error)

    def _ends_at(self, snapshot: Snapshot, predicted: Forecast) -> float | None:
        """When the run ends; of many jobs by the sum of their work, which is renewed every SUM_S."""
        if predicted.ends_s or not (snapshot.open or snapshot.busy):
            return self._moment(predicted.end_s)
        if snapshot.now_s >= self._next_sum_s:
            self._next_sum_s = snapshot.now_s + SUM_S
            views = itertools.chain(snapshot.open.values(), snapshot.busy.values())
            work_s = sum(view.remaining_s for view in views)
            self._many_end_at = self._moment(snapshot.now_s + work_s / max(1, len(snapshot.ranks)))
        return self._many_end_at

    def _moment(self, time_s: float | None) -> float | None:
        return None if time_s is None or time_s == float("inf") else round(self._started_at + time_s, 1)

    def _running(self, snapshot: Snapshot) -> dict[str, RunningTask]:
        """By job: the tasks that run, without those queued behind them, and the next ones of jobs that are
        between two tasks on their ranks."""
        running: dict[str, RunningTask] = {}
        busy: set[int] = set()
        for each in snapshot.running:
            if not busy.issuperset(each.layout.ranks):
                running.setdefault(each.task.job_id, each)
            busy.update(each.layout.ranks)
        for last in self._last.values():
            job_id, ranks = last.task.job_id, last.layout.ranks
            view = snapshot.open.get(job_id)
            if view is None or job_id in running or not busy.isdisjoint(ranks):
                continue
            if all(self._last[rank] is last for rank in ranks):
                running[job_id] = RunningTask(view.next_task, last.layout, snapshot.now_s)
        return running

    def _rank_rows(self, snapshot: Snapshot, running: Mapping[str, RunningTask]) -> list[dict[str, Any]]:
        tasks: dict[int, RunningTask] = {}
        for each in running.values():
            tasks = dict.fromkeys(each.layout.ranks, each) | tasks
        living = {view.rank for view in snapshot.ranks}
        return [
            {
                "rank": rank,
                "node": node,
                "state": "busy" if rank in tasks else "idle" if rank in living else "down",
                "job": tasks[rank].task.job_id if rank in tasks else None,
                "stage": str(tasks[rank].task.stage) if rank in tasks else None,
            }
            for rank, node in self._ranks.items()
        ]

    def _job_rows(
        self, snapshot: Snapshot, running: Mapping[str, RunningTask], predicted: Forecast
    ) -> list[dict[str, Any]]:
        """Running jobs, then the others in the order of their predicted starts, as far as there is one.

        Last come those that wait for their arrival, for a model or for the end of their write.
        """
        chosen: dict[str, None] = {}
        for job_id in itertools.chain(running, predicted.starts_s, snapshot.open, snapshot.busy, self._open):
            if job_id in self._open:
                chosen[job_id] = None
            if len(chosen) == MAX_ROWS:
                break
        views = {id_: snapshot.open.get(id_) or snapshot.busy.get(id_) for id_ in chosen}
        return [self._job_row(id_, view, running.get(id_), predicted) for id_, view in views.items()]

    def _job_row(
        self, job_id: str, view: JobView | None, running: RunningTask | None, predicted: Forecast
    ) -> dict[str, Any]:
        task = running.task if running else view.next_task if view else None
        deadline_s = None if view is None else view.deadline_s
        steps = self._open[job_id].num_tasks - 3
        is_past = task is not None and task.stage is Stage.DECODE
        return {
            "id": job_id,
            "state": "running" if running else "waiting",
            "stage": None if task is None else str(task.stage),
            "step": 0 if task is None else steps if is_past else task.step or 0,
            "steps": steps,
            "ranks": list(running.layout.ranks) if running else [],
            "ends_at": self._moment(predicted.ends_s.get(job_id)),
            "deadline_at": self._moment(deadline_s),
            "is_late": job_id in predicted.late,
        }
