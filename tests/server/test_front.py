"""What the front does about what it cannot take in, or cannot put down."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from builders import make_job, simulated_control
from fake_serving import MODELS
from test_store import accepted

from gfgen.errors import OutputError, Problem
from gfgen.job.spec import JobSpec
from gfgen.runtime.files.manifest import manifest_entry
from gfgen.server import bridge as run_side
from gfgen.server import store as store_module
from gfgen.server.http import front, routes_jobs
from gfgen.server.http.front import make_app
from gfgen.server.http.guard import ApiKeys
from gfgen.server.http.routes_batches import NO_DETAILS, manifest
from gfgen.server.http.streams import StateFeeds, job_stream
from gfgen.server.jobs import service as service_module
from gfgen.server.jobs.files import JobFolder
from gfgen.server.jobs.job_requests import RequestedJob
from gfgen.server.jobs.service import JobService, RunFollower
from gfgen.server.protocol.limits import ServerLimits
from gfgen.server.protocol.link import FrontSettings, OpenJobIds, OutcomesStored, RunInfo, pack
from gfgen.server.protocol.problems import ApiError
from gfgen.server.protocol.server_schemas import served_model
from gfgen.server.shown.mirror import RunMirror
from gfgen.server.store import KEPT_REQUESTS_S, STORE_NAME, Ending, RequestKey, Store
from gfgen.system import machine

SERVING = RunInfo(lambda specs: ([], []), lambda specs: ([], []), (), "cpu", 2, "srtf", 100.0)


def test_a_front_that_cannot_follow_the_run_says_why_in_one_line_and_ends_at_once(tmp_path):
    """The run starts another, which is told again all that was not noted."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, ours:
        with theirs:
            front = subprocess.Popen(
                [sys.executable, "-m", "gfgen.server.http.front"]
                + [str(number) for number in (theirs.fileno(), listener.fileno())],
                pass_fds=(theirs.fileno(), listener.fileno()),
                stderr=subprocess.PIPE,
                text=True,
            )
        settings = FrontSettings(tmp_path, api_key=None, limits=ServerLimits(), version="1")
        ours.sendall(pack(settings) + pack(5))
        _, told = front.communicate(timeout=60)
    assert front.returncode == 1
    (line,) = told.splitlines()
    assert line.endswith("the HTTP process failed: TypeError: 'int' object is not iterable")


@pytest.mark.parametrize(("hard", "expected"), [(1024, 824), (10**6, 2048), (-1, 2048), (100, 8)])
def test_there_are_no_more_connections_than_descriptors(monkeypatch, hard, expected):
    limits = []
    fake = SimpleNamespace(
        RLIMIT_NOFILE=7,
        RLIM_INFINITY=-1,
        getrlimit=lambda what: (64, hard),
        setrlimit=lambda what, pair: limits.append((what, pair)),
    )
    monkeypatch.setattr(machine, "resource", fake)
    assert front.within_descriptors(ServerLimits()).connections == expected
    assert limits == [(7, (hard, hard))]


def test_too_many_open_files_are_one_line_each_time(caplog):
    async def refuse() -> None:
        error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        message = "socket.accept() out of system resource\nsocket: <fd=6>"
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})

    logging.getLogger("asyncio").addFilter(front._without_traceback)
    try:
        asyncio.run(refuse())
    finally:
        logging.getLogger("asyncio").removeFilter(front._without_traceback)
    (record,) = caplog.records
    assert record.getMessage() == "socket.accept() out of system resource: Too many open files"
    assert record.exc_info is None


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / STORE_NAME, began_at=1.0)
    yield opened
    opened.close()


@pytest.fixture
def told():
    """What the run has been told."""
    return []


@pytest.fixture
def service(store, told, tmp_path):
    return JobService(
        store=store, mirror=RunMirror(), folder=JobFolder(tmp_path), limits=ServerLimits(), send=told.append
    )


