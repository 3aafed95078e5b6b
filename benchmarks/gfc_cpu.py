"""Times the CPU collectives between real processes and prints a Markdown table.

    python -m benchmarks.gfc_cpu [--ranks 4] [--repeats 2000]

Times are of a rank's own calls, tensors and Python included: median and mean over repeats, then the
median over ranks. With more ranks than cores calls come in fast and slow ones (some ranks are not
running), so that the median moves between runs and the mean tells the throughput. Run it on a
quiet machine: every other process shows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import torch

from gfgen.gfc.arena import ArenaPlan, create_arena
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import CpuGroup, Endpoint
from gfgen.graph import Artifact
from gfgen.layout import Layout
from gfgen.models.families.adapter import Fields
from gfgen.runtime.ipc.migration import plan_transfers
from gfgen.runtime.worker.jobs import receive_state, send_state

KIB, MIB = 1 << 10, 1 << 20


class Timing(NamedTuple):
    """Of one call, in microseconds."""

    median_us: float
    mean_us: float


def timing(call: Callable[[], object], repeats: int) -> Timing:
    """Times a call, after a warm-up of a tenth of the repeats."""
    for _ in range(repeats // 10 + 1):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return Timing(median(times), mean(times))


def measure(endpoint: Endpoint, layout: Layout, repeats: int) -> dict[str, Timing]:
    """All numbers of one rank, by name."""
    descriptor = Descriptor(1, layout, (1,) * layout.degree)
    group = endpoint.group(descriptor)
    group.enter()
    found = {"barrier": timing(group.barrier, repeats)}
    ones = (1,) * group.size
    for size, times in ((4 * KIB, repeats), (64 * KIB, repeats), (MIB, repeats // 10)):
        x = torch.zeros(size // 4)
        heads = x.view(1, 1, group.size, -1)
        exchange = partial(group.heads_from_tokens, heads, token_sizes=ones, head_sizes=ones)
        found[f"all-to-all, {label(size)} a rank"] = timing(exchange, times)
        found[f"all-gather, {label(size)} a rank"] = timing(partial(group.all_gather, x), times)
    found["attention there and back, q k v of [1, 64, 8, 16]"] = attention(group, repeats)
    if endpoint.rank < 2:
        found["point-to-point, 1 MiB, there and back"] = ping_pong(endpoint, MIB, repeats // 10)
    if layout.degree >= 4:
        for name, source, destination in MIGRATIONS:
            found[name] = migration(endpoint, group, source, destination, repeats // 10)
    # Last, and on one rank while the others sleep: making a group is nobody else's work.
    group.barrier()
    if group.slot == 0:
        found["making a group"] = timing(partial(endpoint.group, descriptor), repeats)
        found["making a descriptor and its group"] = timing(
            lambda: endpoint.group(Descriptor(1, layout, (1,) * layout.degree)), repeats
        )
    group.barrier()
    return found


def attention(group: CpuGroup, repeats: int) -> Timing:
    num_tokens = 64 // group.size
    q, k, v = torch.zeros(3, 1, num_tokens, 8, 16)
    tokens, heads = (num_tokens,) * group.size, (8 // group.size,) * group.size

    def there_and_back() -> None:
        x, _, _ = group.heads_from_tokens(q, k, v, token_sizes=tokens, head_sizes=heads)
        group.tokens_from_heads(x, token_sizes=tokens, head_sizes=heads)

    return timing(there_and_back, repeats)


def ping_pong(endpoint: Endpoint, size: int, repeats: int) -> Timing:
    """Ranks 0 and 1 pass a tensor to and fro."""
    x = torch.zeros(size // 4)
    peer = 1 - endpoint.rank

    def out_and_in() -> None:
        if endpoint.rank == 0:
            endpoint.send(x, to=peer, dispatch=1)
        y = endpoint.recv(x.shape, x.dtype, source=peer, dispatch=1)
        if endpoint.rank == 1:
            endpoint.send(y, to=peer, dispatch=1)

    return timing(out_and_in, repeats)


STATE = Artifact("latents", tuple((f"tensor {i}", (1, 64, 1024), "float32") for i in range(4)))
"""1 MiB of a job's state, as four tensors of a solver."""

MIGRATIONS = (
    ("migration of 1 MiB, 1 rank to 1", Layout((0,)), Layout((1,))),
    ("migration of 1 MiB, 1 rank to 2", Layout((0,)), Layout((1, 2), ulysses=2)),
    ("migration of 1 MiB, 2 ranks to 2 others", Layout((0, 1), ulysses=2), Layout((2, 3), ulysses=2)),
)


def migration(
    endpoint: Endpoint, group: CpuGroup, source: Layout, destination: Layout, repeats: int
) -> Timing:
    """From the moment at which all ranks are ready until this one has sent or received its part."""
    transfers = plan_transfers(STATE, source=source, destination=destination)
    sent = [transfer for transfer in transfers if transfer.source == endpoint.rank]
    received = [transfer for transfer in transfers if transfer.destination == endpoint.rank]
    fields = Fields({name: torch.rand(shape) for name, shape, _ in STATE.fields})
    outline = {name: (torch.float32, shape) for name, shape, _ in STATE.fields}, fields.scalars
    times = []
    for _ in range(repeats):
        group.barrier()
        start = time.perf_counter()
        send_state(endpoint, fields, sent, dispatch=1)
        receive_state(endpoint.recv, received, outline, dispatch=1)
        group.barrier()
        times.append((time.perf_counter() - start) * 1e6)
    return Timing(median(times), mean(times))


def label(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def serve(rank: int, num_ranks: int, fds: dict[int, int], repeats: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    endpoint = Endpoint(ArenaPlan(), rank=rank, fds=fds, incarnations=dict.fromkeys(fds, 1))
    layout = Layout(tuple(range(num_ranks)), ulysses=num_ranks)
    pipe.send(measure(endpoint, layout, repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--repeats", type=int, default=2000)
    options = parser.parse_args()
    fork = multiprocessing.get_context("fork")
    fds = {rank: create_arena(ArenaPlan(), rank=rank, incarnation=1) for rank in range(options.ranks)}
    pipes = []
    for rank in range(options.ranks):
        ours, theirs = fork.Pipe()
        arguments = (rank, options.ranks, fds, options.repeats, theirs)
        fork.Process(target=serve, args=arguments, daemon=True).start()
        pipes.append(ours)
    results = [pipe.recv() for pipe in pipes]
    load = os.getloadavg()[0]
    print(f"{date.today()}, {cpu_model()}, {os.cpu_count()} cores, {options.ranks} ranks, ", end="")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, load {load:.1f} at the end")
    print(f"`python {' '.join(sys.argv)}`\n\n| us | median | mean |\n|---|---|---|")
    for name in results[0]:
        medians, means = zip(*(result[name] for result in results if name in result), strict=True)
        print(f"| {name} | {median(medians):.1f} | {median(means):.1f} |")


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
