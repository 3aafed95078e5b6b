"""A server that stops goes on where it stopped; and what is kept long enough goes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import threading
import time

import pytest
from process_tree import front_of
from serving import fake_server, free_port

LONG = {"prompt": "long", "flow_shift": 0.05, "num_inference_steps": 60}


@pytest.fixture
def start(tmp_path):
    """Starts a server on one and the same port and folder; the last one is stopped at the end."""
    port, servers = free_port(), []

    def start(**options):
        servers.append(fake_server(tmp_path, port=port, **options))
        return servers[-1].wait_ready()

    yield start
    servers[-1].stop()


def test_a_stopped_server_goes_on_at_the_step_where_it_stopped(start):
    server = start()
    running = server.post("/v1/videos", deadline="1h", **LONG).json()
    queued = [server.post("/v1/videos", **LONG).json()["id"] for _ in range(2)]
    deadline_s = time.monotonic() + 10
    while server.job(running["id"])["step"] < 5:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    answers = {}

    def wait():
        answers["waited"] = server.http.post("/v1/videos/sync", json=LONG)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.2)
    kinds = []
    follower = threading.Thread(
        target=lambda: kinds.extend(kind for _, kind, _ in server.events(f"/v1/jobs/{queued[0]}/events"))
    )
    follower.start()
    time.sleep(0.2)
    assert server.stop() == 0
    waiter.join(10)
    follower.join(10)
    assert answers["waited"].status_code == 503
    assert "continues after its restart" in answers["waited"].json()["error"]["message"]
    assert kinds[-1] == "stopping"
    assert "4 jobs are open and continue at the next start" in server.log
    assert len(list((server.folder / "out/.resume").iterdir())) >= 1

    again = start()
    job = again.wait_for(running["id"], "in_progress", "completed")
    assert job["step"] >= 5
    assert job["deadline_at"] == running["deadline_at"]
    ids = [running["id"], *queued]
    assert {again.wait_for(job_id)["status"] for job_id in ids} == {"completed"}
    with contextlib.closing(sqlite3.connect(again.folder / "out/jobs.sqlite3")) as db, db:
        (text,) = db.execute("SELECT manifest FROM jobs WHERE id = ?", (running["id"],)).fetchone()
    (warning,) = json.loads(text)["warnings"]
    assert warning.startswith("resumed at denoise")
    assert list((again.folder / "out").glob(".resume/*")) == []


def test_a_killed_server_knows_what_was_done_and_what_cannot_be_done_any_more(start):
    """Between a file and the note of it a server can be killed; and the next one may have other models."""
    server = start()
    done, other, cancelled = (server.post("/v1/videos", **LONG).json()["id"] for _ in range(3))
    server.wait_for(done, "in_progress")
    server.http.delete(f"/v1/videos/{cancelled}")
    server.kill()
    (server.folder / "out" / f"{done}.mp4").write_bytes(b"made in time")
    unknown, own = (server.folder / "out" / name for name in (f"video_{'0' * 24}.mp4", "my film.mp4"))
    left = server.folder / "out" / f"{cancelled}.mp4"
    for path in (unknown, own, left):
        path.write_bytes(b"of another store; of nobody here; and of a job that was cancelled meanwhile")
    with contextlib.closing(sqlite3.connect(server.folder / "out/jobs.sqlite3")) as db, db:
        (spec,) = db.execute("SELECT spec FROM jobs WHERE id = ?", (other,)).fetchone()
        changed = json.dumps(json.loads(spec) | {"true_cfg_scale": 3.0})
        db.execute("UPDATE jobs SET spec = ? WHERE id = ?", (changed, other))
    again = start()
    assert (unknown.exists(), own.exists(), left.exists()) == (True, True, False)
    job = again.job(done)
    assert (job["status"], job["progress"]) == ("completed", 100)
    assert again.http.get(job["content_url"]).content == b"made in time"
    failed = again.job(other)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "cannot_be_done")
    assert "no use for it" in failed["error"]["message"]
    assert again.http.get("/v1/state").json()["num_open"] == 0


def test_a_killed_server_leaves_its_address_though_its_front_notices_nothing(start):
    """As one that is still importing what it needs, on a machine that has much else to do."""
    server = start()
    os.kill(front_of(server.process.pid), signal.SIGSTOP)
    server.kill()
    again = start()
    job = again.post("/v1/videos", prompt="brief", num_inference_steps=1).json()
    assert again.wait_for(job["id"])["status"] == "completed"


def test_what_is_kept_long_enough_goes_with_its_file(start):
    server = start(keep_s="0.2", retention_s="0.2")
    job = server.post("/v1/videos", prompt="brief", num_inference_steps=1).json()
    deadline_s = time.monotonic() + 10
    while server.http.get(f"/v1/jobs/{job['id']}").status_code != 404:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert list((server.folder / "out").glob("*.mp4")) == []
    assert server.http.get("/v1/state").json()["finished"] == []
    assert server.stop() == 0
    assert "stopped; no job is open" in server.log