def test_a_full_disk_at_the_start_is_waited_for(service, store, told, tmp_path, monkeypatch):
    """A job whose file is there, and one that cannot be done any more, have ended when there is room."""
    note, refusals = store.end_all, []

    async def end_all(endings):
        if len(refusals) % 2 == 0:
            refusals.append(endings)
            raise OutputError("no room")
        refusals.append(None)
        return await note(endings)

    monkeypatch.setattr(store, "end_all", end_all)
    monkeypatch.setattr(service_module, "RETRY_S", 0.0)
    (tmp_path / "made.mp4").write_bytes(b"made in time")

    async def begin():
        await store.accept([accepted("made"), accepted("lost")], now=100.0)
        await RunFollower(service).hear([replace(SERVING, admit_again=lambda specs: ([], ["it is gone"]))])

    asyncio.run(begin())
    assert [store.job(name).ending.status for name in ("made", "lost")] == ["completed", "failed"]
    assert len(refusals) == 2
    assert told == [OpenJobIds(())]


def ids(number, kind="video"):
    return f"{kind}_{number:024d}"


def touched(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"content")


def test_a_store_that_is_begun_anew_costs_no_finished_file(service, tmp_path):
    """The damaged one was moved away, as its message advises; it may be mended, and come back."""
    touched(tmp_path, f"{ids(1)}.mp4", f"{ids(2, 'image')}.png")
    touched(tmp_path / ".thumbnails", f"{ids(1)}.webp")
    new = Store(tmp_path / "new.sqlite3", began_at=1.5e9)
    JobFolder(tmp_path).prepare(new)
    new.close()
    kept = {path.name for path in tmp_path.rglob("*_0*")}
    assert kept == {f"{ids(1)}.mp4", f"{ids(2, 'image')}.png", f"{ids(1)}.webp"}


def test_what_a_killed_server_left_of_jobs_that_came_to_nothing_is_removed(store, tmp_path):
    names = {
        status: ids(number) for number, status in enumerate(("open", "completed", "failed", "cancelled"))
    }

    async def note():
        await store.accept([accepted(name) for name in names.values()], now=100.0)
        await store.end_all([Ending(names[s], s, 101.0) for s in ("completed", "failed", "cancelled")])

    asyncio.run(note())
    touched(tmp_path, *(f"{name}.mp4" for name in names.values()), "my film.mp4")
    touched(tmp_path / ".inputs", *names.values(), ids(9))
    JobFolder(tmp_path).prepare(store)
    assert {path.name for path in tmp_path.glob("*.mp4")} == {
        f"{names['open']}.mp4",
        f"{names['completed']}.mp4",
        "my film.mp4",
    }
    assert [path.name for path in (tmp_path / ".inputs").iterdir()] == [names["open"]]


def test_a_new_store_keeps_the_pictures_of_jobs_of_an_older_one(store, tmp_path):
    touched(tmp_path / ".inputs", ids(1))
    JobFolder(tmp_path).prepare(store)
    facts, spec = accepted(ids(2))
    asyncio.run(store.accept([(replace(facts, created_at=4e9), spec)], now=4e9))
    JobFolder(tmp_path).prepare(store)
    assert [path.name for path in (tmp_path / ".inputs").iterdir()] == [ids(1)]


def test_a_job_that_was_accepted_goes_on_though_memory_is_short_in_this_moment(service, store, told):
    def too_large(specs):
        raise AssertionError("held against what is free now")

    async def begin():
        await store.accept([accepted("a")], now=100.0)
        await RunFollower(service).hear(
            [replace(SERVING, admit=too_large, admit_again=lambda specs: ([make_job("a")], []))]
        )

    asyncio.run(begin())
    assert told[-1] == OpenJobIds(("a",))
    assert store.job("a").ending is None


