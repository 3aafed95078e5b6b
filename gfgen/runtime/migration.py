"""Which ranges of a job's state go from which rank to which, when its next task runs elsewhere.

A codec says which shard of each field a rank holds under a layout. The planner intersects
what the sources own with what the destinations need. It is a pure function of metadata that
the control plane has anyway, so no rank is asked anything.

    field        source [0,1]           destination [2,0]
    latents      both hold all of it    2 needs all: rows 0..n/2 from 0, rows n/2..n from 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from gfgen.graph import DTYPE_BYTES, Artifact
from gfgen.layout import Layout, shard_bounds


class Codec(StrEnum):
    """How an artifact lies on the ranks of a layout."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    SHARDED = "sharded"
    """Each sequence shard holds a range along a field's longest axis; CFG halves hold the same."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One range of one field, from one rank to another: elements start to stop along an axis."""

    source: int
    destination: int
    field: str
    axis: int
    start: int
    stop: int
    size_bytes: int


def plan_transfers(
    artifact: Artifact,
    *,
    source: Layout,
    destination: Layout,
    source_codec: Codec = Codec.REPLICATED,
    destination_codec: Codec = Codec.REPLICATED,
) -> tuple[Transfer, ...]:
    """Everything that has to move, each element to each rank that lacks it exactly once.

    Where several sources own the same range they share the work. A rank that holds part of
    what it needs already is sent the rest alone. In order of field, destination and range.
    """
    return tuple(
        Transfer(owner, rank, name, axis, start, stop, (stop - start) * row_bytes)
        for name, shape, dtype in artifact.fields
        for axis, row_bytes in (_axis_of(shape, dtype),)
        for rank in destination.ranks
        for start, stop in _lacking(
            shard_range(shape[axis], destination, rank, destination_codec),
            shard_range(shape[axis], source, rank, source_codec) if rank in source.ranks else (0, 0),
        )
        for owner, start, stop in _owners(source, source_codec, length=shape[axis], start=start, stop=stop)
    )


def shard_range(length: int, layout: Layout, rank: int, codec: Codec) -> tuple[int, int]:
    """The range of a field's longest axis that a rank of the layout holds."""
    if codec is Codec.REPLICATED:
        return 0, length
    shard_idx = layout.slot_of(rank) % layout.sequence_degree
    return shard_bounds(length, layout.sequence_degree, shard_idx)


def longest_axis(shape: tuple[int, ...]) -> int:
    """The axis along which a field is cut; the first of the longest ones."""
    return max(range(len(shape)), key=lambda axis: shape[axis])


def _axis_of(shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    axis = longest_axis(shape)
    return axis, math.prod(shape) // shape[axis] * DTYPE_BYTES[dtype]


def _lacking(needed: tuple[int, int], held: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """What is in `needed` and not in `held`: up to two ranges."""
    before = (needed[0], min(needed[1], held[0]))
    after = (max(needed[0], held[1]), needed[1])
    if held[0] >= held[1]:
        before, after = needed, (0, 0)
    for start, stop in (before, after):
        if start < stop:
            yield start, stop


def _owners(
    source: Layout, codec: Codec, *, length: int, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """(rank, start, stop) of the pieces that cover a range, spread over those who own it."""
    cuts = {start, stop}
    owned = [(rank, *shard_range(length, source, rank, codec)) for rank in source.ranks]
    cuts |= {bound for _, *bounds in owned for bound in bounds if start < bound < stop}
    edges = sorted(cuts)
    for left, right in pairwise(edges):
        ranks = [rank for rank, low, high in owned if low <= left and right <= high]
        for idx, rank in enumerate(ranks):
            low, high = shard_bounds(right - left, len(ranks), idx)
            if low < high:
                yield rank, left + low, left + high
