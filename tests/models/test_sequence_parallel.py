"""The hooks themselves: silent when nothing is active, and what they cut and exchange otherwise."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline, WanPipeline
from gfc_fake import FakeCluster
from torch._subclasses.fake_tensor import FakeTensorMode

from gfgen.errors import LayoutError, ModelError, PeerTimeoutError
from gfgen.gfc.group import Collectives
from gfgen.layout import Layout
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.models.parallel.sequence_parallel import active, sharded_attention

torch.set_num_threads(1)

SHAPE = {"width": 64, "height": 64, "num_inference_steps": 2, "output_type": "latent"}


@pytest.fixture(scope="module")
def wan(tiny_models: Mapping[str, Path]) -> Any:
    """The tiny Wan's transformer, with hooks, in fp32."""
    return hooked(WanPipeline, tiny_models["tiny-wan"]).transformer


@pytest.fixture(scope="module")
def qwen(tiny_models: Mapping[str, Path]) -> Any:
    return hooked(QwenImagePipeline, tiny_models["tiny-qwen-image"]).transformer


def plain(pipeline_class: Any, checkpoint: Path) -> Any:
    pipeline = pipeline_class.from_pretrained(str(checkpoint), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def hooked(pipeline_class: Any, checkpoint: Path) -> Any:
    pipeline = plain(pipeline_class, checkpoint)
    install(pipeline.transformer)
    return pipeline


def wan_inputs() -> dict[str, Any]:
    """18 tokens, a timestep for each."""
    noise = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 48, 3, 4, 6, generator=noise),
        "timestep": torch.linspace(0, 900, 18)[None],
        "encoder_hidden_states": torch.randn(1, 16, 64, generator=noise),
    }


def qwen_inputs(text_tokens: int) -> dict[str, Any]:
    """12 tokens of picture."""
    noise = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 12, 64, generator=noise),
        "encoder_hidden_states": torch.randn(1, text_tokens, 64, generator=noise),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 3, 4)]],
    }


