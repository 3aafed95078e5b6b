"""Measure a profile: every task of some shapes on real workers, with groups of every useful size.

A measurement is a small run of the real control plane with a scripted policy. Each group of ranks first runs
a job that does not count, then jobs whose steps use all layouts of the group. The gaps between the steps of a
job that moves at each step show the cost of moves.

CPU ranks share cores and memory. So each group is measured with idle and with busy other ranks, and a task
counts only if they really were so, in several rounds against disturbances. GPUs are independent, so as many
groups of one size as possible run at once, and the devices' clocks measure them.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gfgen.bench.scripted import (
    MeasuredRun,
    Spans,
    gaps_of,
    lasted_s,
    new_copy_of,
    placed_by,
    run_jobs,
    spans_of,
)
from gfgen.errors import InterruptedRunError, WorkerError
from gfgen.graph import Stage
from gfgen.layout import ALONE, Degrees, Layout
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import sets_of
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import NO_PROFILE, Profile, ProfileRow, interquartile_range
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.snapshot import JobView
from gfgen.system.signals import SignalPipe

MeasurementKind = Literal["alone", "loaded", "together", "moving"]
"""alone, loaded: one group of CPU ranks while the others idle or work. together: as many groups as possible,
on GPUs. moving: one job that changes its rank at each step."""

GPU_GROUPS = (1, 2, 4, 8)
ROUNDS = 3
"""On CPU ranks. Only the first round measures moves, whose times hardly vary."""
JOBS = {"alone": 1, "loaded": 1, "together": 2, "moving": 1}
"""Jobs per group that count, after one that does not, because the first task of a shape allocates."""
WARM_UP_STEPS = 2
"""For each layout. Some schedules cannot have a single step."""
STEPS = {"alone": 5, "loaded": 5, "together": 4, "moving": 6}
"""Steps per layout that count, after one that does not."""
SHORTEST_MOVE_S = 1e-4
"""Shorter times are too inexact for a rate."""
_IDLE, _BUSY = 0.1, 0.75
"""Share of a task's time in which the other ranks worked: up to 0.1 it is alone, from 0.75 it is loaded.
The limits allow for gaps between short steps."""


@dataclass(frozen=True, slots=True)
class Measurement:
    job: AdmittedJob
    num_ranks: int
    """Of a group."""
    kind: MeasurementKind
    round: int = 1

    @property
    def model(self) -> str:
        return self.job.model_in()

    @property
    def key(self) -> str:
        return f"{self.model} {self.job.shape} on {self.num_ranks} {self.kind} round {self.round}"

    def step_degrees(self, *, counts: bool) -> tuple[Degrees, ...]:
        if self.kind == "moving":
            return (ALONE,) * (1 + STEPS["moving"] if counts else WARM_UP_STEPS)
        num_steps = 1 + STEPS[self.kind] if counts else WARM_UP_STEPS
        return tuple([way for way in self.job.limits.ways(self.num_ranks) for _ in range(num_steps)])


@dataclass(frozen=True, slots=True)
class Samples:
    """The results of a measurement, in seconds."""

    tasks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By stage and degrees, such as 'denoise 1x2x1'."""
    writes: Sequence[float] = ()
    gaps: Sequence[float] = ()
    """Between two steps of a job on the same ranks."""
    moves: Sequence[tuple[int, float]] = ()
    """Bytes and gap of two steps on different ranks."""


def plan_measurements(
    jobs: Iterable[AdmittedJob], *, num_ranks: int, are_on_gpus: bool = False
) -> list[Measurement]:
    plan = []
    for job in {(job.model_in(), job.shape): job for job in jobs}.values():
        for size in GPU_GROUPS if are_on_gpus else range(1, num_ranks + 1):
            if size > num_ranks or math.prod(job.limits.ways(size)[0]) < size:
                continue
            plan.append(Measurement(job, size, "together" if are_on_gpus else "alone"))
            if not are_on_gpus and size < num_ranks:
                plan.append(Measurement(job, size, "loaded"))
        if num_ranks > 1:
            plan.append(Measurement(job, 1, "moving"))
    again = [entry for entry in plan if entry.kind in ("alone", "loaded")]
    return plan + [replace(entry, round=number) for number in range(2, ROUNDS + 1) for entry in again]


