"""The descriptor of a group: all that ranks need to work together, in 56 bytes.

It travels with the dispatch. Subgroups follow from it without a word to anyone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Literal

from gfgen.errors import LayoutError
from gfgen.gfc import native
from gfgen.layout import Layout

Kind = Literal["whole", "cfg", "ulysses", "ring", "cfg_pair"]
"""whole: all ranks. cfg: the half with the same guidance branch. ulysses, ring: the ranks of one
such group. cfg_pair: the ranks at the same position of each half, who combine the branches."""

KINDS: dict[Kind, int] = {
    "whole": native.WHOLE,
    "cfg": native.HALF,
    "ulysses": native.ULYSSES,
    "ring": native.RING,
    "cfg_pair": native.PAIR,
}

_STRUCT = struct.Struct("<Q8I8B5B3x")
_PADDING = tuple((0,) * n for n in range(native.MAX_RANKS + 1))


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
        return _STRUCT.pack(*self._fields(rank))

    def encode_into(self, buffer: native.Descriptor, rank: int) -> None:
        """The same, into memory that a launch reads."""
        _STRUCT.pack_into(buffer, 0, *self._fields(rank))

    def _fields(self, rank: int) -> tuple[int, ...]:
        layout = self.layout
        num_ranks = len(layout.ranks)
        padding = _PADDING[native.MAX_RANKS - num_ranks]
        return (
            self.dispatch,
            *self.incarnations,
            *padding,
            *layout.ranks,
            *padding,
            num_ranks,
            layout.slot_of(rank),
            layout.cfg,
            layout.ulysses,
            layout.ring,
        )


@cache
def member_slots(degrees: tuple[int, int, int], kind: Kind, slot: int) -> tuple[int, ...]:
    """Slots of the group of this kind that a slot belongs to, in order (csrc/gfc/descriptor.h)."""
    cfg, ulysses, ring = degrees
    half = ulysses * ring
    start = slot - slot % half
    if kind == "whole":
        return tuple(range(cfg * half))
    if kind == "cfg":
        return tuple(range(start, start + half))
    if kind == "ulysses":
        first = slot - slot % ulysses
        return tuple(range(first, first + ulysses))
    if kind == "ring":
        return tuple(range(start + slot % ulysses, start + half, ulysses))
    return tuple(range(slot % half, cfg * half, half))
