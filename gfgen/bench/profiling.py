"""Measuring a profile: every stage and degree of some shapes, on real workers.

A measurement is a small run of the real control plane under a scripted policy. While one group of
ranks is measured, the others idle, or all of them work (on CPU ranks that makes a difference). What a
task took counts by what the other ranks really did meanwhile. A third kind lets a job change ranks at each
step, for the cost of moving. All of it is done in several rounds: what disturbs the machine for some seconds
touches some of the samples of many rows, where the median leaves it aside, and not all of one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from gfgen.bench.scripted import Record, new_copy_of, placed_by, run_jobs
from gfgen.errors import InterruptedRunError, WorkerError
from gfgen.graph import Stage
from gfgen.layout import Degrees, Layout
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import TaskDone
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.snapshot import JobView
from gfgen.system.signals import SignalPipe

ONE: Degrees = (1, 1, 1)
WARM_UP_STEPS = 2
"""Of a first job that does not count: the first task of a shape allocates."""
ROUNDS = 3
STEPS = 6
"""Of a job on one rank, in each round: 18 steps in all, and 3 samples of the stages that a job has one of."""
SHARED_STEPS = 4
"""Of a job on several ranks, of which the steps count, and the decode if there are no halves."""
MOVING_STEPS = 8
"""In the first round only: a move is a copy, and hardly varies."""
SHORTEST_MOVE_S = 1e-4
"""What takes less says nothing of a rate."""
_IDLE, _BUSY = 0.1, 0.75
"""Shares of a task's time in which the other ranks worked: below, it was alone; above, under load.
Steps of some milliseconds have gaps between them."""

Kind = Literal["alone", "loaded", "moving"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model and shape on one layout."""

    job: AdmittedJob
    degrees: Degrees
    kind: Kind
    round: int = 1

    @property
    def num_ranks(self) -> int:
        return math.prod(self.degrees)

    @property
    def model(self) -> str:
        return self.job.model_in()

    @property
    def key(self) -> str:
        """What tells it apart, in a file of unfinished measurements."""
        degrees = "x".join(map(str, self.degrees))
        return f"{self.model} {self.job.shape} {degrees} {self.kind} round {self.round}"


