"""Forwards in fp8 next to bf16, on one GPU: milliseconds, memory, and errors against fp32.

    python -m benchmarks.fp8 [--part times] [--part speed] [--part error] [--model NAME] [--small]

Random weights of full size, one branch of guidance. Errors are of what each block adds, and at the end: the
norm of the difference from diffusers' in fp32, over its norm. `outliers` plants channels of norms and of
feed-forwards that are 30 times as large as others. --small rehearses on a CPU.

Legend: N rows, C channels.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import importlib
import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.forward import QWEN, SHAPES, WAN
from benchmarks.measure_forward import (
    RECOMPILE_LIMIT,
    ForwardShape,
    captured,
    forward_of,
    inputs_of,
    timed_ms,
)
from benchmarks.timing import device_ms, host_s
from gfgen.models.fast import rows
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.linears import QuantisedLinear, linear_gelu, quantise
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.loading.random_weights import random_component
from gfgen.models.parallel.hooks import install

SPEED = {WAN: SHAPES[:3], QWEN: [shape for shape in SHAPES if shape.model == QWEN]}
ERROR = {WAN: ForwardShape(WAN, 832, 480, 49), QWEN: ForwardShape(QWEN, 512, 512, 1)}
ERROR_LAYERS = {WAN: 30, QWEN: 12}
"""Qwen-Image's 60 blocks in fp32 do not fit."""
KINDS = {
    "attention": re.compile("sdpa|flash|fmha"),
    "products": re.compile("nvjet|gemm|cutlass|gemv|splitK"),
    "rows": re.compile("^_add_norm|^_heads|^_rows_in_fp8"),
}
WARM_UPS, REPEATS = 3, 9
OUTLIER, OUTLIER_CHANNELS = 30.0, (7, 100, 1029)


def tell(*words: object) -> None:
    print(*words, flush=True)


def timed_us(run: Callable[..., object], *args: Any, **options: Any) -> float:
    """The median, with caches as a forward leaves them: 64 MB are written between calls."""
    spoil = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(WARM_UPS + REPEATS):
        spoil.zero_()
        times.append(1e3 * device_ms(lambda: run(*args, **options)))
    return float(statistics.median(times[WARM_UPS:]))


# Kernels ----------------------------------------------------------------------------------------


def time_kernels() -> None:
    """Each operation of a block in bf16 and in fp8, microseconds."""
    for num, inner, outer in (
        (18480, 3072, 9216), (18480, 3072, 3072), (18480, 3072, 14336), (18480, 14336, 3072),
        (5070, 3072, 14336), (4096, 3072, 12288), (4096, 12288, 3072), (1024, 3072, 9216), (64, 3072, 9216),
        (64, 3072, 12288), (512, 3072, 6144),
    ):  # fmt: skip
        layer = nn.Linear(inner, outer, dtype=torch.bfloat16, device="cuda")
        fp8, x = QuantisedLinear(layer), torch.randn((1, num, inner), device="cuda").bfloat16()
        given = rows.to_fp8(x)
        times = [timed_us(layer, x), timed_us(fp8, given), timed_us(rows.to_fp8, x)]
        if outer > 3 * inner:
            times.append(timed_us(linear_gelu, x, layer.weight, layer.bias))
            times.append(timed_us(rows.to_fp8, layer(x), has_gelu=True))
        names = ("bf16", "fp8", "rows", "bf16 and gelu", "gelu to fp8")
        said = ", ".join(f"{name} {us:.0f}" for name, us in zip(names, times, strict=False))
        tell(f"us {num}x{inner}x{outer}: {said}")
    for num in (18480, 4096):
        x = torch.randn((1, num, 3072), device="cuda").bfloat16()
        one = torch.ones(3072, device="cuda")
        of = rows.RowNorm(one, one, eps=1e-6, plus_one=True)
        both = [timed_us(rows.add_norm, x, x, one, of, in_fp8=in_fp8) for in_fp8 in (False, True)]
        tell(f"us add_norm {num}x3072: bf16 {both[0]:.0f}, fp8 {both[1]:.0f}")


