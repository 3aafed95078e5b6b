"""`gfgen run` with checkpoints of pipelines that have no adapter of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "models"))
from small_checkpoints import save_checkpoint

from gfgen.runtime.files.journal import JOURNAL_NAME
from gfgen.runtime.files.manifest import MANIFEST_NAME, read_manifest

torch.set_num_threads(1)
"""As ranks compute."""

BOUND_S = 120.0
STEPS = 12
HOP = '''
from gfgen.layout import Layout
from gfgen.snapshot import Decision


def hop(snapshot):
    """Each step of a job runs on another rank than the one before."""
    decisions, free = [], set(snapshot.free_ranks)
    for job in snapshot.open.values():
        last = job.last_layout.ranks[0] if job.last_layout else 1
        target = (last + 1) % len(snapshot.ranks)
        if target in free:
            free.remove(target)
            decisions.append(Decision(job.next_task, Layout.single(target)))
    return decisions
'''
COMMON = {"prompt": "a red cat", "size": "64x64", "steps": STEPS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    for name in ("PixArtSigmaPipeline", "LTXImageToVideoPipeline"):
        save_checkpoint(name, folder / name)
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(folder / "first.png")
    args = {"num_images_per_prompt": 2, "use_resolution_binning": False, "max_sequence_length": 16}
    jobs = [
        {"id": "cats", "model": str(folder / "PixArtSigmaPipeline"), "args": args, **COMMON},
        {
            "id": "moving",
            "model": str(folder / "LTXImageToVideoPipeline"),
            "frames": 9,
            "files": {"image": "first.png"},
            "scheduler": {"shift": 3.0},
            **COMMON,
        },
    ]
    (folder / "jobs.jsonl").write_text("".join(f"{json.dumps(job)}\n" for job in jobs))
    (folder / "hop.py").write_text(HOP)
    return folder


def start(folder: Path, output: str, *, policy: str = "hop.py:hop") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gfgen", "run", "jobs.jsonl", "--ranks", "2", "--policy", policy]
    options = ["--grace", "0", "-o", output]
    return subprocess.Popen(
        [*command, *options], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(run: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = run.communicate(timeout=BOUND_S)
    return run.returncode, text


def num_done(folder: Path) -> int:
    path = folder / JOURNAL_NAME
    return path.read_text().count('"TaskDone"') if path.exists() else 0


def hashes(folder: Path) -> Mapping[str, Any]:
    lines = read_manifest(folder / MANIFEST_NAME)
    return {
        job_id: [file["sha256"] for file in line.get("outputs", [line])] for job_id, line in lines.items()
    }


def test_a_stopped_run_continues_and_ends_like_an_undisturbed_one(folder: Path) -> None:
    code, text = end(start(folder, "calm"))
    assert code == 0, text
    lines = read_manifest(folder / "calm" / MANIFEST_NAME)
    assert [file["file"] for file in lines["cats"]["outputs"]] == ["cats-1.png", "cats-2.png"]
    assert (lines["moving"]["file"], "outputs" in lines["moving"]) == ("moving.mp4", False)
    assert all(len(set(line["layouts"])) == 2 for line in lines.values()), "steps hop between ranks"

    stopped = start(folder, "stopped")
    deadline_s = time.monotonic() + BOUND_S
    while num_done(folder / "stopped") < 8:
        assert stopped.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    code, text = end(stopped)
    assert code == 143, text
    assert list((folder / "stopped" / ".resume").glob("*.state")), text
    code, text = end(start(folder, "stopped"))
    assert code == 0, text
    assert num_done(folder / "stopped") <= 2 * (STEPS + 3) + 2, "it continued from where it had stopped"
    assert hashes(folder / "stopped") == hashes(folder / "calm")


def test_pictures_are_those_of_the_pipelines_own_call(folder: Path) -> None:
    seed = read_manifest(folder / "calm" / MANIFEST_NAME)["cats"]["seed"]
    pipeline = diffusers.PixArtSigmaPipeline.from_pretrained(folder / "PixArtSigmaPipeline")
    made = pipeline(
        "a red cat",
        width=64,
        height=64,
        num_inference_steps=STEPS,
        num_images_per_prompt=2,
        use_resolution_binning=False,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(seed),
    )
    for number, picture in enumerate(made.images, start=1):
        with Image.open(folder / "calm" / f"cats-{number}.png") as ours:
            assert np.array_equal(np.asarray(ours), np.asarray(picture))


def test_two_ranks_share_the_steps_of_a_pipeline(folder: Path) -> None:
    code, text = end(start(folder, "shared", policy="srtf,degree=2"))
    assert code == 0, text
    lines = read_manifest(folder / "shared" / MANIFEST_NAME)
    for line in lines.values():
        assert "[0,1] cfg2" in line["layouts"]
    for number in (1, 2):
        pictures = [Image.open(folder / output / f"cats-{number}.png") for output in ("shared", "calm")]
        shared, alone = (np.asarray(picture, np.int16) for picture in pictures)
        assert np.abs(shared - alone).max() <= 1
