"""Many clients at once, and processes that die under them: every accepted job ends once, none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sqlite3
import time
from collections import Counter
from pathlib import Path
from random import Random

import httpx
import pytest
from fake_serving import MOVIE
from process_tree import children_of, command_of
from serving import fake_server, free_port

NUM_CLIENTS = 200
BOUND_S = 100.0
ENDED = ("completed", "failed", "cancelled")


def processes(server):
    """The front, and the workers, of a server."""
    children = children_of(server.process.pid)
    fronts = [pid for pid in children if b"gfgen.server.http.front" in command_of(pid)]
    forkers = [pid for pid in children if b"forkserver" in command_of(pid)]
    return fronts, sorted(pid for forker in forkers for pid in children_of(forker))


class Crowd:
    """Clients that each want some jobs, and insist."""

    def __init__(self, url: str, random: Random) -> None:
        self.url = url
        self.random = random
        self.ids: dict[str, set[str]] = {}
        """By key: what was answered to it."""
        self.ends: dict[str, str] = {}
        self.num_errors: Counter[int] = Counter()

    async def come(self) -> None:
        limits = httpx.Limits(max_connections=NUM_CLIENTS, max_keepalive_connections=NUM_CLIENTS)
        client = httpx.AsyncClient(base_url=self.url, limits=limits, timeout=10.0)
        async with client, asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self.want(client, number))

    async def want(self, client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(self.random.random() * 2)
        job_id = await self.submit(client, f"of {number}", number)
        if number % 20 == 7:  # twice removes it: an answer that is lost is asked for again
            await self.insist(client, "DELETE", f"/v1/jobs/{job_id}", may_be_gone=True)
        await self.follow(client, job_id, may_be_gone=number % 20 == 7)

    async def submit(self, client: httpx.AsyncClient, key: str, number: int) -> str:
        values = {
            "prompt": f"{key} in the crowd",
            "steps": 1 + number % 9,
            "flow_shift": 0.01,
            "tag": "crowd",
        }
        values |= {"guidance_scale": 13} if number % 25 == 3 else {}
        headers = {"Idempotency-Key": key}
        answer = await self.insist(client, "POST", "/v1/jobs", json=values, headers=headers)
        job_id = answer.json()["id"]
        self.ids.setdefault(key, set()).add(job_id)
        if number % 10 == 1:  # as if the answer had been lost
            again = await self.insist(client, "POST", "/v1/jobs", json=values, headers=headers)
            self.ids[key].add(again.json()["id"])
        return job_id

    async def follow(self, client: httpx.AsyncClient, job_id: str, *, may_be_gone: bool) -> None:
        while True:
            answer = await self.insist(client, "GET", f"/v1/jobs/{job_id}", may_be_gone=may_be_gone)
            status = "gone" if answer.status_code == 404 else answer.json()["status"]
            before = self.ends.get(job_id)
            assert before in (None, status), f"{job_id} was {before}, and is {status}"
            if status in (*ENDED, "gone"):
                self.ends[job_id] = status
                return
            await asyncio.sleep(0.1 + 0.2 * self.random.random())

    async def insist(self, client: httpx.AsyncClient, method: str, path: str, *, may_be_gone=False, **values):
        """The answer, however often it has to be asked for."""
        while True:
            try:
                answer = await client.request(method, path, **values)
            except httpx.TransportError:
                self.num_errors[0] += 1
            else:
                if answer.status_code == 200 or (may_be_gone and answer.status_code == 404):
                    return answer
                self.num_errors[answer.status_code] += 1
                assert answer.status_code in (429, 503), answer.text
            await asyncio.sleep(0.2)


class Trouble:
    """Kills processes of a server while the crowd is there; starts it again where it was killed."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self.server = fake_server(folder, port=port, open_jobs=150)
        self.done: Counter[str] = Counter()

    async def make(self) -> None:
        await asyncio.sleep(0.7)
        for what in ("worker", "front", "server", "worker"):
            fronts, others = processes(self.server)
            if what == "server":
                self.server.kill()
                self.server = fake_server(self.folder, port=self.port, open_jobs=150)
                await asyncio.to_thread(self.server.wait_ready)
            else:
                victims = fronts if what == "front" else others[:1]
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
            self.done[what] += 1
            await asyncio.sleep(0.5)

    async def watch(self) -> None:
        """Fails when a server ends that nobody has killed; until it is cancelled."""
        while True:
            code = self.server.process.poll()
            assert code is None, f"the server has ended by itself with {code}:\n{self.server.log[-6000:]}"
            await asyncio.sleep(0.2)


