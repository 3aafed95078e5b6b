"""Plan which ranges of a job's state move between which ranks before its next task runs elsewhere.

Every rank of a layout holds the whole state, so each new rank needs all of it, and the ranks that have it
share the work. The planner is a pure function of metadata that the control plane has.

    field        source [0,1]           destination [2,0]
    latents      both hold all of it    2 needs all: rows 0..n/2 from 0, rows n/2..n from 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gfgen.graph import DTYPE_BYTES, Artifact
from gfgen.layout import Layout, shard_bounds


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements `start` to `stop` of a field along an axis, from one rank to another."""

    source: int
    destination: int
    field: str
    axis: int
    start: int
    stop: int
    size_bytes: int


def plan_transfers(artifact: Artifact, *, source: Layout, destination: Layout) -> tuple[Transfer, ...]:
    """All transfers, in order of field, destination and range; each missing element comes exactly once."""
    lacking = [rank for rank in destination.ranks if rank not in source.ranks]
    return tuple(
        Transfer(owner, rank, name, axis, start, stop, (stop - start) * row_bytes)
        for name, shape, dtype in artifact.fields
        for axis, row_bytes in (_axis_of(shape, dtype),)
        for rank in lacking
        for owner, start, stop in _pieces(source, shape[axis])
    )


def longest_axis(shape: tuple[int, ...]) -> int:
    """The axis along which a field is cut: the first of the longest."""
    return max(range(len(shape)), key=lambda axis: shape[axis])


def _axis_of(shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    axis = longest_axis(shape)
    return axis, math.prod(shape) // shape[axis] * DTYPE_BYTES[dtype]


def _pieces(source: Layout, length: int) -> Iterator[tuple[int, int, int]]:
    for idx, rank in enumerate(source.ranks):
        start, stop = shard_bounds(length, source.degree, idx)
        if start < stop:
            yield rank, start, stop
