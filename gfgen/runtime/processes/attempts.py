"""The record of each dispatch, from its messages to its ranks until it becomes an event.

It becomes one event, however many ranks it has: when all of them have reported, or when it has been given up
(recovery.py). Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import RankTimes


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a dispatch failed: it raised, or its worker died (`lost`); None stands for `void`."""

    reason: str
    lost: bool = False


@dataclass(slots=True, eq=False)
class Attempt:
    """One dispatch."""

    dispatch: Dispatch
    deadline_s: float
    """When it counts as overdue; if it is given up, when a rank that has not left it does."""
    reports: dict[int, RankTimes] = field(default_factory=dict)
    """By rank that has done its part of the task."""
    is_given_up: bool = False
    cause: Cause | None = None
    """Why it is given up; None if that is no fault of its own."""
    is_overdue: bool = False
    """It did not end in time. A rank hangs, or all wait for something that never comes."""
    is_unwanted: bool = False
    """It is given up because nobody wants its result."""

    @property
    def unreported(self) -> list[int]:
        """The ranks that have not done their part."""
        return [rank for rank in self.dispatch.layout.ranks if rank not in self.reports]

    @property
    def times(self) -> tuple[RankTimes, ...]:
        """The reports by slot."""
        return tuple([self.reports[rank] for rank in self.dispatch.layout.ranks])


class Attempts(dict[int, Attempt]):
    """The dispatches that have not become an event, by number."""

    @property
    def dispatches(self) -> dict[int, Dispatch]:
        return {number: attempt.dispatch for number, attempt in self.items()}

    @property
    def leaving(self) -> dict[int, Attempt]:
        """The dispatches that ranks are leaving, in order."""
        return {number: attempt for number, attempt in self.items() if attempt.is_given_up}

    def begin(self, dispatch: Dispatch, *, deadline_s: float) -> None:
        """A dispatch is sent to its ranks."""
        self[dispatch.number] = Attempt(dispatch, deadline_s)

    def report(self, number: int, times: RankTimes) -> bool:
        """A rank has done its part. Returns whether that counts: a second report does not, nor one of an
        earlier run or of a dispatch that is given up."""
        attempt = self.get(number)
        if attempt is None or attempt.is_given_up or times.rank not in attempt.unreported:
            return False
        attempt.reports[times.rank] = times
        return True

    def take_done(self, number: int) -> Iterator[Attempt]:
        """The dispatch if it is done, then those that waited for that: causes come before effects.

        A task can overtake its producer, whose output is there before all of its ranks have reported. If one
        of them fails, both are given up.
        """
        attempt = self.get(number)
        if attempt is None or attempt.is_given_up or attempt.unreported:
            return
        if attempt.dispatch.producer in self:
            return
        yield self.pop(number)
        for other in list(self.values()):
            if other.dispatch.producer == number:
                yield from self.take_done(other.dispatch.number)

    def lose(self, rank: int, cause: Cause | None, *, storing: Collection[int]) -> dict[int, Cause | None]:
        """The dispatches that needed a dead rank, and why each fails.

        The rank ran the first one that it has not reported. That one fails for the cause, and so do those
        whose frames it was `storing`.
        """
        causes: dict[int, Cause | None] = {}
        is_running = False
        for number, attempt in self.items():
            if rank in attempt.unreported:
                causes[number] = None if is_running else cause
                is_running = True
            elif number in storing:
                causes[number] = cause
            elif any(transfer.source == rank for transfer in attempt.dispatch.transfers):
                causes[number] = None
        return causes
