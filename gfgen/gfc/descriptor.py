"""The descriptor of a group: all that ranks need to work together, in 56 bytes.

It travels with the dispatch. Each rank computes subgroups from it alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Literal

from gfgen.errors import LayoutError
from gfgen.gfc import native
from gfgen.layout import Degrees, Layout, with_torus

GroupKind = Literal["whole", "cfg", "ulysses", "ring", "cfg_pair", "torus"]
"""whole: all ranks. cfg: the half with the same guidance branch. ulysses, ring, torus: the ranks of one
such group. cfg_pair: the ranks at the same position of each half, who combine the branches."""

GROUP_KINDS: dict[GroupKind, int] = {
    "whole": native.WHOLE,
    "cfg": native.HALF,
    "ulysses": native.ULYSSES,
    "ring": native.RING,
    "cfg_pair": native.PAIR,
    "torus": native.TORUS,
}

_STRUCTS = tuple(
    struct.Struct(f"<Q{n}I{4 * (native.MAX_RANKS - n)}x{n}B{native.MAX_RANKS - n}x6B2x")
    for n in range(native.MAX_RANKS + 1)
)
"""By number of ranks; unused entries are zero."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A dispatch's number and layout, and the incarnations of its ranks by slot."""

    dispatch: int
    layout: Layout
    incarnations: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dispatch < 1:
            raise LayoutError(f"dispatch numbers start at 1, got {self.dispatch}")
        if len(self.incarnations) != len(self.layout.ranks):
            raise LayoutError(f"{self.layout} needs an incarnation per rank, got {self.incarnations}")
        if max(self.layout.ranks) >= native.MAX_RANKS:
            raise LayoutError(f"ranks end at {native.MAX_RANKS - 1}, got {self.layout}")

    def encode(self, rank: int) -> bytes:
        """The native descriptor as one rank of the layout sees it."""
        encoded = bytearray(_STRUCTS[0].size)
        self.encode_into(encoded, self.layout.slot_of(rank))
        return bytes(encoded)

    def encode_into(self, buffer: bytearray | native.DescriptorStruct, slot: int) -> None:
        """`encode` for the rank in a slot, into memory that a launch reads."""
        layout = self.layout
        ranks = layout.ranks
        num_ranks = len(ranks)
        _STRUCTS[num_ranks].pack_into(
            buffer,
            0,
            self.dispatch,
            *self.incarnations,
            *ranks,
            num_ranks,
            slot,
            layout.cfg,
            layout.ulysses,
            layout.ring,
            layout.torus,
        )


@cache
def subgroup_slots(degrees: Degrees, kind: GroupKind, slot: int) -> tuple[int, ...]:
    """Slots of the group of this kind that a slot belongs to, in order (csrc/gfc/descriptor.h)."""
    cfg, ulysses, ring, torus = with_torus(degrees)
    block = ulysses * ring
    half = block * torus
    start, in_block = slot - slot % half, slot % block
    if kind == "whole":
        return tuple(range(cfg * half))
    if kind == "cfg":
        return tuple(range(start, start + half))
    if kind == "ulysses":
        first = slot - slot % ulysses
        return tuple(range(first, first + ulysses))
    if kind == "ring":
        first = slot - in_block
        return tuple(range(first + slot % ulysses, first + block, ulysses))
    if kind == "torus":
        return tuple(range(start + in_block, start + half, block))
    return tuple(range(slot % half, cfg * half, half))
