"""The process of a node: one session, which runs the jobs that come over a connection.

It is a child of the node's actor, because a session starts processes from its main thread, which an actor
does not have.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gfgen import log
from gfgen.cluster.node import Note
from gfgen.errors import GfgenError, InterruptedRunError, in_one_line
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer, skipped_outcome
from gfgen.runtime.simulate.choosers import ThreadedChooser
from gfgen.session.admission import Admission
from gfgen.session.ranks import AskedRanks, Ranks, made_with
from gfgen.session.session import Arrivals, Session, SessionOptions
from gfgen.snapshot import JobView, Snapshot

logger = logging.getLogger(__name__)

NOTES_S = 0.25
"""Between two reports of what ranks do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """What all nodes of a run have in common."""

    policy: str
    model: str
    ranks: AskedRanks
    lookahead_s: float
    work_dir: str
    """The driver's; relative paths of models start there, if the node has such a folder."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message: where files go, and which models to load."""

    options: MemberOptions
    folder: Path
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Start:
    info: JobInfo
    attempt: int


@dataclass(frozen=True, slots=True)
class Cancel:
    attempt: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The ranks have loaded the models."""

    ranks: Ranks
    made_with: Mapping[str, Mapping[str, Any]]
    """By model."""
    began_at: float
    """Unix time at the start of the node's run, by its clock."""


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """`outcome.info.file` starts with the folder of the attempt."""

    attempt: int
    outcome: JobOutcome


@dataclass(frozen=True, slots=True)
class Noted:
    """What the ranks have done since the last one."""

    notes: Sequence[Note]


def attempt_folder(attempt: int) -> str:
    return f"attempt-{attempt}"


