"""What has to be given up when a dispatch fails, and the rounds in which its ranks leave it.

A rank that is inside a collective, or in the middle of a transfer, may still write into other ranks' memory.
So after a failure no rank that took part starts anything new before all of them have left, and the counts of
the transfers between them restart:

    Abandon         to every rank concerned: leave these dispatches, do not start those that wait
    Abandoned            from every one of them that lives
    RestartEdges    to every one: count transfers with these ranks from the beginning
    EdgesRestarted  from every one; then the failures become events, and the ranks are free

A rank that died is reaped before any of this, so it does not write any more. Its successor is introduced to
the others after they have left (meeting.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import TaskFailed
from gfgen.runtime.ipc.messages import Abandon, Abandoned, EdgesRestarted, RestartEdges, TaskFault
from gfgen.runtime.processes.attempts import Attempts, Cause
from gfgen.runtime.processes.child import RankProcess
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.watchdog import Watchdog

logger = logging.getLogger(__name__)


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


@dataclass(slots=True)
class Recovery:
    """The failure that ranks recover from. There is one at a time: another failure makes it larger."""

    causes: dict[int, Cause | None] = field(default_factory=dict)
    """By dispatch that failed; None where it was given up for no fault of its own."""
    numbers: frozenset[int] = frozenset()
    ranks: frozenset[int] = frozenset()
    overdue: set[int] = field(default_factory=set)
    """Dispatches that did not end in time. A rank hangs, or all wait for something that never comes."""
    dead: set[int] = field(default_factory=set)
    """Ranks that died since it began; their successors know nothing of it."""
    waiting_for: set[int] = field(default_factory=set)
    """Ranks that have not answered yet."""
    deadline_s: float = math.inf
    """A rank that has not answered by then is taken for hung."""
    all_have_left: bool = False

    def extend(self, causes: Mapping[int, Cause | None], dispatches: Mapping[int, Dispatch]) -> None:
        """Begin with these failures too: all ranks concerned are asked to leave, again if they were."""
        for number, cause in causes.items():
            self.causes[number] = self.causes.get(number) or cause
        self.numbers |= given_up({*self.causes, *self.numbers}, dispatches)
        self.ranks |= {rank for number in self.numbers for rank in dispatches[number].ranks_involved}
        self.all_have_left = False
        self.ask()

    def peers_of(self, rank: int, dispatches: Mapping[int, Dispatch]) -> frozenset[int]:
        """The living ranks with which it has to restart its count: it exchanged lost state with them.

        Not all of `ranks`: between others of them a transfer may be under way that goes on.
        """
        pairs = [pair for number in self.numbers for pair in dispatches[number].pairs if rank in pair]
        return frozenset().union(*pairs) - self.dead - {rank}

    def blame(self) -> None:
        """All have left, so no rank hangs: blame the first overdue task, which would be tried forever."""
        if self.overdue and not self.dead:
            first = min(self.overdue)
            self.causes[first] = self.causes.get(first) or Cause("it did not end in time and was given up")

    def ask(self) -> None:
        """Wait for an answer from every rank concerned that lives."""
        self.waiting_for = set(self.ranks - self.dead)


class Rounds:
    """Takes the ranks of a run through the rounds of each recovery."""

    def __init__(self, pool: WorkerPool, attempts: Attempts, watchdog: Watchdog) -> None:
        self.recovery = Recovery()
        """Without ranks if there is nothing to recover from."""
        self._pool = pool
        self._attempts = attempts
        self._watchdog = watchdog

    def fail(self, worker: RankProcess, fault: TaskFault, *, now_s: float) -> None:
        """A task, or its transfer, failed on one rank: all that take part, and what needs it, stop."""
        if self._attempts.running(fault.number) is None:
            return
        cause, recovery = None if fault.void else Cause(fault.reason), self.recovery
        if fault.number in recovery.numbers:
            recovery.causes[fault.number] = recovery.causes.get(fault.number) or cause
            return
        if fault.void:
            logger.info("%s: dispatch %d was given up: %s", worker.name, fault.number, fault.reason)
        self.give_up({fault.number: cause}, now_s=now_s)

    def lose(self, rank: int, cause: Cause | None, *, now_s: float) -> Iterator[TaskFailed]:
        """A rank's process is reaped: give up what it was part of."""
        self.recovery.dead.add(rank)
        self.give_up(self._attempts.lose(rank, cause), now_s=now_s)
        yield from self._advance(now_s)

    def give_up_overdue(self, overdue: Collection[int], *, now_s: float) -> None:
        """Give up dispatches that did not end in time.

        The ranks that wait for a hung one leave. It does not, and is known by that.
        """
        if new := set(overdue) - self.recovery.numbers:
            self.recovery.overdue |= set(overdue)
            self.give_up(dict.fromkeys(new), now_s=now_s)

    def include(self, *, now_s: float) -> None:
        """A new dispatch may need what is being given up."""
        numbers = self.recovery.numbers
        if numbers and given_up(numbers, self._attempts.dispatches) - numbers:
            self.give_up({}, now_s=now_s)

    def give_up(self, causes: Mapping[int, Cause | None], *, now_s: float) -> None:
        """Ask every rank concerned to leave these dispatches, and all that go with them."""
        recovery, dispatches = self.recovery, self._attempts.dispatches
        recovery.extend(causes, dispatches)
        lost = [dispatches[number] for number in recovery.numbers]
        recovery.deadline_s = now_s + self._watchdog.time_to_leave_s(lost)
        for rank in sorted(recovery.waiting_for):
            self._pool.workers[rank].tell(Abandon(recovery.numbers))

    def answered(
        self, rank: int, answer: Abandoned | EdgesRestarted, *, now_s: float
    ) -> Iterator[TaskFailed]:
        """A rank has left, or restarted its counts; answers to an earlier, smaller question do not count."""
        recovery = self.recovery
        is_current = answer.numbers == recovery.numbers
        if is_current and isinstance(answer, EdgesRestarted) is recovery.all_have_left:
            recovery.waiting_for.discard(rank)
            yield from self._advance(now_s)

    def _advance(self, now_s: float) -> Iterator[TaskFailed]:
        """When all have left, restart the edges between them; when that is done, report what failed."""
        recovery = self.recovery
        if not recovery.waiting_for and not recovery.all_have_left:
            recovery.all_have_left = True
            recovery.ask()
            recovery.deadline_s = now_s + self._watchdog.patience.leaving_s
            for rank in sorted(recovery.waiting_for):
                peers = recovery.peers_of(rank, self._attempts.dispatches)
                self._pool.workers[rank].tell(RestartEdges(recovery.numbers, peers))
        if recovery.waiting_for:
            return
        self.recovery = Recovery()
        recovery.blame()
        for number in sorted(recovery.numbers):
            attempt = self._attempts.running(number)
            assert attempt is not None, f"dispatch {number} ended while ranks left it"
            self._attempts.drop(attempt)
            cause = recovery.causes.get(number)
            text = cause.reason if cause else "given up with another task"
            yield TaskFailed(now_s, number, text, void=cause is None, lost=bool(cause and cause.lost))
        self._pool.meeting.let_in()

    def kill_late(self, now_s: float) -> None:
        """Kill the ranks that do not answer in time."""
        if now_s > self.recovery.deadline_s:
            for rank in self.recovery.waiting_for:
                self._pool.workers[rank].kill("it hangs in a task that was given up")

    def forgive(self, paused_s: float) -> None:
        """The control process did not run for this time, in which it could hear nobody."""
        self.recovery.deadline_s += paused_s
