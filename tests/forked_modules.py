"""Modules that commands run in processes of their own, run in forks of the fork server.

An interpreter of its own would import torch and diffusers, for seconds each time. `gfgen` commands that tests
start as processes, and the tiny models of a session, use the real function (`lifeline.output_of`).
"""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from typing import Any

from gfgen.runtime.processes.launcher import PRELOADS, ensure_fork_server
from gfgen.system import lifeline

HEAVY = ("gfgen.models.stepping.outlined", "gfgen.models.lora.reading", "gfgen.models.loading.random_weights")
_real = lifeline.output_of


def fork_server() -> Any:
    """That of ranks, which has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADS["cpu"]])
    ensure_fork_server(())
    return context


def output_of(module: str, *arguments: str, asked: str = "", timeout_s: float) -> str:
    """As `lifeline.output_of`."""
    if module not in HEAVY or threading.current_thread() is not threading.main_thread():
        return _real(module, *arguments, asked=asked, timeout_s=timeout_s)
    context = fork_server()
    ours, theirs = context.Pipe(duplex=False)
    given = (theirs, [module, *arguments], asked, dict(os.environ))
    process = context.Process(target=_run, args=given, daemon=True)
    process.start()
    theirs.close()
    with ours:
        if not ours.poll(timeout_s):
            process.kill()
            raise ChildProcessError(f"no answer within {timeout_s:g} s")
        try:
            out, error = ours.recv()
        except EOFError:
            raise ChildProcessError("it died") from None
    process.join()
    if error is not None:
        raise ChildProcessError(error)
    said: str = out
    return said


def _run(pipe: Connection, words: list[str], asked: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.stdin = list(words), io.StringIO(asked)
    out, error = io.StringIO(), None
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        error = str(end.code) if end.code else None
    except BaseException as found:  # as the last line of a traceback
        error = f"{type(found).__name__}: {found}"
    pipe.send((out.getvalue(), error))
