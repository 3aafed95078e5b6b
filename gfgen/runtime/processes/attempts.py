"""The record of each dispatch, from its messages to the ranks until its frames are in the writer's memory.

A dispatch becomes one event, however many ranks it has: when all of them have reported, or when it has been
given up (recovery.py). Pure.
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
    reports: dict[int, RankTimes] = field(default_factory=dict)
    """By rank that has done its part of the task."""
    storing: dict[int, float] = field(default_factory=dict)
    """By rank that copies its frames to the writer's memory: when it began."""
    is_done: bool = False
    """It has become an event, and some of its frames have not come."""
    stopped_s: float | None = None
    """When its ranks were asked to leave it because it is unwanted."""
    inside: set[int] = field(default_factory=set)
    """Ranks that have not left it since then."""

    @property
    def unreported(self) -> list[int]:
        """The ranks that have not done their part."""
        return [rank for rank in self.dispatch.layout.ranks if rank not in self.reports]

    @property
    def times(self) -> tuple[RankTimes, ...]:
        """The reports by slot."""
        return tuple([self.reports[rank] for rank in self.dispatch.layout.ranks])

    def is_sent_by(self, rank: int) -> bool:
        """Whether a rank sends state for it."""
        return any(transfer.source == rank for transfer in self.dispatch.transfers)

    def storing_since(self, before_s: float) -> list[int]:
        """The ranks that have copied frames since before this time."""
        return [rank for rank, since_s in self.storing.items() if since_s < before_s]

    def stop(self, now_s: float) -> None:
        """Its ranks are asked to leave it."""
        self.stopped_s, self.inside = now_s, set(self.dispatch.layout.ranks)

    def forgive(self, paused_s: float) -> None:
        """The control process did not run for this time, in which it could hear nobody."""
        self.storing = {rank: since_s + paused_s for rank, since_s in self.storing.items()}
        if self.stopped_s is not None:
            self.stopped_s += paused_s


class Attempts:
    """The dispatches that have not ended, and decodes whose frames have not all come."""

    def __init__(self) -> None:
        self._by_number: dict[int, Attempt] = {}

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._by_number.values()))

    @property
    def dispatches(self) -> dict[int, Dispatch]:
        """By number: those that have not become an event."""
        return {number: each.dispatch for number, each in self._by_number.items() if not each.is_done}

    def begin(self, dispatch: Dispatch) -> None:
        """A dispatch is sent to its ranks."""
        self._by_number[dispatch.number] = Attempt(dispatch)

    def running(self, number: int | None) -> Attempt | None:
        """A dispatch that has not become an event."""
        attempt = None if number is None else self._by_number.get(number)
        return None if attempt is None or attempt.is_done else attempt

    def drop(self, attempt: Attempt) -> None:
        """Expect nothing more of it."""
        del self._by_number[attempt.dispatch.number]

    def forget(self, job_id: str) -> None:
        """The job has ended, so nobody waits for its frames."""
        for attempt in self:
            if attempt.is_done and attempt.dispatch.task.job_id == job_id:
                self.drop(attempt)

    def leave(self, rank: int, numbers: Collection[int]) -> None:
        """A rank has left these dispatches."""
        for attempt in self:
            if attempt.dispatch.number in numbers:
                attempt.inside.discard(rank)

    def report(self, number: int, times: RankTimes, *, now_s: float, do_frames_follow: bool) -> None:
        """A rank has done its part. A second report, or one of an earlier run, changes nothing."""
        attempt = self.running(number)
        if attempt is None or times.rank not in attempt.unreported:
            return
        attempt.reports[times.rank] = times
        if do_frames_follow:
            attempt.storing[times.rank] = now_s

    def take_done(self, number: int, *, given_up: Collection[int]) -> Iterator[Attempt]:
        """The dispatch if it is done, then those that waited for that: causes come before effects.

        A task can overtake its producer, whose output is there before all of its ranks have reported. If one
        of them fails, both are given up. A dispatch in `given_up` stays given up when its producer ends.
        """
        attempt = self.running(number)
        if attempt is None or attempt.unreported or number in given_up:
            return
        if self.running(attempt.dispatch.producer) is not None:
            return
        attempt.is_done = True
        if not attempt.storing:
            self.drop(attempt)
        yield attempt
        for other in self:
            if other.dispatch.producer == number:
                yield from self.take_done(other.dispatch.number, given_up=given_up)

    def lose(self, rank: int, cause: Cause | None) -> dict[int, Cause | None]:
        """The dispatches that needed a dead rank, and why each fails.

        The rank ran the first one that it has not reported. That one fails for the cause, and so do those
        whose frames are lost.
        """
        causes: dict[int, Cause | None] = {}
        is_running = False
        for attempt in self:
            attempt.inside.discard(rank)
            number = attempt.dispatch.number
            if attempt.is_done:
                continue
            if rank in attempt.unreported:
                causes[number] = None if is_running else cause
                is_running = True
            elif attempt.storing.pop(rank, None) is not None:
                causes[number] = cause
            elif attempt.is_sent_by(rank):
                causes[number] = None
        return causes

    def stored(self, number: int, rank: int, *, are_lost: bool) -> Attempt | None:
        """The dispatch whose frames a rank has stored, or lost; None if nobody waits for them."""
        attempt = self._by_number.get(number)
        if attempt is None or attempt.storing.pop(rank, None) is None:
            return None
        if attempt.is_done and (are_lost or not attempt.storing):
            self.drop(attempt)
        return attempt
