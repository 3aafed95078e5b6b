"""What the driver knows of nodes: what it asks of one, and what the cluster reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import JobOutcome


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


@dataclass(frozen=True, slots=True)
class JobEnded:
    """How an attempt at a job ended on its node. If it is done, its file is in the driver's folder."""

    node: str
    attempt: int
    outcome: JobOutcome


Report = NodeJoined | NodeLost | JobEnded


class Cluster(Protocol):
    """All nodes of a run."""

    def wait(self, until_s: float | None) -> Sequence[Report]:
        """Reports in their order; returns without any when the clock reaches `until_s`, or before."""
        ...

    def close(self) -> None:
        """Let the nodes go."""
        ...
