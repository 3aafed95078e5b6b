"""The nodes that live, by slot. The lanes of a slot are the ranks of the driver's state.

A job that was handed to a node has one of its lanes until it ends. A node has more lanes than ranks, for jobs
that were handed out ahead of need and for urgent ones, so a lane is no particular rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gfgen.cluster.node import Node

LANES_PER_RANK = 4
"""One for a job that runs, MAX_AHEAD for jobs ahead of need, one for an urgent one (handout.py)."""


@dataclass(slots=True)
class Fleet:
    """`num_lanes` is the number per slot."""

    num_slots: int
    num_lanes: int
    nodes: dict[int, Node] = field(default_factory=dict)
    """Living nodes by slot."""

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
