"""One end of a Unix socket pair that carries messages and file descriptors.

SOCK_SEQPACKET keeps messages apart and in order, and tells the other end's death. Messages
are frozen dataclasses of plain values, pickled; no tensor passes here.
"""

from __future__ import annotations

import pickle
import socket
from typing import Any

MAX_MESSAGE_BYTES = 1 << 18
"""More than Linux lets one message be with its usual socket buffers (208 KiB)."""
MAX_FDS = 9
"""The arenas of 8 ranks, and a page of the own one."""


class Channel:
    """Sends and receives (message, file descriptors)."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.sent_bytes = 0

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Two connected ends."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, fds: tuple[int, ...] = (), *, wait: bool = True) -> None:
        """Send one message; descriptors are duplicated into the receiver.

        Raises: OSError when the other end is gone; BlockingIOError when it takes no more
        messages for now and `wait` is false.
        """
        packed = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self.sent_bytes += len(packed)
        flags = 0 if wait else socket.MSG_DONTWAIT
        if fds:
            socket.send_fds(self._socket, [packed], fds, flags)
        else:
            self._socket.send(packed, flags)

    def receive(self) -> tuple[Any, list[int]] | None:
        """The next message with its descriptors (now the caller's to close); None at the end."""
        try:
            packed, fds = self._receive()
        except ConnectionResetError:  # it has left messages unread; what it said before is still there
            try:
                packed, fds = self._receive()
            except ConnectionError:
                return None
        except ConnectionError:
            return None
        if not packed:
            return None
        return pickle.loads(packed), fds

    def _receive(self) -> tuple[bytes, list[int]]:
        packed, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, MAX_FDS)
        return packed, fds

    def close(self) -> None:
        self._socket.close()
