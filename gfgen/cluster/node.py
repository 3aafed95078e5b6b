"""What the driver knows of nodes: what it asks of one, and what the cluster reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobOutcome
from gfgen.snapshot import JobView


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
"""One for a job that runs, MAX_AHEAD for jobs ahead of need, one for an urgent one (handout.py)."""


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
