"""What has to be given up when a dispatch fails, and who has to agree to it. Pure.

A rank that is inside a collective, or in the middle of a transfer, may still write into other
ranks' memory. So after a failure no rank that took part starts anything new before all of
them have left, and the counts of the transfers between them start anew:

    Abandon       to every rank concerned: leave these dispatches, do not start those that wait
    Left          from every one of them
    RestartEdges  to every one: count transfers between you from the beginning
    EdgesRestarted  from every one; then the failures become events, and the ranks are free
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gfgen.runtime.dispatch import Dispatch


def given_up(failed: Iterable[int], dispatches: Mapping[int, Dispatch]) -> frozenset[int]:
    """The dispatches that cannot go on when `failed` do not; `dispatches` are the unfinished ones.

    Those are: what consumes their output; what transfers state over an edge on which they
    do; and what comes after them on ranks that exchange data in them.
    """
    lost = {number for number in failed if number in dispatches}
    while True:
        more = {
            number
            for number, dispatch in dispatches.items()
            if number not in lost and any(_drags_along(dispatches[other], dispatch) for other in lost)
        }
        if not more:
            return frozenset(lost)
        lost |= more


def _drags_along(lost: Dispatch, other: Dispatch) -> bool:
    if other.producer == lost.number or other.edges & lost.edges:
        return True
    comes_later = other.number > lost.number
    return comes_later and lost.communicates and bool(lost.ranks_involved & other.ranks_involved)


@dataclass(slots=True)
class Recovery:
    """The failure that is being dealt with. One at a time: another one makes it larger."""

    reasons: dict[int, str | None] = field(default_factory=dict)
    """Why, by dispatch that failed; None where it was given up for no fault of its own."""
    numbers: frozenset[int] = frozenset()
    ranks: frozenset[int] = frozenset()
    waiting_for: set[int] = field(default_factory=set)
    """Ranks that have not answered yet."""
    all_have_left: bool = False

    def extend(self, reasons: Mapping[int, str | None], dispatches: Mapping[int, Dispatch]) -> None:
        """Begin (anew) with these failures too: all ranks concerned are asked to leave."""
        self.reasons |= reasons
        self.numbers |= given_up({*self.reasons, *self.numbers}, dispatches)
        self.ranks |= {rank for number in self.numbers for rank in dispatches[number].ranks_involved}
        self.waiting_for = set(self.ranks)
        self.all_have_left = False

    def answered(self, rank: int) -> bool:
        """Note an answer; true when it was the last one of this round."""
        self.waiting_for.discard(rank)
        return not self.waiting_for
