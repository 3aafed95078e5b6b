"""What `python -m benchmarks.forward` runs on each GPU: one forward of a transformer, ours or diffusers' own.

Random weights, one branch of guidance, batch 1; or both branches, in each of the ways in which a step may
evaluate them. Times are milliseconds on the rank's device.

Legend: B batch, C channels, T H W latent frames, rows, columns; S tokens.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import ContextParallelConfig
from torch import Tensor

from benchmarks.measured import MeasuredShape, device_ms
from gfgen.gfc.cuda.captured import Captured, CapturedAlone
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.device_group import CudaGroup
from gfgen.gfc.descriptor import Descriptor
from gfgen.layout import Layout
from gfgen.models.families.guidance import evaluate_branches
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.texts import common_length, is_padded, with_texts
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.loading.random_weights import random_component
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.sequence_parallel import present_degrees
from gfgen.models.stepping.check import join_group

WARM_UPS, REPEATS = 3, 7
NUM_DISPATCHES = 2 * (WARM_UPS + REPEATS)
"""Numbers that one call of `measure` uses up."""
TEXT_TOKENS = {"wan2.2-ti2v-5b": (512, 512), "qwen-image": (64, 8)}
"""Of the prompt and of the negative prompt. Wan pads to as many; a picture's have about as many."""
RECOMPILE_LIMIT = 64
"""Beyond torch's 8, after which a block would run eagerly without a word."""

ForwardResult = dict[str, Any]
RunForward = Callable[[CudaGroup | None], Sequence[Tensor]]
Groups = Callable[[], CudaGroup | None]


Branches = Literal["one", "in turn", "in batch"]
Precision = Literal["bf16", "fp8", "fp8 and attention"]


