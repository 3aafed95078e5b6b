"""The control loop: wait for events, apply them, ask the policy, dispatch what it decides."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gfgen.errors import InterruptedRunError, PolicyFault, RunError, StalledError
from gfgen.job.spec import RANDOM_SEED
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.backlog import Backlog
from gfgen.runtime.control.decider import Chooser, Decider
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.control.state import State
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob, arriving_after
from gfgen.runtime.core.dispatch import Dispatch, GivenUp
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.metrics import Metrics, Summary
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.files.journal import Journal, NoJournal
from gfgen.runtime.ipc.messages import MemoryUse
from gfgen.snapshot import Decision, Snapshot
from gfgen.system.wording import counted, named

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """What runs dispatches: worker processes, or a simulation."""

    def wait(self, until: float | None) -> Sequence[Event]:
        """Events in their order; returns at the latest when the clock reaches `until`."""

    def submit(self, dispatch: Dispatch) -> None:
        """Hand a task to its ranks; returns before it has run. A decoded job is written after."""

    def stop(self, dispatches: Sequence[Dispatch]) -> None:
        """Let ranks leave these tasks; each ends by `TaskFailed`, as void."""

    def release(self, job_id: str) -> None:
        """The job has ended: drop all that is kept for it."""

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        """Tasks of these jobs may be submitted from now on."""

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        """Let all ranks hold these models, checkpoints by name, and no others; it takes about `load_s`."""

    def save(self, job_id: str, *, next_index: int, producer: int, given_up: GivenUp) -> None:
        """Keep a job's state for a later run: its next task, and which dispatch made its input."""

    def memory_use(self) -> Mapping[int, MemoryUse]:
        """What ranks have taken of memory, at the end of a run; empty where nothing measures it."""


class Intake(Protocol):
    """Where jobs come from while a run is going on."""

    def take(self) -> Sequence[AdmittedJob]:
        """The jobs that have come since the last call; returns at once."""


@dataclass(frozen=True, slots=True)
class Steering:
    intake: Intake | None = None  # with an intake the run goes on until it is asked to stop
    backlog: Backlog = field(default_factory=Backlog)  # further jobs, which come while others end
    chooser: Chooser | None = None
    residency: Residency | None = None
    load: Callable[[str], NamedPolicy] = load_policy
    free_bytes: Callable[[], int] | None = None  # what is free on the disk for files
    on_turn: Callable[[float], None] | None = None  # called with the seconds of each turn


