"""Compiled blocks, with a compiler that changes nothing, and texts without padding."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from torch._inductor.utils import fresh_cache

from benchmarks.shared_transformers import Ranks, difference, layout_of, make, text_mask
from gfgen.models.fast import compiled
from gfgen.models.fast.compiled import cut_texts
from gfgen.models.fast.kernels import using
from gfgen.models.parallel.branches import shared_step, watch
from gfgen.models.parallel.sequence_parallel import active

torch.set_num_threads(1)

ROUNDING = 2e-6
ALONE = ("cogvideox-rotary", "ltx", "sd3", "wan", "z-image")
"""And HunyuanVideo, with texts of many lengths."""


class StubCompiler:
    """Runs what dynamo traced, and counts it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.num_compiled = 0
        self._fails = fails

    def __call__(self, graph: Any, inputs: Any) -> Any:
        if self._fails:
            raise RuntimeError("no C compiler")
        self.num_compiled += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def forward(model: Any, inputs: Any) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    found = model(**inputs, return_dict=False)[0]
    return list(found) if isinstance(found, (list, tuple)) else [found]


@pytest.mark.parametrize("name", ALONE)
def test_compiled_blocks_give_what_they_gave_and_are_compiled_once(name: str) -> None:
    model, inputs = make(name)
    wanted = forward(model, inputs)
    stub = StubCompiler()
    compiled.prepare(model, backend=stub)
    assert difference(forward(model, inputs), wanted) == 0
    assert stub.num_compiled == 0
    with using("compiled"):
        assert difference(forward(model, inputs), wanted) < ROUNDING
        num_compiled = stub.num_compiled
        forward(model, inputs)
    assert 0 < num_compiled == stub.num_compiled


def test_bits_of_compiled_blocks_do_not_depend_on_how_fast_a_rank_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor's own default tries some ways of a sum, and takes the fastest."""
    found: list[Any] = []

    def compile_fx(graph: Any, *_: Any, config_patches: Any, **__: Any) -> Any:
        found.append(config_patches)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    model, inputs = make("wan")
    compiled.prepare(model)
    with using("compiled"):
        forward(model, inputs)
    assert found == [{"deterministic": True}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_ranks_that_compile_for_themselves_have_the_same_bits() -> None:
    """Blocks as wide as CogVideoX-5B's, whose sums are over 3072 numbers, each time with an empty cache."""
    found = []
    for _ in range(3):
        torch.manual_seed(1)
        torch._dynamo.reset()
        with torch.device("cuda"):
            model = diffusers.CogVideoXTransformer3DModel(48, 64, num_layers=2, text_embed_dim=64).bfloat16()
            inputs = {
                "hidden_states": torch.randn(2, 4, 16, 60, 90).bfloat16(),
                "encoder_hidden_states": torch.randn(2, 226, 64).bfloat16(),
                "timestep": torch.full((2,), 500),
            }
        compiled.prepare(model)
        with fresh_cache(), using("compiled"):
            found += forward(model, inputs)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("name", ["hunyuan", "wan", "z-image"])
def test_ranks_share_compiled_blocks(name: str) -> None:
    model, inputs = make(name)
    wanted = forward(model, inputs)
    stub = StubCompiler()
    compiled.prepare(model, backend=stub)

    def program(parallel: Any) -> list[torch.Tensor]:
        with active(parallel), using("compiled"):
            return forward(model, inputs)

    for found in Ranks().run(layout_of("2"), program):
        assert difference(found, wanted) < ROUNDING
    assert stub.num_compiled > 0


def test_a_compiler_that_fails_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = make("ltx")
    wanted = forward(model, inputs)
    compiled.prepare(model, backend=StubCompiler(fails=True))
    with caplog.at_level(logging.WARNING, logger="gfgen"), using("compiled"):
        for _ in range(2):
            assert difference(forward(model, inputs), wanted) == 0
    (line,) = (each.message for each in caplog.records if each.name.startswith("gfgen"))
    assert line.startswith("LTXVideoTransformer3DModel: its blocks run without the compiler: ")
    assert "no C compiler" in line


def test_blocks_without_names_are_those_of_the_largest_list() -> None:
    model, _ = make("sd3")
    assert not getattr(model, "_repeated_blocks", None)
    assert compiled.repeated_blocks(model) == list(model.transformer_blocks)


def with_text(inputs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Inputs of HunyuanVideo whose text has this many tokens that are no padding."""
    return inputs | {"encoder_attention_mask": text_mask(11, num_tokens)}


@pytest.mark.parametrize("num_tokens", [2, 6, 11])
@pytest.mark.parametrize("degree", ["1", "3"])
@pytest.mark.parametrize("notes_shapes", [False, True])
def test_a_text_without_its_padding_gives_the_same(num_tokens: int, degree: str, notes_shapes: bool) -> None:
    """With fewer tokens than ranks, the padding stays. To note shapes, a step asks for each call twice."""
    model, inputs = make("hunyuan")
    inputs = with_text(inputs, num_tokens)
    wanted = forward(model, inputs)
    assert cut_texts(model)
    watch(model)
    assert difference(forward(model, inputs), wanted) == 0
    lengths, masks = [], []

    def note(module: Any, args: Any) -> None:
        lengths.append(args[1].shape[1])
        masks.append(args[3])

    model.transformer_blocks[0].register_forward_pre_hook(note)

    def program(parallel: Any) -> list[torch.Tensor]:
        with using("fused"):
            return shared_step(lambda: forward(model, inputs), parallel, notes_shapes=notes_shapes)

    for found in Ranks().run(layout_of(degree), program):
        assert difference(found, wanted) < ROUNDING
    num_ranks = int(degree)
    assert sum(lengths) == (num_tokens if num_tokens >= num_ranks else 11)
    assert (masks[0] is None) == (num_tokens >= num_ranks)


def test_padding_in_the_middle_of_a_text_stays() -> None:
    model, inputs = make("hunyuan")
    inputs["encoder_attention_mask"] = torch.tensor([[True] * 3 + [False] * 4 + [True] * 4])
    wanted = forward(model, inputs)
    cut_texts(model)
    with using("fused"):
        assert difference(forward(model, inputs), wanted) == 0


def test_texts_of_many_lengths_are_compiled_once() -> None:
    model, inputs = make("hunyuan")
    stub = StubCompiler()
    wanted = {length: forward(model, with_text(inputs, length)) for length in (3, 5, 8)}
    compiled.prepare(model, has_any_texts=cut_texts(model), backend=stub)
    for length, each in wanted.items():
        with using("compiled"):
            found = forward(model, with_text(inputs, length))
        assert difference(found, each) < ROUNDING
        if length == 3:
            num_compiled = stub.num_compiled
    assert stub.num_compiled == num_compiled
