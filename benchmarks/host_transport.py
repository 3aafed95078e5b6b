"""Exchanges through main memory beside peer memory, on two GPUs of one machine: checks, then times.

    python -m benchmarks.host_transport                 # two GPUs, about four minutes
    python -m benchmarks.host_transport --rehearse      # the checks alone, on CPU ranks

This process touches no GPU; the ranks do (benchmarks/measure_host.py).
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks import measure_host
from benchmarks.measure_forward import ForwardKind, ForwardShape
from gfgen.errors import WorkerError
from gfgen.gfc.arena import CONTROL_PLAN, ArenaPlan, create_arena
from gfgen.gfc.cuda.device_arena import arena_bytes
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.gfc.endpoint import Endpoint
from gfgen.layout import Layout
from gfgen.runtime.ipc.arenas import GPU_PLAN, HOST_PLAN

KIB, MIB = 1 << 10, 1 << 20
EXACT = ((1, 2, 8), (3, 5, 3), (33, 24, 64), (5070, 24, 128), (18480, 24, 128), (96000, 24, 128))
"""Tokens, heads, head dimension; the last needs several rounds."""
SIZES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
SWEEP = [(blocks, slice_bytes) for blocks in (8, 16, 32, 64) for slice_bytes in (64 * KIB, 256 * KIB, MIB)]
TOKENS = (5070, 18480, 96000)
TRANSPORTS = ("peer", "host")
TORUS = Layout((0, 1), torus=2)
WAYS = {
    "torus": (TORUS, None),
    "ulysses": (Layout((0, 1), ulysses=2), None),
    "ring": (Layout((0, 1), ring=2), None),
}
IN_CHUNKS = {f"torus, {number} chunks of heads": (TORUS, number) for number in (2, 3)}
SHAPES = (
    ForwardShape("wan2.2-ti2v-5b", 832, 480, 49),
    ForwardShape("qwen-image", 1536, 1536, 1),
)
KIND = ForwardKind(is_ours=True, in_graph=True)

Run = Callable[..., list[Any]]
"""A program on both ranks."""


def on_gpus() -> tuple[CudaRanks, Run]:
    """Two ranks with an endpoint for each transport."""
    ranks = CudaRanks(2, GPU_PLAN)
    size = arena_bytes(HOST_PLAN)
    arenas = {rank: create_arena(HOST_PLAN, rank=rank, incarnation=1, num_bytes=size) for rank in (0, 1)}
    pages = {rank: create_arena(CONTROL_PLAN, rank=rank, incarnation=1) for rank in (0, 1)}
    for rank in (0, 1):
        ranks.submit(rank, measure_host.add_host, HOST_PLAN, os.getpid(), arenas, pages[rank])
    for rank in (0, 1):
        ranks.result(rank)
    return ranks, lambda program, *arguments: ranks.run((0, 1), program, *arguments)


def on_cpus() -> Run:
    """Two CPU ranks for each program: both transports are arenas in main memory."""
    context = multiprocessing.get_context("fork")
    plan = ArenaPlan(data_bytes=4 * MIB)

    def run(program: Callable[..., Any], *arguments: Any) -> list[Any]:
        arenas = {
            transport: {rank: create_arena(plan, rank=rank, incarnation=1) for rank in (0, 1)}
            for transport in TRANSPORTS
        }

        def serve(rank: int, pipe: Any) -> None:
            incarnations = {0: 1, 1: 1}
            for transport, fds in arenas.items():
                endpoint = Endpoint(plan, rank=rank, fds=fds, incarnations=incarnations)
                measure_host._ENDPOINTS[transport] = endpoint
            pipe.send(program(endpoint, *arguments))

        pipes = [context.Pipe() for _ in range(2)]
        processes = [context.Process(target=serve, args=(rank, pipe[1])) for rank, pipe in enumerate(pipes)]
        for process in processes:
            process.start()
        for fd in [fd for fds in arenas.values() for fd in fds.values()]:
            os.close(fd)
        found = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
        return found

    return run


def checks(run: Run, numbers: Iterator[int], *, sizes: Any, tokens: int, count: int) -> Iterator[str]:
    """Lines about what was checked. Raises: SystemExit if anything is wrong."""
    wrong = [each for found in run(measure_host.wrong_bytes, next(numbers), sizes) for each in found]
    yield f"exact bytes, random and poisoned, {len(sizes)} shapes on both transports: {wrong or 'right'}"
    mixed = run(measure_host.mixed_sequences, next(numbers), count, 5)
    yield f"{count} random dispatches over both transports: {sum(mixed)} wrong items"
    bits = run(measure_host.attention_bits, next(numbers), tokens, 24)
    yield f"attention of {tokens} tokens on two ranks: {bits[0]}"
    same = all(value for each in bits for name, value in each.items() if name.endswith("bits"))
    if wrong or sum(mixed) or not same:
        yield "WRONG: the times below mean nothing"


def times(
    run: Run, numbers: Iterator[int], kept: dict[str, Any], is_late: Callable[[], bool]
) -> Iterator[str]:
    """Tables, as they are measured; their values go into `kept`."""
    yield "\n| bytes each way | peer us | GB/s | host us | GB/s |\n|---|---|---|---|---|"
    for size in SIZES:
        row = [max(run(measure_host.exchange_us, transport, next(numbers), size)) for transport in TRANSPORTS]
        kept[f"exchange {size}"] = row
        yield f"| {size:,} | " + " | ".join(f"{us:.1f} | {size / us / 1e3:.1f}" for us in row) + " |"
    yield "\n| host, 16 MiB each way: blocks | slice | us | GB/s |\n|---|---|---|---|"
    for blocks, slice_bytes in SWEEP:
        us = max(run(measure_host.exchange_us, "host", next(numbers), 16 * MIB, blocks, slice_bytes))
        kept[f"sweep {blocks} {slice_bytes}"] = us
        yield f"| {blocks} | {slice_bytes // KIB} KiB | {us:.1f} | {16 * MIB / us / 1e3:.1f} |"
    header = "\n| attention, 24 heads of 128, us | one GPU | way | peer | host |"
    yield f"{header}\n|---|---|---|---|---|"
    for tokens in TOKENS:
        alone = max(run(measure_host.attention_us, "host", None, next(numbers), tokens, 24, 128))
        kept[f"attention {tokens} alone"] = alone
        half = max(run(measure_host.attention_us, "host", None, next(numbers), tokens, 12, 128))
        parts = max(run(measure_host.attention_us, "host", TORUS, next(numbers), tokens, 24, 128, None, True))
        kept[f"attention {tokens} half of the heads, and in parts"] = [half, parts]
        yield f"| {tokens:,} | {alone:.0f} | 12 heads on one GPU | {half:.0f} | |"
        yield f"| {tokens:,} | {alone:.0f} | torus without its exchanges | {parts:.0f} | |"
        for way, (layout, chunks) in (WAYS | IN_CHUNKS).items():
            row = [
                max(run(measure_host.attention_us, each, layout, next(numbers), tokens, 24, 128, chunks))
                for each in TRANSPORTS
            ]
            kept[f"attention {tokens} {way}"] = row
            yield f"| {tokens:,} | {alone:.0f} | {way} | {row[0]:.0f} | {row[1]:.0f} |"
    header = "\n| forward, one branch, in a graph, ms | one GPU | way | peer | host | host gains |"
    yield f"{header}\n|---|---|---|---|---|---|"
    for shape in SHAPES:
        alone = _forward_ms(run, "host", shape, None, next(numbers))
        kept[f"forward {shape.name} alone"] = alone
        for way, (layout, _) in WAYS.items():
            if is_late():
                yield f"no time is left for {shape.name}, {way}"
                continue
            row = [_forward_ms(run, transport, shape, layout, next(numbers)) for transport in TRANSPORTS]
            kept[f"forward {shape.name} {way}"] = row
            peer, host = row
            yield f"| {shape.name} | {alone:.1f} | {way} | {peer:.1f} | {host:.1f} | {alone / host:.2f}x |"


def _forward_ms(run: Run, transport: str, shape: ForwardShape, layout: Layout | None, number: int) -> float:
    """The slower rank's median."""
    found = run(measure_host.forward, transport, shape, KIND, layout, number)
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        raise WorkerError(f"{shape.name} over {transport} on {layout}: {errors[0]}")
    return float(max(statistics.median(each["times_ms"]) for each in found))


@click.command(help=__doc__)
@click.option("--rehearse", is_flag=True, help="The checks alone, on CPU ranks.")
@click.option("--seconds", type=float, default=280.0, help="Begin no forward after so many.")
@click.option("--output", type=click.Path(path_type=Path), help="Write values as JSON there.")
def main(rehearse: bool, seconds: float, output: Path | None) -> None:
    began_s = time.monotonic()
    numbers = itertools.count(1, 100_000)
    if rehearse:
        for line in checks(on_cpus(), numbers, sizes=EXACT[:3], tokens=203, count=300):
            click.echo(line)
        return
    ranks, run = on_gpus()
    kept: dict[str, Any] = {}
    try:
        for line in checks(run, numbers, sizes=EXACT, tokens=5070, count=10_000):
            click.echo(line)
        for line in times(run, numbers, kept, lambda: time.monotonic() - began_s > seconds):
            click.echo(line)
    finally:
        ranks.close()
        if output is not None:
            output.write_text(json.dumps(kept, indent=1) + "\n")
    click.echo(f"\n{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
