"""Seconds of all tasks of a snapshot's jobs as plain numbers, for looks ahead in another thread."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from gfgen.graph import Stage, Task
from gfgen.layout import Degrees, Layout
from gfgen.runtime.core.openjobs import JobKind, kind_of
from gfgen.runtime.predict.cost_table import speed_up
from gfgen.snapshot import JobView, Snapshot


@dataclass(frozen=True, slots=True)
class KindCosts:
    """Seconds of the tasks of one kind of job."""

    stages_s: dict[Stage, float]
    """Encode and prepare."""
    steps_s: dict[Degrees, float]
    """A step, by degrees; the mean of all steps if some are reused."""
    decodes_s: dict[int, float]
    """A decode, by the number of ranks that it may use."""
    reused_s: float = 0.0
    """A step that a policy has reused."""
    spread: float = 0.0
    """How far the time of a step may be off, as a share of it."""


class RolloutCosts:
    """The costs of all kinds of jobs as plain numbers, so that another thread reads nothing that changes."""

    def __init__(self, snapshot: Snapshot) -> None:
        recent = {job.job_id: job for job in snapshot.recent}
        self._jobs = (snapshot.open, snapshot.busy, snapshot.parked, recent)
        self._kinds: dict[str, JobKind] = {}
        """A cache by job."""
        examples: dict[JobKind, JobView] = {}
        for job in itertools.chain.from_iterable(jobs.values() for jobs in self._jobs):
            kind = kind_of(job)
            if kind not in examples or (job.num_reusable and not examples[kind].num_reusable):
                examples[kind] = job
        self._costs = {kind: _kind_costs(snapshot, job) for kind, job in examples.items()}

    def like(self, job_id: str, other: str) -> None:
        """Give a job the costs of another one."""
        self._kinds[job_id] = self._kind(other)

    def spread(self, task: Task, layout: Layout) -> float:
        return self._costs[self._kind(task.job_id)].spread

    def _kind(self, job_id: str) -> JobKind:
        if job_id not in self._kinds:
            job = next(jobs[job_id] for jobs in self._jobs if job_id in jobs)
            self._kinds[job_id] = kind_of(job)
        return self._kinds[job_id]

    def task_s(self, task: Task, layout: Layout) -> float:
        costs = self._costs[self._kind(task.job_id)]
        match task.stage:
            case Stage.DENOISE | Stage.REUSE:
                return self._step_s(costs, layout.degrees)
            case Stage.DECODE:
                return self._decode_s(costs, layout.degree)
            case stage:
                return costs.stages_s[stage]

    def remaining_s(self, task: Task, layout: Layout, *, num_given_up: int = 0) -> float:
        kind = self._kind(task.job_id)
        costs, num_tasks = self._costs[kind], kind[2]
        num_steps = min(num_tasks - task.index - 1, num_tasks - 3)
        total_s = self._decode_s(costs, layout.degree)
        if num_steps > 0:
            num_given_up = min(num_given_up, num_steps)
            total_s += (num_steps - num_given_up) * self._step_s(costs, layout.degrees)
            total_s += num_given_up * costs.reused_s
        for stage in (Stage.ENCODE, Stage.PREPARE)[task.index :]:
            total_s += costs.stages_s[stage]
        return total_s

    def first_use_s(self, task: Task, layout: Layout) -> float:
        """A part of the tasks' times."""
        return 0.0

    def move_s(self, job_id: str, source: Layout | None, layout: Layout) -> float:
        """Moves are left out: they take a few milliseconds, a few times per job."""
        return 0.0

    @staticmethod
    def _step_s(costs: KindCosts, degrees: Degrees) -> float:
        """Unknown degrees cost the same as the next lower ones."""
        found = costs.steps_s.get(degrees)
        if found is None:
            degree = math.prod(degrees)
            found = min(s for other, s in costs.steps_s.items() if math.prod(other) <= degree)
            costs.steps_s[degrees] = found
        return found

    @staticmethod
    def _decode_s(costs: KindCosts, degree: int) -> float:
        """Unknown numbers of ranks cost the same as the next lower one."""
        if degree not in costs.decodes_s:
            lower = max(number for number in costs.decodes_s if number <= degree)
            costs.decodes_s[degree] = costs.decodes_s[lower]
        return costs.decodes_s[degree]


def _kind_costs(snapshot: Snapshot, job: JobView) -> KindCosts:
    """Several ranks are not believed to gain more than their number, or than guessed where they share cores.

    There a rank that computes alone is measured while others use the same cores, a shared step while nothing
    else does, and each beside whatever the machine did then: such measurements cannot be compared.
    """

    def task_s(index: int, layout: Layout) -> float:
        """With the price of a first step spread over all steps."""
        task, num_tasks = task_at(job, index), max(1, job.num_tasks - 3) if index == 2 else 1
        first_use_s = snapshot.costs.first_use_s(task, layout)
        return snapshot.costs.task_s(task, layout) + first_use_s / num_tasks

    def rank_sets(most: int) -> list[tuple[int, ...]]:
        numbers = itertools.takewhile(lambda n: n <= min(snapshot.max_degree, most), (1, 2, 4, 8))
        return [tuple(range(number)) for number in numbers]

    def step_s(layout: Layout) -> float:
        most = speed_up(layout.degree) if snapshot.shares_cores else layout.degree
        full_s = max(task_s(2, layout), task_s(2, Layout.single(0)) / most)
        return full_s + share * (reused_s - full_s)

    steps = [job.step_layout(ranks) for ranks in rank_sets(job.step_degree)]
    share, may_reuse = job.num_reused / max(1, job.num_tasks - 3), job.num_reused or job.num_reusable
    reused_s = snapshot.costs.task_s(task_at(job, 2).as_reused, Layout.single(0)) if may_reuse else 0.0
    return KindCosts(
        {stage: task_s(index, Layout.single(0)) for index, stage in enumerate((Stage.ENCODE, Stage.PREPARE))},
        {layout.degrees: step_s(layout) for layout in steps},
        {
            len(ranks): task_s(job.num_tasks - 1, job.decode_layout(ranks))
            for ranks in rank_sets(job.max_decode_degree)
        },
        reused_s,
        max(snapshot.costs.spread(task_at(job, 2), layout) for layout in steps),
    )


def task_at(job: JobView, index: int) -> Task:
    if index == 0:
        return Task(job.job_id, 0, Stage.ENCODE)
    if index == 1:
        return Task(job.job_id, 1, Stage.PREPARE)
    if index == job.num_tasks - 1:
        return Task(job.job_id, index, Stage.DECODE)
    return Task(job.job_id, index, Stage.DENOISE, index - 2)