# Speed and memory -------------------------------------------------------------------------------


def made(model: str, device: str, *, layers: int | None = None) -> Any:
    """diffusers' transformer in bf16, of fewer layers if asked."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(CONFIGS / model, Path(folder) / model))
        path = copy / "transformer" / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"num_layers": layers or config["num_layers"]}))
        return random_component(copy, "transformer", device=device, dtype=torch.bfloat16)


def blocks_of(transformer: Any) -> Any:
    return transformer.blocks if hasattr(transformer, "blocks") else transformer.transformer_blocks


def fused(transformer: Any) -> Any:
    install(transformer)
    fuse(transformer)
    return transformer


def measure_speed(model: str, device: str, *, is_small: bool, has_kernels: bool) -> None:
    """bf16, then the same transformer with more and more in fp8; in a CUDA graph."""
    transformer = fused(made(model, device, layers=1 if is_small else None))
    parts = [("bf16", "")]
    if model == QWEN:
        parts += [("fp8 but picture's feed-forward", "attn txt_mlp"), ("fp8", "img_mlp")]
    else:
        parts += [("fp8", "attn1 attn2 ffn")]
    for way, names in parts:
        for block in blocks_of(transformer):
            for name in names.split():
                quantise(getattr(block, name))
        if model == QWEN and way == "fp8":
            transformer.modulation.quantise(torch.device(device))
        free_memory(device)
        size = sum(each.nbytes for each in [*transformer.parameters(), *transformer.buffers()])
        there = torch.cuda.memory_allocated() if device == "cuda" else size
        shapes = SPEED[model][:1] if is_small else SPEED[model]
        times = speed_of(transformer, shapes, device)
        said = ", ".join(f"{shape.name} {ms:.1f}" for shape, ms in zip(shapes, times, strict=True))
        tell(f"ms {way}: {said}; weights {size / 1e9:.2f} GB, allocated {there / 1e9:.2f} GB")
        if device == "cuda" and has_kernels:
            tell_kernels(transformer, shapes[-1 if model == WAN else 1], way)


def tell_kernels(transformer: Any, shape: ForwardShape, way: str) -> None:
    """Milliseconds by kind of kernel, and the names of the largest others."""
    from torch.profiler import ProfilerActivity, profile

    inputs, texts = inputs_of(shape, torch.device("cuda"))
    run = forward_of(transformer, inputs, texts, "one")
    run(None)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run(None)
        torch.cuda.synchronize()
    kinds: dict[str, float] = collections.defaultdict(float)
    others: dict[str, float] = collections.defaultdict(float)
    for event in profiled.events():
        if event.device_type == torch._C._autograd.DeviceType.CUDA:
            kind = next((kind for kind, names in KINDS.items() if names.search(event.name)), "other")
            kinds[kind] += event.time_range.elapsed_us() / 1e3
            if kind != "attention":
                others[event.name[:60]] += event.time_range.elapsed_us() / 1e3
    tell(f"  {way} {shape.name} by kind:", {kind: round(ms, 1) for kind, ms in kinds.items()})
    for name, ms in sorted(others.items(), key=lambda item: -item[1])[:7]:
        tell(f"    {ms:7.2f} {name}")


def speed_of(transformer: Any, shapes: Sequence[ForwardShape], device: str) -> list[float]:
    """Milliseconds of each shape in a graph."""
    found = []
    for shape in shapes:
        inputs, texts = inputs_of(shape, torch.device(device))
        run = forward_of(transformer, inputs, texts, "one")
        for _ in range(2):
            result = run(None)
        assert all(torch.isfinite(each).all() for each in result)
        if device == "cpu":
            found.append(1e3 * host_s(functools.partial(run, None)))
            continue
        replay = captured(run, None)
        found.append(
            statistics.median([timed_ms(replay, None) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:])
        )
        del replay
        torch.cuda.empty_cache()
    return found


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def measure_torchao(model: str, shapes: Sequence[ForwardShape]) -> None:
    """diffusers' transformer with torchao's dynamic float8, a scale per row, compiled."""
    torchao: Any = importlib.import_module("torchao.quantization")
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    transformer = made(model, "cuda")
    config = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
    names = ("attn", "attn1", "attn2", "ffn", "img_mlp", "txt_mlp")
    for block in blocks_of(transformer):
        for name, part in block.named_children():
            if name in names:
                torchao.quantize_(part, config)
    free_memory("cuda")
    there = torch.cuda.memory_allocated()
    transformer.compile_repeated_blocks(dynamic=False)
    for shape in shapes:
        inputs, texts = inputs_of(shape, torch.device("cuda"))
        began_s = time.perf_counter()

        def run(given: Any = inputs, text: Tensor = texts[0]) -> Tensor:
            result: Tensor = transformer(**given, encoder_hidden_states=text)[0]
            return result

        assert torch.isfinite(run()).all()
        torch.cuda.synchronize()
        first_s = time.perf_counter() - began_s
        times = [timed_ms(lambda _: [run()], None) for _ in range(WARM_UPS + REPEATS)]
        ms = statistics.median(times[WARM_UPS:])
        tell(f"ms torchao compiled: {shape.name} {ms:.1f} (first {first_s:.0f} s), {there / 1e9:.2f} GB")


# Errors -----------------------------------------------------------------------------------------


def distance(result: Tensor, wanted: Tensor) -> float:
    """Of two tensors, over the norm of the second."""
    wanted = wanted.double()
    return float((result.double() - wanted).norm() / wanted.norm())


def plant_outliers(transformer: Any) -> None:
    """A few channels of norms and of the feed-forward's middle are large, and blocks add much, as in trained
    models."""
    for block in blocks_of(transformer):
        channels = [each % (block.attn1.to_q if hasattr(block, "attn1") else block.attn.to_q).in_features
                    for each in OUTLIER_CHANNELS]  # fmt: skip
        if hasattr(block, "attn1"):
            for row in (0, 3):
                block.scale_shift_table.data[:, row, channels] = OUTLIER
            block.scale_shift_table.data[:, [2, 5]] += 1
            block.norm2.bias.data[channels] = OUTLIER
            feed_forwards = [block.ffn]
        else:
            for each in (block.img_mod[1], block.txt_mod[1]):
                rows_6C = each.bias.data.view(6, -1)
                rows_6C[[2, 5]] += 1
                for row in (0, 3):
                    rows_6C[row, channels] = OUTLIER
            feed_forwards = [block.img_mlp, block.txt_mlp]
        for each in feed_forwards:
            each.net[0].proj.bias.data[channels] = OUTLIER


def outputs_of(transformer: Any, shape: ForwardShape, device: str, dtype: torch.dtype) -> list[Tensor]:
    """What each block adds to the picture, on the host, and the prediction."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        picture = output[1] if isinstance(output, tuple) else output
        given = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        found.append((picture.float() - given.float()).cpu())

    handles = [block.register_forward_hook(keep, with_kwargs=True) for block in blocks_of(transformer)]
    inputs, texts = inputs_of(shape, torch.device(device))
    inputs = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    run = forward_of(transformer, inputs, [each.to(dtype) for each in texts], "one")
    found.append(run(None)[0].to("cpu", torch.float32))
    for handle in handles:
        handle.remove()
    return found


