"""What a run tells other processes, and what they ask of it: `gfgen status`, `top` and `cancel`.

`.gfgen.live.json` says what a run does now, or did last. Whether the run still lives, the lock says
(lock.py). In a watched folder, and in that of a server, the record has only `output`, the folder of the
run, or `url`. `.gfgen.requests` is a named pipe that exists during a run: each line is a request in JSON.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from gfgen.errors import RunError
from gfgen.graph import Stage
from gfgen.runtime.core import events
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.simulate.forecast import Forecast, forecast
from gfgen.snapshot import JobView, RunningTask, Snapshot

logger = logging.getLogger(__name__)

LIVE_NAME, REQUESTS_NAME = ".gfgen.live.json", ".gfgen.requests"
VERSION = 1
PATIENCE_S = 10.0
"""How long a request waits for room in the pipe: a run reads it several times a second."""
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
_WAKE = b"\n"


class LiveRun(Observer):
    """Keeps the live record of a run, and takes requests to cancel jobs; all in the control loop."""

    refresh_s = 1.0

    def __init__(self, folder: Path, *, started_at: float, watched: Path | None = None) -> None:
        self._folder, self._started_at = folder, started_at
        self._watched = None if watched is None else str(watched.absolute())
        self._recent: deque[dict[str, Any]] = deque(maxlen=MAX_RECENT)
        self._answers: deque[dict[str, Any]] = deque(maxlen=MAX_ANSWERS)
        self._unwanted: deque[str] = deque()
        self._is_closed = False
        self._rows: dict[str, Any] = {"ends_at": None, "ranks": [], "jobs": []}
        self._written: str | None = ""
        """None: it cannot be written any more."""
        self._rest = b""
        """The beginning of a request."""
        self._fd = -1
        try:
            self._fd = open_requests(folder)
        except OSError as error:
            logger.info("no requests from outside: this file system has no pipes (%s)", error.strerror)

    def fileno(self) -> int:
        """Negative if it takes no requests."""
        return self._fd

    def take_events(self, now_s: float) -> Sequence[Event]:
        """The requests as events, a limited number in each turn."""
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._fd, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        for line in filter(None, lines):
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

    def _cancel(self, patterns: Sequence[str], *, key: str) -> None:
        found: dict[str, None] = {}
        unmatched = []
        for pattern in patterns:
            open_ids = itertools.chain(self.view.open, self.view.backlog)
            ids = [pattern] if pattern in self.view.open else matching(open_ids, pattern)
            found |= dict.fromkeys(ids)
            unmatched += [] if ids else [pattern]
        self._unwanted += found
        answer = {"cancelled": list(found)[:MAX_NAMED], "num_cancelled": len(found), "unmatched": unmatched}
        self._answers.append({"request": key, **answer})
        self._write()

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self._write()

    def ended(self, outcome: JobOutcome) -> None:
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
            predicted = forecast(snapshot, policy=self.view.deciding)
        running = self._running(snapshot)
        self._rows = {
            "ends_at": self._ends_at(snapshot, predicted),
            "ranks": self._rank_rows(snapshot, running),
            "jobs": self._job_rows(snapshot, running, predicted),
        }
        self._write()

    def close(self) -> None:
        """Write the last state, and take no more requests."""
        self._is_closed = True
        self._rows = {"ends_at": None, "ranks": [], "jobs": []}
        self._write()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                (self._folder / REQUESTS_NAME).unlink()
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> None:
        """Replace the record if it has changed; a disk that refuses it ends the record, not the run."""
        view = self.view
        state, num_open = "stopping" if view.is_stopping else "running", len(view.open) + len(view.backlog)
        running = sum(row["state"] == "running" for row in self._rows["jobs"])
        record = {
            "pid": os.getpid(),
            "started_at": round(self._started_at, 3),
            "state": ("stopped" if num_open else "ended") if self._is_closed else state,
            "policy": view.policy,
            "deciding": view.deciding,
            "watched": self._watched,
            "counts": {
                "jobs": view.num_jobs,
                "skipped": view.num_skipped,
                **{name: view.num_ended[name] for name in ("done", "failed", "cancelled")},
                "running": running,
                "waiting": max(0, num_open - running),
            },
            **self._rows,
            "recent": list(self._recent),
            "answers": list(self._answers),
        }
        if self._written in (None, text := json.dumps(record)):
            return
        self._written = text
        try:
            write_live(self._folder, record | {"written_at": round(time.time(), 3)})
        except OSError as error:
            self._written = None
            logger.warning("gfgen status shows no more of this run: %s", error)

    def _ends_at(self, snapshot: Snapshot, predicted: Forecast) -> float | None:
        """When the run ends; of many jobs by the sum of their work."""
        if predicted.ends_s or not (snapshot.open or snapshot.busy):
            return self._moment(predicted.end_s)
        views = itertools.chain(snapshot.open.values(), snapshot.busy.values())
        work_s = sum(view.remaining_s for view in views) + snapshot.unseen_s
        return self._moment(snapshot.now_s + work_s / max(1, len(snapshot.ranks)))

    def _moment(self, time_s: float | None) -> float | None:
        return None if time_s is None or time_s == float("inf") else round(self._started_at + time_s, 1)

    def _running(self, snapshot: Snapshot) -> dict[str, RunningTask]:
        """By job: the tasks that run, or are next for jobs between two tasks on their ranks."""
        running: dict[str, RunningTask] = {}
        busy: set[int] = set()
        for each in snapshot.running:
            if not busy.issuperset(each.layout.ranks):
                running.setdefault(each.task.job_id, each)
            busy.update(each.layout.ranks)
        states = self.view.ranks
        for last in [state.last for state in states.values() if state.last is not None]:
            job_id, ranks = last.task.job_id, last.layout.ranks
            view = snapshot.open.get(job_id)
            if view is None or job_id in running or not busy.isdisjoint(ranks):
                continue
            if all(states[rank].last is last for rank in ranks):
                running[job_id] = RunningTask(view.next_task, last.layout, snapshot.now_s)
        return running

    def _rank_rows(self, snapshot: Snapshot, running: Mapping[str, RunningTask]) -> list[dict[str, Any]]:
        tasks = {rank: each for each in reversed([*running.values()]) for rank in each.layout.ranks}
        living = {view.rank for view in snapshot.ranks}
        return [
            {
                "rank": rank,
                "node": state.node,
                "state": "busy" if rank in tasks else "idle" if rank in living else "down",
                "job": tasks[rank].task.job_id if rank in tasks else None,
                "stage": str(tasks[rank].task.stage) if rank in tasks else None,
            }
            for rank, state in self.view.ranks.items()
        ]

    def _job_rows(
        self, snapshot: Snapshot, running: Mapping[str, RunningTask], predicted: Forecast
    ) -> list[dict[str, Any]]:
        """Running jobs, then the others by predicted starts, last those that wait for something."""
        chosen: dict[str, None] = {}
        for job_id in itertools.chain(
            running, predicted.starts_s, snapshot.open, snapshot.busy, self.view.open
        ):
            if job_id in self.view.open:
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
        steps = self.view.open[job_id].num_tasks - 3
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


def write_live(folder: Path, record: Mapping[str, Any]) -> None:
    """Replace the record of a folder at once. Raises OSError."""
    path, partial = folder / LIVE_NAME, folder / f"{LIVE_NAME}.partial"
    partial.write_text(json.dumps({"gfgen_live": VERSION, **record}), encoding="utf-8")
    partial.replace(path)


def read_live(folder: Path) -> dict[str, Any] | None:
    """The record of a folder; None if it has none that this version can read."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads((folder / LIVE_NAME).read_text(encoding="utf-8"))
        if isinstance(record, dict) and record.get("gfgen_live") == VERSION:
            return record
    return None


def open_requests(folder: Path) -> int:
    """A descriptor of a new pipe for requests. Raises OSError where the file system has no pipes."""
    path = folder / REQUESTS_NAME
    path.unlink(missing_ok=True)  # of a killed run: the caller holds the folder's lock
    os.mkfifo(path, 0o600)
    # For writing, too: otherwise the pipe reads as ended whenever no request is open.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def send_request(folder: Path, request: Mapping[str, Any]) -> None:
    """Hand a request to the run of a folder, in one write. Raises: RunError if no run reads there."""
    line = json.dumps(request).encode() + b"\n"
    assert len(line) <= select.PIPE_BUF
    path, deadline_s = folder / REQUESTS_NAME, time.monotonic() + PATIENCE_S
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except PermissionError:
        raise RunError(f"{folder}: its run belongs to another user, who alone can send requests") from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENXIO):
            raise
        raise RunError(f"{folder}: its run takes no requests now; it is loading models or ending") from None
    try:
        while True:
            try:
                os.write(fd, line)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise RunError(f"{folder}: its run reads no requests; it may be stopped") from None
                time.sleep(0.05)
            except BrokenPipeError:
                raise RunError(f"{folder}: its run has just ended") from None
            else:
                return
    finally:
        os.close(fd)
