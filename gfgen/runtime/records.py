"""What the state keeps of each job, rank and dispatch. Only state.py changes these."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from gfgen.graph import Task
from gfgen.layout import Layout
from gfgen.runtime.admission import AdmittedJob
from gfgen.runtime.cost import CostClass, CostModel
from gfgen.runtime.dispatch import Dispatch
from gfgen.runtime.migration import Transfer, plan_transfers
from gfgen.runtime.observer import JobOutcome
from gfgen.snapshot import JobView, RankView, RunningTask

_ROUNDING_S = 1e-9
"""A wake-up comes at the predicted end less the guard, and sums of floats are not exact."""


@dataclass(slots=True, eq=False)
class Flight:
    """A dispatch that has not ended on all of its ranks."""

    dispatch: Dispatch
    view: RunningTask
    pending: set[int]
    is_foreseeable: bool
    """Its predicted end rests on a measurement, so that the next task may be queued by it."""
    failure: str | None = None
    void: bool = False
    lost: bool = False
    started_s: float = math.inf
    busy_s: float = 0.0


@dataclass(slots=True, eq=False)
class JobRecord:
    """A job that has not ended."""

    job: AdmittedJob
    cost_class: CostClass
    arrival_s: float
    deadline_s: float | None
    next_index: int = 0
    flights: list[Flight] = field(default_factory=list)
    """What was dispatched and has not ended: at most a running task and a queued one."""
    holder: Layout | None = None
    """The layout that holds the input of the next task, or will when its producer ends."""
    holder_lives: tuple[int, ...] = ()
    """Which lives of the holder's ranks hold it: what a rank held dies with its process."""
    producer: int | None = None
    """The dispatch that makes that input."""
    last_completed: int | None = None
    failures: Counter[int] = field(default_factory=Counter)
    num_lost_workers: int = 0
    doom: str | None = None
    """Why the job fails as soon as nothing of it is in flight."""
    started_s: float | None = None
    busy_s: float = 0.0
    layouts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    arrived: bool = False
    is_writing: bool = False

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def num_tasks(self) -> int:
        return self.job.trajectory.num_tasks

    def view(self, costs: CostModel) -> JobView:
        """What policies see of it."""
        task = self.job.trajectory.task(self.next_index)
        spec = self.job.spec
        return JobView(
            job_id=self.job_id,
            tag=spec.tag,
            model=spec.model or "",
            arrival_s=self.arrival_s,
            deadline_s=math.inf if self.deadline_s is None else self.deadline_s,
            precedence=-spec.priority,
            next_task=task,
            num_tasks=self.num_tasks,
            remaining_s=costs.remaining_s(self.cost_class, task, self.num_tasks, (1, 1, 1)),
            last_layout=self.holder,
            uses_cfg=self.job.uses_cfg,
            max_sequence_degree=self.job.max_sequence_degree,
            max_ulysses_degree=self.job.max_ulysses_degree,
        )

    def outcome(self, *, ended_s: float, error: str | None) -> JobOutcome:
        """How it has ended."""
        return JobOutcome(
            info=self.job.info,
            status="failed" if error else "done",
            arrival_s=self.arrival_s,
            started_s=self.started_s,
            ended_s=ended_s,
            deadline_s=self.deadline_s,
            busy_s=self.busy_s,
            layouts=tuple(self.layouts),
            error=error,
            warnings=tuple(self.warnings),
            timings=dict(self.timings),
        )

    def transfers(self, task: Task, *, source: Layout | None, destination: Layout) -> tuple[Transfer, ...]:
        """What has to move for a task; nothing where the latents are already, or are in the slab."""
        if task.index < 2 or source is None or source == destination:
            return ()
        latents = self.job.trajectory.artifact("latents")
        return plan_transfers(latents, source=source, destination=destination)


@dataclass(slots=True, eq=False)
class RankRecord:
    """A rank, living or not."""

    rank: int
    is_ready: bool = False
    is_retired: bool = False
    num_lives: int = 1
    flights: list[Flight] = field(default_factory=list)
    view: RankView | None = None
    """What policies saw last of this rank; None when it must be made anew."""


def ends_within_guard(flights: list[Flight], now_s: float, guard_s: float) -> bool:
    """One step ahead and no more: a single task, running, about to end, and not failing.

    A task that is later than it should be may end at any time, or not for long: what is
    queued behind it would wait on a rank that others do not need.
    """
    if guard_s <= 0 or len(flights) != 1 or flights[0].failure or not flights[0].is_foreseeable:
        return False
    left_s = flights[0].dispatch.predicted_end_s - now_s
    return -guard_s <= left_s <= guard_s + _ROUNDING_S
