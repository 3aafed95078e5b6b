"""Which steps ranks on GPUs warm up before a run, and when its models change.

The first step of a kind loads or compiles kernels and is launched slowly. Scheduling does not depend on
whether a kind was warmed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gfgen.graph import Stage
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.ipc.messages import WarmUp

MAX_WARM_UPS = 16
"""Kinds of jobs; each takes up to some seconds. Kinds with less work are loaded in the run."""
MAX_FLOPS = 2e15
"""Operations of a step on each of its ranks. A larger step computes for seconds (two forwards of Wan2.2-5B at
1280x704x81, 586e12 together, took 1.0 s on an H200: benchmarks/results/2026-11-22-forward.md). Loading is
a small part of the first such step, and launching delays none."""
ONE_DEGREE: Mapping[str, int] = {"fcfs": 1, "srtf": 1, "legacy": 0}
"""Policies whose steps all have one degree, their option `degree`, and its default; 0 means all ranks."""


def degrees_at_hand(policy: str, options: Mapping[str, Any], num_ranks: int) -> tuple[int, ...]:
    """Degrees that a step may have: the policy's own, or powers of two and all ranks."""
    name = policy.partition(",")[0]
    if name in ONE_DEGREE:
        degree = int(options.get("degree", ONE_DEGREE[name])) or num_ranks
        return (min(degree, num_ranks),)
    powers = {1 << exponent for exponent in range(num_ranks.bit_length())}
    return tuple(sorted({*powers, num_ranks}))


def warm_ups(jobs: Iterable[AdmittedJob], degrees: Sequence[int]) -> tuple[WarmUp, ...]:
    """One warm-up per model and shape, those with the most work first; none if steps compute for seconds."""
    examples: dict[tuple[Path, str], AdmittedJob] = {}
    work: dict[tuple[Path, str], float] = {}
    for job in jobs:
        key = (job.checkpoint, job.shape)
        examples.setdefault(key, job)
        work[key] = work.get(key, 0.0) + job.flops[Stage.DENOISE] * job.trajectory.num_steps
    ways = {key: _ways(examples[key], degrees) for key in sorted(examples, key=lambda key: -work[key])}
    chosen = [key for key in ways if ways[key]][:MAX_WARM_UPS]
    return tuple(
        WarmUp(number, examples[key].spec, str(examples[key].checkpoint), ways[key])
        for number, key in enumerate(chosen)
    )


def _ways(job: AdmittedJob, degrees: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    flops = job.flops[Stage.DENOISE]
    ways = [way for degree in degrees if flops <= MAX_FLOPS * degree for way in job.limits.ways(degree)]
    return tuple(dict.fromkeys(ways))
