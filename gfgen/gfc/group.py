"""Groups of ranks and their collectives.

Collectives only move bytes, so they take any dtype.

Legend: B batch, S tokens of the whole sequence, L tokens of this rank, H heads, h heads of this
rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gfgen.errors import LayoutError
from gfgen.gfc.descriptor import GroupKind
from gfgen.gfc.reshard import Resharding, Sizes


class Collectives:
    """A group of ranks as one of them sees it: what models use of it.

    All ranks of a group make the same calls in the same order. Sizes of shards are by slot and follow from
    global shapes; they are never exchanged. Results are fresh memory. Only those asked for `in_arena` may
    lie in an arena, and are lost with the exchange of the same kind after the next one. Other ranks may
    begin that one as soon as this rank has begun the next one.
    """

    __slots__ = ("size",)

    size: int
    slot: int
    """Position of this rank in the group."""
    room_bytes: int | None = None
    """The largest results of one exchange; larger ones arrive in slow rounds. None: of any size."""

    is_far: bool = False
    """Whether it exchanges through main memory, by other launches."""

    def beside(self, max_blocks: int) -> Collectives:
        """The same ranks. Their exchanges use at most this many of a GPU's multiprocessors."""
        return self

    def enter(self) -> None:
        """The entry barrier of a dispatch: once, on the whole layout, before anything else."""
        raise NotImplementedError

    def subgroup(self, kind: GroupKind) -> Collectives:
        """The group of this kind, of a whole layout, that this rank belongs to."""
        raise NotImplementedError

    def all_gather(
        self, x: Tensor, *, dim: int = 0, sizes: Sizes | None = None, in_arena: bool = False
    ) -> Tensor:
        """Every rank's `x`, by slot, joined along `dim`; `sizes` where they differ."""
        dim %= x.dim()
        concat_sizes = tuple(sizes or (x.shape[dim],) * self.size)
        return self._move((x,), Resharding(-1, dim, (), concat_sizes), in_arena=in_arena)[0]

    def heads_from_tokens(
        self, *tensors: Tensor, token_sizes: Sizes, head_sizes: Sizes, in_arena: bool = False
    ) -> tuple[Tensor, ...]:
        """Each [B, L, H, D] with any strides -> [B, S, h, D] contiguous, in one exchange.

        Raises: LayoutError when a rank would have no head.
        """
        if min(head_sizes) < 1:
            raise LayoutError(f"{tensors[0].shape[2]} heads cannot be split over {self.size} ranks")
        resharding = Resharding(2, 1, tuple(head_sizes), tuple(token_sizes))
        return self._move(tensors, resharding, in_arena=in_arena)

    def gather_tokens(
        self, *tensors: Tensor, token_sizes: Sizes, in_arena: bool = False
    ) -> tuple[Tensor, ...]:
        """Each [B, L, H, D] with any strides -> [B, S, H, D] contiguous, in one exchange.

        The own tokens come first, then those of the next slots in turn: places that do not depend on the
        slot, so a captured graph serves all slots.
        """
        resharding = Resharding(-1, 1, (), tuple(token_sizes), is_rotated=True)
        return self._move(tensors, resharding, in_arena=in_arena)

    def tokens_from_heads(
        self, x: Tensor, *, token_sizes: Sizes, head_sizes: Sizes, in_arena: bool = False
    ) -> Tensor:
        """[B, S, h, D] with any strides -> [B, L, H, D] contiguous."""
        return self._move((x,), Resharding(1, 2, tuple(token_sizes), tuple(head_sizes)), in_arena=in_arena)[0]

    def _move(
        self, tensors: Sequence[Tensor], resharding: Resharding | None, *, in_arena: bool
    ) -> tuple[Tensor, ...]:
        """One exchange of all tensors; without a resharding, a barrier."""
        raise NotImplementedError