def within(
    plan: Sequence[Measurement], seconds_of: Callable[[Measurement], float], *, budget_s: float
) -> list[Measurement]:
    """The first round, with moves of the fastest shape alone, and as much of later ones as the budget has."""
    first, later = [[entry for entry in plan if (entry.round > 1) is is_later] for is_later in (False, True)]
    quickest = min(first, key=seconds_of).job.shape
    kept = [entry for entry in first if entry.kind != "moving" or entry.job.shape == quickest]
    left_s = budget_s - math.fsum(map(seconds_of, kept))
    for entry in sorted(later, key=seconds_of):
        if (left_s := left_s - seconds_of(entry)) >= 0:
            kept.append(entry)
    keys = {entry.key for entry in kept}
    return [entry for entry in plan if entry.key in keys]


def predicted_s(measurement: Measurement, costs: CostModel, *, num_ranks: int) -> float:
    cost_class = costs.class_of(measurement.job)
    groups_s: dict[tuple[int, ...], float] = defaultdict(float)
    for entry in _scripted_jobs(measurement, [range(num_ranks)]):
        tasks = [(Stage.ENCODE, ALONE), (Stage.PREPARE, ALONE), (Stage.DECODE, (1, len(entry.bands), 1))]
        tasks += [(Stage.DENOISE, degrees) for degrees in entry.steps]
        groups_s[entry.ranks] += math.fsum(costs.task_s(cost_class, *task) for task in tasks)
    return max(groups_s.values())


def learn(measurement: Measurement, samples: Samples, costs: CostModel) -> None:
    for name, durations in samples.tasks.items():
        costs.observe(costs.class_of(measurement.job), *_parsed(name), statistics.median(durations))


def jobs_like(plan: Iterable[Measurement]) -> list[AdmittedJob]:
    """Warm-up jobs with prompts of the same length, on which graphs may depend."""
    return [
        new_copy_of(entry.job, "warm-up", entry.job.spec.steps or 0, occasion="warm-up") for entry in plan
    ]


@dataclass(frozen=True, slots=True)
class _ScriptedJob:
    """A job of a measurement. The jobs of a group run one after the other."""

    job: AdmittedJob
    ranks: tuple[int, ...]
    bands: tuple[int, ...]
    steps: tuple[Degrees, ...]
    counts: bool


def measure(
    measurement: Measurement, pool: WorkerPool, *, folder: Path, signals: SignalPipe | None = None
) -> Samples:
    """Raises: WorkerError when a job fails; InterruptedRunError when a signal comes first."""
    near = pool.settings.near or pool.islands
    scripted = {entry.job.job_id: entry for entry in _scripted_jobs(measurement, near)}
    run = MeasuredRun()

    def place(view: JobView) -> Layout:
        return _layout_of(measurement, scripted[view.job_id], view)

    try:
        jobs = [entry.job for entry in scripted.values()]
        run_jobs(jobs, pool, run, policy=placed_by(place), folder=folder, signals=signals)
    except InterruptedRunError as error:
        number = error.signal_number
        raise InterruptedRunError(f"{measurement.key}: stopped", signal_number=number) from None
    except WorkerError as error:
        raise WorkerError(f"{measurement.key}: {error}") from None
    return _samples(measurement, scripted, run)


