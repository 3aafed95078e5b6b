"""`gfgen run --keep-if` as a user starts it, undisturbed, killed and interrupted; workers compute nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from process_tree import descendants_of

TESTS = Path(__file__).parents[1]
FILTER = """
import os, pathlib, time
def good(result):
    if result.job.id == "hangs" and "HANG" in os.environ:
        pathlib.Path("hung").touch()
        time.sleep(600)
    with open("judged", "a") as file:
        print(result.job.id, result.job.seed, file=file)
    return {"kept": True, "hangs": False}.get(result.job.id, "again" if result.job.seed < 8 else (True, 0.5))
"""
PATIENCE_S = 120


def options(output: str) -> list[str]:
    words = ["-o", output, "--device", "cpu", "--policy", "srtf", "--keep-if", "mine:good"]
    return [*words, "--on-file", f"echo $GFGEN_JOB_ID >> {output}.files"]


def start(folder: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fake_run", "run", "jobs.jsonl", *words]
    env = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", **env}
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(folder: Path, output: str) -> str:
    """What a run that succeeds says."""
    process = start(folder, *options(output))
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out
    return out


def wait_for(is_there: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def entries(folder: Path) -> list[dict[str, Any]]:
    path = folder / "manifest.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_and_an_interrupted_run_end_as_an_undisturbed_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILTER)
    same = {"prompt": "a red circle", "seed": 7, "model": "fake-image", "steps": 2}
    jobs = [{"id": "kept"}, {"id": "again"}, {"id": "hangs", "flow_shift": 1.0}]  # a second later than both
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps({**job, **same}) + "\n" for job in jobs))

    assert "2 done, 1 dropped" in run(tmp_path, "whole")
    assert sorted((tmp_path / "whole.files").read_text().split()) == ["again", "kept"]
    pictures = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.png")}
    assert pictures.keys() == {"kept.png", "again.png"}
    (tmp_path / "judged").unlink()

    killed = start(tmp_path, *options("out"), HANG="1")
    wait_for((tmp_path / "hung").exists, killed)
    others = descendants_of(killed.pid)
    killed.kill()
    killed.communicate()
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        time.sleep(0.05)

    stopped = start(tmp_path, *options("out"), HANG="1")
    wait_for(lambda: [line for line in entries(tmp_path / "out") if line["seed"] == 8], stopped)
    stopped.send_signal(signal.SIGINT)
    out, _ = stopped.communicate(timeout=PATIENCE_S)
    assert stopped.returncode == 130, out
    assert "--keep-if has not judged 2 results: run the same command again to go on" in out

    journal = (tmp_path / "out/journal.jsonl").read_bytes()
    run(tmp_path, "out")
    assert (tmp_path / "out/journal.jsonl").read_bytes() == journal, "all pictures were there"
    judged = (tmp_path / "judged").read_text().splitlines()
    assert sorted(judged) == ["again 7", "again 8", "hangs 7", "kept 7"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.png")} == pictures
    latest = {line["id"]: line for line in entries(tmp_path / "out")}
    assert {name: line["status"] for name, line in latest.items()} == {
        "kept": "done",
        "again": "done",
        "hangs": "dropped",
    }
    assert latest["again"]["filter"] == {"by": "mine:good", "attempt": 2, "decision": "keep", "score": 0.5}


def test_a_filter_that_is_not_there_is_one_line_before_a_model_loads(tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a"}\n')
    missing, alone = start(tmp_path, *options("out")), start(tmp_path, "--again", "2")
    out, _ = missing.communicate(timeout=PATIENCE_S)
    assert missing.returncode == 2
    assert out == "gfgen: --keep-if: cannot import mine: ModuleNotFoundError: No module named 'mine'\n"
    out, _ = alone.communicate(timeout=PATIENCE_S)
    assert alone.returncode == 2
    assert "--again goes with --keep-if" in out
