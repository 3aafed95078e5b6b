"""diffusers' shared attention over NCCL: what benchmarks.host_transport runs on each of two ranks.

diffusers' exchanges, permutes and merges, with the attention that gfgen's ranks use. GPUs without peer access
are made of others by NCCL_P2P_DISABLE=1, which the caller sets. CPU ranks rehearse it over gloo.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import TemplatedRingAttention, TemplatedUlyssesAttention
from torch import Tensor, distributed

from benchmarks.measure_host import attend, repeats_of
from benchmarks.timing import device_ms, host_s
from gfgen.models.parallel.shared_attention import attend_with_lse
from gfgen.models.stepping.check import join_group

WAYS = {"ulysses": TemplatedUlyssesAttention, "ring": TemplatedRingAttention}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "store", "device", "cases", "output", "seconds"):
        parser.add_argument(f"--{name}", required=True)
    asked = parser.parse_args()
    began_s, rank = time.monotonic(), int(asked.rank)
    device = "cpu" if asked.device == "cpu" else f"cuda:{rank}"
    torch.set_num_threads(1)
    join_group(rank=rank, num_ranks=2, store=asked.store, device=device)
    for tokens, heads, dim in json.loads(asked.cases):
        is_late = torch.tensor([time.monotonic() - began_s > float(asked.seconds)], dtype=torch.int64)
        distributed.all_reduce(is_late)  # over gloo: both ranks stop at the same case
        if is_late:
            break
        for way in WAYS:
            found = _measured(way, tokens, heads, dim, device, rank)
            if rank == 0:
                with open(asked.output, "a") as file:
                    file.write(json.dumps({"tokens": tokens, "dim": dim, "way": way, **found}) + "\n")
    os._exit(0)  # teardown may wait for peers


@torch.no_grad()
def _measured(way: str, tokens: int, heads: int, dim: int, device: str, rank: int) -> dict[str, float]:
    """Microseconds, of the slower rank: attention with its exchanges, and these alone."""
    config = _config(way, device, rank)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn((1, tokens // 2, heads, dim), device=device).to(dtype) for _ in range(3))

    given = (q, k, v, None, 0.0, False, None, False, False, _attended, None, config)
    calls: dict[str, Callable[[], Any]] = {
        "us": lambda: WAYS[way].apply(*given),
        "exchange_us": lambda: _exchange(way, (q, k, v)),
    }
    return {name: _slower_us(call, tokens, device) for name, call in calls.items()}


@functools.cache
def _config(way: str, device: str, rank: int) -> ParallelConfig:
    shared = ContextParallelConfig(**{f"{way}_degree": 2})
    shape = (2, 1) if way == "ring" else (1, 2)
    mesh = distributed.device_mesh.init_device_mesh(
        device.partition(":")[0], shape, mesh_dim_names=("ring", "ulysses")
    )
    config = ParallelConfig(context_parallel_config=shared)
    config.setup(rank, 2, torch.device(device), mesh=mesh)
    return config


def _attended(
    _: object, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """In place of diffusers' own: gfgen's call of the kernel. The sixth of `rest` is `return_lse`."""
    if not rest[5]:
        return attend(query, key, value, None)
    out, lse = attend_with_lse(query, key, value, None)
    return out, lse.transpose(1, 2)


def _exchange(way: str, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    """What diffusers moves, without its permutes and merges."""
    if way == "ring":
        own = torch.cat([x.flatten() for x in tensors[1:]])
        distributed.all_gather_into_tensor(own.new_empty(2 * own.numel()), own)
        return
    for x in (*tensors, tensors[0]):
        distributed.all_to_all_single(torch.empty_like(x).flatten(), x.flatten())


def _slower_us(call: Callable[[], Any], tokens: int, device: str) -> float:
    copies, repeats = repeats_of(tokens)

    def calls() -> None:
        for _ in range(copies):
            call()

    times = []
    for _ in range(repeats + 1):
        distributed.barrier()
        times.append(1e6 * host_s(calls) if device == "cpu" else 1e3 * device_ms(calls))
    slower = torch.tensor([statistics.median(times[1:]) / copies], dtype=torch.float64)
    distributed.all_reduce(slower, distributed.ReduceOp.MAX)
    return float(slower)


if __name__ == "__main__":
    main()