def _scripted_jobs(measurement: Measurement, near: Sequence[Sequence[int]]) -> Iterator[_ScriptedJob]:
    degree = 2 if measurement.kind == "moving" else measurement.num_ranks
    islands = sets_of(sorted(itertools.chain(*near)), near, degree)
    groups = _groups(measurement, islands)
    for ranks in groups:
        yield from _jobs_of_group(measurement, ranks)
    if measurement.kind == "loaded":
        busy = {rank for ranks in groups for rank in ranks}
        for rank in {rank for island in islands for rank in island} - busy:
            for entry in _jobs_of_group(measurement, (rank,)):
                yield replace(entry, steps=(ALONE,) * len(entry.steps), counts=False)


def _jobs_of_group(measurement: Measurement, ranks: tuple[int, ...]) -> Iterator[_ScriptedJob]:
    for number in range(1 + JOBS[measurement.kind]):
        steps = measurement.step_degrees(counts=number > 0)
        job_id = f"rank-{ranks[0]}-{number}"
        job = new_copy_of(measurement.job, job_id, len(steps), occasion=measurement.key)
        bands = ranks[: min(measurement.num_ranks, job.limits.max_decode_degree)]
        yield _ScriptedJob(job, ranks, bands, steps, counts=number > 0)


def _groups(measurement: Measurement, islands: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Groups inside islands; two ranks for a moving job."""
    if measurement.kind == "moving":
        return [tuple(max(islands, key=len)[:2])]
    size = measurement.num_ranks
    groups = [
        tuple(island[at : at + size]) for island in islands for at in range(0, len(island) - size + 1, size)
    ]
    return groups[:1] if measurement.kind == "alone" else groups


def _layout_of(measurement: Measurement, entry: _ScriptedJob, view: JobView) -> Layout:
    task = view.next_task
    match task.stage:
        case Stage.DENOISE if measurement.kind == "moving":
            return Layout.single(entry.ranks[(task.step or 0) % 2])
        case Stage.DENOISE:
            degrees = entry.steps[task.step or 0]
            return Layout(entry.ranks[: math.prod(degrees)], *degrees)
        case Stage.DECODE:
            return Layout.bands(entry.bands)
        case _:
            return Layout.single(entry.ranks[0])


def _samples(measurement: Measurement, scripted: Mapping[str, _ScriptedJob], run: MeasuredRun) -> Samples:
    spans = spans_of(run)
    gaps = [gap for gap in gaps_of(run, spans) if scripted[gap.after.task.job_id].counts]
    if measurement.kind == "moving":
        moves = [(gap.after.moved_bytes, gap.seconds) for gap in gaps if gap.before.task.step != 0]
        return Samples(moves=moves)
    tasks: dict[str, list[float]] = defaultdict(list)
    for number in run.done:
        task, degrees = run.dispatches[number].task, run.dispatches[number].layout.degrees
        is_first = task.stage is Stage.DENOISE and (task.step or 0) % (1 + STEPS[measurement.kind]) == 0
        if scripted[task.job_id].counts and not is_first and _has_right_load(measurement, number, spans):
            tasks[f"{task.stage} {'x'.join(map(str, degrees))}"].append(lasted_s(spans[number]))
    same = [gap.seconds for gap in gaps if gap.before.layout == gap.after.layout]
    writes = [seconds for job_id, seconds in run.written.items() if scripted[job_id].counts]
    return Samples(dict(tasks), writes, same)


def _has_right_load(measurement: Measurement, number: int, spans: Spans) -> bool:
    load = None if measurement.kind == "together" else _load(number, spans)
    return load is None or (load >= _BUSY if measurement.kind == "loaded" else load <= _IDLE)


def _load(number: int, spans: Spans) -> float | None:
    """The share of a task's time in which the other ranks worked; None without others."""
    own = spans[number]
    start_s, end_s = min(span.start_s for span in own.values()), max(span.end_s for span in own.values())
    busy_s: dict[int, float] = defaultdict(float)
    for tasks in spans.values():
        for rank, span in tasks.items():
            busy_s[rank] += max(0.0, min(end_s, span.end_s) - max(start_s, span.start_s))
    others = [seconds for rank, seconds in busy_s.items() if rank not in own]
    return statistics.fmean(others) / (end_s - start_s) if others else None


def _parsed(name: str) -> tuple[Stage, Degrees]:
    stage, _, degrees = name.partition(" ")
    return Stage(stage), tuple(map(int, degrees.split("x")))


def assemble(
    measured: Mapping[str, Samples],
    plan: Sequence[Measurement],
    *,
    device: str,
    source: str,
    num_ranks: int,
    versions: Mapping[str, str],
) -> Profile:
    gaps = [gap for samples in measured.values() for gap in samples.gaps]
    dispatch_s = max(0.0, statistics.median(gaps)) if gaps else 0.0
    moves = [
        (size_bytes, max(0.0, gap_s - dispatch_s))
        for samples in measured.values()
        for size_bytes, gap_s in samples.moves
    ]
    move_s, bytes_per_s = fit_moves(moves)
    shapes: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for entry in plan:
        shapes[entry.model, entry.job.shape].append(entry)
    return Profile(
        device=device,
        date=time.strftime("%Y-%m-%d"),
        source=source,
        num_ranks=num_ranks,
        rows=tuple([row for entries in shapes.values() for row in _rows(entries, measured)]),
        move_s=move_s,
        move_bytes_per_s=bytes_per_s,
        dispatch_s=rounded(dispatch_s),
        versions=versions,
    )


def _rows(shape: Sequence[Measurement], measured: Mapping[str, Samples]) -> Iterator[ProfileRow]:
    done = [entry for entry in shape if entry.key in measured]
    alone = _joined(measured[entry.key] for entry in done if entry.kind != "loaded")
    loaded = _joined(measured[entry.key] for entry in done if entry.kind == "loaded")
    writes, job = loaded.writes or alone.writes, shape[0].job
    for name, durations in alone.tasks.items():
        stage, degrees = _parsed(name)
        under_load = loaded.tasks.get(name)
        yield ProfileRow(
            model=job.model_in(),
            shape=job.shape,
            stage=stage,
            degrees=degrees,
            seconds=rounded(statistics.median(durations)),
            spread_s=rounded(interquartile_range(durations)),
            num_samples=len(durations),
            loaded_s=rounded(statistics.median(under_load)) if under_load else None,
            flops=job.flops[stage],
            state_bytes=job.state_bytes,
            write_s=rounded(statistics.median(writes)) if stage is Stage.DECODE and writes else None,
        )


def _joined(each: Iterable[Samples]) -> Samples:
    tasks: dict[str, list[float]] = defaultdict(list)
    writes: list[float] = []
    for samples in each:
        writes += samples.writes
        for name, durations in samples.tasks.items():
            tasks[name] += durations
    return Samples(tasks, writes)


def fit_moves(moves: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds per move, bytes per second) by medians; the rate is a bound if large moves are as fast."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for size_bytes, seconds in moves:
        by_size[size_bytes].append(seconds)
    medians = {size: statistics.median(values) for size, values in by_size.items()}
    default = NO_PROFILE.move_bytes_per_s
    if not medians:
        return 0.0, default
    if len(medians) > 1:
        slope, fixed_s = statistics.linear_regression(list(medians), list(medians.values()))
        if slope > 0 and fixed_s >= 0:
            return rounded(fixed_s), round(1 / slope)
        size, seconds = max(medians.items())
        if slope > 0:
            return 0.0, round(size / seconds)
        fixed_s = min(medians.values())
        rate = round(size / max(seconds - fixed_s, SHORTEST_MOVE_S))
        return rounded(fixed_s), max(rate, default)
    ((size, seconds),) = medians.items()
    return rounded(max(0.0, seconds - size / default)), default


def rounded(seconds: float) -> float:
    """Round to microseconds, since people read profiles."""
    return round(seconds, 6)
