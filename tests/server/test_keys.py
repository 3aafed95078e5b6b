"""A server with a key, and with little room."""

from __future__ import annotations

import contextlib
import time
from urllib.parse import urlsplit

import httpx
import pytest
from serving import fake_server

KEY = "a key of 20 letters."
SLOW = {"prompt": "slowly", "flow_shift": 0.05, "num_inference_steps": 1000}


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    running = fake_server(tmp_path_factory.mktemp("locked"), key=KEY, open_jobs=3)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture
def stranger(locked):
    """A client without the key."""
    with httpx.Client(base_url=locked.url) as client:
        yield client


PATHS = [
    "/v1/videos",
    "/v1/jobs",
    "/v1/models",
    "/v1/state",
    "/v1/policy",
    "/metrics",
    "/ready",
    "/openapi.json",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", [None, "", "wrong", KEY + " ", KEY[:-1]])
def test_without_the_key_nobody_comes_in(stranger, path, key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}x"}
    answer = stranger.get(path, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_with_the_key_everything_is_open_and_health_always(locked, stranger):
    assert all(locked.http.get(path).status_code == 200 for path in PATHS)
    assert stranger.get("/health").status_code == 200


def test_the_page_exchanges_the_key_for_a_cookie(stranger):
    assert stranger.post("/v1/session", json={"api_key": "wrong"}).status_code == 401
    answer = stranger.post("/v1/session", json={"api_key": KEY})
    assert answer.status_code == 204
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert KEY not in cookie
    assert stranger.get("/v1/state").status_code == 200
    stranger.cookies.set("gfgen_session", "0" * 64, domain="127.0.0.1")
    stranger.cookies.clear()
    assert stranger.get("/v1/state", headers={"Cookie": "gfgen_session=" + "0" * 64}).status_code == 401


def test_the_address_of_a_picture_opens_it_alone(locked, stranger):
    values = {"prompt": "a fox", "response_format": "url", "num_inference_steps": 1, "n": 2}
    one, other = locked.post("/v1/images/generations", **values).json()["data"]
    assert stranger.get(one["url"]).status_code == 200
    query = urlsplit(one["url"]).query
    assert "signature=" in query
    assert stranger.get(f"/v1/jobs/{other['id']}/content?{query}").status_code == 401
    assert stranger.get(f"/v1/jobs/{one['id']}?{query}").status_code == 401
    assert stranger.delete(f"/v1/jobs/{one['id']}?{query}").status_code == 401


def test_what_does_not_fit_is_refused_until_something_ends(locked):
    ids = [locked.post("/v1/videos", **SLOW).json()["id"] for _ in range(3)]
    full = locked.post("/v1/videos", **SLOW)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
    assert full.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(full.headers["retry-after"]) <= 60
    picture = locked.post("/v1/images/generations", prompt="x", n=4)
    assert picture.status_code == 413
    headers = {"Content-Type": "application/jsonl"}
    lines = b'{"prompt": "x", "steps": 1}\n' * 3
    assert locked.http.post("/v1/batches", content=lines, headers=headers).status_code == 429
    assert locked.http.get("/v1/jobs").json()["data"][0]["id"] == ids[-1], (
        "something of a refused request is left"
    )
    many = b"# four lines that are no jobs, which nobody looks at\n" + b"nonsense\n" * 4
    refused = locked.http.post("/v1/batches?skip_invalid=true", content=many, headers=headers)
    assert refused.status_code == 413
    assert "4 jobs; 3 may be open at once: split it" in refused.json()["error"]["message"]
    upload = {
        "data": {"prompt": "x"},
        "files": {"input_reference": ("x.png", b"no picture, and never looked at")},
    }
    assert locked.http.post("/v1/videos", **upload).status_code == 429
    assert list((locked.folder / "out/.inputs").iterdir()) == []
    for job_id in ids:
        locked.http.delete(f"/v1/videos/{job_id}")
    assert locked.http.post("/v1/batches", content=lines, headers=headers).status_code == 200
    deadline_s = time.monotonic() + 10
    while locked.http.get("/v1/state").json()["num_open"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_host_name_is_not_asked_for_where_there_is_a_key(locked):
    with contextlib.closing(httpx.Client(base_url=locked.url)) as client:
        headers = {"Host": "gfgen.example", "Authorization": f"Bearer {KEY}"}
        assert client.get("/v1/models", headers=headers).status_code == 200