def batch_of(store, folder, *names):
    """A batch of videos that are open, and whose files are there."""
    jobs = [accepted(name, batch_id="batch") for name in names]
    jobs = [(replace(facts, custom_id=f"line {facts.id}"), spec) for facts, spec in jobs]
    for name in names:
        (folder / f"{name}.mp4").write_bytes(b"made in time")
    return store.accept(jobs, batch_id="batch", now=100.0)


def lines_of(store):
    return [json.loads(line) for line in manifest(store, "batch").splitlines()]


def test_of_an_end_that_the_run_tells_after_its_file_was_found_the_manifest_has_all(service, store, tmp_path):
    """The HTTP process was killed between the file and the note of it; the run lives."""
    control, recorder = simulated_control([make_job("a")])
    control.run()

    async def begin():
        await batch_of(store, tmp_path, "a")
        await RunFollower(service).hear([replace(SERVING, admit_again=lambda specs: ([], []))])
        await RunFollower(service).hear(recorder.outcomes)

    asyncio.run(begin())
    (line,) = lines_of(store)
    assert (line["id"], line["job"], line["status"]) == ("line a", "a", "done")
    assert line["layouts"] == list(recorder.outcomes[0].layouts) != []
    assert store.job("a").ending.started_at == 100.0 + recorder.outcomes[0].started_s


def test_of_an_end_that_nobody_tells_the_manifest_has_what_is_known(service, store, tmp_path):
    control, recorder = simulated_control([make_job("x")])
    control.run()
    keys = manifest_entry(recorder.outcomes[0], written_at=1.0).keys()

    async def begin():
        await batch_of(store, tmp_path, "a", "b", "c")
        (tmp_path / "b.mp4").unlink()
        await store.end_all([Ending("b", "cancelled", 103.0, error_message="cancelled")])
        (tmp_path / "c.mp4").unlink()
        await RunFollower(service).hear([replace(SERVING, admit_again=lambda specs: ([], ["it is gone"]))])

    asyncio.run(begin())
    lines = lines_of(store)
    assert all(set(line) <= {*keys, "job"} for line in lines)
    assert [line["status"] for line in lines] == ["done", "cancelled", "failed"]
    assert [line["error"] for line in lines] == [None, "cancelled", "it is gone"]
    assert [line["file"] for line in lines] == ["/v1/jobs/a/content", None, None]
    assert lines[0]["size_bytes"] == len(b"made in time")
    assert (lines[0]["timings"], lines[0]["steps"], lines[0]["seed"]) == (None, 4, 7)
    assert [line["warnings"] for line in lines] == [[NO_DETAILS]] * 3


def test_what_happens_to_an_open_job_is_not_known_while_models_load(service, store):
    async def ask():
        await store.accept([accepted("a"), accepted("b")], now=100.0)
        await store.end_all([Ending("b", "completed", 101.0)])
        job_stream(service, "b", None)
        with pytest.raises(ApiError) as told:
            job_stream(service, "a", None)
        return told.value

    refusal = asyncio.run(ask())
    assert (refusal.status, refusal.headers["Retry-After"]) == (503, "5")
    assert "models are loading" in refusal.message


def test_request_keys_are_forgotten_after_a_day_whether_jobs_are_removed_or_not(store, tmp_path):
    now = [100.0]
    limits = ServerLimits(keep_s=10**9)
    service = JobService(
        store=store,
        mirror=RunMirror(),
        folder=JobFolder(tmp_path),
        limits=limits,
        send=lambda _: None,
        now=lambda: now[0],
    )
    key = RequestKey("key", "hash")
    asyncio.run(store.accept([accepted("a")], key=key, now=now[0]))
    asyncio.run(service.remove_expired())
    assert store.request(key, now=now[0]) is not None
    now[0] += KEPT_REQUESTS_S + 1.0
    asyncio.run(service.remove_expired())
    assert store._reader.execute("SELECT COUNT(*) FROM requests").fetchone() == (0,)


