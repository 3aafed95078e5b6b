"""A whole run in virtual time: the real control plane, state and policy over simulated ranks.

The true durations come from a profile. They are independent of the cost model that the policies see, which
changes during the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from typing import Any

from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostClass, CostModel, UncertainEstimate
from gfgen.runtime.predict.cost_table import Estimate
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.backend import SimulatedBackend, SimulatedTimes
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
    """In the order in which the jobs end."""
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
    **start: Any,
) -> Simulated:
    """Run these jobs in virtual time, with task times from the profile.

    The policy sees the same predictions as in a real run that starts from this profile. `times` replaces the
    profile's true times. `residency`, for one run only, lets models take turns; without it all of them are in
    memory. `load` finds the policies that `auto` names. `start`: further fields of `RunStart`.

    Raises: StalledError if the policy leaves jobs waiting forever; it names them.
    """
    clock, costs, kept = Clock(virtual=True), CostModel(profile), OutcomeRecorder()
    times = times or profiled_times(profile, jobs, num_ranks=num_ranks)
    backend = SimulatedBackend(clock, num_ranks=num_ranks, times=times)
    state = State(
        jobs,
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
        jobs,
        state=state,
        backend=backend,
        policy=policy,
        observers=[kept, *observers],
        steering=Steering(
            chooser=None if policy.choose is None else ImmediateChooser(policy.choose),
            residency=residency,
            load=load,
        ),
    )
    summary = control.run()
    return Simulated(
        summary=summary,
        policy=policy.name,
        doubts=costs.doubts,
        outcomes=kept.outcomes,
        num_ranks=num_ranks,
    )


class OutcomeRecorder(Observer):
    def __init__(self) -> None:
        self.outcomes: list[JobOutcome] = []

    def ended(self, outcome: JobOutcome) -> None:
        self.outcomes.append(outcome)


# The true durations ------------------------------------------------------------------


def profiled_times(profile: Profile, jobs: Sequence[AdmittedJob], *, num_ranks: int = 1) -> SimulatedTimes:
    """The durations of these jobs' tasks, moves and files.

    Tasks vary around their medians as much as in the measurement, because exact predictions would flatter the
    policies that use them. A task varies equally in every simulation, so that policies are compared on equal
    terms. Ranks that do not slow each other down are GPUs, each with its own writer.
    """
    costs, by_id = CostModel(profile), {job.job_id: job for job in jobs}  # a cost model that never learns
    estimates: dict[object, Estimate] = {}

    def cost_class(dispatch: Dispatch) -> CostClass:
        batch = 1 if dispatch.batch is None else len(dispatch.batch)
        return costs.class_of(by_id[dispatch.task.job_id], batch=batch)

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

    The quartiles of such a distribution are exp(-_QUARTILE * sigma) and exp(_QUARTILE * sigma).
    """
    if not estimate.spread_s or not estimate.seconds:
        return 1.0
    sigma = math.asinh(estimate.spread_s / (2 * estimate.seconds)) / _QUARTILE
    name = f"{dispatch.task.job_id} {dispatch.task.index}".encode()
    drawn = int.from_bytes(blake2b(name, digest_size=6).digest(), "big")
    return math.exp(sigma * _NORMAL.inv_cdf((drawn + 0.5) / 2**48))
