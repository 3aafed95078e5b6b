"""What the driver knows of nodes, what the cluster reports, and which jobs each node gets (`HandOut`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gfgen.layout import MAX_RANKS, Layout
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobOutcome
from gfgen.snapshot import Decision, JobView, RankView, RunningTask, Snapshot


class Node(Protocol):
    """A machine with ranks, which runs jobs by the policy of the run; one that comes back is another node."""

    @property
    def name(self) -> str: ...

    @property
    def num_ranks(self) -> int: ...

    def start(self, job: AdmittedJob, *, attempt: int) -> None:
        """Hand over a job; returns at once. One `JobEnded` with this number follows, or a `NodeLost`."""

    def cancel(self, attempt: int) -> None:
        """Stop a job, unless it has ended; its `JobEnded` follows in any case."""


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node takes jobs from now on."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone with all its jobs. What it still reports does not count."""

    name: str
    reason: str


class Delivery(Protocol):
    """The files of an attempt, which have no name in the output folder yet."""

    def publish(self) -> JobOutcome:
        """Give them their names. Raises: OutputError when that is not possible."""

    def drop(self) -> None:
        """Nobody wants them."""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """How an attempt at a job ended on its node."""

    node: str
    attempt: int
    outcome: JobOutcome
    delivery: Delivery | None = None


Note = Dispatch | Event | JobView


@dataclass(frozen=True, slots=True)
class NodeNotes:
    """What the ranks of a node do, for those who watch the run. Nothing depends on it."""

    name: str
    notes: Sequence[Note]
    """Ranks, numbers and times are the node's."""
    begins_s: float
    """The start of the node's time, by the driver's clock."""


Report = NodeJoined | NodeLost | JobEnded | NodeNotes


class Cluster(Protocol):
    def wait(self, until_s: float | None) -> Sequence[Report]:
        """Reports in their order; returns without any when the clock reaches `until_s`, or before."""


LANES_PER_RANK = 4
"""One for a job that runs, MAX_AHEAD for jobs ahead of need, one for an urgent one."""


@dataclass(slots=True)
class Fleet:
    """Living nodes by slot, whose lanes are ranks of the driver's state; a job handed to a node has one."""

    num_slots: int
    num_lanes: int
    nodes: dict[int, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, num_slots: int, *, num_ranks: int) -> Fleet:
        """Slots for nodes of up to this many ranks."""
        return cls(num_slots, LANES_PER_RANK * num_ranks)

    @property
    def num_ranks(self) -> int:
        return sum(node.num_ranks for node in self.nodes.values())

    def slot_of(self, lane: int) -> int:
        return lane // self.num_lanes

    def lanes_of(self, slot: int) -> range:
        return range(slot * self.num_lanes, (slot + 1) * self.num_lanes)

    def join(self, node: Node) -> int | None:
        """The slot of a new node; None if all are taken, or it is larger than nodes may be."""
        if node.num_ranks * LANES_PER_RANK > self.num_lanes:
            return None
        slot = next((slot for slot in range(self.num_slots) if slot not in self.nodes), None)
        if slot is not None:
            self.nodes[slot] = node
        return slot

    def lose(self, name: str) -> int | None:
        """The slot that a node leaves; None if it has left before."""
        slot = next((slot for slot, node in self.nodes.items() if node.name == name), None)
        if slot is not None:
            del self.nodes[slot]
        return slot


ROUND_TRIP_S = 0.05
"""From the end of a job on a node to the start of the next one that the driver hands out for it."""
QUEUE_SHARE = 0.25
"""Of the waiting jobs per rank."""
MAX_AHEAD = 2
"""Jobs ahead of need per rank."""
AT_ONCE = 2
"""Jobs that a node gets before others with room get some; with more, the longest ones end on one node."""