@torch.no_grad()
def forward(transformer: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    torch.set_num_threads(1)
    result: torch.Tensor = transformer(**inputs, return_dict=False)[0]
    return result


def shared_forward(
    transformer: Any,
    inputs: Mapping[str, Any],
    degree: int,
    *,
    ring: int = 1,
    watch: Callable[[Parallel], Parallel] = lambda parallel: parallel,
) -> list[torch.Tensor]:
    """On `degree` ranks, in rings of `ring`."""

    def program(parallel: Parallel) -> torch.Tensor:
        with active(watch(parallel)):
            return forward(transformer, inputs)

    layout = Layout(tuple(range(degree)), ulysses=degree // ring, ring=ring)
    return FakeCluster().run(layout, lambda group: program(parallel_from(group)))


def largest_difference(results: list[torch.Tensor], wanted: torch.Tensor) -> float:
    return float(max((result - wanted).abs().max() for result in results) / wanted.abs().max())


class Watched:
    """Ranks that note what is exchanged, with the shapes of slot 0."""

    def __init__(self, ranks: Collectives, log: list[tuple[str, tuple[int, ...]]]) -> None:
        self._ranks = ranks
        self._log = log
        self.size, self.slot, self.room_bytes = ranks.size, ranks.slot, ranks.room_bytes

    def beside(self, max_blocks: int) -> Collectives:
        return self

    def __getattr__(self, name: str) -> Any:
        def exchange(*tensors: torch.Tensor, **sizes: Any) -> Any:
            if self.slot == 0:
                self._log.append((name, tuple(tensors[0].shape)))
            return getattr(self._ranks, name)(*tensors, **sizes)

        return exchange


def watched(parallel: Parallel, *, log: list[tuple[str, tuple[int, ...]]]) -> Parallel:
    names = ("sequence", "ulysses", "ring")
    return replace(parallel, **{name: Watched(getattr(parallel, name), log) for name in names})


@pytest.mark.parametrize(
    ("pipeline_class", "model", "call"),
    [
        (WanPipeline, "tiny-wan", {"num_frames": 5}),
        (QwenImagePipeline, "tiny-qwen-image", {"negative_prompt": " ", "true_cfg_scale": 4.0}),
    ],
)
def test_pipelines_own_call_is_bitwise_the_same_with_hooks(
    tiny_models: Mapping[str, Path], pipeline_class: Any, model: str, call: Mapping[str, Any]
) -> None:
    results = [
        make(pipeline_class, tiny_models[model])(
            prompt="a fox", generator=torch.Generator().manual_seed(3), return_dict=False, **SHAPE, **call
        )[0]
        for make in (plain, hooked)
    ]
    assert torch.equal(*results)


def test_ranks_of_one_thread_are_not_active_on_another(wan: Any) -> None:
    wanted = forward(wan, wan_inputs())
    found: list[torch.Tensor] = []
    with active(unanswered(num_ranks=4)):
        thread = threading.Thread(target=lambda: found.append(forward(wan, wan_inputs())))
        thread.start()
        thread.join()
    assert torch.equal(found[0], wanted)


def test_forward_alone_is_unharmed_by_one_that_lost_its_peer(wan: Any) -> None:
    wanted = forward(wan, wan_inputs())
    with pytest.raises(PeerTimeoutError), active(unanswered(num_ranks=2)):
        forward(wan, wan_inputs())
    assert torch.equal(forward(wan, wan_inputs()), wanted)


def unanswered(num_ranks: int) -> Parallel:
    """Slot 0 of a group whose other ranks never come: an exchange raises at once."""
    results: list[Any] = []
    cluster = FakeCluster(timeout_s=0.0)
    cluster.run(Layout(tuple(range(num_ranks)), ulysses=num_ranks), results.append)
    return parallel_from(results[0])


def test_a_forward_exchanges_twice_for_each_shared_attention_and_once_at_the_end(wan: Any) -> None:
    log: list[tuple[str, tuple[int, ...]]] = []
    shared_forward(wan, wan_inputs(), 4, watch=functools.partial(watched, log=log))
    # 18 tokens over 4 ranks are 5 on the first; 24 heads of 8 are 6. The cross-attentions to the
    # prompt are nobody else's business.
    attention = [("heads_from_tokens", (1, 5, 24, 8)), ("tokens_from_heads", (1, 18, 6, 8))]
    assert log == attention * 2 + [("all_gather", (1, 5, 192))]


@pytest.mark.parametrize("text_tokens", [1, 2, 3, 9])
@pytest.mark.parametrize(("degree", "ring"), [(2, 1), (5, 1), (3, 3), (4, 2), (6, 2)])
def test_text_may_have_any_length(qwen: Any, text_tokens: int, degree: int, ring: int) -> None:
    inputs = qwen_inputs(text_tokens)
    results = shared_forward(qwen, inputs, degree, ring=ring)
    assert largest_difference(results, forward(qwen, inputs)) < 1e-5
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(("degree", "ring"), [(2, 1), (3, 1), (7, 1), (2, 2), (4, 2), (6, 3), (4, 4)])
def test_padding_of_a_prompt_stays_masked(qwen: Any, degree: int, ring: int) -> None:
    """The mask is cut with the text, and whole again where the attention is."""
    inputs = qwen_inputs(5)
    mask = torch.tensor([[True, True, True, False, False]])
    masked = inputs | {"encoder_hidden_states_mask": mask}
    wanted = forward(qwen, masked)
    assert largest_difference([forward(qwen, inputs)], wanted) > 1e-3  # or the mask does nothing here
    assert largest_difference(shared_forward(qwen, masked, degree, ring=ring), wanted) < 1e-5


def test_fewer_tokens_or_heads_than_ranks_are_refused_with_both_numbers(wan: Any) -> None:
    few = wan_inputs() | {"hidden_states": torch.zeros(1, 48, 1, 2, 4), "timestep": torch.zeros(1)}
    with pytest.raises(LayoutError, match="2 tokens cannot be shared among 3 ranks"):
        shared_forward(wan, few, 3)
    small = type(wan)(num_attention_heads=2, attention_head_dim=12, num_layers=1, in_channels=16, ffn_dim=24)
    install(small)
    inputs = {"hidden_states": torch.zeros(1, 16, 1, 8, 8), "timestep": torch.zeros(1)}
    inputs["encoder_hidden_states"] = torch.zeros(1, 4, 4096)
    with pytest.raises(LayoutError, match="2 heads cannot be shared among 3 ranks"):
        shared_forward(small, inputs, 3)
    found = shared_forward(small, inputs, 4, ring=2)
    assert largest_difference(found, forward(small, inputs)) < 1e-5


def test_a_ring_refuses_a_backend_that_it_cannot_use(wan: Any) -> None:
    wan.set_attention_backend("native")
    try:
        with pytest.raises(ModelError, match="attention backend 'native' does not work in a ring"):
            shared_forward(wan, wan_inputs(), 2, ring=2)
    finally:
        wan.reset_attention_backend()


def test_class_without_a_plan_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear: has no _cp_plan"):
        install(torch.nn.Linear(2, 2))


def test_operator_tells_a_compiler_the_shape_of_its_result() -> None:
    with FakeTensorMode():
        query = torch.empty(1, 5, 24, 8, dtype=torch.bfloat16).transpose(0, 1).transpose(0, 1)
        result = sharded_attention(query, query, query, None, None, None)
    assert (result.shape, result.dtype) == (query.shape, query.dtype)
    assert result.is_contiguous()


def test_block_compiles_to_one_graph_that_knows_no_group(wan: Any) -> None:
    """Compiled for a rank alone, it serves any group in which a shard has the same shape."""
    graphs: list[list[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def frames(number: int) -> dict[str, Any]:
        """The first frames, of 6 tokens each."""
        whole = wan_inputs()
        return whole | {
            "hidden_states": whole["hidden_states"][:, :, :number],
            "timestep": whole["timestep"][:, : 6 * number],
        }

    wanted = [shared_forward(wan, frames(number), number)[0] for number in (1, 2, 3)]
    block = wan.blocks[0]
    torch._dynamo.reset()
    block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)
    try:
        found = [shared_forward(wan, frames(number), number)[0] for number in (1, 2, 3)]
    finally:
        del block.forward
        torch._dynamo.reset()
    assert all(map(torch.equal, found, wanted))
    assert [targets.count("gfgen.sharded_attention.default") for targets in graphs] == [1]
