"""A job that has not ended: how far it is, what went wrong, and what it used."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from dataclasses import dataclass, field

from gfgen.errors import REFUSALS
from gfgen.graph import FIRST_STEP, Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.control.ranks import Flight
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import NOTHING_GIVEN_UP, GivenUp
from gfgen.runtime.core.events import TaskDone
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.predict.cost import CostClass, CostModel
from gfgen.snapshot import JobView

logger = logging.getLogger(__name__)

MAX_TASK_FAILURES = 2  # a task that fails this often fails its job
_REFUSED = tuple(f"{kind.__name__}:" for kind in REFUSALS)
_OF_SHAPES = re.compile(r"RuntimeError:.*\b(sizes?|shapes?|dimensions?|padding)\b", re.IGNORECASE)
"""A failure that follows from a job's size and arguments, not from the machine."""
MAX_LOST_WORKERS = 3  # a job under which this many workers died fails


@dataclass(slots=True)
class Progress:
    """How far a job is, and where the input of its next task is."""

    next_index: int = 0
    holder: Layout | None = None
    is_held: bool = False  # all ranks of the holder have lived since: what a rank holds dies with its process
    producer: int | None = None  # the dispatch that makes that input
    last_completed: int | None = None
    last_ended_s: float = 0.0  # when the last completed dispatch ended
    made_latents: int | None = None  # the dispatch of the last latents, which stay in the slab

    def begin(self, index: int, layout: Layout, number: int) -> None:
        """A dispatch makes the output of this task on this layout."""
        self.next_index, self.producer = index + 1, number
        self.holder, self.is_held = layout, True

    def complete(self, number: int, ended_s: float, *, is_decode: bool) -> None:
        self.last_completed, self.last_ended_s = number, ended_s
        if not is_decode:
            self.made_latents = number

    def go_back(self, index: int, producer: int | None) -> None:
        """Run this task again, from what the producer has left in the slab."""
        self.next_index = min(self.next_index, index)
        self.holder, self.producer = None, producer


@dataclass(slots=True)
class Trouble:
    warnings: list[str] = field(default_factory=list)
    failures: Counter[int] = field(default_factory=Counter)
    num_lost_workers: int = 0
    doom: str | None = None  # why the job fails as soon as nothing of it is in flight
    is_refused: bool = False  # failed because of the job's arguments, in a step or decode twice
    is_cancelled: bool = False  # that is because nobody wants it any more

    def fail(self, reason: str) -> None:
        """The first reason counts."""
        self.doom = self.doom or reason


