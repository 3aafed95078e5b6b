"""The run's side of the link: what the front asks becomes jobs and events, what happens becomes notes.

Threads: the control loop calls everything under "The control loop's side" and is the only one that touches
what is kept there. The supervisor's thread puts messages into `_inbox` and rings. A thread of each link
takes notes out of its outbox and sends them: so neither a front that does not read nor one that has died
holds up the loop.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gfgen.errors import RunError
from gfgen.runtime.control.control import Backend
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.server.bridge.loop_hooks import LoopTimer
from gfgen.server.protocol.link import (
    CancelJobs,
    JobProgress,
    LoopTimings,
    MessageSocket,
    OpenJobs,
    OutcomesStored,
    PredictedEnds,
    ProgressUpdate,
    RunInfo,
    SetPolicy,
    SubmitJobs,
)
from gfgen.snapshot import JobView, RunningTask, Snapshot

logger = logging.getLogger(__name__)

REFRESH_S = 0.25
"""How often the front is told where the open jobs stand, which is what predictions are made of."""
PAUSE_S = 0.003
"""Between two sends: what happens meanwhile goes together, so that hundreds of notes in a second wake the
sender, which competes with the loop for the interpreter, a few hundred times at most."""
MAX_UNSENT = 200_000
"""Notes that a front may leave unread; it is taken for hung then."""
HELLO_S = 60.0
"""In which a new front has to say which jobs are open."""
_UNTOLD = (events.Wakeup,)
MAX_AT_ONCE = 8
"""Jobs, and events, that one turn of the loop takes from the front: each costs tens of microseconds."""
MAX_ROWS = 200
"""Jobs whose place is told at once."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """A front has come."""

    link: MessageSocket


@dataclass(frozen=True, slots=True)
class _Left:
    """A front is gone."""

    link: MessageSocket


class RunBridge(Observer):
    """Requests, intake and observer of one run, for one front after the other.

    `on_policy` is told when another policy is asked for, by its text.
    """

    refresh_s = REFRESH_S

    def __init__(self, *, on_policy: Callable[[str], None]) -> None:
        self._on_policy = on_policy
        self.loop_timer: LoopTimer | None = None
        """What times the turns of the loop, if anything does."""
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._serving: RunInfo | None = None
        self._outbox: _Outbox | None = None
        self._waiting: deque[AdmittedJob] = deque()
        """Accepted, and not taken by the loop yet."""
        self._asked: deque[Event] = deque()
        """What the front has asked for, and the loop has not been told yet."""
        self._known: set[str] = set()
        """Jobs that are at work, wait, or have ended without the front's having noted it."""
        self._unnoted: dict[str, JobOutcome] = {}
        self._ranks: dict[int, list[Event]] = {}
        """By rank: the last time that it was lost, if ever, and that it was ready since."""
        self._running: dict[int, Dispatch] = {}
        """By number: what runs, with its last predicted end."""
        self._views: dict[str, JobView] = {}
        """As the front knows them."""
        self._policy: events.PolicyChanged | None = None
        self._loads: list[events.ModelsChanged | events.RankLoaded | events.RankReady] = []
        """The last change of models, and the ranks that have loaded, or become ready with them, since and
        were not lost after that."""

    def timed(self, backend: Backend) -> LoopTimer:
        """Note how long the turns are of the loop that asks this backend."""
        self.loop_timer = LoopTimer(backend)
        return self.loop_timer

    # The supervisor's side --------------------------------------------------------------------------

    def joined(self, link: MessageSocket) -> None:
        """A front has come that reads this link."""
        self._put(_Joined(link))

    def received(self, message: Any) -> None:
        self._put(message)

    def left(self, link: MessageSocket) -> None:
        """The front of this link is gone."""
        self._put(_Left(link))

    def failed(self, error: Exception) -> None:
        """There will be no front any more: the run is to end with this."""
        self._put(error)

    def _put(self, message: Any) -> None:
        self._inbox.put(message)
        self._ring()

    # The control loop's side: requests and intake ---------------------------------------------------

    def open(self, run_info: RunInfo, *, is_stopped: Callable[[], bool]) -> list[AdmittedJob] | None:
        """Tell the front what is served; the jobs that it has in store, or None when stopped meanwhile.

        Raises: RunError when there is no front, or when it does not answer.
        """
        self._serving = run_info
        deadline_s = time.monotonic() + HELLO_S
        while time.monotonic() < deadline_s:
            if is_stopped():
                return None
            try:
                message = self._inbox.get(timeout=0.05)
            except queue.Empty:
                continue
            self._take(message, now_s=0.0)
            if isinstance(message, OpenJobs):
                jobs = list(self._waiting)
                self._waiting.clear()
                return jobs
        raise RunError(f"the HTTP process has not told within {HELLO_S:g} s which jobs are open")

    def fileno(self) -> int:
        return self._bell

    def take_events(self, now_s: float) -> Sequence[Event]:
        """What the front has asked for; new jobs are there for `take`. What is much comes in parts."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while not self._inbox.empty() and len(self._asked) < MAX_AT_ONCE:
            self._asked += self._take(self._inbox.get(), now_s=now_s)
        asked = [self._asked.popleft() for _ in range(min(MAX_AT_ONCE, len(self._asked)))]
        if self._asked or not self._inbox.empty():
            self._ring()
        return asked

    def take(self) -> list[AdmittedJob]:
        """Jobs that were accepted since the last call; the loop turns again for the rest."""
        jobs = [self._waiting.popleft() for _ in range(min(MAX_AT_ONCE, len(self._waiting)))]
        if self._waiting:
            self._ring()
        return jobs

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _take(self, message: Any, *, now_s: float) -> Sequence[Event]:
        match message:
            case SubmitJobs():
                self._submit(message.jobs)
            case OpenJobs():
                return self._greet(message.job_ids, now_s)
            case CancelJobs():
                return self._cancel(message.job_ids, now_s)
            case SetPolicy():
                self._on_policy(message.policy)
                return [events.PolicyChanged(now_s, message.policy, "asked for over HTTP")]
            case OutcomesStored():
                for job_id in message.job_ids:
                    self._unnoted.pop(job_id, None)
                    self._known.discard(job_id)
            case _Joined():
                self._welcome(message.link)
            case _Left():
                if self._outbox is not None and self._outbox.link is message.link:
                    self._outbox.close()
                    self._outbox = None
            case Exception():
                raise message
            case _:
                raise AssertionError(f"the front sent {message!r}")
        return ()

    def _submit(self, jobs: Sequence[AdmittedJob]) -> None:
        new = [job for job in jobs if job.job_id not in self._known]
        self._known |= {job.job_id for job in new}
        self._waiting += new

    def _greet(self, job_ids: Sequence[str], now_s: float) -> Sequence[Event]:
        """A new front knows all open jobs: what it does not know is not wanted any more."""
        unwanted = self._known.difference(job_ids) - self._unnoted.keys()
        return self._cancel(tuple(sorted(unwanted)), now_s)

    def _cancel(self, job_ids: Sequence[str], now_s: float) -> Sequence[Event]:
        """Jobs that the loop has not taken yet are simply dropped."""
        dropped = {job.job_id for job in self._waiting}.intersection(job_ids)
        if dropped:
            self._waiting = deque(job for job in self._waiting if job.job_id not in dropped)
        self._known -= dropped
        return [events.JobCancelled(now_s, job_id) for job_id in job_ids if job_id not in dropped]

    def _welcome(self, link: MessageSocket) -> None:
        """Tell a new front where everything stands."""
        assert self._serving is not None
        if self._outbox is not None:
            self._outbox.close()
        self._outbox = _Outbox(link)
        self._views.clear()
        self._tell(self._serving)
        for told in self._ranks.values():
            for event in told:
                self._tell(event)
        for event in self._loads:
            self._tell(event)
        if self._policy is not None:
            self._tell(self._policy)
        for dispatch in self._running.values():
            self._tell(dispatch)
        for outcome in self._unnoted.values():
            self._tell(outcome)

    # The control loop's side: observer --------------------------------------------------------------

    def dispatched(self, dispatch: Dispatch) -> None:
        slim = replace(dispatch, transfers=()) if dispatch.transfers else dispatch
        self._running[dispatch.number] = slim
        self._tell(slim)

    def applied(self, event: Event) -> None:
        match event:
            case events.TaskDone() | events.TaskFailed():
                self._running.pop(event.dispatch, None)
            case events.RankReady():
                self._ranks.setdefault(event.rank, []).append(event)
                if self._loads:
                    self._loads.append(event)
            case events.RankLost():
                self._ranks[event.rank] = [event]
                self._loads = [
                    told
                    for told in self._loads
                    if isinstance(told, events.ModelsChanged) or told.rank != event.rank
                ]
            case events.PolicyChanged():
                self._policy = event
            case events.ModelsChanged():
                self._loads = [event]
            case events.RankLoaded():
                self._loads.append(event)
        if not isinstance(event, _UNTOLD):
            self._tell(event)

    def ended(self, outcome: JobOutcome) -> None:
        self._unnoted[outcome.info.job_id] = outcome
        self._views.pop(outcome.info.job_id, None)
        self._tell(outcome)

    def refreshed(self, snapshot: Snapshot) -> None:
        """Tell which jobs stand elsewhere than before, and which tasks are predicted to end at another time.

        Views that have not changed are the same objects.
        """
        rows: list[JobProgress] = []
        for views in (snapshot.busy, snapshot.open):
            changed = (view for job_id, view in views.items() if self._views.get(job_id) is not view)
            for view in itertools.islice(changed, MAX_ROWS - len(rows)):
                self._views[view.job_id] = view
                rows.append((view.job_id, view.next_task.index, view.remaining_s, view.last_layout))
        if rows:
            self._tell(ProgressUpdate(tuple(rows)))
        if ends := self._renewed_ends(snapshot.running):
            self._tell(PredictedEnds(ends))
        if self.loop_timer is not None:
            self._tell(LoopTimings(*self.loop_timer.take()))

    def _renewed_ends(self, running: Sequence[RunningTask]) -> tuple[tuple[int, float], ...]:
        """Of tasks that are predicted to end at another time than the front was told."""
        numbers = {dispatch.task: number for number, dispatch in self._running.items()}
        ends = []
        for view in running:
            number = numbers.get(view.task)
            if number is None:
                continue
            dispatch = self._running[number]
            if dispatch.predicted_end_s != view.predicted_end_s:
                self._running[number] = replace(dispatch, predicted_end_s=view.predicted_end_s)
                ends.append((number, view.predicted_end_s))
        return tuple(ends)

    def close(self) -> None:
        """Send what is left."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox.wait()

    def _tell(self, note: Any) -> None:
        if self._outbox is not None:
            self._outbox.put(note)


class _Outbox:
    """Notes for one front, and the thread that sends them."""

    def __init__(self, link: MessageSocket) -> None:
        self.link = link
        self._notes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="notes", daemon=True)
        self._thread.start()

    def put(self, note: Any) -> None:
        if self._notes.qsize() > MAX_UNSENT:
            logger.error("the HTTP process does not read what it is told; it is started anew")
            self.link.close()
        else:
            self._notes.put(note)

    def close(self) -> None:
        """Nothing comes any more."""
        self._notes.put(None)

    def wait(self, timeout_s: float = 5.0) -> None:
        self._thread.join(timeout_s)

    def _send(self) -> None:
        while True:
            notes = [self._notes.get()]
            while not self._notes.empty():
                notes.append(self._notes.get())
            try:
                self.link.send([note for note in notes if note is not None])
            except OSError:
                return
            if notes[-1] is None:
                return
            time.sleep(PAUSE_S)
