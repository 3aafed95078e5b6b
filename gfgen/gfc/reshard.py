"""Shapes of an exchange: from a shard of one dimension to a shard of another.

Pure arithmetic, cached by its arguments: a model repeats the same few exchanges, and computing one shape
takes longer than the exchange of a small tensor.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from gfgen.errors import LayoutError
from gfgen.gfc import native
from gfgen.layout import shard_bounds

Sizes = Sequence[int]

POINTERS = struct.Struct("<QQ")
_PART = struct.Struct(f"<iiii{3 * native.MAX_DIMS}q{2 * native.MAX_RANKS}q")
assert native.MAX_DIMS == native.MAX_RANKS  # _padded serves both
assert POINTERS.size + _PART.size == ctypes.sizeof(native.PartStruct)


class Resharding(NamedTuple):
    """What an exchange does with a tensor: from a shard of `concat_dim` to a shard of `split_dim`.

    Sizes are by slot. split_dim -1: every rank gets the whole input.
    is_rotated: a result begins with the own part, then come those of the next slots in turn.
    """

    split_dim: int
    concat_dim: int
    split_sizes: tuple[int, ...]
    concat_sizes: tuple[int, ...]
    is_rotated: bool = False

    def result_shape(self, shape: Sequence[int], slot: int) -> tuple[int, ...]:
        """The shape that a slot receives when it gives a tensor of this shape.

        Raises: LayoutError when the sizes do not match the shape.
        """
        split_dim, concat_dim, split, concat, _ = self
        num_slots = len(concat)
        if not 0 <= slot < num_slots or shape[concat_dim] != concat[slot]:
            raise LayoutError(
                f"slot {slot} gives {shape[concat_dim]} along dimension {concat_dim} of {tuple(shape)}, but "
                f"the sizes by slot are {concat}"
            )
        result = list(shape)
        if split_dim >= 0:
            if len(split) != num_slots or shape[split_dim] != sum(split):
                raise LayoutError(
                    f"dimension {split_dim} of {tuple(shape)} is not the sum of {split} for {num_slots} slots"
                )
            result[split_dim] = split[slot]
        result[concat_dim] = sum(concat)
        return tuple(result)


class NativePart(NamedTuple):
    """One tensor of an exchange on CPUs; `content` is a native.PartStruct without its two pointers."""

    result_shape: tuple[int, ...]
    content: bytes


@lru_cache(maxsize=1024)
def shard_sizes(length: int, num_shards: int) -> tuple[int, ...]:
    """Lengths of all shards of a dimension; longer ones come first."""
    bounds = (shard_bounds(length, num_shards, idx) for idx in range(num_shards))
    return tuple(stop - start for start, stop in bounds)


@lru_cache(maxsize=1024)
def reshard(
    shape: tuple[int, ...], stride: tuple[int, ...], item_bytes: int, slot: int, resharding: Resharding
) -> NativePart:
    if len(shape) > native.MAX_DIMS:
        raise LayoutError(f"tensors have at most {native.MAX_DIMS} dimensions, got {shape}")
    split_dim, concat_dim, split_sizes, concat_sizes, is_rotated = resharding
    assert not is_rotated
    result = resharding.result_shape(shape, slot)
    part = _PART.pack(
        item_bytes,
        len(shape),
        split_dim,
        concat_dim,
        *_padded(shape),
        *_padded(step * item_bytes for step in stride),
        *_padded(step * item_bytes for step in contiguous_stride(result)),
        *_padded(split_sizes),
        *_padded(concat_sizes),
    )
    return NativePart(result, part)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in items, of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _padded(values: Iterable[int]) -> tuple[int, ...]:
    found = tuple(values)
    return found + (0,) * (native.MAX_DIMS - len(found))
