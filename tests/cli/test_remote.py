"""Commands for runs that other processes hold: what they name, ask and print."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from builders import make_job
from click.testing import CliRunner

from gfgen.cli.main import cli
from gfgen.cli.remote.commands import find_target
from gfgen.cli.remote.folder import RunStatus
from gfgen.cli.remote.server import Server, _recent_row, is_loopback
from gfgen.errors import InputError, Problem
from gfgen.job.spec import output_name, spec_hash
from gfgen.runtime.core.observer import with_view
from gfgen.runtime.files.inbox import Inbox
from gfgen.runtime.files.lock import hold_folder
from gfgen.session.live import LiveRun, write_live


def gfgen(*arguments, **variables):
    return CliRunner().invoke(cli, arguments, env=variables, standalone_mode=False, catch_exceptions=False)


@contextmanager
def running(folder, *jobs, watched=None):
    """A run that holds the folder and answers requests."""
    folder.mkdir(parents=True, exist_ok=True)
    with hold_folder(folder):
        live = LiveRun(folder, started_at=1000.0, watched=watched)
        for observer in with_view([live]):
            observer.began(tuple(make_job(name).info for name in jobs), num_ranks=1, policy="srtf")
        ended, events = threading.Event(), []

        def loop():
            while not ended.wait(0.02):
                events.extend(live.take_events(0.0))

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield events
        finally:
            ended.set()
            thread.join()
            live.close()


def test_jobs_of_a_run_are_cancelled_by_pattern(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with running(tmp_path / "outputs/night", "fox-1", "fox-2", "owl") as events:
        found = gfgen("cancel", "fox-*", "cat", "--json")
        assert json.loads(found.stdout)["cancelled"] == ["fox-1", "fox-2"]
        assert (found.return_value, found.stderr) == (1, "gfgen: no open job matches cat\n")
        assert "3 waiting" in gfgen("status").stdout
        assert gfgen("status", GFGEN_TARGET="outputs/night").stdout.startswith("outputs/night: running")
    assert [event.job_id for event in events] == ["fox-1", "fox-2"]
    assert "its last run was stopped" in gfgen("status", "outputs/night").stdout
    with pytest.raises(InputError, match="nothing runs there"):
        gfgen("cancel", "fox-1", "--target", "outputs/night")


def admit(specs):
    """Every job as a picture, except those with the tag "no"."""
    jobs, problems = [], [Problem(spec.line, "tag", "no", "is refused") for spec in specs if spec.tag == "no"]
    for spec in (spec for spec in specs if spec.tag != "no"):
        job = make_job(spec.id)
        info = replace(job.info, asked=spec, spec=spec, file=output_name(spec, "image"))
        jobs.append(replace(job, info=replace(info, spec_hash=spec_hash(spec))))
    return jobs, problems


def test_jobs_are_submitted_to_a_watched_folder_and_its_refusals_are_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "jobs.csv").write_text("id,prompt\nfox,a fox\nowl,an owl\n")
    with running(tmp_path / "out", watched=tmp_path / "in"):
        write_live(tmp_path / "in", {"output": str(tmp_path / "out")})
        inbox = Inbox(tmp_path / "in", output_dir=tmp_path / "out", admit=admit)
        inbox.start(admit=admit)
        try:
            assert gfgen("submit", "jobs.csv", "--target", "in").stdout.startswith("in took 2 jobs as ")
            assert [job.job_id for job in inbox.take()] == ["fox", "owl"]
            with pytest.raises(InputError, match="line 1: tag = no: is refused"):
                gfgen("submit", "-p", "a cat", "--set", "tag=no", "--target", "out")
            (tmp_path / "words.txt").write_text(
                "a hen <lora:ink:0.8>\na (red:1.3) hen\n<lora:ink:0.8> a cat\n"
            )
            err = gfgen("submit", "words.txt", "--target", "in").stderr
            assert "lines 1, 3 (2 jobs): <lora:...> in a prompt loads no LoRA; use the field lora" in err
            assert "line 2: weights such as (red:1.3) in a prompt are plain text: (red:1.3)" in err
        finally:
            inbox.close()
    assert {path.name for path in (tmp_path / "in").glob("[!.]*")} == {"jobs.jsonl", "words.jsonl"}
    with pytest.raises(InputError, match="nothing runs there"):
        gfgen("submit", "jobs.csv", "--target", "in")


def test_a_run_that_watches_nothing_takes_no_jobs(tmp_path):
    with (
        running(tmp_path / "out", "fox"),
        pytest.raises(InputError, match="does not watch a folder, so it takes no more jobs"),
    ):
        gfgen("submit", "-p", "a cat", "--target", str(tmp_path / "out"))


def test_a_folder_of_an_earlier_version_shows_its_manifest(tmp_path):
    (tmp_path / "manifest.jsonl").write_text('{"version": 1, "id": "fox", "status": "done"}\n')
    found = json.loads(gfgen("status", str(tmp_path), "--json").stdout)
    assert (found["state"], found["counts"]["done"], found["counts"]["waiting"]) == ("ended", 1, 0)


def test_a_status_leaves_no_descriptor_open(tmp_path):
    (tmp_path / "manifest.jsonl").write_text('{"version": 1, "id": "fox", "status": "done"}\n')
    before = os.listdir("/proc/self/fd")
    find_target(str(tmp_path), key=None).status()
    assert os.listdir("/proc/self/fd") == before


def test_the_status_of_a_killed_run_counts_each_job_once(tmp_path):
    def ended(job_id, status, moment):
        return {"version": 1, "id": job_id, "status": status, "written_at": f"2026-11-27T{moment}Z"}

    # The killed run skips fox; owl and elk end in it, hen and cat are left.
    lines = [
        ended("fox", "done", "10:00:00"),
        ended("owl", "failed", "10:00:00"),
        ended("cat", "failed", "10:00:01"),
    ]
    lines += [ended("owl", "done", "11:00:09"), ended("elk", "failed", "11:00:09")]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    started_at = datetime(2026, 11, 27, 11, tzinfo=UTC).timestamp() + 0.1234
    arrivals = [
        {"event": "JobArrived", "time_s": 0.0, "job_id": name, "spec_hash": "x"}
        for name in ("owl", "elk", "hen", "cat")
    ]
    journal = [{"gfgen_journal": 2, "started_at": started_at}, *arrivals]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in journal))
    counts = {"jobs": 4, "skipped": 1, "done": 0, "failed": 0, "cancelled": 0, "running": 1, "waiting": 3}
    write_live(tmp_path, {"state": "running", "started_at": round(started_at, 3), "counts": counts})
    found = json.loads(gfgen("status", str(tmp_path), "--json").stdout)
    expected = {"jobs": 5, "done": 2, "dropped": 0, "failed": 1, "cancelled": 0, "waiting": 2}
    assert (found["state"], found["counts"]) == ("killed", expected)


@pytest.mark.parametrize(
    ("statuses", "begins_after_s", "num_left"),
    [(("done", "again"), -5.0, 4), (("done", "failed"), 0.2, 3)],
    ids=["a filter wants one again", "all others ended in the second before"],
)
def test_the_status_of_a_stopped_run_counts_all_jobs_that_are_left(
    tmp_path, statuses, begins_after_s, num_left
):
    at = datetime(2026, 11, 27, 11, tzinfo=UTC)
    lines = [
        {"version": 1, "id": f"ended-{n}", "status": status, "written_at": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
        for n, status in enumerate(statuses)
    ]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    started_at = at.timestamp() + begins_after_s
    names = ["left-0", "left-1", "left-2"] + ["ended-0", "ended-1"] * (begins_after_s < 0)
    arrivals = [{"event": "JobArrived", "time_s": 0.0, "job_id": name, "spec_hash": "x"} for name in names]
    journal = [{"gfgen_journal": 2, "started_at": started_at}, *arrivals]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in journal))
    write_live(tmp_path, {"state": "stopped", "started_at": started_at, "counts": {"jobs": len(names)}})
    found = json.loads(gfgen("status", str(tmp_path), "--json").stdout)["counts"]
    assert (found["waiting"], found["jobs"]) == (num_left, 5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (None, "nothing runs below ./outputs"),
        ("nowhere", "there is no such folder"),
        ("file", "is a file"),
        (".", "gfgen never ran there"),
        ("ftp://x", "a URL such as"),
        ("http://127.0.0.1:1", "is 'gfgen serve' running there"),
    ],
)
def test_a_name_of_nothing_is_one_line(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=words) as caught:
        find_target(name, key=None).status()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("term", ["xterm", "of-no-database"])
def test_the_live_view_ends_with_q_and_leaves_two_lines(tmp_path, term):
    line = {"version": 1, "id": "fox", "status": "done", "written_at": "2026-11-27T10:00:00Z"}
    (tmp_path / "manifest.jsonl").write_text(json.dumps(line) + "\n")
    ours, its = os.openpty()
    command = [sys.executable, "-m", "gfgen", "top", "."]  # a line holds 80 characters
    streams = {"stdin": its, "stdout": its, "stderr": its}
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"TERM": term}, **streams) as top:
        os.close(its)
        shown = b""
        with suppress(OSError):  # it has ended
            while part := os.read(ours, 65536):
                shown += part
                if b"q ends this view" in shown:
                    os.write(ours, b"q")
    os.close(ours)
    assert top.returncode == 0
    assert (b"q ends this view" in shown) == (term == "xterm")
    assert b": nothing runs;" in shown.rpartition(b"\x1b[?1049l")[2]  # when the terminal is as before


def test_the_view_fits_the_terminal_and_puts_running_jobs_first():
    row = {"stage": "denoise", "step": 3, "steps": 40, "ends_at": 90.0, "deadline_at": 200.0, "is_late": True}
    jobs = [
        {
            "id": f"a-job-with-a-rather-long-name-of-its-own-{number}",
            "state": "running",
            "ranks": [number],
            **row,
        }
        for number in range(8)
    ]
    ranks = [{"rank": number, "state": "busy", "job": "fox", "stage": "denoise"} for number in range(64)]
    counts = {"jobs": 500, "done": 123, "running": 8, "waiting": 369}
    status = RunStatus(target="out", kind="run", state="running", counts=counts, ranks=ranks, jobs=jobs)
    for columns, rows in ((80, 24), (40, 10), (20, 3)):
        lines = status.lines(now=60.0, columns=columns, rows=rows)
        assert len(lines) <= rows
        assert all(len(line) <= columns for line in lines)
    lines = status.lines(now=60.0, columns=80, rows=80)
    assert any(line.endswith("2:20 late") for line in lines)
    assert lines[-1] == "and 369 more"


@pytest.mark.parametrize(
    ("ended_at", "without_queue_s", "latency_s"), [(100, 0.56, 0.56), (130, 0.56, 30.0), (101, None, 1.0)]
)
def test_a_short_job_of_a_server_is_not_shown_with_whole_seconds(ended_at, without_queue_s, latency_s):
    job = {"id": "a", "custom_id": None, "status": "completed", "error": None, "created_at": 100}
    row = _recent_row(job | {"completed_at": ended_at, "inference_time_s": without_queue_s})
    assert row["latency_s"] == latency_s


@contextmanager
def http_server(content):
    """Answers everything with this; yields its port and the requests' lines."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.requestline, self.headers.get("Authorization")))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def proxy(monkeypatch):
    """The port of the environment's proxy, and the requests that it gets."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http_server(b"{}") as (port, requests):
        monkeypatch.setenv("http_proxy", f"http://user:secret@127.0.0.1:{port}")
        yield port, requests


@pytest.fixture
def names_of_this_machine(monkeypatch):
    """All names are."""
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *others, **options: real("127.0.0.1", *others, **options)
    )


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "LOCALHOST.", "a.localhost"])
def test_requests_to_this_machine_never_go_through_a_proxy(proxy, names_of_this_machine, host):
    with http_server(b'{"object": "state"}') as (port, requests):
        server = Server(f"http://{host}:{port}", key="key")
        with pytest.raises(KeyError):  # the state lacks all else
            server.status()
        assert requests == [("GET /v1/state HTTP/1.1", "Bearer key")]
    with pytest.raises(InputError) as refusal:
        server.status()
    assert "proxy" not in str(refusal.value)
    assert proxy[1] == []


def test_an_error_names_the_proxy_without_its_password(proxy):
    with pytest.raises(InputError) as refusal:
        Server("http://far.example:3000", key="key").status()
    port, requests = proxy
    assert requests == [("GET http://far.example:3000/v1/state HTTP/1.1", "Bearer key")]
    assert f"; the proxy 127.0.0.1:{port} was asked (no_proxy names hosts without)" in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_no_proxy_is_obeyed(proxy, names_of_this_machine, monkeypatch):
    monkeypatch.setenv("no_proxy", "far.example")
    with http_server(b'{"object": "state"}') as (port, requests), pytest.raises(KeyError):
        Server(f"http://far.example:{port}", key=None).status()
    assert len(requests) == 1
    assert proxy[1] == []


@pytest.mark.parametrize(
    ("host", "is_this"),
    [
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_what_certainly_is_loopback(host, is_this):
    assert is_loopback(host) == is_this
