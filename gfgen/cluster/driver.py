"""The control loop over nodes: its backend makes jobs of dispatches, and events of the nodes' reports."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gfgen.cluster.node import (
    Cluster,
    Fleet,
    HandOut,
    JobEnded,
    Node,
    NodeJoined,
    NodeLost,
    NodeNotes,
    Report,
)
from gfgen.cluster.watchers import Watchers
from gfgen.errors import OutputError
from gfgen.graph import Stage, Task, Trajectory
from gfgen.layout import ALONE, Degrees
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.control import Control, Intake
from gfgen.runtime.control.state import State
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch, GivenUp
from gfgen.runtime.core.events import Clock, Event, PolicyChanged, PriorityChanged
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.content import Content
from gfgen.runtime.ipc.messages import MemoryUse, RankTimes
from gfgen.runtime.predict.cost import CostClass, CostModel
from gfgen.runtime.predict.cost_table import Estimate, Provenance
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.processes.workers import Requests
from gfgen.snapshot import Arrangement
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Links:
    inputs: Sequence[Requests | SignalPipe] = ()
    watchers: Watchers | None = None
    tell: Callable[[Event], None] = lambda event: None
    """Lets all nodes know of another policy or priority."""
    scale: Callable[[int, Collection[str]], None] | None = None
    """Asks for nodes for this number of open jobs; the names are those of nodes that have some."""


@dataclass(kw_only=True, eq=False)
class ClusterBackend:
    """Hands jobs to the nodes of a cluster. An attempt has the number of its dispatch."""

    cluster: Cluster
    fleet: Fleet
    handout: HandOut
    clock: Clock
    left_s: Callable[[str], float | None]
    """Seconds from now to the deadline of a job; None without one."""
    links: Links
    outcomes: dict[str, JobOutcome] = field(default_factory=dict)
    _jobs: dict[str, AdmittedJob] = field(default_factory=dict)
    _attempts: dict[int, Dispatch] = field(default_factory=dict)
    """Those of living nodes; a report of any other comes too late."""
    _ready_slots: set[int] = field(default_factory=set)

    def wait(self, until: float | None) -> list[Event]:
        """What nodes report, and what is due. Returns at once if another decision may hand out more."""
        if self.handout.wants_turn:
            self.handout.wants_turn = False
            until = self.clock.now_s
        if self.links.scale is not None:
            self.links.scale(len(self._jobs), {self._node_of(each).name for each in self._attempts.values()})
        found, now_s = list[Event](), self.clock.now_s
        for each in self.links.inputs:
            if not isinstance(each, SignalPipe):
                found += each.take_events(now_s)
                continue
            with contextlib.suppress(BlockingIOError):
                found += [events.StopRequested(now_s, number) for number in each.take()]
        for report in self.cluster.wait(until):
            found += self._events_of(report)
        return [*found, *self.clock.due()]

    def submit(self, dispatch: Dispatch) -> None:
        job_id = dispatch.task.job_id
        self._attempts[dispatch.number] = dispatch
        job = for_node(self._jobs[job_id], left_s=self.left_s(job_id))
        self._node_of(dispatch).start(job, attempt=dispatch.number)

    def stop(self, dispatches: Sequence[Dispatch]) -> None:
        for dispatch in dispatches:
            if dispatch.number in self._attempts:
                self._node_of(dispatch).cancel(dispatch.number)

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        self._jobs.update((job.job_id, job) for job in jobs)

    def steer(self, event: events.PolicyChanged | events.PriorityChanged) -> None:
        """Let nodes follow, those that have the job and those that get it later."""
        if isinstance(event, events.PriorityChanged) and event.job_id in self._jobs:
            self._jobs[event.job_id] = self._jobs[event.job_id].with_priority(event.priority)
        self.links.tell(event)

    def release(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)
        self.outcomes.pop(job_id, None)

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        raise AssertionError("nodes load models by themselves")

    def save(self, job_id: str, *, next_index: int, producer: int, given_up: GivenUp) -> None:
        """No effect: a job that a stopped run leaves starts again."""

    def memory_use(self) -> Mapping[int, MemoryUse]:
        return {}

    def _node_of(self, dispatch: Dispatch) -> Node:
        return self.fleet.nodes[self.fleet.slot_of(dispatch.layout.ranks[0])]

    def _events_of(self, report: Report) -> Iterator[Event]:
        match report:
            case NodeJoined():
                yield from self._joined(report)
            case NodeLost():
                yield from self._lost(report)
            case NodeNotes():
                if self.links.watchers is not None:
                    self.links.watchers.take(report)
            case JobEnded():
                dispatch = self._attempts.pop(report.attempt, None)
                if dispatch is not None:
                    yield from self._ended(dispatch, report)
                    return
                logger.info("a late result of attempt %d on %s is dropped", report.attempt, report.node)
                if report.delivery is not None:
                    report.delivery.drop()

    def _joined(self, report: NodeJoined) -> Iterator[Event]:
        node = report.node
        slot = self.fleet.join(node)
        if slot is None:
            logger.warning("node %s is not used: there is no place for it in this run", node.name)
            return
        logger.info("node %s joins with %s", node.name, counted(node.num_ranks, "rank"))
        if self.links.watchers is not None:
            self.links.watchers.join(node.name, node.num_ranks, now_s=self.clock.now_s)
        if slot not in self._ready_slots:
            self._ready_slots.add(slot)
            for lane in self.fleet.lanes_of(slot):
                yield events.RankReady(self.clock.now_s, lane, 1, 0.0)

    def _lost(self, report: NodeLost) -> Iterator[Event]:
        """Its jobs go back to the queue."""
        slot = self.fleet.lose(report.name)
        if slot is None:
            return
        lanes = self.fleet.lanes_of(slot)
        lost = [number for number, each in self._attempts.items() if each.layout.ranks[0] in lanes]
        jobs = f"; {counted(len(lost), 'job')} of it will start again" if lost else ""
        logger.warning("node %s is gone: %s%s", report.name, report.reason, jobs)
        if self.links.watchers is not None:
            self.links.watchers.lose(report.name, report.reason, now_s=self.clock.now_s)
        for number in lost:
            del self._attempts[number]
            reason = f"node {report.name} is gone: {report.reason}"
            yield events.TaskFailed(self.clock.now_s, number, reason, lost=True)

    def _ended(self, dispatch: Dispatch, report: JobEnded) -> Iterator[Event]:
        now_s, job_id, outcome = self.clock.now_s, dispatch.task.job_id, report.outcome
        if outcome.status == "cancelled":
            yield events.TaskFailed(now_s, dispatch.number, "its node gave it back", void=True)
            return
        (lane,) = dispatch.layout.ranks
        times = RankTimes(lane, now_s - outcome.busy_s, now_s)
        yield events.TaskDone(now_s, dispatch.number, (times,))
        try:
            if outcome.status == "failed":
                raise OutputError(outcome.error or "it failed on its node")
            if report.delivery is not None:
                outcome = report.delivery.publish()
        except OutputError as error:
            yield events.OutputFailed(now_s, job_id, str(error))
            return
        finally:
            self.outcomes[job_id] = outcome
        written = outcome.written or Content(0)
        yield events.OutputWritten(
            now_s,
            job_id,
            self._jobs[job_id].info.file,
            written.size_bytes,
            0.0,
            sha256=written.sha256,
            files=outcome.files,
            made=outcome.made,
        )


class Driver(Control):
    backend: ClusterBackend
    handout: HandOut

    def record(self, event: Event) -> None:
        """As on one machine; nodes follow another policy, and the driver's stays the one that hands out."""
        super().record(event)
        if isinstance(event, PolicyChanged):
            self.handout.follow(load_policy(event.policy))
            self.decider.policy = self.handout.named
        if isinstance(event, PolicyChanged | PriorityChanged):
            self.backend.steer(event)

    def take_in(self, intake: Intake) -> None:
        super().take_in(_WholeJobs(intake))

    def conclude(self, outcome: JobOutcome) -> None:
        """A job has ended; its times and layouts are those of its node."""
        found = self.backend.outcomes.get(outcome.info.job_id)
        if found is not None:
            outcome = replace(
                outcome,
                layouts=found.layouts,
                timings=found.timings,
                first_uses_s=found.first_uses_s,
                warnings=tuple(dict.fromkeys((*outcome.warnings, *found.warnings))),
            )
        super().conclude(outcome)


