"""`gfgen run` of small pipelines on two CPU ranks: jobs, a policy that hops, and what own calls make."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commands import gfgen

from gfgen.runtime.files.journal import JOURNAL_NAME
from gfgen.runtime.files.outputs import read_metadata, write_output

BOUND_S = 120.0
PARTWAY = 4
"""Tasks that each job has begun when its run is disturbed."""
POLICY = '''
from gfgen.layout import Layout
from gfgen.snapshot import Decision


def hop(snapshot):
    """Jobs take turns, and each step of a job runs on another rank than the one before."""
    decisions, free = [], set(snapshot.free_ranks)
    for job in sorted(snapshot.open.values(), key=lambda job: job.next_task.index):
        last = job.last_layout.ranks[0] if job.last_layout else 1
        target = (last + 1) % len(snapshot.ranks)
        if target in free:
            free.remove(target)
            decisions.append(Decision(job.next_task, Layout.single(target)))
    return decisions
'''
_MOVING = {"frames": 9, "fps": 8, "quality": 100}
_JOBS: Mapping[str, Mapping[str, Any]] = {
    "CogVideoXPipeline": {**_MOVING, "args": {"max_sequence_length": 16}},
    "FluxPipeline": {"true_cfg_scale": 2.0, "args": {"max_sequence_length": 16}},
    "HunyuanVideoPipeline": {**_MOVING, "true_cfg_scale": 2.0},
    "LTXPipeline": {**_MOVING, "scheduler": {"shift": 3.0}},
    "PixArtSigmaPipeline": {"args": {"use_resolution_binning": False}},
    "WanPipeline": {**_MOVING, "guidance_scale_2": 2.0},
}
_COMMON = {
    "prompt": "a red cat",
    "negative_prompt": "blurry",
    "guidance_scale": 3.0,
    "width": 64,
    "height": 64,
    "steps": 8,
    "seed": 5,
}
_WORDS = {"frames": "num_frames", "fps": "frame_rate", "steps": "num_inference_steps"}
"""Arguments of calls by fields of jobs, where the names differ."""


def job_of(name: str) -> dict[str, Any]:
    """A job of a pipeline, as a line of a job file; its model is a folder of the pipeline's name."""
    return {"id": name, "model": name, **_COMMON, **_JOBS.get(name, {})}


def start(folder: Path, output: str, **options: str) -> subprocess.Popen[str]:
    """`gfgen run` of a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "gfgen", *_words(output, **options)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, output: str, **options: str) -> None:
    """`gfgen run` from here, whose jobs are all done."""
    code, _, err = gfgen(folder, *_words(output, **options))
    assert code == 0, err


def _words(output: str, *, policy: str = "hop.py:hop", jobs: str = "jobs.jsonl") -> list[str]:
    """It stops at once when it is asked to."""
    words = ["run", jobs, "--ranks", "2", "--device", "cpu", "--policy", policy]
    return [*words, "--grace", "0", "-o", output]


def end(run: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and output."""
    text, _ = run.communicate(timeout=BOUND_S)
    return run.returncode, text


def wait_until_partway(run: subprocess.Popen[str], output: Path, num_jobs: int) -> None:
    """Wait until each job has begun some tasks in the current run."""
    given = len(_journal(output))
    _wait(lambda: _are_partway(_journal(output)[given:], num_jobs), run)


def _are_partway(lines: list[str], num_jobs: int) -> bool:
    dispatches = [each for line in lines for each in json.loads(line).get("dispatches") or ()]
    begun = Counter(job for _, job, *_ in dispatches)
    return len(begun) == num_jobs and min(begun.values()) >= PARTWAY


def _journal(output: Path) -> list[str]:
    path = output / JOURNAL_NAME
    return path.read_text().splitlines()[:-1] if path.exists() else []


def _wait(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise RuntimeError(f"ended or stood still before time: {end(process)[1]}")
        time.sleep(0.05)


def own_frames(folder: Path, name: str, *, load: Callable[[Any, Path], Any] | None = None) -> Any:
    """What the pipeline's own call makes of its job, as uint8 [F, H, W, 3].

    load: makes a pipeline of a class from its folder; without it, diffusers does so.
    """
    import diffusers
    import numpy as np
    import torch

    from gfgen.models.loading.components import without_progress_bars

    torch.set_num_threads(1)  # as ranks compute
    job = job_of(name)
    with without_progress_bars():
        kind = getattr(diffusers, name)
        pipeline = load(kind, folder / name) if load else kind.from_pretrained(folder / name)
    pipeline.set_progress_bar_config(disable=True)
    if (options := job.pop("scheduler", None)) is not None:
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, **options)
    given = {_WORDS.get(field, field): value for field, value in {**job, **job.pop("args", {})}.items()}
    taken = inspect.signature(pipeline.__call__).parameters
    args = {field: value for field, value in given.items() if field in taken}
    generator = torch.Generator().manual_seed(job["seed"])
    made = pipeline(**args, generator=generator, output_type="np")
    return (np.asarray(made[0][0] if "frames" in job else made[0]) * 255).round().astype(np.uint8)


def has_frames(path: Path, frames: Any) -> bool:
    """Whether a file has the bytes of one that is written from these frames, with the same tags."""
    named = re.search(rb"Weights: (sha256 [0-9a-f]+)", path.read_bytes())
    weights = {"weights": named[1].decode()} if named else {}  # the text of tags has them, the job does not
    with tempfile.TemporaryDirectory() as apart:
        other = Path(apart) / path.name
        write_output(frames, other, fps=_MOVING["fps"], metadata=read_metadata(path) | weights)
        return other.read_bytes() == path.read_bytes()
