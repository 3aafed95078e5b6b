"""The fork server, reached through a socket that has no file.

`multiprocessing` keeps its socket in a folder of its own under /tmp until the process exits; one
that is killed leaves both there. Here they are removed as soon as the server listens, and new
processes are asked for through the descriptor that is left. Not an abstract socket: any user of
the machine could connect to that (CVE-2022-42919).

The server, and what it forks, gets no signal that is meant for the run: with the server all ranks would die
(`lifeline`), and `timeout`, `kill -- -GROUP` and a closing terminal tell every process of the run.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from gfgen.runtime.signals import FOR_THE_RUN

_BY_DESCRIPTOR = "/proc/self/fd/"


def ensure_running() -> None:
    """Start the fork server unless it runs; it and all that it forks are deaf to signals for the run."""
    server: Any = multiprocessing.forkserver._forkserver
    address_before = server._forkserver_address
    if address_before is None:
        _leave_removed_folder()
    with _same_modules(), tempfile.TemporaryDirectory(prefix="gfgen-") as folder, _temporary_folder(folder):
        with _signals_blocked():
            multiprocessing.resource_tracker.ensure_running()
        with _signals_blocked():  # again: the tracker's start lets some of them through
            server.ensure_running()
        address = server._forkserver_address
        if address == address_before:
            return
        if address.startswith(folder):
            server._forkserver_address = f"{_BY_DESCRIPTOR}{os.open(address, os.O_PATH | os.O_CLOEXEC)}"
    if address_before and address_before.startswith(_BY_DESCRIPTOR):
        os.close(int(address_before.removeprefix(_BY_DESCRIPTOR)))


def _leave_removed_folder() -> None:
    """A process is told where it is to begin, and nothing can begin in a folder that is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


@contextlib.contextmanager
def _same_modules() -> Iterator[None]:
    """Let a process that is started here find modules in the current folder only if this one does.

    It is started with `-c`, which puts that folder before the standard library: a random.py would be taken
    for Python's own.
    """
    util: Any = multiprocessing.util
    flags = util._args_from_interpreter_flags
    if not _finds_modules_here():
        util._args_from_interpreter_flags = lambda: [*flags(), "-P"]
    try:
        yield
    finally:
        util._args_from_interpreter_flags = flags


def _finds_modules_here() -> bool:
    """Whether this process looks into the current folder before the standard library."""
    library = os.path.dirname(os.__file__)
    before = itertools.takewhile(lambda place: place != library, sys.path)
    return os.getcwd() in map(os.path.abspath, before)


@contextlib.contextmanager
def _temporary_folder(folder: str) -> Iterator[None]:
    """Let `multiprocessing` put its files there."""
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    before = config.get("tempdir")
    config["tempdir"] = folder
    try:
        yield
    finally:
        config["tempdir"] = before


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Let a process that is started here get no signal for the run from its first instruction on.

    A process inherits what is blocked, as what is ignored; but this one gets what has come meanwhile.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_RUN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