def test_a_front_that_cannot_be_started_counts_as_one_that_dies(monkeypatch, tmp_path, caplog):
    """For want of memory, or of a descriptor; the thread that looks after it goes on."""
    failures: list[Exception] = []
    bridge = SimpleNamespace(received=failures.append)

    def none_left(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(run_side.subprocess, "Popen", none_left)
    monkeypatch.setattr(run_side, "MAX_DEATHS", 2)
    settings = FrontSettings(tmp_path, api_key=None, limits=ServerLimits(), version="1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run_side.Supervisor(listener, settings, bridge)._run()
    (failure,) = failures
    assert str(failure).startswith("the HTTP process died, or could not be started, 2 times")
    told = "the HTTP process cannot be started (Cannot allocate memory); retrying"
    assert [record.getMessage() for record in caplog.records] == [told, told]


def test_a_front_that_still_imports_when_the_run_ends_is_not_waited_for(monkeypatch, tmp_path):
    (tmp_path / "uvicorn.py").write_text("print('it imports', flush=True)\nwhile True: pass")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reader, writer = os.pipe()
    settings = FrontSettings(tmp_path, api_key=None, limits=ServerLimits(), version="1")
    bridge = SimpleNamespace(received=lambda _: None)
    own = run_side.Supervisor(socket.create_server(("127.0.0.1", 0)), settings, bridge)
    start = run_side.subprocess.Popen
    monkeypatch.setattr(run_side.subprocess, "Popen", lambda *a, **kw: start(*a, **kw, stdout=writer))
    own.start()
    assert os.read(reader, 1) == b"i"
    own.stop()
    assert own._process.returncode == -signal.SIGTERM
    for fd in (reader, writer):
        os.close(fd)


PICTURE = (Path(__file__).parents[2] / "jobs/star.png").read_bytes()


@pytest.fixture
def ready(service, tmp_path):
    """A desk that takes jobs."""
    service.mirror.apply(replace(SERVING, admit=lambda specs: ([make_job(spec.id) for spec in specs], [])))
    (tmp_path / ".inputs").mkdir()
    return service


def asked(name="video_1", picture=PICTURE):
    return RequestedJob(JobSpec(id=name, prompt="a star"), picture=picture)


def inputs(folder):
    return [path.name for path in (folder / ".inputs").iterdir()]


def test_an_input_picture_stays_while_its_job_is_open(ready, tmp_path):
    assert asyncio.run(ready.take([asked()])) == ["video_1"]
    assert inputs(tmp_path) == ["video_1"]


def test_a_client_that_leaves_has_a_minute_before_its_job_is_cancelled(ready, store):
    assert ServerLimits().left_s == 60.0

    async def left_for(left_s):
        await ready.take([asked(f"video_{left_s:g}")])
        ready.limits = ServerLimits(left_s=left_s)
        routes_jobs.leave(ready, [f"video_{left_s:g}"])
        while left_s == 0.0 and routes_jobs._leaving:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return ready.store.job(f"video_{left_s:g}").ending

    assert asyncio.run(left_for(60.0)) is None
    assert asyncio.run(left_for(0.0)).status == "cancelled"


@pytest.fixture
def full_disk(store, monkeypatch):
    """Call it to make room."""

    def refused(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def make_room():
        for name, kept in real.items():
            monkeypatch.setattr(name, kept)

    real = {"os.posix_fallocate": os.posix_fallocate, "gfgen.server.store._end": store_module._end}
    real["gfgen.server.store._take_key"] = store_module._take_key
    for name in real:
        monkeypatch.setattr(name, refused)
    return make_room


def asked_over_http(service, method, path, **values):
    app = make_app(
        service, feeds=StateFeeds(service.mirror), keys=ApiKeys(None), address="127.0.0.1", version="1"
    )

    async def ask():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **values)

    return asyncio.run(ask())


def test_a_full_disk_is_not_ready_and_says_when_to_ask_again(ready, full_disk):
    """SQLite writes a small change in place, so that one such write says nothing."""
    key = {"Idempotency-Key": "which is written"}
    for path, status in (("/ready", 503), ("/v1/jobs", 507)):
        method = "GET" if status == 503 else "POST"
        job = None if status == 503 else {"prompt": "a star", "steps": 1}
        ready.mirror.run_info = replace(
            ready.mirror.run_info, models=(served_model(MODELS["fake-video"], created=1),)
        )
        answer = asked_over_http(ready, method, path, json=job, headers=key)
        assert (answer.status_code, answer.headers["retry-after"]) == (status, "30")
        assert answer.json()["error"]["code"] == "disk_full"
        assert "free some space" in answer.json()["error"]["message"]


def test_a_folder_that_was_removed_is_no_full_disk(ready, tmp_path):
    ready.mirror.run_info = replace(
        ready.mirror.run_info, models=(served_model(MODELS["fake-video"], created=1),)
    )
    shutil.rmtree(tmp_path)
    upload = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    for path, values in (("/ready", {}), ("/v1/files", upload), ("/v1/jobs", {"json": {"prompt": "a"}})):
        answer = asked_over_http(ready, "POST" if values else "GET", path, **values)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "not_ready")
        assert "removed" in error["message"]


def test_there_is_no_room_for_more_jobs_before_anything_is_written(ready, tmp_path):
    ready.limits = ServerLimits(open_jobs=1)
    asyncio.run(ready.take([asked()]))
    with pytest.raises(ApiError) as told:
        asyncio.run(ready.take([asked("video_2", b"never looked at")]))
    assert told.value.status == 429
    assert inputs(tmp_path) == ["video_1"]


def test_an_input_picture_that_cannot_be_written_is_a_full_disk_and_leaves_nothing(ready, tmp_path):
    (tmp_path / ".inputs/video_1.partial").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="cannot save the input picture"):
        asyncio.run(ready.take([asked()]))
    assert inputs(tmp_path) == []


