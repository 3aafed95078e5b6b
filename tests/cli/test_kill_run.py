"""`gfgen run`, killed again and again at random moments, ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from commands import gfgen
from PIL import Image
from process_tree import children_of, command_of, descendants_of
from serving import Server, free_port

NUM_KILLS = 2
BOUND_S = 120.0
PICTURE = {"model": "tiny-qwen-image", "size": "64x64"}
VIDEO = {"model": "tiny-wan", "size": "64x64", "frames": 9}
LONG = {"prompt": "a red circle", "size": "512x512", "frames": 81, "steps": 4}
"""Minutes for a step."""
JOBS = [
    {"id": f"job-{idx}", "prompt": "a fox", "steps": 6 + 4 * idx, **(VIDEO if idx % 2 else PICTURE)}
    for idx in range(6)
]
OPTIONS = ["--ranks", "2", "--policy", "srtf"]
"""On one rank a step has the same bits at any time; on several, their number decides what is rounded."""
FILES = [f"{job['id']}.{'png' if job['model'] == PICTURE['model'] else 'mp4'}" for job in JOBS]


class Run:
    """A `gfgen run` of its own, and all the processes that it has started."""

    def __init__(self, folder: Path, output: str) -> None:
        self.output = folder / output
        command = [sys.executable, "-m", "gfgen", "run", "jobs.jsonl", *OPTIONS, "-o", output]
        self._log = (folder / f"{output}.log").open("a")
        environment = os.environ | {"TMPDIR": str(folder / "tmp")}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=self._log, stderr=self._log, text=True
        )
        self._known: set[int] = set()

    def family(self) -> dict[str, list[int]]:
        """Processes by what they are; the writer is the last one that was started."""
        helpers = children_of(self.process.pid)
        servers = [pid for pid in helpers if b"forkserver" in command_of(pid)]
        forked = sorted(pid for server in servers for pid in children_of(server))
        encoders = [pid for parent in forked for pid in children_of(parent)]
        self._known |= {*helpers, *forked, *encoders}
        return {"server": servers, "worker": forked[:2], "writer": forked[2:]}

    def journal_lines(self) -> int:
        path = self.output / "journal.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(self, moment: Callable[[], bool]) -> bool:
        """Whether the moment came before the run ended."""
        deadline_s = time.monotonic() + BOUND_S
        while not moment():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline_s, "the run stands still"
            time.sleep(0.004)
        return True

    def kill(self, first: str | None) -> None:
        """SIGKILL, to one of its children first."""
        victims = self.family().get(first or "", [])
        if victims:
            with contextlib.suppress(ProcessLookupError):  # it was about to end
                os.kill(victims[0], signal.SIGKILL)
            time.sleep(0.05)
            self.family()
        self.process.kill()
        self.end()

    def end(self) -> int:
        code = self.process.wait(BOUND_S)
        self._log.close()
        return code

    def assert_alone(self) -> None:
        """All that it had started ends with it."""
        assert_end(self._known)


def assert_end(pids: Collection[int]) -> None:
    deadline_s = time.monotonic() + 30
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline_s, f"processes {left} are left"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Not ended, and not a zombie that its new parent has yet to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[str], Run]]:
    """Starts a run into a folder of outputs; none of them outlives a test that fails."""
    runs: list[Run] = []

    def start(output: str) -> Run:
        runs.append(Run(folder, output))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.end()


@pytest.fixture
def folder(tmp_path: Path, tiny_models: object) -> Iterator[Path]:
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in JOBS))
    (tmp_path / "tmp").mkdir()
    shared = sorted(os.listdir("/dev/shm"))
    yield tmp_path
    assert sorted(os.listdir("/dev/shm")) == shared
    # But for torch's cache, and a socket of the fork server when the kill came in the moment of its start.
    own = [path for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torch")]
    assert [path.name for path in own if [file for file in path.glob("*") if not file.is_socket()]] == []
    assert all(path.is_dir() for path in own)


def finished(output: Path) -> dict[str, int]:
    """Files of jobs that the manifest calls done, with the time at which they were written."""
    path = output / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
    names = [entry["file"] for entry in entries if entry.get("status") == "done"]
    return {name: (output / name).stat().st_mtime_ns for name in names}


def moment_of(run: Run, random: Random) -> Callable[[], bool]:
    """When to strike: while it loads, after so many events, or while a file is being written."""
    began_s, begin = time.monotonic(), run.journal_lines()
    delay_s, num_lines = random.uniform(0.2, 6.0), random.randint(1, 30)
    kind = random.choice(["time", "events", "events", "events", "events", "write"])
    if kind == "time":
        return lambda: time.monotonic() > began_s + delay_s
    if kind == "write":
        return lambda: any(run.output.glob(".*.tmp-*"))
    return lambda: run.journal_lines() >= begin + num_lines


def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    folder: Path, start: Callable[[str], Run]
) -> None:
    code, _, err = gfgen(folder, "run", "jobs.jsonl", *OPTIONS, "-o", "calm")
    assert code == 0, err
    random, num_kills, before, runs = Random(4), 0, {}, []
    while num_kills < NUM_KILLS:
        run = start("killed")
        runs.append(run)
        if run.wait_for(moment_of(run, random)):
            run.kill(random.choice([None, None, "worker", "writer", "server"]))
            num_kills += 1
        else:
            assert run.end() == 0, "a killed run keeps the next one from its work"
            break
        if random.random() < 0.5:  # otherwise the next one starts while its orphans end
            run.assert_alone()
        now = finished(run.output)
        assert now | before == now, "a finished job was made again"
        before = now
    last = start("killed")
    assert last.end() == 0
    assert num_kills >= NUM_KILLS // 2
    for run in [*runs, last]:
        run.assert_alone()
    assert_same_outputs(folder / "killed", folder / "calm", untouched=before)


def test_nothing_outlives_a_run_that_is_killed_in_a_step_of_minutes(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps(LONG))
    command = [sys.executable, "-m", "gfgen", "run", "long.jsonl", "-o", "out", "--ranks", "1", "--quiet"]
    journal = tmp_path / "out" / "journal.jsonl"
    with subprocess.Popen(command, cwd=tmp_path) as run:
        while not journal.exists() or journal.read_text().count('"TaskDone"') < 2:  # the first step is next
            assert run.poll() is None
            time.sleep(0.02)
        family = descendants_of(run.pid)
        run.kill()
    assert len(family) == 4, "fork server, resource tracker, rank and writer"
    assert_end(family)


def test_nothing_outlives_a_server_that_is_killed_in_a_step_of_minutes(tmp_path: Path) -> None:
    port = free_port()
    command = ["-m", "gfgen", "serve", "--port", str(port), "-o", "out", "--ranks", "1"]
    server = Server(command, port=port, folder=tmp_path).wait_ready()
    try:
        job_id = server.post("/v1/jobs", **LONG).json()["id"]
        server.wait_for(job_id, "in_progress")
        family = descendants_of(server.process.pid)
    finally:
        server.kill()
    assert len(family) == 5, "HTTP process, fork server, resource tracker, rank and writer"
    assert_end(family)


def assert_same_outputs(killed: Path, calm: Path, *, untouched: dict[str, int]) -> None:
    """One good file for each job, and nothing beside the run's own records."""
    records = [".gfgen.live.json", "journal.jsonl", "manifest.jsonl"]
    assert sorted(os.listdir(killed)) == sorted([*FILES, *records])
    now = finished(killed)
    assert sorted(now) == sorted(FILES)
    assert now | untouched == now, "a finished job was made again"
    for name in FILES:
        if name.endswith(".mp4"):
            assert (killed / name).read_bytes() == (calm / name).read_bytes(), name
        else:
            with Image.open(killed / name) as one, Image.open(calm / name) as other:
                assert np.array_equal(np.asarray(one), np.asarray(other)), name
