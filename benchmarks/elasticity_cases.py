"""What it costs that every step may run elsewhere, on the devices' timeline.

Jobs run through the real control plane on real workers, where scripted policies change layouts on purpose.
What counts is when devices worked (timeline.py), not when anyone heard of it. The control plane's share as
a whole is seen beside a bare loop over the same adapters, in the same processes (benchmarks/worker_bare.py).
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bare import run_bare
from benchmarks.elasticity_rows import (
    CHANGED_GOAL_S,
    SAME_GOAL_S,
    SAME_P99_GOAL_S,
    ElasticityRow,
    bare_rows,
    fresh_rows,
    gap_row,
    urgent_row,
)
from gfgen.bench.scripted import Gap, MeasuredRun, Place, copy_of, gaps_of, placed_by, run_jobs, spans_of
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted, in_words

SETTLING_STEPS = 4
"""The first of a job, which do not count: what a step will take is learned, memory is taken."""
SETTLING_ROUNDS = 2
"""The same where a job goes round some layouts."""
MAX_FRESH = 20
"""Groups that are used for the first time."""
BARE_JOBS, BARE_STEPS = 5, 25
"""Jobs in each way, of which the first does not count."""
URGENT_JOBS, URGENT_STEPS = 10, 2
URGENT_SPACING = 1.37
"""Steps of the others between two urgent arrivals, which so hit every part of a step; and as many whole
steps more as urgent jobs need not to wait for each other."""
OFF = ", lookahead off"
"""Every decision is made after the end of the task before it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What cases are about, which is known before any rank has started."""

    num_ranks: int
    small: AdmittedJob
    large: AdmittedJob
    """Of the same model; the one whose state is moved."""
    num_samples: int = 100

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks))

    @property
    def half(self) -> int:
        return max(1, self.num_ranks // 2)


@dataclass(frozen=True, slots=True)
class Setting:
    """What runs are made on."""

    pool: WorkerPool
    folder: Path
    expected: CostModel
    """What cases are predicted to take by."""
    costs: CostModel = field(default_factory=CostModel)
    """Of the runs, which all learn into it."""
    signals: SignalPipe | None = None

    def run(
        self, jobs: Sequence[AdmittedJob], policy: NamedPolicy | Place, *, lookahead_s: float | None = None
    ) -> MeasuredRun:
        """Jobs to their end, under a policy or a script."""
        record = MeasuredRun()
        run_jobs(
            jobs,
            self.pool,
            record,
            policy=policy if isinstance(policy, NamedPolicy) else placed_by(policy),
            folder=self.folder,
            lookahead_s=LOOKAHEAD_S if lookahead_s is None else lookahead_s,
            costs=self.costs,
            signals=self.signals,
        )
        return record


@dataclass(frozen=True, slots=True)
class ElasticityCase:
    """A run, or some, that give rows."""

    name: str
    measure: Callable[[Setting], Sequence[ElasticityRow]]
    predicted_s: Callable[[CostModel], float]


# What there is to measure -------------------------------------------------------------------------


def cases_of(subject: Subject) -> list[ElasticityCase]:
    """Everything that so many ranks allow, what has goals first."""
    num_ranks, half, small, large = subject.num_ranks, subject.half, subject.small, subject.large
    found = [_unchanged(subject, degree, small) for degree in sorted({1, half, num_ranks})]
    found.append(_unchanged(subject, num_ranks, large))
    found.append(_pinned(subject, small))
    wide, narrow, other = subject.ranks, subject.ranks[:half], subject.ranks[-half:]
    if num_ranks > 1:
        found.append(_changed(subject, (narrow, wide), large))
        found.append(_changed(subject, (wide, (wide[-1],)), large))
    found.append(_urgent(subject))
    if num_ranks > 2:  # every order of two is in use before long
        found.append(_fresh(subject, small))
    if num_ranks > 1:
        found.append(_changed(subject, (narrow, other), large))
        found.append(_changed(subject, (narrow, wide), small))
    found.append(_unchanged(subject, num_ranks, small, lookahead_s=0.0, suffix=OFF))
    if num_ranks > 1:
        found.append(_changed(subject, (narrow, wide), small, lookahead_s=0.0, suffix=OFF))
    return found


def layout_on(job: AdmittedJob, ranks: Sequence[int]) -> Layout:
    """The usual layout of a job's steps on these ranks; always the same one, whatever is learned of costs."""
    cfg, ulysses, ring = job.limits.ways(len(ranks))[0]
    return Layout(tuple(ranks)[: cfg * ulysses * ring], cfg=cfg, ulysses=ulysses, ring=ring)


