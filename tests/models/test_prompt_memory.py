"""A transformer makes of each prompt once what is the same in all steps, and never of another prompt."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from torch import Tensor, nn

from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import prompt_memory
from gfgen.models.fast.prompt_memory import Remembering, prompt_bytes, remember_prompts

torch.set_num_threads(1)


class Doubling:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return 2 * x


def test_the_same_tensor_is_evaluated_once() -> None:
    function = Doubling()
    remembering = Remembering(function, num_inputs=2)
    x, y = torch.ones(3), torch.ones(3)
    assert remembering(x) is remembering(x)
    assert remembering(x) is not remembering(y), "equal, but another one"
    assert function.num_calls == 2


def test_a_tensor_that_was_written_to_is_evaluated_anew() -> None:
    remembering = Remembering(Doubling(), num_inputs=2)
    x = torch.ones(3)
    remembering(x)
    x.add_(1)
    assert remembering(x).tolist() == [4, 4, 4]


def test_the_least_recently_used_is_forgotten_first() -> None:
    function = Doubling()
    remembering = Remembering(function, num_inputs=2)
    x, y, z = (torch.ones(3) for _ in range(3))
    for each in (x, y, x, z, x):
        remembering(each)
    assert function.num_calls == 3
    remembering(y)
    assert function.num_calls == 4


def test_memory_goes_with_the_tensor_that_it_is_about() -> None:
    remembering = Remembering(Doubling(), num_inputs=2)
    x = torch.ones(3)
    remembering(x)
    del x
    gc.collect()
    assert not remembering._memories


@torch.no_grad()
def test_forwards_are_bitwise_the_same_and_prompts_projected_once(tiny_models: Mapping[str, Path]) -> None:
    plain, with_memory = (_transformer(tiny_models["tiny-wan"]) for _ in range(2))
    remember_prompts(with_memory)
    calls = _count_calls(with_memory.blocks[-1].attn2.to_k)
    prompts = [torch.randn(1, 512, plain.config.text_dim) for _ in range(2)]
    for step in range(3):
        picture = torch.randn(1, plain.config.in_channels, 1, 8, 8)
        for prompt in prompts:
            results = [_forward(model, picture, prompt, step) for model in (plain, with_memory)]
            assert torch.equal(*results)
    assert len(calls) == len(prompts)


def test_a_model_whose_prompts_are_too_large_remembers_nothing(
    tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformer = _transformer(tiny_models["tiny-wan"])
    monkeypatch.setattr(prompt_memory, "ROOM_BYTES", 2 * prompt_bytes(transformer) - 1)
    remember_prompts(transformer)
    assert not isinstance(transformer.blocks[0].attn2.to_k.forward, Remembering)


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-qwen-image"])
def test_a_text_that_several_jobs_share_is_encoded_once(tiny_models: Mapping[str, Path], name: str) -> None:
    adapter: Any = load_adapter(tiny_models[name])
    encoder = (adapter._text if name == "tiny-wan" else adapter._pipeline).text_encoder
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


def _count_calls(layer: nn.Linear) -> list[Tensor]:
    """What a layer's product is asked for from now on."""
    asked: list[Tensor] = []
    remembering: Any = layer.forward
    inner = remembering._function

    def counted(x: Tensor) -> Tensor:
        asked.append(x)
        result: Tensor = inner(x)
        return result

    remembering._function = counted
    return asked
