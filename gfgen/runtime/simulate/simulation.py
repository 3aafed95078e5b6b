"""A run in virtual time: the real control plane and policy over ranks whose true times are a profile's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist
from typing import Any

from gfgen.graph import Stage
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.backlog import AHEAD, Backlog
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch, GivenUp
from gfgen.runtime.core.events import (
    Clock,
    Event,
    OutputWritten,
    RankLoaded,
    RankReady,
    TaskDone,
    TaskFailed,
)
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.messages import MemoryUse, RankTimes
from gfgen.runtime.predict.cost import CostClass, CostModel, UncertainEstimate
from gfgen.runtime.predict.cost_table import Estimate
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.choosers import ImmediateChooser

_NORMAL = NormalDist()
_QUARTILE = _NORMAL.inv_cdf(0.75)


@dataclass(frozen=True, slots=True)
class Simulated:
    summary: Summary
    policy: str
    doubts: Collection[UncertainEstimate] = ()
    """Predictions without a measurement of the same task (`cost.uncertain` describes them)."""
    outcomes: Sequence[JobOutcome] = ()
    num_ranks: int = 1


def simulate(
    jobs: Sequence[AdmittedJob],
    *,
    policy: NamedPolicy,
    num_ranks: int,
    profile: Profile,
    observers: Sequence[Observer] = (),
    times: SimulatedTimes | None = None,
    residency: Residency | None = None,
    load: Callable[[str], NamedPolicy] = load_policy,
    ahead: int = AHEAD,
    **start: Any,
) -> Simulated:
    """Run these jobs in virtual time, with task times from the profile, or `times`.

    The policy sees the predictions of a real run. `residency`, for one run only, lets models take turns.
    `load` finds the policies that `auto` names. `start`: further fields of `RunStart`.
    `ahead`: see `Backlog`.
    Raises: StalledError if the policy leaves jobs waiting forever; it names them.
    """
    clock, costs, kept = Clock(virtual=True), CostModel(profile), OutcomeRecorder()
    times = times or profiled_times(profile, jobs, num_ranks=num_ranks, reads_s=start.get("reads_s"))
    backend, backlog = SimulatedBackend(clock, num_ranks=num_ranks, times=times), Backlog(jobs, ahead=ahead)
    state = State(
        near := backlog.take(),
        RunStart(
            num_ranks=num_ranks,
            num_writers=times.num_writers,
            lookahead_s=LOOKAHEAD_S,
            resident=residency.resident if residency else None,
            **start,
        ),
        clock=clock,
        costs=costs,
    )
    control = Control(
        near,
        state=state,
        backend=backend,
        policy=policy,
        observers=[kept, *observers],
        steering=Steering(
            chooser=None if policy.choose is None else ImmediateChooser(policy.choose),
            backlog=backlog,
            residency=residency,
            load=load,
        ),
    )
    summary = control.run()
    return Simulated(summary, policy.name, costs.doubts, kept.outcomes, num_ranks)


class OutcomeRecorder(Observer):
    def __init__(self, note: Callable[[], None] = lambda: None) -> None:
        self.outcomes: list[JobOutcome] = []
        self._note = note

    def ended(self, outcome: JobOutcome) -> None:
        self.outcomes.append(outcome)
        self._note()


DispatchSeconds = Callable[[Dispatch], float]


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    task_s: DispatchSeconds
    loaded_s: DispatchSeconds | None = None
    move_s: DispatchSeconds = lambda _: 0.0
    write_s: DispatchSeconds = lambda _: 0.0
    num_writers: int = 1
    dispatch_s: float = 0.0
    """From a decision to the task's start on a free rank."""


