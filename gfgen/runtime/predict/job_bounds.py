"""Bounds on one job, and the least duration of its denoising step, which keeps its ranks from others."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gfgen.errors import Problem
from gfgen.graph import Stage
from gfgen.job.reader import due_at
from gfgen.layout import Degrees
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CPU
from gfgen.runtime.predict.cost import CostClass, CostModel
from gfgen.runtime.predict.cost_table import Provenance
from gfgen.runtime.predict.profile_file import Profile
from gfgen.system.wording import in_words

_FASTEST_CORE_FLOPS_PER_S = 2e11
"""An upper bound for fp32: two AVX-512 units at 3 GHz have a nominal 192 GFLOP/s."""
_FASTEST_GPU_FLOPS_PER_S = 2.5e15
"""An upper bound for bf16: a B200 has a nominal 2.25 PFLOP/s, an H200 0.99."""
_OPTIONS = {"size": "--max-pixels", "frames": "--max-frames", "steps": "--max-steps"}


@dataclass(frozen=True, slots=True)
class JobBounds:
    """Upper bounds on one job; None for no bound."""

    pixels: int | None = None
    """Width x height."""
    frames: int | None = None
    steps: int | None = None
    step_s: float | None = None
    """Predicted time of one denoising step."""


class StepTimes:
    """The least duration of a denoising step: of the profile, or at a rate that no machine exceeds."""

    def __init__(self, profile: Profile | None, *, kind: str, num_ranks: int) -> None:
        self._costs = CostModel(profile)
        self._num_ranks = num_ranks
        cores = len(os.sched_getaffinity(0))
        self._most_flops_per_s = (
            min(num_ranks, cores) * _FASTEST_CORE_FLOPS_PER_S
            if kind == CPU
            else num_ranks * _FASTEST_GPU_FLOPS_PER_S
        )
        self._least: dict[tuple[str, str], tuple[float, bool]] = {}

    def least_s(self, job: AdmittedJob) -> float:
        return self._of(job)[0]

    def in_words(self, job: AdmittedJob) -> str:
        """'one step of 4,000 frames in 128x128 is predicted to take 2 h 20 min here'."""
        seconds, is_bound = self._of(job)
        spec = job.spec
        frames = f"{spec.frames:,} frames in " if (spec.frames or 1) > 1 else ""
        verb = "takes at least" if is_bound else "is predicted to take"
        return f"one step of {frames}{spec.size_text} {verb} {in_words(seconds)} here"

    def _of(self, job: AdmittedJob) -> tuple[float, bool]:
        key = (job.spec.model or "", job.shape)
        if key not in self._least:
            cost_class = self._costs.class_of(job)
            ways = {way for number in range(1, self._num_ranks + 1) for way in job.limits.ways(number)}
            self._least[key] = min(self._on(cost_class, degrees) for degrees in ways)
        return self._least[key]

    def _on(self, cost_class: CostClass, degrees: Degrees) -> tuple[float, bool]:
        stage = Stage.REFINE if cost_class.num_refined else Stage.DENOISE
        estimate = self._costs.estimate(cost_class, stage, degrees)
        if estimate.provenance is not Provenance.GUESSED:
            return estimate.seconds, False
        return cost_class.flops[stage] / self._most_flops_per_s, True


def beyond(
    jobs: Sequence[AdmittedJob], bounds: JobBounds, times: StepTimes | None
) -> Iterator[tuple[AdmittedJob, Problem]]:
    """A problem for each bound that a job exceeds; it names the option that raises the bound."""
    for job in jobs:
        spec, num_steps = job.spec, job.trajectory.num_steps
        numbers = (
            ("size", spec.size_text, math.prod(spec.made_size), bounds.pixels),
            ("frames", str(spec.frames), spec.frames or 0, bounds.frames),
            ("steps", str(num_steps), num_steps, bounds.steps),
        )
        for field, shown, number, most in numbers:
            if most is not None and number > most:
                yield job, Problem(spec.line, field, shown, f"more than {_OPTIONS[field]} {most:,} allows")
    if bounds.step_s is not None:
        yield from too_long(jobs, times, bounds.step_s, f"--max-step-time {in_words(bounds.step_s)}")


def too_long(
    jobs: Sequence[AdmittedJob], times: StepTimes | None, most_s: float, named: str
) -> Iterator[tuple[AdmittedJob, Problem]]:
    """A problem for each job with a step that takes longer than `most_s`; messages call it `named`."""
    assert times is not None
    for job in jobs:
        if times.least_s(job) > most_s:
            less = "fewer frames or a smaller size" if (job.spec.frames or 1) > 1 else "a smaller size"
            text = f"{times.in_words(job)}, more than {named}; ask for {less}"
            yield job, Problem(job.spec.line, None, None, text)


def certainly_late(jobs: Sequence[AdmittedJob], times: StepTimes, *, now: float) -> Iterator[Problem]:
    """A warning for each job that cannot make a single step before its deadline, which has not passed yet."""
    for job in jobs:
        arrives_at = now + job.spec.arrival_s
        due = due_at(job.spec, arrived_at=arrives_at)
        if due is not None and arrives_at < due < arrives_at + times.least_s(job):
            text = f"{times.in_words(job)}; it ends after its deadline: {job.job_id} runs and counts as late"
            yield Problem(job.spec.line, None, None, text)
