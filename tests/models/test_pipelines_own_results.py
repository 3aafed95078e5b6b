"""Every family's steps, run in alternating processes, give the pipeline's own bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, WanImageToVideoPipeline, WanPipeline
from diffusers.image_processor import VaeImageProcessor
from own_calls import arguments_of
from stepping_process import SteppingProcess, loads

from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import resolve_checkpoint
from gfgen.models.geometry.model import load_geometry

torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """One family in one mode: the job, and what its pipeline's call is named and takes."""

    model: str
    pipeline: Any
    job: Mapping[str, Any]
    has_image: bool = False
    call: Mapping[str, Any] = field(default_factory=dict)


VIDEO = {"width": 96, "height": 64, "frames": 5, "steps": 4}
CASES = {
    "5b-text": Case("tiny-wan", WanPipeline, {**VIDEO, "negative_prompt": "dark"}),
    "5b-text-without-cfg": Case("tiny-wan", WanPipeline, {**VIDEO, "guidance_scale": 1.0, "steps": 3}),
    "5b-text-other-shift": Case(
        "tiny-wan", WanPipeline, {**VIDEO, "flow_shift": 2.0}, call={"flow_shift": 2.0}
    ),
    "5b-image": Case("tiny-wan", WanImageToVideoPipeline, VIDEO, has_image=True),
    "shapes-text": Case("shapes", WanPipeline, VIDEO),
    "shapes-picture-with-cfg": Case(
        "shapes", WanPipeline, {**VIDEO, "frames": 1, "negative_prompt": "blue", "guidance_scale": 3.0}
    ),
    "shapes-image": Case("shapes", WanImageToVideoPipeline, VIDEO, has_image=True),
    "a14b-text": Case("tiny-wan-moe", WanPipeline, {**VIDEO, "guidance_scale": 4.0, "guidance_scale_2": 2.5}),
    "a14b-text-other-boundary": Case(
        "tiny-wan-moe", WanPipeline, {**VIDEO, "boundary_ratio": 0.6}, call={"boundary_ratio": 0.6}
    ),
    "a14b-image": Case("tiny-wan-moe-i2v", WanImageToVideoPipeline, VIDEO, has_image=True),
    "qwen-with-cfg": Case("tiny-qwen-image", QwenImagePipeline, {"width": 96, "height": 64, "steps": 4}),
    "qwen-without-cfg": Case(
        "tiny-qwen-image", QwenImagePipeline, {"width": 64, "height": 64, "steps": 3, "true_cfg_scale": 1.0}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_in_two_processes_give_the_pipelines_own_bits(
    name: str,
    tiny_models: Mapping[str, Path],
    two_processes: tuple[SteppingProcess, SteppingProcess],
    picture: Path,
) -> None:
    case = CASES[name]
    checkpoint = resolve_checkpoint(case.model)
    image = str(picture) if case.has_image else None
    prompt = "a red circle moves up" if case.model == "shapes" else "a red fox, quietly"
    asked = JobSpec(id=name, prompt=prompt, seed=11, image=image, **case.job)
    spec = load_geometry(checkpoint).resolve(asked)

    latents, frames = _run_in(two_processes, checkpoint, spec)

    assert torch.equal(latents, _call(case, checkpoint, spec, output_type="latent"))
    decoded = _call(case, checkpoint, spec, output_type="np")
    np.testing.assert_array_equal(frames.numpy(), _as_bytes(decoded))


def test_odd_sizes_are_rounded_as_the_pipeline_rounds_them(tiny_models: Mapping[str, Path]) -> None:
    asked = JobSpec(id="odd", prompt="x", seed=1, width=80, height=112, frames=7, steps=1)
    spec = load_geometry(tiny_models["tiny-wan"]).resolve(asked)
    pipeline = WanPipeline.from_pretrained(str(tiny_models["tiny-wan"]), local_files_only=True)
    video = pipeline(
        prompt="x", width=80, height=112, num_frames=7, num_inference_steps=1, output_type="pt"
    ).frames
    assert video.shape[1:] == (spec.frames, 3, spec.height, spec.width)


def _run_in(
    processes: tuple[SteppingProcess, ...], checkpoint: Path, spec: JobSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Final latents and frames; consecutive tasks never run in the same process."""
    first, second = processes
    prompt = first.call(checkpoint, "encode", spec)
    condition, latents = map(_dumps, loads(second.call(checkpoint, "prepare", spec, prompt)))
    assert spec.steps is not None
    for step in range(spec.steps):
        process = processes[step % 2]
        latents = process.call(checkpoint, "denoise", spec, prompt, condition, latents, step=step)
    made = loads(processes[spec.steps % 2].call(checkpoint, "decode", spec, latents))
    return loads(latents).tensors["sample"], made.tensors["frames"]


def _dumps(value: Any) -> bytes:
    from stepping_process import dumps

    return dumps(value)


def _call(case: Case, checkpoint: Path, spec: JobSpec, *, output_type: str) -> Any:
    """What the pipeline's own __call__ returns for the job: latents, or pictures in [0, 1]."""
    pipeline = case.pipeline.from_pretrained(str(checkpoint), dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    if "flow_shift" in case.call:
        scheduler = pipeline.scheduler
        pipeline.scheduler = type(scheduler).from_config(scheduler.config, flow_shift=case.call["flow_shift"])
    if "boundary_ratio" in case.call:
        pipeline.register_to_config(boundary_ratio=case.call["boundary_ratio"])
    generator = torch.Generator("cpu").manual_seed(spec.seed or 0)
    arguments = arguments_of(spec, case.pipeline, output_type=output_type)
    result = pipeline(**arguments, generator=generator)[0]
    return result if case.pipeline is QwenImagePipeline or output_type == "latent" else result[0]


def _as_bytes(pictures: Any) -> Any:
    """Pictures as diffusers' own numpy_to_pil makes them."""
    return np.stack([np.asarray(image) for image in VaeImageProcessor.numpy_to_pil(pictures)])