class SimulatedBackend:
    """Ranks that run their dispatches in order, in virtual time."""

    def __init__(self, clock: Clock, *, num_ranks: int, times: SimulatedTimes) -> None:
        self._clock = clock
        self._times = times
        self._free_s = [0.0] * num_ranks
        self._made_s: dict[int, float] = {}
        self._submitted: list[Dispatch] = []
        """Dispatches of this turn of the loop; their durations depend on each other."""
        self._writers_free_s = [0.0] * times.num_writers
        self._stopped: set[int] = set()
        self._called_off: set[str] = set()
        """Jobs with a stopped decode; their files are not written."""
        for rank in range(num_ranks):
            clock.at(RankReady(clock.now_s, rank, 1, 0.0))

    def wait(self, until: float | None) -> list[Event]:
        if self._submitted:
            self.start_submitted()
            until = self._clock.next_wakeup()
        assert until is not None, "nothing is scheduled: the run would wait forever"
        self._clock.advance(until)
        return [event for event in self._clock.due() if self._comes_about(event)]

    def _comes_about(self, event: Event) -> bool:
        if isinstance(event, TaskDone):
            return event.dispatch not in self._stopped
        return not (isinstance(event, OutputWritten) and event.job_id in self._called_off)

    def submit(self, dispatch: Dispatch) -> None:
        """A task starts when its ranks are free and its input has arrived."""
        self._submitted.append(dispatch)

    def stop(self, dispatches: Sequence[Dispatch]) -> None:
        """Stop dispatches; their ranks leave them at once."""
        now_s = self._clock.now_s
        for dispatch in dispatches:
            self._stopped.add(dispatch.number)
            ended_s = self._made_s.pop(dispatch.number, None)
            if dispatch.task.stage is Stage.DECODE:
                self._called_off.add(dispatch.task.job_id)
            for rank in dispatch.layout.ranks:
                if self._free_s[rank] == ended_s:  # no other task is queued
                    self._free_s[rank] = now_s
            self._clock.at(TaskFailed(now_s, dispatch.number, "stopped", void=True))

    def release(self, job_id: str) -> None:
        """No effect: jobs take no memory."""

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        """No effect: jobs need no preparation."""

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        """Each rank loads for the predicted time, after its dispatches."""
        if self._submitted:
            self.start_submitted()
        for rank, free_s in enumerate(self._free_s):
            self._free_s[rank] = max(self._clock.now_s, free_s) + load_s
            self._clock.at(RankLoaded(self._free_s[rank], rank, load_s))

    def save(self, job_id: str, *, next_index: int, producer: int, given_up: GivenUp) -> None:
        """No effect: there is no state to save."""

    def memory_use(self) -> Mapping[int, MemoryUse]:
        return {}

    def start_submitted(self) -> None:
        """Schedule the ends of what was submitted in this turn of the loop."""
        submitted, self._submitted = self._submitted, []
        busy_s = self._free_s
        if self._times.loaded_s:
            busy_s = list(self._free_s)
            for dispatch in submitted:
                for rank in dispatch.layout.ranks:
                    busy_s[rank] = max(busy_s[rank], self._clock.now_s) + self._times.task_s(dispatch)
        for dispatch in submitted:
            self._start(dispatch, busy_s)

    def _start(self, dispatch: Dispatch, busy_s: Sequence[float]) -> None:
        times, ranks = self._times, dispatch.layout.ranks
        free_s = max([self._free_s[rank] for rank in ranks])
        queued_s = max(self._clock.now_s + times.dispatch_s, free_s)
        input_s = max(queued_s, self._made_s.pop(dispatch.producer or 0, 0.0))
        moved_s = times.move_s(dispatch)
        started_s = input_s + moved_s
        ended_s = started_s + dispatch.switch_s + self._duration(dispatch, started_s, busy_s)
        self._made_s[dispatch.number] = ended_s
        waited_s = input_s - queued_s
        for rank in ranks:
            self._free_s[rank] = ended_s
        parts = tuple([RankTimes(rank, started_s, ended_s, waited_s, moved_s) for rank in ranks])
        self._clock.at(TaskDone(ended_s, dispatch.number, parts))
        if dispatch.task.stage is Stage.DECODE:
            self._write(dispatch, ended_s)

    def _duration(self, dispatch: Dispatch, started_s: float, busy_s: Sequence[float]) -> float:
        """Interpolated between the times alone and under load, by the share of other ranks that are busy."""
        alone_s, ranks = self._times.task_s(dispatch), dispatch.layout.ranks
        if self._times.loaded_s is None or len(ranks) == len(busy_s):
            return alone_s
        others = [until_s > started_s for rank, until_s in enumerate(busy_s) if rank not in ranks]
        return alone_s + (self._times.loaded_s(dispatch) - alone_s) * sum(others) / len(others)

    def _write(self, dispatch: Dispatch, ended_s: float) -> None:
        lasts_s = self._times.write_s(dispatch)
        free_s = self._writers_free_s
        writer = free_s.index(min(free_s))
        free_s[writer] = max(ended_s, free_s[writer]) + lasts_s
        self._clock.at(OutputWritten(free_s[writer], dispatch.task.job_id, "", 0, lasts_s, writer))


