"""A cluster of simulated nodes that die, join and repeat what they have said, by a seed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from random import Random

from builders import STEP_S, Recorder

from gfgen.cluster.driver import Driver, driver_of, start_of
from gfgen.cluster.node import Fleet, JobEnded, NodeLost, Report
from gfgen.cluster.simulated import SimulatedCluster, SimulatedNode
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import Clock
from gfgen.runtime.simulate.simulation import SimulatedTimes


class FakeCluster(SimulatedCluster):
    """`lost_at` names the nodes that die after a number of reports, `joins_after` those that come."""

    def __init__(self, *, num_nodes: int, num_ranks: int = 2, policy: str = "srtf", step_s: float = STEP_S):
        self.clock = Clock(virtual=True)
        super().__init__(self.clock)
        self._times = SimulatedTimes(task_s=lambda _: step_s)
        self._num_ranks, self._policy = num_ranks, load_policy(policy)
        self.num_joined = 0
        for _ in range(num_nodes):
            self.add()

    def add(self) -> None:
        """One more node joins now."""
        self.num_joined += 1
        name = f"node {self.num_joined}"
        node = SimulatedNode(name, self, num_ranks=self._num_ranks, policy=self._policy, times=self._times)
        self.join(node, self.clock.now_s)

    def kill(self, name: str) -> None:
        """A node dies now, and with it what it has sent."""
        del self._nodes[name]
        self._mail = [
            each for each in self._mail if not (isinstance(each[2], JobEnded) and each[2].node == name)
        ]
        heapq.heapify(self._mail)
        self.report(NodeLost(name, "killed"), self.clock.now_s)


class FaultyCluster(FakeCluster):
    """After reports, by the seed: a node dies, another joins, or an earlier report comes again."""

    def __init__(self, seed: int, **options: int) -> None:
        super().__init__(**options)
        self._random = Random(seed)
        self._earlier: list[JobEnded] = []

    def wait(self, until_s: float | None) -> Sequence[Report]:
        reports = [*super().wait(until_s)]
        chance = self._random.random()
        if chance < 0.04 and len(self.nodes) > 1:
            victim = self._random.choice(self.nodes)
            self.kill(victim.name)
        elif chance < 0.08:
            self.add()
        elif chance < 0.2 and self._earlier:
            reports.append(self._random.choice(self._earlier))
        self._earlier += [each for each in reports if isinstance(each, JobEnded)]
        return reports


def driver_on(
    cluster: FakeCluster, jobs: Sequence[AdmittedJob], *, policy: str = "srtf", num_slots: int = 8
) -> tuple[Driver, Recorder]:
    """A driver of these jobs, not yet run, and what watches it."""
    recorder, fleet = Recorder(), Fleet.of(num_slots, num_ranks=2)
    driver = driver_of(
        jobs,
        cluster,
        fleet,
        policy=load_policy(policy),
        clock=cluster.clock,
        start=start_of(fleet),
        observers=[recorder],
    )
    return driver, recorder
