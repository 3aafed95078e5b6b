"""A job as the driver sees it: one task, with the predicted time of all its tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gfgen.graph import Stage, Task, Trajectory
from gfgen.layout import Degrees
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.cost import CostClass, CostModel
from gfgen.runtime.predict.cost_table import Estimate, Provenance
from gfgen.runtime.predict.profile_file import Profile
from gfgen.snapshot import Arrangement

_ONE: Degrees = (1, 1, 1)


@dataclass(frozen=True, slots=True)
class WholeJob(Trajectory):
    """One task in place of all. It is a step to policies, because several ranks of a node can share it."""

    @property
    def num_tasks(self) -> int:
        return 1

    def task(self, index: int) -> Task:
        if index != 0:
            raise IndexError(f"job {self.job_id} is one task here, there is no task {index}")
        return Task(self.job_id, 0, Stage.DENOISE)

    def num_reused_from(self, index: int) -> int:
        """None: they are parts of the one task."""
        return 0

    def num_reusable_from(self, index: int) -> int:
        """None: the node's policy has the choice."""
        return 0

    def name_of(self, task: Task) -> str:
        return "the job"


def as_whole(job: AdmittedJob) -> AdmittedJob:
    steps = job.trajectory
    return replace(job, trajectory=WholeJob(*_parts_of(steps)))


def for_node(job: AdmittedJob, *, left_s: float | None) -> AdmittedJob:
    """The job as a node gets it: it arrives at once, and is due in `left_s`, whatever the node's clock says.

    The driver watches over its timeout.
    """
    whole = job.trajectory
    spec = replace(job.spec, arrival_s=0.0, deadline_s=left_s, deadline_at=None, timeout_s=None)
    steps = Trajectory(*_parts_of(whole))
    return replace(job, trajectory=steps, info=replace(job.info, spec=spec))


def _parts_of(steps: Trajectory) -> tuple[Any, ...]:
    return steps.job_id, steps.num_steps, steps.artifacts, steps.reused, steps.reusable


class WholeJobCosts(CostModel):
    """Durations of whole jobs: the sum of their tasks by the profile, then what jobs took on nodes."""

    def __init__(self, profile: Profile | None = None) -> None:
        super().__init__()
        self._tasks = CostModel(profile)
        self._parts: dict[CostClass, tuple[CostClass, int]] = {}
        """Of each class of whole jobs: the class of its tasks, and their number."""

    def class_of(self, job: AdmittedJob, *, batch: int = 1) -> CostClass:
        num_steps = job.trajectory.num_steps
        whole = self.cost_class(
            job.spec.model or "",
            f"{job.shape}, {num_steps} steps",
            flops={**job.flops, Stage.DENOISE: num_steps * job.flops[Stage.DENOISE]},
            state_bytes=job.state_bytes,
            limits=job.limits,
            batch=batch,
        )
        if whole not in self._parts:
            self._parts[whole] = (self._tasks.class_of(job), num_steps + 3)
        return whole

    def estimate(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> Estimate:
        """Degrees without a measurement deviate from the prediction as one rank does."""
        known = super().estimate(cost_class, stage, degrees)
        predicted = self._predicted(cost_class, degrees)
        if predicted is None or known.provenance is Provenance.MEASURED:
            return known
        alone = cost_class.measured.get((stage, _ONE))
        alone_predicted = self._predicted(cost_class, _ONE)
        if alone is None or alone_predicted is None:
            return predicted
        return predicted.scaled(alone.value / alone_predicted.seconds, predicted.provenance)

    def _predicted(self, cost_class: CostClass, degrees: Degrees) -> Estimate | None:
        """By the profile; None if it would be a guess."""
        tasks, num_tasks = self._parts[cost_class]
        step = self._tasks.estimate(tasks, Stage.DENOISE, degrees)
        if step.provenance is Provenance.GUESSED:
            return None
        first = Task("", 0, Stage.ENCODE)
        seconds = self._tasks.remaining_s(tasks, first, num_tasks, degrees)
        return Estimate(seconds, seconds, step.provenance)

    def _rest_s(
        self, stage_s: Callable[[Stage], float], task: Task, num_tasks: int, *, num_reused: int
    ) -> float:
        return stage_s(Stage.DENOISE)

    def arrangement(self, cost_class: CostClass) -> Arrangement:
        return self._tasks.arrangement(self._parts[cost_class][0])

    def is_measured(self, cost_class: CostClass) -> bool:
        return super().is_measured(cost_class) or self._tasks.is_measured(self._parts[cost_class][0])
