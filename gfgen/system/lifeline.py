"""Processes that the kernel kills with the one that they work for, whatever they compute.

    python -m gfgen.system.lifeline PARENT MODULE [ARGUMENT...]

runs a module in a process that dies with PARENT (own_modules.py). No thread of the process has to notice the
end, so a native call that holds the interpreter's lock cannot delay it. The kernel sends the signal when the
*thread* ends that started the process: start it from one that lives as long as its own process.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent`, which started it, ends; exit if it already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def bind_forks() -> None:
    """Let each process that this one forks from now on die with it, from the child's first instruction on."""
    parent = [os.getpid()]

    def note_parent() -> None:  # a child forks with the same hooks
        parent[0] = os.getpid()

    os.register_at_fork(before=note_parent, after_in_child=lambda: die_with_parent(parent[0]))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