@dataclass(frozen=True, slots=True)
class Samples:
    """What a measurement gave, in seconds."""

    tasks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By stage."""
    writes: Sequence[float] = ()
    gaps: Sequence[float] = ()
    """Between two steps of a job on the same ranks."""
    moves: Sequence[tuple[int, float]] = ()
    """(bytes, seconds)"""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# What to measure ------------------------------------------------------------------------------


def plan_measurements(jobs: Iterable[AdmittedJob], *, num_ranks: int) -> list[Measurement]:
    """One job of each model and shape, on all degrees that it can use on so many ranks."""
    shapes = {(job.model_in(), job.shape): job for job in jobs}
    plan = []
    for job in shapes.values():
        for degrees in _degrees_of(job, num_ranks):
            plan.append(Measurement(job, degrees, "alone"))
            if math.prod(degrees) < num_ranks:
                plan.append(Measurement(job, degrees, "loaded"))
        if num_ranks > 1:
            plan.append(Measurement(job, ONE, "moving"))
    again = [entry for entry in plan if entry.kind != "moving"]
    return plan + [replace(entry, round=number) for number in range(2, ROUNDS + 1) for entry in again]


def within(
    plan: Sequence[Measurement], seconds_of: Callable[[Measurement], float], *, budget_s: float
) -> list[Measurement]:
    """As many rounds as fit into the budget, the quickest shapes first; the first round in any case.

    Moving is measured with the shape that is quickest alone, since a move is a copy.
    """
    shapes: dict[tuple[int, str, str], list[Measurement]] = defaultdict(list)
    for entry in plan:
        if entry.kind != "moving":
            shapes[entry.round, entry.model, entry.job.shape].append(entry)
    costs_s = {key: math.fsum(map(seconds_of, entries)) for key, entries in shapes.items()}
    quickest = min((key for key in costs_s if key[0] == 1), key=lambda key: costs_s[key])
    moving = [entry for entry in plan if entry.kind == "moving" and entry.job.shape == quickest[2]]
    kept, total_s = {key for key in costs_s if key[0] == 1}, math.fsum(map(seconds_of, moving))
    total_s += math.fsum(costs_s[key] for key in kept)
    for key in sorted(costs_s.keys() - kept, key=lambda key: costs_s[key]):
        total_s += costs_s[key]
        if total_s > budget_s:
            break
        kept.add(key)
    keys = {entry.key for key in kept for entry in shapes[key]} | {entry.key for entry in moving}
    return [entry for entry in plan if entry.key in keys]


def predicted_s(measurement: Measurement, costs: CostModel, *, num_ranks: int) -> float:
    """How long a measurement will take."""
    cost_class = costs.class_of(measurement.job)
    return max(
        sum(
            costs.remaining_s(cost_class, job.trajectory.task(0), job.trajectory.num_tasks, degrees)
            for job in group.jobs
        )
        for group in _groups(measurement, num_ranks)
        for degrees in [group.layout.degrees]
    )


def learn(measurement: Measurement, samples: Samples, costs: CostModel) -> None:
    """Let predictions of what is left follow from what was measured."""
    cost_class = costs.class_of(measurement.job)
    for stage, durations in samples.tasks.items():
        if durations:
            costs.observe(cost_class, Stage(stage), measurement.degrees, statistics.median(durations))


def _degrees_of(job: AdmittedJob, num_ranks: int) -> Iterator[Degrees]:
    for cfg in (1, 2) if job.uses_cfg else (1,):
        for ulysses in range(1, num_ranks // cfg + 1):
            if ulysses <= job.max_sequence_degree:
                yield (cfg, ulysses, 1)


@dataclass(frozen=True, slots=True)
class _Group:
    """Jobs that run one after the other on the same ranks; the first of them does not count."""

    layout: Layout
    jobs: tuple[AdmittedJob, ...]


def _groups(measurement: Measurement, num_ranks: int) -> list[_Group]:
    """The groups that work beside each other; the ranks that are left over are kept busy too."""
    cfg, ulysses, _ = measurement.degrees
    size = measurement.num_ranks
    lengths = [WARM_UP_STEPS, STEPS if size == 1 else SHARED_STEPS]
    if measurement.kind == "moving":
        lengths = [WARM_UP_STEPS, MOVING_STEPS]
    num_groups = num_ranks // size if measurement.kind == "loaded" else 1
    layouts = [
        Layout(tuple(range(start, start + size)), cfg=cfg, ulysses=ulysses)
        for start in range(0, num_groups * size, size)
    ]
    if measurement.kind == "loaded":
        layouts += [Layout.single(rank) for rank in range(num_groups * size, num_ranks)]
    return [
        _Group(
            layout,
            tuple(
                new_copy_of(measurement.job, f"rank-{layout.ranks[0]}-{n}", steps, occasion=measurement.key)
                for n, steps in enumerate(lengths)
            ),
        )
        for layout in layouts
    ]


# Measuring ------------------------------------------------------------------------------------


def measure(
    measurement: Measurement, pool: WorkerPool, *, folder: Path, signals: SignalPipe | None = None
) -> Samples:
    """Run a measurement on a pool that is ready.

    Raises: WorkerError when a job fails; InterruptedRunError when a signal comes first.
    """
    groups = _groups(measurement, pool.num_ranks)
    jobs = [job for group in groups for job in group.jobs]
    record = _Record()
    try:
        run_jobs(
            jobs, pool, record, policy=_script(measurement, groups, pool), folder=folder, signals=signals
        )
    except InterruptedRunError as error:
        raise InterruptedRunError(f"{measurement.key}: stopped", signal_number=error.signal_number) from None
    except WorkerError as error:
        raise WorkerError(f"{measurement.key}: {error}") from None
    return record.samples(measurement, warm_ups={group.jobs[0].job_id for group in groups})


def _script(measurement: Measurement, groups: Sequence[_Group], pool: WorkerPool) -> NamedPolicy:
    """Each group's jobs in turn, each task on the group's ranks; a moving job's steps by turns on two."""
    layouts = {job.job_id: group.layout for group in groups for job in group.jobs}

    def place(view: JobView) -> Layout:
        layout, stage = layouts[view.job_id], view.next_task.stage
        if not _is_shared(measurement, stage):
            return Layout.single(layout.ranks[0])
        if measurement.kind == "moving" and stage is Stage.DENOISE:
            return Layout.single(view.next_task.index % min(2, pool.num_ranks))
        return layout

    return placed_by(place)


def _is_shared(measurement: Measurement, stage: Stage) -> bool:
    """Whether a measurement's ranks run a task together: steps always, a decode where they are bands."""
    in_bands = measurement.degrees == (1, measurement.num_ranks, 1)
    can_decode = in_bands and measurement.num_ranks <= measurement.job.max_decode_degree
    return stage is Stage.DENOISE or (stage is Stage.DECODE and can_decode)


