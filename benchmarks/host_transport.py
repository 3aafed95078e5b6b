"""Attention shared by two GPUs: over peer memory, over main memory, and as diffusers does it over NCCL.

    python -m benchmarks.host_transport FOLDER                  # two GPUs, at most eight minutes
    python -m benchmarks.host_transport FOLDER --seconds 0      # the tables of what is there
    python -m benchmarks.host_transport FOLDER --rehearse       # the same on CPU ranks, with small shapes

All use the same attention kernel; NCCL has no peer access (NCCL_P2P_DISABLE=1; CPU ranks: gloo). Each row is
written to FOLDER/rows.jsonl when it is measured; what is there is not measured again, so a run that was cut
off can go on. `gfgen bench gfc` has the exchanges alone, `forward --only '*/2/host-*'` forwards, and `pytest
tests/gfc/test_cuda_device.py` compares bytes. This process touches no GPU.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import TemplatedRingAttention, TemplatedUlyssesAttention
from torch import Tensor, distributed

from benchmarks.measured import device_ms, head, host_s, row
from gfgen.gfc.arena import MIB, ArenaPlan, create_arena
from gfgen.gfc.cuda.measure import graph_us
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import Endpoint
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Layout
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.shared_attention import attend_with_lse, shared_attention
from gfgen.models.stepping.check import join_group
from gfgen.runtime.ipc.settings import GPU_PLAN, HOST_PLAN

TOKENS, DIMS, HEADS = (18480, 96000, 192000), (128, 64, 32), 24
LINKS = {"peer": (0,), "host": (0, 25, 12)}
"""Limits of each transport in GB/s; 0: none."""
WAYS = {way: Layout((0, 1), **{way: 2}) for way in ("torus", "ring", "ulysses")}
THEIRS = {"ulysses": TemplatedUlyssesAttention, "ring": TemplatedRingAttention}

Times = dict[str, float]
Run = Callable[..., list[Times]]
"""A program on both ranks, after its endpoint with a new number of a dispatch."""


# On each rank ---------------------------------------------------------------------------------------


@torch.no_grad()
def ours(
    endpoint: Any, number: int, layout: Layout | None, tokens: int, heads: int, dim: int, link: float
) -> Times:
    """A shared attention with its exchanges, in a CUDA graph on GPUs; without a layout on each rank alone."""
    endpoint.limit_link(link * 1e9)
    layout = layout or Layout((endpoint.rank,))
    group = endpoint.group(Descriptor(number, layout, (1,) * layout.degree))
    group.enter()
    sizes, device = shard_sizes(tokens, layout.degree), _device(endpoint)
    q, k, v = _inputs(sizes[group.slot], heads, dim, device)

    def call(group: Any) -> Tensor:
        if layout.degree == 1:
            return attend(q, k, v, None)
        parallel = parallel_from(group)
        return shared_attention(q, k, v, None, parallel=parallel, token_sizes=sizes, attend=attend)

    copies, repeats = _repeats(tokens)
    if device.type == "cuda":
        us = graph_us(group, call, copies, repeats)
        group.finish()
        return {"us": us}
    times_s = []
    for _ in range(repeats + 1):
        group.barrier()
        times_s.append(host_s(lambda: call(group)))
    return {"us": 1e6 * statistics.median(times_s[1:])}


@torch.no_grad()
def theirs(endpoint: Any, _: int, way: str, tokens: int, dim: int, store: str) -> Times:
    """Attention as diffusers shares it, and its exchanges alone."""
    device = _device(endpoint)
    if not distributed.is_initialized():
        join_group(rank=endpoint.rank, num_ranks=2, store=store, device=str(device))
    q, k, v = _inputs(tokens // 2, HEADS, dim, device)
    config = _config(way, device, endpoint.rank)
    given = (q, k, v, None, 0.0, False, None, False, False, _attended, None, config)
    calls: dict[str, Callable[[], Any]] = {
        "us": lambda: THEIRS[way].apply(*given),
        "exchange_us": lambda: _exchange(way, (q, k, v)),
    }
    (copies, repeats), found = _repeats(tokens), {}
    for name, call in calls.items():
        times_us = []
        for _ in range(repeats + 1):
            distributed.barrier()
            repeated = functools.partial(_repeat, call, copies)
            times_us.append(1e6 * host_s(repeated) if device.type == "cpu" else 1e3 * device_ms(repeated))
        found[name] = statistics.median(times_us[1:]) / copies
    return found


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _device(endpoint: Any) -> torch.device:
    return getattr(endpoint, "torch_device", torch.device("cpu"))


def _inputs(tokens: int, heads: int, dim: int, device: torch.device) -> tuple[Tensor, ...]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return tuple([torch.randn((1, tokens, heads, dim), device=device).to(dtype) for _ in range(3)])


def _repeats(tokens: int) -> tuple[int, int]:
    """Copies in a graph and measured runs, so that none takes long."""
    return (4, 7) if tokens < 50_000 else (1, 4) if tokens < 150_000 else (1, 3)


def _repeat(call: Callable[[], Any], copies: int) -> None:
    for _ in range(copies):
        call()


@functools.cache
def _config(way: str, device: torch.device, rank: int) -> ParallelConfig:
    shape = (2, 1) if way == "ring" else (1, 2)
    mesh = distributed.device_mesh.init_device_mesh(device.type, shape, mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(**{f"{way}_degree": 2}))
    config.setup(rank, 2, device, mesh=mesh)
    return config


def _attended(
    _: object, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """In place of diffusers' own: gfgen's call of the kernel. The sixth of `rest` is `return_lse`."""
    if not rest[5]:
        return attend(query, key, value, None)
    out, lse = attend_with_lse(query, key, value, None)
    return out, lse.transpose(1, 2)


def _exchange(way: str, tensors: tuple[Tensor, ...]) -> None:
    """What diffusers moves, without its permutes and merges."""
    if way == "ring":
        own = torch.cat([x.flatten() for x in tensors[1:]])
        distributed.all_gather_into_tensor(own.new_empty(2 * own.numel()), own)
        return
    for x in (*tensors, tensors[0]):
        distributed.all_to_all_single(torch.empty_like(x).flatten(), x.flatten())


# In the process that asks ---------------------------------------------------------------------------


def on_cpus(program: Callable[..., Times], *arguments: Any) -> list[Times]:
    """On two new CPU ranks with arenas in main memory."""
    plan = ArenaPlan(data_bytes=4 * MIB)
    fds = {rank: create_arena(plan, rank=rank, incarnation=1) for rank in (0, 1)}
    try:
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
            tasks = [pool.submit(_on_cpu, rank, plan, fds, program, arguments) for rank in fds]
            return [task.result() for task in tasks]
    finally:
        for fd in fds.values():
            os.close(fd)


def _on_cpu(rank: int, plan: ArenaPlan, fds: Any, program: Callable[..., Times], arguments: Any) -> Times:
    torch.set_num_threads(1)
    return program(Endpoint(plan, rank=rank, fds=fds, incarnations={0: 1, 1: 1}), 1, *arguments)


@dataclass(slots=True)
class Rows:
    """What was measured, kept in a file row by row; what is there already is not measured again."""

    path: Path
    until_s: float
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            row = json.loads(line)
            self.found[row["name"]] = row

    def add(self, name: str, run: Run, *program: Any) -> None:
        """The slower rank's times, unless there is no time left."""
        if name in self.found or time.monotonic() > self.until_s:
            return
        times = run(*program)
        values = {key: max(rank[key] for rank in times) for key in times[0]}
        self.found[name] = {"name": name, **values}
        with self.path.open("a") as file:
            file.write(json.dumps(self.found[name]) + "\n")
        click.echo(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))

    def us(self, name: str) -> float | None:
        return self.found.get(name, {}).get("us")


