"""Who sends a request: API keys, the cookie and the links that are signed with them, and wrong keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.types import Scope

logger = logging.getLogger(__name__)

_ACCESS = "gfgen.access"
MAX_ADDRESSES = 1024
"""Addresses whose wrong keys are counted; the one that was silent for longest is forgotten first."""
FORGOTTEN_S = 60.0
"""An address without a wrong key for this long begins again."""
FIRST_DELAY_S = 0.05
"""Of the response to an address's first wrong key. Each further one doubles it."""


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
    """The admin key and the named keys, if there are any; `now` returns Unix time."""

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
        """What this key gives access to; None if it is wrong."""
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


class WrongKeys:
    """Slows down addresses that send wrong keys, and logs them.

    A right key is never delayed: many clients may share the address of a proxy.
    """

    def __init__(self, *, longest_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._longest_s, self._now = longest_s, now
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """By address: how many wrong keys in a row, and when the last one came."""

    def note(self, address: str) -> float:
        """Count a wrong key; returns how long its response is to wait."""
        now_s = self._now()
        number, last_s = self._seen.pop(address, (0, now_s))
        number = 1 if now_s - last_s > FORGOTTEN_S else number + 1
        self._seen[address] = (number, now_s)
        while len(self._seen) > MAX_ADDRESSES:
            self._seen.popitem(last=False)
        if number & (number - 1) == 0:  # 1, 2, 4, 8: a flood of wrong keys is no flood of lines
            logger.warning("wrong API key from %s (%d in a row)", address, number)
        return float(min(self._longest_s, FIRST_DELAY_S * 2.0 ** min(number - 1, 30)))

    async def slow_down(self, scope: Scope) -> None:
        """Wait before the response to a wrong key."""
        client = scope.get("client")
        await asyncio.sleep(self.note(str(client[0]) if client else "unknown"))


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
