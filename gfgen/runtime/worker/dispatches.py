"""The state of each dispatch on one rank, shared by all threads of its worker.

entered     a thread runs the dispatch, or sends state for it; on a GPU until the device is done
abandoned   the control plane has given it up: what runs is aborted, what waits does not start
failed      it failed here, and the control plane has not given it up yet
leaving     it was abandoned, and a thread is still inside
sent        the state that it needs elsewhere has left this rank
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

AFTER_ALL = 2**63


class InputVoidError(Exception):
    """The dispatch was given up, or the one that makes its input has failed."""


class Dispatches:
    """Which dispatches a rank is inside of. `on_left` runs, locked, when no thread is in abandoned ones."""

    def __init__(self, on_left: Callable[[frozenset[int]], None]) -> None:
        self.lock = threading.RLock()  # also guards the jobs of the rank
        self._changed = threading.Condition(self.lock)
        self._on_left = on_left
        self._is_over = False  # the control plane is gone: every dispatch counts as abandoned
        self._inside: Counter[int] = Counter()  # counts the threads that are inside each dispatch
        self._abandoned: set[int] = set()
        self._failed: set[int] = set()
        self._leaving: list[frozenset[int]] = []
        self._unsent: dict[int, int] = {}  # by dispatch to send state for: arenas to be mapped before
        self._enqueued: set[int] = set()  # members of `_unsent` for which the host has nothing left to do
        self._num_unsettled = 0
        self._num_announced = self._num_mapped = 0

    def is_void(self, number: int) -> bool:
        """Whether a dispatch was given up, by itself or with everything."""
        return self._is_over or number in self._abandoned

    # Entering and leaving ---------------------------------------------------------------------

    def enter(self, number: int) -> bool:
        """From here on an abort of this dispatch reaches the thread; False if it was given up."""
        with self.lock:
            if self.is_void(number):
                return False
            self._inside[number] += 1
            return True

    def leave(self, number: int) -> None:
        """The calling thread is no longer inside."""
        with self.lock:
            self._inside[number] -= 1
            self._inside += Counter()  # drops those that no thread is inside of
            self._tell_what_was_left()

    def abandon(self, numbers: frozenset[int]) -> int | None:
        """Give dispatches up; the last of them that a thread is inside of, to abort exchanges through it."""
        with self.lock:
            self._abandoned |= numbers
            self._failed -= numbers
            self._changed.notify_all()
            self._leaving.append(numbers)
            self._tell_what_was_left()
            return max(numbers & self._inside.keys(), default=None)

    def end(self) -> int | None:
        """The control plane is gone. Returns the last dispatch that a thread is inside of."""
        with self.lock:
            self._is_over = True
            self.forgive()
            return max(self._inside, default=None)

    def _tell_what_was_left(self) -> None:
        for numbers in list(self._leaving):
            if not numbers & self._inside.keys():
                self._leaving.remove(numbers)
                self._on_left(numbers)

    # Failures ---------------------------------------------------------------------------------

    def note_failure(self, number: int) -> None:
        """Let nothing start until this dispatch is given up: the next one could take what was sent for it."""
        with self.lock:
            if not self.is_void(number):
                self._failed.add(number)

    def forgive(self) -> None:
        """Forget all failures: no control plane is left that would give them up."""
        with self.lock:
            self._failed.clear()
            self._changed.notify_all()

    def await_no_failure(self) -> None:
        """Wait until every dispatch that failed here was given up."""
        with self.lock:
            self._changed.wait_for(lambda: not self._failed)

    # Sending state, and arenas of new processes -----------------------------------------------

    def note_arena(self) -> None:
        """The arena of a new process has come, and is not mapped yet."""
        with self.lock:
            self._num_announced += 1

    def note_mapped(self) -> None:
        """The oldest arena that was not mapped is."""
        with self.lock:
            self._num_mapped += 1
            self._changed.notify_all()

    def note_to_send(self, number: int) -> None:
        with self.lock:
            self._unsent[number] = self._num_announced

    def await_arenas(self, number: int) -> None:
        """Map what came before this dispatch's state was asked for. Raises: InputVoidError."""
        with self.lock:
            due = self._unsent.get(number, 0)
            self._changed.wait_for(lambda: self._num_mapped >= due or self.is_void(number))
            self._require(number)

    def note_enqueued(self, number: int) -> None:
        """The device sends this dispatch's state without further work of the host."""
        with self.lock:
            self._enqueued.add(number)
            self._changed.notify_all()

    def note_sent(self, number: int) -> None:
        """This dispatch's state has left, or never will."""
        with self.lock:
            self._unsent.pop(number, None)
            self._enqueued.discard(number)
            self._changed.notify_all()

    @property
    def has_unsent(self) -> bool:
        """Whether state is left to send."""
        with self.lock:
            return bool(self._unsent)

    # Tasks on a device ------------------------------------------------------------------------

    def note_launched(self) -> None:
        """A task was launched, and is unsettled until the watcher has seen its end."""
        with self.lock:
            self._num_unsettled += 1

    def note_settled(self) -> None:
        with self.lock:
            self._num_unsettled -= 1
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether no task or transfer is under way here, and none is expected from another thread."""
        with self.lock:
            return not (self._inside or self._unsent or self._num_unsettled or self._failed)

    def await_clear(self, number: int, *, may_block: bool, but_own: bool = False) -> None:
        """Let everything go out that other ranks may wait for, before kernels here wait for those ranks.

        may_block: the launch may wait for the device. CUDA loads a kernel's code when it is first
        launched, and torch may have to take memory; for either, the thread waits for the device with the
        context locked, so that no other thread can send or publish meanwhile. If the device waits in an
        entry barrier for a rank that waits for this one's state, nothing ever moves again (seen: a job
        that went from one rank to four, in its first shared step). So state for this dispatch and earlier
        ones is enqueued before the dispatch is entered. Before a launch that may block, it has also left,
        and every task that was launched here has ended.

        but_own: before input arrives, except state for this dispatch, which may wait for that input.

        Raises: InputVoidError when the dispatch is given up.
        """
        last = number - 1 if but_own else number
        with self.lock:
            self._changed.wait_for(lambda: self.is_void(number) or self._is_clear(last, may_block=may_block))
            self._require(number)

    def _is_clear(self, last: int, *, may_block: bool) -> bool:
        if may_block and self._num_unsettled:
            return False
        unsent = self._unsent.keys() if may_block else self._unsent.keys() - self._enqueued
        return all(each > last for each in unsent)

    def _require(self, number: int) -> None:
        if self.is_void(number):
            raise InputVoidError
