"""The fork server, reached through a socket that has no file.

`multiprocessing` keeps its socket in a folder under /tmp until the process exits; a killed process leaves
both there. Here they are removed as soon as the server listens, and a descriptor serves to ask for new
processes. An abstract socket would let any user of the machine connect (CVE-2022-42919).

The kernel kills the server with the run, and the server's children with the server (`lifeline`). None of
them gets signals meant for the run, which `timeout`, `kill -- -GROUP` and a closing terminal send to every
process.
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from gfgen.system.lifeline import PACKAGE_ROOT
from gfgen.system.signals import FOR_THE_RUN

_BY_DESCRIPTOR = "/proc/self/fd/"


def ensure_running(keep_fds: Sequence[int] = ()) -> None:
    """Start the fork server unless it runs.

    It and all that it forks ignore signals for the run, die with the run and keep `keep_fds` open.
    """
    # The kernel would kill the server at the end of any other thread.
    assert threading.current_thread() is threading.main_thread(), "the main thread starts processes"
    server: Any = multiprocessing.forkserver._forkserver
    address_before = server._forkserver_address
    with (
        _our_start(keep_fds),
        tempfile.TemporaryDirectory(prefix="gfgen-") as made,
        _socket_folder(made) as folder,
    ):
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


@contextlib.contextmanager
def _our_start(keep_fds: Sequence[int]) -> Iterator[None]:
    """Start processes so that they find our modules, and the fork server so that it dies with this process.

    They are started with `-c`, which searches the current folder before the standard library; `-P` keeps them
    from taking a random.py there for Python's own.
    """
    util: Any = multiprocessing.util
    spawn = util.spawnv_passfds

    def start(path: bytes, command: Sequence[str], fds: Sequence[int]) -> int:
        *flags, _, code = command
        if "forkserver" in code:  # the resource tracker ends when all others have
            code, fds = f"{_lifeline()}; {code}", [*fds, *keep_fds]
        pid: int = spawn(path, [*flags, "-P", "-c", code], fds)
        return pid

    util.spawnv_passfds = start
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def _lifeline() -> str:
    """Statements for a child of this process, which may not find this package."""
    bind = f"lifeline.die_with_parent({os.getpid()}); lifeline.bind_forks(); outlet.drop_unread()"
    found = f"import sys; sys.path.append({str(PACKAGE_ROOT)!r}); from gfgen.system import lifeline, outlet"
    return f"{found}; {bind}"


@contextlib.contextmanager
def _socket_folder(folder: str) -> Iterator[str]:
    """Let `multiprocessing` put its socket there.

    Yields a short path of the folder: a socket's path has at most 107 bytes, and TMPDIR may be longer.
    """
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    before = config.get("tempdir")
    fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    config["tempdir"] = path = f"{_BY_DESCRIPTOR}{fd}"
    try:
        yield path
    finally:
        config["tempdir"] = before
        os.close(fd)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Inside, processes start with the signals for the run blocked.

    A child inherits blocked signals as it inherits ignored ones. This process gets signals that arrived
    inside when the block ends.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_RUN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
