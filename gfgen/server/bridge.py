"""The run's side of the server: starts the front again when it dies, and talks with it over the link.

`RunBridge` turns the front's messages into jobs and events, and what happens into notes.

Threads: the control loop calls everything under "The control loop's side" and alone touches that state. The
supervisor's thread puts messages into `_inbox` and wakes the loop. Each link has a thread that sends the
notes of its outbox, so a front that hangs or dies does not delay the loop.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gfgen.errors import InputError, RunError
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobOutcome, Observer, RunView
from gfgen.server.protocol import link as messages
from gfgen.server.protocol.limits import BACKLOG
from gfgen.snapshot import JobView, Snapshot
from gfgen.system.lifeline import module_command, module_environment

logger = logging.getLogger(__name__)

REFRESH_S = 0.25
"""Interval of progress reports, from which the front makes predictions."""
PAUSE_S = 0.02
"""Pause between two sends, unless a job ends. It groups notes, so that the sender, which competes with the
loop for the interpreter lock, and the front wake a few dozen times per second."""
MAX_UNSENT = 200_000
"""Unread notes after which a front counts as hung."""
OPEN_JOBS_S = 60.0
MAX_AT_ONCE = 8
"""Jobs and events that one turn of the loop takes from the front; each costs tens of microseconds."""
MAX_ROWS = 200


@dataclass(frozen=True, slots=True)
class Joined:
    link: messages.MessageSocket


@dataclass(frozen=True, slots=True)
class Left:
    link: messages.MessageSocket


class RunBridge(Observer):
    """Requests, intake and observer of one run, for successive fronts.

    `on_policy` is called with the text of each requested policy.
    """

    refresh_s = REFRESH_S

    def __init__(self, *, on_policy: Callable[[str], None]) -> None:
        self._on_policy = on_policy
        self._longest_turn_s, self._num_turns = 0.0, 0
        """Since the last report."""
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._run_info: messages.RunInfo | None = None
        self._outbox: _Outbox | None = None
        self._waiting: deque[AdmittedJob] = deque()
        """Accepted jobs that the loop has not taken yet."""
        self._pending_events: deque[Event] = deque()
        """Events from the front that the loop has not taken yet."""
        self._known: set[str] = set()
        """Jobs that run, wait, or have an unconfirmed outcome."""
        self._unconfirmed: dict[str, JobOutcome] = {}
        self._ends: tuple[tuple[int, float], ...] = ()
        """Predicted ends of running tasks, as last reported."""
        self._views: dict[str, JobView] = {}
        """The last views that the front was sent."""
        self.view = RunView()

    # The supervisor's side --------------------------------------------------------------------------

    def received(self, message: Any) -> None:
        """From a front, of one (Joined, Left), or the error that ends the run."""
        self._inbox.put(message)
        self._wake()

    # The control loop's side: requests and intake ---------------------------------------------------

    def open(self, run_info: messages.RunInfo, *, is_stopped: Callable[[], bool]) -> list[AdmittedJob] | None:
        """Announce the run to the front; returns the store's open jobs, or None if stopped meanwhile.

        Raises: RunError if there is no front or it does not answer.
        """
        self._run_info = run_info
        deadline_s = time.monotonic() + OPEN_JOBS_S
        while time.monotonic() < deadline_s:
            if is_stopped():
                return None
            try:
                message = self._inbox.get(timeout=0.05)
            except queue.Empty:
                continue
            self._take(message, now_s=0.0)
            if isinstance(message, messages.OpenJobIds):
                jobs = list(self._waiting)
                self._waiting.clear()
                return jobs
        raise RunError(f"the HTTP process did not send the open jobs within {OPEN_JOBS_S:g} s")

    def fileno(self) -> int:
        return self._wake_fd

    def take_events(self, now_s: float) -> Sequence[Event]:
        """A limited number of events from the front; new jobs wait for `take`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while not self._inbox.empty() and len(self._pending_events) < MAX_AT_ONCE:
            self._pending_events += self._take(self._inbox.get(), now_s=now_s)
        taken = [self._pending_events.popleft() for _ in range(min(MAX_AT_ONCE, len(self._pending_events)))]
        if self._pending_events or not self._inbox.empty():
            self._wake()
        return taken

    def take(self) -> list[AdmittedJob]:
        """A limited number of newly accepted jobs; the loop wakes again for the rest."""
        jobs = [self._waiting.popleft() for _ in range(min(MAX_AT_ONCE, len(self._waiting)))]
        if self._waiting:
            self._wake()
        return jobs

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _take(self, message: Any, *, now_s: float) -> Sequence[Event]:
        match message:
            case messages.SubmitJobs():
                self._submit(message.jobs)
            case messages.OpenJobIds():
                return self._cancel_forgotten(message.job_ids, now_s)
            case messages.CancelJobs():
                return self._cancel(message.job_ids, now_s)
            case events.PriorityChanged():
                return self._prioritise(replace(message, time_s=now_s))
            case events.PolicyChanged():
                self._on_policy(message.policy)
                return [replace(message, time_s=now_s)]
            case messages.OutcomesStored():
                for job_id in message.job_ids:
                    self._unconfirmed.pop(job_id, None)
                    self._known.discard(job_id)
            case Joined():
                self._send_state(message.link)
            case Left():
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

    def _cancel_forgotten(self, job_ids: Sequence[str], now_s: float) -> Sequence[Event]:
        unwanted = self._known.difference(job_ids) - self._unconfirmed.keys()
        return self._cancel(tuple(sorted(unwanted)), now_s)

    def _cancel(self, job_ids: Sequence[str], now_s: float) -> Sequence[Event]:
        """Jobs that the loop has not taken yet are dropped without an event."""
        dropped = {job.job_id for job in self._waiting}.intersection(job_ids)
        if dropped:
            self._waiting = deque(job for job in self._waiting if job.job_id not in dropped)
        self._known -= dropped
        return [events.JobCancelled(now_s, job_id) for job_id in job_ids if job_id not in dropped]

    def _prioritise(self, change: events.PriorityChanged) -> Sequence[Event]:
        """Jobs that the loop has not taken yet change without an event."""
        for place, job in enumerate(self._waiting):
            if job.job_id == change.job_id:
                self._waiting[place] = job.with_priority(change.priority)
                return ()
        return [change]

    def _send_state(self, link: messages.MessageSocket) -> None:
        assert self._run_info is not None
        if self._outbox is not None:
            self._outbox.close()
        self._outbox = _Outbox(link)
        self._views.clear()
        self._ends = ()
        self._note(self._run_info)
        states = self.view.ranks.values()
        self._note(messages.RankStates(tuple(replace(state, queue=[], last=None) for state in states)))
        if self.view.policy_change is not None:
            self._note(self.view.policy_change)
        for dispatch in self.view.running.values():
            self._note(_slim(dispatch))
        for outcome in self._unconfirmed.values():
            self._note(outcome)

    # The control loop's side: observer --------------------------------------------------------------

    def node_joined(self, node: str, ranks: range) -> None:
        self._note(messages.NodeRanks(node, ranks))

    def node_left(self, node: str) -> None:
        self._note(messages.NodeGone(node))

    def dispatched(self, dispatch: Dispatch) -> None:
        self._note(_slim(dispatch))

    def applied(self, event: Event) -> None:
        if not isinstance(event, events.Wakeup):
            self._note(event)

    def ended(self, outcome: JobOutcome) -> None:
        self._unconfirmed[outcome.info.job_id] = outcome
        self._views.pop(outcome.info.job_id, None)
        self._note(outcome)

    def refreshed(self, snapshot: Snapshot) -> None:
        """Report progress and predicted ends if they have changed. Unchanged views are the same objects."""
        rows: list[messages.JobProgress] = []
        for views in (snapshot.busy, snapshot.open):
            changed = (view for job_id, view in views.items() if self._views.get(job_id) is not view)
            for view in itertools.islice(changed, MAX_ROWS - len(rows)):
                self._views[view.job_id] = view
                index, remaining_s, write_s = view.next_task.index, view.remaining_s, view.write_s
                rows.append((view.job_id, index, remaining_s, write_s, view.last_layout))
        numbers = {dispatch.task: number for number, dispatch in self.view.running.items()}
        running = [each for each in snapshot.running if each.task in numbers]
        ends = tuple((numbers[each.task], each.predicted_end_s) for each in running)
        new_ends = () if ends == self._ends else ends
        turns = self._longest_turn_s, self._num_turns
        self._note(messages.ProgressUpdate(tuple(rows), new_ends, *turns))
        self._ends, self._longest_turn_s, self._num_turns = ends, 0.0, 0

    def turned(self, took_s: float) -> None:
        self._longest_turn_s = max(self._longest_turn_s, took_s)
        self._num_turns += 1

    def close(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
            self._outbox.wait()

    def _note(self, note: Any) -> None:
        if self._outbox is not None:
            self._outbox.put(note)


def _slim(dispatch: Dispatch) -> Dispatch:
    return replace(dispatch, transfers=()) if dispatch.transfers else dispatch


class _Outbox:
    """Notes for one front and the thread that sends them."""

    def __init__(self, link: messages.MessageSocket) -> None:
        self.link = link
        self._notes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_urgent = threading.Event()
        self._thread = threading.Thread(target=self._send, name="notes", daemon=True)
        self._thread.start()

    def put(self, note: Any) -> None:
        if self._notes.qsize() > MAX_UNSENT:
            logger.error("the HTTP process does not read its messages; restarting it")
            self.link.close()
        else:
            self._notes.put(note)
            if isinstance(note, JobOutcome):
                self._is_urgent.set()

    def close(self) -> None:
        self._notes.put(None)
        self._is_urgent.set()

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
            self._is_urgent.wait(PAUSE_S)
            self._is_urgent.clear()


MAX_DEATHS = 5
DEATHS_WINDOW_S = 60.0
"""After MAX_DEATHS within this time the run ends with an error."""
BIND_S = 5.0
"""How long to wait for the port of a killed server, whose front the kernel kills too (lifeline.py)."""
DRAIN_S = 10.0


def listen(host: str, port: int) -> socket.socket:
    """Raises: InputError if the address is in use or not available."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    both = is_ipv6 and socket.has_dualstack_ipv6()  # :: is for IPv4, too
    deadline_s = time.monotonic() + BIND_S
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                reason = str(error.strerror or error).partition(" (while")[0]
                raise InputError(
                    f"--host {host} --port {port}: cannot listen there ({reason}); choose another"
                ) from None
        time.sleep(0.1)


class Supervisor:
    """Runs the front process from `start` to `stop`."""

    def __init__(self, listener: socket.socket, settings: messages.FrontSettings, bridge: RunBridge) -> None:
        self._listener = listener
        self._settings = settings
        self._bridge = bridge
        self._is_over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: messages.MessageSocket | None = None
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._link is not None:
            self._link.close()
        self._thread.join(DRAIN_S + 1.0)
        self._listener.close()

    def _run(self) -> None:
        deaths: list[float] = []
        while not self._is_over.is_set():
            try:
                code = self._serve()
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                what = f"ended ({how}); starting another one"
            except OSError as error:  # no memory or descriptor: perhaps temporary
                what = f"cannot be started ({error.strerror}); retrying"
            if self._is_over.is_set():
                return
            now_s = time.monotonic()
            deaths = [at for at in deaths if at > now_s - DEATHS_WINDOW_S] + [now_s]
            logger.warning("the HTTP process %s", what)
            if len(deaths) >= MAX_DEATHS:
                times = f"{len(deaths)} times within {DEATHS_WINDOW_S:g} s"
                what = f"the HTTP process died, or could not be started, {times}"
                self._bridge.received(RunError(f"{what}; see its messages above"))
                return
            self._is_over.wait(0.1 * len(deaths))

    def _serve(self) -> int:
        ours, theirs = socket.socketpair()
        numbers = map(str, (theirs.fileno(), self._listener.fileno()))
        command = module_command("gfgen.server.http.front", *numbers)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(), self._listener.fileno()),
                    env=module_environment(),
                    stdin=subprocess.DEVNULL,
                )
        except OSError:
            ours.close()
            raise
        link = self._link = messages.MessageSocket(ours)
        if self._is_over.is_set():  # stop() came between two fronts
            link.close()
        try:
            link.send(self._settings)
            self._bridge.received(Joined(link))
            while (message := link.receive()) is not None:
                self._bridge.received(message)
        except OSError:
            pass
        self._bridge.received(Left(link))
        link.close()
        if self._is_over.is_set():  # ends it while it still imports; later it ignores signals
            self._process.terminate()
        return self._reap(self._process)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            logger.warning("the HTTP process does not end; killing it")
            process.kill()
            return process.wait()