def _placed(job: AdmittedJob, task: Task, step_layout: Layout, all_ranks: Sequence[int]) -> Layout:
    """Steps where told; a decode on as many ranks as it can use, since it is not what is measured."""
    match task.stage:
        case Stage.DENOISE:
            return step_layout
        case Stage.DECODE:
            return Layout.bands(tuple(all_ranks)[: job.limits.max_decode_degree])
        case _:
            return Layout.single(step_layout.ranks[0])


# Layout unchanged -----------------------------------------------------------------------------------


def _unchanged(
    subject: Subject, degree: int, job: AdmittedJob, *, lookahead_s: float | None = None, suffix: str = ""
) -> ElasticityCase:
    """A job on each of as many groups as there are, all at once."""
    groups = [subject.ranks[at : at + degree] for at in range(0, subject.num_ranks - degree + 1, degree)]
    steps = math.ceil(subject.num_samples / len(groups)) + SETTLING_STEPS + 1
    jobs = {f"same-{group[0]}": group for group in groups}
    name = f"unchanged, {counted(degree, 'rank')}, {_size(job)}{suffix}"

    def measure(setting: Setting) -> Sequence[ElasticityRow]:
        copies = [copy_of(job, job_id, steps) for job_id in jobs]
        record = setting.run(
            copies,
            lambda view: _placed(job, view.next_task, layout_on(job, jobs[view.job_id]), jobs[view.job_id]),
            lookahead_s=lookahead_s,
        )
        gaps = [gap.seconds for gap in _settled(record) if gap.before.layout == gap.after.layout]
        goals = (None, None) if lookahead_s == 0.0 else (SAME_GOAL_S, SAME_P99_GOAL_S)
        return [gap_row(name, gaps, goal_s=goals[0], p99_goal_s=goals[1])]

    layout = layout_on(job, groups[0])
    return ElasticityCase(name, measure, lambda costs: _predicted_s(costs, job, [layout] * steps, groups[0]))


def _settled(record: MeasuredRun, num_steps: int = SETTLING_STEPS) -> list[Gap]:
    found = gaps_of(record, spans_of(record))
    return [gap for gap in found if (gap.before.task.step or 0) >= num_steps]


# Layout changed -------------------------------------------------------------------------------------


def _changed(
    subject: Subject,
    places: Sequence[Sequence[int]],
    job: AdmittedJob,
    *,
    lookahead_s: float | None = None,
    suffix: str = "",
) -> ElasticityCase:
    """A job that goes round these ranks; a row for each change."""
    rounds = math.ceil(subject.num_samples / 2) + SETTLING_ROUNDS + 1
    layouts = [layout_on(job, places[step % len(places)]) for step in range(rounds * len(places))]
    changes = {_change(*pair): None for pair in itertools.pairwise([*places, places[0]])}

    def measure(setting: Setting) -> Sequence[ElasticityRow]:
        record = setting.run(
            [copy_of(job, "changing", len(layouts))],
            lambda view: _placed(
                job, view.next_task, layouts[min(view.next_task.step or 0, len(layouts) - 1)], subject.ranks
            ),
            lookahead_s=lookahead_s,
        )
        gaps: dict[str, list[float]] = defaultdict(list)
        for gap in _settled(record, SETTLING_ROUNDS * len(places)):
            gaps[_change(gap.before.layout.ranks, gap.after.layout.ranks)].append(gap.seconds)
        goal_s = None if lookahead_s == 0.0 else CHANGED_GOAL_S
        return [
            gap_row(f"changed, {change}, {_size(job)}{suffix}", gaps[change], goal_s=goal_s)
            for change in changes
        ]

    name = f"changed, {' and '.join(changes)}, {_size(job)}{suffix}"
    return ElasticityCase(name, measure, lambda costs: _predicted_s(costs, job, layouts, subject.ranks))


