"""Who may ask, and how much: in front of every path.

the key         `Authorization: Bearer KEY`, compared in constant time; or the cookie of POST /v1/session
other sites     a page of another site may not make this browser ask (Origin, Sec-Fetch-Site); and while
                only this machine can connect and there is no key, only its own names lead here (Host)
bodies          their size, and the time in which they have to come
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gfgen.server.protocol.limits import ServerLimits
from gfgen.server.protocol.problems import ApiError

COOKIE = "gfgen_session"
_OPEN_PATHS = ("/", "/health", "/v1/session", "/favicon.ico")
_OPEN_PREFIXES = ("/page/",)
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; frame-ancestors 'none'; "
        b"base-uri 'none'; form-action 'self'",
    ),
]


class ApiKeys:
    """The one key of a server, if it has one."""

    def __init__(self, api_key: str | None) -> None:
        self._key = None if api_key is None else api_key.encode()

    @property
    def is_needed(self) -> bool:
        return self._key is not None

    def is_right(self, given: str) -> bool:
        """Whether this is the key; takes as long for any wrong one."""
        if self._key is None:
            return True
        return hmac.compare_digest(_digest(given.encode("utf-8", "replace")), _digest(self._key))

    @property
    def cookie(self) -> str:
        """What the page's browser keeps in place of the key."""
        return self._signed(b"session")

    def is_cookie(self, given: str) -> bool:
        return self._key is not None and hmac.compare_digest(given.encode(), self.cookie.encode())

    def signature(self, job_id: str) -> str | None:
        """What lets somebody without the key have one job's file; None when no key is needed."""
        return None if self._key is None else self._signed(b"content " + job_id.encode())

    def is_signature(self, given: str, job_id: str) -> bool:
        expected = self.signature(job_id)
        return expected is not None and hmac.compare_digest(given.encode(), expected.encode())

    def _signed(self, what: bytes) -> str:
        assert self._key is not None
        return hmac.new(self._key, b"gfgen " + what, hashlib.sha256).hexdigest()


class RequestGuard:
    """ASGI middleware: refuses what may not ask, and bounds what is sent."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, limits: ServerLimits, is_loopback: bool) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._checks_host = is_loopback and not keys.is_needed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check(scope, headers)
            body = _BoundedBody(receive, headers, self._limits)
        except ApiError as error:
            await error.response()(scope, receive, _Secured(send))
            return
        sending = _Secured(send)
        try:
            await self._app(scope, body, sending)
        except asyncio.CancelledError:  # by a server that stops and has waited long enough
            if sending.has_begun:
                raise
            stopping = ApiError(503, "the server is stopping", code="not_ready", retry_after_s=10)
            await stopping.response()(scope, receive, sending)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._checks_host and not _is_of_this_machine(host):
            raise ApiError(403, f"{host[:80]!r} is no name of this machine; ask for localhost, or use a key")
        if scope["method"] not in _SAFE_METHODS and _is_of_another_site(headers, host):
            raise ApiError(403, "a page of another site may not ask for this")
        path = scope["path"]
        if not self._keys.is_needed or path in _OPEN_PATHS or path.startswith(_OPEN_PREFIXES):
            return
        if not (self._has_key(headers) or self._has_signature(scope)):
            raise ApiError(
                401,
                "the key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _has_key(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._keys.is_right(key.strip()):
            return True
        return self._keys.is_cookie(_cookie(headers))

    def _has_signature(self, scope: Scope) -> bool:
        """/v1/jobs/ID/content?signature=..."""
        parts = scope["path"].split("/")
        if (
            scope["method"] not in _SAFE_METHODS
            or parts[:3] != ["", "v1", "jobs"]
            or parts[4:] != ["content"]
        ):
            return False
        for pair in scope.get("query_string", b"").split(b"&"):
            name, _, value = pair.partition(b"=")
            if name == b"signature":
                return self._keys.is_signature(value.decode("ascii", "replace"), parts[3])
        return False


class _BoundedBody:
    """What the app receives of a request; ends it when it is too large or takes too long."""

    def __init__(self, receive: Receive, headers: Headers, limits: ServerLimits) -> None:
        self._receive = receive
        self._left = limits.body_bytes
        self._limits = limits
        self._is_complete = False
        self._deadline_s: float | None = None
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > limits.body_bytes:
            raise _too_large(limits)

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        loop = asyncio.get_running_loop()
        self._deadline_s = self._deadline_s or loop.time() + self._limits.body_s
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, f"the request was not complete after {self._limits.body_s:g} s", code="too_slow"
            ) from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _too_large(self._limits)
        self._is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message


def _too_large(limits: ServerLimits) -> ApiError:
    return ApiError(
        413, f"a request has at most {limits.body_bytes:,} bytes", headers={"Connection": "close"}
    )


class _Secured:
    """Sends an answer with the headers that every answer has."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            message["headers"] = [*message.get("headers", ()), *_SECURITY]
        await self._send(message)


def _is_of_this_machine(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:  # a name, which may begin with 127. too
        return False


def _is_of_another_site(headers: Headers, host: str) -> bool:
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != host


def _cookie(headers: Headers) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