class HandOut:
    """The policy of the driver: `decide` gives jobs lanes of nodes, and asks the run's policy node by node.

    A node gets as many jobs as it has ranks, and a few ahead of need. An urgent job does not wait for these:
    if the policy would run it now in place of a job that a node has, that node gets it, too, and its own
    policy lets it overtake at the next step.
    """

    def __init__(self, policy: NamedPolicy, fleet: Fleet) -> None:
        self._policy = policy
        self._fleet = fleet
        self._given: dict[str, JobView] = {}
        """The views of jobs that nodes have, as they were handed out."""
        self.wants_turn = False
        """After the last decisions some node still has room: asking again may bring more."""

    @property
    def named(self) -> NamedPolicy:
        """For the control loop. The driver never changes the policy: each node does, if it is `auto`."""
        return NamedPolicy(self._policy.name, self.decide, is_built_in=self._policy.is_built_in)

    def follow(self, policy: NamedPolicy) -> None:
        self._policy, self.wants_turn = policy, True

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Jobs for the node with the most room; if no node has any, urgent ones that overtake."""
        handed = self._handed(snapshot.running)
        rooms = self._rooms(snapshot, handed)
        decisions: list[Decision] = []
        if rooms:
            nodes = self._fleet.nodes
            slot = max(rooms, key=lambda slot: (rooms[slot] / nodes[slot].num_ranks, -slot))
            share = math.ceil(len(snapshot.open) / len(rooms))
            if len(handed[slot]) >= nodes[slot].num_ranks:
                share = min(share, AT_ONCE)
            decisions = self._next_jobs(snapshot, slot, rooms[slot])[:share]
            self.wants_turn = bool(decisions) and (len(rooms) > 1 or rooms[slot] > len(decisions))
        return decisions or self._overtake(snapshot, handed)

    def _handed(self, running: Iterable[RunningTask]) -> dict[int, dict[str, RunningTask]]:
        """By slot of a living node, the jobs that it has."""
        handed: dict[int, dict[str, RunningTask]] = {slot: {} for slot in self._fleet.nodes}
        for task in running:
            slot = self._fleet.slot_of(task.layout.ranks[0])
            if slot in handed:
                handed[slot][task.task.job_id] = task
        known = {job_id for jobs in handed.values() for job_id in jobs}
        if len(self._given) > 2 * len(known) + MAX_RANKS:
            self._given = {job_id: view for job_id, view in self._given.items() if job_id in known}
        return handed

    def _rooms(self, snapshot: Snapshot, handed: Mapping[int, Mapping[str, RunningTask]]) -> dict[int, int]:
        """By slot, how many more jobs its node can use, if any."""
        ahead, besides = self._ahead(snapshot)
        rooms = {}
        for slot, node in self._fleet.nodes.items():
            room = node.num_ranks + math.floor(node.num_ranks * ahead + besides) - len(handed[slot])
            if room > 0:
                rooms[slot] = room
        return rooms

    def _ahead(self, snapshot: Snapshot) -> tuple[float, float]:
        """Jobs that a node gets ahead of need: per rank, and besides.

        Those that may end within a round trip, and a share of the queue: policies use ranks better if they
        can choose among jobs. The share shrinks with the queue. Otherwise one node would be busy at the end
        while ranks of others idle.
        """
        if len(self._fleet.nodes) == 1:
            return MAX_AHEAD, 0.0
        waiting = len(snapshot.open) / self._fleet.num_ranks
        if waiting < 1:
            return 0.0, 0.0
        soon = ROUND_TRIP_S / max(next(iter(snapshot.open.values())).remaining_s, 1e-3)
        return min(MAX_AHEAD, max(soon, QUEUE_SHARE * waiting)), 1.0

    def _next_jobs(self, snapshot: Snapshot, slot: int, room: int) -> list[Decision]:
        """What the policy would start on a node with this many free ranks, on lanes of that node."""
        num_ranks = self._fleet.nodes[slot].num_ranks
        chosen = self._chosen(_of_node(snapshot, num_ranks, num_free=min(room, num_ranks)))
        return self._on_lanes(snapshot, slot, chosen[:room])

    def _chosen(self, snapshot: Snapshot) -> list[JobView]:
        tasks = [decision.task for decision in self._policy.decide(snapshot)]
        return [snapshot.open[task.job_id] for task in tasks if task.job_id in snapshot.open]

    def _on_lanes(self, snapshot: Snapshot, slot: int, jobs: Sequence[JobView]) -> list[Decision]:
        lanes = self._fleet.lanes_of(slot)
        free = [view.rank for view in snapshot.ranks if view.can_take and view.rank in lanes]
        decisions = []
        for job, lane in zip(jobs, free, strict=False):
            self._given[job.job_id] = job
            decisions.append(Decision(job.next_task, Layout.single(lane)))
        return decisions

    def _overtake(
        self, snapshot: Snapshot, handed: Mapping[int, Mapping[str, RunningTask]]
    ) -> list[Decision]:
        num_ranks = {slot: node.num_ranks for slot, node in self._fleet.nodes.items()}
        # Beyond this, all that a node runs have overtaken others.
        full = [slot for slot, jobs in handed.items() if 0 < len(jobs) < (MAX_AHEAD + 2) * num_ranks[slot]]
        first = self._chosen(_of_node(snapshot, num_ranks[full[0]], num_free=1))[:1] if full else []
        if not first:
            return []
        now_s = snapshot.now_s
        patience = {slot: max(self._patience(task, now_s) for task in handed[slot].values()) for slot in full}
        # Some policy might prefer a job that is ahead in one respect at least.
        own = first[0].precedence, first[0].deadline_s, first[0].remaining_s
        fit = [slot for slot in full if any(x < y for x, y in zip(own, patience[slot], strict=True))]
        if not fit:
            return []
        slot = max(fit, key=lambda slot: (-len(handed[slot]) / num_ranks[slot], patience[slot]))
        there = [self._view_of(task, now_s) for task in handed[slot].values()]
        asked = {view.job_id: view for view in (*there, *first)}
        alone = _of_node(
            replace(snapshot, open=asked, orders=None), num_ranks[slot], num_free=num_ranks[slot]
        )
        if first[0] not in self._chosen(alone):
            return []
        self.wants_turn = True
        return self._on_lanes(snapshot, slot, first)

    def _view_of(self, running: RunningTask, now_s: float) -> JobView:
        _, _, left_s = self._patience(running, now_s)
        return replace(self._given[running.task.job_id], remaining_s=left_s, last_layout=Layout.single(0))

    def _patience(self, running: RunningTask, now_s: float) -> tuple[int, float, float]:
        """Precedence, deadline, time left. The largest lets others overtake it first, whatever the policy."""
        given = self._given[running.task.job_id]
        left_s = min(given.remaining_s, max(0.0, running.predicted_end_s - now_s))
        return given.precedence, given.deadline_s, left_s


def _of_node(snapshot: Snapshot, num_ranks: int, *, num_free: int) -> Snapshot:
    """The same jobs, and the ranks of one node with nothing on those that are free."""
    now_s, models = snapshot.now_s, snapshot.ranks[0].models if snapshot.ranks else frozenset[str]()
    # A rank that is not free has no predicted end: its jobs share the node with others.
    ranks = tuple(RankView(rank, now_s, rank < num_free, models) for rank in range(num_ranks))
    return replace(
        snapshot,
        busy={},
        running=(),
        ranks=ranks,
        max_degree=min(num_ranks, MAX_RANKS),
    )
