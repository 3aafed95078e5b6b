"""Adapters leave nothing behind: not on themselves, not in what they were given."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from gfgen.errors import JobError
from gfgen.job.spec import JobSpec
from gfgen.models.families.adapter import Fields
from gfgen.models.families.pictures import load_image
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.model import load_geometry

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-wan-moe-i2v", "tiny-qwen-image"])
def test_two_jobs_in_turn_give_what_each_gives_alone(
    tiny_models: Mapping[str, Path], name: str, picture: Path
) -> None:
    first, second = _two_jobs(tiny_models[name], picture)
    alone = [_latents(load_adapter(tiny_models[name]), job)[-1] for job in (first, second)]

    adapter = load_adapter(tiny_models[name])
    configs = _configs(adapter)
    states = [_start(adapter, job) for job in (first, second)]
    for step in range(first.steps or 0):
        for state, job in zip(states, (first, second), strict=True):
            state["latents"] = adapter.denoise(job, **state, step=step)

    for state, latents in zip(states, alone, strict=True):
        assert _equal(state["latents"], latents)
    assert _configs(adapter) == configs


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-wan-moe-i2v", "tiny-qwen-image"])
def test_artifacts_given_stay_as_they_are_and_share_no_storage_with_results(
    tiny_models: Mapping[str, Path], name: str, picture: Path
) -> None:
    job, _ = _two_jobs(tiny_models[name], picture)
    adapter = load_adapter(tiny_models[name])
    state = _start(adapter, job)
    for step in range(job.steps or 0):
        before = {key: _copy(value) for key, value in state.items()}
        result = adapter.denoise(job, **state, step=step)
        assert all(_equal(before[key], state[key]) for key in state)
        given = {t.untyped_storage().data_ptr() for value in state.values() for t in value.tensors.values()}
        assert given.isdisjoint(t.untyped_storage().data_ptr() for t in result.tensors.values())
        state["latents"] = result


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-wan-moe", "tiny-wan-moe-i2v", "tiny-qwen-image"])
def test_artifacts_are_as_the_geometry_says(
    tiny_models: Mapping[str, Path], name: str, picture: Path
) -> None:
    """Shapes are exact but for text (an upper bound) and the state before the first steps (less)."""
    job, _ = _two_jobs(tiny_models[name], picture)
    adapter, trajectory = load_adapter(tiny_models[name]), load_geometry(tiny_models[name]).trajectory(job)
    state = _start(adapter, job)
    for step in range(job.steps or 0):
        state["latents"] = adapter.denoise(job, **state, step=step)
    for artifact, fields in state.items():
        declared = {key: (shape, dtype) for key, shape, dtype in trajectory.artifact(artifact).fields}
        assert fields.tensors.keys() == declared.keys()
        for key, tensor in fields.tensors.items():
            shape, dtype = declared[key]
            assert str(tensor.dtype) == f"torch.{dtype}"
            assert tensor.shape == shape or (artifact == "prompt" and tensor.shape[1] <= shape[1])
    frames = adapter.decode(job, state["latents"]).tensors["frames"]
    assert frames.dtype == torch.uint8
    assert tuple(frames.shape) == trajectory.artifact("frames").fields[0][1]


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-qwen-image"])
def test_the_sum_of_the_pixels_shows_nan_that_bytes_do_not(
    tiny_models: Mapping[str, Path], name: str, picture: Path
) -> None:
    job, _ = _two_jobs(tiny_models[name], picture)
    adapter = load_adapter(tiny_models[name])
    latents = _copy(_start(adapter, job)["latents"])
    assert torch.isfinite(adapter.decode(job, latents).tensors["pixel_sum"])
    latents.tensors["sample"].view(-1)[-1] = torch.nan
    assert torch.isnan(adapter.decode(job, latents).tensors["pixel_sum"])


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-wan-moe", "tiny-qwen-image"])
def test_bfloat16_runs_and_stays_near(tiny_models: Mapping[str, Path], name: str, picture: Path) -> None:
    """Text to video in bf16 takes one timestep for all tokens; rounding is all that may differ.

    bf16 keeps 8 bits, and a few steps with guidance add up: a tenth of the spread is generous.
    """
    job, _ = _two_jobs(tiny_models[name], picture)
    job = replace(job, image=None)
    exact = _latents(load_adapter(tiny_models[name]), job)[-1].tensors["sample"]
    rounded = _latents(load_adapter(tiny_models[name], dtype="bfloat16"), job)[-1].tensors["sample"].float()
    assert (exact - rounded).abs().mean() < 0.1 * exact.std()


def test_picture_is_turned_upright_and_made_rgb(picture: Path) -> None:
    image = load_image(picture)
    assert (image.mode, image.size) == ("RGB", (90, 140))


def test_broken_picture_is_a_job_error(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    for name, why in (("a.png", "it is none"), ("missing.png", "No such file or directory")):
        with pytest.raises(JobError, match=rf"cannot be read as a picture \({why}\)"):
            load_image(tmp_path / name)
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    assert load_image(tmp_path / "b.png").size == (8, 8)


def test_a_picture_that_was_edited_after_admission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(path)
    admitted = hashlib.sha256(path.read_bytes()).hexdigest()
    assert load_image(path, sha256=admitted).getpixel((0, 0)) == (255, 0, 0)
    Image.new("RGB", (8, 8), "blue").save(path)
    with pytest.raises(JobError, match=r"image = .*a\.png: has changed since the job file was read"):
        load_image(path, sha256=admitted)


def test_preparing_a_job_checks_that_its_picture_is_the_one_that_was_admitted(
    tiny_models: Mapping[str, Path], picture: Path
) -> None:
    adapter = load_adapter(tiny_models["tiny-wan"])
    job, _ = _two_jobs(tiny_models["tiny-wan"], picture)
    edited = replace(job, image=str(picture), image_sha256="0" * 64)
    with pytest.raises(JobError, match="has changed"):
        adapter.prepare(edited, adapter.encode(edited))


def _two_jobs(checkpoint: Path, picture: Path) -> tuple[JobSpec, JobSpec]:
    """Jobs of different shape, seed and, where it exists, flow shift."""
    geometry = load_geometry(checkpoint)
    video: dict[str, Any] = {} if geometry.kind == "image" else {"frames": 5}
    image = {"image": str(picture)} if geometry.family in ("wan-ti2v", "wan-moe-i2v") else {}
    first = JobSpec(id="a", prompt="a red fox", seed=1, width=64, height=64, steps=3, **video, **image)
    second = JobSpec(id="b", prompt="blue waves", seed=2, width=96, height=64, steps=3, **video, **image)
    if geometry.kind == "video":
        second = replace(second, flow_shift=1.5)
    return geometry.resolve(first), geometry.resolve(second)


def _start(adapter: Any, job: JobSpec) -> dict[str, Fields]:
    prompt = adapter.encode(job)
    condition, latents = adapter.prepare(job, prompt)
    return {"prompt": prompt, "condition": condition, "latents": latents}


def _latents(adapter: Any, job: JobSpec) -> list[Fields]:
    state = _start(adapter, job)
    steps = [state["latents"]]
    for step in range(job.steps or 0):
        state["latents"] = adapter.denoise(job, **state, step=step)
        steps.append(state["latents"])
    return steps


def _configs(adapter: Any) -> list[dict[str, Any]]:
    pipelines = [getattr(adapter, name) for name in ("_image", "_pipeline") if hasattr(adapter, name)]
    return [dict(config) for p in pipelines for config in (p.config, p.scheduler.config)]


def _copy(fields: Fields) -> Fields:
    return Fields({key: value.clone() for key, value in fields.tensors.items()}, dict(fields.scalars))


def _equal(one: Fields, other: Fields) -> bool:
    return (
        one.scalars == other.scalars
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)
    )
