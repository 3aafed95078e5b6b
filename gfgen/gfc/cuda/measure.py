"""What `gfgen bench gfc` runs on each rank: timings of our collectives and of NCCL's.

Times are microseconds per call, medians on the rank's device; the parent takes the slowest rank.
`graph`: calls captured in one CUDA graph. `in arena`: the result stays where peers wrote it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gfgen.gfc.cuda.captured import Captured, CapturedAlone
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.device_group import CudaGroup
from gfgen.gfc.cuda.selector import KernelChoice, Rule, Selector
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Layout

Times = dict[str, float]
MIB = 1 << 20
_HEAD_START_CYCLES = 400_000
"""0.2 ms: the largest delay of a process when it launches a graph."""
PATTERNS = ("all_to_all", "all_gather")


def versions(endpoint: CudaEndpoint) -> dict[str, str]:
    nccl, cuda = torch.cuda.nccl.version(), endpoint.driver.version  # type: ignore[no-untyped-call]
    found = {"torch": torch.__version__, "nccl": ".".join(map(str, nccl))}
    return found | {"driver_cuda": ".".join(map(str, cuda))}


def init_nccl(endpoint: CudaEndpoint, num_ranks: int, store: str) -> None:
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=endpoint.rank, world_size=num_ranks)


def new_nccl_group(endpoint: CudaEndpoint, ranks: tuple[int, ...]) -> Times:
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    group = dist.new_group(list(ranks))
    made = time.perf_counter()
    _groups()[ranks] = group
    if endpoint.rank not in ranks:
        return {}
    x = torch.zeros(1024, device=f"cuda:{endpoint.device}")
    dist.all_to_all_single(torch.empty_like(x[: len(ranks) * 2]), x[: len(ranks) * 2], group=group)
    torch.cuda.synchronize()
    return {
        "new_group_ms": (made - began) * 1e3,
        "first_collective_ms": (time.perf_counter() - made) * 1e3,
        "memory_mb": (free_before - torch.cuda.mem_get_info()[0]) / 1e6,
    }


@cache
def _groups() -> dict[tuple[int, ...], Any]:
    return {}


def group_cost(endpoint: CudaEndpoint, dispatches: Sequence[tuple[tuple[int, ...], int]]) -> Times:
    """The cost of a new group of ours: the host's time until it is made, until its entry barrier is
    enqueued, and until all ranks have entered."""
    free_before = torch.cuda.mem_get_info()[0]
    made, host, whole = [], [], []
    for ranks, dispatch in dispatches:
        if endpoint.rank not in ranks:
            continue
        layout = Layout(ranks, ulysses=len(ranks))
        torch.cuda.synchronize()
        began = time.perf_counter()
        group = endpoint.group(Descriptor(dispatch, layout, (1,) * len(ranks)))
        made.append(time.perf_counter() - began)
        group.enter()
        host.append(time.perf_counter() - began)
        group.finish()
        whole.append(time.perf_counter() - began)
    if not host:
        return {}
    return {
        "made_us": statistics.median(made) * 1e6,
        "host_us": statistics.median(host) * 1e6,
        "entered_us": statistics.median(whole) * 1e6,
        "memory_mb": (free_before - torch.cuda.mem_get_info()[0]) / 1e6,
    }


def copy_engine(endpoint: CudaEndpoint, peer: int, num_bytes: int) -> float:
    x = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{endpoint.device}")
    target = endpoint.arenas[peer].address + endpoint.plan.arena_bytes // 2

    def copy() -> None:
        endpoint.driver.call("cuMemcpyDtoDAsync_v2", target, x.data_ptr(), num_bytes, endpoint.stream())

    return num_bytes / (_event_us(copy, lambda: None, warmups=2, repeats=7) * 1e-6) / 1e9


def entered(endpoint: CudaEndpoint, ranks: tuple[int, ...], dispatch: int) -> CudaGroup:
    group = endpoint.group(Descriptor(dispatch, Layout(ranks, ulysses=len(ranks)), (1,) * len(ranks)))
    group.enter()
    return group


def cell(
    endpoint: CudaEndpoint, ranks: tuple[int, ...], dispatch: int, pattern: str, num_bytes: int
) -> Times:
    """One pattern at one size, all variants. `num_bytes` is each rank's whole input."""
    group = entered(endpoint, ranks, dispatch)
    unit = 16 * len(ranks) if pattern == "all_to_all" else 16
    x = _random_bytes(endpoint, num_bytes // unit * unit)
    out = torch.empty(
        x.numel() * (len(ranks) if pattern == "all_gather" else 1), dtype=x.dtype, device=x.device
    )
    nccl = _groups()[ranks]
    in_arena, fresh, theirs = _calls(pattern, x, out, nccl)
    copies, repeats = (20, 15) if num_bytes <= 4 * MIB else (5, 7)
    late = partial(_start_late, group)
    times = {
        "nccl_eager": eager_us(group, lambda: theirs(group), copies, repeats),
        "nccl_graph": captured_us(lambda: theirs(group), late, copies=copies, repeats=repeats),
        "ours_eager": eager_us(group, lambda: fresh(group), copies, repeats),
        "ours_graph": graph_us(group, fresh, copies, repeats),
        "ours_arena_eager": eager_us(group, lambda: in_arena(group), copies, repeats),
        "ours_arena_graph": graph_us(group, in_arena, copies, repeats),
        "ours_host": _host_us(lambda: fresh(group)),
        "nccl_host": _host_us(lambda: theirs(group)),
    }
    theirs(group)
    times["is_equal"] = float(torch.equal(fresh(group), out) and torch.equal(in_arena(group), out))
    group.finish()
    return times


def link_us(endpoint: CudaEndpoint, ranks: tuple[int, ...], dispatch: int, num_bytes: int) -> Times:
    """Each rank sends so many bytes to every other one at once."""
    group = entered(endpoint, ranks, dispatch)
    x = _random_bytes(endpoint, num_bytes)
    copies, repeats = (10, 9) if num_bytes <= MIB else (2, 5)
    times = {"us": graph_us(group, lambda group: group.all_gather(x), copies, repeats)}
    group.finish()
    return times


def barrier_cell(endpoint: CudaEndpoint, ranks: tuple[int, ...], dispatch: int) -> Times:
    group = entered(endpoint, ranks, dispatch)
    times = {"ours_graph": graph_us(group, lambda group: group.barrier(), 20, 15)}
    group.finish()
    return times


def fused_cell(
    endpoint: CudaEndpoint,
    ranks: tuple[int, ...],
    dispatch: int,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
) -> Times:
    """Attention's exchanges there and back, ours fused, NCCL's with the permutes of diffusers."""
    size = len(ranks)
    group = entered(endpoint, ranks, dispatch)
    tokens, heads = shard_sizes(num_tokens, size), shard_sizes(num_heads, size)
    length = tokens[group.slot]
    device = f"cuda:{endpoint.device}"
    q, k, v = (torch.randn((1, length, num_heads, head_dim), device=device).bfloat16() for _ in range(3))
    attended = torch.randn((1, num_tokens, heads[group.slot], head_dim), device=device).bfloat16()
    nccl = _groups()[ranks]

    def there(group: CudaGroup) -> tuple[Tensor, ...]:
        return group.heads_from_tokens(q, k, v, token_sizes=tokens, head_sizes=heads, in_arena=True)

    def back(group: CudaGroup) -> Tensor:
        return group.tokens_from_heads(attended, token_sizes=tokens, head_sizes=heads)

    def ours(group: CudaGroup) -> None:
        there(group)
        back(group)

    def theirs() -> tuple[list[Tensor], Tensor]:
        return [_there(x, size, nccl) for x in (q, k, v)], _back(attended, size, nccl)

    times = {
        "ours_graph": graph_us(group, ours, 10, 15),
        "ours_there_graph": graph_us(group, there, 10, 15),
        "ours_eager": eager_us(group, lambda: ours(group), 10, 15),
        "nccl_graph": captured_us(theirs, lambda: _start_late(group), copies=10, repeats=15),
        "nccl_eager": eager_us(group, lambda: theirs(), 10, 15),
    }
    expected, expected_back = theirs()
    is_equal = all(torch.equal(a, b) for a, b in zip(there(group), expected, strict=True))
    times["is_equal"] = float(is_equal and torch.equal(back(group), expected_back))
    group.finish()
    return times


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
    inputs = [_random_bytes(endpoint, pair_bytes * factor) for factor in (len(ranks), 1)]
    copies = 10 if pair_bytes <= MIB else 4
    found = []
    for choice in choices:
        everywhere = (Rule(1 << 62, choice),)
        endpoint.selector = Selector(
            {(len(ranks), in_arena): everywhere for in_arena in (True, False)}, usual.has_bulk
        )
        endpoint.prepared.clear()
        calls = [_calls(pattern, x, x, None) for pattern, x in zip(PATTERNS, inputs, strict=True)]
        order = [calls[0][0], calls[1][0], calls[0][1], calls[1][1]]
        found.append([graph_us(group, call, copies, 5) for call in order])
    endpoint.selector = usual
    endpoint.prepared.clear()
    group.finish()
    return found


def use_rules(endpoint: CudaEndpoint, selector: Selector) -> None:
    endpoint.selector = selector
    endpoint.prepared.clear()


_GroupCall = Callable[[CudaGroup], Any]


def _calls(pattern: str, x: Tensor, out: Tensor, nccl: Any) -> tuple[_GroupCall, _GroupCall, _GroupCall]:
    if pattern == "all_to_all":
        return (
            lambda group: all_to_all(group, x, in_arena=True),
            lambda group: all_to_all(group, x),
            lambda _: dist.all_to_all_single(out, x, group=nccl),
        )
    return (
        lambda group: group.all_gather(x, in_arena=True),
        lambda group: group.all_gather(x),
        lambda _: dist.all_gather_into_tensor(out, x, group=nccl),
    )


def all_to_all(group: CudaGroup, x: Tensor, *, in_arena: bool = False) -> Tensor:
    """An equal part of a dense tensor for each rank; joins what arrives, by slot."""
    parts, ones = x.view(1, group.size, 1, -1), (1,) * group.size
    return group.tokens_from_heads(parts, token_sizes=ones, head_sizes=ones, in_arena=in_arena).view(x.shape)


def _there(x: Tensor, size: int, nccl: Any) -> Tensor:
    """Source: diffusers 0.42, attention_dispatch.py, TemplatedUlyssesAttention.forward."""
    batch, length, heads, dim = x.shape
    x = x.reshape(batch, length, size, heads // size, dim).permute(2, 1, 0, 3, 4).contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=nccl)
    return out.flatten(0, 1).permute(1, 0, 2, 3).contiguous()


def _back(x: Tensor, size: int, nccl: Any) -> Tensor:
    batch, tokens, heads, dim = x.shape
    x = x.reshape(batch, size, tokens // size, heads, dim).permute(1, 3, 0, 2, 4).contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=nccl)
    return out.flatten(0, 1).permute(1, 2, 0, 3).contiguous()


def _random_bytes(endpoint: CudaEndpoint, num_bytes: int) -> Tensor:
    x = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=f"cuda:{endpoint.device}")
    return x.view(torch.int16).random_(-30000, 30000).view(torch.bfloat16).nan_to_num_()


def graph_us(group: CudaGroup, call: _GroupCall, copies: int, repeats: int) -> float:
    call(group)
    call(group)
    captured = Captured(group, call, copies=copies)

    def align() -> None:
        _start_late(group)
        captured.match_banks(group)

    return _event_us(lambda: captured.replay(group), align, warmups=2, repeats=repeats) / copies


def captured_us(
    call: Callable[[], object], align: Callable[[], object], *, copies: int, repeats: int
) -> float:
    """The median time of a call without our collectives, in a graph of `copies`; `align`: see `_event_us`."""

    def calls() -> None:
        for _ in range(copies):
            call()

    call()
    torch.cuda.synchronize()
    graph = CapturedAlone(calls)
    return _event_us(graph.replay, align, warmups=2, repeats=repeats) / copies


def _start_late(group: CudaGroup) -> None:
    """Lets all ranks begin together, late enough that the graph's launch is queued by then."""
    torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    group.barrier()


def eager_us(group: CudaGroup, call: Callable[[], object], copies: int, repeats: int) -> float:
    def batch() -> None:
        for _ in range(copies):
            call()

    return _event_us(batch, group.barrier, warmups=1, repeats=repeats) / copies


def _event_us(run: Callable[[], object], align: Callable[[], object], *, warmups: int, repeats: int) -> float:
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


def _host_us(call: Callable[[], object]) -> float:
    """The host's time for a call, while the device's queue has room."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - began) / 20)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6
