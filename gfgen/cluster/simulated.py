"""A cluster in virtual time: the driver, and on each node a whole control plane; and plans for it."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gfgen.cluster.driver import driver_of, start_of
from gfgen.cluster.node import Fleet, JobEnded, NodeJoined, Report
from gfgen.errors import RunError
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import Clock, JobCancelled, Wakeup
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.choosers import ImmediateChooser
from gfgen.runtime.simulate.estimate import decides_first, estimate, everything_open
from gfgen.runtime.simulate.planner import ESTIMATE_SHARE, Plan, Planner, PlanOption, option_of, option_of_run
from gfgen.runtime.simulate.simulation import (
    OutcomeRecorder,
    Simulated,
    SimulatedBackend,
    SimulatedTimes,
    profiled_times,
)
from gfgen.snapshot import Snapshot

MAX_NODES = 64
LATENCY_S = 0.005
"""Of a message between driver and node."""


class SimulatedNode(Observer):
    """A node; it is also the source of its jobs, and an observer of their ends."""

    def __init__(
        self,
        name: str,
        cluster: SimulatedCluster,
        *,
        num_ranks: int,
        policy: NamedPolicy,
        times: SimulatedTimes,
        profile: Profile | None = None,
        max_degree: int | None = None,
    ) -> None:
        self.name, self.num_ranks = name, num_ranks
        self._cluster = cluster
        self._clock = Clock(virtual=True)
        self._waiting: list[AdmittedJob] = []
        self._attempts: dict[str, int] = {}
        self.costs = CostModel(profile)
        self._backend = SimulatedBackend(self._clock, num_ranks=num_ranks, times=times)
        start = RunStart(num_ranks=num_ranks, lookahead_s=LOOKAHEAD_S, max_degree=max_degree)
        self.control = Control(
            (),
            state=State((), start, clock=self._clock, costs=self.costs),
            backend=self._backend,
            policy=policy,
            observers=[self],
            steering=Steering(
                intake=self, chooser=None if policy.choose is None else ImmediateChooser(policy.choose)
            ),
        )
        self.control.begin()

    @property
    def next_s(self) -> float:
        """When something happens there next."""
        self._backend.start_submitted()
        next_s = self._clock.next_wakeup()
        return math.inf if next_s is None else next_s

    def turn(self) -> None:
        self.control.turn()
        self._clock.look_s = self.control.state.flights.next_look_s(self._clock.turn_s)

    def start(self, job: AdmittedJob, *, attempt: int) -> None:
        self._attempts[job.job_id] = attempt
        self._cluster.tell(self, job)

    def cancel(self, attempt: int) -> None:
        self._cluster.tell(self, attempt)

    def receive(self, message: AdmittedJob | int, at_s: float) -> None:
        self._clock.advance(at_s)
        if isinstance(message, AdmittedJob):
            self._waiting.append(message)
            self._clock.at(Wakeup(at_s))
        else:
            job_id = next((job_id for job_id, number in self._attempts.items() if number == message), None)
            if job_id is not None:
                self._clock.at(JobCancelled(at_s, job_id))

    def take(self) -> Sequence[AdmittedJob]:
        taken, self._waiting = self._waiting, []
        return taken

    def ended(self, outcome: JobOutcome) -> None:
        attempt = self._attempts.pop(outcome.info.job_id)
        self._cluster.report(JobEnded(self.name, attempt, outcome), self._clock.now_s)


class SimulatedCluster:
    """Nodes that share a virtual time with their driver; messages take LATENCY_S."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._nodes: dict[str, SimulatedNode] = {}
        self._mail: list[tuple[float, int, Report | tuple[str, AdmittedJob | int]]] = []
        self._numbers = itertools.count()

    @property
    def nodes(self) -> Sequence[SimulatedNode]:
        return tuple(self._nodes.values())

    def join(self, node: SimulatedNode, at_s: float = 0.0) -> None:
        self._nodes[node.name] = node
        self._post(NodeJoined(node), at_s)

    def tell(self, node: SimulatedNode, message: AdmittedJob | int) -> None:
        self._post((node.name, message), self._clock.now_s + LATENCY_S)

    def report(self, report: Report, at_s: float) -> None:
        self._post(report, at_s + LATENCY_S)

    def _post(self, message: Report | tuple[str, AdmittedJob | int], at_s: float) -> None:
        heapq.heappush(self._mail, (at_s, next(self._numbers), message))

    def wait(self, until_s: float | None) -> Sequence[Report]:
        """Let time pass to the next report, and no further than `until_s`."""
        limit_s = math.inf if until_s is None else until_s
        while True:
            node = min(self._nodes.values(), key=lambda node: node.next_s, default=None)
            node_s = math.inf if node is None else node.next_s
            mail_s = self._mail[0][0] if self._mail else math.inf
            if min(node_s, mail_s) > limit_s:
                self._clock.advance(limit_s)
                return ()
            assert min(node_s, mail_s) < math.inf, "nothing is scheduled: the run would wait forever"
            if node is not None and node_s < mail_s:
                node.turn()
                continue
            at_s, _, message = heapq.heappop(self._mail)
            if not isinstance(message, tuple):
                self._clock.advance(at_s)
                return (message,)
            name, content = message
            if name in self._nodes:
                self._nodes[name].receive(content, at_s)


