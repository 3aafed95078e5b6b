"""What `python -m benchmarks.host_transport` runs on each rank: exchanges over peer and over main memory.

A process has an endpoint for each transport. Checks need no GPU: with `--rehearse` they run on CPU ranks.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure_forward
from benchmarks.measure_forward import Branches, ForwardKind, ForwardShape, Groups, RunForward
from benchmarks.timing import host_s
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.device_arena import HostArena
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.measure import graph_us
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Layout
from gfgen.models.families.guidance import evaluate_branches
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.shared_attention import shared_attention

Endpoints = dict[str, Any]
"""By transport: "peer" and "host"."""
_ENDPOINTS: Endpoints = {}
POISON = 0x5A


def add_host(
    endpoint: CudaEndpoint, plan: ArenaPlan, parent: int, arena_fds: Mapping[int, int], control_fd: int
) -> None:
    """Give this process an endpoint over main memory as well. Descriptors are the parent's."""

    def opened(fd: int) -> int:
        return os.open(f"/proc/{parent}/fd/{fd}", os.O_RDWR)

    fds = {rank: opened(fd) for rank, fd in arena_fds.items()}
    _ENDPOINTS["peer"] = endpoint
    _ENDPOINTS["host"] = CudaEndpoint(
        None,
        host=HostArena.open(fds[endpoint.rank], plan, device=endpoint.device),
        rank=endpoint.rank,
        peer_fds={rank: fd for rank, fd in fds.items() if rank != endpoint.rank},
        incarnations=dict.fromkeys(fds, 1),
        control_fd=opened(control_fd),
    )


def entered(transport: str, layout: Layout, dispatch: int) -> Any:
    group = _ENDPOINTS[transport].group(Descriptor(dispatch, layout, (1,) * layout.degree))
    group.enter()
    return group


def _device() -> torch.device:
    return getattr(_ENDPOINTS["host"], "torch_device", torch.device("cpu"))


def _poison(num_bytes: int) -> None:
    """Memory that results get next has this pattern, so that what is not written shows."""
    if _device().type == "cuda":
        torch.full((num_bytes,), POISON, dtype=torch.uint8, device=_device())


