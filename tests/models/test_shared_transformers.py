"""Forwards of real classes of diffusers, shared as their plans say."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch

from benchmarks.shared_transformers import (
    CASES,
    Ranks,
    difference,
    forward,
    layout_of,
    make,
    random,
    shared_forward,
)
from gfgen.errors import LayoutError, ModelError
from gfgen.gfc.endpoint import CpuGroup
from gfgen.layout import Layout
from gfgen.models.geometry.pipeline import TOKEN_SIDES
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.parallel.plans import PLANS

DEGREES = ("5", "8", "1x2", "2x2")
"""Uneven and even parts of 24 heads, most ranks, rings of one and of several ranks. Another test has 3."""
TOLERANCE = 1e-5
"""Of the largest magnitude: sums are in another order."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    return Ranks()


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    model, inputs = make(request.param)
    return model, inputs, forward(model, inputs)


def test_hooks_change_no_bit_on_one_rank(case: Any) -> None:
    model, inputs, wanted = case
    bare = type(model).from_config(model.config)
    bare.load_state_dict(model.state_dict())
    assert all(map(torch.equal, forward(bare.eval(), inputs), wanted))


@pytest.mark.parametrize("degree", DEGREES)
def test_ranks_agree_with_each_other_bitwise_and_with_one_rank(ranks: Ranks, case: Any, degree: str) -> None:
    model, inputs, wanted = case
    found = shared_forward(ranks, layout_of(degree), model, inputs)
    assert difference(found[0], wanted) < TOLERANCE
    assert all(torch.equal(*pair) for each in found for pair in zip(each, found[0], strict=True))


def test_other_ranks_of_the_same_degree_give_the_same_bits(ranks: Ranks, case: Any) -> None:
    model, inputs, wanted = case
    one, other = (
        shared_forward(ranks, Layout(slots, ulysses=3), model, inputs)[0] for slots in ((0, 1, 2), (7, 2, 5))
    )
    assert all(map(torch.equal, one, other))
    assert difference(one, wanted) < TOLERANCE


def test_every_class_with_a_plan_is_tested() -> None:
    with_plan = {
        name
        for name in dir(diffusers)
        if name in TOKEN_SIDES and getattr(getattr(diffusers, name), "_cp_plan", None) is not None
    }
    assert with_plan | PLANS.keys() == {type(make(name)[0]).__name__ for name in CASES}


def test_runs_use_every_plan() -> None:
    assert PLANS.keys() <= TOKEN_SIDES.keys()


