"""When a forward is recorded as a CUDA graph, what gains, and what a prompt of a new length costs.

    python -m benchmarks.gpu_recording

Measures, for some shapes, the share of a block's time that its launches take, by which forwards are recorded,
and what a forward takes launched and as a graph. Records forwards of Qwen-Image at 512x512 with texts of ever
other lengths, at once and with an evaluation before. Compares attention as long as what is valid with
attention that leaves padding out: by a count on the device, and by a bias. Random weights; two minutes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measure_forward import ForwardShape, inputs_of
from benchmarks.timing import host_s
from gfgen.bench.gfc import check_num_gpus
from gfgen.errors import GfgenError
from gfgen.gfc.cuda.measure import captured_us
from gfgen.models.fast import recording as graphs_module
from gfgen.models.fast.evaluation import evaluate
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.recording import Graphs
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.loading.random_weights import random_component
from gfgen.models.parallel.counted_attention import counted_attention, is_fast
from gfgen.models.parallel.hooks import install
from gfgen.runtime.worker.forwards import CudaRecorder

DEVICE = torch.device("cuda:0")
QWEN = "qwen-image"
AT_ONCE = (20, 21, 22, 40, 77, 100, 33)
"""Tokens; the first one loads and compiles."""
EVALUATED = (120, 121, 122, 140, 147, 150, 133)
PADDED = ((1056, 1044), (1088, 1044), (2368, 2330), (4160, 4120), (9280, 9250))
"""Tokens of text and picture, and how many of them are valid."""
HEADS = (24, 12)
CALLS, REPEATS = 20, 7
WAN = "wan2.2-ti2v-5b"
SHAPES = (
    *(ForwardShape(QWEN, size, size, 1) for size in (512, 640, 768, 896, 1024)),
    *(ForwardShape(WAN, 832, 480, frames) for frames in (5, 17, 33, 49)),
)


def launch_shares() -> Iterator[str]:
    """Of a forward of one branch: the share that decides, and milliseconds launched and as a graph."""
    for model, shapes in itertools.groupby(SHAPES, key=lambda shape: shape.model):
        transformer = _transformer(model)
        graphs = Graphs(CudaRecorder(DEVICE), DEVICE)
        for shape in shapes:
            inputs, texts = inputs_of(shape, DEVICE)
            del inputs["return_dict"]
            given = {**inputs, "encoder_hidden_states": texts[0]}
            found: list[float] = []
            evaluate(transformer, given)
            with graphs_module._timed_blocks(transformer, torch.cuda.synchronize, found.append):
                evaluate(transformer, given)
            with patch.object(graphs_module, "WORTH_RECORDING", 0.0), graphs.recording(None):
                graphs(transformer, given)
            launched_ms, replayed_ms = (
                _median_ms(partial(forward, transformer, given)) for forward in (evaluate, graphs)
            )
            size = f"{shape.width}x{shape.height}x{shape.frames}"
            yield f"| {model} {size} | {found[0]:.2f} | {launched_ms:.1f} | {replayed_ms:.1f} |"
        graphs.forget()


def _transformer(model: str) -> Any:
    transformer = random_component(CONFIGS / model, "transformer", device=str(DEVICE), dtype=torch.bfloat16)
    install(transformer)
    fuse(transformer)
    return transformer


def _median_ms(call: Callable[[], object]) -> float:
    return 1e3 * statistics.median(host_s(call) for _ in range(REPEATS))


def recordings() -> Iterator[str]:
    """Milliseconds of each; the results must be bitwise those of launches one by one."""
    transformer = _transformer(QWEN)
    inputs, _ = inputs_of(ForwardShape(QWEN, 512, 512, 1), DEVICE)
    del inputs["return_dict"]
    recorder = CudaRecorder(DEVICE)
    graphs = Graphs(recorder, DEVICE)
    for way, lengths in (("at once", AT_ONCE), ("with an evaluation before", EVALUATED)):
        found = []
        for length in lengths:
            if lengths is EVALUATED:
                graphs = Graphs(recorder, DEVICE)  # which knows of no text
            given = {
                **inputs,
                "encoder_hidden_states": torch.randn(1, length, 3584).to(DEVICE, torch.bfloat16),
            }
            found.append(_recorded_ms(graphs, transformer, given))
            assert torch.equal(graphs(transformer, given), evaluate(transformer, given))
        yield f"| {way} | {', '.join(f'{each:.0f}' for each in found)} |"


def _recorded_ms(graphs: Graphs, transformer: Any, inputs: dict[str, Any]) -> float:
    def record() -> None:
        with graphs.recording(None):
            graphs(transformer, inputs)

    return 1e3 * host_s(record)


def attentions() -> Iterator[str]:
    """Microseconds in a CUDA graph, heads of 128 channels."""
    for (length, valid), num_heads in itertools.product(PADDED, HEADS):
        query, key, value = torch.randn(3, 1, length, num_heads, 128, device=DEVICE, dtype=torch.bfloat16)
        num_tokens_B = torch.full((1,), valid, dtype=torch.int32, device=DEVICE)
        bias = torch.zeros(1, 1, 1, length, device=DEVICE, dtype=query.dtype)
        bias[..., valid:] = -torch.inf
        ways = [
            partial(_by_torch, query[:, :valid], key[:, :valid], value[:, :valid]),
            partial(counted_attention, query, key, value, num_tokens_B),
            partial(_by_torch, query, key, value, bias),
        ]
        times_us = [captured_us(way, lambda: None, copies=CALLS, repeats=REPEATS) for way in ways]
        yield f"| {length}, {valid}, {num_heads} | {' | '.join(f'{each:.0f}' for each in times_us)} |"


def _by_torch(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return scaled_dot_product_attention(q, k, v, attn_mask=bias)


@torch.no_grad()
def main() -> None:
    """Print the tables."""
    try:
        check_num_gpus(1)
    except GfgenError as error:
        raise SystemExit(str(error)) from None
    torch.cuda.set_stream(torch.cuda.Stream(DEVICE))  # type: ignore[no-untyped-call]
    print("| shape | launches of a block | launched, ms | graph, ms |\n|---|---|---|---|")
    for row in launch_shares():
        print(row, flush=True)
    print("\n| | recorded in, ms |\n|---|---|")
    for row in recordings():
        print(row, flush=True)
    if not is_fast(DEVICE, torch.bfloat16):
        raise SystemExit("attention that counts needs nvidia-cudnn-frontend")
    print("\n| tokens, valid, heads | as long as valid | counted | a bias |\n|---|---|---|---|")
    for row in attentions():
        print(row, flush=True)


if __name__ == "__main__":
    main()
