"""Many clients of one server, and trouble for them: processes of the server that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
from process_tree import children_of, command_of
from serving import Server

NUM_CLIENTS = 200
ENDED = ("completed", "failed", "cancelled")


def processes(server: Server) -> dict[str, list[int]]:
    """The front, the ranks and the writers of a server."""
    children = children_of(server.process.pid)
    forked = [pid for each in children if b"forkserver" in command_of(each) for pid in children_of(each)]
    ranks = [pid for pid in forked if _has_arena(pid)]
    return {
        "front": [pid for pid in children if b"gfgen.server.http.front" in command_of(pid)],
        "rank": ranks,
        "writer": [pid for pid in forked if pid not in ranks],
    }


def _has_arena(pid: int) -> bool:
    """Whether it is a rank: a writer maps none."""
    with contextlib.suppress(OSError):
        return "memfd:gfc-" in Path(f"/proc/{pid}/maps").read_text()
    return False


class Crowd:
    """Clients that each want some jobs, and insist."""

    def __init__(self, url: str, random: Random, values: Callable[[int], Mapping[str, Any]]) -> None:
        self.url = url
        self.random = random
        self.values = values
        """The job of each client, without its prompt."""
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
        values = {"prompt": f"{key} in the crowd", **self.values(number)}
        headers = {"Idempotency-Key": key}
        answer = await self.insist(client, "POST", "/v1/jobs", json=values, headers=headers)
        job_id: str = answer.json()["id"]
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

    async def insist(
        self, client: httpx.AsyncClient, method: str, path: str, *, may_be_gone: bool = False, **values: Any
    ) -> httpx.Response:
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

    def __init__(self, start: Callable[[], Server]) -> None:
        self._start = start
        self.server = start()
        self.done: Counter[str] = Counter()

    async def make(self, victims: Sequence[str], *, pause_s: float) -> None:
        for what in victims:
            await asyncio.sleep(pause_s)
            if what == "server":
                self.server.kill()
                self.server = self._start()
                await asyncio.to_thread(self.server.wait_ready)
            else:
                while not (found := processes(self.server)[what]):  # its successor has not started
                    await asyncio.sleep(0.1)
                os.kill(found[0], signal.SIGKILL)
            self.done[what] += 1

    async def watch(self) -> None:
        """Fails when a server ends that nobody has killed; until it is cancelled."""
        while True:
            code = self.server.process.poll()
            assert code is None, f"the server has ended by itself with {code}:\n{self.server.log[-6000:]}"
            await asyncio.sleep(0.2)


async def meet(crowd: Crowd, trouble: Trouble, victims: Sequence[str], *, pause_s: float) -> None:
    """Until every client has what it wants."""
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(trouble.watch())
        async with asyncio.TaskGroup() as work:
            work.create_task(crowd.come())
            work.create_task(trouble.make(victims, pause_s=pause_s))
        watch.cancel()


def check_outcome(crowd: Crowd, trouble: Trouble, *, suffix: str) -> dict[str, str]:
    """The status of each job in the store; nothing may be lost, doubled or left over. Stops the server."""
    assert len(crowd.ids) == NUM_CLIENTS
    assert all(len(ids) == 1 for ids in crowd.ids.values()), "a request made two jobs"
    assert crowd.ends.keys() == {job_id for ids in crowd.ids.values() for job_id in ids}
    assert "Traceback" not in trouble.server.log
    assert trouble.server.stop() == 0
    folder = trouble.server.folder / "out"
    with contextlib.closing(sqlite3.connect(folder / "jobs.sqlite3")) as db, db:
        rows: dict[str, str] = dict(db.execute("SELECT id, status FROM jobs"))
    assert rows == {job_id: status for job_id, status in crowd.ends.items() if status != "gone"}
    files = {path.stem for path in folder.glob(f"*{suffix}")}
    assert files == {job_id for job_id, status in rows.items() if status == "completed"}
    hidden = {path.name for path in folder.iterdir() if path.name.startswith(".")}
    assert hidden <= {".inputs", ".thumbnails", ".resume", ".gfgen.live.json"}, hidden
    return rows


def private_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    line = next(line for line in text.splitlines() if line.startswith("Private_Dirty"))
    return int(line.split()[1]) * 1024
