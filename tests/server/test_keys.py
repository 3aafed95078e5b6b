"""A server with a key, and with little room."""

from __future__ import annotations

import contextlib
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from serving import fake_server

from gfgen.errors import InputError
from gfgen.server.http.guard import Access, ApiKeys
from gfgen.server.protocol.limits import NamedKey, read_keys

KEY = "a key of 20 letters."
SLOW = {"prompt": "slowly", "flow_shift": 0.05, "num_inference_steps": 1000}


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    running = fake_server(tmp_path_factory.mktemp("locked"), key=KEY, open_jobs=3, wrong_key_s=0.001)
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
    "/openapi.json",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", [None, "", "wrong", KEY + " ", KEY[:-1]])
def test_without_the_key_nobody_comes_in(stranger, path, key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}x"}
    answer = stranger.get(path, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_the_key_may_come_as_clients_of_azure_send_it(stranger):
    for headers in ({"api-key": KEY}, {"api-key": KEY, "Authorization": "Bearer of the gateway"}):
        assert stranger.get("/v1/models", headers=headers).status_code == 200
    assert stranger.get("/v1/models", headers={"api-key": "wrong"}).status_code == 401


def test_with_the_key_everything_is_open_and_probes_always(locked, stranger):
    assert all(locked.http.get(path).status_code == 200 for path in PATHS)
    assert [stranger.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


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
    many = b'{"prompt": "x", "steps": 1}\n' * 4
    refused = locked.http.post("/v1/batches", content=many, headers=headers)
    assert refused.status_code == 400
    assert "line 4: a file has at most 3 jobs; split it here" in refused.json()["error"]["message"]
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


# Several keys ---------------------------------------------------------------------------------------

ANN, BOB = "key-of-ann", "key-of-bob"
QUICK = {"prompt": "a fox", "steps": 1}
JSONL = {"Content-Type": "application/jsonl"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    keys = f"ann:{ANN},bob:{BOB}"
    running = fake_server(
        tmp_path_factory.mktemp("shared"), key=KEY, keys=keys, open_jobs=8, wrong_key_s=0.001
    )
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture
def clients(shared):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                httpx.Client(base_url=shared.url, headers={"Authorization": f"Bearer {key}"}, timeout=30)
            )
            for key in (ANN, BOB)
        ]


def test_each_key_sees_its_own_jobs_files_and_batches_and_the_admin_all(shared, clients):
    ann, bob = clients
    job = ann.post("/v1/jobs", json=QUICK, headers={"Idempotency-Key": "same"}).json()
    batch = ann.post("/v1/batches", content=b'{"prompt": "x", "steps": 1}', headers=JSONL).json()
    file = ann.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"}).json()
    shared.wait_for(job["id"])
    paths = [
        f"/v1/jobs/{job['id']}",
        f"/v1/jobs/{job['id']}/content",
        f"/v1/jobs/{job['id']}/events",
        f"/v1/batches/{batch['id']}",
        f"/v1/batches/{batch['id']}/manifest",
        f"/v1/files/{file['id']}",
        f"/v1/files/{file['id']}/content",
    ]
    for path in paths:
        assert [client.get(path).status_code for client in (ann, shared.http, bob)] == [200, 200, 404], path
    for path in ("/v1/jobs", "/v1/batches", "/v1/files"):
        seen = [len(client.get(path).json()["data"]) for client in (ann, shared.http, bob)]
        assert seen == [2 if path == "/v1/jobs" else 1] * 2 + [0], path
    for path in (f"/v1/jobs/{job['id']}/cancel", f"/v1/batches/{batch['id']}/cancel"):
        assert bob.post(path).status_code == 404
    for path in (f"/v1/jobs/{job['id']}", f"/v1/files/{file['id']}"):
        assert bob.delete(path).status_code == 404
    assert bob.get("/v1/jobs", params={"after": job["id"]}).status_code == 400
    other = bob.post("/v1/jobs", json=QUICK, headers={"Idempotency-Key": "same"}).json()
    assert other["id"] != job["id"]
    assert (other["owner"], shared.job(job["id"])["owner"]) == ("bob", "ann")


def test_the_live_state_has_the_jobs_of_the_key_alone(shared, clients):
    ann, bob = clients
    ids = {client: client.post("/v1/videos", json=SLOW).json()["id"] for client in clients}
    for job_id in ids.values():
        shared.wait_for(job_id, "in_progress")
    for client, other in ((ann, bob), (bob, ann)):
        text = client.get("/v1/state").text
        assert ids[client] in text
        assert ids[other] not in text
    everything = shared.http.get("/v1/state").json()
    assert {bar["job_id"] for bar in everything["timeline"]} >= set(ids.values())
    with bob.stream("GET", "/v1/state/events") as stream:
        first = next(line for line in stream.iter_lines() if line.startswith("data"))
    assert ids[ann] not in first
    for client in clients:
        client.delete(f"/v1/videos/{ids[client]}")


def test_a_key_leaves_room_for_the_jobs_of_others(shared, clients):
    ann, bob = clients
    statuses = [ann.post("/v1/videos", json=SLOW).status_code for _ in range(5)]
    assert statuses == [200, 200, 200, 200, 429]
    assert [bob.post("/v1/videos", json=SLOW).status_code for _ in range(3)] == [200, 200, 429]
    for client in clients:
        for job in client.get("/v1/jobs", params={"ended": False}).json()["data"]:
            client.delete(f"/v1/jobs/{job['id']}")


def test_only_the_admin_changes_the_policy_and_reads_metrics_which_count_each_key(shared, clients):
    ann, _ = clients
    assert ann.post("/v1/policy", json={"policy": "edf"}).status_code == 403
    assert ann.get("/metrics").status_code == 403
    assert ann.get("/v1/policy").status_code == 200
    job = ann.post("/v1/jobs", json=QUICK | {"steps": 5, "flow_shift": 0.02}).json()
    ended = shared.wait_for(job["id"])
    assert ended["rank_s"] >= 0.1
    assert ended["peak_memory_mb"] is None
    metrics = shared.http.get("/metrics").text
    (used,) = (line for line in metrics.splitlines() if 'rank_seconds_total{owner="ann"}' in line)
    assert float(used.split()[1]) >= ended["rank_s"] - 0.001
    assert "gfgen_gpu_memory_peak_bytes{" not in metrics


def test_a_signed_link_opens_for_a_while(shared, clients, stranger):
    values = {"prompt": "a fox", "response_format": "url", "num_inference_steps": 1}
    (image,) = clients[0].post("/v1/images/generations", json=values).json()["data"]
    assert stranger.get(image["url"]).status_code == 200
    later = stranger.get(image["url"].replace("signature=", "signature=9"))
    assert later.status_code == 401
    assert "link has expired" in later.json()["error"]["message"]
    now = 1000.0
    keys = ApiKeys(None, {"ann": NamedKey(ANN)}, link_s=60.0, now=lambda: now)
    signature = keys.signature(Access("ann"), "a")
    assert keys.by_signature(signature, "a") == Access("ann")
    assert keys.by_signature(signature, "b") is None
    now = 1061.0
    assert keys.by_signature(signature, "a") is None


def test_wrong_keys_are_logged(shared):
    answer = shared.http.get("/v1/jobs", headers={"Authorization": "Bearer guess"})
    assert answer.status_code == 401
    assert "wrong API key from 127.0.0.1" in shared.log


def test_two_host_headers_are_refused(shared):
    with socket.create_connection(("127.0.0.1", shared.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 400")


def test_a_key_file_has_a_name_and_a_key_on_each_line(tmp_path):
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    lines = (
        "ann 12345678",
        "",
        "bob  87654321 open=5  gpu-seconds=3600",
        "prometheus 11223344 metrics-only",
        "",
    )
    path.write_text("\n".join(("# of the team", *lines)))
    assert read_keys(path) == {
        "ann": NamedKey("12345678"),
        "bob": NamedKey("87654321", open_jobs=5, gpu_s_per_day=3600),
        "prometheus": NamedKey("11223344", only_metrics=True),
    }
    assert "12345678" not in repr(read_keys(path))
    for content, words in [
        ("ann", "line 1: give a name"),
        ("a/b 12345678", "line 1: give a name"),
        ("ann short", "line 1: give at least 8"),
        ("ann 12345678\nann 87654321", "line 2: its name or key is also"),
        ("ann 12345678\nbob 12345678", "line 2: its name or key is also"),
        ("# none", "has no keys"),
        ("ann 12345678 of the team", "line 1: behind the key, which has no spaces, open=JOBS"),
        ("ann 12345678 open=many", "line 1: behind the key, which has no spaces, open=JOBS"),
    ]:
        path.write_text(content)
        with pytest.raises(InputError, match=words) as error:
            read_keys(path)
        assert "12345678" not in str(error.value)


# Limits of keys -------------------------------------------------------------------------------------


def limited_server(folder):
    keys = f"ann:{ANN}:open=2,bob:{BOB}:gpu_s=1,prometheus:key-of-prometheus:metrics"
    return fake_server(folder, key=KEY, keys=keys).wait_ready()


def client_of(server, key):
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def refusal(answer):
    assert answer.status_code == 429
    return answer.json()["error"], int(answer.headers["retry-after"])


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    running = limited_server(tmp_path_factory.mktemp("limited"))
    try:
        yield running
    finally:
        running.stop()


def test_a_key_for_metrics_reads_nothing_else(limited):
    with client_of(limited, "key-of-prometheus") as prometheus:
        assert 'gfgen_build_info{commit="c0ffee",version="1"} 1.0' in prometheus.get("/metrics").text
        for path in ("/v1/jobs", "/v1/models", "/v1/state", "/version", "/openapi.json"):
            answer = prometheus.get(path)
            assert (answer.status_code, answer.json()["error"]["message"]) == (
                403,
                "this key reads only /metrics",
            )
        assert prometheus.post("/v1/videos", json=SLOW).status_code == 403


def test_the_version_is_answered_as_vllm_does(limited):
    assert limited.http.get("/version").json() == {"version": "1"}


def test_a_key_has_at_most_its_number_of_open_jobs(limited):
    with client_of(limited, ANN) as ann:
        assert [ann.post("/v1/videos", json=SLOW).status_code for _ in range(2)] == [200, 200]
        error, retry_s = refusal(ann.post("/v1/videos", json=SLOW))
        assert (error["message"], retry_s >= 1) == (
            "2 of 2 jobs of this key are open; retry when some have ended",
            True,
        )
        three = b'{"prompt": "x", "steps": 1}\n' * 3
        assert ann.post("/v1/batches", content=three, headers=JSONL).status_code == 413
        for job in ann.get("/v1/jobs", params={"ended": False}).json()["data"]:
            ann.delete(f"/v1/jobs/{job['id']}")
        assert ann.post("/v1/jobs", json=QUICK).status_code == 200


def test_a_key_has_its_gpu_seconds_of_a_day_also_after_a_restart_and_without_its_jobs(tmp_path):
    running = limited_server(tmp_path)
    try:
        with client_of(running, BOB) as bob:
            job = bob.post("/v1/jobs", json=QUICK | {"steps": 6, "flow_shift": 0.25}).json()
            running.wait_for(job["id"])
            error, retry_s = refusal(bob.post("/v1/jobs", json=QUICK))
            assert error["code"] == "quota_exceeded"
            assert "of 1 GPU-seconds of this day; go on at 00:00 UTC" in error["message"]
            assert 1 <= retry_s <= 86400
            assert bob.delete(f"/v1/jobs/{job['id']}").json()["deleted"]
        assert running.http.post("/v1/jobs", json=QUICK).status_code == 200, "others go on"
        running.stop()
        running = limited_server(tmp_path)
        with client_of(running, BOB) as bob:
            refusal(bob.post("/v1/jobs", json=QUICK))
    finally:
        running.stop()
