"""What `python -m benchmarks.first_run servers` counts, of a server that answers at once."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from benchmarks import servers


class Answers(BaseHTTPRequestHandler):
    """Makes each picture twice, and those of "no" not at all, but for the warm-up."""

    made: list[dict[str, Any]] = []  # noqa: RUF012
    asked: list[dict[str, Any]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["prompt"] == "no" and body["num_inference_steps"] != servers.WARM_UP_STEPS:
            self._say(500, {"error": "no"})
            return
        for _ in range(2):
            self.made.append({"id": f"picture-{len(self.made)}", "status": "completed"})
        self._say(200, {"data": [{"id": self.made[-1]["id"], "b64_json": ""}]})

    def do_GET(self) -> None:
        self._say(200, {"data": self.made})

    def _say(self, status: int, content: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_jobs_that_fail_are_lost_and_results_of_no_job_are_doubled(url, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "RETRY_S", 0.0)
    jobs, found = tmp_path / "jobs.jsonl", tmp_path / "found.jsonl"
    job = {"model": "tiny-qwen-image", "size": "64x64", "steps": 6, "deadline": "1h"}
    lines = [{**job, "id": prompt, "prompt": prompt} for prompt in ("no", "fox", "boat")]
    jobs.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    about = {"name": "fake", "gpus": 1, "kill": None, "retries": 1, "limit": 10.0}
    servers.measure(argparse.Namespace(jobs=jobs, server=[f"tiny-qwen-image={url}"], to=found, **about))
    record = json.loads(found.read_text())
    assert (record["num_missing"], record["num_doubled"]) == (1, 2)
    assert (record["num_deadlines"], record["num_met"]) == (3, 2)
    assert len(record["errors"]) == 2
    assert {each.get("deadline") for each in Answers.asked} == {None, "3600.0s"}
    assert not any("model" in each for each in Answers.asked)