@pytest.mark.parametrize("what", ["refused", "mistaken", "full"])
def test_whatever_keeps_a_job_from_being_accepted_its_picture_goes(ready, store, tmp_path, monkeypatch, what):
    def mistaken(*_):
        raise ZeroDivisionError

    async def full(*_, **__):
        raise OutputError("no room")

    admits = {"refused": lambda specs: ([], [Problem.of("size", "1x1", "more")]), "mistaken": mistaken}
    if what == "full":
        monkeypatch.setattr(store, "accept", full)
    else:
        ready.mirror.apply(replace(SERVING, admit=admits[what]))
    with pytest.raises((ApiError, ZeroDivisionError, OutputError)):
        asyncio.run(ready.take([asked()]))
    assert inputs(tmp_path) == []
    asyncio.run(ready.remove_expired())
    assert ready._num_reserved.total() == 0


def test_a_request_that_came_before_leaves_no_second_picture(ready, tmp_path, store, monkeypatch):
    key = RequestKey("key", "hash")
    asyncio.run(ready.take([asked()], key=key))
    monkeypatch.setattr(store, "request", lambda key, *, now: None)  # as if both came at once
    assert asyncio.run(ready.take([asked("video_2")], key=key)) == ["video_1"]
    assert inputs(tmp_path) == ["video_1"]


def test_a_file_that_cannot_be_looked_at_ends_its_job_all_the_same(service, store, told):
    control, recorder = simulated_control([make_job("a")])
    control.run()
    (outcome,) = recorder.outcomes
    nowhere = replace(outcome, info=replace(outcome.info, file="x" * 300))  # which no file system takes

    async def end():
        await store.accept([accepted("a")], now=100.0)
        await RunFollower(service).hear(
            [replace(SERVING, admit_again=lambda specs: ([make_job("a")], [])), nowhere]
        )

    asyncio.run(end())
    ending = store.job("a").ending
    assert (ending.status, ending.size_bytes) == ("completed", None)
    assert told[-1] == OutcomesStored(("a",))
