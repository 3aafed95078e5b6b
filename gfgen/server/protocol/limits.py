"""Limits of the server, beyond which it refuses requests, and options of its HTTP interface."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from gfgen.errors import InputError

logger = logging.getLogger(__name__)


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
    left_s: float = 60.0
    """Jobs of a waiting request without a key go on this long when its client has disconnected."""
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
    a1111: bool = False
    patch_names: tuple[str, ...] = ()
    """Names of --lora."""
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


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_MIN_CHARS = 8
_GOOD = "'openssl rand -hex 24' makes a good key"


def check_key(key: str, *, where: str) -> None:
    if len(key) < _MIN_CHARS:
        raise InputError(f"{where}: give at least {_MIN_CHARS} characters; {_GOOD}")
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise InputError(
            f"{where}: give printable ASCII without spaces at its ends, since it is sent in a header; {_GOOD}"
        )


@dataclass(frozen=True, slots=True)
class NamedKey:
    """A key of the key file, and what its line allows."""

    key: str = field(repr=False)
    open_jobs: int | None = None
    gpu_s_per_day: int | None = None
    only_metrics: bool = False


_ALLOWS = re.compile(
    r"(?:\s+(?:open=(?P<open>\d{1,9})|gpu-seconds=(?P<gpu>\d{1,9})|(?P<metrics>metrics-only)))*"
)


def read_keys(path: Path) -> dict[str, NamedKey]:
    """The keys of a file by name: a line has a name, a key, and perhaps limits. Blank lines and # comments
    are skipped.

    Raises: InputError that names the first wrong line, but no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        is_open = bool(path.stat().st_mode & 0o044)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--key-file {path}: cannot be read ({error})") from None
    keys: dict[str, NamedKey] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, key, *_ = [*line.split(), "", ""]
        rest = line.strip().removeprefix(name).lstrip().removeprefix(key)
        where = f"--key-file {path}: line {number}"
        if not _NAME.fullmatch(name) or not key:
            raise InputError(f"{where}: give a name (letters, digits, . _ -) and a key, with a space between")
        check_key(key, where=where)
        if (found := _ALLOWS.fullmatch(rest)) is None:
            accepted = "open=JOBS, gpu-seconds=SECONDS (of each day) and metrics-only"
            raise InputError(f"{where}: behind the key, which has no spaces, {accepted} are accepted")
        if name in keys or key in (each.key for each in keys.values()):
            raise InputError(f"{where}: its name or key is also on an earlier line; give each key its own")
        jobs, gpu_s = (None if found[each] is None else int(found[each]) for each in ("open", "gpu"))
        keys[name] = NamedKey(key, jobs, gpu_s, only_metrics=found["metrics"] is not None)
    if not keys:
        raise InputError(f"--key-file {path}: has no keys; give a name and a key on each line")
    if is_open:
        logger.warning("--key-file %s: other users of this machine can read it; chmod 600 it", path)
    return keys
