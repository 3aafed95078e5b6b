"""Time limits for functions that may never return, such as a user's policy."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from gfgen.errors import PolicyFault

DECISION_LIMIT_S = 10.0
"""Limit for one decision of a policy. Built-in policies take at most a millisecond."""
_AGAIN_S = 0.5
"""The interruption is repeated at this interval, because the function may catch the first one."""

T = TypeVar("T")
R = TypeVar("R")


class DecisionTimeout(PolicyFault):
    """A policy did not return in time."""


def within(limit_s: float, function: Callable[[T], R], argument: T) -> R:
    """Call a function, and interrupt it if it does not return within `limit_s`.

    Signals reach the main thread only, so in other threads there is no limit. A timer that was already
    running (a test's, for example) continues afterwards.

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