@dataclass(frozen=True, slots=True)
class _WholeJobs:
    intake: Intake

    def take(self) -> Sequence[AdmittedJob]:
        return [as_whole(job) for job in self.intake.take()]


def driver_of(
    jobs: Sequence[AdmittedJob],
    cluster: Cluster,
    fleet: Fleet,
    *,
    policy: NamedPolicy,
    clock: Clock,
    start: RunStart,
    profile: Profile | None = None,
    links: Links | None = None,
    **options: Any,
) -> Driver:
    handout = HandOut(policy, fleet)
    whole = [as_whole(job) for job in jobs]
    state = State(whole, start, clock=clock, costs=WholeJobCosts(profile))

    def left_s(job_id: str) -> float | None:
        due_s = state.jobs.records[job_id].deadline_s
        return None if due_s == math.inf else due_s - clock.now_s

    backend = ClusterBackend(
        cluster=cluster, fleet=fleet, handout=handout, clock=clock, left_s=left_s, links=links or Links()
    )
    backend.add(whole)
    driver = Driver(whole, state=state, backend=backend, policy=handout.named, **options)
    driver.handout = handout
    return driver


def start_of(fleet: Fleet, **circumstances: Any) -> RunStart:
    """What a run on this fleet starts from: a job has one lane."""
    return RunStart(
        num_ranks=fleet.num_slots * fleet.num_lanes,
        max_degree=1,
        **circumstances,
    )


