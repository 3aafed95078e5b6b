"""What benchmarks.forward measures, rehearsed on CPU ranks with models of few and narrow blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel
from gfc_fake import FakeCluster

from benchmarks.forward import QWEN, WAN
from benchmarks.measure_forward import ForwardShape, forward_of, inputs_of
from gfgen.layout import Layout
from gfgen.models.fast.fused import fuse
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.parallel.hooks import install

torch.set_num_threads(1)

SHAPES = (
    ForwardShape(WAN, 96, 64, 9),
    ForwardShape(WAN, 96, 64, 9, has_image=True),
    ForwardShape(QWEN, 64, 64, 1),
)
KINDS: dict[str, tuple[Any, dict[str, int]]] = {
    WAN: (WanTransformer3DModel, {"num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 64}),
    QWEN: (QwenImageTransformer2DModel, {"num_attention_heads": 2}),
}


def transformer_of(model: str) -> Any:
    """As shipped, but for its size."""
    kind, changes = KINDS[model]
    config = json.loads((CONFIGS / model / "transformer" / "config.json").read_text())
    torch.manual_seed(0)
    transformer = kind.from_config({**config, **changes, "num_layers": 2}).eval().requires_grad_(False)
    install(transformer)
    fuse(transformer)
    return transformer


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_all_ways_to_evaluate_both_branches_give_the_same(shape: ForwardShape) -> None:
    transformer = transformer_of(shape.model)
    given, texts = inputs_of(shape, torch.device("cpu"))
    inputs = {
        name: x.float() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in given.items()
    }
    texts = [text.float() for text in texts]
    (alone,) = forward_of(transformer, inputs, texts, "one")(None)
    wanted = forward_of(transformer, inputs, texts, "in turn")(None)
    assert torch.equal(wanted[0], alone)

    def differs_by(found: Any) -> float:
        both = zip(found, wanted, strict=True)
        return max(float((one - other).abs().max() / other.abs().max()) for one, other in both)

    assert differs_by(forward_of(transformer, inputs, texts, "in batch")(None)) < 1e-5
    for branches, layout in (
        ("in turn", Layout((0, 1), ulysses=2)),
        ("in batch", Layout((0, 1), ulysses=2)),
        ("in turn", Layout((0, 1), cfg=2)),
    ):
        forward: Any = forward_of(transformer, inputs, texts, branches)  # type: ignore[arg-type]
        program = torch.no_grad()(forward)  # in the threads of the ranks, too
        for found in FakeCluster().run(layout, program):
            assert differs_by(found) < 1e-5