def measure_error(model: str, device: str, *, is_small: bool, has_outliers: bool) -> None:
    """bf16 and fp8, whole and with parts left in bf16, against fp32 of diffusers with the same weights."""
    torch.backends.cuda.matmul.allow_tf32 = False
    layers, shape = (2, ForwardShape(model, 64, 64, 5 if model == WAN else 1)) if is_small else (
        ERROR_LAYERS[model], ERROR[model])  # fmt: skip

    def fresh() -> Any:
        transformer = made(model, device, layers=layers)
        if has_outliers:
            plant_outliers(transformer)
        return transformer

    exact = fresh().float()
    wanted = outputs_of(exact, shape, device, torch.float32)
    del exact
    for way in ("bf16", "fp8", "fp8 but first and last block", "fp8 but feed-forwards"):
        free_memory(device)
        transformer = fused(fresh())
        blocks = list(blocks_of(transformer))
        if way == "fp8 but first and last block":
            blocks = blocks[1:-1]
        for block in blocks if way != "bf16" else ():
            for name, part in list(block.named_children()):
                if way == "fp8 but feed-forwards" and name in ("ffn", "img_mlp", "txt_mlp"):
                    continue
                quantise(part)
        result = outputs_of(transformer, shape, device, torch.bfloat16)
        errors = [distance(one, other) for one, other in zip(result, wanted, strict=True)]
        shown = errors[: len(blocks) : max(1, len(errors) // 6)]
        tell(
            f"error {model} {'outliers ' if has_outliers else ''}{way}: end {errors[-1]:.2e}, "
            f"blocks {' '.join(f'{each:.1e}' for each in shown)}, last {errors[-2]:.1e}"
        )
        del transformer


# Quality ----------------------------------------------------------------------------------------


def measure_quality(count: int, device: str, ways: Sequence[str]) -> None:
    """The measures of the trained model's card for held-out prompts, in fp32, bf16 and fp8."""
    from training.evaluation import evaluate, questions
    from training.parts import load
    from training.sampling import Recipe
    from training.supply import Supply

    asked = questions(count)
    with Supply(num_processes=8 if device == "cuda" else 0) as supply:
        for way in ways:
            parts = load(Path("gfgen/models/weights/shapes"), device=device)
            if way != "fp32":
                transformer = parts.transformer.bfloat16()
                install(transformer)
                fp8_on = torch.device(device) if way.startswith("fp8") else None
                fuse(transformer, fp8_on=fp8_on, attends_in_fp8=way == "fp8-attention")
                transformer.forward = functools.partial(_in_bf16, transformer.forward)
            began_s = time.perf_counter()
            figures = evaluate(parts, asked, Recipe(), each=supply.each)
            tell(f"quality {way}: {figures.right} of {figures.counts}, {time.perf_counter() - began_s:.0f} s")


def _in_bf16(
    forward: Callable[..., Any],
    *,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    **_: Any,
) -> tuple[Tensor]:
    """All tokens of a batch have one timestep, which fused blocks take once."""
    given = (hidden_states.bfloat16(), timestep[:1, 0], encoder_hidden_states.bfloat16())
    return (forward(*given, return_dict=False)[0].float(),)


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = ("times", "speed", "torchao", "error", "outliers", "quality")
    parser.add_argument("--part", action="append", choices=parts)
    parser.add_argument("--model", action="append", choices=(WAN, QWEN))
    parser.add_argument("--shapes", type=int, default=3, help="Of each model, for torchao.")
    parser.add_argument("--by-kernel", action="store_true", help="Speed: also by kind of kernel.")
    parser.add_argument("--way", action="append", help="Of quality. [fp32, bf16, fp8, fp8-attention]")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    device = "cpu" if arguments.small else "cuda"
    models = arguments.model or (WAN, QWEN)
    with torch.no_grad():
        for part in arguments.part or parts:
            if part == "times" and device == "cuda":
                time_kernels()
            elif part == "speed":
                for model in models:
                    measure_speed(model, device, is_small=arguments.small, has_kernels=arguments.by_kernel)
                    free_memory(device)
            elif part == "quality":
                ways = arguments.way or ("fp32", "bf16", "fp8", "fp8-attention")
                measure_quality(4 if arguments.small else 500, device, ways)
            elif part == "torchao" and device == "cuda":
                for model in models:
                    measure_torchao(model, SPEED[model][: arguments.shapes])
                    free_memory(device)
            elif part in ("error", "outliers"):
                for model in models:
                    measure_error(model, device, is_small=arguments.small, has_outliers=part == "outliers")


if __name__ == "__main__":
    main()
