"""docs/examples/nginx.conf and Caddyfile, with the real programs before a real server.

Only addresses, names and the certificate are others; where a program is missing, its tests are skipped.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_serving import MOVIE
from serving import ROOT, Server, fake_server, free_port

PATH = "/films"
PUBLIC = f"https://host{PATH}"


def printed(name: str) -> str:
    return (ROOT / "docs/examples" / name).read_text()


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = fake_server(tmp_path_factory.mktemp("behind"), public_url=PUBLIC, left_s=0.2)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@contextlib.contextmanager
def running(command: list[str], folder: Path, client: httpx.Client) -> Iterator[httpx.Client]:
    environment = os.environ | {
        "HOME": str(folder),
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
    }
    with (folder / "proxy.log").open("wb") as log:
        proxy = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + 30
        while True:
            assert proxy.poll() is None, (folder / "proxy.log").read_text()
            assert time.monotonic() < deadline_s, (folder / "proxy.log").read_text()
            with contextlib.suppress(httpx.TransportError):
                client.get(f"{PATH}/health")
                break
        yield client
    finally:
        client.close()
        proxy.terminate()
        proxy.wait(30)


def nginx(
    server: Server, folder: Path, *, patience: str = "65m"
) -> contextlib.AbstractContextManager[httpx.Client]:
    port, key, certificate = free_port(), folder / "host.key", folder / "host.pem"
    new = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=host"]
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *new, *names], check=True, capture_output=True)
    block = printed("nginx.conf").replace("443 ssl", f"127.0.0.1:{port} ssl").replace("/etc/ssl", str(folder))
    block = block.replace("127.0.0.1:3000", f"127.0.0.1:{server.port}")
    assert "proxy_read_timeout 65m;" in block
    block = block.replace("proxy_read_timeout 65m;", f"proxy_read_timeout {patience};")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    config = folder / "nginx.conf"
    config.write_text(
        f"{'user root; ' * (os.getuid() == 0)}daemon off; pid {folder}/pid; error_log stderr;\n"
        f"events {{}}\nhttp {{ access_log off;\n{paths}{block}}}\n"
    )
    client = httpx.Client(
        base_url=f"https://localhost:{port}",
        verify=ssl.create_default_context(cafile=certificate),
        timeout=30,
    )
    return running(["nginx", "-p", str(folder), "-c", str(config)], folder, client)


def caddy(server: Server, folder: Path) -> contextlib.AbstractContextManager[httpx.Client]:
    port, config = free_port(), folder / "Caddyfile"
    block = printed("Caddyfile").replace("{\n", "{\n    admin off\n", 1)
    block = re.sub("^host {", f"http://localhost:{port} {{", block, flags=re.MULTILINE)
    config.write_text(block.replace("127.0.0.1:3000", f"127.0.0.1:{server.port}"))
    client = httpx.Client(base_url=f"http://localhost:{port}", timeout=30)
    return running(["caddy", "run", "--config", str(config), "--adapter", "caddyfile"], folder, client)


PROXIES = {"nginx": nginx, "caddy": caddy}


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request, behind, tmp_path_factory) -> Iterator[httpx.Client]:
    needed = {"nginx": ("nginx", "openssl"), "caddy": ("caddy",)}[request.param]
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    with PROXIES[request.param](behind, tmp_path_factory.mktemp(request.param)) as client:
        yield client


def test_pages_requests_and_files_pass_the_printed_block(proxy):
    assert proxy.get(f"{PATH}/").status_code == 200
    assert proxy.head(f"{PATH}/ready").status_code == 200
    values = {"prompt": "a fox", "num_inference_steps": 1}
    (image,) = proxy.post(f"{PATH}/v1/images/generations", json=values | {"response_format": "url"}).json()[
        "data"
    ]
    assert image["url"].startswith(f"{PUBLIC}/v1/jobs/image_")
    assert proxy.get(image["url"].removeprefix("https://host")).status_code == 200
    video = proxy.post(f"{PATH}/v1/videos/sync", json=values)
    part = proxy.get(f"{PATH}/v1/jobs/{video.headers['x-job-id']}/content", headers={"Range": "bytes=0-9"})
    assert (video.content, part.status_code, part.content) == (MOVIE, 206, MOVIE[:10])


def test_a_file_that_is_larger_than_the_programs_own_limit_passes(proxy):
    content = b"#" * 3_000_000
    sent = proxy.post(f"{PATH}/v1/files", data={"purpose": "batch"}, files={"file": ("x.jsonl", content)})
    assert (sent.status_code, sent.json()["bytes"]) == (200, len(content))


def test_a_stream_of_events_comes_while_it_goes_on(proxy):
    with proxy.stream("GET", f"{PATH}/v1/state/events") as answer:
        assert next(answer.iter_lines()).startswith(("retry:", "event: state"))


def test_a_waiting_request_that_a_proxy_gives_up_can_be_joined_with_its_key(proxy, behind):
    values = {"prompt": f"from {proxy.base_url}", "flow_shift": 0.02, "num_inference_steps": 40}
    key = {"Idempotency-Key": str(proxy.base_url)}
    with pytest.raises(httpx.ReadTimeout):
        proxy.post(f"{PATH}/v1/videos/sync", json=values, headers=key, timeout=0.3)
    again = proxy.post(f"{PATH}/v1/videos/sync", json=values, headers=key)
    assert again.content == MOVIE
    slow = {"prompt": f"left at {proxy.base_url}", "flow_shift": 0.05, "num_inference_steps": 1000}
    with pytest.raises(httpx.ReadTimeout):
        proxy.post(f"{PATH}/v1/videos/sync", json=slow, timeout=0.5)
    (job,) = (job for job in behind.http.get("/v1/jobs").json()["data"] if job["prompt"] == slow["prompt"])
    assert behind.wait_for(job["id"])["status"] == "cancelled"


@pytest.mark.skipif(not (shutil.which("nginx") and shutil.which("openssl")), reason="needs nginx and openssl")
def test_after_a_504_of_an_impatient_proxy_a_retry_gets_the_result(behind, tmp_path):
    """Retries of clients and of proxies come with the same key."""
    values = {"prompt": "worth waiting for", "flow_shift": 0.05, "num_inference_steps": 50}
    with nginx(behind, tmp_path, patience="1s") as client:
        statuses = []
        while statuses[-1:] != [200]:
            answer = client.post(f"{PATH}/v1/videos/sync", json=values, headers={"Idempotency-Key": "504"})
            statuses.append(answer.status_code)
            assert set(statuses) <= {200, 504}, answer.text
    assert (statuses[0], answer.content) == (504, MOVIE)
    jobs = behind.http.get("/v1/jobs").json()["data"]
    assert sum(job["prompt"] == values["prompt"] for job in jobs) == 1
