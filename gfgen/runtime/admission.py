"""Admission: what a job file asks for becomes jobs as they will run, before anything starts.

The model's geometry fills in defaults, rounds sizes as its pipeline would, and refuses what
the model cannot do. All problems of all jobs are collected, so that a person mends a file
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gfgen.errors import JobError, ModelError, Problem
from gfgen.graph import Stage, Trajectory
from gfgen.identity import output_name, spec_hash, with_defaults
from gfgen.jobspec import JobSpec
from gfgen.models.geometry import Geometry, max_sequence_degree
from gfgen.runtime.observer import JobInfo


@dataclass(frozen=True, slots=True)
class AdmittedJob:
    """A job that can run: as asked and as run, with its trajectory and what it costs."""

    info: JobInfo
    trajectory: Trajectory
    shape: str
    """The cost model's key: jobs of one model and shape take equally long."""
    flops: Mapping[Stage, float]
    checkpoint: Path
    uses_cfg: bool = False
    max_sequence_degree: int = 1
    """The most ranks that can share the tokens of one guidance branch."""

    @property
    def job_id(self) -> str:
        return self.info.job_id

    @property
    def spec(self) -> JobSpec:
        return self.info.spec

    @property
    def state_bytes(self) -> int:
        """What moves when the job moves between two steps."""
        return self.trajectory.artifact("latents").size_bytes


def arriving_after(job: AdmittedJob, offset_s: float) -> AdmittedJob:
    """The same job, arriving so much later; its relative deadline counts from then."""
    spec = replace(job.spec, arrival_s=job.spec.arrival_s + offset_s)
    return replace(job, info=replace(job.info, spec=spec))


@dataclass(frozen=True, slots=True)
class Model:
    """A model that jobs of this run use."""

    name: str
    checkpoint: Path
    geometry: Geometry


def admit(
    specs: Iterable[JobSpec], *, default_model: str, find_model: Callable[[str], Model]
) -> tuple[tuple[AdmittedJob, ...], tuple[Problem, ...]]:
    """The jobs that can run, and everything that is wrong with the others.

    `find_model` raises ModelError for a name without a usable checkpoint; each name is
    looked up once.
    """
    models: dict[str, Model | ModelError] = {}
    jobs: list[AdmittedJob] = []
    problems: list[Problem] = []
    for spec in specs:
        name = spec.model or default_model
        if name not in models:
            models[name] = _find(find_model, name)
        model = models[name]
        if isinstance(model, ModelError):
            problems.append(Problem(spec.line, "model", None, str(model)))
            continue
        try:
            jobs.append(_admit_one(spec, model))
        except JobError as error:
            problems.append(error.at_line(spec.line))
    return tuple(jobs), tuple(problems)


def _find(find_model: Callable[[str], Model], name: str) -> Model | ModelError:
    try:
        return find_model(name)
    except ModelError as error:
        return error


def _admit_one(spec: JobSpec, model: Model) -> AdmittedJob:
    asked = with_defaults(spec, model=model.name)
    run = model.geometry.resolve(asked)
    trajectory = model.geometry.trajectory(run)
    info = JobInfo(
        asked=asked,
        spec=run,
        num_tasks=trajectory.num_tasks,
        file=output_name(run, "image" if run.frames == 1 else "video"),
        spec_hash=spec_hash(asked),
        family=model.geometry.family,
    )
    return AdmittedJob(
        info,
        trajectory,
        shape=model.geometry.shape_key(run),
        flops={stage: model.geometry.flops(run, stage) for stage in Stage},
        checkpoint=model.checkpoint,
        uses_cfg=model.geometry.uses_cfg(run),
        max_sequence_degree=max_sequence_degree(model.geometry, run),
    )
