"""A whole run in virtual time: the real control plane, state and policy over simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.choosers import ImmediateChooser
from gfgen.runtime.predict.cost import CostModel, UncertainEstimate
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.backend import SimulatedBackend, SimulatedTimes
from gfgen.runtime.simulate.profiled import profiled_times


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
