"""Many clients at once, and processes that die under them: every accepted job ends once, none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from random import Random

import pytest
from crowd import Crowd, Trouble, check_outcome, meet, private_bytes, processes
from fake_serving import MOVIE
from serving import fake_server, free_port

BOUND_S = 100.0
VICTIMS = ("rank", "writer", "front", "server", "writer", "rank")


@pytest.fixture
def trouble(tmp_path):
    port = free_port()
    made = Trouble(lambda: fake_server(tmp_path, port=port, open_jobs=150))
    made.server.wait_ready()
    yield made
    made.server.stop()


def job_of(number):
    """Some of them fail."""
    values = {"steps": 1 + number % 9, "flow_shift": 0.01, "tag": "crowd"}
    return values | ({"guidance_scale": 13} if number % 25 == 3 else {})


def test_200_clients_lose_nothing_and_get_nothing_twice_whoever_dies(trouble):
    crowd = Crowd(trouble.server.url, Random(5), job_of)
    try:
        asyncio.run(asyncio.wait_for(meet(crowd, trouble, VICTIMS, pause_s=0.5), BOUND_S))
    except TimeoutError:
        waiting = {key: ids for key, ids in crowd.ids.items() if not ids & crowd.ends.keys()}
        told = f"{dict(trouble.done)}, answers {dict(crowd.num_errors)}, {len(crowd.ids)} accepted"
        pytest.fail(f"{told}, not ended: {waiting}\n{trouble.server.log[-6000:]}")
    assert trouble.done == {"rank": 2, "writer": 2, "front": 1, "server": 1}
    check_outcome(crowd, trouble, suffix=".mp4")
    files = (trouble.server.folder / "out").glob("*.mp4")
    assert all(path.read_bytes() == MOVIE for path in files)


def test_memory_is_flat_over_a_thousand_jobs(server):
    (front,) = processes(server)["front"]
    headers = {"Content-Type": "application/jsonl"}
    sizes = []
    for _ in range(4):
        lines = "".join(json.dumps({"prompt": "x" * 1000, "steps": 1}) + "\n" for _ in range(250))
        accepted = server.http.post("/v1/batches", content=lines, headers=headers).json()
        deadline_s = time.monotonic() + 60
        while server.http.get(f"/v1/batches/{accepted['id']}").json()["status"] != "completed":
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        sizes.append([private_bytes(pid) for pid in (front, server.process.pid)])
    growth = [after - before for before, after in zip(sizes[1], sizes[-1], strict=True)]
    assert max(growth) < 3 * 2**20, sizes


def test_clients_that_never_read_cost_nothing_to_the_others(server):
    """They ask for much and read nothing; what is sent to them is bounded by their sockets."""
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            end = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            end.sendall(b"GET /v1/state HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        (front,) = processes(server)["front"]
        before = private_bytes(front)
        job = server.post("/v1/videos", prompt="x", num_inference_steps=1).json()
        assert server.wait_for(job["id"])["status"] == "completed"
        assert private_bytes(front) - before < 30 * 2**20
