"""What `gfgen bench gfc` runs on each rank: timings of our collectives, to choose kernels by.

Times are microseconds per call, medians on the rank's device; the parent takes the slowest rank.
`graph`: calls captured in one CUDA graph. `in arena`: the result stays where peers wrote it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gfgen.gfc.cuda.captured import Captured
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.device_group import CudaGroup
from gfgen.gfc.cuda.selector import KernelChoice, Rule, Selector
from gfgen.gfc.descriptor import Descriptor
from gfgen.layout import Layout

Times = dict[str, float]
MIB = 1 << 20
_HEAD_START_CYCLES = 400_000
"""0.2 ms: the largest delay of a process when it launches a graph."""
PATTERNS = ("all_to_all", "all_gather")


def device_name(endpoint: CudaEndpoint) -> str:
    return endpoint.driver.name(endpoint.device)


def entered(endpoint: CudaEndpoint, ranks: tuple[int, ...], dispatch: int) -> CudaGroup:
    group = endpoint.group(Descriptor(dispatch, Layout(ranks, ulysses=len(ranks)), (1,) * len(ranks)))
    group.enter()
    return group


def tune_cell(
    endpoint: CudaEndpoint,
    ranks: tuple[int, ...],
    dispatch: int,
    pair_bytes: int,
    choices: Sequence[KernelChoice],
) -> list[list[float]]:
    """For each choice, graph times at this message size: all-to-all and all-gather, in the arena; fresh."""
    group = entered(endpoint, ranks, dispatch)
    usual = endpoint.selector
    inputs = [random_bytes(endpoint, pair_bytes * factor) for factor in (len(ranks), 1)]
    copies = 10 if pair_bytes <= MIB else 4
    found = []
    for choice in choices:
        everywhere = (Rule(1 << 62, choice),)
        endpoint.selector = Selector(
            {(len(ranks), in_arena): everywhere for in_arena in (True, False)}, usual.has_bulk
        )
        endpoint.prepared.clear()
        calls = [collectives(pattern, x) for pattern, x in zip(PATTERNS, inputs, strict=True)]
        order = [calls[0][0], calls[1][0], calls[0][1], calls[1][1]]
        found.append([graph_us(group, call, copies, 5) for call in order])
    endpoint.selector = usual
    endpoint.prepared.clear()
    group.finish()
    return found


GroupCall = Callable[[CudaGroup], Any]


def collectives(pattern: str, x: Tensor) -> tuple[GroupCall, GroupCall]:
    """The pattern in the arena, and with a fresh result."""
    if pattern == "all_to_all":
        return lambda group: group.all_to_all(x, in_arena=True), lambda group: group.all_to_all(x)
    return lambda group: group.all_gather(x, in_arena=True), lambda group: group.all_gather(x)


def random_bytes(endpoint: CudaEndpoint, num_bytes: int) -> Tensor:
    x = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=f"cuda:{endpoint.device}")
    return x.view(torch.int16).random_(-30000, 30000).view(torch.bfloat16).nan_to_num_()


def graph_us(group: CudaGroup, call: GroupCall, copies: int, repeats: int) -> float:
    call(group)
    call(group)
    captured = Captured(group, call, copies=copies)

    def align() -> None:
        start_late(group)
        captured.match_banks(group)

    return event_us(lambda: captured.replay(group), align, warmups=2, repeats=repeats) / copies


def start_late(group: CudaGroup) -> None:
    """Lets all ranks begin together, late enough that the graph's launch is queued by then."""
    torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    group.barrier()


def event_us(run: Callable[[], object], align: Callable[[], object], *, warmups: int, repeats: int) -> float:
    """The device's time from the first of its work to the last, median of several runs.

    `align` is enqueued first and ends with a barrier, so that no rank's clock runs while it waits for
    processes that are a few dozen microseconds late. If it does nothing, the time includes the first launch.
    """
    for _ in range(warmups):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        align()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))