@dataclass(frozen=True, slots=True)
class ForwardShape(MeasuredShape):
    """What a transformer is given."""

    has_image: bool = False
    """The first latent frame is given, so its tokens have another timestep."""

    @property
    def num_tokens(self) -> int:
        """Of the picture or video: 2 x 2 latents each, which are 1/16 (Wan) or 1/8 in space, 1/4 in time."""
        size = 32 if self.frames > 1 else 16
        return math.ceil(self.frames / 4) * (self.height // size) * (self.width // size)

    @property
    def variant(self) -> str:
        return "-image" if self.has_image else ""


@dataclass(frozen=True, slots=True)
class ForwardKind:
    """How a forward runs."""

    is_ours: bool
    is_compiled: bool = False
    in_graph: bool = False
    takes_anything: bool = False
    """diffusers' context parallelism with uneven shards (`ulysses_anything`)."""
    branches: Branches = "one"
    """Of guidance; on a layout of two halves "in turn" is on each its own."""
    precision: Precision = "bf16"
    """Of the blocks' products; with attention, ranks exchange queries, keys and values in fp8, too."""


@torch.no_grad()
def measure(*given: Any) -> ForwardResult:
    """Times of a forward, how long the first one took, memory; or why there are none."""
    try:
        return _measure(*given)
    except Exception as error:  # what diffusers refuses is a result, too
        text = " ".join(str(error).split())
        return {"error": f"{type(error).__name__}: {text[:300]}"}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _measure(
    endpoint: CudaEndpoint, shape: ForwardShape, kind: ForwardKind, layout: Layout, dispatch: int, store: str
) -> ForwardResult:
    """store: a file through which NCCL's ranks find each other."""
    if not kind.is_ours and layout.degree > 1 and not torch.distributed.is_initialized():
        device = str(endpoint.torch_device)
        join_group(rank=endpoint.rank, num_ranks=layout.degree, store=store, device=device)
    run, groups = prepare(endpoint, shape, kind, layout, dispatch)
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    first = groups() if groups else None
    result = run(first)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    assert all(torch.isfinite(each).all() for each in result), "a forward whose result is not finite"
    if kind.in_graph:
        run(groups() if groups else None)  # once more, with all that the first one has compiled
        run = captured(run, groups() if groups else None)
    times_ms = [timed_ms(run, groups) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:]
    if first is not None:
        endpoint.check(endpoint.last_dispatch)
    peak_gb = torch.cuda.max_memory_allocated() / 1e9
    return {"times_ms": times_ms, "first_s": first_s, "peak_gb": peak_gb}


def prepare(
    endpoint: CudaEndpoint, shape: ForwardShape, kind: ForwardKind, layout: Layout, dispatch: int
) -> tuple[RunForward, Groups | None]:
    """What is measured, and what makes a group for each call of it: nothing does for diffusers' own."""
    torch.cuda.set_device(endpoint.device)
    transformer = _transformer(shape.model, kind, layout.degree, str(endpoint.torch_device))
    inputs, texts = inputs_of(shape, endpoint.torch_device)
    run = forward_of(transformer, inputs, texts, kind.branches)
    return run, groups_of(endpoint, layout, dispatch) if kind.is_ours else None


MANY_STEPS = 20


def forward_of(
    transformer: Any, inputs: dict[str, Any], texts: Sequence[Tensor], branches: Branches
) -> RunForward:
    """What is measured: from a group, or none, to the prediction of each branch."""

    def predict(embeds: Sequence[Tensor]) -> Tensor:
        tokens = inputs["hidden_states"].shape[1]
        pads = is_padded(transformer, picture_tokens=tokens, num_steps=MANY_STEPS)
        length = common_length(embeds, degrees=present_degrees()) if pads else None
        result: Tensor = transformer(**with_texts(inputs, embeds, length=length))[0]
        return result

    def forward(group: CudaGroup | None) -> Sequence[Tensor]:
        parallel = None if group is None else parallel_from(group)
        given = texts[:1] if branches == "one" else texts
        return evaluate_branches(predict, given, parallel, in_batch=branches == "in batch")

    return forward


def timed_ms(run: RunForward, groups: Groups | None) -> float:
    """From when all ranks have come together, if they do, until this rank's device is done."""
    group = groups() if groups else None
    return device_ms(lambda: run(group))


def groups_of(endpoint: CudaEndpoint, layout: Layout, dispatch: int) -> Groups:
    """Makes a group for one forward after the other; None for a rank alone."""
    numbers = iter(range(dispatch, dispatch + NUM_DISPATCHES))

    def entered() -> CudaGroup | None:
        if layout.degree == 1:
            return None
        group = endpoint.group(Descriptor(next(numbers), layout, (1,) * layout.degree))
        group.enter()
        return group

    return entered


def captured(run: RunForward, group: CudaGroup | None) -> RunForward:
    """The same in a CUDA graph; it has run before."""
    if group is None:
        alone = CapturedAlone(lambda: run(None))
        return lambda _: alone.replay()
    graph = Captured(group, run)

    def replay(group: CudaGroup | None) -> Sequence[Tensor]:
        assert group is not None
        return graph.replay(group)

    return replay


_KEPT: dict[object, Any] = {}
"""The transformer of the last call: shapes follow each other, and it takes a second to make."""


def _transformer(model: str, kind: ForwardKind, degree: int, device: str) -> Any:
    key = (model, kind.is_ours, kind.is_compiled, kind.takes_anything, kind.precision, degree)
    if key not in _KEPT:
        _KEPT.clear()
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        _KEPT[key] = _made(model, kind, degree, device)
    return _KEPT[key]


def _made(model: str, kind: ForwardKind, degree: int, device: str) -> Any:
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    transformer = random_component(CONFIGS / model, "transformer", device=device, dtype=torch.bfloat16)
    if kind.is_ours:
        install(transformer)
        fp8_on = None if kind.precision == "bf16" else torch.device(device)
        fuse(transformer, fp8_on=fp8_on, attends_in_fp8=kind.precision == "fp8 and attention")
        return transformer
    if degree > 1:
        config = ContextParallelConfig(ulysses_degree=degree, ulysses_anything=kind.takes_anything)
        transformer.enable_parallelism(config=config)
    if kind.is_compiled:
        transformer.compile_repeated_blocks(dynamic=False)
    return transformer


def inputs_of(shape: ForwardShape, device: torch.device) -> tuple[dict[str, Any], list[Tensor]]:
    """Random inputs but for the texts, and those of both branches; the same on every rank."""
    generator = torch.Generator("cpu").manual_seed(1)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, torch.bfloat16)

    rows, columns = shape.height // 16, shape.width // 16
    text_tokens = TEXT_TOKENS[shape.model]
    if shape.model == "qwen-image":
        inputs: dict[str, Any] = {
            "hidden_states": random(1, rows * columns, 64),
            "timestep": torch.full((1,), 0.5, device=device, dtype=torch.bfloat16),
            "encoder_hidden_states_mask": None,
            "guidance": None,
            "img_shapes": [[(1, rows, columns)]],
            "attention_kwargs": {},
            "return_dict": False,
        }
        return inputs, [random(1, length, 3584) for length in text_tokens]
    num_frames = math.ceil(shape.frames / 4)
    timestep = torch.full((1,), 500.0, device=device)
    if shape.has_image:
        timestep = torch.full((1, shape.num_tokens), 500.0, device=device)
        timestep[:, : shape.num_tokens // num_frames] = 0
    inputs = {
        "hidden_states": random(1, 48, num_frames, rows, columns),
        "timestep": timestep,
        "return_dict": False,
    }
    return inputs, [random(1, length, 4096) for length in text_tokens]
