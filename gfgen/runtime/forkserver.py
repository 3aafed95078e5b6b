"""The fork server, reached through a socket that has no file.

`multiprocessing` keeps its socket in a folder of its own under /tmp until the process exits; one
that is killed leaves both there. Here they are removed as soon as the server listens, and new
processes are asked for through the descriptor that is left. Not an abstract socket: any user of
the machine could connect to that (CVE-2022-42919).
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import multiprocessing.process
import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

_BY_DESCRIPTOR = "/proc/self/fd/"


def ensure_running() -> None:
    """Start the fork server unless it runs; it and all that it forks are deaf to Ctrl-C at first."""
    server: Any = multiprocessing.forkserver._forkserver
    address_before = server._forkserver_address
    with tempfile.TemporaryDirectory(prefix="gfgen-") as folder, _temporary_folder(folder):
        with _interrupts_ignored():
            server.ensure_running()
        address = server._forkserver_address
        if address == address_before:
            return
        if address.startswith(folder):
            server._forkserver_address = f"{_BY_DESCRIPTOR}{os.open(address, os.O_PATH | os.O_CLOEXEC)}"
    if address_before and address_before.startswith(_BY_DESCRIPTOR):
        os.close(int(address_before.removeprefix(_BY_DESCRIPTOR)))


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
def _interrupts_ignored() -> Iterator[None]:
    """Let a process that is started here ignore Ctrl-C from its first instruction on."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
