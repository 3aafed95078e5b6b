"""SIGINT, SIGTERM and SIGHUP as something to select on, in place of an exception anywhere."""

from __future__ import annotations

import signal
import socket


class SignalPipe:
    """Readable when a signal has come; restores the previous handlers when it is closed."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Numbers of the signals that came."""
        return [number for number in self._reader.recv(64) if number in self._previous]

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()
