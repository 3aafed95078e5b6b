"""Fused parts are the parts that they replace, up to rounding, alone and shared among ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel

from gfgen.gfc.fake import FakeCluster
from gfgen.layout import Layout
from gfgen.models.fused import LinearGelu, fuse
from gfgen.models.parallel import parallel_from
from gfgen.models.sequence_parallel import active, install

torch.set_num_threads(1)

ROUNDING = 2e-6
"""Of the largest magnitude, in fp32."""


def wan_inputs(timestep: torch.Tensor) -> dict[str, Any]:
    """18 tokens."""
    noise = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 48, 3, 4, 6, generator=noise),
        "timestep": timestep,
        "encoder_hidden_states": torch.randn(1, 16, 64, generator=noise),
    }


def qwen_inputs() -> dict[str, Any]:
    """12 tokens of picture, 3 of text: on 4 ranks one of them has no text."""
    noise = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 12, 64, generator=noise),
        "encoder_hidden_states": torch.randn(1, 3, 64, generator=noise),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 3, 4)]],
    }


CASES = {
    "wan": (WanTransformer3DModel, "tiny-wan", lambda: wan_inputs(torch.tensor([700.0]))),
    "wan, a timestep per token": (
        WanTransformer3DModel,
        "tiny-wan",
        lambda: wan_inputs(torch.linspace(0, 900, 18)[None]),
    ),
    "qwen": (QwenImageTransformer2DModel, "tiny-qwen-image", qwen_inputs),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: Any, tiny_models: Mapping[str, Path]) -> tuple[Any, Any, dict[str, Any]]:
    """A transformer with hooks, the same one fused, and inputs."""
    kind, model, inputs = CASES[request.param]
    plain = kind.from_pretrained(str(tiny_models[model] / "transformer"), local_files_only=True)
    fused = copy.deepcopy(plain)
    install(plain)
    install(fused)
    fuse(fused)
    return plain, fused, inputs()


@torch.no_grad()
def forward(transformer: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    torch.set_num_threads(1)
    result: torch.Tensor = transformer(**inputs, return_dict=False)[0]
    return result


def differs_by(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((result - wanted).abs().max() / wanted.abs().max())


def test_a_fused_transformer_gives_what_it_gave(case: Any) -> None:
    plain, fused, inputs = case
    assert differs_by(forward(fused, inputs), forward(plain, inputs)) < ROUNDING


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_ranks_that_share_a_fused_transformer_give_the_same(case: Any, degree: int) -> None:
    plain, fused, inputs = case

    def program(group: Any) -> torch.Tensor:
        with active(parallel_from(group)):
            return forward(fused, inputs)

    results = FakeCluster().run(Layout(tuple(range(degree)), ulysses=degree), program)
    assert all(torch.equal(result, results[0]) for result in results)
    assert differs_by(results[0], forward(plain, inputs)) < ROUNDING


def test_no_second_copy_of_the_weights_is_left(case: Any) -> None:
    plain, fused, _ = case
    assert sum(each.numel() for each in fused.parameters()) == sum(
        each.numel() for each in plain.parameters()
    )


def test_every_feed_forward_has_its_gelu_fused(case: Any) -> None:
    _, fused, _ = case
    assert any(isinstance(each, LinearGelu) for each in fused.modules())