@pytest.fixture
def trouble(tmp_path):
    made = Trouble(tmp_path, free_port())
    made.server.wait_ready()
    yield made
    made.server.stop()


def test_200_clients_lose_nothing_and_get_nothing_twice_whoever_dies(trouble):
    crowd = Crowd(trouble.server.url, Random(5))

    async def together() -> None:
        async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as group:
            watch = group.create_task(trouble.watch())
            async with asyncio.TaskGroup() as work:
                work.create_task(crowd.come())
                work.create_task(trouble.make())
            watch.cancel()

    try:
        asyncio.run(together())
    except TimeoutError:
        waiting = {key: ids for key, ids in crowd.ids.items() if not ids & crowd.ends.keys()}
        told = f"{dict(trouble.done)}, answers {dict(crowd.num_errors)}, {len(crowd.ids)} accepted"
        pytest.fail(f"{told}, not ended: {waiting}\n{trouble.server.log[-6000:]}")
    assert trouble.done == {"worker": 2, "front": 1, "server": 1}
    assert len(crowd.ids) == NUM_CLIENTS
    assert all(len(ids) == 1 for ids in crowd.ids.values()), "a request made two jobs"
    accepted = {job_id for ids in crowd.ids.values() for job_id in ids}
    assert crowd.ends.keys() == accepted
    assert "Traceback" not in trouble.server.log
    assert trouble.server.stop() == 0
    with contextlib.closing(sqlite3.connect(trouble.folder / "out/jobs.sqlite3")) as db, db:
        rows = dict(db.execute("SELECT id, status FROM jobs"))
    assert rows == {job_id: status for job_id, status in crowd.ends.items() if status != "gone"}
    check_files(trouble.folder / "out", rows)


def check_files(folder: Path, ends: dict[str, str]) -> None:
    """A whole file for each job that is done, and nothing else."""
    files = {path.stem: path for path in folder.glob("*.mp4")}
    assert files.keys() == {job_id for job_id, status in ends.items() if status == "completed"}
    assert all(path.read_bytes() == MOVIE for path in files.values())
    hidden = {path.name for path in folder.iterdir() if path.name.startswith(".")}
    assert hidden == {".inputs", ".thumbnails"}


def memory_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    line = next(line for line in text.splitlines() if line.startswith("Private_Dirty"))
    return int(line.split()[1]) * 1024


def test_memory_is_flat_over_a_thousand_jobs(server):
    (front,), _ = processes(server)
    headers = {"Content-Type": "application/jsonl"}
    sizes = []
    for _ in range(4):
        lines = "".join(json.dumps({"prompt": "x" * 1000, "steps": 1}) + "\n" for _ in range(250))
        accepted = server.http.post("/v1/batches", content=lines, headers=headers).json()
        deadline_s = time.monotonic() + 60
        while server.http.get(f"/v1/batches/{accepted['id']}").json()["status"] != "completed":
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        sizes.append([memory_bytes(pid) for pid in (front, server.process.pid)])
    growth = [after - before for before, after in zip(sizes[1], sizes[-1], strict=True)]
    assert max(growth) < 3 * 2**20, sizes


def test_clients_that_never_read_cost_nothing_to_the_others(server):
    """They ask for much and read nothing; what is sent to them is bounded by their sockets."""
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            end = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            end.sendall(b"GET /v1/state HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        (front,), _ = processes(server)
        before = memory_bytes(front)
        job = server.post("/v1/videos", prompt="x", num_inference_steps=1).json()
        assert server.wait_for(job["id"])["status"] == "completed"
        assert memory_bytes(front) - before < 30 * 2**20
