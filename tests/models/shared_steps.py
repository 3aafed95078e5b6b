"""Jobs of every family that are awkward to share, and their steps on one rank or on many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gfgen.job.spec import JobSpec
from gfgen.models.families.adapter import Fields
from gfgen.models.families.registry import load_adapter, resolve_checkpoint
from gfgen.models.parallel.parallel import Parallel

STEPS = 4
TOLERANCE = 1e-5
"""Of the final latents' largest magnitude, in fp32 on a CPU."""

# Token counts are even for some degrees from 2 to 8 and uneven for others: 18, 30 and 20. Video is
# cut across rows and frames. Qwen-Image's prompts have 7 and 6 tokens, fewer than 8 ranks.
WAN: dict[str, Any] = {"width": 96, "height": 64, "frames": 9}
A14B: dict[str, Any] = {"width": 80, "height": 48, "frames": 5}
QWEN: dict[str, Any] = {"width": 80, "height": 64}
SHAPES = {"width": 64, "height": 48, "frames": 5, "prompt": "a red star", "guidance_scale": 3.0}


@dataclass(frozen=True)
class Case:
    model: str
    job: Mapping[str, Any]
    has_image: bool = False


CASES = {
    "5b-text": Case("tiny-wan", {**WAN, "negative_prompt": "dark"}),
    "5b-image": Case("tiny-wan", WAN, has_image=True),  # a timestep per token, of two values
    "a14b-text": Case("tiny-wan-moe", {**A14B, "boundary_ratio": 0.6}),
    "a14b-image": Case("tiny-wan-moe-i2v", {**A14B, "boundary_ratio": 0.6}, has_image=True),
    "qwen": Case("tiny-qwen-image", {**QWEN, "prompt": "a fox"}),
    "shapes-image": Case("shapes", SHAPES, has_image=True),
}


@dataclass
class SharedJob:
    """A prepared job; `denoise` runs its steps, or the first ones, on one rank or as one rank of several."""

    adapter: Any
    spec: JobSpec
    prompt: Fields
    condition: Fields
    latents: Fields

    def denoise(self, parallel: Parallel | None = None, *, steps: int = STEPS) -> Fields:
        torch.set_num_threads(1)  # counts for the calling thread, and rounding depends on it
        latents = self.latents
        for step in range(steps):
            latents = self.step(latents, step, parallel)
        return latents

    def step(self, latents: Fields, step: int, parallel: Parallel | None = None) -> Fields:
        result: Fields = self.adapter.denoise(
            self.spec, self.prompt, self.condition, latents, step=step, parallel=parallel
        )
        return result


def prepare_job(
    models: Mapping[str, Path], picture: Path, adapters: dict[str, Any], name: str, **changes: Any
) -> SharedJob:
    """A case's job, ready for its first step; `adapters` keeps what was loaded."""
    case = CASES[name]
    adapter = adapters.get(case.model) or load_adapter(
        models.get(case.model) or resolve_checkpoint(case.model)
    )
    adapters[case.model] = adapter
    image = str(picture) if case.has_image else None
    asked = {"prompt": "a red fox, quietly", "image": image, **case.job, **changes}
    spec = adapter.geometry.resolve(JobSpec(id=name, seed=5, steps=STEPS, **asked))
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    return SharedJob(adapter, spec, prompt, condition, latents)


def equal(one: Fields, other: Fields) -> bool:
    """Bitwise: the sample, and all that the solver carries."""
    return (
        one.scalars == other.scalars
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)
    )


def distance(found: Fields, wanted: Fields) -> float:
    """Largest difference of the samples, in units of the largest magnitude."""
    a, b = found.tensors["sample"], wanted.tensors["sample"]
    return float((a - b).abs().max() / b.abs().max())