def simulate_nodes(
    jobs: Sequence[AdmittedJob],
    *,
    policy: NamedPolicy,
    num_nodes: int,
    num_ranks: int,
    profile: Profile,
    started_at: float = 0.0,
    observers: Sequence[Observer] = (),
    max_degree: int | None = None,
) -> Simulated:
    """Run these jobs in virtual time on equal nodes, with tasks of `max_degree`. Raises: StalledError."""
    clock, kept = Clock(virtual=True), OutcomeRecorder()
    cluster, fleet = SimulatedCluster(clock), Fleet.of(num_nodes, num_ranks=num_ranks)
    times = profiled_times(profile, jobs, num_ranks=num_ranks)
    for number in range(num_nodes):
        name = f"node {number}"
        node = SimulatedNode(
            name,
            cluster,
            num_ranks=num_ranks,
            policy=policy,
            times=times,
            profile=profile,
            max_degree=max_degree,
        )
        cluster.join(node)
    driver = driver_of(
        jobs,
        cluster,
        fleet,
        policy=policy,
        clock=clock,
        start=start_of(fleet, started_at=started_at),
        profile=profile,
        observers=[kept, *observers],
    )
    summary = _with_ranks(driver.run(), [node.control.metrics.summary() for node in cluster.nodes])
    doubts = {doubt for node in cluster.nodes for doubt in node.costs.doubts}
    return Simulated(summary, policy.name, doubts, kept.outcomes, num_nodes * num_ranks)


def _with_ranks(summary: Summary, nodes: Sequence[Summary]) -> Summary:
    names = ("num_tasks", "num_ranks", "busy_s", "waited_s", "moved_s")
    sums: dict[str, Any] = {name: sum(getattr(node, name) for node in nodes) for name in names}
    return replace(summary, **sums)


@dataclass(frozen=True, slots=True)
class Nodes:
    number: int
    num_ranks: int
    device: str | None = None
    """A part of the name of their devices, in lower case."""


@dataclass(kw_only=True)
class NodePlanner(Planner):
    """The same on different numbers of nodes."""

    unit = "node"
    nodes: Nodes

    def plan(self, policies: Sequence[str]) -> Plan:
        """Every policy on all nodes, and the fewest on which they miss nothing. Raises: RunError."""
        enough, too_few = self.nodes.number, 0
        self.expect(len(policies) + math.ceil(math.log2(enough + 1)))
        here = self.best_on(policies, enough)
        found = {enough: here[0]}
        hopeful = [option.policy for option in here if option.meets_all]
        while here[0].meets_all and enough - too_few > 1:
            number = (enough + too_few) // 2
            best = self.first_enough(hopeful, number)
            if best is not None:
                found[number] = best
            if best is not None and best.meets_all:
                enough = number
            else:
                too_few = number
        by_number = [found[number] for number in sorted(found)]
        return self.made(here, by_number, ranks_per_node=self.nodes.num_ranks)

    def in_full(self, policy: str, number: int) -> PlanOption:
        run = simulate_nodes(
            self.jobs,
            policy=load_policy(policy),
            num_nodes=number,
            num_ranks=self.nodes.num_ranks,
            profile=self.profile,
            started_at=self.window.started_at,
            observers=[OutcomeRecorder(self.note(policy, number))],
            max_degree=self._max_degree,
        )
        return option_of_run(run, policy, self.window.by_s)

    def estimated(self, policy: str, number: int) -> PlanOption:
        """As if each node had an equal share of the jobs from the beginning."""
        by_work, note = self._by_work, self.note(policy, number, share=ESTIMATE_SHARE)
        outcomes: list[JobOutcome] = []
        for share in filter(None, (by_work[node::number] for node in range(number))):
            snapshot = self._open(share)
            found = estimate(share, snapshot, decides_first(load_policy(policy), snapshot), ended=note)
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
        opened = everything_open(
            jobs, num_ranks=self.nodes.num_ranks, profile=self.profile, started_at=self.window.started_at
        )
        return replace(opened, max_degree=min(opened.max_degree, self._max_degree))

    @property
    def _max_degree(self) -> int:
        return min(self.nodes.num_ranks, self.profile.num_ranks)
