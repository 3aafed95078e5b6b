"""`gfgen run` on GPUs: the same jobs on one rank, on several, after a worker's death and the run's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from gpu_ranks import NUM_RANKS, RANKS_PER_GPU, needs_two_ranks
from movies import decoded
from PIL import Image
from process_tree import children_of

TIMEOUT_S = 180.0 * RANKS_PER_GPU

pytestmark = [pytest.mark.gpu, needs_two_ranks]


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory, tiny_models: Mapping[str, Path]) -> Path:
    """Pictures and short videos of built-in models."""
    jobs = [
        {"id": f"{model}-{idx}", "prompt": "a red fox", "model": model, "size": "64x64", "steps": 4}
        | ({} if "image" in model else {"frames": 5})
        for model in ("shapes", "tiny-wan", "tiny-wan-moe", "tiny-qwen-image")
        for idx in range(2)
    ]
    path = tmp_path_factory.mktemp("jobs") / "jobs.jsonl"
    path.write_text("".join(f"{json.dumps(job)}\n" for job in jobs))
    return path


def command(job_file: Path, output: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "gfgen", "run", str(job_file), "--output", str(output)),
        *("--device", "cuda", "--ranks", str(NUM_RANKS), "--ranks-per-gpu", str(RANKS_PER_GPU), *options),
    ]


def layouts_of(output: Path) -> Mapping[str, list[str]]:
    """By job that is done, the layouts of its manifest line."""
    lines = [json.loads(line) for line in (output / "manifest.jsonl").read_text().splitlines()]
    return {line["id"]: line["layouts"] for line in lines if line["status"] == "done"}


@pytest.mark.parametrize(("policy", "size"), [("srtf", 1), ("srtf,degree=2", 2), ("legacy", NUM_RANKS)])
def test_all_jobs_are_done_under_every_degree(job_file: Path, tmp_path: Path, policy: str, size: int):
    subprocess.run(command(job_file, tmp_path, "--policy", policy), check=True, timeout=TIMEOUT_S)
    layouts = layouts_of(tmp_path)
    assert len(layouts) == 8
    assert max(name.count(",") + 1 for names in layouts.values() for name in names) == size


def test_a_worker_that_is_killed_costs_no_job(job_file: Path, tmp_path: Path):
    run = subprocess.Popen(command(job_file, tmp_path, "--policy", "srtf,degree=2"))
    journal = tmp_path / "journal.jsonl"
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (journal.exists() and "TaskDone" in journal.read_text()):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    first_worker = next(worker for server in children_of(run.pid) for worker in sorted(children_of(server)))
    os.kill(first_worker, signal.SIGKILL)
    assert run.wait(TIMEOUT_S) == 0
    assert len(layouts_of(tmp_path)) == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_run_that_ends_early_goes_on_to_the_same_frames(job_file: Path, tmp_path: Path, number: int):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    subprocess.run(command(job_file, whole, "--policy", "legacy"), check=True, timeout=TIMEOUT_S)
    run = subprocess.Popen(command(job_file, parted, "--policy", "legacy"))
    journal = parted / "journal.jsonl"
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (journal.exists() and journal.read_text().count("TaskDone") >= 12):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    os.kill(run.pid, number)
    assert run.wait(TIMEOUT_S) != 0
    subprocess.run(command(job_file, parted, "--policy", "legacy"), check=True, timeout=TIMEOUT_S)
    expected = frames_of(whole)
    assert len(expected) == 8
    for name, frames in frames_of(parted).items():
        np.testing.assert_array_equal(frames, expected.pop(name), name)
    assert not expected


def frames_of(output: Path) -> dict[str, np.ndarray]:
    """By file, as they would be shown."""
    pictures = {path.name: np.asarray(Image.open(path)) for path in output.glob("*.png")}
    return pictures | {path.name: decoded(path, height=64, width=64) for path in output.glob("*.mp4")}
