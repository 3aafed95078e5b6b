"""The stock pipeline that gfgen is compared with makes what gfgen makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.model import load_geometry
from gfgen.models.stepping.check import StockPipeline

torch.set_num_threads(1)
JOBS = {
    "tiny-wan": {"width": 64, "height": 64, "frames": 5, "guidance_scale": 4.0},
    "tiny-qwen-image": {"width": 64, "height": 64, "negative_prompt": " ", "true_cfg_scale": 4.0},
}


@pytest.mark.parametrize("model", JOBS)
def test_frames_are_those_of_the_adapter(model: str, tiny_models: Mapping[str, Path]) -> None:
    checkpoint = tiny_models[model]
    asked = JobSpec(id="x", prompt="a red fox", seed=5, steps=3, **JOBS[model])
    spec = load_geometry(checkpoint).resolve(asked)
    adapter = load_adapter(checkpoint)
    with torch.no_grad():
        prompt = adapter.encode(spec)
        condition, latents = adapter.prepare(spec, prompt)
        for step in range(3):
            latents = adapter.denoise(spec, prompt, condition, latents, step=step)
        frames = adapter.decode(spec, latents).tensors["frames"]
    stock = StockPipeline(checkpoint, device="cpu", num_ranks=1)
    np.testing.assert_array_equal(stock.generate(spec), frames.numpy())
    assert stock.generate(spec, steps=2, is_to_decode=False) is None


def test_with_random_weights_config_files_are_enough(tiny_models: Mapping[str, Path]) -> None:
    checkpoint = tiny_models["tiny-qwen-image"]
    asked = JobSpec(id="x", prompt="a red fox", seed=5, steps=2, width=64, height=64)
    spec = load_geometry(checkpoint).resolve(asked)
    stock = StockPipeline(checkpoint, device="cpu", num_ranks=1, has_random_weights=True)
    assert stock.generate(spec).shape == (1, 64, 64, 3)
