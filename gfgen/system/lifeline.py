"""Child processes that the kernel kills when their parent ends.

    python -m gfgen.system.lifeline PARENT MODULE [ARGUMENT...]

runs a module in a process that dies with PARENT; `module_command` builds such a command. No thread of the
child has to notice the end, so a native call that holds the interpreter's lock cannot delay it. The kernel
sends the signal when the *thread* that started the child ends: so start it from
one that lives as long as its process.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

PACKAGE_ROOT = Path(__file__).parents[2]
"""The folder from which this package is imported, installed or not."""
_PR_SET_PDEATHSIG = 1


def module_command(module: str, *arguments: str) -> list[str]:
    """Command that runs a module of this package in a process that dies with the thread that starts it.

    With -P, a random.py in the current folder does not replace Python's own.
    """
    return [sys.executable, "-P", "-m", "gfgen.system.lifeline", str(os.getpid()), module, *arguments]


def module_environment() -> dict[str, str]:
    """This process's environment, in which such a command finds this package."""
    paths = (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when `parent`, which started it, ends; exit if it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def bind_forks() -> None:
    """Make each process that this one forks from now on die with it, from its first instruction on."""
    parent = [os.getpid()]

    def note_parent() -> None:  # a child forks with the same hooks
        parent[0] = os.getpid()

    os.register_at_fork(before=note_parent, after_in_child=lambda: die_with_parent(parent[0]))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
