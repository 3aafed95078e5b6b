"""Measured runs of the real control plane, whose policy is a script, and the times of their tasks."""

from __future__ import annotations

import statistics
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from gfgen.errors import InterruptedRunError, WorkerError
from gfgen.graph import Stage, Trajectory
from gfgen.layout import Layout
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.control.control import Control
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, Event, OutputWritten, TaskDone
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.messages import RankTimes
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.workers import JobMemory, ProcessBackend
from gfgen.runtime.simulate.simulation import OutcomeRecorder
from gfgen.snapshot import Decision, JobView, Snapshot
from gfgen.system.signals import SignalPipe

Place = Callable[[JobView], Layout]
"""The layout of a job's next task, which starts when these ranks are free."""


class MeasuredRun(OutcomeRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.dispatches: dict[int, Dispatch] = {}
        self.done: dict[int, Sequence[RankTimes]] = {}
        """By successful dispatch: the times of its ranks, by slot."""
        self.written: dict[str, float] = {}
        """By job: seconds to write its file."""

    @property
    def errors(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error]

    def dispatched(self, dispatch: Dispatch) -> None:
        self.dispatches[dispatch.number] = dispatch

    def applied(self, event: Event) -> None:
        match event:
            case TaskDone():
                self.done[event.dispatch] = event.times
            case OutputWritten():
                self.written[event.job_id] = event.write_s


def placed_by(place: Place) -> NamedPolicy:
    """A policy from `place`; if jobs need the same ranks, the one with the most steps done goes first."""

    def decide(snapshot: Snapshot) -> list[Decision]:
        free, decisions = set(snapshot.free_ranks), []
        for view in sorted(snapshot.open.values(), key=lambda view: (-view.next_task.index, view.job_id)):
            layout = place(view)
            if free.issuperset(layout.ranks):
                free -= set(layout.ranks)
                decisions.append(Decision(view.next_task, layout))
        return decisions

    return NamedPolicy("measuring", decide)


def run_jobs(
    jobs: Sequence[AdmittedJob],
    pool: WorkerPool,
    record: MeasuredRun,
    *,
    policy: NamedPolicy,
    folder: Path,
    lookahead_s: float = 0.0,
    costs: CostModel | None = None,
    signals: SignalPipe | None = None,
) -> None:
    """Run jobs on a ready pool. Raises: WorkerError when a job fails; InterruptedRunError at a signal."""
    for job in jobs:  # files of an earlier measurement
        (folder / job.info.file).unlink(missing_ok=True)
    clock, costs = Clock(), costs or CostModel()
    state = State(
        jobs,
        RunStart(
            num_ranks=pool.num_ranks,
            lookahead_s=lookahead_s,
            last_number=pool.last_number,
            islands=pool.islands,
            near=pool.settings.near,
        ),
        clock=clock,
        costs=costs,
    )
    backend = ProcessBackend(pool, JobMemory(jobs, folder), clock=clock, signals=signals)
    control = Control(jobs, state=state, backend=backend, policy=policy, observers=[record])
    try:
        summary = control.run()
    finally:
        backend.close()
    if state.closing.stop_signal is not None:
        raise InterruptedRunError("stopped", signal_number=state.closing.stop_signal)
    if record.errors or summary.policy_fault:
        raise WorkerError((record.errors or [summary.policy_fault or ""])[0])


def copy_of(
    job: AdmittedJob, job_id: str, steps: int, *, arrival_s: float = 0.0, priority: int = 0
) -> AdmittedJob:
    spec = replace(
        job.spec,
        id=job_id,
        steps=steps,
        arrival_s=arrival_s,
        deadline_s=None,
        deadline_at=None,
        timeout_s=None,
        priority=priority,
    )
    artifacts, number = job.trajectory.artifacts, job.trajectory.num_refined
    trajectory = Trajectory(job_id, steps + number, artifacts, num_refined=number)
    suffix = Path(job.info.file).suffix
    info = replace(
        job.info,
        asked=spec,
        spec=spec,
        num_tasks=trajectory.num_tasks,
        file=job_id + suffix,
        spec_hash=job_id,
    )
    return replace(job, info=info, trajectory=trajectory)


def new_copy_of(job: AdmittedJob, job_id: str, steps: int, *, occasion: str) -> AdmittedJob:
    """`copy_of` with another prompt of as many tokens, because ranks cache encoded prompts."""
    number = zlib.crc32(f"{occasion} {job_id}".encode()) % 100_000
    spec = replace(job.spec, prompt=f"{job.spec.prompt} {number:05d}")
    return copy_of(replace(job, info=replace(job.info, spec=spec)), job_id, steps)


# Times -----------------------------------------------------------------------------------
#
# The times of CPU ranks come from the machine's clock. The host hears of a GPU's task only after a thread
# wakes up, which takes as long as the gaps to measure. So the times of GPUs add up durations and idle times
# by the device's clock. Its offset follows from the reports: none comes before the end of its task, and the
# earliest come almost at once.

MAX_DRIFT = 2e-4
"""Of a device's clock against the machine's; a larger estimate is noise of a few reports."""


@dataclass(frozen=True, slots=True)
class Span:
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Gap:
    before: Dispatch
    after: Dispatch
    seconds: float


Spans = Mapping[int, Mapping[int, Span]]
"""By dispatch and rank."""


def spans_of(record: MeasuredRun) -> Spans:
    by_rank: dict[int, dict[int, RankTimes]] = defaultdict(dict)
    for number in sorted(record.done):
        for times in record.done[number]:
            by_rank[times.rank][number] = times
    spans: dict[int, dict[int, Span]] = defaultdict(dict)
    for rank, tasks in by_rank.items():
        for number, span in zip(tasks, _rank_spans(list(tasks.values())), strict=True):
            spans[number][rank] = span
    return spans


def gaps_of(record: MeasuredRun, spans: Spans) -> Iterator[Gap]:
    last_on_rank = _previous_on_rank(record)
    steps: dict[str, list[Dispatch]] = defaultdict(list)
    for number in sorted(record.done):
        dispatch = record.dispatches[number]
        if dispatch.task.stage is Stage.DENOISE:
            steps[dispatch.task.job_id].append(dispatch)
    for before, after in (pair for each in steps.values() for pair in pairwise(each)):
        yield Gap(before, after, _gap_s(before, after, spans, last_on_rank))


def lasted_s(spans: Mapping[int, Span]) -> float:
    return max(span.end_s - span.start_s for span in spans.values())


def _gap_s(
    before: Dispatch, after: Dispatch, spans: Spans, last_on_rank: Mapping[tuple[int, int], int]
) -> float:
    """The longest idle time of a rank that ran both; else from the last end to the last start."""
    begins, ends = spans[after.number], spans[before.number]
    both = [rank for rank in begins if last_on_rank.get((after.number, rank)) == before.number]
    if both:
        return max(begins[rank].start_s - ends[rank].end_s for rank in both)
    return max(span.start_s for span in begins.values()) - max(span.end_s for span in ends.values())


def _previous_on_rank(record: MeasuredRun) -> Mapping[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    latest: dict[int, int] = {}
    for number in sorted(record.done):
        for times in record.done[number]:
            if times.rank in latest:
                found[number, times.rank] = latest[times.rank]
            latest[times.rank] = number
    return found


def _rank_spans(tasks: Sequence[RankTimes]) -> list[Span]:
    if any(times.idle_s is None for times in tasks[1:]):
        return [Span(times.started_s, times.ended_s) for times in tasks]
    own: list[Span] = []
    for times in tasks:
        start_s = own[-1].end_s + (times.idle_s or 0.0) if own else 0.0
        own.append(Span(start_s, start_s + times.busy_s))
    late = [times.ended_s - span.end_s for times, span in zip(tasks, own, strict=True)]
    drift = _drift([span.end_s for span in own], late)
    offset_s = min(each - drift * span.end_s for each, span in zip(late, own, strict=True))
    rate = 1 + drift
    return [Span(offset_s + rate * span.start_s, offset_s + rate * span.end_s) for span in own]


def _drift(own_s: Sequence[float], late_s: Sequence[float]) -> float:
    """Seconds per second that the machine's clock gains: an edge of the lower hull of all reports."""
    hull: list[tuple[float, float]] = []
    for point in zip(own_s, late_s, strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    middle_s = statistics.fmean(own_s)
    for left, right in pairwise(hull):
        if left[0] <= middle_s <= right[0]:
            return max(-MAX_DRIFT, min(MAX_DRIFT, _slope(left, right)))
    return 0.0


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0]) if right[0] > left[0] else 0.0
