"""Fused parts are the parts that they replace, up to rounding, alone and shared among ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel
from gfc_fake import FakeCluster

from gfgen.layout import Layout
from gfgen.models.families.registry import resolve_checkpoint
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.linears import LinearGelu
from gfgen.models.fast.texts import with_texts
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.sequence_parallel import active

torch.set_num_threads(1)

ROUNDING = 2e-6
"""Of the largest magnitude, in fp32."""


def wan_inputs(timestep: torch.Tensor, *, channels: int = 48, text_dim: int = 64) -> dict[str, Any]:
    """18 tokens."""
    noise = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, channels, 3, 4, 6, generator=noise),
        "timestep": timestep,
        "encoder_hidden_states": torch.randn(1, 16, text_dim, generator=noise),
    }


def shapes_inputs() -> dict[str, Any]:
    """For heads of 12, which are no power of two."""
    return wan_inputs(image_timesteps(), channels=16, text_dim=128)


def image_timesteps() -> torch.Tensor:
    """Per token: 0 in the first of three frames. On 4 ranks the first has none but these, the second both."""
    return torch.tensor([0.0] * 6 + [700.0] * 12)[None]


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
    "wan, image to video": (WanTransformer3DModel, "tiny-wan", lambda: wan_inputs(image_timesteps())),
    "shapes": (WanTransformer3DModel, "shapes", shapes_inputs),
    "qwen": (QwenImageTransformer2DModel, "tiny-qwen-image", qwen_inputs),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: Any, tiny_models: Mapping[str, Path]) -> tuple[Any, Any, dict[str, Any]]:
    """A transformer with hooks, the same one fused, and inputs."""
    kind, model, inputs = CASES[request.param]
    plain = kind.from_pretrained(str(resolve_checkpoint(model) / "transformer"), local_files_only=True)
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


TEXTS = {"wan": (16, 16), "qwen": (3, 7)}
"""Tokens of the prompts of two branches; two ranks of four have nothing of the shorter one of Qwen-Image."""


def branches(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Embeddings of both; the first are those of the inputs."""
    of_first = inputs["encoder_hidden_states"]
    lengths = TEXTS["wan" if "img_shapes" not in inputs else "qwen"]
    noise = torch.Generator().manual_seed(7)
    return [of_first, torch.randn(1, lengths[1], of_first.shape[2], generator=noise).to(of_first.dtype)]


def in_one_forward(transformer: Any, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    shared = {"attention_kwargs": {}, **inputs} if "img_shapes" in inputs else inputs
    return list(forward(transformer, with_texts(shared, branches(inputs))).chunk(2))


def distance(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((result.float() - wanted).norm() / wanted.norm())


def in_turn(transformer: Any, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [forward(transformer, inputs | {"encoder_hidden_states": each}) for each in branches(inputs)]


def test_both_branches_in_one_forward_give_what_they_give_in_turn(case: Any) -> None:
    plain, fused, inputs = case
    for result, wanted in zip(in_one_forward(fused, inputs), in_turn(plain, inputs), strict=True):
        assert differs_by(result, wanted) < ROUNDING


@pytest.mark.parametrize("degrees", [(2, 1), (4, 1), (1, 3), (2, 2)], ids=str)
def test_ranks_share_a_forward_of_both_branches(case: Any, degrees: tuple[int, int]) -> None:
    plain, fused, inputs = case
    ulysses, ring = degrees

    def program(group: Any) -> list[torch.Tensor]:
        with active(parallel_from(group)):
            return in_one_forward(fused, inputs)

    layout = Layout(tuple(range(ulysses * ring)), ulysses=ulysses, ring=ring)
    for results, wanted in zip(
        zip(*FakeCluster().run(layout, program), strict=True), in_turn(plain, inputs), strict=True
    ):
        assert all(torch.equal(result, results[0]) for result in results)
        assert differs_by(results[0], wanted) < ROUNDING


@pytest.mark.parametrize("name", CASES)
def test_in_bf16_fused_blocks_are_as_near_to_fp32_as_diffusers_own(
    name: str, tiny_models: Mapping[str, Path]
) -> None:
    kind, model, make_inputs = CASES[name]
    folder = str(resolve_checkpoint(model) / "transformer")
    inputs = make_inputs()
    exact = kind.from_pretrained(folder, local_files_only=True)
    narrow = kind.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    fused = copy.deepcopy(narrow)
    fuse(fused)
    is_wan = kind is WanTransformer3DModel  # whose timesteps stay in fp32
    given = {
        key: x.bfloat16() if torch.is_tensor(x) and not (is_wan and key == "timestep") else x
        for key, x in inputs.items()
    }
    wanted = in_turn(exact, inputs)
    for results in (in_turn(fused, given), in_one_forward(fused, given)):
        for result, theirs, best in zip(results, in_turn(narrow, given), wanted, strict=True):
            assert result.dtype == torch.bfloat16
            assert distance(result, best) < 1.1 * distance(theirs, best)


def test_a_third_timestep_among_the_tokens_gives_nothing_that_could_be_taken_for_a_result(
    tiny_models: Mapping[str, Path],
) -> None:
    folder = str(tiny_models["tiny-wan"] / "transformer")
    transformer = WanTransformer3DModel.from_pretrained(folder, local_files_only=True)
    fuse(transformer)
    assert forward(transformer, wan_inputs(torch.linspace(0, 900, 18)[None])).isnan().all()


def test_no_second_copy_of_the_weights_is_left(case: Any) -> None:
    plain, fused, _ = case
    assert sum(each.numel() for each in fused.parameters()) == sum(
        each.numel() for each in plain.parameters()
    )


def test_every_feed_forward_has_its_gelu_fused(case: Any) -> None:
    _, fused, _ = case
    assert any(isinstance(each, LinearGelu) for each in fused.modules())
