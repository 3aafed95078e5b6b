"""Operations on rows: what they are on a CPU, and that a GPU's kernels do the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gfgen.models.fast import rows

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _needs_a_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(result: Tensor, wanted: Tensor) -> None:
    assert torch.isfinite(result).all()
    rounding = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}[result.dtype]
    torch.testing.assert_close(result.cpu().double(), wanted, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "channels"), [(5, 96), (2051, 48), (7, 3072)])
def test_norm_of_a_gated_sum(device: str, dtype: torch.dtype, length: int, channels: int) -> None:
    x, update = (random(1, length, channels, seed=seed).to(dtype) for seed in (0, 1))
    gate, weight, bias = (random(channels, seed=seed).to(torch.float32) for seed in (2, 3, 4))
    total, normed = rows.add_norm(
        x.to(device),
        update.to(device),
        gate.to(device),
        rows.RowNorm(weight.to(device), bias.to(device), eps=1e-6, plus_one=True),
    )
    wanted = x.double() + update.double() * gate.double()
    assert_close(total, wanted)
    assert_close(rows.add_gated(x.to(device), update.to(device), gate.to(device)), wanted)
    wanted = total.cpu().double()  # the norm is of what was stored
    wanted = (wanted - wanted.mean(-1, keepdim=True)) * torch.rsqrt(
        wanted.var(-1, unbiased=False, keepdim=True) + 1e-6
    )
    assert_close(normed, wanted * (1 + weight.double()) + bias.double())


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "channels"), [(5, 96), (1026, 48), (7, 3072)])
def test_tokens_of_several_kinds_take_each_their_own_modulation(
    device: str, dtype: torch.dtype, length: int, channels: int
) -> None:
    x, update = (random(2, length, channels, seed=seed).to(dtype) for seed in (0, 1))
    rows_of = random(2, 6, channels, seed=2).float()  # of two kinds, as a block has them: six rows each
    plain = random(channels, seed=3).float()
    kinds_N = (torch.arange(2 * length) % 3 == 1).int()
    on_device = [each.to(device) for each in (x, update)]
    gate, weight, bias = rows_of.to(device).unbind(1)[:3]
    found: dict[str, tuple[Tensor, Tensor]] = {}
    kinds = kinds_N.to(device)
    for name, factors in (("own", weight), ("same", plain.to(device))):
        norm = rows.RowNorm(factors, bias, eps=1e-6, plus_one=True)
        found[name] = rows.add_norm(*on_device, gate, norm, kinds_N=kinds)
    plain_norm = rows.RowNorm(weight, bias, eps=1e-6, plus_one=False)
    alone = rows.norm(on_device[0], plain_norm, kinds_N=kinds)

    def by_token(idx: int) -> Tensor:
        return rows_of[:, idx][kinds_N].double().view(2, length, channels)

    wanted = x.double() + update.double() * by_token(0)
    assert_close(found["own"][0], wanted)
    assert_close(rows.add_gated(*on_device, gate, kinds_N=kinds), wanted)
    for total, factors, plus, result in (
        (found["own"][0], by_token(1), 1, found["own"][1]),
        (found["same"][0], plain.double(), 1, found["same"][1]),
        (x, by_token(1), 0, alone),
    ):
        normed = torch.nn.functional.layer_norm(total.cpu().double(), (channels,), eps=1e-6)
        assert_close(result, normed * (factors + plus) + by_token(2))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_norm_alone_takes_any_strides(device: str) -> None:
    x = random(1, 64, 6, seed=0).to(device, torch.float32).transpose(1, 2)
    ones, zeros = torch.ones(64, device=device), torch.zeros(64, device=device)
    result = rows.norm(x, rows.RowNorm(ones, zeros, eps=1e-6, plus_one=False))
    assert_close(result, torch.nn.functional.layer_norm(x.cpu().double(), (64,), eps=1e-6))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[1, L, H, D] as complex numbers times others of length 1."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(3)


def wanted_heads(
    projected: Tensor, num_heads: int, weights: Sequence[Tensor], turns: tuple[Tensor, Tensor] | None
) -> list[Tensor]:
    parts = []
    for part, weight in zip(projected.double().chunk(3, dim=-1), (*weights, None), strict=True):
        x = part
        if weight is not None:
            groups = x.reshape(*x.shape[:2], -1, len(weight))
            x = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
        x = x.reshape(*part.shape[:2], num_heads, -1)
        parts.append(x if turns is None or weight is None else turned(x, *(each.double() for each in turns)))
    return parts


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 16), (24, 8), (24, 128)])
@pytest.mark.parametrize("over_all_heads", [True, False])
@pytest.mark.parametrize("has_turns", [True, False])
def test_heads_are_normalised_and_turned(
    device: str, dtype: torch.dtype, num_heads: int, head_dim: int, over_all_heads: bool, has_turns: bool
) -> None:
    length, channels = 5, num_heads * head_dim
    projected = random(1, length, 3 * channels, seed=0).to(dtype)
    width = channels if over_all_heads else head_dim
    weights = [random(width, seed=seed).to(dtype) for seed in (1, 2)]
    angles = random(length, head_dim, seed=3).float()  # every second one counts
    turns = (angles.cos()[:, 0::2], angles.sin()[:, 0::2]) if has_turns else None
    on_device = None if turns is None else tuple(each.to(device) for each in turns)
    given: Any = {"num_heads": num_heads, "head_dim": head_dim, "eps": 1e-6, "turns": on_device}
    given["weights"] = [weight.to(device) for weight in weights]
    result = rows.heads(projected.to(device), **given)
    wanted = wanted_heads(projected, num_heads, weights, turns)
    assert result.shape == (2, 1, length, num_heads, head_dim)
    for part, expected in zip(result, wanted, strict=False):
        assert_close(part, expected)

    joint = torch.full((3, 1, length + 4, num_heads, head_dim), 7.0, dtype=dtype, device=device)
    rows.heads(projected.to(device), **given, into=joint[:, :, 2 : 2 + length])
    for part, expected in zip(joint[:, :, 2 : 2 + length], wanted, strict=True):
        assert_close(part, expected)
    assert (joint[:, :, :2] == 7).all(), "what lies beside it is left alone"
    assert (joint[:, :, 2 + length :] == 7).all()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_samples_of_a_batch_are_turned_alike(device: str) -> None:
    projected = random(3, 5, 3 * 48, seed=0).to(device, torch.float32)
    weights = [random(48, seed=seed).to(device, torch.float32) for seed in (1, 2)]
    angles = random(5, 8, seed=3).to(device, torch.float32)
    turns = (angles.cos(), angles.sin())
    settings: Any = {"num_heads": 3, "head_dim": 16, "weights": weights, "turns": turns}
    result = rows.heads(projected, **settings, eps=1e-6)
    assert result.shape == (2, 3, 5, 3, 16)
    each = [rows.heads(projected[idx : idx + 1], **settings, eps=1e-6) for idx in range(3)]
    assert torch.equal(result, torch.cat(each, dim=1))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_no_tokens_are_no_heads(device: str) -> None:
    nothing = torch.empty(1, 0, 3 * 48, device=device)
    weight = torch.ones(16, device=device)
    result = rows.heads(nothing, num_heads=3, head_dim=16, weights=(weight, weight), eps=1e-6)
    assert result.shape == (2, 1, 0, 3, 16)
