"""Output that never waits for its reader, such as a stopped terminal (Ctrl-S) or a pipe that nobody reads."""

from __future__ import annotations

import atexit
import io
import logging
import os
import select
import stat
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Any, TextIO

from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 1 << 20
FINAL_S = 5.0  # how long a process that ends waits for its last lines to be read


def unblocked(stream: TextIO) -> TextIO:
    """The same stream, written by a thread; the stream itself if it is a file, or already is one of these."""
    if isinstance(getattr(stream, "buffer", None), _Outlet) or not _can_block(stream):
        return stream
    outlet: Any = _Outlet(stream)
    atexit.register(outlet.drain)
    return io.TextIOWrapper(outlet, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


def drain(stream: Any, limit_s: float = FINAL_S) -> bool:
    """Wait until all is read, but not again after a wait in vain; whether it is."""
    outlet = getattr(stream, "buffer", None)
    return not isinstance(outlet, _Outlet) or outlet.drain(limit_s)


def drop_unread() -> None:
    """Drop what is printed while nobody reads it, by an own description of the terminal or pipe."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
                own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                os.dup2(own, fd)
                os.close(own)
                end: Any = _Lossy(fd, "w", closefd=False)
                setattr(sys, name, io.TextIOWrapper(end, errors="backslashreplace", line_buffering=True))


def _can_block(stream: TextIO) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # a stream in memory
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stream.isatty()


class _Lossy(io.FileIO):
    def write(self, content: Any) -> int:
        with suppress(OSError):
            super().write(content)
        return len(content)


class _Outlet(io.FileIO):
    """What is written waits in a queue; a thread passes it on. What finds the queue full is dropped."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._stream = stream  # keeps it open
        self._waiting: deque[bytes] = deque()
        self._num_bytes = self._num_dropped = 0  # of what waits; lines since the queue was last empty
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_given_up = False  # the last wait was in vain, and nothing was read since

    def write(self, content: Any) -> int:
        piece = bytes(content)
        with self._changed:
            if self._waiting and self._num_bytes + len(piece) > MOST_WAITING_BYTES:
                self._num_dropped += piece.count(b"\n")
                return len(piece)
            if self._thread is None:
                self._thread = threading.Thread(target=self._pass_on, name="output", daemon=True)
                self._thread.start()
            self._waiting.append(piece)
            self._num_bytes += len(piece)
            self._changed.notify_all()
        return len(piece)

    def drain(self, limit_s: float = FINAL_S) -> bool:
        with self._changed:
            limit_s *= not self._is_given_up
            is_empty = self._changed.wait_for(lambda: not self._waiting, limit_s)
            self._is_given_up |= not is_empty and limit_s > 0
        return is_empty

    def close(self) -> None:
        self.drain()
        super().close()

    def _pass_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                piece = self._waiting[0]
            with suppress(OSError, ValueError):  # the terminal is gone, or the file closed
                while piece:
                    written = super().write(piece)
                    piece = piece[written or 0 :]
                    if written is None:  # another process has made it not wait
                        select.select([], [self], [])
            with self._changed:
                self._num_bytes -= len(self._waiting.popleft())
                self._is_given_up = False
                num_dropped = 0 if self._waiting else self._num_dropped
                self._num_dropped -= num_dropped
                self._changed.notify_all()
            if num_dropped:
                logger.warning("dropped %s of output that nobody read", counted(num_dropped, "line"))
