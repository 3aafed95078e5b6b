"""Servers as processes of their own, and what tests ask of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
READY_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One server process; `command` without the interpreter. All that is waited for may take `slowness` times
    as long as usual."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        folder: Path,
        key: str | None = None,
        slowness: float = 1.0,
    ) -> None:
        self.port = port
        self._slowness = slowness
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "server.log").open("ab")
        path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder)},
            stdout=self._log,
            stderr=self._log,
        )
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.url, timeout=30.0 * slowness, headers=headers)

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def wait_ready(self) -> Server:
        deadline_s = time.monotonic() + READY_S * self._slowness
        while True:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            try:
                if self.http.get("/ready").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        code = self.process.wait(30 * self._slowness)
        self.http.close()
        self._log.close()
        return code

    def kill(self) -> None:
        """SIGKILL: nothing is said to anybody."""
        self.process.kill()
        self.process.wait(10)
        self.http.close()
        self._log.close()

    # What tests ask ---------------------------------------------------------------------------------

    def post(self, path: str, **values: Any) -> httpx.Response:
        return self.http.post(path, json=values)

    def job(self, job_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def wait_for(self, job_id: str, *statuses: str) -> dict[str, Any]:
        """The job, once it has one of these statuses; by default, once it has ended."""
        wanted = statuses or ("completed", "failed", "cancelled")
        began_s = time.monotonic()
        while (job := self.job(job_id))["status"] not in wanted:
            waited_s = time.monotonic() - began_s
            assert waited_s < 30.0 * self._slowness, f"{job}\n{self.log}"
            time.sleep(
                min(0.1, max(0.01, waited_s / 5))
            )  # long waits ask seldom, which costs the server, too
        return job

    def events(self, path: str, **headers: str) -> Iterator[tuple[str | None, str, dict[str, Any]]]:
        """(id, event, data) of a stream, until it ends."""
        with self.http.stream("GET", path, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                if not line and "event" in fields:
                    yield fields.get("id"), fields["event"], json.loads(fields["data"])
                    fields = {}
                elif line and not line.startswith(":"):
                    name, _, value = line.partition(": ")
                    fields[name] = value


def fake_server(folder: Path, *, port: int | None = None, **options: object) -> Server:
    """Two ranks that compute nothing (fake_serving.py); not ready yet."""
    port = port or free_port()
    arguments = [f"{name}={value}" for name, value in options.items()]
    command = ["-m", "fake_serving", str(port), str(folder), *arguments]
    key = options.get("key")
    return Server(command, port=port, folder=folder, key=None if key is None else str(key))
