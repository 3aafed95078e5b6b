"""One end of a Unix socket pair (SOCK_SEQPACKET) for pickled messages of plain values, and descriptors."""

from __future__ import annotations

import pickle
import socket
from array import array
from typing import Any

MAX_MESSAGE_BYTES = 1 << 18
"""Above Linux's limit for one message with default socket buffers (208 KiB)."""
MAX_FDS = 9
"""The arenas of 8 ranks, and the receiver's own page."""
_ANCILLARY_BYTES = socket.CMSG_LEN(MAX_FDS * array("i").itemsize)


class Channel:
    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray(MAX_MESSAGE_BYTES)
        """For `receive`, which one thread calls; a new one for each message would take 15 us."""
        self.sent_bytes = 0

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, fds: tuple[int, ...] = (), *, wait: bool = True) -> None:
        """Raises: OSError if the other end is closed; BlockingIOError if it is full and `wait` is false."""
        packed = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self.sent_bytes += len(packed)
        flags = 0 if wait else socket.MSG_DONTWAIT
        if fds:
            socket.send_fds(self._socket, [packed], fds, flags)
        else:
            self._socket.send(packed, flags)

    def receive(self) -> tuple[Any, list[int]] | None:
        """The next message and its descriptors, which the caller must close; None at the end."""
        try:
            size_bytes, fds = self._receive()
        except ConnectionResetError:  # the peer left messages unread; its own are still here
            try:
                size_bytes, fds = self._receive()
            except ConnectionError:
                return None
        except ConnectionError:
            return None
        if not size_bytes:
            return None
        return pickle.loads(memoryview(self._buffer)[:size_bytes]), fds

    def _receive(self) -> tuple[int, list[int]]:
        size_bytes, ancillary, _, _ = self._socket.recvmsg_into((self._buffer,), _ANCILLARY_BYTES)
        fds = array("i")
        for _, _, content in ancillary:  # descriptors are all that is sent this way
            fds.frombytes(content)
        return size_bytes, fds.tolist()

    def close(self) -> None:
        self._socket.close()
