"""What the driver knows of nodes: what it asks of one, and what the cluster reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobOutcome
from gfgen.snapshot import JobView


class Node(Protocol):
    """A machine with ranks, which runs the jobs that it was given by the policy of the run.

    A node that comes back after it was lost is another node, with another name.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_ranks(self) -> int: ...

    def start(self, job: AdmittedJob, *, attempt: int) -> None:
        """Hand over a job; returns at once. One `JobEnded` with this number follows, or a `NodeLost`."""
        ...

    def cancel(self, attempt: int) -> None:
        """Stop a job, unless it has ended; its `JobEnded` follows in any case."""
        ...


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
        ...

    def drop(self) -> None:
        """Nobody wants them."""
        ...


@dataclass(frozen=True, slots=True)
class JobEnded:
    """How an attempt at a job ended on its node."""

    node: str
    attempt: int
    outcome: JobOutcome
    delivery: Delivery | None = None
    """None if there are no files."""


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
    @property
    def num_ranks(self) -> int:
        """Of the nodes that live."""
        ...

    def wait(self, until_s: float | None) -> Sequence[Report]:
        """Reports in their order; returns without any when the clock reaches `until_s`, or before."""
        ...
