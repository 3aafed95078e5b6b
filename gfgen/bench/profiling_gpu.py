"""Measuring a profile on GPUs: every stage, on 1, 2, 4 and 8 of them, as the devices' own clocks have it.

On a GPU a task takes as long whether or not other GPUs work, so as many groups of one size are measured
at once as there is room for. Each runs a job that does not count, then others whose steps go through all the
ways in which so many ranks can share one. Where a job moves at each step, the gaps tell what a move costs.
Each task is decided when the one before has ended: what is saved by deciding earlier, simulations know.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gfgen.bench.profiling import Samples, fit_moves, interquartile_range, rounded, write_times
from gfgen.bench.scripted import Record, new_copy_of, placed_by, run_jobs
from gfgen.bench.timeline import gaps_of, lasted_s, spans_of
from gfgen.errors import InterruptedRunError, WorkerError
from gfgen.graph import Stage
from gfgen.layout import Degrees, Layout
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.snapshot import JobView
from gfgen.system.signals import SignalPipe

ONE: Degrees = (1, 1, 1)
STEPS = 4
"""That count, in each way of sharing a step; one before them does not."""
JOBS = 2
"""That count, of each group, one after the other."""
MOVING_STEPS = 6


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model and shape on groups of one size."""

    job: AdmittedJob
    num_ranks: int
    """Of a group."""
    is_moving: bool = False

    @property
    def model(self) -> str:
        return self.job.model_in()

    @property
    def key(self) -> str:
        """What tells it apart, in a file of unfinished measurements."""
        return f"{self.model} {self.job.shape} on {self.num_ranks}{' moving' if self.is_moving else ''}"

    @property
    def ways(self) -> tuple[Degrees, ...]:
        """How a step uses the group's ranks."""
        return self.job.limits.ways(self.num_ranks)

    def step_degrees(self, *, is_warm_up: bool) -> tuple[Degrees, ...]:
        """Of a job's steps."""
        if self.is_moving:
            return (ONE,) * (2 if is_warm_up else 1 + MOVING_STEPS)
        return tuple([way for way in self.ways for _ in range(1 if is_warm_up else 1 + STEPS)])

    @property
    def decode_layout_degree(self) -> int:
        return min(self.num_ranks, self.job.max_decode_degree)


# What to measure ------------------------------------------------------------------------------


def plan_measurements(jobs: Iterable[AdmittedJob], *, num_ranks: int) -> list[Measurement]:
    """One job of each model and shape, on groups of 1, 2, 4 and 8 ranks of which all reach each other."""
    plan = []
    for job in {(job.model_in(), job.shape): job for job in jobs}.values():
        sizes = [size for size in (1, 2, 4, 8) if size <= min(num_ranks, job.limits.step_degree)]
        plan += [Measurement(job, size) for size in sizes]
        if num_ranks > 1:
            plan.append(Measurement(job, 1, is_moving=True))
    return plan


def predicted_s(measurement: Measurement, costs: CostModel, *, num_ranks: int) -> float:
    """How long a measurement will take."""
    job, cost_class = measurement.job, costs.class_of(measurement.job)
    ends_s = sum(costs.task_s(cost_class, stage, ONE) for stage in (Stage.ENCODE, Stage.PREPARE))
    ends_s += costs.task_s(cost_class, Stage.DECODE, (1, measurement.decode_layout_degree, 1))
    num_jobs = 1 if measurement.is_moving else JOBS
    steps = measurement.step_degrees(is_warm_up=True)
    steps += measurement.step_degrees(is_warm_up=False) * num_jobs
    steps_s = math.fsum(costs.task_s(costs.class_of(job), Stage.DENOISE, degrees) for degrees in steps)
    return steps_s + (1 + num_jobs) * ends_s


def learn(measurement: Measurement, samples: Samples, costs: CostModel) -> None:
    """Let predictions of what is left follow from what was measured."""
    for name, durations in samples.tasks.items():
        stage, degrees = _parsed(name)
        costs.observe(costs.class_of(measurement.job), stage, degrees, statistics.median(durations))


# Measuring ------------------------------------------------------------------------------------


def jobs_like(plan: Iterable[Measurement]) -> list[AdmittedJob]:
    """For warming up: with prompts as long as those that are measured, since graphs may be of one length."""
    return [
        new_copy_of(entry.job, "warm-up", entry.job.trajectory.num_steps, occasion="warm-up")
        for entry in plan
    ]


@dataclass(frozen=True, slots=True)
class _Part:
    """One job of a measurement."""

    job: AdmittedJob
    ranks: tuple[int, ...]
    degrees: tuple[Degrees, ...]
    """Of its steps."""
    counts: bool


def measure(
    measurement: Measurement, pool: WorkerPool, *, folder: Path, signals: SignalPipe | None = None
) -> Samples:
    """Run a measurement on a pool that is ready.

    Raises: WorkerError when a job fails; InterruptedRunError when a signal comes first.
    """
    parts = {part.job.job_id: part for part in _parts(measurement, pool.islands)}
    record = Record()

    def place(view: JobView) -> Layout:
        return _layout_of(measurement, parts[view.job_id], view)

    try:
        jobs = [part.job for part in parts.values()]
        run_jobs(jobs, pool, record, policy=placed_by(place), folder=folder, signals=signals)
    except InterruptedRunError as error:
        number = error.signal_number
        raise InterruptedRunError(f"{measurement.key}: stopped", signal_number=number) from None
    except WorkerError as error:
        raise WorkerError(f"{measurement.key}: {error}") from None
    return _samples(measurement, parts, record)


