"""What the state keeps of each job, rank and dispatch. Only state.py changes these."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gfgen.graph import Task
from gfgen.layout import Layout
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.ipc.content import Content
from gfgen.runtime.ipc.migration import Transfer, plan_transfers
from gfgen.runtime.predict.cost import CostClass, CostModel
from gfgen.snapshot import JobView, RankView, RunningTask

LOOKAHEAD_S = 0.005
"""The guard unless told otherwise: dispatching takes a millisecond or two, on a busy machine more."""
LEAD_SHARE, MAX_LEAD_S = 0.02, 0.025
"""Of a task's predicted time, by which it may vary; the guard is what dispatching the next one takes. No more
than so long beside the guard: what is decided early may be decided wrongly, and long tasks can bear a gap."""
_ROUNDING_S = 1e-9
"""A wake-up comes at the predicted end less the lead, and sums of floats are not exact."""


@dataclass(slots=True, eq=False)
class Flight:
    """A dispatch that has not ended."""

    dispatch: Dispatch
    view: RunningTask
    """Its predicted end is put right when the task before it has ended."""
    is_foreseeable: bool
    """Its predicted end rests on a measurement, so that the next task may be queued by it."""
    lookahead_s: float = 0.0
    """How long before and after its predicted end the next task may be queued; 0: not at all."""
    failure: str | None = None
    void: bool = False
    lost: bool = False


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
    last_ended_s: float = 0.0
    """When that ended."""
    made_latents: int | None = None
    """The dispatch that made the last latents, which are in the slab until the job ends."""
    failures: Counter[int] = field(default_factory=Counter)
    num_lost_workers: int = 0
    doom: str | None = None
    """Why the job fails as soon as nothing of it is in flight."""
    is_cancelled: bool = False
    """That is because nobody wants it any more."""
    started_s: float | None = None
    busy_s: float = 0.0
    layouts: list[str] = field(default_factory=list)
    """As text, in the order of use; `last_layout` is the last of them."""
    last_layout: Layout | None = None
    warnings: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    arrived: bool = False
    parked_since_s: float = 0.0
    """Where it waits for its model: since when."""
    is_writing: bool = False
    written: Content | None = None
    """Its file, once that is there."""
    num_tasks: int = field(init=False)
    _next_task: Task | None = None
    _view: JobView | None = None
    _view_version: int = 0

    def __post_init__(self) -> None:
        self.num_tasks = self.job.trajectory.num_tasks

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def model(self) -> str:
        return self.job.spec.model or ""

    @property
    def first_open_index(self) -> int:
        """The first task that has not ended."""
        return min([self.next_index, *(flight.dispatch.task.index for flight in self.flights)])

    @property
    def next_task(self) -> Task:
        """The task at `next_index`, which is not past the last one."""
        if self._next_task is None or self._next_task.index != self.next_index:
            self._next_task = self.job.trajectory.task(self.next_index)
        return self._next_task

    def view(self, costs: CostModel) -> JobView:
        """What policies see of it; made anew when that, or the predictions, have changed."""
        task, view = self.next_task, self._view
        is_new = view is None or view.next_task is not task or view.last_layout is not self.holder
        if view is None or is_new or self._view_version != costs.version:
            view = self._view = self._new_view(task, costs)
            self._view_version = costs.version
        return view

    def _new_view(self, task: Task, costs: CostModel) -> JobView:
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
            remaining_s=costs.rest_alone_s(self.cost_class, task, self.num_tasks),
            last_layout=self.holder,
            uses_cfg=self.job.uses_cfg,
            max_sequence_degree=self.job.max_sequence_degree,
            shape=self.cost_class.shape,
            max_ulysses_degree=self.job.max_ulysses_degree,
            max_decode_degree=self.job.max_decode_degree,
            arrangement=costs.arrangement(self.cost_class),
        )

    def outcome(self, *, ended_s: float, error: str | None) -> JobOutcome:
        """How it has ended."""
        return JobOutcome(
            info=self.job.info,
            status="cancelled" if self.is_cancelled else "failed" if error else "done",
            arrival_s=self.arrival_s,
            started_s=self.started_s,
            ended_s=ended_s,
            deadline_s=self.deadline_s,
            busy_s=self.busy_s,
            layouts=tuple(self.layouts),
            error=error,
            warnings=tuple(self.warnings),
            timings=dict(self.timings),
            written=self.written,
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
    is_loading: bool = False
    """It has yet to load the models of the last change."""
    load_s: float = 0.0
    """Predicted, of that."""
    num_lives: int = 1
    flights: list[Flight] = field(default_factory=list)
    idle_since_s: float = 0.0
    ended_s: float = 0.0
    """When its part of the last finished task ended."""
    view: RankView | None = None
    """What policies saw last of this rank; None when it must be made anew."""

    @property
    def free_at_s(self) -> float:
        """When all that it was given is predicted to have ended, or has ended."""
        free_s = self.flights[-1].view.predicted_end_s if self.flights else self.idle_since_s
        return free_s + self.load_s if self.is_loading else free_s


def lookahead_of(predicted_s: float, *, lookahead_s: float) -> float:
    """The lead of a task that is predicted to last so long: long ones vary by more than short ones."""
    return lookahead_s + min(LEAD_SHARE * predicted_s, MAX_LEAD_S) if lookahead_s > 0 else 0.0


def ending(flights: Iterable[Flight], *, now_s: float) -> list[Flight]:
    """Those that are predicted to end within their lead, and do not fail.

    A task that is later than it should be may end at any time, or not for long: what is
    queued behind it would wait on a rank that others do not need.
    """
    return [
        flight
        for flight in flights
        if flight.lookahead_s > 0
        and -flight.lookahead_s <= flight.view.predicted_end_s - now_s <= flight.lookahead_s + _ROUNDING_S
        and flight.is_foreseeable
        and not flight.failure
    ]


def is_ending(flights: Sequence[Flight], *, now_s: float) -> bool:
    """One step ahead and no more: a single task, running, about to end, and not failing."""
    return len(flights) == 1 and bool(ending(flights, now_s=now_s))


def timed_out_after(timeout_s: float) -> str:
    """Why a job fails whose time is up."""
    return f"timed out {timeout_s:g} s after its arrival"
