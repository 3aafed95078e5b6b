"""An object store for tests: moto's server in a process of its own, and a proxy whose requests go wrong."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from serving import free_port

SECRETS = {"AWS_ACCESS_KEY_ID": "AKIATESTKEYOFGFGEN", "AWS_SECRET_ACCESS_KEY": "a/secret+of/gfgen"}
BUCKET = "data"

Fault = Literal["fails", "is lost", "has no answer", "is late", "forgets its condition"]
"""lost: no answer, and the store never sees it; no answer: the store does; late: it sees it after the client
has given up."""


def environment(port: int) -> dict[str, str]:
    return {
        **SECRETS,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


@contextlib.contextmanager
def served_store() -> Iterator[int]:
    """The port of a store with one bucket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=os.environ | environment(port), **quiet) as process:  # type: ignore[call-overload]
        try:
            deadline_s = time.monotonic() + 60
            while not _answers(port):
                assert process.poll() is None
                assert time.monotonic() < deadline_s, "moto's server does not start"
                time.sleep(0.05)
            yield port
        finally:
            process.kill()


def _answers(port: int) -> bool:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    try:
        return bool(urllib.request.urlopen(request, timeout=10).status == 200)
    except OSError:
        return False


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to a store; `fault` says what goes wrong with a request."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store_port = port
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        self.seen: list[tuple[str, str]] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FaultyProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path))
        fault = self.server.fault(self.command, self.path)
        headers = dict(self.headers.items())
        if fault == "fails":
            self._answer(503, {}, b"<Error><Code>ServiceUnavailable</Code></Error>")
            return
        if fault == "is lost":
            self._hang_up()
            return
        if fault == "is late":
            self._hang_up()
            time.sleep(0.3)
        if fault == "forgets its condition":
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        store = http.client.HTTPConnection("127.0.0.1", self.server.store_port)
        store.request(self.command, self.path, body, headers)
        found = store.getresponse()
        content = found.read()
        store.close()
        if fault == "has no answer":
            self._hang_up()
        if fault in (None, "forgets its condition"):
            self._answer(found.status, dict(found.getheaders()), content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(2)

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        left_out = ("transfer-encoding", "connection", "server", "date")
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in (*left_out, *([] if self.command == "HEAD" else ["content-length"])):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content if self.command != "HEAD" else b"")
