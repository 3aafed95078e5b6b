"""A Triton kernel that adds the product of two thin matrices to a weight, in one pass over memory.

Nothing is tuned at run time, so every rank adds in the same order and gets the same bits.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:  # so that machine code can be made without torch (models/ahead)
    from torch import Tensor

ROWS, COLUMNS, MAX_RANKS_AT_ONCE = 64, 256, 64


def add_product(source: Tensor, up: Tensor, down: Tensor, scale: float, *, out: Tensor) -> None:
    """out = source + scale * up @ down, computed in fp32 and rounded once.

    Shapes: source, out [M, N], which may be the same; up [M, R]; down [R, N]; all contiguous.
    """
    assert all(each.is_contiguous() for each in (source, up, down, out))
    rows, columns = source.shape
    rank = down.shape[0]
    block = min(MAX_RANKS_AT_ONCE, max(16, triton.next_power_of_2(rank)))
    _add_product[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))](
        source, up, down, out, scale, rows, columns, rank, ROWS=ROWS, COLUMNS=COLUMNS,
        BLOCK=block, IS_ONE=rank <= block, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "rank"])
def _add_product(
    source, up, down, out, scale, rows, columns, rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, IS_ONE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows, blocks of columns. Each program makes one block of `out`.

    IS_ONE: `BLOCK` holds the whole rank. Without a loop nothing is copied ahead, and a processor takes two
    programs.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_inside = (row < rows) & (column < columns)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, BLOCK if IS_ONE else rank, BLOCK):
        across, along = start + tl.arange(0, BLOCK)[None, :], start + tl.arange(0, BLOCK)[:, None]
        up_part = tl.load(up + row * rank + across, mask=(row < rows) & (across < rank), other=0.0)
        down_part = tl.load(
            down + along * columns + column, mask=(along < rank) & (column < columns), other=0.0
        )
        total = tl.dot(up_part, down_part, total, input_precision="ieee")
    place = row * columns + column
    base = tl.load(source + place, mask=is_inside).to(tl.float32)
    tl.store(out + place, (base + scale * total).to(out.dtype.element_ty), mask=is_inside)
