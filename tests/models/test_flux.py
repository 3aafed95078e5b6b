"""Fused blocks of Flux.1 are diffusers' own, up to rounding, alone and shared among ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from gfc_fake import FakeCluster

from gfgen.layout import Layout
from gfgen.models.fast.flux import fuse_flux
from gfgen.models.fast.kernels import using
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.sequence_parallel import active

torch.set_num_threads(1)

ROUNDING = 2e-6
"""Of the largest magnitude, in fp32."""


def inputs(*, batch: int = 1, text_tokens: int = 3) -> dict[str, Any]:
    """12 tokens of picture; on 4 ranks one of them has no text."""
    noise = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=noise)

    rows, columns = torch.meshgrid(torch.arange(3.0), torch.arange(4.0), indexing="ij")
    return {
        "hidden_states": random(batch, 12, 16),
        "encoder_hidden_states": random(batch, text_tokens, 24),
        "pooled_projections": random(batch, 20),
        "timestep": torch.linspace(0.3, 0.7, batch),
        "guidance": torch.full((batch,), 3.5),
        "img_ids": torch.stack([torch.zeros(3, 4), rows, columns], dim=-1).view(12, 3),
        "txt_ids": torch.zeros(text_tokens, 3),
    }


@pytest.fixture(scope="module")
def transformers() -> tuple[Any, Any]:
    """One with hooks, and the same one fused."""
    torch.manual_seed(0)
    plain = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    for name, parameter in plain.named_parameters():
        if "norm_" in name and parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    fused = copy.deepcopy(plain)
    install(plain)
    install(fused)
    fuse_flux(fused)
    return plain, fused


@torch.no_grad()
def forward(transformer: Any, given: dict[str, Any]) -> torch.Tensor:
    torch.set_num_threads(1)
    result: torch.Tensor = transformer(**given, return_dict=False)[0]
    return result


def differs_by(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((result - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("text_tokens", [1, 5])
def test_fused_blocks_give_what_they_gave(transformers: Any, batch: int, text_tokens: int) -> None:
    plain, fused = transformers
    given = inputs(batch=batch, text_tokens=text_tokens)
    with using("fused"):
        found = forward(fused, given)
    assert differs_by(found, forward(plain, given)) < ROUNDING


def test_own_kernels_give_the_same_bits(transformers: Any) -> None:
    plain, fused = transformers
    assert torch.equal(forward(fused, inputs()), forward(plain, inputs()))


def test_fused_weights_are_the_memory_of_their_parts(transformers: Any) -> None:
    plain, fused = transformers
    assert sum(x.numel() for x in fused.parameters()) == sum(x.numel() for x in plain.parameters())
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in fused.parameters()}
    assert sum(storages.values()) == sum(x.nbytes for x in plain.parameters())
    attention = fused.transformer_blocks[0].attn
    assert attention.to_qkv.weight.data_ptr() == attention.to_q.weight.data_ptr()
    assert attention.to_added_qkv.weight.data_ptr() == attention.add_q_proj.weight.data_ptr()


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_ranks_that_share_fused_blocks_give_the_same(transformers: Any, degree: int, batch: int) -> None:
    plain, fused = transformers
    given = inputs(batch=batch)

    def program(group: Any) -> torch.Tensor:
        with active(parallel_from(group)), using("fused"):
            return forward(fused, given)

    results = FakeCluster().run(Layout(tuple(range(degree)), ulysses=degree), program)
    assert all(torch.equal(result, results[0]) for result in results)
    assert differs_by(results[0], forward(plain, given)) < ROUNDING


def test_in_bf16_fused_blocks_are_as_near_to_fp32_as_diffusers_own(transformers: Any) -> None:
    plain, _ = transformers
    given = inputs()
    exact = forward(plain, given)
    half = {name: x.bfloat16() if "ids" not in name else x for name, x in given.items()}
    own, ours = (copy.deepcopy(plain).bfloat16() for _ in range(2))
    fuse_flux(ours)
    with using("fused"):
        found = forward(ours, half)
    assert differs_by(found.float(), exact) < 1.5 * differs_by(forward(own, half).float(), exact)
