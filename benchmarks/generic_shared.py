"""Forwards of Flux.1 and CogVideoX-5B shared by several GPUs, gfgen's and diffusers' own.

    python -m benchmarks.generic_shared [--gpus 2] [--only flux cogvideox] [--ways "gfgen compiled"]

Full-size transformers with random weights, bf16, eager and with compiled blocks; milliseconds are the
slowest rank's median. diffusers shares tokens by its context parallelism (Ulysses over NCCL), for which
CogVideoX has no plan. gfgen shares tokens, or gives each half of the ranks one branch of CogVideoX's
guidance. "recorded" is a CUDA graph of the fused blocks of Flux.1.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from diffusers import ContextParallelConfig

from benchmarks import generic
from benchmarks.measure_forward import NUM_DISPATCHES, REPEATS, WARM_UPS, groups_of, timed_ms
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.device_group import CudaGroup
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.layout import Layout
from gfgen.models.fast import compiled, recording
from gfgen.models.fast.evaluation import evaluate_call
from gfgen.models.fast.kernels import KernelChoice, using
from gfgen.models.fast.recording import Graphs
from gfgen.models.loading.stock_pipeline import join_group
from gfgen.models.parallel.branches import evaluate_itself, shared_step, watch
from gfgen.models.parallel.parallel import Parallel, parallel_from, rehearsal
from gfgen.runtime.ipc.arenas import GPU_PLAN
from gfgen.runtime.worker.forwards import CudaRecorder

TOKENS = ("diffusers", "diffusers compiled", "gfgen", "gfgen compiled")
RECORDED = "gfgen recorded"
HALVES = ("gfgen halves", "gfgen halves compiled")
WAYS: Mapping[str, tuple[str, ...]] = {"flux": (*TOKENS, RECORDED), "cogvideox": (*TOKENS, *HALVES)}
ALL_WAYS = (*TOKENS, RECORDED, *HALVES)


@torch.no_grad()
def measure(endpoint: CudaEndpoint, name: str, way: str, layout: Layout, dispatch: int, store: str) -> Any:
    """Milliseconds on this rank, and the distance from one rank's eager forward; or why there are none."""
    try:
        return _measure(endpoint, name, way, layout, dispatch, store)
    except Exception as error:  # what diffusers refuses is a result, too
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    finally:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _measure(
    endpoint: CudaEndpoint, name: str, way: str, layout: Layout, dispatch: int, store: str
) -> tuple[float, float]:
    torch.cuda.set_device(endpoint.device)
    torch._dynamo.config.recompile_limit = compiled.RECOMPILE_LIMIT
    case, shapes = generic.CASES[name], generic.Shapes(endpoint.torch_device, is_tiny=False)
    inputs = case.inputs(case, shapes)
    torch.manual_seed(0)  # alike on all ranks
    model = generic._made(case, shapes)
    wanted = model(**inputs, return_dict=False)[0]
    choice: KernelChoice = "compiled" if way.endswith("compiled") else "fused"
    if way.startswith("gfgen"):
        generic._prepare(model)
        watch(model)
    else:
        if layout.degree > 1:
            device = str(endpoint.torch_device)
            if not torch.distributed.is_initialized():
                join_group(rank=endpoint.rank, num_ranks=layout.degree, store=store, device=device)
            model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=layout.degree))
        if choice == "compiled":
            for block in compiled.repeated_blocks(model):
                block.compile(dynamic=False)
    groups = groups_of(endpoint, layout, dispatch) if way.startswith("gfgen") else None

    graphs = Graphs(CudaRecorder(endpoint.torch_device), endpoint.torch_device)
    evaluate = functools.partial(evaluate_call, by=graphs) if way == RECORDED else evaluate_itself

    def step(parallel: Parallel | None) -> Any:
        with using(choice):
            return shared_step(lambda: model(**inputs, return_dict=False)[0], parallel, evaluate)

    def run(group: CudaGroup | None) -> Any:
        return step(None if group is None else parallel_from(group))

    if way == RECORDED:
        unentered = parallel_from(endpoint.unentered(layout)) if layout.degree > 1 else None
        torch.cuda.set_stream(torch.cuda.Stream(endpoint.torch_device))  # type: ignore[no-untyped-call]
        with patch.object(recording, "WORTH_RECORDING", 0.0), graphs.rehearsing(unentered):
            step(None if unentered is None else rehearsal(unentered))
        assert len(graphs._records) == 1
    generic.poison(endpoint.torch_device)
    distance = generic.distance_of(run(groups() if groups else None), wanted)
    times_ms = [timed_ms(run, groups) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:]
    return statistics.median(times_ms), distance


def layout_of(degree: int, way: str) -> Layout:
    cfg = 2 if "halves" in way else 1
    return Layout(tuple(range(degree)), cfg=cfg, ulysses=degree // cfg)


def measure_all(names: list[str], degrees: list[int], ways: list[str], tell: Callable[[str], None]) -> None:
    for degree in degrees:
        ranks = CudaRanks(degree, GPU_PLAN)
        try:
            with tempfile.TemporaryDirectory() as folder:
                for name in names:
                    for way in WAYS[name]:
                        if way in ways and ("halves" not in way or degree % 2 == 0):
                            tell(_row(ranks, name, way, degree, f"{folder}/store"))
        finally:
            ranks.close()


def _row(ranks: CudaRanks, name: str, way: str, degree: int, store: str) -> str:
    layout, number = layout_of(degree, way), ranks.next_dispatch(NUM_DISPATCHES)
    began_s = time.monotonic()
    found = ranks.run(layout.ranks, measure, name, way, layout, number, store)
    errors = [each for each in found if isinstance(each, str)]
    took = f"took {time.monotonic() - began_s:.0f} s"
    if errors:
        return f"| {generic.CASES[name].what} | {degree} | {way} | - | {errors[0]}; {took} |"
    ms, distance = (max(each[idx] for each in found) for idx in (0, 1))
    return f"| {generic.CASES[name].what} | {degree} | {way} | {ms:.1f} | {distance:.1e}; {took} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--ways", nargs="+", choices=ALL_WAYS, default=ALL_WAYS)
    asked = parser.parse_args()
    print(
        "| transformer | GPUs | way | ms | difference from one rank, eager |\n|---|---|---|---|---|",
        flush=True,
    )
    measure_all(list(asked.only), asked.gpus, list(asked.ways), lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
