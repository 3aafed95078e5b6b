"""A task on its ranks: the unit of the global order, and how its input comes to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gfgen.graph import DTYPE_BYTES, Artifact, Task
from gfgen.layout import Layout, shard_bounds
from gfgen.runtime.ipc.messages import Transfer


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Steps of a job that a policy had approximated, and why it began to."""

    steps: tuple[int, ...] = ()
    why: str | None = None


NOTHING_GIVEN_UP = GivenUp()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One attempt at one task on one layout.

    `number` rises by one with every dispatch of the run; a worker refuses a number that does not rise.
    `producer` is the number of the dispatch that makes this task's input (None for the first task), and
    `source` is the layout that holds the input.
    """

    number: int
    task: Task
    layout: Layout
    submitted_s: float
    predicted_start_s: float
    predicted_end_s: float
    producer: int | None = None
    source: Layout | None = None
    transfers: tuple[Transfer, ...] = ()  # moves from `source` to `layout` before the task can start
    switch_s: float = 0.0  # predicted time to merge the job's patches; 0 if the ranks hold them
    sharers: range | None = None  # the dispatches that share its reads of blocks, itself among them
    late_s: float = 0.0  # of a step that a policy has approximated: how late its job would be without

    @property
    def predicted_s(self) -> float:
        return self.predicted_end_s - self.predicted_start_s

    @property
    def num_sharers(self) -> int:
        return 1 if self.sharers is None else len(self.sharers)

    @property
    def moved_bytes(self) -> int:
        return sum(transfer.size_bytes for transfer in self.transfers)

    @property
    def communicates(self) -> bool:
        """Whether its ranks write into each other's memory."""
        return self.layout.degree > 1 or bool(self.transfers)

    @property
    def pairs(self) -> set[frozenset[int]]:
        """Pairs of ranks between which state moves for it."""
        return {frozenset((transfer.source, transfer.destination)) for transfer in self.transfers}

    @property
    def ranks_involved(self) -> set[int]:
        return {*self.layout.ranks, *(transfer.source for transfer in self.transfers)}


def plan_transfers(artifact: Artifact, *, source: Layout, destination: Layout) -> tuple[Transfer, ...]:
    """All transfers, in order of field, destination and range; each missing element comes exactly once.

    Every rank of a layout holds the whole state, so each new rank needs all of it, and the ranks that have
    it share the work: if 0 and 1 hold n rows and 2 needs them, 0 sends rows 0..n/2, and 1 the others.
    """
    transfers = []
    for name, shape, dtype in artifact.fields:
        axis = longest_axis(shape)
        row_bytes = math.prod(shape) // shape[axis] * DTYPE_BYTES[dtype]
        for rank in destination.ranks:
            for idx, owner in enumerate(source.ranks) if rank not in source.ranks else ():
                start, stop = shard_bounds(shape[axis], source.degree, idx)
                if start < stop:
                    size_bytes = (stop - start) * row_bytes
                    transfers.append(Transfer(owner, rank, name, axis, start, stop, size_bytes))
    return tuple(transfers)


def longest_axis(shape: tuple[int, ...]) -> int:
    """The axis along which a field is cut: the first of the longest."""
    return max(range(len(shape)), key=lambda axis: shape[axis])
