"""A process that must not outlive the one that it works for, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    `parent` is the process that this one is for, where it knows: if that is gone already, so is this one.
    """
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:
        sys.exit(1)
