"""Limits of the server, beyond which it refuses requests, and options of its HTTP interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

BACKLOG = 2048
"""Connections that may wait in the kernel to be accepted."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The defaults are those of `gfgen serve`."""

    open_jobs: int = 1000
    """Beyond it: 429."""
    streams: int = 256
    """Concurrent event streams; beyond it: 429."""
    connections: int = 2048
    """Beyond it: 503. Lower if the system grants fewer descriptors."""
    body_bytes: int = 64_000_000
    """Size of one request with its picture; beyond it: 413."""
    json_bytes: int = 2**20
    """Size of one request without its picture, except for job files; beyond it: 413."""
    wrong_key_s: float = 1.0
    link_s: float = 86400.0
    waiting_s: float = 3600.0
    keep_s: float = 7 * 86400.0
    retention_s: float = 30.0
    keep_bytes: int = 100 * 10**9
    """Total size of finished files; beyond it the oldest are removed."""


@dataclass(frozen=True, slots=True)
class ApiOptions:
    strict: bool = False
    served_names: tuple[str, ...] = ()
    """Further names of models, as ALIAS=MODEL."""
    path_prefix: str = ""
    """As --root-path: the path of this server behind a proxy, "" or with a leading slash."""
    public_url: str | None = None
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = False
    webhook_url: str | None = None
    webhook_hosts: tuple[str, ...] = ()
    """HOST or HOST:PORT of webhooks that jobs may name themselves."""
    webhook_secret: str | None = field(default=None, repr=False)
    """By which requests to webhooks are signed, as whsec_BASE64."""

    @property
    def aliases(self) -> dict[str, str]:
        pairs = (name.partition("=") for name in self.served_names)
        return {alias: model for alias, _, model in pairs}

    @property
    def root_path(self) -> str:
        return self.path_prefix or urlsplit(self.public_url or "").path.rstrip("/")
