"""Attention in fp8 next to bf16 on one GPU: errors against fp64, microseconds, and milliseconds per forward.

    python -m benchmarks.fp8_attention [--part kernels] [--part forward] [--part error] [--small]

As benchmarks/fp8.py, whose forwards it times with attention in bf16 and in fp8. --small rehearses on a CPU.

Legend: L tokens, H heads, D head dimension.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.forward import QWEN, WAN
from benchmarks.fp8 import (
    ERROR,
    ERROR_LAYERS,
    SPEED,
    blocks_of,
    distance,
    free_memory,
    fused,
    made,
    outputs_of,
    plant_outliers,
    speed_of,
    tell,
    tell_kernels,
    timed_us,
)
from benchmarks.measure_forward import ForwardShape
from gfgen.models.fast import rows
from gfgen.models.fast.linears import quantise
from gfgen.models.parallel.counted_attention import counted_attention
from gfgen.models.parallel.fp8_attention import VALUE_SCALE, fp8_attention, from_fp8, in_fp8, opened

HEADS, HEAD_DIM = 24, 128
TOKENS = {WAN: (5070, 8190, 18480), QWEN: (1088, 4160, 9280)}
QUERIES, SOME_HEADS = 256, 3
"""That are computed in fp64."""


def measure_kernels(model: str, device: str, *, is_small: bool) -> None:
    """Errors for flat and for peaked attention, and times, of each of the model's shapes."""
    for length in (200,) if is_small else TOKENS[model]:
        for sharpness in (1.0, 2.5):
            tell_errors(length, sharpness, device)
        if device == "cuda":
            tell_times(length)


