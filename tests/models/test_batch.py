"""A step of several jobs in one forward gives what diffusers' pipeline gives for a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gfgen.job.spec import JobSpec
from gfgen.models.families.adapter import SAMPLE, Adapter, Fields, StepInput
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.model import load_geometry

torch.set_num_threads(1)
PROMPTS = ("a red ball", "a tin cup", "four blue boxes on a long shelf")
NEGATIVE = "blurry"


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-wan-moe", "tiny-qwen-image"])
def test_jobs_in_a_batch_get_what_the_pipeline_makes_of_their_prompts_together(
    tiny_models: Mapping[str, Path], name: str
) -> None:
    adapter, jobs = _adapter(tiny_models[name]), _jobs(tiny_models[name], PROMPTS[:2])
    wanted = _by_pipeline(adapter, jobs)
    found = torch.cat([latents.tensors[SAMPLE] for latents in _denoised(adapter, jobs)])
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny-wan", "tiny-qwen-image"])
def test_texts_of_several_lengths_share_a_batch(
    tiny_models: Mapping[str, Path], name: str, dtype: str
) -> None:
    adapter, jobs = _adapter(tiny_models[name], dtype=dtype), _jobs(tiny_models[name], PROMPTS)
    alone = [_denoised(adapter, [job])[0] for job in jobs]
    for own, wanted in zip(_denoised(adapter, jobs), alone, strict=True):
        scale = float(wanted.tensors[SAMPLE].abs().max())
        difference = float((own.tensors[SAMPLE] - wanted.tensors[SAMPLE]).abs().max())
        assert difference < (1e-5 if dtype == "float32" else 0.03) * scale


def _adapter(path: Path, **options: Any) -> Adapter:
    return load_adapter(path, **options)


def _jobs(path: Path, prompts: Sequence[str]) -> list[JobSpec]:
    one = JobSpec(id="one", prompt="", negative_prompt=NEGATIVE, width=32, height=32, steps=3)
    geometry = load_geometry(path)
    frames = None if geometry.family == "qwen-image" else 5
    given = [
        replace(one, id=f"job {idx}", prompt=prompt, seed=idx, frames=frames)
        for idx, prompt in enumerate(prompts)
    ]
    return [geometry.resolve(job) for job in given]


def _denoised(adapter: Adapter, jobs: Sequence[JobSpec]) -> list[Fields]:
    prompts = [adapter.encode(job) for job in jobs]
    prepared = [adapter.prepare(job, prompt) for job, prompt in zip(jobs, prompts, strict=True)]
    conditions, latents = [each for each, _ in prepared], [each for _, each in prepared]
    for step in range(jobs[0].steps or 0):
        inputs = [StepInput(*each) for each in zip(jobs, prompts, conditions, latents, strict=True)]
        latents = adapter.denoise_batch(inputs, step=step)
    return latents


def _by_pipeline(adapter: Any, jobs: Sequence[JobSpec]) -> torch.Tensor:
    job, of_qwen = jobs[0], adapter.geometry.family == "qwen-image"
    pipeline = adapter._pipeline
    options: dict[str, Any] = (
        {"true_cfg_scale": job.true_cfg_scale}
        if of_qwen
        else {
            "num_frames": job.frames,
            "guidance_scale": job.guidance_scale,
            "guidance_scale_2": job.guidance_scale_2,
        }
    )
    result = pipeline(
        prompt=[each.prompt for each in jobs],
        negative_prompt=[NEGATIVE] * len(jobs),
        height=job.height,
        width=job.width,
        num_inference_steps=job.steps,
        generator=[torch.Generator("cpu").manual_seed(each.seed or 0) for each in jobs],
        output_type="latent",
        **options,
    )
    return torch.as_tensor(result.images if of_qwen else result.frames)