def _change(before: Sequence[int], after: Sequence[int]) -> str:
    """'2 to 4', '4 to 1 elsewhere': elsewhere where another rank comes first."""
    return f"{len(before)} to {len(after)}" + ("" if before[0] == after[0] else " elsewhere")


# Fresh groups -----------------------------------------------------------------------------------------


def _fresh(subject: Subject, job: AdmittedJob) -> ElasticityCase:
    """Switches between two orders of all ranks that are in use for long, then to orders that never were.

    First every rank has every place of a layout: what it computes there is loaded then, and what is left to
    be made for a new order is the group.
    """
    shifts = [subject.ranks[at:] + subject.ranks[:at] for at in range(subject.num_ranks)]
    known = shifts[:2]
    others = [ranks for ranks in itertools.permutations(subject.ranks) if ranks not in shifts]
    fresh = random.Random(0).sample(others, min(MAX_FRESH, len(others)))
    uses = subject.num_samples
    orders = [*shifts * SETTLING_ROUNDS, *known * uses, *fresh]
    name = f"group of {subject.num_ranks}, first use and use {uses}, {_size(job)}"

    def measure(setting: Setting) -> Sequence[ElasticityRow]:
        record = setting.run(
            [copy_of(job, "orders", len(orders))],
            lambda view: _placed(
                job, view.next_task, layout_on(job, orders[view.next_task.step or 0]), subject.ranks
            ),
        )
        return fresh_rows(record, name, num_fresh=len(fresh))

    layouts = [layout_on(job, order) for order in orders]
    return ElasticityCase(name, measure, lambda costs: _predicted_s(costs, job, layouts, subject.ranks))


# A bare loop ------------------------------------------------------------------------------------------


