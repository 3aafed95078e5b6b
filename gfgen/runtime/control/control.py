"""The control loop: wait for events, apply them, ask the policy, dispatch what it decides."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gfgen.errors import InterruptedRunError, PolicyError, PolicyFault, RunError, StalledError, in_one_line
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.backlog import Backlog
from gfgen.runtime.control.metrics import Metrics, Summary
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob, arriving_after
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import (
    ClosingTime,
    Event,
    GraceOver,
    JobArrived,
    JobTimedOut,
    PolicyChanged,
    StopRequested,
    Wakeup,
)
from gfgen.runtime.core.observer import JobOutcome, Observer, skipped_outcome
from gfgen.runtime.files.journal import Journal, NoJournal
from gfgen.runtime.ipc.messages import MemoryUse
from gfgen.snapshot import Choice, Decision, Snapshot
from gfgen.system.timelimit import DECISION_LIMIT_S, within
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

MAX_POLICY_FAULTS = 3
"""After so many calls in which the policy was at fault the run goes on under FALLBACK."""
FALLBACK = "fcfs"
GRACE_S = 30.0
"""How long running tasks may take to end when the run is to stop, before they are stopped, too."""
CHANGES_PER_CHOICE = 24
"""A policy is chosen anew when so many jobs have come or gone; at the start of a run sooner, when each
of them changes the picture. More often gained nothing in the study of policies."""


class Backend(Protocol):
    """What runs dispatches: worker processes, or a simulation."""

    def wait(self, until: float | None) -> Sequence[Event]:
        """Events in their order; returns at the latest when the clock reaches `until`."""
        ...

    def submit(self, dispatch: Dispatch) -> None:
        """Hand a task to its ranks; returns before it has run. A decoded job is written after."""
        ...

    def stop(self, dispatches: Sequence[Dispatch]) -> None:
        """Let ranks leave these tasks; each ends by `TaskFailed` on all of its ranks, as void."""
        ...

    def release(self, job_id: str) -> None:
        """The job has ended: drop all that is kept for it."""
        ...

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        """Tasks of these jobs may be submitted from now on."""
        ...

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        """Let all ranks hold these models, checkpoints by name, and no others; each tells when it does, in
        about so long, and `LoadFailed` tells of one that none of them can load."""
        ...

    def save(self, job_id: str, *, next_index: int, producer: int) -> None:
        """Keep the state of a job of a run that stops: its next task, and which dispatch made its input."""
        ...

    def memory_use(self) -> Mapping[int, MemoryUse]:
        """What ranks have taken of memory, at the end of a run; none where nobody can tell."""
        ...


class Chooser(Protocol):
    """Who thinks about which policy is to decide, in its own time."""

    def consider(self, snapshot: Snapshot) -> None:
        """Begin to think about this, unless it is still busy."""
        ...

    def take(self) -> Choice | None:
        """What it has come to since it was asked last; returns at once."""
        ...


class Intake(Protocol):
    """Where jobs come from while a run is going on."""

    def take(self) -> Sequence[AdmittedJob]:
        """The jobs that have come since it was asked last; returns at once."""
        ...


class Control:
    """One run from the first arrival to the last file.

    With an `intake` it goes on, and takes what comes in, until it is asked to stop.
    """

    def __init__(
        self,
        jobs: Sequence[AdmittedJob],
        *,
        state: State,
        backend: Backend,
        clock: Clock,
        policy: NamedPolicy,
        journal: Journal | NoJournal | None = None,
        observers: Sequence[Observer] = (),
        skipped: Sequence[AdmittedJob] = (),
        intake: Intake | None = None,
        chooser: Chooser | None = None,
        residency: Residency | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self.state = state
        self.backend = backend
        self.clock = clock
        self.policy = policy
        self.journal = journal or NoJournal()
        self.metrics = Metrics()
        self._backlog = Backlog(num_ranks=state.num_ranks)
        self.observers = (
            self.metrics,
            *observers,
            *([] if residency is None else [residency]),
            self._backlog,
        )
        self.given_up: str | None = None
        """Why FALLBACK has taken the place of the policy, if it has."""
        self._num_policy_faults = 0
        self._refresh_s = min((o.refresh_s for o in self.observers if o.refresh_s is not None), default=None)
        self._next_refresh_s = 0.0
        self._jobs = tuple(jobs)
        self._skipped = tuple(skipped)
        self._intake = intake
        self._chooser = self._usual_chooser = chooser
        self._residency = residency
        self._grace_s = grace_s
        self._num_changes = 0
        """Arrivals and ends of jobs so far."""
        self._next_choice = 1
        self._has_warned = False
        """Of a standstill that may end when more jobs come."""
        self._saved: set[str] = set()
        """Jobs of which it is kept where they stopped."""

    def run(self) -> Summary:
        """Run until every job has ended, or the run is asked to stop.

        Raises: StalledError when jobs are open and the policy lets every rank idle for good; WorkerError
                when no rank is left; InterruptedRunError when the run is to break off at once.
        """
        self.begin()
        try:
            while not self.state.finished:
                self.turn()
        except (RunError, InterruptedRunError):
            self.save_stopped()
            raise
        use = self.backend.memory_use()
        for observer in self.observers:
            observer.measured(use)
        return replace(self.metrics.summary(), policy_fault=self.given_up)

    def turn(self) -> None:
        """Take in what has happened, and dispatch what follows from it."""
        events = self.backend.wait(until=self.clock.next_wakeup())
        self.clock.begin_turn()
        for event in events:
            self.journal.append(event)
            self.apply(event)
        if unwanted := self.state.take_unwanted():
            self.backend.stop(unwanted)
        self.take_in()
        self.reconsider()
        self.change_models()
        for decision in self.decide():
            if not self.start(decision):
                break  # what follows was decided for a state that did not come about
        if self.state.is_stopping:
            self.save_stopped()
        self.journal.end_turn(self.clock.turn_s)

    def begin(self) -> None:
        """Schedule the arrivals, and tell everyone who watches what is to be done."""
        self._note_degree(self.policy.options.get("degree"))
        infos = tuple(job.info for job in self._jobs)
        for observer in self.observers:
            observer.began(infos, num_ranks=self.state.num_ranks, policy=self.policy.name)
            for job in self._skipped:
                observer.ended(skipped_outcome(job.info))
        for job in self._jobs:
            self.schedule(job)
        if self.state.closes_s is not None:
            self.clock.at(ClosingTime(self.state.closes_s))
        self.state.expects_more = self._intake is not None

    def take_in(self) -> None:
        """Let jobs that have come meanwhile join the run; they arrive now, or so long after now."""
        if self._intake is None or self.state.is_stopping:
            return
        now_s = self.clock.now_s
        jobs = [arriving_after(job, now_s) for job in self._intake.take()]
        if not jobs:
            return
        self.backend.add(jobs)
        if self._residency is not None:
            self._residency.note(jobs)
        for observer in self.observers:
            observer.added(tuple(job.info for job in jobs))
        for job in jobs:
            self.state.add(job)
            self.schedule(job)

    def reconsider(self) -> None:
        """Follow what was chosen, and have it thought about anew when enough jobs have come or gone.

        What was chosen takes effect by an event, so that a replay of the journal needs no chooser.
        """
        if self._chooser is None or self.state.is_stopping:
            return
        choice = self._chooser.take()
        if choice is not None and choice.policy != self.policy.name and _exists(choice.policy):
            event = PolicyChanged(self.clock.now_s, choice.policy, choice.reason)
            self.journal.append(event)
            self.apply(event)
        is_due = self._num_changes >= self._next_choice and not self.state.all_ended
        if is_due and self.state.has_ready_ranks:
            self._next_choice = self._num_changes + min(self._num_changes, CHANGES_PER_CHOICE)
            self._chooser.consider(self.state.snapshot_of_traffic())

    def change_models(self) -> None:
        """Let ranks hold other models, where not all fit and the turn of others has come."""
        if self._residency is None or self.state.is_stopping:
            return
        event = self._residency.change(self.state, now_s=self.clock.now_s)
        if event is None:
            return
        closes_s = self.state.closes_s
        if closes_s is not None and event.time_s + event.load_s >= closes_s:
            if self.state.is_at_rest and not self._brings_more(than=(JobTimedOut,)):
                self._close_early()
            return
        self.journal.append(event)
        self.apply(event)
        self.backend.load(self._residency.held, load_s=event.load_s)

    def apply(self, event: Event) -> None:
        """Let the state change by an event, and tell everyone who watches."""
        if isinstance(event, PolicyChanged) and event.policy != self.policy.name:
            self.policy, self._chooser = load_policy(event.policy), self._usual_chooser
            logger.info("from now on %s decides: %s", event.policy, event.reason)
        self._num_changes += isinstance(event, JobArrived)
        if isinstance(event, StopRequested | ClosingTime):
            self.clock.at(GraceOver(event.time_s + self._grace_s))
        outcomes = self.state.apply(event)
        self._plan_to_look()
        for observer in self.observers:
            observer.applied(event)
        for outcome in outcomes:
            self.conclude(outcome)

    def decide(self) -> Iterable[Decision]:
        """What the policy wants now; nothing while stopping, or while no rank is free."""
        self._refresh()
        if self.state.is_stopping or not self.state.has_choice:
            return ()
        self.state.renew_predictions()
        snapshot = self.state.snapshot()
        self.journal.asked()
        decisions = self._ask_policy(snapshot)
        if not decisions and self.state.is_stuck:
            self._explain_standstill(snapshot)
        return decisions

    def save_stopped(self) -> None:
        """Keep the state of each job that has come to its stop, at once: the others may be long in theirs."""
        for job_id, (next_index, producer) in self.state.stopped_at.items():
            if job_id not in self._saved:
                self._saved.add(job_id)
                self.backend.save(job_id, next_index=next_index, producer=producer)

    def _explain_standstill(self, snapshot: Snapshot) -> None:
        """All ranks are free, jobs are open and none was started: too late, or the policy's fault.

        Not while something may come that changes it; that jobs will time out one day changes nothing.
        """
        if self._brings_more(than=(JobTimedOut,) if snapshot.open else ()):
            return
        if snapshot.open and self.state.expects_more:
            self._warn_of_standstill()
        elif snapshot.open:
            waiting = self.state.open_jobs
            names = ", ".join(waiting[:5]) + (f" and {len(waiting) - 5} more" if len(waiting) > 5 else "")
            raise StalledError(
                f"policy {self.policy.name} starts nothing although all ranks are free; "
                f"{len(waiting)} {'job waits' if len(waiting) == 1 else 'jobs wait'}: {names}"
            )
        else:
            self._close_early()

    def _warn_of_standstill(self) -> None:
        """Another job may change it; who waits for one is told once what it is waiting for."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "policy %s starts nothing although all ranks are free; perhaps it does with more jobs",
                self.policy.name,
            )

    def _brings_more(self, *, than: tuple[type[Event], ...]) -> bool:
        """Whether anything but such events may come before the run closes."""
        closes_s = math.inf if self.state.closes_s is None else self.state.closes_s
        return self.clock.brings_more(before_s=closes_s, than=than)

    def _close_early(self) -> None:
        """Unless jobs may come that are done sooner."""
        if self.state.expects_more:
            return
        logger.info("no job that is left can be done by closing time: the run ends now")
        self.clock.at(ClosingTime(self.clock.now_s))

    def start(self, decision: Decision) -> bool:
        """Dispatch a decision, or let it wait; False when it is illegal, which is the policy's fault."""
        if self._backlog.holds_back(decision):
            return True  # the policy is asked again when a file is written
        try:
            dispatch = self.state.begin(decision)
        except PolicyFault as fault:
            self._blame_policy(fault)
            self.clock.at(Wakeup(self.clock.now_s))  # it is asked again, for the ranks that are left
            return False
        self.backend.submit(dispatch)
        self.journal.dispatched(dispatch)
        self._plan_to_look()
        for observer in self.observers:
            observer.dispatched(dispatch)
        return True

    def _plan_to_look(self) -> None:
        """Decide what follows a task shortly before it ends."""
        for look_s in self.state.take_looks():
            self.clock.at(Wakeup(max(look_s, self.clock.now_s)))

    def conclude(self, outcome: JobOutcome) -> None:
        """A job has ended."""
        self._num_changes += 1
        self.backend.release(outcome.info.job_id)
        for observer in self.observers:
            observer.ended(outcome)

    def _refresh(self) -> None:
        """Show the state to those who asked for it, not more often than they asked."""
        if self._refresh_s is None or self.clock.now_s < self._next_refresh_s:
            return
        self._next_refresh_s = self.clock.now_s + self._refresh_s
        snapshot = self.state.snapshot()
        for observer in self.observers:
            if observer.refresh_s is not None:
                observer.refreshed(snapshot)

    def _note_degree(self, degree: object) -> None:
        """Tell that more ranks are asked for each task than there are."""
        most = self.state.max_degree
        if isinstance(degree, int) and degree > most:
            logger.warning(
                "policy %s: a task has %s here at most, whatever the degree",
                self.policy.name,
                counted(most, "rank"),
            )

    def _ask_policy(self, snapshot: Snapshot) -> list[Decision]:
        """Its decisions; those of `fcfs` for this once when it raises."""
        try:
            return within(DECISION_LIMIT_S, self._decided, snapshot)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a policy may be the user's own, and call sys.exit()
            logger.debug("policy %s raised", self.policy.name, exc_info=True)
            self._blame_policy(error)
            return list(load_policy(FALLBACK).decide(snapshot))

    def _decided(self, snapshot: Snapshot) -> list[Decision]:
        decided = self.policy.decide(snapshot)
        if not isinstance(decided, Iterable):
            raise PolicyFault(
                f"it returned a value of type {type(decided).__name__}; a list of Decision is accepted"
            )
        # Each rank takes one task, so one more than ranks is a fault; a generator may be endless.
        return list(itertools.islice(decided, self.state.num_ranks + 1))

    def _blame_policy(self, error: BaseException) -> None:
        """Count a fault; after too many, or one timeout, `fcfs` takes over and the log says so.

        Raises: PolicyFault when it is `fcfs` itself that failed too often.
        """
        self._num_policy_faults += 1
        reason = " ".join(str(error).split()) if isinstance(error, PolicyFault) else in_one_line(error)
        logger.warning("policy %s: %s", self.policy.name, reason)
        if self._num_policy_faults < MAX_POLICY_FAULTS:
            return
        times = counted(self._num_policy_faults, "time")
        if self.policy.name == FALLBACK:
            raise PolicyFault(f"policy {FALLBACK} failed {times}: {reason}")
        logger.error(
            "policy %s failed %s; going on with %s",
            self.policy.name,
            times,
            FALLBACK,
        )
        self.policy = load_policy(FALLBACK)
        self._num_policy_faults = 0
        self._chooser = None
        self.given_up = reason
        self.clock.at(PolicyChanged(self.clock.now_s, self.policy.name, reason))

    def schedule(self, job: AdmittedJob) -> None:
        """Let a job arrive at its time."""
        self.clock.at(JobArrived(job.spec.arrival_s, job.job_id, job.info.spec_hash))
        if job.spec.timeout_s is not None:
            self.clock.at(JobTimedOut(job.spec.arrival_s + job.spec.timeout_s, job.job_id))


def _exists(policy: str) -> bool:
    """Whether there is such a policy; the log says so when what was chosen is none."""
    try:
        load_policy(policy)
    except PolicyError as error:
        logger.warning("choosing a policy failed: %s", error)
        return False
    return True
