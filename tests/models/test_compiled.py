"""Compiled blocks, with a compiler that changes nothing, and texts without padding."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.shared_transformers import Ranks, difference, layout_of, make, shared_forward, text_mask
from gfgen.models.fast import compiled
from gfgen.models.fast.cut_texts import cut_texts
from gfgen.models.fast.kernels import using
from gfgen.models.parallel.sequence_parallel import active

torch.set_num_threads(1)

ROUNDING = 2e-6
NAMES = ("cogvideox-rotary", "hunyuan", "ltx", "sd3", "wan", "z-image")


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


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
def test_ranks_share_compiled_blocks(name: str) -> None:
    model, inputs = make(name)
    wanted = forward(model, inputs)
    compiled.prepare(model, backend=StubCompiler())

    def program(parallel: Any) -> list[torch.Tensor]:
        with active(parallel), using("compiled"):
            return forward(model, inputs)

    for found in Ranks().run(layout_of("2"), program):
        assert difference(found, wanted) < ROUNDING