def _random(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator(_device()).manual_seed(seed)
    found = torch.randint(-30000, 30000, tuple(shape), generator=generator, device=_device())
    return found.to(torch.int16)


# Checks -----------------------------------------------------------------------------------------------


@torch.no_grad()
def wrong_bytes(_: object, first: int, sizes: Sequence[tuple[int, int, int]]) -> list[str]:
    """Which exchanges of [1, tokens, heads, dim] differ from what their seeds say, on either transport."""
    wrong = []
    for number, (tokens, heads, dim) in enumerate(sizes):
        for offset, transport in enumerate(_ENDPOINTS):
            group = entered(transport, Layout((0, 1), torus=2), first + 2 * number + offset)
            torus = group.subgroup("torus")
            by_token, by_head = shard_sizes(tokens, 2), shard_sizes(heads, 2)
            parts = [
                _random((1, length, heads, dim), 7 * number + slot) for slot, length in enumerate(by_token)
            ]
            whole, own = torch.cat(parts, 1), parts[group.slot]
            _poison(4 * whole.numel() * whole.element_size())
            come, again = torus.heads_from_tokens(own, own + 1, token_sizes=by_token, head_sizes=by_head)
            back = torus.tokens_from_heads(come, token_sizes=by_token, head_sizes=by_head)
            (turned,) = torus.gather_tokens(own, token_sizes=by_token)
            mine = torch.split(whole, list(by_head), 2)[group.slot]
            rotated = torch.cat((own, parts[1 - group.slot]), 1)
            wanted = {"come": (come, mine), "again": (again, mine + 1), "back": (back, own)}
            for name, (found, right) in (wanted | {"turned": (turned, rotated)}).items():
                count = int((found != right).sum())
                wrong += [f"{transport} {name} {tokens}x{heads}x{dim}: {count} items"] if count else []
    return wrong


@torch.no_grad()
def mixed_sequences(endpoint: Any, first: int, number: int, seed: int) -> int:
    """Wrong items in so many random dispatches, each over one transport or the other."""
    rng, wrong = random.Random(seed), torch.zeros((), dtype=torch.int64, device=_device())
    for idx in range(number):
        transport, ranks = rng.choice(sorted(_ENDPOINTS)), rng.choice([(0, 1), (1, 0), (0,), (1,)])
        layout = Layout(ranks, **{rng.choice(("torus", "ulysses", "ring")): len(ranks)})
        calls = [
            (rng.choice(("gather", "turn")), rng.choice((1, 33, 5000))) for _ in range(rng.randint(1, 4))
        ]
        if endpoint.rank not in ranks:
            continue
        group = entered(transport, layout, first + idx).subgroup("cfg")
        for what, tokens in calls:
            sizes = (tokens,) * group.size
            x = torch.full(
                (1, tokens, 2, 8), idx % 30000 + 7 * endpoint.rank, dtype=torch.int16, device=_device()
            )
            order = [*range(group.slot, group.size), *range(group.slot)]
            if what == "gather":
                found, order = group.all_gather(x, dim=1), list(range(group.size))
            else:
                (found,) = group.gather_tokens(x, token_sizes=sizes)
            for at, slot in enumerate(order):
                part = found[:, at * tokens : (at + 1) * tokens]
                wrong += (part != idx % 30000 + 7 * group.ranks[slot]).sum()
    return int(wrong)


@torch.no_grad()
def attention_bits(_: object, first: int, tokens: int, heads: int, link: float = 0.0) -> dict[str, float]:
    """By degree: whether both transports give the same bits (0 or 1), and the error against one rank.

    link: the limit of the host transport in GB/s.
    """
    _limit("host", link)
    dtype = torch.bfloat16 if _device().type == "cuda" else torch.float32
    generator = torch.Generator(_device()).manual_seed(3)
    whole = [
        torch.randn((1, tokens, heads, 64), generator=generator, device=_device()).to(dtype) for _ in range(3)
    ]
    wanted = attend(whole[0], whole[1], whole[2], None)
    found: dict[str, float] = {}
    for number, degree in enumerate(("torus", "ulysses", "ring")):
        results = []
        for offset, transport in enumerate(_ENDPOINTS):
            group = entered(transport, Layout((0, 1), **{degree: 2}), first + 2 * number + offset)
            sizes = shard_sizes(tokens, 2)
            q, k, v = (torch.split(x, list(sizes), 1)[group.slot] for x in whole)
            parallel = parallel_from(group)
            results.append(
                shared_attention(q, k, v, None, parallel=parallel, token_sizes=sizes, attend=attend)
            )
        right = torch.split(wanted, list(sizes), 1)[group.slot]
        found[f"{degree} same bits"] = float(torch.equal(results[0], results[-1]))
        found[f"{degree} error"] = float((results[-1] - right).abs().max())
    return found


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


# Times: in CUDA graphs on GPUs, medians; link: the limit of the host transport in GB/s, 0 for none ------


def _limit(transport: str, link: float) -> None:
    _ENDPOINTS[transport].limit_link(link * 1e9)


def _call_us(group: Any, call: Callable[[Any], object], *, copies: int, repeats: int) -> float:
    if _device().type == "cuda":
        return graph_us(group, call, copies, repeats)
    times = []
    for _ in range(repeats + 1):
        group.barrier()
        times.append(1e6 * host_s(lambda: call(group)))
    return statistics.median(times[1:])


@torch.no_grad()
def exchange_us(_: object, dispatch: int, transport: str, link: float, num_bytes: int) -> float:
    """Both ranks send this many bytes to each other at once."""
    _limit(transport, link)
    group = entered(transport, Layout((0, 1), torus=2), dispatch)
    x = _random((num_bytes // 2,), 1)
    copies, repeats = (4, 7) if num_bytes < 1 << 25 else (1, 3)
    time_us = _call_us(group, lambda group: group.all_gather(x), copies=copies, repeats=repeats)
    _finish(group)
    return time_us


def _finish(group: Any) -> None:
    if _device().type == "cuda":
        group.finish()


@torch.no_grad()
def attention_us(
    endpoint: Any,
    dispatch: int,
    transport: str,
    link: float,
    layout: Layout | None,
    tokens: int,
    heads: int,
    dim: int,
) -> float:
    """A shared attention with its exchanges; without a layout on each rank alone."""
    _limit(transport, link)
    layout = layout or Layout((endpoint.rank,))
    group = entered(transport, layout, dispatch)
    sizes = shard_sizes(tokens, layout.degree)
    shape = (1, sizes[group.slot], heads, dim)
    q, k, v = (torch.randn(shape, device=_device()).to(_dtype()) for _ in range(3))

    def run(group: Any) -> Tensor:
        if layout.degree == 1:
            return attend(q, k, v, None)
        parallel = parallel_from(group)
        return shared_attention(q, k, v, None, parallel=parallel, token_sizes=sizes, attend=attend)

    copies, repeats = repeats_of(tokens)
    time_us = _call_us(group, run, copies=copies, repeats=repeats)
    _finish(group)
    return time_us


def repeats_of(tokens: int) -> tuple[int, int]:
    """Copies in a graph and measured runs of an attention, so that none takes long."""
    return (4, 7) if tokens < 50_000 else (1, 4) if tokens < 150_000 else (1, 3)


@torch.no_grad()
def forward_ms(
    endpoint: Any,
    dispatch: int,
    transport: str,
    links: Sequence[float],
    layout: Layout | None,
    shape: ForwardShape,
    branches: Branches,
) -> dict[str, Any]:
    """By limit, the median of a forward; or its error. One graph serves all limits."""
    layout, endpoint = layout or Layout((endpoint.rank,)), _ENDPOINTS[transport]
    kind = ForwardKind(is_ours=True, in_graph=_device().type == "cuda", branches=branches)
    try:
        _limit(transport, 0)
        prepare = measure_forward.prepare if kind.in_graph else _rehearsed
        run, groups = prepare(endpoint, shape, kind, layout, dispatch)
        for _ in range(2):
            result = run(groups() if groups else None)
        assert all(torch.isfinite(each).all() for each in result), "a forward whose result is not finite"
        if kind.in_graph:
            run = measure_forward.captured(run, groups() if groups else None)
        found: dict[str, Any] = {}
        for link in links:
            _limit(transport, link)
            times = [_timed_ms(run, groups) for _ in range(5)]
            found[f"{link:g}"] = statistics.median(times[1:])
        return found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _timed_ms(run: RunForward, groups: Groups | None) -> float:
    if _device().type == "cuda":
        return measure_forward.timed_ms(run, groups)
    group = groups() if groups else None
    return 1e3 * host_s(lambda: run(group))


def _rehearsed(
    endpoint: Any, shape: ForwardShape, kind: ForwardKind, layout: Layout, dispatch: int
) -> tuple[RunForward, Groups | None]:
    """In place of a forward, on CPU ranks: one shared attention for each branch."""

    def run(group: Any) -> Sequence[Tensor]:
        parallel = None if group is None else parallel_from(group)

        def predict(embeds: Sequence[Tensor]) -> Tensor:
            if parallel is None or parallel.sequence.size == 1:
                q = torch.ones((len(embeds), 64, 4, 8))
                return attend(q, q, q, None)
            sizes = shard_sizes(64, parallel.sequence.size)
            q = torch.ones((len(embeds), sizes[parallel.sequence.slot], 4, 8))
            return shared_attention(q, q, q, None, parallel=parallel, token_sizes=sizes, attend=attend)

        texts = [torch.ones(1, 2)] * (1 if kind.branches == "one" else 2)
        return evaluate_branches(predict, texts, parallel, in_batch=False)

    return run, measure_forward.groups_of(endpoint, layout, dispatch)


def _dtype() -> torch.dtype:
    return torch.bfloat16 if _device().type == "cuda" else torch.float32
