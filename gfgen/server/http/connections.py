"""Limits on connections: slow headers, clients that do not read, and too many connections."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from dataclasses import replace
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gfgen.server.protocol.limits import ServerLimits
from gfgen.system.descriptors import allow_most

MAX_HEADER_BYTES = 1 << 16
OWN_DESCRIPTORS = 200
"""Reserved for the store, the log, files that are sent, and 503 responses."""
ANSWERED_BEYOND = 64
"""Connections beyond the limit that get a 503; further ones are closed immediately."""


def within_descriptors(limits: ServerLimits) -> ServerLimits:
    """Raise this process's descriptor limit; returns the limits with as many connections as fit it."""
    room = allow_most() - OWN_DESCRIPTORS
    number = int(max(1, min(limits.connections, room)))
    per_address = min(limits.connections_per_address, max(1, number // 2))
    return replace(limits, connections=number, connections_per_address=per_address)


def connection_class(limits: ServerLimits) -> type[asyncio.Protocol]:
    """uvicorn's connection with limits that uvicorn leaves to a proxy.

    Headers must be complete within `header_s`. TCP_USER_TIMEOUT drops a peer that acknowledges nothing, or
    keeps its window closed, for `unread_s`.
    """
    num_open: Counter[str] = Counter()

    class Connection(HttpToolsProtocol):
        _header_timer: asyncio.TimerHandle | None = None
        _header_bytes = 0
        """Received since the end of the last request."""
        _address = ""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            peer = transport.get_extra_info("peername")
            self._address = str(peer[0]) if isinstance(peer, tuple) else ""
            num_open[self._address] += 1
            are_too_many = len(self.connections) > limits.connections + ANSWERED_BEYOND
            if are_too_many or num_open[self._address] > limits.connections_per_address:
                transport.abort()
                return
            own = transport.get_extra_info("socket")
            if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.unread_s * 1000))
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            self._header_bytes += len(data)
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                return
            if self._header_bytes > MAX_HEADER_BYTES:
                self._close()
            elif self._header_timer is None and not self.transport.is_closing():
                self._await_headers()

        def on_headers_complete(self) -> None:
            self._forget_timer()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._header_bytes = 0
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_timer()
            num_open[self._address] -= 1
            if not num_open[self._address]:
                del num_open[self._address]
            super().connection_lost(exc)

        def _await_headers(self) -> None:
            self._header_timer = self.loop.call_later(limits.header_s, self._close)

        def _forget_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _close(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                self.transport.abort()

    return Connection