class _Record(Record):
    """What counts of a measurement's run."""

    def samples(self, measurement: Measurement, *, warm_ups: set[str]) -> Samples:
        """What counts: tasks on the measured degrees, with the other ranks as busy as they should be."""
        tasks: dict[str, list[float]] = defaultdict(list)
        moves = []
        for number, done in self.done.items():
            dispatch = self.dispatches[number]
            if dispatch.task.job_id in warm_ups or not self._counts(measurement, dispatch, done):
                continue
            tasks[str(dispatch.task.stage)].append(_lasted(done))
            if dispatch.transfers:
                moves.append((dispatch.moved_bytes, max(event.moved_s for event in done)))
        if measurement.kind == "moving":
            tasks.clear()
        return Samples(dict(tasks), write_times(self, warm_ups=warm_ups), self._gaps(warm_ups), moves)

    def _counts(self, measurement: Measurement, dispatch: Dispatch, done: Sequence[TaskDone]) -> bool:
        stage, degrees = dispatch.task.stage, dispatch.layout.degrees
        if degrees != measurement.degrees or (
            measurement.num_ranks > 1 and not _is_shared(measurement, stage)
        ):
            return False
        load = self._load(dispatch, done)
        return load is None or (load >= _BUSY if measurement.kind == "loaded" else load <= _IDLE)

    def _load(self, dispatch: Dispatch, done: Sequence[TaskDone]) -> float | None:
        """The share of the other ranks' time that they worked during a task; None without others."""
        began_s, ended_s = min(event.started_s for event in done), max(event.ended_s for event in done)
        busy_s: dict[int, float] = {}
        for events in self.done.values():
            for event in events:
                overlap_s = min(ended_s, event.ended_s) - max(began_s, event.started_s)
                busy_s[event.rank] = busy_s.get(event.rank, 0.0) + max(0.0, overlap_s)
        others = [seconds for rank, seconds in busy_s.items() if rank not in dispatch.layout.ranks]
        return sum(others) / len(others) / (ended_s - began_s) if others else None

    def _gaps(self, warm_ups: set[str]) -> list[float]:
        """From the end of a step to the start of the next one of the same job in the same place."""
        by_job: dict[str, list[tuple[Dispatch, TaskDone]]] = defaultdict(list)
        for number in sorted(self.done):
            dispatch = self.dispatches[number]
            if dispatch.task.stage is Stage.DENOISE and dispatch.task.job_id not in warm_ups:
                by_job[dispatch.task.job_id].append((dispatch, self.done[number][0]))
        return [
            later.started_s - later.moved_s - later.waited_s - earlier.ended_s
            for steps in by_job.values()
            for (before, earlier), (after, later) in pairwise(steps)
            if before.layout == after.layout
        ]


def write_times(record: Record, *, warm_ups: set[str]) -> list[float]:
    """Of each file, by its writer; others may have been written beside it, as in any run."""
    return [seconds for job_id, seconds in record.written.items() if job_id not in warm_ups]


def _lasted(done: Sequence[TaskDone]) -> float:
    return max(event.ended_s - event.started_s for event in done)


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
    rows = [
        row
        for measurement in plan
        if (measurement.kind, measurement.round) == ("alone", 1)
        for row in _rows(
            measurement,
            _of_all_rounds(measurement, measured),
            _of_all_rounds(replace(measurement, kind="loaded"), measured),
        )
    ]
    gaps = [gap for samples in measured.values() for gap in samples.gaps]
    move_s, bytes_per_s = fit_moves([move for samples in measured.values() for move in samples.moves])
    return Profile(
        device=device,
        date=time.strftime("%Y-%m-%d"),
        source=source,
        num_ranks=num_ranks,
        rows=tuple(rows),
        move_s=move_s,
        move_bytes_per_s=bytes_per_s,
        dispatch_s=rounded(max(0.0, statistics.median(gaps))) if gaps else 0.0,
        versions=versions,
    )


def _of_all_rounds(measurement: Measurement, measured: Mapping[str, Samples]) -> Samples:
    """The samples of tasks and files; none of a measurement that is in no plan."""
    keys = [replace(measurement, round=number).key for number in range(1, ROUNDS + 1)]
    rounds = [measured[key] for key in keys if key in measured]
    tasks: dict[str, list[float]] = defaultdict(list)
    for samples in rounds:
        for stage, durations in samples.tasks.items():
            tasks[stage] += durations
    return Samples(tasks, writes=[write for samples in rounds for write in samples.writes])


def _rows(measurement: Measurement, alone: Samples, loaded: Samples) -> Iterator[ProfileRow]:
    job = measurement.job
    for stage, durations in alone.tasks.items():
        under_load = loaded.tasks.get(stage)
        writes = [*loaded.writes] or [*alone.writes]
        yield ProfileRow(
            model=measurement.model,
            shape=job.shape,
            stage=Stage(stage),
            degrees=measurement.degrees,
            seconds=rounded(statistics.median(durations)),
            spread_s=rounded(interquartile_range(durations)),
            num_samples=len(durations),
            loaded_s=rounded(statistics.median(under_load)) if under_load else None,
            flops=job.flops[Stage(stage)],
            state_bytes=job.state_bytes,
            write_s=rounded(statistics.median(writes)) if stage == Stage.DECODE and writes else None,
        )


def fit_moves(moves: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds of any move, bytes per second beyond) through the medians by size.

    Where more bytes took no longer, any move takes what the fastest did, and the rate is too high to be told.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for size_bytes, seconds in moves:
        by_size[size_bytes].append(seconds)
    medians = {size: statistics.median(values) for size, values in by_size.items()}
    default = Profile(device="", date="", source="", num_ranks=1, rows=()).move_bytes_per_s
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


def interquartile_range(values: Sequence[float]) -> float:
    """The spread of the middle half; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def rounded(seconds: float) -> float:
    """Microseconds: a profile is read by people too."""
    return round(seconds, 6)