def given(length: int, sharpness: float, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys as after a norm, and values: [1, L, H, D] in bf16."""
    noise = torch.Generator(device).manual_seed(length)
    x = torch.randn((3, 1, length, HEADS, HEAD_DIM), generator=noise, device=device)
    x[:2] *= sharpness
    q, k, v = x.bfloat16()
    return q, k, v


def attend_in_bf16(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of some queries and heads, [1, H, L, D] in fp64."""
    q, k, v = (x.transpose(1, 2)[:, :SOME_HEADS].double() for x in (query, key, value))
    return scaled_dot_product_attention(q[:, :, :QUERIES], k, v)


def tell_errors(length: int, sharpness: float, device: str) -> None:
    q, k, v = given(length, sharpness, device)
    wanted = exact(q, k, v)
    in_bf16 = attend_in_bf16(q, k, v)
    tensors = in_fp8(q), in_fp8(k), in_fp8(v, scale=VALUE_SCALE)
    found = from_fp8(fp8_attention(*tensors), torch.float32, scale=VALUE_SCALE).transpose(1, 2)
    by_inputs = exact(*opened(*tensors, torch.float64))
    by_result = from_fp8(in_fp8(wanted, scale=VALUE_SCALE), torch.float64, scale=VALUE_SCALE)
    parts = {"bf16": in_bf16[:, :SOME_HEADS, :QUERIES], "fp8": found[:, :SOME_HEADS, :QUERIES]}
    parts |= {"of it by rounding of inputs": by_inputs, "of the result": by_result}
    errors = ", ".join(f"{name} {distance(each, wanted):.2e}" for name, each in parts.items())
    tell(f"error {length} tokens, queries and keys of {sharpness}: {errors}")


def tell_times(length: int) -> None:
    q, k, v = given(length, 1.0, "cuda")
    tensors = in_fp8(q), in_fp8(k), in_fp8(v, scale=VALUE_SCALE)
    counts = torch.tensor([length - 20], dtype=torch.int32, device="cuda")
    weights = (torch.ones(HEADS * HEAD_DIM, device="cuda"),) * 2
    projected = torch.randn((1, length, 3 * HEADS * HEAD_DIM), device="cuda").bfloat16()
    turns = torch.ones((2, length, HEAD_DIM // 2), device="cuda").unbind()
    shape: Any = {"num_heads": HEADS, "head_dim": HEAD_DIM, "weights": weights, "eps": 1e-6, "turns": turns}
    into = q.new_empty((3, *q.shape), dtype=torch.float8_e4m3fn)
    times = {
        "bf16": timed_us(attend_in_bf16, q, k, v),
        "fp8": timed_us(fp8_attention, *tensors),
        "bf16 with padding": timed_us(counted_attention, q, k, v, counts),
        "fp8 with padding": timed_us(fp8_attention, *tensors, counts),
        "norms and turns to bf16": timed_us(rows.heads, projected, **shape),
        "to fp8, with values": timed_us(rows.heads, projected, **shape, into=into),
    }
    tell(f"us {length} tokens:", ", ".join(f"{name} {us:.0f}" for name, us in times.items()))


def attend(transformer: Any, *, in_fp8: bool) -> None:
    """Let its attentions that ranks share be in fp8 from now on, or in bf16."""
    for block in blocks_of(transformer):
        (block.attn1 if hasattr(block, "attn1") else block.attn).attends_in_fp8 = in_fp8


def small_shape(model: str) -> ForwardShape:
    return ForwardShape(model, 64, 64, 5 if model == WAN else 1)


def quantise_layers(transformer: Any, device: str) -> None:
    for block in blocks_of(transformer):
        for name, part in list(block.named_children()):
            if name not in ("img_mod", "txt_mod"):
                quantise(part)
    if hasattr(transformer, "modulation"):
        transformer.modulation.quantise(torch.device(device))
    free_memory(device)


def measure_forward(model: str, device: str, *, is_small: bool, ways: Sequence[str]) -> None:
    """Products in bf16, then in fp8, each with attention in bf16 and in fp8; in a CUDA graph."""
    transformer = fused(made(model, device, layers=1 if is_small else None))
    shapes = [small_shape(model)] if is_small else SPEED[model]
    for products in ways:
        if products == "fp8":
            quantise_layers(transformer, device)
        for attention in ("bf16", "fp8"):
            attend(transformer, in_fp8=attention == "fp8")
            times = speed_of(transformer, shapes, device)
            said = ", ".join(f"{shape.name} {ms:.1f}" for shape, ms in zip(shapes, times, strict=True))
            tell(f"ms products {products}, attention {attention}: {said}")
    if device == "cuda":
        tell_kernels(transformer, shapes[-1 if model == WAN else 1], "all fp8")


def measure_error(model: str, device: str, *, is_small: bool, has_outliers: bool) -> None:
    """Against fp32 of diffusers with the same weights, as in benchmarks/fp8.py."""
    torch.backends.cuda.matmul.allow_tf32 = False
    layers, shape = (2, small_shape(model)) if is_small else (ERROR_LAYERS[model], ERROR[model])

    def fresh() -> Any:
        transformer = made(model, device, layers=layers)
        if has_outliers:
            plant_outliers(transformer)
        return transformer

    wanted = outputs_of(fresh().float(), shape, device, torch.float32)
    free_memory(device)
    transformer = fused(fresh())
    for products in ("bf16", "fp8"):
        if products == "fp8":
            quantise_layers(transformer, device)
        for attention in ("bf16", "fp8"):
            attend(transformer, in_fp8=attention == "fp8")
            result = outputs_of(transformer, shape, device, torch.bfloat16)
            errors = [distance(one, other) for one, other in zip(result, wanted, strict=True)]
            tell(
                f"error {model} {'outliers ' if has_outliers else ''}products {products}, attention "
                f"{attention}: end {errors[-1]:.2e}, first block {errors[0]:.1e}, last {errors[-2]:.1e}"
            )


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = ("kernels", "forward", "error", "outliers")
    parser.add_argument("--part", action="append", choices=parts)
    parser.add_argument("--model", action="append", choices=(WAN, QWEN))
    parser.add_argument("--products", action="append", choices=("bf16", "fp8"), help="Of forward.")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    device = "cpu" if arguments.small else "cuda"
    options: Any = {"device": device, "is_small": arguments.small}
    with torch.no_grad():
        for part in arguments.part or parts:
            for model in arguments.model or (WAN, QWEN):
                if part == "kernels":
                    measure_kernels(model, **options)
                elif part == "forward":
                    measure_forward(model, **options, ways=arguments.products or ("bf16", "fp8"))
                else:
                    measure_error(model, **options, has_outliers=part == "outliers")
                free_memory(device)


if __name__ == "__main__":
    main()
