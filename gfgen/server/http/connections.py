"""Connections that do not hold the server: slow headers, clients that never read, and too many of them."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gfgen.server.protocol.limits import ServerLimits
from gfgen.system.descriptors import allow_most

MAX_HEADER_BYTES = 1 << 16
ACCEPTED_AT_ONCE = 16
"""Connections that one turn of the event loop accepts: some turns go by until those that are too many are
closed, and each has a descriptor meanwhile."""
OWN_DESCRIPTORS = 200
"""For all that is no connection within the bound: store, log, files that are sent, answers of 503."""
ANSWERED_BEYOND = 64
"""Connections beyond the bound that are still told so, with 503; further ones are closed as they come."""


def within_descriptors(limits: ServerLimits) -> ServerLimits:
    """The bounds with as many connections as this process may have descriptors for, once it may have all
    that the system lets it."""
    room = allow_most() - OWN_DESCRIPTORS
    return replace(limits, connections=int(max(1, min(limits.connections, room))))


def connection_class(limits: ServerLimits) -> type[asyncio.Protocol]:
    """uvicorn's connection, with bounds that uvicorn leaves to a proxy.

    A request's headers have to be complete in time. What was sent has to be read in time: the kernel drops
    a connection whose peer has acknowledged nothing, or left its window closed, for so long.
    """

    class Connection(HttpToolsProtocol):
        _header_timer: asyncio.TimerHandle | None = None
        _header_bytes = 0
        """Since the end of the last request."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections + ANSWERED_BEYOND:
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
