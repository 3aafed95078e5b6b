"""Access control and body limits for every path.

API key         `Authorization: Bearer KEY`, Basic with KEY as its password, `api-key: KEY` or the page's
                cookie; wrong keys wait
request id      X-Request-ID of the client, or a new one, in every response and the access log
cross-site      requests from pages of other sites are refused (Origin, Sec-Fetch-Site); two Host headers
                are refused, because a proxy may have looked at the other one
bodies          a limit on their size; slow clients belong to a proxy
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gfgen import log
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol.limits import NamedKey, ServerLimits
from gfgen.server.protocol.problems import ApiError

logger = logging.getLogger(__name__)

COOKIE = "gfgen_session"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_OPEN_PATHS = ("/", "/health", "/ready", "/v1/session", "/favicon.ico")
_OPEN_PREFIXES = ("/page/",)
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_METHODS = (*_SAFE_METHODS, "POST", "DELETE", "PUT", "PATCH")
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


class RequestGuard:
    """ASGI middleware: refuses unauthorised requests, limits bodies, adds security headers."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, service: JobService, own_address: str | None) -> None:
        api, limits, self._metrics = service.api, service.limits, service.mirror.metrics
        self._hosts = None
        if own_address is not None:  # only names of this server, against DNS rebinding
            own = urlsplit(api.public_url or "").hostname or "localhost"
            self._hosts = (own, "localhost", "127.0.0.1", "[::1]", own_address)
        self._app = app
        self._keys = keys
        self._limits = limits
        self._has_access_log = api.access_log
        self._root_path = api.root_path
        public = urlsplit(api.public_url or "")
        self._origins = {*api.allowed_origins, f"{public.scheme}://{public.netloc}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["root_path"] = self._root_path
        path = re.sub("/+", "/", scope["path"])  # clients join http://host/ and /v1/jobs/
        scope["path"] = path if path.rstrip("/") in ("", self._root_path) else path.rstrip("/")
        headers, began_s = Headers(scope=scope), time.perf_counter()
        sending = _Secured(send, request_id=_request_id(headers), is_head=scope["method"] == "HEAD")
        try:
            await self._answer(scope, receive, headers, sending)
        finally:
            self._note(scope, sending, time.perf_counter() - began_s)

    def _note(self, scope: Scope, sending: _Secured, took_s: float) -> None:
        """Count the request, and log it if that is wanted. 499: the client left before the response."""
        status = sending.status or 499
        if scope["method"] in _METHODS:
            route = getattr(scope.get("route"), "path", "none")  # never the path itself, which clients choose
            self._metrics.answered(scope["method"], route, status, took_s)
        if self._has_access_log:
            values = {"method": scope["method"], "path": scope["path"], "status": status}
            extra = log.fields(**values, took_s=round(took_s, 4), request_id=sending.request_id)
            text = " ".join(map(str, values.values()))
            logger.info("%s in %.1f ms (%s)", text, 1e3 * took_s, sending.request_id, extra=extra)

    async def _answer(self, scope: Scope, receive: Receive, headers: Headers, sending: _Secured) -> None:
        try:
            self._check(scope, headers)
            if scope["path"] == self._root_path != "":  # to which the page's own paths are relative
                await RedirectResponse(f"{self._root_path}/")(scope, receive, sending)
                return
            scope[_ACCESS] = await self._access(scope, headers)
            body = _bounded(receive, headers, self._limits)
        except ApiError as error:
            await error.response()(scope, receive, sending)
            return
        try:
            await self._app(scope, body, sending)
        except asyncio.CancelledError:  # the server stops and its grace period is over
            if sending.status is not None:
                raise
            stopping = ApiError(503, "the server is stopping", code="not_ready", retry_after_s=10)
            await stopping.response()(scope, receive, sending)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if len(hosts := headers.getlist("host")) > 1:
            raise ApiError(400, f"{len(hosts)} Host headers; send one", headers={"Connection": "close"})
        host = headers.get("host", "")
        name = re.sub(r":\d*$", "", host).lower()
        is_own = self._hosts is None or name in self._hosts or name.endswith(".localhost")
        if hosts and not is_own:  # health checks by HTTP/1.0 name none; pages do
            raise ApiError(400, f"Host {host[:80]}: not this server; name it by --public-url, or set a key")
        if (coding := headers.get("content-encoding", "")).lower() not in ("", "identity", "utf-8"):
            raise ApiError(400, f"Content-Encoding {coding[:80]}: send the body as it is")
        if scope["method"] not in _SAFE_METHODS and self._is_of_another_site(headers, host):
            raise ApiError(403, "requests from pages of other sites are refused, but for --allow-origin")

    async def _access(self, scope: Scope, headers: Headers) -> Access:
        """What the request may see. Raises: ApiError after a while if its key is wrong."""
        path = self._path(scope)
        if not self._keys.is_needed or path in _OPEN_PATHS or path.startswith(_OPEN_PREFIXES):
            return Access()
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = [_given_key(kind.lower(), key.strip()), headers.get("api-key", "").strip()]
        found = next(filter(None, map(self._keys.by_key, filter(None, given))), None)
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        found = found or self._keys.by_cookie(cookie) or self._by_signature(scope)
        if found is not None and found.only_metrics and path != "/metrics":
            raise ApiError(403, "this key reads only /metrics")
        if found is not None:
            return found
        if any(given):
            await slow_down(scope, self._limits.wrong_key_s)
        raise ApiError(
            401,
            "the key is missing or wrong, or the link has expired: send a key as 'Authorization: Bearer KEY'",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _path(self, scope: Scope) -> str:
        """The path without the prefix, which a proxy may or may not have removed."""
        path: str = scope["path"]
        rest = path.removeprefix(self._root_path)
        return rest if rest.startswith("/") else path

    def _is_of_another_site(self, headers: Headers, host: str) -> bool:
        """Browsers set Sec-Fetch-Site and pages cannot; it is right even if a proxy changes the host."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and not self._origins.isdisjoint((origin, "*")):
            return False
        if site is not None:
            return site in ("cross-site", "same-site")
        return origin is not None and origin.partition("://")[2] != host

    def _by_signature(self, scope: Scope) -> Access | None:
        """/v1/jobs/ID/content?signature=..."""
        found = re.fullmatch(r"/v1/jobs/([^/]*)/content", self._path(scope))
        if found is None or scope["method"] not in _SAFE_METHODS:
            return None
        return self._keys.by_signature(QueryParams(scope["query_string"]).get("signature", ""), found[1])


def _bounded(receive: Receive, headers: Headers, limits: ServerLimits) -> Receive:
    """Receives a body up to the limit. Raises: ApiError beyond, at once if the request says its length."""
    text = f"the request exceeds {limits.body_bytes:,} bytes"
    length, left = headers.get("content-length", "0"), limits.body_bytes
    if not (length.isascii() and length.isdigit()) or int(length[:20]) > left:
        raise ApiError(413, text, headers={"Connection": "close"})

    async def bounded() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise ApiError(413, text, headers={"Connection": "close"})
        return message

    return bounded


class _Secured:
    def __init__(self, send: Send, *, request_id: str, is_head: bool) -> None:
        self._send = send
        self._is_head = is_head
        self.request_id = request_id
        self.status: int | None = None
        """None until the response has begun."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = (b"x-request-id", self.request_id.encode())
            message["headers"] = [*message.get("headers", ()), *_SECURITY, own]
        elif self._is_head:  # ended below: a stream would never end
            return
        await self._send(message)
        if self._is_head:
            await self._send({"type": "http.response.body", "body": b""})


def _given_key(kind: str, text: str) -> str:
    """The key of an Authorization header; clients of A1111 send it as the password of Basic."""
    if kind == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(text, validate=True).decode().partition(":")[2]
    return text if kind == "bearer" else ""


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


_ACCESS = "gfgen.access"


@dataclass(frozen=True, slots=True)
class Access:
    """What a request may see: the jobs of one key, or everything with the admin key or without keys."""

    owner: str | None = None
    """The key's name; None for the admin."""
    only_metrics: bool = False

    @classmethod
    def of(cls, scope: Scope) -> Access:
        found: Access = scope.get(_ACCESS, cls())
        return found


class ApiKeys:
    def __init__(
        self,
        admin_key: str | None,
        named: Mapping[str, NamedKey] | None = None,
        *,
        link_s: float = 86400.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        keys = {} if admin_key is None else {Access(): admin_key.encode()}
        keys |= {Access(name, each.only_metrics): each.key.encode() for name, each in (named or {}).items()}
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
