"""Plans for several machines: the best policy, and how many nodes are enough."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gfgen.cluster.simulated import simulate_nodes
from gfgen.errors import RunError
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.estimate import decides_first, estimate, everything_open
from gfgen.runtime.simulate.planner import (
    FULL_TASKS,
    Plan,
    PlanOption,
    PlanProgress,
    PlanWindow,
    best_first,
    option_of,
)
from gfgen.snapshot import Snapshot
from gfgen.system.signals import DecisionTimeout


@dataclass(frozen=True, slots=True)
class Nodes:
    number: int
    num_ranks: int
    """Of each."""
    device: str | None = None
    """A part of the name of their devices, in lower case."""


@dataclass
class NodePlanner:
    """Simulates or estimates the same jobs on different numbers of nodes."""

    jobs: Sequence[AdmittedJob]
    nodes: Nodes
    profile: Profile
    window: PlanWindow
    progress: PlanProgress = lambda what, share: None
    refused: list[str] = field(default_factory=list)
    """Why policies are left out."""

    def plan(self, policies: Sequence[str]) -> Plan:
        """Every policy on all nodes, and the fewest nodes on which the policies miss nothing.

        Few jobs are always simulated in full. With many jobs only the best policy on all nodes is simulated;
        everything else is estimated. More nodes are assumed to miss no more, so half of the numbers are left
        out at each look.

        Raises: RunError when no policy can run the jobs.
        """
        looks = len(policies) + math.ceil(math.log2(self.nodes.number + 1))
        is_coarse = looks * sum(job.trajectory.num_tasks for job in self.jobs) > FULL_TASKS
        look = self._estimated if is_coarse else self._in_full
        here = best_first(self._options(look, policies, self.nodes.number, 1 / looks))
        while is_coarse and here and here[0].is_estimated:
            here = (*self._options(self._in_full, [here[0].policy], self.nodes.number, 0.0), *here[1:])
        if not here:
            raise RunError(self.refused[0])
        found = {self.nodes.number: here[0]}
        enough, too_few = self.nodes.number, 0
        hopeful = [option.policy for option in here if option.meets_all]
        while here[0].meets_all and enough - too_few > 1:
            number = (enough + too_few) // 2
            tried = best_first(self._options(look, hopeful, number, 1 / looks, is_first_enough=True))
            if tried:
                found[number] = tried[0]
            if tried and tried[0].meets_all:
                enough = number
            else:
                too_few = number
        by_ranks = tuple(found[number] for number in sorted(found))
        return Plan(
            self.window,
            len(self.jobs),
            here,
            by_ranks,
            refused=tuple(dict.fromkeys(self.refused)),
            has_writes=self.profile.has_writes,
            ranks_per_node=self.nodes.num_ranks,
        )

    def _options(
        self,
        look: Callable[[str, int], PlanOption],
        policies: Sequence[str],
        number: int,
        share: float,
        *,
        is_first_enough: bool = False,
    ) -> list[PlanOption]:
        """The policies that can run the jobs on this number of nodes, up to the first that misses nothing."""
        found: list[PlanOption] = []
        for policy in policies:
            try:
                found.append(look(policy, number))
            except (RunError, DecisionTimeout) as error:
                self.refused.append(str(error))
            self.progress(f"{policy}, nodes: {number}", share / (len(policies) if is_first_enough else 1))
            if is_first_enough and found and found[-1].meets_all:
                break
        return found

    def _in_full(self, policy: str, number: int) -> PlanOption:
        run = simulate_nodes(
            self.jobs,
            policy=load_policy(policy),
            num_nodes=number,
            num_ranks=self.nodes.num_ranks,
            profile=self.profile,
            started_at=self.window.started_at,
            max_degree=self._max_degree,
        )
        if run.summary.policy_fault is not None:
            raise RunError(f"policy {policy} failed: {run.summary.policy_fault}")
        num_ranks = number * self.nodes.num_ranks
        return option_of(run.outcomes, policy, num_ranks, self.window.by_s, doubts=run.doubts)

    def _estimated(self, policy: str, number: int) -> PlanOption:
        """As if each node had an equal share of the jobs from the beginning."""
        by_work = self._by_work
        outcomes: list[JobOutcome] = []
        for share in filter(None, (by_work[node::number] for node in range(number))):
            snapshot = self._open(share)
            found = estimate(share, snapshot, decides_first(load_policy(policy), snapshot))
            if found is None:
                raise RunError(f"policy {policy} failed in an estimate; 'gfgen simulate' shows the details")
            outcomes += found
        num_ranks = number * self.nodes.num_ranks
        return option_of(outcomes, policy, num_ranks, self.window.by_s, is_estimated=True)

    @functools.cached_property
    def _by_work(self) -> Sequence[AdmittedJob]:
        views = self._open(self.jobs).open
        return sorted(self.jobs, key=lambda job: views[job.job_id].remaining_s)

    def _open(self, jobs: Sequence[AdmittedJob]) -> Snapshot:
        """All of these jobs on one node."""
        opened = everything_open(
            jobs, num_ranks=self.nodes.num_ranks, profile=self.profile, started_at=self.window.started_at
        )
        return replace(opened, max_degree=min(opened.max_degree, self._max_degree))

    @property
    def _max_degree(self) -> int:
        """A step uses no more ranks than the profile has times of."""
        return min(self.nodes.num_ranks, self.profile.num_ranks)
