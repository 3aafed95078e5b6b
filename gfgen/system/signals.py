"""Signals that stop a run, as a readable descriptor instead of an exception anywhere."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from gfgen.errors import InterruptedRunError, PolicyFault

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Batch systems send them some time before they kill, perhaps again and again: only a first signal counts."""
FOR_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNINGS)
"""Terminals, `timeout` and others send them to all processes of a run; only its control plane reacts."""

ECHO_S = 1.0  # a second SIGTERM or SIGHUP within this time counts as the first signal


def leave_to_the_run() -> None:
    """Ignore these signals in this process, which the control plane ends."""
    for number in FOR_THE_RUN:
        signal.signal(number, signal.SIG_IGN)


class SignalPipe:
    """Readable after a signal; `close` restores handlers, but ignores warnings that may come again.

    What was ignored (nohup, `CMD &`) stays ignored.
    """

    def __init__(self) -> None:
        self._interrupted: str | None = None
        self._raised: InterruptedRunError | None = None
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, self._came) for number in FOR_THE_RUN if _is_for_us(number)
        }
        self._first_s: float | None = None  # time of the first signal, by the monotonic clock

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Numbers of the signals received, without echoes of the first within moments; each Ctrl-C counts."""
        now_s = time.monotonic()
        counted = []
        for number in filter(self._previous.__contains__, self._reader.recv(64)):
            if self._first_s is None:
                self._first_s = now_s
            elif number in WARNINGS or (number != signal.SIGINT and now_s < self._first_s + ECHO_S):
                continue
            counted.append(number)
        return counted

    @contextlib.contextmanager
    def interrupting(self, doing: str) -> Iterator[None]:
        """Inside, a signal raises; for calls that wait for something else. Raises: InterruptedRunError.

        It raises at the end once more if what it has interrupted caught that, as loggers and others' code do.
        """
        self._interrupted, self._raised = doing, None
        try:
            with contextlib.suppress(BlockingIOError):
                for number in self.take():
                    self._came(number)
            yield
            if self._raised is not None:
                raise self._raised
        finally:
            self._interrupted = None

    def _came(self, number: int, _: object = None) -> None:
        doing, self._interrupted = self._interrupted, None
        if doing is not None:
            self._first_s = time.monotonic()
            self._raised = InterruptedRunError(f"stopped while {doing}", signal_number=number)
            raise self._raised

    def close(self) -> None:
        for number, handler in self._previous.items():
            is_repeated = number in WARNINGS and self._first_s is not None
            signal.signal(number, signal.SIG_IGN if is_repeated else handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()


def _is_for_us(number: int) -> bool:
    """Not if it is ignored, nor a warning for which the program around this run has a handler of its own."""
    handler = signal.getsignal(number)
    return handler is signal.SIG_DFL if number in WARNINGS else handler is not signal.SIG_IGN


DECISION_LIMIT_S = 10.0  # limit for one decision of a policy. Built-in policies take at most a millisecond.
_AGAIN_S = 0.5  # the interruption is repeated at this interval, because the function may catch the first one

T = TypeVar("T")
R = TypeVar("R")


class DecisionTimeout(PolicyFault):
    """A policy did not return in time."""


def within(limit_s: float, function: Callable[[T], R], argument: T) -> R:
    """Call a function, and interrupt it if it does not return within `limit_s`, in the main thread only.

    A timer that was already running (a test's, for example) continues afterwards.
    Raises: DecisionTimeout inside the function, and so from here unless the function catches it.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(argument)

    def interrupt(_: int, __: FrameType | None) -> None:
        raise DecisionTimeout(f"it did not decide within {limit_s:g} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    began_s = time.monotonic()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
    try:
        return function(argument)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
        if left_s:
            left_s = max(1e-3, left_s - (time.monotonic() - began_s))
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
