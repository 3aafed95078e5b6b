"""Small admitted jobs and simulated runs for tests of the control plane."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gfgen.graph import Artifact, Stage, Trajectory
from gfgen.job.reader import JobSource, ParsedJobs
from gfgen.job.spec import JobSpec
from gfgen.layout import Limits
from gfgen.models.geometry.checkpoint import Checkpoint
from gfgen.models.geometry.pipeline import PipelineGeometry, pipeline_geometry
from gfgen.policies.catalog import load_policy
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, Event
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.files.manifest import is_finished, read_manifest
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.messages import MemoryUse
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes.child import Patience
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.starting import wait_ready
from gfgen.runtime.simulate.simulation import SimulatedBackend, SimulatedTimes

STEP_S = 0.1


def read_jobs(*files: Path | str, has_bar: bool = False, **fields: Any) -> ParsedJobs:
    """All jobs of these files and of `prompts`."""
    return JobSource(files=tuple(map(str, files)), **fields).read(has_bar=has_bar)


def finished_jobs(path: Path, infos: Sequence[JobInfo]) -> set[str]:
    """Ids of the jobs that a manifest has as finished."""
    lines = read_manifest(path)
    return {info.job_id for info in infos if is_finished(info, lines.get(info.job_id), path.parent)}


def make_job(
    job_id: str, *, steps: int = 4, shape: str = "small", uses_cfg: bool = False, **fields: Any
) -> AdmittedJob:
    fields.setdefault("prompt", f"prompt of {job_id}")
    spec = JobSpec(id=job_id, model="fake", steps=steps, **fields)
    spec = replace(spec, width=16, height=16, frames=1)
    artifacts = (
        Artifact("prompt", (("embeds", (1, 4, 8), "float32"),)),
        Artifact("condition", ()),
        Artifact("latents", (("latents", (1, 4, 1, 2, 2), "float32"),)),
        Artifact("frames", (("frames", (1, 16, 16, 3), "uint8"),)),
    )
    trajectory = Trajectory(job_id, steps, artifacts)
    info = JobInfo(spec, spec, trajectory.num_tasks, f"{job_id}.png", f"hash of {job_id}", "fake")
    flops = dict.fromkeys(Stage, 1e9)
    return AdmittedJob(info, trajectory, shape, flops, Path("fake"), limits=Limits(uses_cfg, 8))


def with_limits(job: AdmittedJob, **limits: Any) -> AdmittedJob:
    return replace(job, limits=replace(job.limits, **limits))


class Recorder(Observer):
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.dispatches: list[Dispatch] = []
        self.events: list[Event] = []
        self.outcomes: list[JobOutcome] = []
        self.latents: dict[str, Any] = {}
        self.memory: Mapping[int, MemoryUse] = {}

    def measured(self, use: Mapping[int, MemoryUse]) -> None:
        self.memory = use

    def dispatched(self, dispatch: Dispatch) -> None:
        self.dispatches.append(dispatch)

    def applied(self, event: Event) -> None:
        self.events.append(event)

    def ended(self, outcome: JobOutcome) -> None:
        self.outcomes.append(outcome)

    @property
    def end_order(self) -> list[str]:
        return [outcome.info.job_id for outcome in self.outcomes]

    def ranks_of(self, job_id: str) -> list[tuple[int, ...]]:
        return [d.layout.ranks for d in self.dispatches if d.task.job_id == job_id]


def simulated_control(
    jobs: Sequence[AdmittedJob],
    *,
    policy: str = "srtf",
    num_ranks: int = 2,
    lookahead_s: float = 0.0,
    max_degree: int | None = None,
    task_s: Callable[[Dispatch], float] = lambda _: STEP_S,
    journal: Any = None,
    backend: Callable[..., SimulatedBackend] = SimulatedBackend,
    closes_s: float | None = None,
    islands: Sequence[Sequence[int]] | None = None,
    near: Sequence[Sequence[int]] | None = None,
    intake: Callable[[Clock], Any] = lambda _: None,
    chooser: Any = None,
    reads_s: Mapping[str, float] | None = None,
    shares_cores: bool = False,
) -> tuple[Control, Recorder]:
    """A control loop over simulated ranks, not yet run, and what will watch it."""
    clock, recorder = Clock(virtual=True), Recorder()
    costs = CostModel(shares_cores=shares_cores)
    state = State(
        jobs,
        RunStart(
            num_ranks=num_ranks,
            lookahead_s=lookahead_s,
            max_degree=max_degree,
            closes_s=closes_s,
            islands=islands,
            near=near,
            reads_s=reads_s or {},
        ),
        clock=clock,
        costs=costs,
    )
    control = Control(
        jobs,
        state=state,
        backend=backend(clock, num_ranks=num_ranks, times=SimulatedTimes(task_s=task_s)),
        policy=load_policy(policy),
        observers=[recorder],
        journal=journal,
        steering=Steering(intake=intake(clock), chooser=chooser),
    )
    return control, recorder


def simulate(jobs: Sequence[AdmittedJob], **options: Any) -> Recorder:
    """Run jobs to their end on simulated ranks."""
    control, recorder = simulated_control(jobs, **options)
    control.run()
    return recorder


@contextlib.contextmanager
def patient(pool: WorkerPool, patience: Patience | None) -> Iterator[None]:
    """The pool waits this long for its processes."""
    usual = pool.patience
    pool.patience = patience or usual
    try:
        yield
    finally:
        pool.patience = usual


def revived(pool: WorkerPool) -> WorkerPool:
    """With all its ranks, who have not died yet as far as it remembers."""
    wait_ready(pool)
    pool.deaths.clear()
    return pool


_VAE: dict[str, Any] = {
    "block_out_channels": [1, 2, 3, 4],
    "temperal_downsample": [False, True, True],
    "scale_factor_spatial": 8,
}


def geometry_of(name: str, *, index: dict[str, Any] | None = None, **configs: Any) -> PipelineGeometry:
    """Of a class of diffusers with these configs, without files."""
    configs = {"vae": _VAE, **configs}
    index = {"_class_name": name, **{part: ["diffusers", "X"] for part in configs}, **(index or {})}
    return pipeline_geometry(Checkpoint(Path("nowhere"), index, configs, {}))
