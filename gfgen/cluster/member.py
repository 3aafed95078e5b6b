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
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import ResolvedModel
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock
from gfgen.runtime.core.observer import JobInfo, JobOutcome
from gfgen.runtime.simulate.choosers import ThreadedChooser
from gfgen.session.admission import Admission, resolved_model
from gfgen.session.feed import Cancel, Ended, Feed, Gone, Process, run
from gfgen.session.ranks import AskedRanks, Ranks, made_with
from gfgen.session.session import Arrivals, Session, SessionOptions
from gfgen.snapshot import JobView, Snapshot
from gfgen.system.machine import key_versions

logger = logging.getLogger(__name__)

NOTES_S = 0.25
"""Between two reports of what ranks do."""
DEAF_S = 45.0
"""An actor whose driver has been silent for this time ends, if Ray does not end it sooner."""


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
    """Its outcome's `info.file` starts with the folder of the attempt."""

    info: JobInfo
    attempt: int


@dataclass(frozen=True, slots=True)
class Ready:
    ranks: Ranks
    made_with: Mapping[str, Mapping[str, Any]]
    began_at: float
    """Unix time at the start of the node's run, by its clock."""


@dataclass(frozen=True, slots=True)
class Noted:
    """What the ranks have done since the last one."""

    notes: Sequence[Note]


Said = Ready | Gone | Ended | Noted


def attempt_folder(attempt: int) -> str:
    return f"attempt-{attempt}"


class JobFeed(Feed):
    """Jobs and requests of the driver, and the ends of jobs to it."""

    refresh_s = NOTES_S

    def __init__(self, connection: Connection, admission: Admission, chooser: ThreadedChooser) -> None:
        super().__init__(connection)
        self.chooser = chooser
        """Chooses among policies, if the run's policy does."""
        self._admission = admission
        self._early: set[int] = set()
        """Attempts that were cancelled before they came."""
        self._notes: list[Note] = []
        self._views: dict[str, JobView] = {}

    def got(self, message: Start | Cancel | events.Event, now_s: float) -> Sequence[events.Event]:
        match message:
            case Start():
                self._admit(message)
            case Cancel(attempt) if attempt in self._attempts.values():
                return self.cancel(attempt, now_s)
            case Cancel(attempt):
                self._early.add(attempt)
            case events.PolicyChanged():
                self.chooser.follow(load_policy(message.policy).choose)
                return [replace(message, time_s=now_s)]
            case events.PriorityChanged():
                return self._prioritise(replace(message, time_s=now_s))
        return ()

    def _admit(self, start: Start) -> None:
        info = replace(start.info, file=f"{attempt_folder(start.attempt)}/{start.info.file}")
        if start.attempt in self._early:
            self._early.discard(start.attempt)
            self.send(Ended(start.attempt, JobOutcome(info, "cancelled")))
            return
        admitted, problems = self._admission([info.asked])
        if problems:
            reason = "; ".join(str(replace(problem, line=None)) for problem in problems)
            self.send(Ended(start.attempt, JobOutcome(info, "failed", error=reason)))
            return
        self.put(replace(admitted[0], info=info), start.attempt)

    def _prioritise(self, change: events.PriorityChanged) -> Sequence[events.Event]:
        self._waiting = [
            job.with_priority(change.priority) if job.job_id == change.job_id else job
            for job in self._waiting
        ]
        return [change] if change.job_id in self._attempts else ()

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
            self.send(Noted(notes))

    def ended(self, outcome: JobOutcome) -> None:
        self._views.pop(outcome.info.job_id, None)
        self._send_notes()
        super().ended(outcome)


def serve(connection: Connection) -> None:
    log.configure(level="info")
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
        self._process: Process | None = None
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
        self._process = Process("gfgen.cluster.member", setup, self._reports.put)
        first = self._reports.get()
        assert not isinstance(first, Ended | Noted), first
        return first

    def send(self, message: Start | Cancel | events.Event) -> None:
        """Pass a message to the process."""
        if self._process is not None:
            self._process.send(message)

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
        if self._process is not None:
            self._process.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        while time.monotonic() < self._heard_s + DEAF_S:
            time.sleep(1.0)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)  # the process dies with this one


if __name__ == "__main__":  # what it sends names the classes of the imported module
    sys.exit(run(int(sys.argv[1]), importlib.import_module("gfgen.cluster.member").serve))
