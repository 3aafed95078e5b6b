"""Who sends a request: API keys, and the cookie and the links that are signed with them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.types import Scope

logger = logging.getLogger(__name__)

_ACCESS = "gfgen.access"


@dataclass(frozen=True, slots=True)
class Access:
    """What a request may see: the jobs of one key, or everything with the admin key or without keys."""

    owner: str | None = None
    """The key's name; None for the admin."""

    def note_in(self, scope: Scope) -> None:
        scope[_ACCESS] = self

    @classmethod
    def of(cls, scope: Scope) -> Access:
        found: Access = scope.get(_ACCESS, cls())
        return found


class ApiKeys:
    def __init__(
        self,
        admin_key: str | None,
        named: Mapping[str, str] | None = None,
        *,
        link_s: float = 86400.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        keys = {} if admin_key is None else {Access(): admin_key.encode()}
        keys |= {Access(name): key.encode() for name, key in (named or {}).items()}
        self._keys = keys
        self._link_s, self._now = link_s, now
        # By their digests, so that the time of a look-up says nothing about a key.
        self._by_key = {_digest(key): access for access, key in keys.items()}
        self._by_cookie = {_digest(self.cookie(access).encode()): access for access in keys}

    @property
    def is_needed(self) -> bool:
        return bool(self._keys)

    def by_key(self, given: str) -> Access | None:
        if not self._keys:
            return Access()
        return self._by_key.get(_digest(given.encode("utf-8", "replace")))

    def cookie(self, access: Access) -> str:
        """The session cookie, which the browser keeps instead of the key."""
        return self._signed(access, "session")

    def by_cookie(self, given: str) -> Access | None:
        return self._by_cookie.get(_digest(given.encode("utf-8", "replace")))

    def signature(self, access: Access, job_id: str) -> str | None:
        """A signature that gives access to one job's file for `link_s`; None if no key is needed."""
        if not self._keys:
            return None
        expires_at = str(int(self._now() + self._link_s))
        return f"{expires_at}.{self._signed(access, f'content {job_id} {expires_at}')}"

    def by_signature(self, given: str, job_id: str) -> Access | None:
        expires_at, _, signed = given.partition(".")
        if not (expires_at.isascii() and expires_at.isdigit() and len(expires_at) < 16):
            return None
        if int(expires_at) < self._now():
            return None
        for access in self._keys:
            expected = self._signed(access, f"content {job_id} {expires_at}")
            if hmac.compare_digest(signed.encode(), expected.encode()):
                return access
        return None

    def _signed(self, access: Access, what: str) -> str:
        return hmac.new(self._keys[access], f"gfgen {what}".encode(), hashlib.sha256).hexdigest()


async def slow_down(scope: Scope, wait_s: float) -> None:
    """Log a wrong key, and wait before its response.

    A right key is never delayed: many clients may share the address of a proxy.
    """
    client = scope.get("client")
    logger.warning("wrong API key from %s", client[0] if client else "unknown")
    await asyncio.sleep(wait_s)


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