@dataclass(slots=True, eq=False)
class JobRecord:
    job: AdmittedJob
    cost_class: CostClass
    arrival_s: float
    deadline_s: float  # infinity without a deadline
    job_id: str = field(init=False)
    model: str = field(init=False)
    patches: str = field(init=False)  # of the job, as a text by which they are compared; empty without any
    owner: str | None = field(init=False)
    num_tasks: int = field(init=False)
    file_bytes: int = field(init=False)
    arrived: bool = False
    place: int | None = None  # of a job that has not been open yet: where it stands in the file
    flights: list[Flight] = field(default_factory=list)  # not ended: a running and a queued one at most
    progress: Progress = field(default_factory=Progress)
    trouble: Trouble = field(default_factory=Trouble)
    outcome: JobOutcome = field(init=False)  # what ranks did for it, and its files; `end` completes it
    given_up: GivenUp = NOTHING_GIVEN_UP
    _last_layout: Layout | None = None
    _view: JobView | None = None
    _view_version: int = 0

    def __post_init__(self) -> None:
        self.job_id, self.num_tasks = self.job.job_id, self.job.trajectory.num_tasks
        spec = self.job.spec
        self.model, self.owner = spec.model or "", spec.owner
        self.patches, self.file_bytes = str(spec.patches or ""), self.job.file_bytes
        due_s = None if self.deadline_s == math.inf else self.deadline_s
        self.outcome = JobOutcome(self.job.info, "done", self.arrival_s, deadline_s=due_s)

    @property
    def first_open_index(self) -> int:
        return min([self.progress.next_index, *(flight.dispatch.task.index for flight in self.flights)])

    @property
    def is_writing(self) -> bool:
        return self.progress.next_index == self.num_tasks and not self.flights

    @property
    def next_task(self) -> Task:
        """The task at `next_index`, which is not past the last one."""
        return self.job.trajectory.task(self.progress.next_index)

    def needs_patches(self, stage: Stage) -> bool:
        """Whether tasks of this stage need the job's patches, and no others, in the weights."""
        # Those of general pipelines may change text encoders.
        return stage is Stage.DENOISE or (self.job.has_nominal_flops and stage is not Stage.APPROXIMATE)

    @property
    def times_out_s(self) -> float:
        """When its time is up; infinity without a timeout."""
        timeout_s = self.job.spec.timeout_s
        return math.inf if timeout_s is None else self.arrival_s + timeout_s

    def time_out(self) -> None:
        assert self.job.spec.timeout_s is not None
        self.trouble.fail(timed_out_after(self.job.spec.timeout_s))

    def view(self, costs: CostModel) -> JobView:
        """What policies see of it; a new one when that, or the predictions, have changed."""
        progress, view, cost_class, job = self.progress, self._view, self.cost_class, self.job
        if (
            view is not None
            and self._view_version == cost_class.version
            and view.next_task.index == progress.next_index
            and view.last_layout is progress.holder
        ):
            return view
        task = self.next_task
        spec, trajectory, limits = job.info.spec, job.trajectory, job.limits
        num_approximate = trajectory.num_approximate_from(task.index) if trajectory.approximate else 0
        remaining_s = costs.remaining_s(cost_class, task, self.num_tasks, num_approximate=num_approximate)
        num_approximable, saving_s = 0, 0.0
        if trajectory.approximable:
            num_approximable = trajectory.num_approximable_from(task.index)
            least_s = costs.remaining_s(cost_class, task, self.num_tasks, num_approximate=num_approximable)
            saving_s = max(0.0, remaining_s - least_s)
        self._view_version = cost_class.version
        self._view = JobView(
            job_id=self.job_id,
            tag=spec.tag,
            model=self.model,
            arrival_s=self.arrival_s,
            deadline_s=self.deadline_s,
            precedence=-spec.priority,
            next_task=task,
            num_tasks=self.num_tasks,
            remaining_s=remaining_s,
            last_layout=progress.holder,
            uses_cfg=limits.uses_cfg,
            max_sequence_degree=limits.max_sequence_degree,
            shape=cost_class.kind,
            max_ulysses_degree=limits.max_ulysses_degree,
            max_decode_degree=limits.max_decode_degree,
            arrangement=costs.arrangement(cost_class),
            patches=self.patches,
            switch_s=costs.switch_s(cost_class),
            owner=self.owner,
            num_approximate=len(trajectory.approximate),
            num_approximable=num_approximable,
            saving_s=saving_s,
            may_approximate=num_approximable > 0 and trajectory.variant(task) is not None,
            write_s=cost_class.write_s,
            num_refined=min(trajectory.num_refined, self.num_tasks - 1),  # a whole job is one task
        )
        return self._view

    def use(self, stage: Stage, layout: Layout, event: TaskDone) -> None:
        """Note what ranks did for it."""
        outcome, busy_s = self.outcome, event.busy_s
        if outcome.started_s is None:
            outcome.started_s = event.started_s
        outcome.busy_s += busy_s
        outcome.rank_s += event.rank_s
        outcome.first_uses_s += busy_s if event.is_first_use else 0.0
        if peaks := [each.peak_bytes for each in event.times if each.peak_bytes is not None]:
            outcome.peak_bytes = max(outcome.peak_bytes or 0, *peaks)
        outcome.timings[stage] = outcome.timings.get(stage, 0.0) + busy_s
        if self._last_layout != layout:
            self._last_layout = layout
            outcome.layouts += (str(layout),)

    def give_up(self, task: Task, *, late_s: float) -> None:
        """A policy had a step approximated of a job that would have been this late without."""
        assert task.step is not None
        why = self.given_up.why
        if why is None:
            late = f"it was predicted to end {late_s:.1f} s late"
            reason = late if late_s > 0 else "other jobs were likely to make it late"
            why = f"from step {task.step + 1} on, when {reason}"
        self.given_up = GivenUp(tuple(sorted({*self.given_up.steps, task.step})), why)

    def end(self, *, ended_s: float, error: str | None) -> JobOutcome:
        outcome, trouble, trajectory = self.outcome, self.trouble, self.job.trajectory
        num_approximate = len(trajectory.approximate) - trajectory.num_approximate_from(self.first_open_index)
        outcome.info, outcome.ended_s, outcome.error = self.job.info, ended_s, error
        outcome.status = "done" if error is None else "cancelled" if trouble.is_cancelled else "failed"
        outcome.is_refused = trouble.is_refused and error == trouble.doom
        outcome.warnings = tuple(trouble.warnings)
        outcome.num_approximate = num_approximate + len(self.given_up.steps)
        outcome.why_approximate = self.given_up.why
        decode, made = self.num_tasks - 1, self.progress.made_latents
        if outcome.status == "failed" and made is not None and self.first_open_index >= decode:
            outcome.left = {"next_index": decode, "producer": made, "given_up": self.given_up}
        return outcome

    def fail_flight(self, flight: Flight, reason: str, *, is_lost: bool) -> None:
        """Go back to a failed task; what is queued on its output is void and ends by itself."""
        task, number = flight.dispatch.task, flight.dispatch.number
        for queued in [other for other in self.flights if other.dispatch.number > number]:
            queued.failure, queued.is_void = "its input failed", True
        if is_lost or not flight.is_void:
            self.blame(task, reason, is_lost=is_lost)
        # A task that fails early may do so before its producer has reported.
        under_way = [other.dispatch.number for other in self.flights if other.dispatch.number < number]
        self.progress.go_back(task.index, under_way[0] if under_way else self.progress.last_completed)

    def lose_frames(self, reason: str, *, is_lost: bool) -> None:
        """The decode runs again, from latents in the slab."""
        progress = self.progress
        progress.last_completed = progress.made_latents
        progress.go_back(self.num_tasks - 1, progress.made_latents)
        self.blame(self.next_task, reason, is_lost=is_lost)

    def blame(self, task: Task, reason: str, *, is_lost: bool) -> None:
        """Count a failure of a task, or the death of a worker that ran it; too many fail the job."""
        trouble, name = self.trouble, self.job.trajectory.name_of(task)
        what = "lost its worker" if is_lost else "failed"
        logger.warning("job %s: %s %s: %s", self.job_id, name, what, reason)
        trouble.warnings.append(f"{name} {what} ({reason})")
        trouble.num_lost_workers += is_lost
        trouble.failures[task.index] += not is_lost
        if trouble.num_lost_workers >= MAX_LOST_WORKERS:
            trouble.fail(f"{trouble.num_lost_workers} workers died under it: {reason}")
        is_last_try = trouble.failures[task.index] >= MAX_TASK_FAILURES
        is_refusal = reason.startswith(_REFUSED) and (is_last_try or task.index < FIRST_STEP)
        if not is_lost and (is_refusal or (is_last_try and _OF_SHAPES.match(reason))):
            trouble.is_refused = True
        if is_last_try or trouble.is_refused:
            trouble.fail(f"{name}: {reason}")

    def check(self) -> None:
        numbers = [flight.dispatch.number for flight in self.flights]
        assert numbers == sorted(numbers), f"job {self.job_id}: dispatches {numbers} out of order"
        assert len(numbers) <= 2, f"job {self.job_id} has {len(numbers)} tasks under way"
        assert 0 <= self.progress.next_index <= self.num_tasks, f"job {self.job_id}: {self.progress}"


def timed_out_after(timeout_s: float) -> str:
    return f"timed out {timeout_s:g} s after its arrival"
