"""What has to be given up when a dispatch fails, and who has to agree to it. Pure.

A rank that is inside a collective, or in the middle of a transfer, may still write into other
ranks' memory. So after a failure no rank that took part starts anything new before all of
them have left, and the counts of the transfers between them start anew:

    Abandon         to every rank concerned: leave these dispatches, do not start those that wait
    Abandoned            from every one of them that lives
    RestartEdges    to every one: count transfers with these ranks from the beginning
    EdgesRestarted  from every one; then the failures become events, and the ranks are free

A rank that died is reaped before any of this, so it writes nowhere any more; its successor is
made known to the others after they have left, when it is ready, and takes tasks when all of
them have answered that they know it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gfgen.runtime.core.dispatch import Dispatch


def given_up(failed: Iterable[int], dispatches: Mapping[int, Dispatch]) -> frozenset[int]:
    """The dispatches that cannot go on when `failed` do not; `dispatches` are the unfinished ones.

    Those are: what consumes their output; what transfers state between two ranks between which
    they do; and what comes after them on ranks that exchange data in them.
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
    if other.producer == lost.number or other.pairs & lost.pairs:
        return True
    comes_later = other.number > lost.number
    return comes_later and lost.communicates and bool(lost.ranks_involved & other.ranks_involved)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a dispatch failed: it raised, or its worker died (`lost`); None stands for `void`."""

    reason: str
    lost: bool = False


@dataclass(slots=True)
class Recovery:
    """The failure that is being dealt with. One at a time: another one makes it larger."""

    causes: dict[int, Cause | None] = field(default_factory=dict)
    """By dispatch that failed; None where it was given up for no fault of its own."""
    numbers: frozenset[int] = frozenset()
    ranks: frozenset[int] = frozenset()
    overdue: set[int] = field(default_factory=set)
    """Dispatches that did not end in time. Somebody hangs; or all wait for what never comes."""
    dead: set[int] = field(default_factory=set)
    """Ranks that died since it began; their successors know nothing of it."""
    waiting_for: set[int] = field(default_factory=set)
    """Ranks that have not answered yet."""
    deadline_s: float = math.inf
    """When a rank that has not answered is taken for hung."""
    all_have_left: bool = False

    def extend(self, causes: Mapping[int, Cause | None], dispatches: Mapping[int, Dispatch]) -> None:
        """Begin (anew) with these failures too: all ranks concerned are asked to leave."""
        for number, cause in causes.items():
            self.causes[number] = self.causes.get(number) or cause
        self.numbers |= given_up({*self.causes, *self.numbers}, dispatches)
        self.ranks |= {rank for number in self.numbers for rank in dispatches[number].ranks_involved}
        self.all_have_left = False
        self.ask()

    def peers_of(self, rank: int, dispatches: Mapping[int, Dispatch]) -> frozenset[int]:
        """The living ranks with which it has to count anew: those with which it exchanged lost state.

        Not all of `ranks`: between others of them a transfer may be under way that goes on.
        """
        pairs = [pair for number in self.numbers for pair in dispatches[number].pairs if rank in pair]
        return frozenset().union(*pairs) - self.dead - {rank}

    def blame(self) -> None:
        """All have left, nobody hangs: then the first overdue task is at fault, lest it be tried for ever."""
        if self.overdue and not self.dead:
            first = min(self.overdue)
            self.causes[first] = self.causes.get(first) or Cause("it did not end in time and was given up")

    def ask(self) -> None:
        """Wait for an answer from every rank concerned that lives."""
        self.waiting_for = set(self.ranks - self.dead)
