"""Sends jobs that have ended to webhooks.

Requests are signed and shaped as Standard Webhooks asks, so its libraries verify them. Everything runs in the
front's event loop: a slow receiver delays no rank and no response.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gfgen.errors import in_one_line
from gfgen.server.protocol.limits import ApiOptions
from gfgen.server.protocol.problems import ApiError
from gfgen.server.shown.served_job import ServedJob
from gfgen.system.wording import counted, named

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

ATTEMPT_S = 10.0
"""Time limit of one attempt, from its connection to the status of the response."""
PAUSES_S = (2.0, 15.0, 60.0)
"""Before the second, third and fourth attempt."""
MAX_AT_ONCE = 16
MAX_PENDING = 10_000
_PREFIX = "whsec_"
_PORTS = {"http": 80, "https": 443}


class Webhooks:
    def __init__(self, options: ApiOptions, *, client: httpx.AsyncClient | None = None) -> None:
        self._url = options.webhook_url
        self._secret = secret_bytes(options.webhook_secret or "") or b""
        self._client = client
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._pending: dict[asyncio.Task[None], str] = {}

    def send(self, record: ServedJob) -> None:
        """Send a job that has ended to the server's webhook and its own, if there are any."""
        if not self._secret:
            return
        urls = dict.fromkeys(url for url in (self._url, record.facts.webhook) if url)
        body = _body(record) if urls else b""
        for url in urls:
            if len(self._pending) >= MAX_PENDING:
                logger.error("webhook of job %s: not sent, because too many others wait", record.facts.id)
                continue
            task = asyncio.create_task(self._deliver(url, record.facts.id, body))
            self._pending[task] = record.facts.id
            task.add_done_callback(self._pending.pop)

    async def close(self, *, patience_s: float) -> None:
        """Wait for deliveries under way, then give up the others and name them."""
        if self._pending:
            await asyncio.wait(self._pending, timeout=patience_s)
        if lost := list(self._pending.values()):
            shown = named(lost, "job")
            logger.error("the server ends before the webhooks of %s: %s", counted(len(lost), "job"), shown)
        given_up = list(self._pending)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _deliver(self, url: str, job_id: str, body: bytes) -> None:
        receiver = urlsplit(url).hostname  # the rest of a URL may be a secret
        for number, pause_s in enumerate((*PAUSES_S, None), start=1):
            async with self._at_once:
                problem = await self._attempt(url, job_id, body)
            if problem is None:
                return
            if pause_s is None:
                logger.error("webhook of job %s to %s: given up (%s)", job_id, receiver, problem)
                return
            logger.warning(
                "webhook of job %s to %s: attempt %d failed (%s)", job_id, receiver, number, problem
            )
            await asyncio.sleep(pause_s)

    async def _attempt(self, url: str, job_id: str, body: bytes) -> str | None:
        """POST once; what went wrong, or None. Redirects count as failures and are not followed."""
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(timeout=ATTEMPT_S, follow_redirects=False)
        headers = signed_headers(self._secret, f"msg_{job_id}", body, at=int(time.time()))
        try:
            async with (
                asyncio.timeout(ATTEMPT_S),
                self._client.stream("POST", url, content=body, headers=headers) as response,
            ):
                status = response.status_code
        except TimeoutError:
            return f"no response in {ATTEMPT_S:.0f} s"
        except Exception as error:  # of httpx, its connections, or names that cannot be encoded
            return in_one_line(error)
        if 300 <= status < 400:
            return f"status {status}, a redirect, which is not followed"
        return None if status < 300 else f"status {status}"


def check_webhook(url: str, hosts: Collection[str]) -> None:
    """`hosts` are as in --webhook-host: a host alone stands for the usual ports."""
    try:
        found = urlsplit(url)
        host = f"[{found.hostname}]" if ":" in (found.hostname or "") else found.hostname
        port = found.port or _PORTS.get(found.scheme)
        is_allowed = url.isascii() and "\\" not in url and found.scheme in _PORTS and found.username is None
        is_listed = f"{host}:{port}" in hosts or (host in hosts and port in _PORTS.values())
    except ValueError:  # a port that is no number, half an IPv6 address
        is_allowed = is_listed = False
    if not (is_allowed and is_listed):
        allowed = ", ".join(sorted(hosts)) or "none; see gfgen serve --webhook-host"
        reason = f"webhook: this host is not allowed; allowed: {allowed}"
        raise ApiError(400, reason, param="webhook", code="webhook_not_allowed")


def secret_bytes(text: str) -> bytes | None:
    """The key in a secret like whsec_BASE64, of 24 to 64 bytes; None for another text."""
    try:
        key = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if text.startswith(_PREFIX) and 24 <= len(key) <= 64 else None


def signed_headers(secret: bytes, message_id: str, body: bytes, *, at: int) -> dict[str, str]:
    """The headers of a request. All attempts of a message have the same id."""
    digest = hmac.digest(secret, b"%s.%d.%s" % (message_id.encode(), at, body), hashlib.sha256)
    return {
        "content-type": "application/json",
        "user-agent": "gfgen",
        "webhook-id": message_id,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def _body(record: ServedJob) -> bytes:
    job = record.job()
    at = datetime.fromtimestamp(job.completed_at or time.time(), UTC).isoformat().replace("+00:00", "Z")
    message = {"type": f"job.{job.status}", "timestamp": at, "data": job.model_dump(mode="json")}
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