@dataclass(frozen=True, slots=True)
class WholeJob(Trajectory):
    """One task in place of all. It is a step to policies, because several ranks of a node can share it."""

    @property
    def num_tasks(self) -> int:
        return 1

    def task(self, index: int) -> Task:
        if index != 0:
            raise IndexError(f"job {self.job_id} is one task here, there is no task {index}")
        return Task(self.job_id, 0, Stage.DENOISE)

    def num_approximate_from(self, index: int) -> int:
        """None: they are parts of the one task."""
        return 0

    def num_approximable_from(self, index: int) -> int:
        """None: the node's policy has the choice."""
        return 0

    def name_of(self, task: Task) -> str:
        return "the job"


def as_whole(job: AdmittedJob) -> AdmittedJob:
    steps = job.trajectory
    return replace(job, trajectory=WholeJob(*_parts_of(steps)))


def for_node(job: AdmittedJob, *, left_s: float | None) -> AdmittedJob:
    """The job as a node gets it: due in `left_s`, and without timeout, which the driver watches."""
    whole = job.trajectory
    spec = replace(job.spec, arrival_s=0.0, deadline_s=left_s, deadline_at=None, timeout_s=None)
    steps = Trajectory(*_parts_of(whole))
    return replace(job, trajectory=steps, info=replace(job.info, spec=spec))


def _parts_of(steps: Trajectory) -> tuple[Any, ...]:
    of_steps = steps.approximate, steps.approximable, steps.num_refined
    return steps.job_id, steps.num_steps, steps.artifacts, *of_steps


class WholeJobCosts(CostModel):
    """Durations of whole jobs: the sum of their tasks by the profile, then what jobs took on nodes."""

    def __init__(self, profile: Profile | None = None) -> None:
        super().__init__()
        self._tasks = CostModel(profile)
        self._parts: dict[CostClass, tuple[CostClass, int]] = {}
        """Of each class of whole jobs: the class of its tasks, and their number."""

    def class_of(self, job: AdmittedJob, *, num_sharers: int = 1) -> CostClass:
        num_steps, num_refined = job.trajectory.num_steps, job.trajectory.num_refined
        steps_flops = (num_steps - num_refined) * job.flops[Stage.DENOISE]
        steps_flops += num_refined * job.flops[Stage.REFINE] if num_refined else 0
        whole = self.cost_class(
            job.spec.model or "",
            f"{job.shape}, {num_steps} steps",
            flops={**job.flops, Stage.DENOISE: steps_flops},
            state_bytes=job.state_bytes,
            limits=job.limits,
            num_sharers=num_sharers,
        )
        if whole not in self._parts:
            self._parts[whole] = (self._tasks.class_of(job), num_steps + 3)
        return whole

    def estimate(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> Estimate:
        """Degrees without a measurement deviate from the prediction as one rank does."""
        known = super().estimate(cost_class, stage, degrees)
        predicted = self._predicted(cost_class, degrees)
        if predicted is None or known.provenance is Provenance.MEASURED:
            return known
        alone = cost_class.measured.get((stage, ALONE))
        alone_predicted = self._predicted(cost_class, ALONE)
        if alone is None or alone_predicted is None:
            return predicted
        return predicted.scaled(alone.value / alone_predicted.seconds, predicted.provenance)

    def _predicted(self, cost_class: CostClass, degrees: Degrees) -> Estimate | None:
        """By the profile; None if it would be a guess."""
        tasks, num_tasks = self._parts[cost_class]
        step = self._tasks.estimate(tasks, Stage.DENOISE, degrees)
        if step.provenance is Provenance.GUESSED:
            return None
        first = Task("", 0, Stage.ENCODE)
        seconds = self._tasks.remaining_s(tasks, first, num_tasks, degrees)
        return Estimate(seconds, seconds, step.provenance)

    def arrangement(self, cost_class: CostClass) -> Arrangement:
        return self._tasks.arrangement(self._parts[cost_class][0])

    def is_measured(self, cost_class: CostClass) -> bool:
        return super().is_measured(cost_class) or self._tasks.is_measured(self._parts[cost_class][0])