class JobFeed(Observer):
    """Jobs and requests from the connection, and the ends of jobs to it.

    A thread reads; the control loop calls everything else.
    """

    refresh_s = NOTES_S

    def __init__(self, connection: Connection, admission: Admission, chooser: ThreadedChooser) -> None:
        self.chooser = chooser
        """Chooses among policies, if the run's policy does."""
        self._connection = connection
        self._admission = admission
        self._inbox: queue.SimpleQueue[Start | Cancel | events.Event | None] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: list[AdmittedJob] = []
        self._attempts: dict[str, int] = {}
        """By job."""
        self._early: set[int] = set()
        """Attempts that were cancelled before they came."""
        self._notes: list[Note] = []
        self._views: dict[str, JobView] = {}
        threading.Thread(target=self._read, name="jobs", daemon=True).start()

    def _read(self) -> None:
        message: Start | Cancel | events.Event | None = None
        with contextlib.suppress(EOFError, OSError):
            while (message := self._connection.recv()) is not None:
                self._inbox.put(message)
                os.eventfd_write(self._wake_fd, 1)
        self._inbox.put(None)
        os.eventfd_write(self._wake_fd, 1)

    def fileno(self) -> int:
        return self._wake_fd

    def take_events(self, now_s: float) -> Sequence[events.Event]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        found: list[events.Event] = []
        while not self._inbox.empty():
            match self._inbox.get():
                case Start() as start:
                    self._admit(start)
                case Cancel(attempt):
                    found += self._cancel(attempt, now_s)
                case events.PolicyChanged() as change:
                    self.chooser.follow(load_policy(change.policy).choose)
                    found.append(replace(change, time_s=now_s))
                case events.PriorityChanged() as change:
                    found += self._prioritise(replace(change, time_s=now_s))
                case None:
                    found.append(events.StopRequested(now_s, signal.SIGTERM))
        return found

    def take(self) -> Sequence[AdmittedJob]:
        taken, self._waiting = self._waiting, []
        return taken

    def _admit(self, start: Start) -> None:
        """Admit the job again, with this machine's models and memory."""
        info = replace(start.info, file=f"{attempt_folder(start.attempt)}/{start.info.file}")
        if start.attempt in self._early:
            self._early.discard(start.attempt)
            self._send(start.attempt, replace(skipped_outcome(info), status="cancelled"))
            return
        admitted, problems = self._admission([info.asked])
        if problems:
            reason = "; ".join(str(replace(problem, line=None)) for problem in problems)
            self._send(start.attempt, replace(skipped_outcome(info), status="failed", error=reason))
            return
        self._attempts[info.job_id] = start.attempt
        self._waiting.append(replace(admitted[0], info=info))

    def _prioritise(self, change: events.PriorityChanged) -> Sequence[events.Event]:
        self._waiting = [
            job.with_priority(change.priority) if job.job_id == change.job_id else job
            for job in self._waiting
        ]
        return [change] if change.job_id in self._attempts else ()

    def _cancel(self, attempt: int, now_s: float) -> Sequence[events.Event]:
        job_id = next((job_id for job_id, number in self._attempts.items() if number == attempt), None)
        if job_id is None:
            self._early.add(attempt)
            return ()
        for job in self._waiting:
            if job.job_id == job_id:
                self._waiting.remove(job)
                self.ended(replace(skipped_outcome(job.info), status="cancelled"))
                return ()
        return [events.JobCancelled(now_s, job_id)]

    def dispatched(self, dispatch: Dispatch) -> None:
        self._notes.append(replace(dispatch, transfers=()) if dispatch.transfers else dispatch)

    def applied(self, event: events.Event) -> None:
        if isinstance(event, events.TaskDone | events.TaskFailed | events.RankReady | events.RankLost):
            self._notes.append(event)

    def refreshed(self, snapshot: Snapshot) -> None:
        for view in (*snapshot.open.values(), *snapshot.busy.values()):
            if self._views.get(view.job_id) is not view:
                self._views[view.job_id] = view
                self._notes.append(replace(view, arrangement=None))
        self._send_notes()

    def _send_notes(self) -> None:
        notes, self._notes = self._notes, []
        if notes:
            with contextlib.suppress(OSError):  # as in _send
                self._connection.send(Noted(notes))

    def ended(self, outcome: JobOutcome) -> None:
        self._views.pop(outcome.info.job_id, None)
        self._send_notes()
        self._send(self._attempts.pop(outcome.info.job_id), outcome)

    def _send(self, attempt: int, outcome: JobOutcome) -> None:
        with contextlib.suppress(OSError):  # the actor is gone, and this process with it
            self._connection.send(Ended(attempt, outcome))


def serve(connection: Connection) -> None:
    """Run jobs until the connection is closed."""
    setup: Setup = connection.recv()
    options = setup.options
    with contextlib.suppress(OSError):
        os.chdir(options.work_dir)
    ranks = options.ranks.here()
    session_options = SessionOptions(
        output_dir=setup.folder,
        ranks=ranks,
        policy=load_policy(options.policy),
        model=options.model,
        lookahead_s=options.lookahead_s,
        grace_s=0.0,
        keeps_records=False,
    )
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(Session(session_options))
        session.load([], models=setup.models)
        checkpoints = {name: session.admission.models.find(name).checkpoint for name in setup.models}
        kernels = session.pool.settings.kernels
        made = {name: made_with(ranks, each, kernels=kernels) for name, each in checkpoints.items()}
        clock = Clock()
        connection.send(Ready(ranks, made, clock.started_at))
        chooser = stack.enter_context(contextlib.closing(ThreadedChooser(session_options.policy.choose)))
        feed = JobFeed(connection, session.admission.of_loaded(session.checkpoints), chooser)
        arrivals = Arrivals(feed, observers=[feed], requests=feed, chooser=chooser)
        session.run([], arrivals=arrivals, clock=clock)


def main(fd: int) -> int:
    log.configure(level="info")
    connection = Connection(fd)
    try:
        serve(connection)
    except InterruptedRunError:
        return 0
    except (GfgenError, ImportError, OSError) as error:
        logger.error("%s", error)
        with contextlib.suppress(OSError):
            connection.send(Refused(str(error) if isinstance(error, GfgenError) else in_one_line(error)))
        return 1
    return 0