@pytest.mark.parametrize(
    "layout",
    [
        Layout((0, 1, 2), ulysses=3),
        Layout((0, 1, 2), ring=3),
        Layout((0, 1, 2), torus=3),
        Layout(tuple(range(8)), ulysses=2, ring=2, torus=2),
    ],
    ids=str,
)
def test_a_forward_sends_the_bytes_of_docs_core(
    ranks: Ranks, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make("wan")
    sent, own_move = Counter[int](), CpuGroup._move

    def move(group: Any, tensors: Any, resharding: Any, *, in_arena: bool) -> Any:
        if resharding is not None and group.size > 1:
            parts = resharding.split_sizes  # without any, each other rank gets the whole
            share = 1 - parts[group.slot] / sum(parts) if parts else group.size - 1
            sent[threading.get_ident()] += round(share * sum(x.nbytes for x in tensors))
        return own_move(group, tensors, resharding, in_arena=in_arena)

    monkeypatch.setattr(CpuGroup, "_move", move)
    (found, *_), *_ = shared_forward(ranks, layout, model, inputs)
    tokens, width, num_layers = 3 * 3 * 5, 24 * 16, 2
    exchanged = 4 * 4 * tokens * width * num_layers  # fp32; queries, keys, values and results
    of_attention = exchanged * (1 - 1 / layout.ulysses + 1 - 1 / layout.torus + (layout.ring - 1) / 2)
    assert sum(sent.values()) == round(of_attention) + (layout.degree - 1) * found.nbytes


@pytest.mark.parametrize(
    ("name", "degree"), [("cogvideox-rotary", "8"), ("flux", "8"), ("sd3", "8"), ("sd3", "2x4")]
)
def test_text_may_be_shorter_than_the_degree(ranks: Ranks, name: str, degree: str) -> None:
    model, inputs = make(name)
    short = inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"][:, :3]}
    if "txt_ids" in short:
        short["txt_ids"] = short["txt_ids"][:3]
    found = shared_forward(ranks, layout_of(degree), model, short)
    assert difference(found[0], forward(model, short)) < TOLERANCE


def test_a_class_that_needs_text_on_each_rank_refuses_a_shorter_one(ranks: Ranks) -> None:
    model, inputs = make("hunyuan")
    names = ("encoder_hidden_states", "encoder_attention_mask")
    short = inputs | {name: inputs[name][:, :3] for name in names}
    with pytest.raises(LayoutError, match="3 tokens cannot be shared among 5 ranks"):
        shared_forward(ranks, layout_of("5"), model, short)


def test_samples_of_a_batch_are_shared_together(ranks: Ranks) -> None:
    """Each with as much padding as it has."""
    model, inputs = make("hunyuan")
    both = {name: torch.cat((x, x.flip(-1))) for name, x in inputs.items()}
    both["encoder_attention_mask"] = torch.arange(11)[None] < torch.tensor([[6], [9]])
    for degree in ("3", "2x2"):
        found = shared_forward(ranks, layout_of(degree), model, both)
        assert difference(found[0], forward(model, both)) < TOLERANCE


def test_a_mode_that_cannot_be_shared_is_refused(ranks: Ranks) -> None:
    model, inputs = make("flux2")
    with pytest.raises(ModelError, match="Flux2Transformer2DModel with kv_cache_mode cannot be shared"):
        shared_forward(ranks, layout_of("2"), model, inputs | {"kv_cache_mode": "extract"})


def test_replaced_attentions_are_refused(ranks: Ranks) -> None:
    """They would attend to the tokens of their rank alone. Pipelines with PAG replace some in each call."""
    model, inputs = make("sd3")
    model.set_attn_processor(diffusers.models.attention_processor.PAGCFGJointAttnProcessor2_0())
    with pytest.raises(ModelError, match="with PAGCFGJointAttnProcessor2_0 cannot be shared among ranks"):
        shared_forward(ranks, layout_of("2"), model, inputs)


def test_heads_may_be_fewer_than_ranks_in_rings(ranks: Ranks) -> None:
    model = diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        num_layers=1,
        num_attention_heads=3,
        attention_head_dim=8,
        joint_attention_dim=32,
        caption_projection_dim=24,
        pooled_projection_dim=16,
        out_channels=4,
    ).eval()
    install(model)
    _, inputs = make("sd3")
    found = shared_forward(ranks, layout_of("2x4"), model, inputs)
    assert difference(found[0], forward(model, inputs)) < TOLERANCE
    with pytest.raises(LayoutError, match="3 heads cannot be shared among 8 ranks"):
        shared_forward(ranks, layout_of("8"), model, inputs)


def test_an_attention_without_dispatch_or_torchs_is_refused() -> None:
    class Other:
        def __call__(self, attention: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    model, _ = make("sd3")
    model.transformer_blocks[0].attn.processor = Other()
    with pytest.raises(ModelError, match="attention of Other cannot be shared among ranks"):
        install(model)


def test_processors_of_other_models_stay_as_they_are() -> None:
    """SD3's module of processors serves many classes."""
    processor = make("sd3")[0].transformer_blocks[0].attn.processor
    kind = type(processor).__mro__[1]
    assert isinstance(processor, diffusers.models.attention_processor.JointAttnProcessor2_0)
    assert kind.__call__.__globals__["F"] is torch.nn.functional
    x = random(1, 2, 3, 4)
    wanted = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    ours = type(processor).__call__.__globals__["F"].scaled_dot_product_attention
    assert torch.equal(ours(x, x, x), wanted)


def test_a_rank_that_fails_ends_the_waits_of_the_others(ranks: Ranks) -> None:
    def program(parallel: Parallel) -> torch.Tensor:
        if parallel.sequence.slot == 1:
            raise ValueError("no")
        return parallel.sequence.all_gather(torch.ones(4), dim=0)

    with pytest.raises(ValueError, match=r"^no$"):
        ranks.run(layout_of("3"), program)
    found = ranks.run(layout_of("3"), lambda parallel: parallel.sequence.all_gather(torch.ones(4), dim=0))
    assert [len(each) for each in found] == [12, 12, 12]
