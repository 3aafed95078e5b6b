"""Starts the front, receives its messages, and restarts it when it dies."""

from __future__ import annotations

import errno
import logging
import socket
import subprocess
import threading
import time

from gfgen.errors import InputError, RunError
from gfgen.server.bridge.run_bridge import Joined, Left, RunBridge
from gfgen.server.protocol.limits import BACKLOG
from gfgen.server.protocol.link import FrontSettings, MessageSocket
from gfgen.system.lifeline import module_command, module_environment

logger = logging.getLogger(__name__)

MAX_DEATHS = 5
DEATHS_WINDOW_S = 60.0
"""After MAX_DEATHS within this time the run ends with an error."""
BIND_S = 5.0
"""How long to wait for the port of a killed server, whose front the kernel kills too (lifeline.py)."""
DRAIN_S = 10.0


def listen(host: str, port: int) -> socket.socket:
    """Raises: InputError if the address is in use or not available."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    both = is_ipv6 and socket.has_dualstack_ipv6()  # :: is for IPv4, too
    deadline_s = time.monotonic() + BIND_S
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                reason = str(error.strerror or error).partition(" (while")[0]
                raise InputError(
                    f"--host {host} --port {port}: cannot listen there ({reason}); choose another"
                ) from None
        time.sleep(0.1)


class Supervisor:
    """Runs the front process from `start` to `stop`."""

    def __init__(self, listener: socket.socket, settings: FrontSettings, bridge: RunBridge) -> None:
        self._listener = listener
        self._settings = settings
        self._bridge = bridge
        self._is_over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: MessageSocket | None = None
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._link is not None:
            self._link.close()
        self._thread.join(DRAIN_S + 1.0)
        self._listener.close()

    def _run(self) -> None:
        deaths: list[float] = []
        while not self._is_over.is_set():
            try:
                code = self._serve()
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                what = f"ended ({how}); starting another one"
            except OSError as error:  # no memory or descriptor: perhaps temporary
                what = f"cannot be started ({error.strerror}); retrying"
            if self._is_over.is_set():
                return
            now_s = time.monotonic()
            deaths = [at for at in deaths if at > now_s - DEATHS_WINDOW_S] + [now_s]
            logger.warning("the HTTP process %s", what)
            if len(deaths) >= MAX_DEATHS:
                times = f"{len(deaths)} times within {DEATHS_WINDOW_S:g} s"
                what = f"the HTTP process died, or could not be started, {times}"
                self._bridge.received(RunError(f"{what}; see its messages above"))
                return
            self._is_over.wait(0.1 * len(deaths))

    def _serve(self) -> int:
        ours, theirs = socket.socketpair()
        numbers = map(str, (theirs.fileno(), self._listener.fileno()))
        command = module_command("gfgen.server.http.front", *numbers)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(), self._listener.fileno()),
                    env=module_environment(),
                    stdin=subprocess.DEVNULL,
                )
        except OSError:
            ours.close()
            raise
        link = self._link = MessageSocket(ours)
        if self._is_over.is_set():  # stop() came between two fronts
            link.close()
        try:
            link.send(self._settings)
            self._bridge.received(Joined(link))
            while (message := link.receive()) is not None:
                self._bridge.received(message)
        except OSError:
            pass
        self._bridge.received(Left(link))
        link.close()
        if self._is_over.is_set():  # ends it while it still imports; later it ignores signals
            self._process.terminate()
        return self._reap(self._process)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            logger.warning("the HTTP process does not end; killing it")
            process.kill()
            return process.wait()
