"""One server with fake models for all tests that do not stop it."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from serving import Server, fake_server


class Receiver(ThreadingHTTPServer):
    """Takes webhooks on this machine."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = self.server_address[1]
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        self.server.messages.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    with Receiver() as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Server]:
    running = fake_server(
        tmp_path_factory.mktemp("server"),
        body_bytes=2**21,
        streams=12,
        left_s=0.5,
        webhook_host=f"127.0.0.1:{receiver.port}",
        webhook_secret="whsec_" + 8 * "c2Vj",
    )
    try:
        yield running.wait_ready()
    finally:
        running.stop()
