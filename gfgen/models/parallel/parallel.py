"""The ranks that share one denoising step, as an adapter sees them.

The worker makes a `Parallel` from the dispatch's group. It is all that adapters and hooks know of layouts,
processes and arenas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gfgen.gfc.group import Collectives, LayoutGroup


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the ranks of a layout share a denoising step.

    cfg: one rank of each guidance branch, in the order of the branches; they exchange noise predictions.
    sequence: the ranks that share the tokens of one branch, by slot. Each of them is in one group
    `ulysses`, whose ranks have consecutive slots and share heads, and in one `ring`, whose ranks have the
    same heads and share keys.
    num_chunks: chunks of heads, for which exchange and attention overlap; None: the fastest number.
    """

    cfg: Collectives
    sequence: Collectives
    ulysses: Collectives
    ring: Collectives
    num_chunks: int | None = None

    @property
    def degrees(self) -> tuple[int, int, int]:
        """(cfg, ulysses, ring), as `Layout.degrees`."""
        return self.cfg.size, self.ulysses.size, self.ring.size


def parallel_from(group: LayoutGroup, *, num_chunks: int | None = None) -> Parallel:
    """The step's ranks, from the group of a whole layout. Involves no other rank."""
    return Parallel(
        cfg=group.subgroup("cfg_pair"),
        sequence=group.subgroup("cfg"),
        ulysses=group.subgroup("ulysses"),
        ring=group.subgroup("ring"),
        num_chunks=num_chunks,
    )