def _parts(measurement: Measurement, islands: Sequence[Sequence[int]]) -> Iterator[_Part]:
    num_jobs = 1 if measurement.is_moving else JOBS
    for ranks in _groups(measurement, islands):
        for number in range(1 + num_jobs):
            degrees = measurement.step_degrees(is_warm_up=number == 0)
            job_id = f"rank-{ranks[0]}-{number}"
            job = new_copy_of(measurement.job, job_id, len(degrees), occasion=measurement.key)
            yield _Part(job, ranks, degrees, counts=number > 0)


def _groups(measurement: Measurement, islands: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Each inside an island: as many as there is room for; or the two ranks between which a job moves."""
    if measurement.is_moving:
        return [tuple(max(islands, key=len)[:2])]
    size = measurement.num_ranks
    return [
        tuple(island[at : at + size]) for island in islands for at in range(0, len(island) - size + 1, size)
    ]


def _layout_of(measurement: Measurement, part: _Part, view: JobView) -> Layout:
    task = view.next_task
    match task.stage:
        case Stage.DENOISE if measurement.is_moving:
            return Layout.single(part.ranks[(task.step or 0) % 2])
        case Stage.DENOISE:
            cfg, ulysses, ring = part.degrees[task.step or 0]
            return Layout(part.ranks[: cfg * ulysses * ring], cfg=cfg, ulysses=ulysses, ring=ring)
        case Stage.DECODE:
            return Layout.bands(part.ranks[: measurement.decode_layout_degree])
        case _:
            return Layout.single(part.ranks[0])


def _samples(measurement: Measurement, parts: Mapping[str, _Part], record: Record) -> Samples:
    """What counts: steps but for the first of a kind, and what else a job does; or moves alone."""
    spans = spans_of(record)
    gaps = [gap for gap in gaps_of(record, spans) if parts[gap.after.task.job_id].counts]
    if measurement.is_moving:
        moves = [(gap.after.moved_bytes, gap.seconds) for gap in gaps if gap.before.task.step != 0]
        return Samples(moves=moves)
    tasks: dict[str, list[float]] = defaultdict(list)
    for number in record.done:
        task, degrees = record.dispatches[number].task, record.dispatches[number].layout.degrees
        is_first = task.stage is Stage.DENOISE and (task.step or 0) % (1 + STEPS) == 0
        if parts[task.job_id].counts and not is_first:
            tasks[_name(task.stage, degrees)].append(lasted_s(spans[number]))
    same = [gap.seconds for gap in gaps if gap.before.layout == gap.after.layout]
    warm_ups = {job_id for job_id, part in parts.items() if not part.counts}
    return Samples(dict(tasks), write_times(record, warm_ups=warm_ups), same)


def _name(stage: Stage, degrees: Degrees) -> str:
    return f"{stage} {'x'.join(map(str, degrees))}"


def _parsed(name: str) -> tuple[Stage, Degrees]:
    stage, _, degrees = name.partition(" ")
    cfg, ulysses, ring = map(int, degrees.split("x"))
    return Stage(stage), (cfg, ulysses, ring)


# From samples to a profile --------------------------------------------------------------------


def assemble(
    measured: Mapping[str, Samples],
    plan: Sequence[Measurement],
    *,
    device: str,
    source: str,
    num_ranks: int,
    versions: Mapping[str, str],
) -> Profile:
    """The profile of a plan whose measurements are all there."""
    gaps = [gap for samples in measured.values() for gap in samples.gaps]
    dispatch_s = statistics.median(gaps) if gaps else 0.0
    moves = [
        (size_bytes, max(0.0, gap_s - dispatch_s))
        for samples in measured.values()
        for size_bytes, gap_s in samples.moves
    ]
    move_s, bytes_per_s = fit_moves(moves)
    jobs = {(entry.model, entry.job.shape): entry.job for entry in plan}
    return Profile(
        device=device,
        date=time.strftime("%Y-%m-%d"),
        source=source,
        num_ranks=num_ranks,
        rows=tuple([row for job in jobs.values() for row in _rows(job, _of_shape(job, plan, measured))]),
        move_s=move_s,
        move_bytes_per_s=bytes_per_s,
        dispatch_s=rounded(dispatch_s),
        versions=versions,
    )


def _of_shape(
    job: AdmittedJob, plan: Sequence[Measurement], measured: Mapping[str, Samples]
) -> list[Samples]:
    return [measured[entry.key] for entry in plan if entry.job is job]


def _rows(job: AdmittedJob, samples: Sequence[Samples]) -> Iterator[ProfileRow]:
    """Of all group sizes: what one rank does is measured with each of them."""
    tasks: dict[str, list[float]] = defaultdict(list)
    for each in samples:
        for name, durations in each.tasks.items():
            tasks[name] += durations
    writes = [write for each in samples for write in each.writes]
    for name, durations in tasks.items():
        stage, degrees = _parsed(name)
        yield ProfileRow(
            model=job.model_in(),
            shape=job.shape,
            stage=stage,
            degrees=degrees,
            seconds=rounded(statistics.median(durations)),
            spread_s=rounded(interquartile_range(durations)),
            num_samples=len(durations),
            flops=job.flops[stage],
            state_bytes=job.state_bytes,
            write_s=rounded(statistics.median(writes)) if stage is Stage.DECODE and writes else None,
        )
