"""Which steps of a job run no transformer: by the job's `reuse` and its schedule alone, before it starts.

A reused step extrapolates the transformer's guided output linearly from the last two computed ones. So the
first two steps are computed, the last one, and those around a change of the transformer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from gfgen.errors import Problem
from gfgen.graph import Artifact, Trajectory
from gfgen.job.fields import IF_LATE
from gfgen.job.spec import JobSpec

NUM_FIRST, NUM_LAST = 2, 1
"""Steps at either end that are always computed."""
LARGEST_SHARES = {30: 0.7, 20: 0.5, 12: 0.4}
"""The largest share from so many steps on. Elsewhere the job with as many steps as would be computed is
nearer to the full result, on the built-in model.

Source: benchmarks/results/precision.md.
"""
MIN_STEPS, MANY_STEPS, MIN_NUMBER = min(LARGEST_SHARES), max(LARGEST_SHARES), 3
"""The fewest reused steps below MANY_STEPS, for the same reason."""
IF_LATE_SHARE = 0.4
"""Of the steps, which a policy may have reused."""
Output = tuple[tuple[int, ...], str]
KEPT_OUTPUTS = ("reuse_0", "reuse_1")
"""Tensors of latents: the last two computed outputs, in turn."""


def with_reuse(
    trajectory: Trajectory, spec: JobSpec, *, output: Output | None, switch: int | None = None
) -> Trajectory:
    """The trajectory of a job as run with its reused steps, and with room for outputs in its latents.

    output: None where the latents have room for anything.
    switch: the first step of a second transformer.
    """
    if spec.reuse is None:
        return trajectory
    artifacts = trajectory.artifacts
    if output is not None:
        artifacts = tuple(_with_outputs(each, output) for each in artifacts)
    if spec.reuse == IF_LATE:
        steps = chosen_steps(trajectory.num_steps, IF_LATE_SHARE, switch=switch)
        return replace(trajectory, artifacts=artifacts, approximable=steps)
    assert isinstance(spec.reuse, float)
    steps = chosen_steps(trajectory.num_steps, spec.reuse, switch=switch)
    return replace(trajectory, artifacts=artifacts, approximate=steps)


def chosen_steps(num_steps: int, share: float, *, switch: int | None = None) -> tuple[int, ...]:
    """At most this share of the steps, spread evenly over those that may be reused."""
    around = () if switch is None else (switch - 1, switch, switch + 1)
    may_be = [step for step in range(NUM_FIRST, num_steps - NUM_LAST) if step not in around]
    number = min(int(share * num_steps + 1e-9), len(may_be))
    return tuple(may_be[int((place + 0.5) * len(may_be) / number)] for place in range(number))


def reuse_problems(spec: JobSpec) -> Iterator[Problem]:
    """Steps and shares at which a job with fewer steps gives a better result in the same time."""
    if spec.reuse is None or spec.steps is None:
        return
    if spec.steps < MIN_STEPS:
        accepted = f"needs at least {MIN_STEPS} steps, and this job has {spec.steps}; leave it out"
        yield Problem.of("reuse", spec.reuse, accepted)
        return
    if not isinstance(spec.reuse, float):
        return
    most = next(share for least, share in LARGEST_SHARES.items() if spec.steps >= least)
    number = int(spec.reuse * spec.steps + 1e-9)
    better = f"{spec.steps - number} steps give a better result in the same time"
    if spec.reuse > most:
        accepted = f"with {spec.steps} steps at most {most:g} is accepted: {better}"
        yield Problem.of("reuse", spec.reuse, accepted)
    elif spec.steps < MANY_STEPS and number < MIN_NUMBER:
        least = MIN_NUMBER / spec.steps
        accepted = f"with {spec.steps} steps at least {math.ceil(100 * least) / 100:g} is accepted: {better}"
        yield Problem.of("reuse", spec.reuse, accepted)


def _with_outputs(artifact: Artifact, output: Output) -> Artifact:
    if artifact.name != "latents":
        return artifact
    return replace(artifact, fields=(*artifact.fields, *((name, *output) for name in KEPT_OUTPUTS)))
