"""A node: its Ray actor, which has the node's GPUs, and the process that uses them.

The process has one session, which runs the jobs that come over a connection. It is a child of the actor,
because a session starts processes from its main thread, which an actor does not have.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
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
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.simulate.choosers import ThreadedChooser
from gfgen.session.admission import Admission, resolved_model
from gfgen.session.ranks import AskedRanks, Ranks, made_with
from gfgen.session.session import Arrivals, Session, SessionOptions
from gfgen.snapshot import JobView, Snapshot
from gfgen.system.lifeline import module_command, module_environment
from gfgen.system.machine import key_versions

logger = logging.getLogger(__name__)

NOTES_S = 0.25
"""Between two reports of what ranks do."""
DEAF_S = 45.0
"""An actor whose driver has been silent for this time ends, if Ray does not end it sooner."""
END_S = 20.0
"""How long the process may take to end its ranks before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
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
    ranks: Ranks
    made_with: Mapping[str, Mapping[str, Any]]
    began_at: float
    """Unix time at the start of the node's run, by its clock."""


@dataclass(frozen=True, slots=True)
class Gone:
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


Said = Ready | Gone | Ended | Noted


def attempt_folder(attempt: int) -> str:
    return f"attempt-{attempt}"


class JobFeed(Observer):
    """Jobs and requests from the connection, which a thread reads, and the ends of jobs to it."""

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
        info = replace(start.info, file=f"{attempt_folder(start.attempt)}/{start.info.file}")
        if start.attempt in self._early:
            self._early.discard(start.attempt)
            self._send(start.attempt, JobOutcome(info, "cancelled"))
            return
        admitted, problems = self._admission([info.asked])
        if problems:
            reason = "; ".join(str(replace(problem, line=None)) for problem in problems)
            self._send(start.attempt, JobOutcome(info, "failed", error=reason))
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
                self.ended(JobOutcome(job.info, "cancelled"))
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
            connection.send(Gone(str(error) if isinstance(error, GfgenError) else in_one_line(error)))
        return 1
    return 0


def versions_here() -> Mapping[str, str]:
    """The versions that must be equal on all nodes."""
    return {"python": ".".join(map(str, sys.version_info[:2])), **key_versions()}


class NodeActor:
    """Methods run in several threads. Ray ends the actor with its driver, and with it the process."""

    def __init__(self, options: MemberOptions, shared: Path | None) -> None:
        self._options = options
        if shared is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gfgen-node-"))
        else:
            self._folder = shared
        self._reports: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._heard_s = time.monotonic()
        """When the driver asked for something last."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        with contextlib.suppress(OSError):
            os.chdir(options.work_dir)

    def facts(self) -> tuple[Mapping[str, str], Ranks]:
        """The node's versions and ranks. Raises: InputError when it lacks the devices."""
        self._heard_s = time.monotonic()
        return versions_here(), self._options.ranks.here()

    def time(self) -> float:
        """By this machine's clock, in Unix time."""
        self._heard_s = time.monotonic()
        return time.time()

    def find_model(self, name: str) -> ResolvedModel:
        """Raises: ModelError when this node has no such model."""
        ranks = self._options.ranks
        return resolved_model(
            name, has_random_weights=ranks.random_weights, trusts_code=ranks.trust_remote_code
        )

    def load(self, models: Sequence[str]) -> Ready | Gone:
        setup = Setup(self._options, self._folder, tuple(models))
        threading.Thread(target=self._run, args=(setup,), name="process", daemon=True).start()
        first = self._reports.get()
        assert not isinstance(first, Ended | Noted), first
        return first

    def send(self, message: Start | Cancel | events.Event | None) -> None:
        """Pass a message to the process; None ends it."""
        with self._lock, contextlib.suppress(OSError):  # its end is reported
            if self._connection is not None:
                self._connection.send(message)

    def take_reports(self, timeout_s: float) -> Sequence[Said]:
        """What the process has reported; waits for the first report."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._reports.get(timeout=timeout_s))
            while True:
                found.append(self._reports.get_nowait())
        self._heard_s = time.monotonic()
        return found

    def read(self, file: str, offset: int, size: int) -> bytes:
        with (self._folder / file).open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    def forget(self, attempt: int) -> None:
        shutil.rmtree(self._folder / attempt_folder(attempt), ignore_errors=True)

    def stop(self) -> None:
        self.send(None)
        if self._process is not None:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        while time.monotonic() < self._heard_s + DEAF_S:
            time.sleep(1.0)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)  # the process dies with this one

    def _run(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command("gfgen.cluster.member", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a session of its own would get less processor time on busy machines
            )
        connection = Connection(ours.detach())
        with contextlib.suppress(EOFError, OSError):
            connection.send(setup)
            self._connection = connection
            while True:
                self._reports.put(connection.recv())
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._reports.put(Gone(f"its process {how}"))


if __name__ == "__main__":  # what it sends names the classes of the imported module
    sys.exit(importlib.import_module("gfgen.cluster.member").main(int(sys.argv[1])))
