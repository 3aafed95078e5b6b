"""Transformers in fp8: what is stored, how far they are from the others, which models and devices can."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gfc_fake import FakeCluster
from test_fused import CASES, forward

from gfgen.errors import InputError, ModelError
from gfgen.layout import Layout
from gfgen.models.families.precision import Precision
from gfgen.models.families.registry import resolve_checkpoint
from gfgen.models.fast import rows
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.linears import Modulation, QuantisedLinear, in_e4m3
from gfgen.models.geometry.model import CONFIGS, load_geometry, weightless_geometry
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.sequence_parallel import active

HOST = torch.device("cpu")
FP8_ERROR = 0.06
"""Of what one product gives: both factors are within 1/16 of their values, by 2.6% on average."""
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _needs_a_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def random(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def distance(result: torch.Tensor, wanted: torch.Tensor) -> float:
    result, wanted = result.detach().cpu(), wanted.detach().cpu()
    return float((result - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("has_gelu", [False, True])
@pytest.mark.parametrize(("length", "channels"), [(5, 96), (2051, 48), (7, 3072)])
def test_each_row_has_a_scale_by_its_largest_value(
    device: str, has_gelu: bool, length: int, channels: int
) -> None:
    x = random(2, length, channels, seed=0) * torch.logspace(-3, 3, length)[:, None]
    x[0, 0] = 0
    found = rows.to_fp8(x.bfloat16().to(device), has_gelu=has_gelu)
    wanted = x.bfloat16().float()
    wanted = torch.nn.functional.gelu(wanted, approximate="tanh") if has_gelu else wanted
    assert found.scales.shape == (2 * length, 1)
    assert found.values.float().abs().amax(dim=-1).flatten()[1:].eq(448).all()
    result = found.values.float().cpu() * found.scales.cpu().view(2, length, 1)
    torch.testing.assert_close(result, wanted, rtol=1 / 15, atol=wanted.abs().max().item() * 1e-5)
    assert result[0, 0].eq(0).all()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_norm_writes_what_a_pass_over_its_result_would_write(device: str) -> None:
    x, update = (random(1, 2051, 96, seed=seed).to(device) for seed in (0, 1))
    gate, weight, bias = (random(96, seed=seed).to(device) for seed in (2, 3, 4))
    of = rows.RowNorm(weight, bias, eps=1e-6, plus_one=True)
    total, normed = rows.add_norm(x, update, gate, of)
    same, found = rows.add_norm(x, update, gate, of, in_fp8=True)
    wanted = rows.to_fp8(normed)
    assert torch.equal(same, total)
    torch.testing.assert_close(found.scales, wanted.scales)
    assert (found.values.float() != wanted.values.float()).float().mean() < 1e-3


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("length", [0, 1, 9])
@torch.no_grad()
def test_a_layer_is_the_product_of_what_it_stores(device: str, length: int) -> None:
    plain = torch.nn.Linear(64, 48, dtype=torch.bfloat16, device=device)
    layer, x = QuantisedLinear(plain), random(1, length, 64, seed=1).to(device, torch.bfloat16)
    given = rows.to_fp8(x)
    weight = layer.weight.float() * layer.scales.T
    wanted = (given.values.float() * given.scales.view(1, -1, 1)) @ weight.T + plain.bias.float()
    torch.testing.assert_close(layer(given).float(), wanted, rtol=0.016, atol=0.016)
    assert torch.equal(layer(x), layer(given))
    if length:
        assert distance(layer(x), plain(x)) < FP8_ERROR
    assert layer.weight.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_a_product_that_cublas_has_only_with_one_scale_is_scaled_afterwards(
    device: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.nn.Linear(64, 48, bias=has_bias, dtype=torch.bfloat16, device=device)
    layer, x = QuantisedLinear(plain), random(1, 9, 64, seed=1).to(device, torch.bfloat16)
    usual, product = layer(x), torch._scaled_mm
    refused: list[torch.Size] = []

    def with_one_scale(
        a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, *others: Any, **options: Any
    ) -> Any:
        if scale.numel() > 1:
            refused.append(a.shape)
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling ...")
        return product(a, b, scale, *others, **options)

    monkeypatch.setattr(torch, "_scaled_mm", with_one_scale)
    for _ in range(2):
        torch.testing.assert_close(layer(x), usual, rtol=0.008, atol=1e-3)
    assert refused == [(9, 64)], "each size is tried once"


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize(("inner", "outer"), [(3072, 9216), (12288, 3072), (14336, 3072)])
@torch.no_grad()
def test_layers_of_full_size_take_any_number_of_rows(device: str, inner: int, outer: int) -> None:
    plain = torch.nn.Linear(inner, outer, dtype=torch.bfloat16, device=device)
    layer = QuantisedLinear(plain)
    for num_rows in (1, 7, 16, 32, 33, 64, 127, 128, 200, 256, 257):
        x = random(1, num_rows, inner, seed=1).to(device, torch.bfloat16)
        assert distance(layer(x).float(), plain(x).float()) < FP8_ERROR


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("scale", [1e-6, 0.37, 3e4, -0.5])
def test_the_upcast_weight_gives_back_every_value_of_the_file(device: str, scale: float) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = values[values.float().isfinite()].view(2, -1).to(device)
    upcast = (values.float() * scale).bfloat16()
    found, scales = in_e4m3(upcast, torch.tensor([scale, scale]))
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scales.cpu(), torch.full((2, 1), scale))


@pytest.mark.parametrize("device", ["cpu", GPU])
@torch.no_grad()
def test_modulation_in_int8_is_closer_than_fp8(device: str) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    modulation = Modulation([torch.nn.Linear(128, 96, **options) for _ in range(3)])
    temb = random(1, 128, seed=0).to(**options)
    wanted = modulation(temb).float()
    modulation.quantise(torch.device(device))
    assert distance(modulation(temb).float(), wanted) < 0.01
    assert {each.dtype for each in modulation.buffers()} == {torch.int8, torch.bfloat16}
    assert not list(modulation.parameters())


@pytest.fixture(scope="module", params=["wan, image to video", "qwen"])
def case(request: Any, tiny_models: Mapping[str, Path]) -> tuple[Path, Any, Any, dict[str, Any]]:
    """A fused transformer, the same one in fp8, and inputs."""
    kind, model, inputs = CASES[request.param]
    path = resolve_checkpoint(model)
    plain = kind.from_pretrained(str(path / "transformer"), local_files_only=True)
    in_fp8 = copy.deepcopy(plain)
    for transformer, device in ((plain, None), (in_fp8, HOST)):
        install(transformer)
        fuse(transformer, fp8_on=device)
    return path, plain, in_fp8, inputs()


def test_a_transformer_in_fp8_gives_nearly_what_it_gave(case: Any) -> None:
    _, plain, in_fp8, inputs = case
    assert 1e-4 < distance(forward(in_fp8, inputs), forward(plain, inputs)) < FP8_ERROR


def test_ranks_that_share_a_transformer_in_fp8_differ_by_rounding(case: Any) -> None:
    _, plain, in_fp8, inputs = case

    def program(group: Any) -> torch.Tensor:
        with active(parallel_from(group)):
            return forward(in_fp8, inputs)

    results = FakeCluster().run(Layout((0, 1, 2), ulysses=3), program)
    assert all(torch.equal(result, results[0]) for result in results)
    alone = forward(in_fp8, inputs)
    assert distance(results[0], alone) < distance(alone, forward(plain, inputs)) / 10


def test_the_memory_that_fp8_saves_is_what_is_counted_before_a_run(case: Any) -> None:
    path, plain, in_fp8, _ = case
    before = 2 * sum(each.numel() for each in plain.parameters())
    weights = (each for name, each in in_fp8.named_buffers() if name.endswith(("weight", "weight_NFC")))
    num_8_bit = sum(each.numel() for each in weights if each.element_size() == 1)
    outside, of_block = Precision(("fp8",)).saved_bytes(path)["transformer"]
    saved = outside + plain.config.num_layers * of_block
    assert saved == pytest.approx(num_8_bit, rel=0.02)
    assert num_8_bit > 0.4 * before / 2


@pytest.mark.parametrize(
    ("asked", "capability", "says"),
    [
        ("fp8", None, "--precision fp8: a GPU cannot compute in fp8; it needs NVIDIA GPUs of compute cap"),
        ("fp8", (8, 0), "--precision fp8: a GPU cannot compute in fp8"),
        ("shapes=fp8", (8, 6), "--precision shapes=fp8: a GPU cannot compute in fp8"),
        ("fp4", (9, 0), "--precision fp4: fp8, auto, or MODEL=fp8 is accepted"),
        ("=fp8", (9, 0), "--precision =fp8: fp8, auto, or MODEL=fp8 is accepted"),
        ("shape=fp8", (9, 0), "--precision shape=fp8: model shape: unknown; did you mean 'shapes'?"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(
    asked: str, capability: tuple[int, int] | None, says: str
) -> None:
    with pytest.raises(InputError) as raised:
        Precision((asked,)).checked(capability=capability, device="a GPU")
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_gpus_with_fp8_are_accepted(capability: tuple[int, int]) -> None:
    asked = Precision(("fp8", "tiny-wan=auto"))
    assert asked.checked(capability=capability, device="a GPU") == asked


def test_a_model_that_is_named_counts_more_than_all() -> None:
    wan, qwen = CONFIGS / "wan2.2-ti2v-5b", Path("/hub/models--Qwen--Qwen-Image/snapshots/abc")
    assert [Precision(("qwen-image=fp8",)).of(path)["precision"] for path in (wan, qwen)] == ["auto", "fp8"]
    asked = Precision(("wan2.2-ti2v-5b=auto", "fp8"))
    assert [asked.of(path)["precision"] for path in (wan, qwen)] == ["auto", "fp8"]
    assert [asked.quantised(path) for path in (wan, qwen)] == [(False, False), (True, False)]
    assert Precision().of(wan) == {"precision": "auto", "attention": "auto"}


@pytest.mark.parametrize("name", ["wan2.2-ti2v-5b", "wan2.2-t2v-a14b", "qwen-image"])
def test_full_size_models_fit(name: str) -> None:
    Precision(("fp8",)).check_model(weightless_geometry(CONFIGS / name), CONFIGS / name)


def test_layers_that_do_not_fit_are_named(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    path = Path(shutil.copytree(tiny_models["tiny-wan"], tmp_path / "odd"))
    config = path / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"ffn_dim": 100}))
    with pytest.raises(ModelError, match="the feed-forward layers of transformer, which have 100 channels"):
        Precision(("fp8",)).check_model(load_geometry(path), path)
