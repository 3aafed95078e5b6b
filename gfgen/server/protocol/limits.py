"""How much of everything the server takes on; what goes beyond is refused, never queued without end."""

from __future__ import annotations

from dataclasses import dataclass

BACKLOG = 2048
"""Connections that wait in the kernel until they are accepted."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of the server; the defaults are those of `gfgen serve`."""

    open_jobs: int = 1000
    """Jobs that have not ended; beyond it 429."""
    streams: int = 256
    """Event streams that are read at the same time; beyond it 429."""
    connections: int = 2048
    """Beyond it 503, and far beyond it none; fewer where the system gives too few descriptors."""
    body_bytes: int = 64_000_000
    """Of one request, pictures included; beyond it 413."""
    json_bytes: int = 2**20
    """Of a request without its picture; beyond it 413. Job files are not meant."""
    header_s: float = 15.0
    """In which a request's headers have to be complete."""
    body_s: float = 120.0
    """In which its body has to be complete."""
    unread_s: float = 60.0
    """How long a client may leave what it was sent unread."""
    waiting_s: float = 3600.0
    """How long a request that waits for its result may take."""
    keep_s: float = 7 * 86400.0
    """How long an ended job and its file are kept."""
    retention_s: float = 30.0
    """How often it is looked for what is kept too long."""
    keep_bytes: int = 100 * 10**9
    """Of finished files; beyond it the oldest are removed."""