def profiled_times(
    profile: Profile, jobs: Sequence[AdmittedJob], *, num_ranks: int = 1, reads_s: Any = None
) -> SimulatedTimes:
    """The durations of these jobs' tasks, moves and files.

    Tasks vary as measured, since exact predictions flatter policies, and equally in every simulation. Ranks
    that do not slow each other down are GPUs, each with its own writer.
    """
    costs, by_id = CostModel(profile), {job.job_id: job for job in jobs}  # a cost model that never learns
    costs.reads_s = reads_s or {}
    estimates: dict[object, Estimate] = {}

    def cost_class(dispatch: Dispatch) -> CostClass:
        return costs.class_of(by_id[dispatch.task.job_id], num_sharers=dispatch.num_sharers)

    def estimate(dispatch: Dispatch) -> Estimate:
        key = (cost_class(dispatch), dispatch.task.stage, dispatch.layout.degrees)
        if key not in estimates:
            estimates[key] = costs.estimate(*key)
        return estimates[key]

    def task_s(dispatch: Dispatch) -> float:
        found = estimate(dispatch)
        return found.seconds * _luck(dispatch, found)

    def loaded_s(dispatch: Dispatch) -> float:
        found = estimate(dispatch)
        return found.loaded_s * _luck(dispatch, found)

    def move_s(dispatch: Dispatch) -> float:
        """Ranks receive in parallel, each its own transfers in order."""
        if not dispatch.transfers:
            return 0.0
        received = Counter[int]()
        for transfer in dispatch.transfers:
            received[transfer.destination] += transfer.size_bytes
        return profile.move_s + max(received.values()) / profile.move_bytes_per_s

    return SimulatedTimes(
        task_s=task_s,
        loaded_s=loaded_s if profile.shares_cores else None,
        move_s=move_s,
        write_s=lambda dispatch: cost_class(dispatch).write_s,
        num_writers=profile.num_writers(num_ranks),
        dispatch_s=profile.dispatch_s,
    )


def _luck(dispatch: Dispatch, estimate: Estimate) -> float:
    """A task's duration relative to the median: log-normal, with the measured interquartile range.

    The quartiles of such a distribution are exp(-_QUARTILE * sigma) and exp(_QUARTILE * sigma). A range
    above twice the median counts as twice: it has two kinds of tasks, such as encodes that may be kept.
    """
    if not estimate.spread_s or not estimate.seconds:
        return 1.0
    sigma = math.asinh(min(1.0, estimate.spread_s / (2 * estimate.seconds))) / _QUARTILE
    name = f"{dispatch.task.job_id} {dispatch.task.index}".encode()
    drawn = int.from_bytes(blake2b(name, digest_size=6).digest(), "big")
    return math.exp(sigma * _NORMAL.inv_cdf((drawn + 0.5) / 2**48))
