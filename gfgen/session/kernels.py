"""Whether steps of general pipelines are compiled (`--compile`), decided once per run from its jobs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from gfgen.graph import Stage
from gfgen.models.fast.kernels import KernelChoice
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.files import resume
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile
from gfgen.session.ranks import Ranks
from gfgen.system.wording import in_words

logger = logging.getLogger(__name__)

COMPILING_S = 20.0
"""Per model and shape, on each rank. First compiled forwards took 1 to 11 s on an H200; twice that."""
SAVED = 0.2
"""Of a step. Compiled blocks saved 24% with Flux.1 and 31% with Stable Diffusion 3.5 on an H200
(benchmarks/results/2026-11-24-generic.md)."""
_ALONE = (1, 1, 1)


def choose_kernels(
    ranks: Ranks, jobs: Sequence[AdmittedJob], *, profile: Profile | None, output_dir: Path
) -> KernelChoice:
    """The kernels of all steps of pipelines without an adapter of their own in this run.

    A job that continues keeps those that it began with, since others would change its bits. On CPUs and
    with --compile off they are diffusers' own.
    """
    general = [job for job in jobs if job.has_nominal_flops]
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
        if costs.has_seen(cost_class, Stage.DENOISE, _ALONE):
            saved_s += SAVED * (job.spec.steps or 0) * costs.task_s(cost_class, Stage.DENOISE, _ALONE)
    spent_s = COMPILING_S * len({(job.checkpoint, job.shape) for job in general}) * ranks.num_ranks
    if saved_s <= spent_s:
        return "fused"
    logger.info(
        "compiling blocks: it should save %s and take %s of all ranks (--compile)",
        in_words(saved_s),
        in_words(spent_s),
    )
    return "compiled"
