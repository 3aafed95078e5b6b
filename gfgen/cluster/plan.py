"""Plans for several machines: the best policy, and how many nodes are enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gfgen.cluster.simulated import simulate_nodes
from gfgen.errors import RunError
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.planner import Plan, PlanOption, PlanProgress, PlanWindow, best_first, option_of


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal machines."""

    number: int
    num_ranks: int
    """Of each."""
    device: str | None = None
    """A part of the name of their devices, in lower case."""


@dataclass(slots=True)
class NodePlanner:
    """Simulates the same jobs on different numbers of nodes."""

    jobs: Sequence[AdmittedJob]
    nodes: Nodes
    profile: Profile
    window: PlanWindow
    progress: PlanProgress = lambda what, share: None

    def plan(self, policies: Sequence[str]) -> Plan:
        """Every policy on all nodes, and the fewest nodes on which the policies miss nothing.

        More nodes are assumed to miss no more, so half of the numbers are left out at each look.

        Raises: RunError when no policy can run the jobs.
        """
        share = 1 / (len(policies) + math.ceil(math.log2(self.nodes.number + 1)))
        tried = [self._option(policy, self.nodes.number, share) for policy in policies]
        here = best_first(tried)
        found = {self.nodes.number: here[0]}
        enough, too_few = self.nodes.number, 0
        while here[0].meets_all and enough - too_few > 1:
            number = (enough + too_few) // 2
            found[number] = self._best(here, number, share)
            if found[number].meets_all:
                enough = number
            else:
                too_few = number
        by_ranks = tuple(found[number] for number in sorted(found))
        return Plan(
            self.window,
            len(self.jobs),
            here,
            by_ranks,
            has_writes=self.profile.has_writes,
            ranks_per_node=self.nodes.num_ranks,
        )

    def _best(self, here: Sequence[PlanOption], number: int, share: float) -> PlanOption:
        """On this number of nodes, the first policy that misses nothing, or the best one."""
        hopeful = [option.policy for option in here if option.meets_all]
        tried: list[PlanOption] = []
        for policy in hopeful:
            tried.append(self._option(policy, number, share / len(hopeful)))
            if tried[-1].meets_all:
                break
        return best_first(tried)[0]

    def _option(self, policy: str, number: int, share: float) -> PlanOption:
        run = simulate_nodes(
            self.jobs,
            policy=load_policy(policy),
            num_nodes=number,
            num_ranks=self.nodes.num_ranks,
            profile=self.profile,
            started_at=self.window.started_at,
            max_degree=min(self.nodes.num_ranks, self.profile.num_ranks),
        )
        self.progress(f"{policy}, nodes: {number}", share)
        if run.summary.policy_fault is not None:
            raise RunError(f"policy {policy} failed: {run.summary.policy_fault}")
        num_ranks = number * self.nodes.num_ranks
        return option_of(run.outcomes, policy, num_ranks, self.window.by_s, doubts=run.doubts)
