"""Jobs that have ended are sent to webhooks."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
from dataclasses import replace

import httpx
import pytest
from click.testing import CliRunner

from gfgen.cli.main import cli
from gfgen.server.protocol.limits import ApiOptions
from gfgen.server.protocol.problems import ApiError
from gfgen.server.shown import webhooks
from gfgen.server.shown.served_job import ServedJob
from gfgen.server.shown.webhooks import Webhooks, check_webhook, secret_bytes, signed_headers
from gfgen.server.store import Ending, JobFacts

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
FACTS = JobFacts("video_1", "video", "shapes", "a fox", "64x64", 4, 7, 1000.0, 1000.0, "a.mp4", 7)


def ended(*, webhook: str | None = None) -> ServedJob:
    record = ServedJob(replace(FACTS, webhook=webhook))
    record.end(Ending("video_1", "completed", 1010.0, started_at=1001.0, step=4), expires_at=None)
    return record


def delivered(monkeypatch, *answers: int, record: ServedJob | None = None, **options: str):
    """The requests that a receiver got, which answers with these statuses in turn."""
    monkeypatch.setattr(webhooks, "PAUSES_S", (0.0, 0.0, 0.0))
    requests: list[httpx.Request] = []

    def receive(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        status = answers[min(len(requests), len(answers)) - 1]
        return httpx.Response(status, headers={"location": "https://elsewhere.com/"})

    async def send() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(receive))
        sender = Webhooks(ApiOptions(webhook_secret=SECRET, **options), client=client)
        sender.send(record or ended())
        await sender.close(patience_s=10.0)

    asyncio.run(send())
    return requests


def test_a_request_is_signed_as_standard_webhooks_says():
    """The example of the specification's reference libraries."""
    secret = secret_bytes("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    found = signed_headers(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', at=1614265330)
    assert found["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_both_webhooks_get_the_job_with_a_signature_over_its_body(monkeypatch):
    own = "https://b.com/x?y=1"
    requests = delivered(monkeypatch, 204, record=ended(webhook=own), webhook_url="http://a.com/h/")
    assert {str(request.url) for request in requests} == {"http://a.com/h/", own}
    headers, body = requests[0].headers, requests[0].content
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(b"0123456789abcdef01234567", signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
    message = json.loads(body)
    assert (message["type"], message["timestamp"]) == ("job.completed", "1970-01-01T00:16:50Z")
    assert (message["data"]["id"], message["data"]["status"]) == ("video_1", "completed")


def test_a_failure_is_retried_with_the_same_id_and_a_redirect_is_not_followed(monkeypatch, caplog):
    requests = delivered(monkeypatch, 500, 302, 200, webhook_url="https://a.com/token")
    assert {(request.url.host, request.headers["webhook-id"]) for request in requests} == {
        ("a.com", "msg_video_1")
    }
    assert len(requests) == 3
    assert "status 302, a redirect, which is not followed" in caplog.text


def test_a_webhook_that_stays_away_is_given_up_and_named(monkeypatch, caplog):
    with caplog.at_level(logging.ERROR):
        assert len(delivered(monkeypatch, 503, webhook_url="https://a.com/token")) == 4
    assert "webhook of job video_1 to a.com: given up (status 503)" in caplog.text
    assert "token" not in caplog.text


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("https://a.com/x", True),
        ("http://A.com:80", True),
        ("http://b.com:8080/", True),
        ("http://a.com:8080/", False),
        ("http://b.com/", False),
        ("http://a.com@evil.com/", False),
        ("http://evil.com\\@a.com/", False),
        ("http://a.com.evil.com/", False),
        ("ftp://a.com/", False),
        ("http://a.com:x/", False),
        ("http://[::1/", False),
    ],
)
def test_a_job_may_name_only_hosts_that_the_server_allows(url, is_allowed):
    hosts = ("a.com", "b.com:8080")
    if is_allowed:
        check_webhook(url, hosts)
        return
    with pytest.raises(ApiError, match=r"allowed; allowed: a\.com, b\.com:8080"):
        check_webhook(url, hosts)


def test_webhooks_need_a_secret_and_the_error_does_not_show_it():
    for given in ([], ["--webhook-secret", "whsec_short"]):
        result = CliRunner().invoke(cli, ["serve", "--webhook", "https://a.com", *given])
        assert "'echo whsec_$(openssl rand -base64 32)'" in str(result.exception)
        assert "short" not in str(result.exception)


def test_a_job_over_http_reaches_its_own_webhook(server, receiver):
    url = f"http://127.0.0.1:{receiver.port}/done"
    refused = server.post("/v1/jobs", prompt="a fox", webhook="http://127.0.0.1:1/")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "webhook")
    job = server.post("/v1/videos", prompt="a fox", webhook=url).json()
    message = receiver.messages.get(timeout=60)
    assert (message["type"], message["data"]["id"]) == ("job.completed", job["id"])
