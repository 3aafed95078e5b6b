"""The control loop over nodes: the state, policies, records and signals of a run on one machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gfgen.cluster.backend import ClusterBackend, Links, WholeJobCosts, as_whole
from gfgen.cluster.handout import HandOut
from gfgen.cluster.node import Cluster, Fleet
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.control import Control, Intake
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.events import Event, PolicyChanged, PriorityChanged
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.profile_file import Profile


class Driver(Control):
    """One run on a cluster, from the first arrival to the last file."""

    backend: ClusterBackend

    @property
    def num_ranks(self) -> int:
        return self.backend.num_ranks

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
    """The jobs of another intake, as the driver sees them."""

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
    """A driver for these jobs; `options` are those of `Control`."""
    handout = HandOut(policy, fleet)
    whole = [as_whole(job) for job in jobs]
    state = State(whole, start, clock=clock, costs=WholeJobCosts(profile))

    def left_s(job_id: str) -> float | None:
        due_s = state.jobs.records[job_id].deadline_s
        return None if due_s == math.inf else due_s - clock.now_s

    backend = ClusterBackend(cluster, fleet, handout, clock=clock, left_s=left_s, links=links or Links())
    backend.add(whole)
    driver = Driver(whole, state=state, backend=backend, policy=handout.named, **options)
    driver.handout = handout
    return driver


def start_of(fleet: Fleet, **circumstances: Any) -> RunStart:
    """What a run on this fleet starts from: a job has one lane, and lanes of a node are an island."""
    return RunStart(
        num_ranks=fleet.num_slots * fleet.num_lanes,
        max_degree=1,
        islands=[list(fleet.lanes_of(slot)) for slot in range(fleet.num_slots)],
        **circumstances,
    )
