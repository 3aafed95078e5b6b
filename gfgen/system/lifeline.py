"""Child processes that the kernel kills when their parent ends.

    python -m gfgen.system.lifeline PARENT MODULE [ARGUMENT...]

runs a module in a process that dies with PARENT; `module_command` builds such a command. No thread of the
child has to notice the end, so a native call that holds the interpreter's lock cannot delay it. The kernel
sends the signal when the *thread* that started the child ends: so start it from
one that lives as long as its process.

`ask_child` puts questions to such a child, which imports what its parent must not.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gfgen.errors import GfgenError, ModelError, in_one_line

PACKAGE_ROOT = Path(__file__).parents[2]  # the folder from which this package is imported, installed or not
ANSWERS_S = 300.0
_PR_SET_PDEATHSIG = 1


def module_command(module: str, *arguments: str) -> list[str]:
    """The command of a module that dies with the thread that starts it; -P: no random.py of the folder."""
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


def output_of(module: str, *arguments: str, asked: str = "", timeout_s: float) -> str:
    """What a module prints that runs as a program. Raises: ChildProcessError with the reason."""
    command, env = module_command(module, *arguments), module_environment()
    try:
        done = subprocess.run(
            command, input=asked, check=True, capture_output=True, text=True, timeout=timeout_s, env=env
        )
    except subprocess.TimeoutExpired:
        raise ChildProcessError(f"no answer within {timeout_s:g} s") from None
    except subprocess.CalledProcessError as error:
        raise ChildProcessError((error.stderr.strip().splitlines() or ["no reason given"])[-1]) from None
    return done.stdout


def ask_child(module: str, asked: object, what: str) -> Any:
    """The answers of a module that runs as a program. Raises: ModelError."""
    try:
        return json.loads(output_of(module, asked=json.dumps(asked), timeout_s=ANSWERS_S).splitlines()[-1])
    except ChildProcessError as error:
        raise ModelError(f"{what} cannot be checked: {error}") from None


def answer_all(answer: Callable[..., Any]) -> None:
    """Answer the questions that `ask_child` sends; one that fails says nothing of others."""
    answers = []
    for asked in json.load(sys.stdin):
        try:
            answers.append(answer(asked))
        except Exception as error:
            said = str(error) if isinstance(error, GfgenError) else in_one_line(error)
            answers.append({"error": said})
    print(json.dumps(answers))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
