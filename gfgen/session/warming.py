"""Which steps ranks on GPUs warm up before a run, and when its models change.

The first step of a kind loads or compiles kernels and is launched slowly. Scheduling does not depend on
whether a kind was warmed up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gfgen.graph import Stage
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CPU, Devices
from gfgen.runtime.ipc.messages import WarmUp
from gfgen.runtime.processes import starting
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

MAX_WARM_UPS = 16
"""Kinds of jobs; each takes up to some seconds. Kinds with less work are loaded in the run."""
MAX_FLOPS = 2e15
"""Operations of a step on each of its ranks. A larger step computes for seconds (two forwards of Wan2.2-5B at
1280x704x81, 586e12 together, took 1.0 s on an H200: benchmarks/results/2026-11-22-forward.md). Loading is
a small part of the first such step, and launching delays none."""
ONE_DEGREE: Mapping[str, int] = {"fcfs": 1, "srtf": 1, "legacy": 0}
"""Policies whose steps all have one degree, their option `degree`, and its default; 0 means all ranks."""


def warm_up(
    pool: WorkerPool,
    jobs: Sequence[AdmittedJob],
    *,
    devices: Devices,
    policy: NamedPolicy,
    signals: SignalPipe | None = None,
) -> None:
    """Run steps like those of the jobs on all ranks; CPU ranks need none."""
    choose = warm_ups_of(devices, policy)
    jobs = [job for job in jobs if str(job.checkpoint) in pool.models.checkpoints]
    if choose is None or not jobs:
        return
    if not (items := choose(jobs)):
        return
    began_s = time.monotonic()
    logger.info("warming up for %s", counted(len(items), "shape"))
    for number, (item, answer) in enumerate(starting.warm_up(pool, items, signals), start=1):
        if answer.reason is None:
            logger.info("warming up: %d of %d, %s", number, len(items), _name_of(item))
        else:
            logger.warning("warming up: %s: %s; its jobs run anyway", _name_of(item), answer.reason)
    logger.info("warmed up in %.1f s", time.monotonic() - began_s)


def warm_ups_of(
    devices: Devices, policy: NamedPolicy
) -> Callable[[Sequence[AdmittedJob]], Sequence[WarmUp]] | None:
    """The function that chooses warm-up steps for jobs; None on CPU ranks."""
    if devices.kind == CPU:
        return None
    widest = max(map(len, devices.islands))
    degrees = degrees_at_hand(policy.name, policy.options, widest)
    return lambda jobs: warm_ups(jobs, degrees)


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


def _name_of(item: WarmUp) -> str:
    """Such as 'wan2.2-ti2v-5b 832x480x49'."""
    spec = item.spec
    frames = f"x{spec.frames}" if spec.frames and spec.frames > 1 else ""
    return f"{spec.model or Path(item.checkpoint).name} {spec.width}x{spec.height}{frames}"
