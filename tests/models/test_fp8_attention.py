"""Attention in fp8: how far it is from the other one, alone and shared among ranks, in both families."""

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
from test_fused import CASES, distance, forward, in_one_forward, in_turn

from gfgen.errors import InputError, ModelError
from gfgen.layout import Layout
from gfgen.models.families import precision
from gfgen.models.families.precision import Precision
from gfgen.models.families.registry import resolve_checkpoint
from gfgen.models.fast.fused import fuse
from gfgen.models.geometry.model import CONFIGS, load_geometry, weightless_geometry
from gfgen.models.parallel.cudnn_attention import VALUE_SCALE, fp8_attention, from_fp8, in_fp8
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.sequence_parallel import active

FP8_ERROR = 0.06
CUDNN_ERROR = 0.07
"""cuDNN rounds the weights of keys to fp8, too."""
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _needs_a_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        pytest.importorskip("cudnn")
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("needs an NVIDIA GPU with attention in fp8")


@pytest.fixture(scope="module", params=["wan, image to video", "shapes", "qwen"])
def case(request: Any, tiny_models: Mapping[str, Path]) -> tuple[Any, Any, dict[str, Any]]:
    """A fused transformer, the same one with attention in fp8, and inputs."""
    kind, model, inputs = CASES[request.param]
    plain = kind.from_pretrained(str(resolve_checkpoint(model) / "transformer"), local_files_only=True)
    attending = copy.deepcopy(plain)
    for transformer in (plain, attending):
        install(transformer)
        fuse(transformer, attends_in_fp8=transformer is attending)
    return plain, attending, inputs()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("head_dim", [12, 128])
@pytest.mark.parametrize("num_tokens", [None, 70])
def test_attention_in_fp8_is_as_far_as_its_numbers_are(
    device: str, head_dim: int, num_tokens: int | None
) -> None:
    noise = torch.Generator().manual_seed(0)
    q, k, v = torch.randn((3, 1, 100, 4, head_dim), generator=noise).to(device)
    counts = None if num_tokens is None else torch.tensor([num_tokens], dtype=torch.int32, device=device)
    found = fp8_attention(in_fp8(q), in_fp8(k), in_fp8(v, scale=VALUE_SCALE), counts)
    result = from_fp8(found, torch.float32, scale=VALUE_SCALE)[:, :num_tokens]
    q, k, v = (x[:, :num_tokens].transpose(1, 2) for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert 1e-3 < distance(result, wanted) < (FP8_ERROR if device == "cpu" else CUDNN_ERROR)
    assert found[:, num_tokens or 100 :].float().eq(0).all()


def test_values_that_fp8_cannot_hold_are_saturated() -> None:
    x = torch.tensor([1e3, -1e3, 56.0, 1 / 512, 0.0])
    assert from_fp8(in_fp8(x, scale=VALUE_SCALE), torch.float32, scale=VALUE_SCALE).tolist() == [
        56.0, -56.0, 56.0, 1 / 512, 0.0]  # fmt: skip


def test_a_transformer_that_attends_in_fp8_gives_nearly_what_it_gave(case: Any) -> None:
    plain, attending, inputs = case
    assert 1e-5 < distance(forward(attending, inputs), forward(plain, inputs)) < FP8_ERROR


@pytest.mark.parametrize("layout", [Layout((0, 1, 2), ulysses=3), Layout((0, 1, 2, 3), ulysses=2, ring=2)])
def test_ranks_that_share_an_attention_in_fp8_differ_by_rounding(case: Any, layout: Layout) -> None:
    plain, attending, inputs = case

    def program(group: Any) -> torch.Tensor:
        with active(parallel_from(group)):
            return forward(attending, inputs)

    results = FakeCluster().run(layout, program)
    assert all(torch.equal(result, results[0]) for result in results)
    alone = forward(attending, inputs)
    assert distance(results[0], alone) < distance(alone, forward(plain, inputs))


def test_branches_of_a_batch_attend_in_fp8_as_they_do_in_turn(case: Any) -> None:
    plain, attending, inputs = case
    both = zip(
        in_one_forward(attending, inputs), in_turn(attending, inputs), in_turn(plain, inputs), strict=True
    )
    for result, wanted, exact in both:
        assert distance(result, wanted) < distance(wanted, exact) / 2


@pytest.mark.parametrize(
    ("capability", "has_package", "says"),
    [
        ((8, 9), True, "a GPU cannot attend in fp8; it needs NVIDIA GPUs of compute capability 9.0 or later"),
        ((9, 0), False, "it needs the package nvidia-cudnn-frontend"),
    ],
)
def test_where_attention_in_fp8_cannot_be_is_one_line(
    capability: tuple[int, int], has_package: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "find_spec", lambda _: "there" if has_package else None)
    with pytest.raises(InputError) as raised:
        Precision(attention=("fp8",)).checked(capability=capability, device="a GPU")
    assert str(raised.value).startswith(f"--attention fp8: {says}")
    without = Precision(attention=("tiny-wan=auto",)).checked(capability=capability, device="a GPU")
    assert without == Precision(), "what changes nothing is left out"


def test_heads_that_do_not_fit_are_named(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    Precision(attention=("fp8",)).check_model(
        weightless_geometry(CONFIGS / "qwen-image"), CONFIGS / "qwen-image"
    )
    path = Path(shutil.copytree(tiny_models["tiny-wan"], tmp_path / "odd"))
    config = path / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_head_dim": 160}))
    with pytest.raises(ModelError, match="the heads of transformer, which have 160 channels; up to 128 fit"):
        Precision(attention=("fp8",)).check_model(load_geometry(path), path)
