"""`gfgen bench elasticity`: what it costs that every step may run elsewhere, on the devices' timeline.

Jobs run through the real control plane on real workers, where scripted policies change layouts on purpose.
What counts is when devices worked (timeline.py), not when anyone heard of it. The control plane's share as
a whole is seen beside a bare loop over the same adapters, in the same processes (runtime/worker_bare.py).
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import selectors
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gfgen.bench.scripted import Place, Record, copy_of, placed_by, run_jobs
from gfgen.bench.timeline import Gap, gaps_of, lasted_s, spans_of
from gfgen.errors import WorkerError
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.admission import AdmittedJob
from gfgen.runtime.cost import CostModel
from gfgen.runtime.durations import in_words
from gfgen.runtime.messages import BareTimes, RunBare
from gfgen.runtime.metrics import percentile
from gfgen.runtime.pool import WorkerPool
from gfgen.runtime.signals import SignalPipe
from gfgen.snapshot import JobView

logger = logging.getLogger(__name__)

WORKER_MAIN = "gfgen.runtime.worker_bare:main"
SAME_GOAL_S, SAME_P99_GOAL_S = 0.1e-3, 0.3e-3
CHANGED_GOAL_S = 1e-3
FRESH_GOAL_S = 0.1e-3
"""No difference that an unchanged layout's gap would not have, too."""
BARE_GOAL = 0.01
SETTLING_STEPS = 4
"""The first of a job, which do not count: what a step will take is learned, memory is taken."""
SETTLING_ROUNDS = 2
"""The same where a job goes round some layouts."""
MAX_FRESH = 20
"""Groups that are used for the first time."""
BARE_JOBS, BARE_STEPS = 3, 25
"""Jobs in each way, of which the first does not count."""
URGENT_JOBS, URGENT_STEPS = 10, 2
URGENT_SPACING = 1.37
"""Steps of the others between two urgent arrivals, which so hit every part of a step; and as many whole
steps more as urgent jobs need not to wait for each other."""
BARE_PATIENCE_S = 600.0
OFF = ", lookahead off"
"""Every decision is made after the end of the task before it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was measured."""

    name: str
    goal: str
    found: str
    num_samples: int
    is_met: bool | None = None
    """None where there is no goal."""
    samples_s: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """A run, or some, that give rows."""

    name: str
    measure: Callable[[], Sequence[Row]]
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What everything is measured on."""

    pool: WorkerPool
    small: AdmittedJob
    large: AdmittedJob
    """Of the same model; the one whose state is moved."""
    folder: Path
    expected: CostModel
    """What cases are predicted to take by."""
    costs: CostModel = field(default_factory=CostModel)
    """Of the runs, which all learn into it."""
    num_samples: int = 100
    guard_s: float = 0.005
    islands: Sequence[Sequence[int]] | None = None
    signals: SignalPipe | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.pool.num_ranks))

    @property
    def half(self) -> int:
        return max(1, self.pool.num_ranks // 2)

    def run(
        self, jobs: Sequence[AdmittedJob], policy: NamedPolicy | Place, *, guard_s: float | None = None
    ) -> Record:
        """Jobs to their end, under a policy or a script."""
        record = Record()
        run_jobs(
            jobs,
            self.pool,
            record,
            policy=policy if isinstance(policy, NamedPolicy) else placed_by(policy),
            folder=self.folder,
            guard_s=self.guard_s if guard_s is None else guard_s,
            costs=self.costs,
            islands=self.islands,
            signals=self.signals,
        )
        return record


# What there is to measure -------------------------------------------------------------------------


def cases_of(setting: Setting) -> list[Case]:
    """Everything that so many ranks allow, what has goals first."""
    num_ranks, half, small, large = len(setting.ranks), setting.half, setting.small, setting.large
    found = [_unchanged(setting, degree, small) for degree in sorted({1, half, num_ranks})]
    found.append(_unchanged(setting, num_ranks, large))
    found.append(_pinned(setting, small))
    wide, narrow, other = setting.ranks, setting.ranks[:half], setting.ranks[-half:]
    if num_ranks > 1:
        found.append(_changed(setting, (narrow, wide), large))
        found.append(_changed(setting, (wide, (wide[-1],)), large))
    found.append(_urgent(setting, small=small, large=large))
    if num_ranks > 1:
        found.append(_fresh(setting, small))
        found.append(_changed(setting, (narrow, other), large))
        found.append(_changed(setting, (narrow, wide), small))
    found.append(_unchanged(setting, num_ranks, small, guard_s=0.0, suffix=OFF))
    if num_ranks > 1:
        found.append(_changed(setting, (narrow, wide), small, guard_s=0.0, suffix=OFF))
    return found


def _steps_of(setting: Setting, num_samples: int) -> int:
    return num_samples + SETTLING_STEPS + 1


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
            return Layout.bands(tuple(all_ranks)[: job.max_decode_degree])
        case _:
            return Layout.single(step_layout.ranks[0])


# Layout unchanged -----------------------------------------------------------------------------------


def _unchanged(
    setting: Setting, degree: int, job: AdmittedJob, *, guard_s: float | None = None, suffix: str = ""
) -> Case:
    """A job on each of as many groups as there are, all at once."""
    groups = [setting.ranks[at : at + degree] for at in range(0, len(setting.ranks) - degree + 1, degree)]
    steps = _steps_of(setting, math.ceil(setting.num_samples / len(groups)))
    jobs = {f"same-{group[0]}": group for group in groups}
    name = f"unchanged, {_ranks(degree)}, {_size(job)}{suffix}"

    def measure() -> Sequence[Row]:
        copies = [copy_of(job, job_id, steps) for job_id in jobs]
        record = setting.run(
            copies,
            lambda view: _placed(job, view.next_task, layout_on(job, jobs[view.job_id]), jobs[view.job_id]),
            guard_s=guard_s,
        )
        gaps = [gap.seconds for gap in _settled(record) if gap.before.layout == gap.after.layout]
        has_goal = guard_s != 0.0
        return [
            _gap_row(
                name,
                gaps,
                goal_s=SAME_GOAL_S if has_goal else None,
                p99_goal_s=SAME_P99_GOAL_S if has_goal else None,
            )
        ]

    layout = layout_on(job, groups[0])
    return Case(name, measure, _predicted_s(setting, job, [layout] * steps, groups[0]))


def _settled(record: Record, num_steps: int = SETTLING_STEPS) -> list[Gap]:
    found = gaps_of(record, spans_of(record))
    return [gap for gap in found if (gap.before.task.step or 0) >= num_steps]


# Layout changed -------------------------------------------------------------------------------------


def _changed(
    setting: Setting,
    places: Sequence[Sequence[int]],
    job: AdmittedJob,
    *,
    guard_s: float | None = None,
    suffix: str = "",
) -> Case:
    """A job that goes round these ranks; a row for each change."""
    rounds = math.ceil(setting.num_samples / 2) + SETTLING_ROUNDS + 1
    layouts = [layout_on(job, places[step % len(places)]) for step in range(rounds * len(places))]
    changes = {_change(*pair): None for pair in itertools.pairwise([*places, places[0]])}

    def measure() -> Sequence[Row]:
        record = setting.run(
            [copy_of(job, "changing", len(layouts))],
            lambda view: _placed(
                job, view.next_task, layouts[min(view.next_task.step or 0, len(layouts) - 1)], setting.ranks
            ),
            guard_s=guard_s,
        )
        gaps: dict[str, list[float]] = defaultdict(list)
        for gap in _settled(record, SETTLING_ROUNDS * len(places)):
            gaps[_change(gap.before.layout.ranks, gap.after.layout.ranks)].append(gap.seconds)
        goal_s = None if guard_s == 0.0 else CHANGED_GOAL_S
        return [
            _gap_row(f"changed, {change}, {_size(job)}{suffix}", gaps[change], goal_s=goal_s)
            for change in changes
        ]

    name = f"changed, {' and '.join(changes)}, {_size(job)}{suffix}"
    return Case(name, measure, _predicted_s(setting, job, layouts, setting.ranks))


def _change(before: Sequence[int], after: Sequence[int]) -> str:
    """'2 to 4', '4 to 1 elsewhere': elsewhere where another rank comes first."""
    return f"{len(before)} to {len(after)}" + ("" if before[0] == after[0] else " elsewhere")


# Fresh groups -----------------------------------------------------------------------------------------


def _fresh(setting: Setting, job: AdmittedJob) -> Case:
    """Switches between two orders of all ranks that are in use for long, then to orders that never were.

    First every rank has every place of a layout: what it computes there is loaded then, and what is left to
    be made for a new order is the group.
    """
    shifts = [setting.ranks[at:] + setting.ranks[:at] for at in range(len(setting.ranks))]
    known = shifts[:2]
    others = [ranks for ranks in itertools.permutations(setting.ranks) if ranks not in shifts]
    fresh = random.Random(0).sample(others, min(MAX_FRESH, len(others)))
    uses = setting.num_samples
    orders = [*shifts * SETTLING_ROUNDS, *known * uses, *fresh]
    name = f"group of {len(setting.ranks)}, first use and use {uses}, {_size(job)}"

    def measure() -> Sequence[Row]:
        if not fresh:
            logger.warning("%s: every order of so few ranks is in use before long", name)
            return []
        record = setting.run(
            [copy_of(job, "orders", len(orders))],
            lambda view: _placed(
                job, view.next_task, layout_on(job, orders[view.next_task.step or 0]), setting.ranks
            ),
        )
        return _fresh_rows(record, name, num_fresh=len(fresh))

    layouts = [layout_on(job, order) for order in orders]
    return Case(name, measure, _predicted_s(setting, job, layouts, setting.ranks))


def _fresh_rows(record: Record, name: str, *, num_fresh: int) -> Sequence[Row]:
    spans = spans_of(record)
    gaps = list(gaps_of(record, spans))
    first, late = gaps[-num_fresh:], gaps[-2 * num_fresh : -num_fresh]
    rows = []
    for what, values_of in (
        ("idle before it", lambda gap: gap.seconds),
        ("its step", lambda gap: lasted_s(spans[gap.after.number])),
    ):
        once, often = [values_of(gap) for gap in first], [values_of(gap) for gap in late]
        differs_s = statistics.median(once) - statistics.median(often)
        rows.append(
            Row(
                f"{name}: {what}",
                "no difference",
                f"{_ms(once)} and {_ms(often)}: {differs_s * 1e3:+.3f} ms",
                len(once),
                abs(differs_s) <= FRESH_GOAL_S if what.startswith("idle") else None,
                {"first use": once, "late use": often},
            )
        )
    return rows


# A bare loop ------------------------------------------------------------------------------------------


def _pinned(setting: Setting, job: AdmittedJob) -> Case:
    """`fcfs` with all ranks for every job, beside a loop that nobody schedules."""
    degree = len(setting.ranks)
    steps = min(BARE_STEPS, max(4, setting.num_samples // 4))
    name = f"fcfs on {_ranks(degree)} over a bare loop, {_size(job)}, {steps} steps"

    def measure() -> Sequence[Row]:
        jobs = [copy_of(job, f"pinned-{number}", steps) for number in range(BARE_JOBS)]
        record = setting.run(jobs, load_policy(f"fcfs,degree={degree}"))
        jobs_s, steps_s = _scheduled_times(record, [each.job_id for each in jobs[1:]])
        last = [record.dispatches[number] for number in sorted(record.done)]
        layouts = tuple([each.layout for each in last if each.task.job_id == jobs[-1].job_id])
        bare = run_bare(setting.pool, jobs[-1], layouts, num_jobs=BARE_JOBS)
        return [
            _bare_row(f"{name}: steps", steps_s, _slowest(bare, lambda times: times.steps_s)[1:]),
            _bare_row(f"{name}: whole jobs", jobs_s, _slowest(bare, lambda times: times.jobs_s)[1:]),
        ]

    layout = layout_on(job, setting.ranks)
    one_job_s = _predicted_s(setting, job, [layout] * steps, setting.ranks)
    return Case(name, measure, 2 * BARE_JOBS * one_job_s)


def _scheduled_times(record: Record, job_ids: Sequence[str]) -> tuple[list[float], list[float]]:
    """Of each job: from its first task to its last one, and of its steps alone."""
    spans = spans_of(record)
    whole: list[float] = []
    steps: list[float] = []
    for job_id in job_ids:
        numbers = [n for n in sorted(record.done) if record.dispatches[n].task.job_id == job_id]
        denoising = [n for n in numbers if record.dispatches[n].task.stage is Stage.DENOISE]
        for found, chosen in ((whole, numbers), (steps, denoising)):
            begin_s = min(span.start_s for span in spans[chosen[0]].values())
            found.append(max(span.end_s for span in spans[chosen[-1]].values()) - begin_s)
    return whole, steps


def run_bare(
    pool: WorkerPool, job: AdmittedJob, layouts: tuple[Layout, ...], *, num_jobs: int
) -> list[BareTimes]:
    """The same jobs on a pool of bare workers without a control plane, by rank.

    Raises: WorkerError when a rank dies, or does not answer.
    """
    message = RunBare(
        pool.last_number + 1, job.spec, str(job.checkpoint), layouts, pool.incarnations, num_jobs
    )
    pool.last_number = message.last_number
    answers: dict[int, BareTimes] = {}
    with selectors.DefaultSelector() as selector:
        for rank, worker in enumerate(pool.workers):
            worker.tell(message)
            selector.register(worker.channel, selectors.EVENT_READ, rank)
        while len(answers) < pool.num_ranks:
            ready = selector.select(BARE_PATIENCE_S)
            if not ready:
                raise WorkerError(f"no rank has ended its bare loop after {BARE_PATIENCE_S:g} s")
            for key, _ in ready:
                received = pool.workers[key.data].channel.receive()
                if received is None:
                    raise WorkerError(f"rank {key.data} died in a bare loop")
                if isinstance(received[0], BareTimes):
                    answers[key.data] = received[0]
    return [answers[rank] for rank in sorted(answers)]


def _slowest(ranks: Sequence[BareTimes], values: Callable[[BareTimes], Sequence[float]]) -> list[float]:
    return [max(each) for each in zip(*map(values, ranks), strict=True)]


def _bare_row(name: str, scheduled_s: Sequence[float], bare_s: Sequence[float]) -> Row:
    ratio = statistics.median(scheduled_s) / statistics.median(bare_s) - 1
    return Row(
        name,
        f"within {BARE_GOAL:.0%}",
        f"{in_words(statistics.median(scheduled_s))} and {in_words(statistics.median(bare_s))}: {ratio:+.2%}",
        len(scheduled_s),
        ratio <= BARE_GOAL,
        {"scheduled": scheduled_s, "bare": bare_s},
    )


# Urgent jobs ------------------------------------------------------------------------------------------


def _urgent(setting: Setting, *, small: AdmittedJob, large: AdmittedJob) -> Case:
    """Large jobs on every rank, and small ones that go before them."""
    step_s = _step_s(setting.expected, large)
    own_s = _predicted_s(setting, small, [Layout.single(0)] * URGENT_STEPS, (0,))
    others = max(1, len(setting.ranks) - 1)
    spacing = math.ceil(own_s / others / step_s) - 1 + URGENT_SPACING
    num_urgent = min(URGENT_JOBS, setting.num_samples)
    steps = math.ceil(spacing * (num_urgent + 2)) + 1
    name = f"an urgent job's arrival to its first task, beside steps of {_size(large)} on each rank"

    def measure() -> Sequence[Row]:
        spacing_s = spacing * _step_s(setting.costs, large)  # which has seen such steps by now
        jobs = [copy_of(large, f"long-{rank}", steps) for rank in setting.ranks]
        urgent = [
            copy_of(small, f"urgent-{number}", URGENT_STEPS, arrival_s=(number + 2) * spacing_s, priority=100)
            for number in range(num_urgent)
        ]
        record = setting.run([*jobs, *urgent], load_policy("srtf"))
        return [_urgent_row(name, record, {job.job_id: job.spec.arrival_s for job in urgent})]

    layout = Layout.single(0)
    return Case(name, measure, _predicted_s(setting, large, [layout] * steps, (0,)) + num_urgent * step_s)


def _step_s(costs: CostModel, job: AdmittedJob) -> float:
    return costs.task_s(costs.class_of(job), Stage.DENOISE, (1, 1, 1))


def _urgent_row(name: str, record: Record, arrivals_s: Mapping[str, float]) -> Row:
    spans = spans_of(record)
    begins_s: dict[str, float] = {}
    steps_s = []
    for number in sorted(record.done):
        dispatch = record.dispatches[number]
        job_id = dispatch.task.job_id
        if job_id in arrivals_s:
            begins_s.setdefault(job_id, min(span.start_s for span in spans[number].values()))
        elif dispatch.task.stage is Stage.DENOISE:
            steps_s.append(lasted_s(spans[number]))
    delays_s = [begins_s[job_id] - arrival_s for job_id, arrival_s in arrivals_s.items()]
    step_s = statistics.median(steps_s)
    return Row(
        name,
        "one step at most",
        f"median {in_words(statistics.median(delays_s))}, worst {in_words(max(delays_s))} "
        f"of a step of {in_words(step_s)}",
        len(delays_s),
        max(delays_s) <= percentile(steps_s, 99),
        {"delays": delays_s, "steps": steps_s},
    )


# Measuring --------------------------------------------------------------------------------------------


def measure_cases(
    cases: Sequence[Case], *, seconds: float | None = None, tell: Callable[[str], None] = lambda line: None
) -> Iterator[Row]:
    """Rows, as they come; no case is begun that is predicted to end after so many seconds."""
    began_s = time.monotonic()
    for case in cases:
        elapsed_s = time.monotonic() - began_s
        if seconds is not None and elapsed_s + case.predicted_s > seconds:
            tell(f"{elapsed_s:5.0f} s  {case.name}: left out, it would take {in_words(case.predicted_s)}")
            continue
        tell(f"{elapsed_s:5.0f} s  {case.name}, about {in_words(case.predicted_s)}")
        for row in case.measure():
            tell(f"         {row.name}: {row.found}")
            yield row


def warm(setting: Setting) -> None:
    """Let every rank do all there is once, so that the first case finds the devices as the last one does."""
    for job in (setting.small, setting.large):
        jobs = {f"warm-{rank}": rank for rank in setting.ranks}
        copies = [copy_of(job, job_id, 3) for job_id in jobs]

        def place(view: JobView, jobs: Mapping[str, int] = jobs) -> Layout:
            return Layout.single(jobs[view.job_id])

        setting.run(copies, place)


def _predicted_s(
    setting: Setting, job: AdmittedJob, layouts: Sequence[Layout], decoding: Sequence[int]
) -> float:
    """Of a job whose steps have these layouts, with its decode on these ranks."""
    cost_class, task_s = setting.expected.class_of(job), setting.expected.task_s
    degrees = Layout.bands(tuple(decoding)[: job.max_decode_degree]).degrees
    ends_s = sum(task_s(cost_class, stage, (1, 1, 1)) for stage in (Stage.ENCODE, Stage.PREPARE))
    steps_s = math.fsum(task_s(cost_class, Stage.DENOISE, layout.degrees) for layout in layouts)
    return ends_s + steps_s + task_s(cost_class, Stage.DECODE, degrees)


# What is told -----------------------------------------------------------------------------------------


def _gap_row(
    name: str, gaps_s: Sequence[float], *, goal_s: float | None, p99_goal_s: float | None = None
) -> Row:
    if not gaps_s:
        raise WorkerError(f"{name}: no two steps followed each other")
    median_s, p99_s = statistics.median(gaps_s), percentile(gaps_s, 99)
    goals = [] if goal_s is None else [f"{goal_s * 1e3:g} ms"]
    goals += [] if p99_goal_s is None else [f"P99 {p99_goal_s * 1e3:g} ms"]
    is_met = None
    if goal_s is not None:
        is_met = median_s <= goal_s and (p99_goal_s is None or p99_s <= p99_goal_s)
    found = f"{median_s * 1e3:.3f} ms, P99 {p99_s * 1e3:.3f} ms"
    return Row(name, ", ".join(goals), found, len(gaps_s), is_met, {"gaps": gaps_s})


def _ms(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e3:.3f} ms"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def _size(job: AdmittedJob) -> str:
    return job.shape.partition("+")[0]


def table_of(rows: Sequence[Row], *, device: str, command: str, model: str) -> Iterator[str]:
    """Markdown."""
    yield f"# The price of elasticity, {time.strftime('%Y-%m-%d')}\n"
    yield f"{device}; {model}; command: `{command}`\n"
    yield (
        "Idle time of a device between two steps of a job, by the device's own clock: median and P99. "
        "Changed layouts move the job's state to ranks that do not have it. A group's first use is the "
        "first time that these ranks work together in this order. The bare loop calls the same adapters in "
        "the same processes, without a control plane.\n"
    )
    yield "| | goal | found | samples | met |\n|---|---|---|---|---|"
    for row in rows:
        met = "" if row.is_met is None else "yes" if row.is_met else "**no**"
        yield f"| {row.name} | {row.goal} | {row.found} | {row.num_samples} | {met} |"


def as_content(rows: Sequence[Row], *, device: str, command: str, model: str) -> dict[str, Any]:
    """For a JSON file: every sample, in seconds."""
    return {
        "device": device,
        "command": command,
        "model": model,
        "date": time.strftime("%Y-%m-%d"),
        "rows": [
            {
                "name": row.name,
                "goal": row.goal,
                "found": row.found,
                "is_met": row.is_met,
                "samples_s": {
                    name: [round(value, 7) for value in values] for name, values in row.samples_s.items()
                },
            }
            for row in rows
        ],
    }
