"""Shared forwards on one rank alone, for warming up.

What a shared forward needs before it runs without delay (kernels compiled and loaded) depends on shapes
alone. So a rank can prepare without the others: exchanges return zeros in the shapes that the others would
have sent. The results are meaningless.

Legend: B batch, S tokens of the whole sequence, L tokens of this rank, H heads, h heads of this
rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gfgen.gfc.group import Collectives
from gfgen.models.parallel.parallel import Parallel


@dataclass(frozen=True, slots=True)
class RehearsalGroup:
    """A group as one rank sees it whose other ranks take no part; see `group.Collectives`."""

    size: int
    slot: int
    room_bytes: int | None

    def beside(self, max_blocks: int) -> RehearsalGroup:
        return self

    def all_gather(self, x: Tensor, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        return _zeros(x, {dim: sum(sizes) if sizes else x.shape[dim] * self.size})

    def heads_from_tokens(
        self,
        *tensors: Tensor,
        token_sizes: Sequence[int],
        head_sizes: Sequence[int],
        in_arena: bool = False,
    ) -> tuple[Tensor, ...]:
        return tuple(_zeros(x, {1: sum(token_sizes), 2: head_sizes[self.slot]}) for x in tensors)

    def gather_tokens(
        self, *tensors: Tensor, token_sizes: Sequence[int], in_arena: bool = False
    ) -> tuple[Tensor, ...]:
        return tuple(_zeros(x, {1: sum(token_sizes)}) for x in tensors)

    def tokens_from_heads(
        self, x: Tensor, *, token_sizes: Sequence[int], head_sizes: Sequence[int]
    ) -> Tensor:
        return _zeros(x, {1: token_sizes[self.slot], 2: sum(head_sizes)})


def rehearsal(parallel: Parallel) -> Parallel:
    """The same step, for this rank alone."""

    def alone(ranks: Collectives) -> RehearsalGroup:
        return RehearsalGroup(ranks.size, ranks.slot, ranks.room_bytes)

    return replace(
        parallel,
        cfg=alone(parallel.cfg),
        sequence=alone(parallel.sequence),
        ulysses=alone(parallel.ulysses),
        ring=alone(parallel.ring),
    )


def _zeros(x: Tensor, lengths: dict[int, int]) -> Tensor:
    """Like x, but for these dimensions."""
    shape = list(x.shape)
    for dim, length in lengths.items():
        shape[dim] = length
    return x.new_zeros(shape)
