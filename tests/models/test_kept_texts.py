"""A transformer computes once for each prompt what is the same in all steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from torch import Tensor

from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import texts
from gfgen.models.fast.texts import _keep_results, keep_text_results

torch.set_num_threads(1)


def test_a_tensor_that_was_written_to_is_evaluated_again() -> None:
    layer: Any = SimpleNamespace(forward=lambda x: 2 * x)
    x = torch.ones(3)
    kept = _keep_results(layer)
    first = layer.forward(x)
    assert layer.forward(x) is first
    x.add_(1)
    assert layer.forward(x).tolist() == [4, 4, 4]
    del x
    assert not kept, "results go with the tensor that they are for"


@torch.no_grad()
def test_forwards_are_bitwise_the_same_and_prompts_projected_once(tiny_models: Mapping[str, Path]) -> None:
    plain, with_memory = (_transformer(tiny_models["tiny-wan"]) for _ in range(2))
    keep_text_results(with_memory)
    kept = with_memory.kept_texts[-1]
    prompts = [torch.randn(1, 512, plain.config.text_dim) for _ in range(2)]
    for step in range(3):
        picture = torch.randn(1, plain.config.in_channels, 1, 8, 8)
        for prompt in prompts:
            results = [_forward(model, picture, prompt, step) for model in (plain, with_memory)]
            assert torch.equal(*results)
    assert len(kept) == len(prompts)


def test_a_model_whose_prompts_are_too_large_keeps_nothing(
    tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformer = _transformer(tiny_models["tiny-wan"])
    monkeypatch.setattr(texts, "MAX_KEPT_BYTES", 1)
    keep_text_results(transformer)
    assert not hasattr(transformer, "kept_texts")


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-qwen-image"])
def test_a_text_that_several_jobs_share_is_encoded_once(tiny_models: Mapping[str, Path], name: str) -> None:
    adapter: Any = load_adapter(tiny_models[name])
    encoder = adapter._pipeline.text_encoder
    num_calls = 0

    def count(*call: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    encoder.register_forward_pre_hook(count)
    guided = {"guidance_scale": 2.0} if name == "tiny-wan" else {"true_cfg_scale": 2.0}
    jobs = [
        adapter.geometry.resolve(JobSpec(id="a", model=name, prompt=prompt, negative_prompt="red", **guided))
        for prompt in ("a fox", "a fox", "a dog")
    ]
    first, second, third = (adapter.encode(job).tensors for job in jobs)
    assert num_calls == 3
    assert first["prompt_embeds"] is second["prompt_embeds"]
    assert first["negative_prompt_embeds"] is third["negative_prompt_embeds"]
    assert not torch.equal(first["prompt_embeds"], third["prompt_embeds"])


def _transformer(checkpoint: Path) -> Any:
    return WanPipeline.from_pretrained(checkpoint).transformer


def _forward(transformer: Any, picture: Tensor, prompt: Tensor, step: int) -> Tensor:
    timestep = torch.full((1,), 1000 - step)
    result: Tensor = transformer(picture, timestep, prompt, return_dict=False)[0]
    return result
