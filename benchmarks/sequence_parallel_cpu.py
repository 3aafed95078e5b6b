"""Shares a job's denoising steps among CPU ranks and prints what of a step the exchanges take.

    python -m benchmarks.sequence_parallel_cpu [--model tiny-wan] [--steps 8]

Columns: the step; the share of it inside exchanges, waiting for peers included; the share that is
left when a barrier before each exchange takes the waiting out; bytes that a rank sends. All but
the bytes are medians over steps, then over ranks. With more ranks than cores, waiting for a peer
is mostly waiting for a core. Run it on a quiet machine: every other process shows.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gfgen.gfc.arena import ArenaPlan, create_arena
from gfgen.gfc.descriptor import Descriptor, GroupKind
from gfgen.gfc.endpoint import CpuGroup, Endpoint
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families.adapter import Fields
from gfgen.models.families.registry import load_adapter, resolve_checkpoint
from gfgen.models.parallel.parallel import Parallel

SHAPES = ((1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2))
"""(cfg, ulysses) degrees."""


@dataclass(slots=True)
class MeasuredJob:
    """A prepared job, made before the ranks are forked."""

    adapter: Any
    spec: JobSpec
    prompt: Fields
    condition: Fields
    latents: Fields


@dataclass(slots=True)
class Timed:
    """Ranks whose exchanges are timed; with `apart`, waiting for peers is kept out of it."""

    group: CpuGroup
    apart: bool
    moving_s: float = 0.0
    sent_bytes: int = 0
    room_bytes: int | None = None

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def slot(self) -> int:
        return self.group.slot

    def beside(self, max_blocks: int) -> Timed:
        return self

    def all_gather(self, x: Tensor, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        with self._timed(x, copies=self.size - 1):
            return self.group.all_gather(x, dim=dim, sizes=sizes)

    def heads_from_tokens(self, *tensors: Tensor, **sizes: Any) -> tuple[Tensor, ...]:
        with self._timed(*tensors, copies=1 - 1 / self.size):
            return self.group.heads_from_tokens(*tensors, **sizes)

    def gather_tokens(self, *tensors: Tensor, **sizes: Any) -> tuple[Tensor, ...]:
        with self._timed(*tensors, copies=self.size - 1):
            return self.group.gather_tokens(*tensors, **sizes)

    def tokens_from_heads(self, x: Tensor, **sizes: Any) -> Tensor:
        with self._timed(x, copies=1 - 1 / self.size):
            return self.group.tokens_from_heads(x, **sizes)

    @contextlib.contextmanager
    def _timed(self, *tensors: Tensor, copies: float) -> Iterator[None]:
        """Adds up an exchange; `copies`: how often a rank sends its tensors, on the whole."""
        if self.apart:
            self.group.barrier()
        start = time.perf_counter()
        yield
        self.moving_s += time.perf_counter() - start
        self.sent_bytes += int(copies * sum(x.numel() * x.element_size() for x in tensors))


COUNTED = ("moving_s", "sent_bytes")


@dataclass(frozen=True, slots=True)
class Step:
    """One step on one rank."""

    step_s: float
    exchanges_s: float
    sent_bytes: int


def measure(
    endpoint: Endpoint, job: MeasuredJob, layout: Layout, dispatch: int, *, apart: bool
) -> list[Step]:
    """All steps but the first, which warms up."""
    group = endpoint.group(Descriptor(dispatch, layout, (1,) * layout.degree))
    group.enter()
    steps, latents = [], job.latents
    for idx in range(job.spec.steps or 0):
        kinds: tuple[GroupKind, ...] = ("cfg_pair", "cfg", "ulysses", "ring")
        cfg, sequence, ulysses, ring = timed = [Timed(group.subgroup(kind), apart) for kind in kinds]
        group.barrier()
        start = time.perf_counter()
        latents = job.adapter.denoise(
            job.spec,
            job.prompt,
            job.condition,
            latents,
            step=idx,
            parallel=Parallel(cfg, sequence, ulysses, ring),
        )
        step_s = time.perf_counter() - start
        moving_s, sent_bytes = (sum(getattr(ranks, name) for ranks in timed) for name in COUNTED)
        steps.append(Step(step_s, moving_s, sent_bytes))
    return steps[1:]


def serve(rank: int, fds: dict[int, int], job: MeasuredJob, pipe: Connection) -> None:
    torch.set_num_threads(1)
    endpoint = Endpoint(ArenaPlan(), rank=rank, fds=fds, incarnations=dict.fromkeys(fds, 1))
    dispatch = 0
    for cfg, ulysses in SHAPES:
        layout = Layout(tuple(range(cfg * ulysses)), cfg=cfg, ulysses=ulysses)
        for apart in (False, True):
            dispatch += 1
            pipe.recv()
            is_member = rank in layout.ranks
            pipe.send(measure(endpoint, job, layout, dispatch, apart=apart) if is_member else [])


def medians(results: list[list[Step]]) -> tuple[float, float, float]:
    """Step in seconds, share of exchanges, bytes; over steps, then over ranks."""
    members = [steps for steps in results if steps]
    step_s = median(median(step.step_s for step in steps) for steps in members)
    share = median(median(step.exchanges_s / step.step_s for step in steps) for steps in members)
    return step_s, share, median(median(step.sent_bytes for step in steps) for steps in members)


def prepare(model: str, steps: int) -> MeasuredJob:
    adapter: Any = load_adapter(resolve_checkpoint(model))
    geometry = adapter.geometry
    spec = geometry.resolve(JobSpec(id="benchmark", prompt="a red fox", seed=1, steps=steps))
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    print(f"{model} {geometry.shape_key(spec)}: {geometry.num_tokens(spec)} tokens, ", end="")
    return MeasuredJob(adapter, spec, prompt, condition, latents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-wan")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)  # or forked ranks would inherit threads that do not exist
    job = prepare(options.model, options.steps)
    num_ranks = max(cfg * ulysses for cfg, ulysses in SHAPES)
    fds = {rank: create_arena(ArenaPlan(), rank=rank, incarnation=1) for rank in range(num_ranks)}
    fork = multiprocessing.get_context("fork")
    pipes = []
    for rank in range(num_ranks):
        ours, theirs = fork.Pipe()
        fork.Process(target=serve, args=(rank, fds, job, theirs), daemon=True).start()
        pipes.append(ours)
    print(f"one thread a rank; {date.today()}, {cpu_model()}, {os.cpu_count()} cores, ", end="")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(f"`python {' '.join(sys.argv)}`\n")
    print("| cfg x ulysses | ms a step | in exchanges | without waiting | KB sent a rank |\n|" + "---|" * 5)
    for cfg, ulysses in SHAPES:
        found = []
        for _ in range(2):
            for pipe in pipes:
                pipe.send(None)
            found.append(medians([pipe.recv() for pipe in pipes]))
        (step_s, share, sent), (_, moving, _) = found
        print(f"| {cfg}x{ulysses} | {step_s * 1e3:.1f} | {share:.1%} | {moving:.1%} | {sent / 1e3:.0f} |")


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
