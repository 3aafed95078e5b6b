"""Exchanges as kernels take them: tensors as [outer, first, middle, second, inner].

Pure arithmetic over global shapes, without torch. One of `first` and `second` is concatenated, the
other one split; see csrc/gfc/cuda/context.h and boxes.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from gfgen.gfc.cuda.kernels import Move
from gfgen.gfc.native import MAX_RANKS
from gfgen.gfc.reshard import Resharding, Sizes

LINE_BYTES = 128


@dataclass(frozen=True, slots=True)
class TensorMove:
    """One tensor of an exchange: the kernels' `move`, without addresses, and what its launch depends on.

    result_bytes: by slot.
    pair_bytes: the longest message between two ranks.
    unit_bytes: the largest power of two up to 16 that divides every length, stride and offset.
    dense_unit_bytes: the same if the tensor were dense, which is equal on all ranks.
    row_bytes: the length of a piece that is dense in both the input and the result.
    dense_bytes: the length of every message if all are equally long and dense on both sides; else 0.
    """

    move: Move
    result_shape: tuple[int, ...]
    result_bytes: tuple[int, ...]
    pair_bytes: int
    unit_bytes: int
    dense_unit_bytes: int
    row_bytes: int
    dense_bytes: int

    def placed(self, result_offsets: Sequence[int]) -> Move:
        """The move to these offsets in the banks, by slot."""
        for slot, offset in enumerate(result_offsets):
            self.move.result_offset[slot] = offset
        return self.move


def move_of(
    shape: Sequence[int], stride: Sequence[int], item_bytes: int, *, slot: int, resharding: Resharding
) -> TensorMove | None:
    """The exchange of one tensor; None where its strides do not fit the form. Strides are in items.

    Raises: LayoutError when the sizes do not match the shape.
    """
    split_dim, concat_dim, split_sizes, concat_sizes, is_rotated = resharding
    size, is_split = len(concat_sizes), split_dim >= 0
    assert size <= MAX_RANKS
    result_shape = resharding.result_shape(shape, slot)
    low, high = sorted((split_dim, concat_dim)) if is_split else (concat_dim, concat_dim)
    steps = [step * item_bytes for step in stride]
    outer = _joined(shape[:low], steps[:low])
    middle = _joined(shape[low + 1 : high], steps[low + 1 : high])
    inner = _joined(shape[high + 1 :], steps[high + 1 :])
    if outer is None or middle is None or inner is None or (inner[0] > 1 and inner[1] != item_bytes):
        return None
    splits = shares = split_sizes if is_split else (1,) * size
    concats = concat_sizes
    is_concat_first = not is_split or concat_dim == low
    inner_bytes = inner[0] * item_bytes
    first_stride = steps[low]
    second_stride = steps[high] if is_split else inner_bytes
    second_sizes = split_sizes if is_split and is_concat_first else concat_sizes
    dense_unit_bytes = min(16, _low_bit([inner_bytes * _common(second_sizes)]))
    # Fold the common divisor of an innermost dense dimension into the inner part.
    if not is_split and first_stride == inner_bytes:
        inner_bytes, concats = _folded(inner_bytes, concats)
        first_stride = second_stride = inner_bytes
    elif is_split and second_stride == inner_bytes:
        if is_concat_first:
            inner_bytes, splits = _folded(inner_bytes, splits)
        else:
            inner_bytes, concats = _folded(inner_bytes, concats)
        second_stride = inner_bytes
    move = Move(
        inner_bytes=inner_bytes,
        outer_stride=outer[1],
        first_stride=first_stride,
        middle_stride=middle[1],
        second_stride=second_stride,
        outer=outer[0],
        middle=middle[0],
        is_concat_first=int(is_concat_first),
        is_split=int(is_split),
        is_rotated=int(is_rotated),
        split_sizes=splits,
        concat_sizes=concats,
    )
    lengths = [inner_bytes]
    if prod(shape):  # strides of an empty tensor mean nothing
        lengths += [first_stride, second_stride]
        lengths += [outer[1]] if outer[0] > 1 else []
        lengths += [middle[1]] if middle[0] > 1 else []
    second_most = max(splits) if is_concat_first else max(concats)
    fixed = prod(shape[dim] for dim in range(len(shape)) if dim not in (split_dim, concat_dim)) * item_bytes
    return TensorMove(
        move,
        result_shape,
        result_bytes=tuple(fixed * share * sum(concat_sizes) for share in shares),
        pair_bytes=fixed * max(shares) * max(concat_sizes),
        unit_bytes=min(16, _low_bit(lengths)),
        dense_unit_bytes=dense_unit_bytes,
        row_bytes=inner_bytes * (second_most if is_split and second_stride == inner_bytes else 1),
        dense_bytes=_dense_bytes(move, splits, concats),
    )


def _dense_bytes(move: Move, splits: Sizes, concats: Sizes) -> int:
    """The length of each message if one piece of memory is gathered or parted; else 0."""
    if move.is_rotated or move.outer != 1 or move.middle != 1 or set(splits) != {1} or set(concats) != {1}:
        return 0
    is_dense = not move.is_split or (not move.is_concat_first and move.first_stride == move.inner_bytes)
    return int(move.inner_bytes) if is_dense else 0


def offsets_of(moves: Sequence[TensorMove]) -> tuple[list[list[int]], int]:
    """Where each tensor's result lies in the bank of each slot, by tensor, and the longest total."""
    ends = [0] * len(moves[0].result_bytes)
    offsets = []
    for move in moves:
        offsets.append(list(ends))
        for slot, num_bytes in enumerate(move.result_bytes):
            ends[slot] += -(-num_bytes // LINE_BYTES) * LINE_BYTES
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


def _folded(inner_bytes: int, sizes: Sizes) -> tuple[int, tuple[int, ...]]:
    common = _common(sizes)
    return inner_bytes * common, tuple(size // common for size in sizes)


def _common(sizes: Sizes) -> int:
    return gcd(*sizes) or 1


def _low_bit(lengths: Sequence[int]) -> int:
    bits = 16
    for length in lengths:
        bits |= length
    return bits & -bits
