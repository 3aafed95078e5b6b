"""SIGINT, SIGTERM and SIGHUP as something to select on, in place of an exception anywhere."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator

from gfgen.errors import InterruptedRunError

FOR_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Terminals, `timeout` and others send them to all processes of a run; its control plane alone decides."""


ECHO_S = 1.0
"""A second SIGTERM or SIGHUP that comes sooner belongs to the first signal."""


def leave_to_the_run() -> None:
    """Ignore them in this process, which ends when the control plane lets it."""
    for number in FOR_THE_RUN:
        signal.signal(number, signal.SIG_IGN)


class SignalPipe:
    """Readable when a signal has come; restores the previous handlers when it is closed.

    What this process was started to ignore stays ignored, as `nohup` wants of SIGHUP, and a shell without
    job control of Ctrl-C for what it starts in the background.
    """

    def __init__(self) -> None:
        self._interrupted: str | None = None
        """What a signal is to interrupt."""
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, self._came)
            for number in FOR_THE_RUN
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._first_s: float | None = None
        """When the first signal came, by the machine's monotonic clock."""

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Numbers of the signals that came, without the echoes of the first one.

        `timeout` sends its signal to the process and then to the group in which that is; when a terminal
        closes, both the kernel and the shell send SIGHUP; systemd may send SIGTERM and SIGHUP. These come
        within moments and are one wish. Each Ctrl-C counts.
        """
        now_s = time.monotonic()
        counted = []
        for number in filter(self._previous.__contains__, self._reader.recv(64)):
            if self._first_s is None:
                self._first_s = now_s
            elif number != signal.SIGINT and now_s < self._first_s + ECHO_S:
                continue
            counted.append(number)
        return counted

    @contextlib.contextmanager
    def interrupting(self, doing: str) -> Iterator[None]:
        """Around calls that wait for something else: here a signal does raise an exception.

        Raises: InterruptedRunError at the first signal, also one that came before and was not taken.
        """
        self._interrupted = doing
        try:
            with contextlib.suppress(BlockingIOError):
                for number in self.take():
                    self._came(number)
            yield
        finally:
            self._interrupted = None

    def _came(self, number: int, _: object = None) -> None:
        doing, self._interrupted = self._interrupted, None
        if doing is not None:
            raise InterruptedRunError(f"stopped while {doing}", signal_number=number)

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()
