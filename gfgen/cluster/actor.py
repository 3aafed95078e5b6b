"""The Ray actor of a node: it has the node's GPUs, and passes messages to the process that uses them."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from gfgen.cluster.member import (
    Cancel,
    Ended,
    MemberOptions,
    Noted,
    Ready,
    Refused,
    Setup,
    Start,
    attempt_folder,
)
from gfgen.runtime.core.admission import ResolvedModel
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobInfo
from gfgen.session.admission import resolved_model
from gfgen.session.ranks import Ranks
from gfgen.system.lifeline import module_command, module_environment
from gfgen.system.machine import key_versions

DEAF_S = 45.0
"""An actor whose driver has been silent for this time ends. Ray ends it sooner, unless the machine has
lost its connection or its Ray."""
END_S = 20.0
"""How long the process may take to end its ranks before it is killed."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The node's process has ended."""

    reason: str


def versions_here() -> Mapping[str, str]:
    """The versions that must be equal on all nodes."""
    return {"python": ".".join(map(str, sys.version_info[:2])), **key_versions()}


class NodeActor:
    """Methods run in several threads. Ray ends the actor with its driver, and with it the process."""

    def __init__(self, options: MemberOptions, shared: Path | None) -> None:
        self._options = options
        if shared is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gfgen-node-"))
        else:
            self._folder = shared
        self._reports: queue.SimpleQueue[Ready | Refused | Ended | Noted | Gone] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._heard_s = time.monotonic()
        """When the driver asked for something last."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        with contextlib.suppress(OSError):
            os.chdir(options.work_dir)

    def facts(self) -> tuple[Mapping[str, str], Ranks]:
        """The node's versions and ranks. Raises: InputError when it lacks the devices."""
        self._heard_s = time.monotonic()
        return versions_here(), self._options.ranks.here()

    def time(self) -> float:
        """By this machine's clock, in Unix time."""
        self._heard_s = time.monotonic()
        return time.time()

    def find_model(self, name: str) -> ResolvedModel:
        """Raises: ModelError when this node has no such model."""
        ranks = self._options.ranks
        return resolved_model(
            name, has_random_weights=ranks.random_weights, trusts_code=ranks.trust_remote_code
        )

    def load(self, models: Sequence[str]) -> Ready | Refused | Gone:
        """Start the process with these models, and wait until it is ready."""
        setup = Setup(self._options, self._folder, tuple(models))
        threading.Thread(target=self._run, args=(setup,), name="process", daemon=True).start()
        first = self._reports.get()
        assert not isinstance(first, Ended | Noted), first
        return first

    def start(self, info: JobInfo, attempt: int) -> None:
        self._send(Start(info, attempt))

    def cancel(self, attempt: int) -> None:
        self._send(Cancel(attempt))

    def tell(self, event: Event) -> None:
        self._send(event)

    def take_reports(self, timeout_s: float) -> Sequence[Ended | Gone | Noted | Ready | Refused]:
        """What the process has reported; waits for the first report."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._reports.get(timeout=timeout_s))
            while True:
                found.append(self._reports.get_nowait())
        self._heard_s = time.monotonic()
        return found

    def read(self, file: str, offset: int, size: int) -> bytes:
        with (self._folder / file).open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    def forget(self, attempt: int) -> None:
        shutil.rmtree(self._folder / attempt_folder(attempt), ignore_errors=True)

    def stop(self) -> None:
        """End the process and remove its folder."""
        self._send(None)
        if self._process is not None:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        while time.monotonic() < self._heard_s + DEAF_S:
            time.sleep(1.0)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)  # the process dies with this one

    def _send(self, message: Start | Cancel | Event | None) -> None:
        with self._lock, contextlib.suppress(OSError):  # its end is reported
            if self._connection is not None:
                self._connection.send(message)

    def _run(self, setup: Setup) -> None:
        """Run the process to its end; it would die with this thread."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command("gfgen.cluster.member_main", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a session of its own would get less processor time on busy machines
            )
        connection = Connection(ours.detach())
        with contextlib.suppress(EOFError, OSError):
            connection.send(setup)
            self._connection = connection
            while True:
                self._reports.put(connection.recv())
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._reports.put(Gone(f"its process {how}"))
