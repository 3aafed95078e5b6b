"""What ranks on GPUs prepare before and during a run, and when their models change; whether they compile.

The first job's tasks are prepared before the run, and all others between tasks in the order of need, or just
before they run (runtime/worker/forwards.py). Results do not depend on it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.layout import ALONE, Degrees
from gfgen.models.fast.kernels import KernelChoice
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CPU, Devices
from gfgen.runtime.files import resume
from gfgen.runtime.ipc.messages import WarmUp
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.processes import starting
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.workers import WarmUps
from gfgen.session.ranks import Ranks
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import in_words

logger = logging.getLogger(__name__)

COMPILING_S = 20.0
"""Per model and shape, on each rank. First compiled forwards took 1 to 11 s on an H200; twice that."""
SAVED = 0.2
"""Of a step. Compiled blocks saved 24% with Flux.1 and 31% with Stable Diffusion 3.5 on an H200
(benchmarks/results/pipelines.md)."""
MAX_KINDS = 16
"""Kinds of jobs; each takes up to some seconds. Other kinds are prepared by their own tasks."""
MAX_FLOPS = 2e15
"""Operations of a step on each of its ranks. A larger one computes for seconds (586e12 took 1.0 s on an H200:
benchmarks/results/forward.md), of which loading and launching are a small part."""
MAX_PROMPT = 500
"""Characters of a prompt that ranks get to prepare with between tasks: these messages are sent at once."""
ONE_DEGREE: Mapping[str, int] = {"fcfs": 1, "srtf": 1, "legacy": 0}
"""Policies whose steps all have one degree, their option `degree`, and its default; 0 means all ranks."""


def warm_up(
    pool: WorkerPool, now: Sequence[WarmUp], later: Sequence[WarmUp], *, signals: SignalPipe | None = None
) -> None:
    """Let all ranks prepare some of this now, and the rest between tasks."""
    began_s = time.monotonic()
    for item, answer in starting.warm_up(pool, now, signals):
        if answer.reason is not None:
            logger.warning("warming up: %s: %s; its jobs run anyway", _name_of(item), answer.reason)
    if now:
        logger.info("warmed up for %s in %.1f s", _name_of(now[0]), time.monotonic() - began_s)
    pool.prepare_later(later)


def warm_ups_of(devices: Devices, policy: NamedPolicy) -> WarmUps | None:
    """The function that chooses what to prepare for jobs; None on CPU ranks."""
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
    """What to prepare, in the order of need: the most urgent kind in each rank's slot, then others."""
    kinds: dict[object, AdmittedJob] = {}
    for job in sorted(jobs, key=_urgency):
        kinds.setdefault(job.kind, job)
    examples = list(kinds.values())[:MAX_KINDS]
    least, *larger = degrees
    items = [*_items(examples, least, in_own_slot=True)]
    items += [
        WarmUp(0, job.spec, str(job.checkpoint), has_texts=True)
        for job in {job.checkpoint: job for job in reversed(examples)}.values()
    ]
    for degree in (least, *larger) if least > 1 else larger:
        items += _items(examples, degree)
    whole, rest = items[:1], [replace(item, spec=_shortened(item.spec)) for item in items[1:]]
    return tuple(replace(item, number=number) for number, item in enumerate((*whole, *rest)))


def _items(jobs: Sequence[AdmittedJob], degree: int, *, in_own_slot: bool = False) -> Iterator[WarmUp]:
    for job in jobs:
        ways: Sequence[Degrees] = ()
        if degree <= job.limits.step_degree and job.flops[Stage.DENOISE] <= MAX_FLOPS * degree:
            ways = job.limits.ways(degree)
        decodes = (degree,) if degree <= job.limits.max_decode_degree else ()
        if in_own_slot:  # nearly all decodes run on one rank
            ways, decodes = ways[:1], (1,)
        if ways or decodes:
            yield WarmUp(
                0, job.spec, str(job.checkpoint), tuple(ways), decodes=decodes, in_own_slot=in_own_slot
            )


def _urgency(job: AdmittedJob) -> tuple[float, ...]:
    """Those that arrive first, have the highest priority and the earliest deadline."""
    spec = job.spec
    deadline_s = math.inf if spec.deadline_s is None else spec.deadline_s
    return spec.arrival_s, -spec.priority, deadline_s


def _shortened(spec: JobSpec) -> JobSpec:
    """With a part of its prompts and without patches: merging them would delay the tasks of other jobs."""
    negative = spec.negative_prompt
    return replace(
        spec.without_patches(),
        prompt=spec.prompt[:MAX_PROMPT],
        negative_prompt=None if negative is None else negative[:MAX_PROMPT],
    )


def _name_of(item: WarmUp) -> str:
    spec = item.spec
    frames = f"x{spec.frames}" if spec.frames and spec.frames > 1 else ""
    return f"{spec.model or Path(item.checkpoint).name} {spec.size_text}{frames}"


def choose_kernels(
    ranks: Ranks, jobs: Sequence[AdmittedJob], *, profile: Profile | None, output_dir: Path
) -> KernelChoice:
    """The kernels of steps without an adapter; a job that continues keeps those that it began with."""
    general = [job for job in jobs if job.has_nominal_flops]
    if ranks.compile == "on" and jobs and not general:
        logger.warning("--compile on has no effect: no job has a general pipeline")
    if ranks.compile == "off" or not (general or ranks.are_on_gpus):
        return "own"
    if (kept := resume.kernels_of(output_dir, general)) is not None:
        return kept
    if ranks.compile == "on":
        return "compiled"
    if not ranks.are_on_gpus:
        return "own"
    costs, saved_s = CostModel(profile), 0.0
    for job in general:
        cost_class = costs.class_of(job)
        if costs.has_seen(cost_class, Stage.DENOISE, ALONE):
            saved_s += SAVED * (job.spec.steps or 0) * costs.task_s(cost_class, Stage.DENOISE, ALONE)
    spent_s = COMPILING_S * len({(job.checkpoint, job.shape) for job in general}) * ranks.num_ranks
    if saved_s <= spent_s:
        return "fused"
    logger.info(
        "compiling blocks: it should save %s and take %s of all ranks (--compile)",
        in_words(saved_s),
        in_words(spent_s),
    )
    return "compiled"