def _pinned(subject: Subject, job: AdmittedJob) -> ElasticityCase:
    """`fcfs` with all ranks for every job, beside a loop that nobody schedules."""
    degree = subject.num_ranks
    steps = min(BARE_STEPS, max(4, subject.num_samples // 4))
    name = f"fcfs on {counted(degree, 'rank')} over a bare loop, {_size(job)}, {steps} steps"

    def measure(setting: Setting) -> Sequence[ElasticityRow]:
        jobs = [copy_of(job, f"pinned-{number}", steps) for number in range(BARE_JOBS)]
        record = setting.run(jobs, load_policy(f"fcfs,degree={degree}"))
        last = [record.dispatches[number] for number in sorted(record.done)]
        layouts = tuple([each.layout for each in last if each.task.job_id == jobs[-1].job_id])
        bare = run_bare(setting.pool, jobs[-1], layouts, num_jobs=BARE_JOBS, signals=setting.signals)
        return bare_rows(name, record, [each.job_id for each in jobs[1:]], bare)

    layout = layout_on(job, subject.ranks)

    def predicted_s(costs: CostModel) -> float:
        return 2 * BARE_JOBS * _predicted_s(costs, job, [layout] * steps, subject.ranks)

    return ElasticityCase(name, measure, predicted_s)


# Urgent jobs ------------------------------------------------------------------------------------------


def _urgent(subject: Subject) -> ElasticityCase:
    """Large jobs on every rank, and small ones that go before them."""
    small, large = subject.small, subject.large
    num_urgent = min(URGENT_JOBS, subject.num_samples)
    name = f"an urgent job's arrival to its first task, beside steps of {_size(large)} on each rank"

    def spacing(costs: CostModel) -> float:
        """Steps of the others between two arrivals."""
        own_s = _predicted_s(costs, small, [Layout.single(0)] * URGENT_STEPS, (0,))
        others = max(1, subject.num_ranks - 1)
        return math.ceil(own_s / others / _step_s(costs, large)) - 1 + URGENT_SPACING

    def num_steps(costs: CostModel) -> int:
        """Of the others, so that they are there until the last urgent job is done."""
        return math.ceil(spacing(costs) * (num_urgent + 2)) + 1

    def measure(setting: Setting) -> Sequence[ElasticityRow]:
        step_s = _step_s(setting.costs, large)  # such steps were seen by now
        spacing_s = spacing(setting.expected) * step_s
        jobs = [copy_of(large, f"long-{rank}", num_steps(setting.expected)) for rank in subject.ranks]
        urgent = [
            copy_of(small, f"urgent-{number}", URGENT_STEPS, arrival_s=(number + 2) * spacing_s, priority=100)
            for number in range(num_urgent)
        ]
        record = setting.run([*jobs, *urgent], load_policy("srtf"))
        return [urgent_row(name, record, {job.job_id: job.spec.arrival_s for job in urgent})]

    def predicted_s(costs: CostModel) -> float:
        long_s = _predicted_s(costs, large, [Layout.single(0)] * num_steps(costs), (0,))
        return long_s + num_urgent * _step_s(costs, large)

    return ElasticityCase(name, measure, predicted_s)


def _step_s(costs: CostModel, job: AdmittedJob) -> float:
    return costs.task_s(costs.class_of(job), Stage.DENOISE, (1, 1, 1))


# Measuring --------------------------------------------------------------------------------------------


def measure_cases(
    cases: Sequence[ElasticityCase],
    setting: Setting,
    *,
    seconds: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[ElasticityRow]:
    """Rows, as they come; no case is begun that is predicted to end after so many seconds."""
    began_s = time.monotonic()
    for case in cases:
        elapsed_s, predicted_s = time.monotonic() - began_s, case.predicted_s(setting.expected)
        if seconds is not None and elapsed_s + predicted_s > seconds:
            tell(f"{elapsed_s:5.0f} s  {case.name}: left out, it would take {in_words(predicted_s)}")
            continue
        tell(f"{elapsed_s:5.0f} s  {case.name}, about {in_words(predicted_s)}")
        for row in case.measure(setting):
            tell(f"         {row.name}: {row.found}")
            yield row


def warm(setting: Setting, subject: Subject) -> None:
    """Let every rank do all there is once, so that the first case finds the devices as the last one does."""
    for job in (subject.small, subject.large):
        jobs = {f"warm-{rank}": rank for rank in subject.ranks}
        copies = [copy_of(job, job_id, 3) for job_id in jobs]
        setting.run(copies, lambda view: Layout.single(jobs[view.job_id]))  # noqa: B023


def _predicted_s(
    costs: CostModel, job: AdmittedJob, layouts: Sequence[Layout], decoding: Sequence[int]
) -> float:
    """Of a job whose steps have these layouts, with its decode on these ranks."""
    cost_class, task_s = costs.class_of(job), costs.task_s
    degrees = Layout.bands(tuple(decoding)[: job.limits.max_decode_degree]).degrees
    ends_s = sum(task_s(cost_class, stage, (1, 1, 1)) for stage in (Stage.ENCODE, Stage.PREPARE))
    steps_s = math.fsum(task_s(cost_class, Stage.DENOISE, layout.degrees) for layout in layouts)
    return ends_s + steps_s + task_s(cost_class, Stage.DECODE, degrees)


def _size(job: AdmittedJob) -> str:
    return job.shape.partition("+")[0]
