"""`gfgen run` with checkpoints of pipelines that have no adapter of their own, and one of Wan."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from pipeline_runs import POLICY, end, has_frames, job_of, own_frames, run, start, wait_until_partway
from small_checkpoints import save_checkpoints

from gfgen.runtime.files.journal import JOURNAL_NAME
from gfgen.runtime.files.manifest import MANIFEST_NAME, read_manifest
from gfgen.runtime.files.outputs import read_metadata

torch.set_num_threads(1)
"""As ranks compute."""

STEPS = 8
COMMON = {"prompt": "a red cat", "size": "64x64", "steps": STEPS}
FAMILIES = ("FluxPipeline", "CogVideoXPipeline", "HunyuanVideoPipeline", "WanPipeline")
"""Families whose jobs run beside those below."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    save_checkpoints(folder, ("PixArtSigmaPipeline", "LTXImageToVideoPipeline", *FAMILIES))
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
    others = [{**job_of(name), "model": str(folder / name)} for name in FAMILIES]
    (folder / "two.jsonl").write_text("".join(f"{json.dumps(job)}\n" for job in jobs))
    (folder / "jobs.jsonl").write_text("".join(f"{json.dumps(job)}\n" for job in (*jobs, *others)))
    (folder / "hop.py").write_text(POLICY)
    return folder


def num_done(folder: Path) -> int:
    return (folder / JOURNAL_NAME).read_text().count('"TaskDone"')


def hashes(output: Path) -> dict[str, list[str]]:
    lines = read_manifest(output / MANIFEST_NAME)
    return {
        job_id: [file["sha256"] for file in line.get("outputs", [line])] for job_id, line in lines.items()
    }


def test_a_run_that_was_stopped_ends_like_an_undisturbed_one(folder: Path) -> None:
    run(folder, "calm")
    lines = read_manifest(folder / "calm" / MANIFEST_NAME)
    assert [file["file"] for file in lines["cats"]["outputs"]] == ["cats-1.png", "cats-2.png"]
    assert (lines["moving"]["file"], "outputs" in lines["moving"]) == ("moving.mp4", False)
    assert all(len(set(line["layouts"])) == 2 for line in lines.values()), "steps hop between ranks"

    stopped = start(folder, "stopped")
    wait_until_partway(stopped, folder / "stopped", len(lines))
    stopped.send_signal(signal.SIGTERM)
    code, text = end(stopped)
    assert code == 143, text
    assert len(list((folder / "stopped" / ".resume").glob("*.state"))) == len(lines), text
    before = num_done(folder / "stopped")
    run(folder, "stopped")
    num_tasks = len(lines) * (STEPS + 3)
    assert num_done(folder / "stopped") - before < num_tasks - 2 * len(lines), "it continues where it stopped"
    assert hashes(folder / "stopped") == hashes(folder / "calm")


@pytest.mark.parametrize("name", FAMILIES)
def test_files_are_those_of_the_pipelines_own_call(folder: Path, name: str) -> None:
    line = read_manifest(folder / "calm" / MANIFEST_NAME)[name]
    frames = own_frames(folder, name)
    assert has_frames(folder / "calm" / line["file"], frames)
    frames[0, 0, 0] ^= 64
    assert not has_frames(folder / "calm" / line["file"], frames)


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


def test_the_lines_in_files_run_again_and_give_their_bytes(folder: Path) -> None:
    files = ["cats-2.png", "moving.mp4", "FluxPipeline.png"]
    lines = [json.dumps(read_metadata(folder / "calm" / file)) for file in files]
    (folder / "again.jsonl").write_text("\n".join(lines))
    run(folder, "again", jobs="again.jsonl")
    before = hashes(folder / "calm")
    assert hashes(folder / "again") == {name: before[name] for name in ("cats", "moving", "FluxPipeline")}


def test_two_ranks_share_the_steps_of_a_pipeline(folder: Path) -> None:
    run(folder, "shared", policy="srtf,degree=2", jobs="two.jsonl")
    lines = read_manifest(folder / "shared" / MANIFEST_NAME)
    for line in lines.values():
        assert "[0,1] cfg2" in line["layouts"]
    for number in (1, 2):
        pictures = [Image.open(folder / output / f"cats-{number}.png") for output in ("shared", "calm")]
        shared, alone = (np.asarray(picture, np.int16) for picture in pictures)
        assert np.abs(shared - alone).max() <= 1
