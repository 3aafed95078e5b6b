"""The record of each dispatch, and what happens when one fails: the rounds in which its ranks leave it.

A dispatch becomes one event, however many ranks it has: when all of them have reported, or when it has been
given up.

A rank that is inside a collective, or in the middle of a transfer, may still write into other ranks' memory.
So after a failure no rank that took part starts anything new before all of them have left, and the counts of
the transfers between them restart:

    Abandon         to every rank concerned: leave these dispatches, do not start those that wait
    Abandoned            from every one of them that lives
    RestartEdges    to every one: count transfers with these ranks from the beginning
    EdgesRestarted  from every one; then the failures become events, and the ranks are free

A rank that died is reaped before any of this, so it does not write any more. Its successor is introduced to
the others after they have left (`pool.Meeting`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import TaskFailed
from gfgen.runtime.ipc.messages import Abandon, Abandoned, EdgesRestarted, RankTimes, RestartEdges, TaskFault
from gfgen.runtime.processes.child import Phase, RankProcess
from gfgen.runtime.processes.pool import WorkerPool

logger = logging.getLogger(__name__)

PAUSE_S = 5.0  # if all processes were stopped so long, waits may have run out: nobody is to blame
HANGS = "it hangs in a task that was given up"
STAYS = "it did not leave a task that was stopped"


def given_up(failed: Iterable[int], dispatches: Mapping[int, Dispatch]) -> frozenset[int]:
    """The unfinished dispatches that cannot go on when `failed` do not: what consumes their output, what
    transfers state between two of their ranks, and what comes after them on ranks that exchange data in
    them."""
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


class Recovery:
    """Takes ranks through the rounds. There is one recovery at a time: another failure makes it larger."""

    def __init__(self, pool: WorkerPool, attempts: Attempts) -> None:
        self.waiting_for: set[int] = set()
        self._all_have_left = False
        self._pool = pool
        self._attempts = attempts

    def fail(self, worker: RankProcess, fault: TaskFault) -> None:
        """A task, or its transfer, failed on one rank: all that take part, and what needs it, stop."""
        attempt = self._attempts.get(fault.number)
        if attempt is None:
            return
        is_excused = fault.is_late and self._pool.clock.paused_s > attempt.paused_before_s + PAUSE_S
        cause = None if fault.void or is_excused else Cause(fault.reason)
        if attempt.is_given_up:
            attempt.cause = attempt.cause or cause
            return
        if cause is None:
            logger.info("%s: dispatch %d was given up: %s", worker.name, fault.number, fault.reason)
        self.give_up({fault.number: cause})

    def stop(self, numbers: Collection[int]) -> None:
        """Nobody wants these any more: let ranks leave them, without blame for one that does not in time."""
        unwanted = [number for number in numbers if number in self._attempts.keys() - self._attempts.leaving]
        for number in unwanted:
            self._attempts[number].is_unwanted = True
        if unwanted:
            self.give_up(dict.fromkeys(unwanted))

    def include_new(self) -> None:
        """A new dispatch may need what is being given up."""
        leaving = self._attempts.leaving
        if leaving and given_up(leaving, self._attempts.dispatches) != leaving.keys():
            self.give_up({})

    def give_up(self, causes: Mapping[int, Cause | None]) -> None:
        """Ask every rank concerned to leave these dispatches, and all that go with them; again if it was."""
        for number, cause in causes.items():
            self._attempts[number].cause = self._attempts[number].cause or cause
        numbers = given_up({*causes, *self._attempts.leaving}, self._attempts.dispatches)
        lost = [self._attempts[number] for number in numbers]
        to_leave_s = self._pool.patience.to_leave_s(attempt.dispatch for attempt in lost)
        for attempt in lost:
            attempt.is_given_up = True
            allowed_s = self._pool.patience.stopping_s if attempt.is_unwanted else to_leave_s
            attempt.deadline_s = self._pool.clock.now_s + allowed_s
        self._all_have_left = False
        self._ask({rank: Abandon(numbers) for rank in self._concerned})

    def answered(
        self, rank: int, answer: Abandoned | EdgesRestarted, *, now_s: float
    ) -> Iterator[TaskFailed]:
        """A rank has left, or restarted its counts; answers to an earlier, smaller question do not count."""
        is_current = answer.numbers == self._attempts.leaving.keys()
        if is_current and isinstance(answer, EdgesRestarted) is self._all_have_left:
            self.waiting_for.discard(rank)
            yield from self.advance(now_s)

    def advance(self, now_s: float) -> Iterator[TaskFailed]:
        """When all have left, restart the edges between them; when that is done, report what failed."""
        if not self.waiting_for and not self._all_have_left:
            self._all_have_left = True
            for attempt in self._attempts.leaving.values():
                attempt.deadline_s = self._pool.clock.now_s + self._pool.patience.leaving_s
            numbers = frozenset(self._attempts.leaving)
            self._ask({rank: RestartEdges(numbers, self._peers_of(rank)) for rank in self._concerned})
        if self.waiting_for:
            return
        overdue = [attempt for attempt in self._attempts.values() if attempt.is_overdue]
        if overdue and not self._pool.meeting.held_back:
            # All have left, so no rank hangs: blame the first task, which would be tried forever.
            overdue[0].cause = overdue[0].cause or Cause("it did not end in time and was given up")
        for number, attempt in self._attempts.leaving.items():
            del self._attempts[number]
            cause = attempt.cause
            text = cause.reason if cause else "given up with another task"
            yield TaskFailed(now_s, number, text, void=cause is None, lost=bool(cause and cause.lost))
        self._all_have_left = False
        self._pool.meeting.held_back.clear()

    def look(self) -> None:
        """Give up dispatches that take too long, and kill the ranks that do not leave one in time."""
        now_s = self._pool.clock.now_s
        for attempt in self._attempts.leaving.values():
            late = attempt.dispatch.ranks_involved & self.waiting_for if now_s > attempt.deadline_s else ()
            for worker in [self._pool.workers[rank] for rank in late]:
                worker.is_to_blame &= worker.phase is Phase.ENDING or not attempt.is_unwanted
                worker.kill(STAYS if attempt.is_unwanted else HANGS)
        running = [attempt for attempt in self._attempts.values() if not attempt.is_given_up]
        overdue = [attempt for attempt in running if now_s > attempt.deadline_s]
        for attempt in overdue:
            attempt.is_overdue = True
        if overdue:
            self.give_up({attempt.dispatch.number: None for attempt in overdue})

    @property
    def _concerned(self) -> set[int]:
        leaving = [attempt.dispatch for attempt in self._attempts.leaving.values()]
        return {rank for each in leaving for rank in each.ranks_involved} - self._pool.meeting.held_back

    def _ask(self, questions: Mapping[int, Abandon | RestartEdges]) -> None:
        self.waiting_for = set(questions)
        for rank in sorted(questions):
            self._pool.workers[rank].tell(questions[rank])

    def _peers_of(self, rank: int) -> frozenset[int]:
        """The living ranks with which it exchanged lost state: it restarts its count with these alone."""
        leaving = [attempt.dispatch for attempt in self._attempts.leaving.values()]
        pairs = [pair for dispatch in leaving for pair in dispatch.pairs if rank in pair]
        return frozenset().union(*pairs) - self._pool.meeting.held_back - {rank}


class Cause(NamedTuple):
    """Why a dispatch failed: it raised, or its worker died (`lost`); None stands for `void`."""

    reason: str
    lost: bool = False


@dataclass(slots=True, eq=False)
class Attempt:
    dispatch: Dispatch
    deadline_s: float  # when it counts as overdue; if it is given up, when a rank that has not left it does
    paused_before_s: float = 0.0  # AwakeClock.paused_s at its begin
    reports: dict[int, RankTimes] = field(default_factory=dict)
    is_given_up: bool = False
    cause: Cause | None = None  # why it is given up; None if that is no fault of its own
    is_overdue: bool = False  # it did not end in time: a rank hangs, or all wait for ever
    is_unwanted: bool = False  # it is given up because nobody wants its result

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

    def begin(self, dispatch: Dispatch, *, deadline_s: float, paused_before_s: float = 0.0) -> None:
        self[dispatch.number] = Attempt(dispatch, deadline_s, paused_before_s)

    def report(self, number: int, times: RankTimes) -> bool:
        """Whether a rank's report counts: the first one, of a dispatch of this run that is not given up."""
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