def measure(rows: Rows, run: Run, transport: str, cases: Sequence[tuple[int, int]]) -> None:
    """Attention alone, half of its heads alone, shared; over main memory also diffusers'."""
    for tokens, dim in cases:
        for label, heads in (("alone", HEADS), ("half", HEADS // 2)):
            rows.add(f"{tokens} {dim} {label}", run, ours, None, tokens, heads, dim, 0)
        for (way, layout), link in itertools.product(WAYS.items(), LINKS[transport]):
            if way != "ulysses" or (not link and tokens < max(TOKENS)):
                name = f"{tokens} {dim} {way} {transport} {link}"
                rows.add(name, run, ours, layout, tokens, HEADS, dim, link)
        for way in THEIRS if transport == "host" else ():
            with tempfile.TemporaryDirectory() as folder:
                rows.add(f"{tokens} {dim} {way} nccl 0", run, theirs, way, tokens, dim, f"{folder}/store")


def tables(rows: Rows) -> Iterator[str]:
    """Markdown of what was measured."""
    columns = ("tokens", "dim", "one GPU, ms", "half", "way", "over", "limit, GB/s", "MB each way")
    yield "\n" + head(*columns, "ms", "gain")
    cases: dict[tuple[int, int], tuple[float, float]] = {}
    for each in rows.found.values():
        tokens, dim, way, *over = each["name"].split()
        alone, half = (rows.us(f"{tokens} {dim} {which}") for which in ("alone", "half"))
        if over and alone and half:
            cases[int(tokens), int(dim)] = alone, half
            limit, moved = over[1] if over[1] != "0" else "-", moved_bytes(int(tokens), int(dim)) / 1e6
            cells = [f"{alone / 1e3:.2f}", f"{half / 1e3:.2f}", way, over[0], limit, f"{moved:.0f}"]
            ms, gain = f"{each['us'] / 1e3:.2f}", f"{alone / each['us']:.2f}"
            yield row(f"{int(tokens):,}", dim, *cells, ms, gain)
    yield (
        "\ndiffusers over NCCL without peers: the faster one of its Ulysses and ring. A: attention on two "
        "without exchanges; X: the exchange alone over NCCL.\n"
    )
    compared = ("tokens", "dim", "diffusers, ms", "by", "A", "X", "GB/s", "ours, ms", "by", "times")
    yield head(*compared, "(A + X) / A", "share")
    for (tokens, dim), (_, half) in sorted(cases.items()):
        found = {way: rows.found.get(f"{tokens} {dim} {way} nccl 0") for way in THEIRS}
        own = {way: us for way in WAYS if (us := rows.us(f"{tokens} {dim} {way} host 0"))}
        if not own or not any(found.values()):
            continue
        best = min(filter(None, found.values()), key=lambda each: each["us"])
        way = min(own, key=own.__getitem__)
        bound, times = (half + best["exchange_us"]) / half, best["us"] / own[way]
        rate = moved_bytes(tokens, dim) / best["exchange_us"] / 1e3
        cells = [f"{best['us'] / 1e3:.2f}", best["name"].split()[2], f"{half / 1e3:.2f}"]
        cells += [f"{best['exchange_us'] / 1e3:.2f}", f"{rate:.1f}", f"{own[way] / 1e3:.2f}", way]
        yield row(f"{tokens:,}", dim, *cells, f"{times:.2f}", f"{bound:.2f}", f"{times / bound:.0%}")


def moved_bytes(tokens: int, dim: int) -> float:
    """What each of two ranks sends: queries, keys and values of the other's heads, and results; in a ring
    keys and values of all heads, which are as many bytes.
    """
    return 4 * (tokens / 2) * (HEADS / 2) * dim * 2


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--rehearse", is_flag=True, help="On CPU ranks, with small shapes.")
@click.option("--seconds", type=float, default=430.0, help="Begin nothing after so many; 0: tables only.")
def main(folder: Path, rehearse: bool, seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = Rows(folder / "rows.jsonl", time.monotonic() + seconds)
    os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    for transport in LINKS if seconds > 0 else ():
        if rehearse:
            measure(rows, on_cpus, transport, [(64, 16), (130, 16)])
            continue
        is_far = transport == "host"
        ranks = CudaRanks(2, HOST_PLAN if is_far else GPU_PLAN, near=[(0,), (1,)] if is_far else None)

        def run(program: Any, *given: Any, ranks: CudaRanks = ranks) -> list[Times]:
            return ranks.run((0, 1), program, ranks.next_dispatch(), *given)

        try:
            measure(rows, run, transport, list(itertools.product(TOKENS, DIMS)))
        finally:
            ranks.close()
    text = "\n".join(tables(rows))
    (folder / "tables.md").write_text(text + "\n")
    click.echo(text)


if __name__ == "__main__":
    main()
