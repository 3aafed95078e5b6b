"""The ranks that share one denoising step, as an adapter sees them.

The worker makes a `Parallel` from the dispatch's group; adapters and hooks know nothing else of
layouts, processes or arenas.

Legend: B batch, S tokens of the whole sequence, L tokens of this rank, H heads, h heads of this
rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from gfgen.gfc.group import Collectives


class Ranks(Protocol):
    """A group of ranks as one of them sees it; `gfc.group.Group` is one.

    All ranks of a group make the same calls in the same order. Sizes of shards are by slot and
    follow from global shapes; they are never exchanged. Results are fresh memory, but for those
    asked for `in_arena`: where exchanges go through an arena, they may lie there, and are lost with the
    exchange of the same kind after the next, which others may begin as soon as this rank has begun the next.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def slot(self) -> int:
        """Position of the own rank."""
        ...

    @property
    def room_bytes(self) -> int | None:
        """The largest results that one exchange brings at once; None: of any size."""
        ...

    def beside(self, max_blocks: int) -> Ranks:
        """The same ranks, whose exchanges take so many of a GPU's multiprocessors and leave the others."""
        ...

    def all_gather(self, x: Tensor, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """Every rank's `x`, by slot, behind each other along `dim`; `sizes` where they differ."""
        ...

    def heads_from_tokens(
        self,
        *tensors: Tensor,
        token_sizes: Sequence[int],
        head_sizes: Sequence[int],
        in_arena: bool = False,
    ) -> tuple[Tensor, ...]:
        """Each [B, L, H, D] with any strides -> [B, S, h, D] contiguous, in one exchange."""
        ...

    def gather_tokens(
        self, *tensors: Tensor, token_sizes: Sequence[int], in_arena: bool = False
    ) -> tuple[Tensor, ...]:
        """Each [B, L, H, D] with any strides -> [B, S, H, D] contiguous, in one exchange.

        The own tokens come first, then those of the next ranks in turn.
        """
        ...

    def tokens_from_heads(
        self, x: Tensor, *, token_sizes: Sequence[int], head_sizes: Sequence[int]
    ) -> Tensor:
        """[B, S, h, D] with any strides -> [B, L, H, D] contiguous."""
        ...


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the ranks of a layout share a denoising step.

    cfg: one rank of each guidance branch, in the order of the branches: who exchange noise
    predictions. sequence: all who share the tokens of one branch, by slot; each of them is in one
    group `ulysses`, whose ranks follow each other and share heads, and in one `ring`, whose ranks
    have the same heads and share keys.
    num_chunks: of heads, in which exchange and attention overlap; None: as many as pay.
    """

    cfg: Ranks
    sequence: Ranks
    ulysses: Ranks
    ring: Ranks
    num_chunks: int | None = None

    @property
    def degrees(self) -> tuple[int, int, int]:
        """(cfg, ulysses, ring), as `Layout.degrees`."""
        return self.cfg.size, self.ulysses.size, self.ring.size


def parallel_from(group: Collectives, *, num_chunks: int | None = None) -> Parallel:
    """The step's ranks, from the group of a whole layout. Touches no other rank."""
    return Parallel(
        cfg=group.subgroup("cfg_pair"),
        sequence=group.subgroup("cfg"),
        ulysses=group.subgroup("ulysses"),
        ring=group.subgroup("ring"),
        num_chunks=num_chunks,
    )