class Control:
    """One run from the first arrival to the last file."""

    def __init__(
        self,
        jobs: Sequence[AdmittedJob],
        *,
        state: State,
        backend: Backend,
        policy: NamedPolicy,
        journal: Journal | NoJournal | None = None,
        observers: Sequence[Observer] = (),
        num_skipped: int = 0,
        steering: Steering | None = None,
    ) -> None:
        self._steering = steering = steering or Steering()
        self.state = state
        self.backend = backend
        self.clock = state.clock
        self.decider = Decider(policy, clock=state.clock, chooser=steering.chooser, load=steering.load)
        self.journal = journal or NoJournal()
        self.metrics = Metrics()
        self.observers = (self.metrics, *observers, *filter(None, [steering.residency]), steering.backlog)
        state.backlog = steering.backlog
        self._refresh_s = min((o.refresh_s for o in self.observers if o.refresh_s is not None), default=None)
        self._next_refresh_s = 0.0
        self._jobs = tuple(jobs)
        self._num_skipped = num_skipped
        self._woke_s = 0.0
        self._has_warned = False  # of a standstill that may end when more jobs come
        self._saved: set[str] = set()  # stopped jobs whose state is kept

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
        summary = replace(self.metrics.summary(), policy_fault=self.decider.given_up)
        return replace(summary, num_unfinished=summary.num_unfinished + len(self.state.backlog))

    def turn(self) -> None:
        """Take in what has happened, and dispatch what follows from it."""
        self.receive()
        dispatches, steering = None, self._steering
        if self._refresh_s is not None:
            self.refresh(self._refresh_s)
        if self.state.closing.is_stopping:
            self.save_stopped()
        else:
            if steering.intake is not None:
                self.take_in(steering.intake)
            self.add(steering.backlog.take())
            if self.decider.chooser is not None:
                self.reconsider(self.decider.chooser)
            if steering.residency is not None:
                self.change_models(steering.residency)
            if steering.free_bytes is not None:
                self.look_at_space(steering.free_bytes)
            if (snapshot := self.state.choice()) is not None:
                dispatches = self.dispatch(snapshot)
        self.journal.end_turn(self.clock.turn_s, dispatches)
        if steering.on_turn is not None:
            steering.on_turn(time.perf_counter() - self._woke_s)

    def begin(self) -> None:
        """Schedule the arrivals, and tell all observers what is to be done."""
        policy, most = self.decider.policy, self.state.max_degree
        degree = policy.options.get("degree")
        if isinstance(degree, int) and degree > most:
            ranks = counted(most, "rank")
            logger.warning("policy %s: a task has %s here at most, whatever the degree", policy.name, ranks)
        infos = tuple(job.info for job in self._jobs)
        for observer in self.observers:
            observer.skipped(self._num_skipped)
            observer.began(infos, num_ranks=len(self.state.ranks.records), policy=policy.name)
        for job in self._jobs:
            self.schedule(job)
        for job in self.state.backlog.timed():  # which tells later runs
            self.journal.append(_arrival_of(job))
        if self.state.closing.closes_s < math.inf:
            self.clock.at(events.ClosingTime(self.state.closing.closes_s))
        self.state.expects_more = self._steering.intake is not None

    def schedule(self, job: AdmittedJob) -> None:
        self.clock.at(_arrival_of(job))
        if job.spec.timeout_s is not None:
            self.clock.at(events.JobTimedOut(job.spec.arrival_s + job.spec.timeout_s, job.job_id))

    def receive(self) -> None:
        """Wait for events, or for the time at which to decide what follows a task, and apply them."""
        self.clock.look_s = self.state.flights.next_look_s(self.clock.turn_s)
        found = self.backend.wait(until=self.clock.next_wakeup())
        self._woke_s = time.perf_counter()
        self.clock.begin_turn()
        for event in found:
            self.record(event)
        if self.state.flights.unwanted and (unwanted := self.state.flights.take_unwanted()):
            self.backend.stop(unwanted)
        if not found and not self.state.flights:
            self.state.check()

    def record(self, event: Event) -> None:
        """Write an event to the journal, let it change the state, and pass it to the observers."""
        self.journal.append(event)
        match event:
            case events.PolicyChanged():
                self.decider.follow(event)
            case events.JobArrived():
                self.decider.note_change()
            case events.JobCancelled() if event.job_id not in self.state.jobs.records:
                self.add(self.state.backlog.named(event.job_id))
            case events.StopRequested() | events.ClosingTime():
                self.clock.at(events.GraceOver(event.time_s + self.state.closing.grace_s))
        outcomes = self.state.apply(event)
        for observer in self.observers:
            observer.applied(event)
        for outcome in outcomes:
            self.conclude(outcome)

    def conclude(self, outcome: JobOutcome) -> None:
        self.decider.note_change()
        if outcome.left and not outcome.is_refused and self._steering.intake is None:
            self.backend.save(outcome.job_id, **outcome.left)  # a later run only decodes and writes it
        self.backend.release(outcome.info.job_id)
        for observer in self.observers:
            observer.ended(outcome)

    def refresh(self, interval_s: float) -> None:
        """Show the state to the observers that want it, as often as they want."""
        if self.clock.now_s < self._next_refresh_s:
            return
        self._next_refresh_s = self.clock.now_s + interval_s
        snapshot = self.state.snapshot()
        for observer in self.observers:
            if observer.refresh_s is not None:
                observer.refreshed(snapshot)

    def take_in(self, intake: Intake) -> None:
        """Let new jobs join the run; they arrive now, or when they say, counted from now."""
        now_s = self.clock.now_s
        self.add([arriving_after(job, now_s) for job in intake.take()])

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        if not jobs:
            return
        self.backend.add(jobs)
        if self._steering.residency is not None:
            self._steering.residency.note(jobs)
        for observer in self.observers:
            observer.added(tuple(job.info for job in jobs))
        for job in jobs:
            self.state.jobs.add(job)
            self.schedule(job)

    def reconsider(self, chooser: Chooser) -> None:
        """Follow what was chosen, and have it chosen again when enough jobs have come or gone."""
        choice = chooser.take()
        if choice is not None and self.decider.can_follow(choice):
            self.record(events.PolicyChanged(self.clock.now_s, choice.policy, choice.reason))
        has_ready = any(rank.is_ready for rank in self.state.ranks.records)
        num_jobs = len(self.state.jobs.records)
        if num_jobs and has_ready and self.decider.is_choice_due(num_jobs):
            residency = self._steering.residency
            chooser.consider(self.state.snapshot_of_traffic(residency.load_times if residency else None))

    def change_models(self, residency: Residency) -> None:
        """Let ranks hold other models, where not all fit and the turn of others has come."""
        event = residency.change(self.state, now_s=self.clock.now_s)
        if event is None:
            return
        if event.time_s + event.load_s >= self.state.closing.closes_s:
            if self.state.is_at_rest and not self._expects_other_than(events.JobTimedOut):
                self._close_early()
            return
        self.record(event)
        self.backend.load(residency.held, load_s=event.load_s)

    def look_at_space(self, free_bytes: Callable[[], int]) -> None:
        """Note what is free on the disk while it may not hold the files of all jobs."""
        room = self.state.closing.room
        if (event := room.look(free_bytes, now_s=self.clock.now_s)) is None:
            return
        self.record(event)
        if room.is_short and self.state.expects_more:
            self._warn_once(f"jobs wait: {room.lack}")
            self.clock.at(events.Wakeup(room.next_look_s))

    def dispatch(self, snapshot: Snapshot) -> list[Dispatch]:
        dispatches: list[Dispatch] = []
        state, decisions = self.state, self.decider.decide(snapshot)
        decisions = state.sharing.arranged(decisions, snapshot, holds_back=state.holds_back)
        if not decisions and self.state.is_stuck:
            self._explain_standstill(snapshot)
        for decision in decisions:
            if self.state.holds_back(decision):
                continue  # the policy is asked again when a file is written
            started = self.start(decision)
            if not started:
                break  # what follows was decided for a state that did not come about
            dispatches += started
        return dispatches

    def start(self, decision: Decision) -> Sequence[Dispatch]:
        """Dispatch a decision, and what runs with it; none if it is illegal, which is the policy's fault."""
        try:
            dispatches = self.state.begin(decision)
        except PolicyFault as fault:
            self.decider.blame(fault)
            self.clock.at(events.Wakeup(self.clock.now_s))  # it is asked again, for the ranks that are left
            return ()
        for each in dispatches:
            self.backend.submit(each)
            for observer in self.observers:
                observer.dispatched(each)
        return dispatches

    def save_stopped(self) -> None:
        """Keep the state of each job that has come to its stop, at once: the others may take long to stop."""
        stopped = self.state.jobs.stopped_at(self.state.ranks.records)
        for job_id, (next_index, producer) in stopped.items():
            if job_id not in self._saved:
                self._saved.add(job_id)
                given_up = self.state.jobs.records[job_id].given_up
                self.backend.save(job_id, next_index=next_index, producer=producer, given_up=given_up)

    def _explain_standstill(self, snapshot: Snapshot) -> None:
        """All ranks are free, jobs are open and none was started: too late, or the policy's fault.

        Not while an event may come that changes it; that jobs will time out one day changes nothing.
        """
        name = self.decider.policy.name
        if self._expects_other_than(*([events.JobTimedOut] if snapshot.open else [])):
            return
        if not snapshot.open:
            self._close_early()
        elif not self.state.expects_more:
            waiting = self.state.jobs.open.ids
            raise StalledError(
                f"policy {name} starts nothing although all ranks are free; "
                f"{len(waiting)} {'job waits' if len(waiting) == 1 else 'jobs wait'}: {named(waiting, 'job')}"
            )
        else:
            self._warn_once(
                f"policy {name} starts nothing although all ranks are free; it may when more jobs arrive"
            )

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s", text)

    def _expects_other_than(self, *kinds: type[Event]) -> bool:
        """Whether an event of another kind may come before the run closes."""
        return self.clock.brings_more(before_s=self.state.closing.closes_s, than=kinds)

    def _close_early(self) -> None:
        """End the run, unless jobs may come that are done sooner, or there is room again for a file."""
        if not self.state.expects_more:
            free_bytes, now_s = self._steering.free_bytes, self.clock.now_s
            free = 0 if free_bytes is None else free_bytes()
            self.clock.at(self.state.closing.end_early(free_bytes=free, now_s=now_s))


def _arrival_of(job: AdmittedJob) -> events.JobArrived:
    seed = job.spec.seed if job.info.asked.seed == RANDOM_SEED else None
    return events.JobArrived(job.spec.arrival_s, job.job_id, job.info.spec_hash, seed)
