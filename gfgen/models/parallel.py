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

from gfgen.errors import LayoutError

if TYPE_CHECKING:
    from gfgen.gfc.group import Collectives


class Ranks(Protocol):
    """A group of ranks as one of them sees it; `gfc.group.Group` is one.

    All ranks of a group make the same calls in the same order. Sizes of shards are by slot and
    follow from global shapes; they are never exchanged. Results are fresh memory.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def slot(self) -> int:
        """Position of the own rank."""
        ...

    def all_gather(self, x: Tensor, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """Every rank's `x`, by slot, behind each other along `dim`; `sizes` where they differ."""
        ...

    def heads_from_tokens(
        self, *tensors: Tensor, token_sizes: Sequence[int], head_sizes: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Each [B, L, H, D] with any strides -> [B, S, h, D] contiguous, in one exchange."""
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
    predictions. sequence: who share the tokens and heads of one branch.
    """

    cfg: Ranks
    sequence: Ranks

    @property
    def degrees(self) -> tuple[int, int, int]:
        """(cfg, ulysses, ring), as `Layout.degrees`."""
        return self.cfg.size, self.sequence.size, 1


def parallel_from(group: Collectives) -> Parallel:
    """The step's ranks, from the group of a whole layout. Touches no other rank.

    Raises: LayoutError for a ring degree above 1, which is not built yet.
    """
    ring_degree = group.subgroup("ring").size
    if ring_degree > 1:
        raise LayoutError(
            f"ring degree {ring_degree} is not supported yet; use cfg and ulysses degrees instead"
        )
    return Parallel(cfg=group.subgroup("cfg_pair"), sequence=group.subgroup("ulysses"))
