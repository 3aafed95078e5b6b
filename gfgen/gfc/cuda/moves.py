"""Exchanges as kernels take them: tensors as [outer, first, middle, second, inner].

Pure arithmetic over global shapes, without torch. One of `first` and `second` is concatenated, the
other one split; see csrc/gfc/cuda/context.h and boxes.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from gfgen.errors import LayoutError
from gfgen.gfc.cuda.structs import Move
from gfgen.gfc.native import MAX_RANKS

Sizes = tuple[int, ...]
LINE_BYTES = 128


@dataclass(frozen=True, slots=True)
class Reshaped:
    """One tensor of an exchange; sizes and offsets are by member.

    unit_bytes: the largest power of two up to 16 that divides every length, stride and offset.
    dense_unit_bytes: the same if the tensor were dense, which is equal for all members.
    row_bytes: what is dense in both the input and the result.
    """

    result_shape: tuple[int, ...]
    result_bytes: tuple[int, ...]
    pair_bytes: int
    unit_bytes: int
    dense_unit_bytes: int
    row_bytes: int
    num_members: int
    dense_bytes: int  # of every message, if all are as long and dense on both sides; else 0
    fields: tuple[int, ...]  # of `Move`, from inner_bytes to is_rotated
    split_sizes: Sizes
    concat_sizes: Sizes

    def native(self, result_offsets: Sequence[int]) -> Move:
        move = Move(0, 0, *self.fields)
        for member in range(self.num_members):
            move.split_sizes[member] = self.split_sizes[member]
            move.concat_sizes[member] = self.concat_sizes[member]
            move.result_offset[member] = result_offsets[member]
        return move


def reshaped(
    shape: Sequence[int],
    stride: Sequence[int],
    item_bytes: int,
    *,
    slot: int,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sizes,
    concat_sizes: Sizes,
    is_rotated: bool = False,
) -> Reshaped | None:
    """The exchange of one tensor; None where its strides do not fit the form.

    Strides are in items. split_dim -1: every member gets all. is_rotated: each member's own part
    comes first, then those of the next ones in turn.
    Raises: LayoutError when the sizes are not those of the shape.
    """
    size = len(concat_sizes)
    _check(shape, slot, split_dim, concat_dim, split_sizes, concat_sizes)
    low = concat_dim if split_dim < 0 else min(split_dim, concat_dim)
    high = concat_dim if split_dim < 0 else max(split_dim, concat_dim)
    steps = [step * item_bytes for step in stride]
    outer = _joined(shape[:low], steps[:low])
    middle = _joined(shape[low + 1 : high], steps[low + 1 : high])
    inner = _joined(shape[high + 1 :], steps[high + 1 :])
    if outer is None or middle is None or inner is None or (inner[0] > 1 and inner[1] != item_bytes):
        return None
    splits = split_sizes if split_dim >= 0 else (1,) * size
    is_concat_first = split_dim < 0 or concat_dim == low
    inner_bytes = inner[0] * item_bytes
    first_stride = steps[low]
    second_stride = steps[high] if split_dim >= 0 else inner_bytes
    concats = concat_sizes
    second_sizes = split_sizes if split_dim >= 0 and is_concat_first else concat_sizes
    # Fold the common divisor of an innermost dense dimension into the inner part.
    if split_dim < 0 and first_stride == inner_bytes:
        inner_bytes, concats = _folded(inner_bytes, concats)
        first_stride = second_stride = inner_bytes
    elif split_dim >= 0 and second_stride == inner_bytes:
        if is_concat_first:
            inner_bytes, splits = _folded(inner_bytes, splits)
        else:
            inner_bytes, concats = _folded(inner_bytes, concats)
        second_stride = inner_bytes
    result = list(shape)
    result[concat_dim] = sum(concat_sizes)
    fixed = prod(shape[dim] for dim in range(len(shape)) if dim not in (split_dim, concat_dim)) * item_bytes
    shares = split_sizes if split_dim >= 0 else (1,) * size
    if split_dim >= 0:
        result[split_dim] = split_sizes[slot]
    lengths = [inner_bytes]
    if prod(shape):  # strides of nothing say nothing
        lengths += [first_stride, second_stride]
        lengths += [outer[1]] if outer[0] > 1 else []
        lengths += [middle[1]] if middle[0] > 1 else []
    second_most = max(splits) if is_concat_first else max(concats)
    return Reshaped(
        result_shape=tuple(result),
        result_bytes=tuple(fixed * share * sum(concat_sizes) for share in shares),
        pair_bytes=fixed * max(shares) * max(concat_sizes),
        unit_bytes=min(16, _low_bit(lengths)),
        dense_unit_bytes=min(16, _low_bit([inner[0] * item_bytes * _common(second_sizes)])),
        row_bytes=inner_bytes * (second_most if second_stride == inner_bytes and split_dim >= 0 else 1),
        num_members=size,
        dense_bytes=0
        if is_rotated
        else _dense_bytes(
            outer=outer[0],
            middle=middle[0],
            inner_bytes=inner_bytes,
            strides=(first_stride, second_stride),
            is_split=split_dim >= 0,
            is_concat_first=is_concat_first,
            splits=splits,
            concats=concats,
        ),
        fields=(
            inner_bytes,
            outer[1],
            first_stride,
            middle[1],
            second_stride,
            outer[0],
            middle[0],
            int(is_concat_first),
            int(split_dim >= 0),
            int(is_rotated),
            0,
        ),
        split_sizes=splits,
        concat_sizes=concats,
    )


def _dense_bytes(
    *,
    outer: int,
    middle: int,
    inner_bytes: int,
    strides: tuple[int, int],
    is_split: bool,
    is_concat_first: bool,
    splits: Sizes,
    concats: Sizes,
) -> int:
    """Of gathers along the first dimension, and of equal parts of it to everyone."""
    if outer != 1 or middle != 1 or set(splits) != {1} or set(concats) != {1}:
        return 0
    if not is_split:
        return inner_bytes
    return inner_bytes if not is_concat_first and strides[0] == inner_bytes else 0


def offsets_of(parts: Sequence[Reshaped]) -> tuple[list[list[int]], int]:
    """Where each tensor's result lies in each member's bank, by tensor, and the longest total."""
    size = parts[0].num_members
    ends = [0] * size
    offsets = []
    for part in parts:
        offsets.append(list(ends))
        for member in range(size):
            ends[member] += -(-part.result_bytes[member] // LINE_BYTES) * LINE_BYTES
    return offsets, max(ends)


def _joined(extents: Sequence[int], steps: Sequence[int]) -> tuple[int, int] | None:
    """Neighbouring dimensions as one: (extent, stride of the innermost); None if they are not."""
    extent, stride = 1, 0
    for count, step in zip(reversed(extents), reversed(steps), strict=True):
        if count == 1:
            continue
        if extent == 1:
            stride = step
        elif step != stride * extent:
            return None
        extent *= count
    return extent, stride


def _folded(inner_bytes: int, sizes: Sizes) -> tuple[int, Sizes]:
    common = _common(sizes)
    return inner_bytes * common, tuple(size // common for size in sizes)


def _common(sizes: Sizes) -> int:
    return gcd(*sizes) or 1


def _low_bit(lengths: Sequence[int]) -> int:
    bits = 16
    for length in lengths:
        bits |= length
    return bits & -bits


def _check(
    shape: Sequence[int], slot: int, split_dim: int, concat_dim: int, split: Sizes, concat: Sizes
) -> None:
    size = len(concat)
    assert size <= MAX_RANKS
    if shape[concat_dim] != concat[slot]:
        raise LayoutError(
            f"slot {slot} gives {shape[concat_dim]} along dimension {concat_dim} of {tuple(shape)}, but "
            f"the sizes by slot are {concat}"
        )
    if split_dim >= 0 and (len(split) != size or shape[split_dim] != sum(split)):
        raise LayoutError(
            f"dimension {split_dim} of {tuple(shape)} is not the sum of {split} for {size} slots"
        )
