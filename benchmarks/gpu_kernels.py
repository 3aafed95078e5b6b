"""Where the time of a forward goes, by kernels, on 1 and 2 GPUs.

    python -m benchmarks.gpu_kernels [--gpus 1,2] [--shape wan-1280x704x81 ...] [--json FILE]

One forward of benchmarks/forward.py ("ours") under torch's profiler, then fourteen in a CUDA graph. Random
weights; about 25 s a shape.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import measure_forward
from benchmarks.forward import SHAPES
from benchmarks.measure_forward import NUM_DISPATCHES, ForwardKind, ForwardShape
from benchmarks.measured import head, row
from gfgen.bench.gfc import check_num_gpus
from gfgen.errors import GfgenError
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.layout import Layout
from gfgen.runtime.ipc.settings import GPU_PLAN

KINDS = {
    "attention": re.compile("sdpa|flash|fmha"),
    "products": re.compile("nvjet|gemm|cutlass"),
    "rows": re.compile("^_add_norm|^_heads"),
    "exchanges": re.compile("^gfc_"),
}
WARM_UPS, REPEATS = 3, 14


@torch.no_grad()
def measure(endpoint: CudaEndpoint, shape: ForwardShape, layout: Layout, first: int) -> dict[str, Any]:
    """A rank's kernels (name, begin and end in microseconds), and milliseconds in a graph."""
    run, groups = measure_forward.prepare(endpoint, shape, ForwardKind(is_ours=True), layout, first)
    assert groups is not None
    for _ in range(WARM_UPS):
        run(groups())
        torch.cuda.synchronize()
    group = groups()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run(group)
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    captured = measure_forward.captured(run, groups())
    times_ms = [measure_forward.timed_ms(captured, groups) for _ in range(REPEATS)]
    return {"spans_us": spans, "times_ms": times_ms}


def table_row(name: str, ranks: Sequence[dict[str, Any]]) -> str:
    """Of the first rank; milliseconds."""
    found = dict.fromkeys([*KINDS, "other"], 0.0)
    spans = sorted(ranks[0]["spans_us"], key=lambda span: span[1])
    busy_us, end_us = 0.0, spans[0][1]
    for kernel, start, stop in spans:
        kind = next((kind for kind, names in KINDS.items() if names.search(kernel)), "other")
        found[kind] += (stop - start) / 1e3
        busy_us += max(0.0, stop - max(start, end_us))
        end_us = max(end_us, stop)
    whole_us = end_us - spans[0][1]
    graph_ms = max(statistics.median(rank["times_ms"]) for rank in ranks)
    numbers = [*found.values(), busy_us / 1e3, whole_us / 1e3, graph_ms]
    return row(name, *(f"{number:.1f}" for number in numbers))


def main() -> None:
    """Print a row for each shape and number of GPUs."""
    shapes = {shape.name: shape for shape in SHAPES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", default="1,2")
    parser.add_argument("--shape", action="append", choices=shapes, metavar="NAME")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    degrees = [int(number) for number in arguments.gpus.split(",")]
    try:
        check_num_gpus(max(degrees))
    except GfgenError as error:
        raise SystemExit(str(error)) from None
    print(head("ms", *KINDS, "other", "busy", "whole", "in a graph"), flush=True)
    for degree in degrees:
        layout = Layout(tuple(range(degree)), ulysses=degree)
        ranks = CudaRanks(degree, GPU_PLAN)
        try:
            for shape in map(shapes.__getitem__, arguments.shape or ["wan-1280x704x81"]):
                first = ranks.next_dispatch(NUM_DISPATCHES)
                found = ranks.run(layout.ranks, measure, shape, layout, first)
                results[f"{shape.name}/{degree}"] = found
                print(table_row(f"{shape.name}/{degree}", found), flush=True)
        finally:
            ranks.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
