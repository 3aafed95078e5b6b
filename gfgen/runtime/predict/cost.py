"""Predicted durations: from a profile or by arithmetic at first, measured as soon as they were.

Jobs of one model and shape share a `CostClass`. For each (stage, degrees) of a class the estimate
is, in this order: what this run has measured; what the profile says of exactly this, of shapes
around it, or of other degrees (cost_table.py), times what this run has shown the profile to be off
by; the class's floating-point operations over the rate that the same model has reached in the same
stage with other shapes, or in its denoising steps; or over a default rate. Every estimate knows its
`Provenance`. Waiting and moving are not part of a duration.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gfgen.graph import Stage, Task
from gfgen.layout import MAX_RANKS, Degrees, Layout, Limits
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.cost_table import CostTable, Estimate, Provenance, TaskWork, speed_up
from gfgen.runtime.predict.profile_file import Profile
from gfgen.snapshot import Arrangement

_ONE: Degrees = (1, 1, 1)
DEFAULT_FLOPS_PER_S = 2e10
"""One CPU rank before anything was measured; 20 GFLOP/s is a core's order of magnitude."""
OVERHEAD_S = 2e-3
"""Per task: launching from Python, publishing the state."""
MOVE_BYTES_PER_S = 2e9
"""Copy through shared memory on one core."""
_RECENT = 0.2
"""Weight of a new measurement once five were seen; follows drift, damps noise."""
_MAX_SAMPLES = 64
_NOTABLE = 0.1
"""A change of an estimate below this share does not reorder jobs."""
_MAX_NAMED = 3
"""Shapes with doubtful estimates of one kind that are named in a line, and layouts of one of them."""
_CLEAR_GAIN = 0.98
"""Other degrees than the usual ones are chosen for a step that takes less than this share of its time."""


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, sample: float) -> None:
        self.count += 1
        self.value += (sample - self.value) * max(_RECENT, 1 / self.count)


@dataclass(slots=True, eq=False)
class CostClass:
    """All jobs of one model and shape."""

    model: str
    shape: str
    flops: Mapping[Stage, float]
    state_bytes: int
    measured: dict[tuple[Stage, Degrees], _Mean] = field(default_factory=dict)
    samples: dict[tuple[Stage, Degrees], deque[float]] = field(default_factory=dict)
    """The last durations of each kind of task, for a profile."""
    published: dict[tuple[Stage, Degrees], float] = field(default_factory=dict)
    """Estimates handed out since the last notable change."""
    rests: dict[tuple[int, int], float] = field(default_factory=dict)
    """What `rest_alone_s` has said since then, by next task, 2 for any step or the decode, and tasks left."""
    profiled: dict[tuple[Stage, Degrees], Estimate | None] = field(default_factory=dict)
    """What the profile says, looked up once."""
    limits: Limits = field(default_factory=Limits)
    arrangement: tuple[int, Arrangement] | None = None
    """As chosen at this version of the model."""

    def work(self, stage: Stage) -> TaskWork:
        return TaskWork(self.flops[stage], self.state_bytes)


@dataclass(frozen=True, slots=True, order=True)
class UncertainEstimate:
    """An estimate that was handed out and that no measurement of the like stands behind."""

    provenance: Provenance
    model: str
    shape: str
    stage: Stage
    degrees: Degrees


class CostModel:
    """Durations of tasks and moves, refined by every completed task."""

    def __init__(self, profile: Profile | None = None) -> None:
        self.version = 0
        """Rises when an estimate that was handed out has changed notably."""
        self._table = None if profile is None else CostTable(profile)
        self._move_s = 0.0 if profile is None else profile.move_s
        self._move_bytes_per_s = MOVE_BYTES_PER_S if profile is None else profile.move_bytes_per_s
        self._classes: dict[tuple[str, str], CostClass] = {}
        self._rates: dict[tuple[str, Stage], _Mean] = {}
        self._drifts: dict[tuple[str, Stage], _Mean] = {}
        """Measured durations over what the profile says of them."""
        self._doubts: set[UncertainEstimate] = set()

    def class_of(self, job: AdmittedJob) -> CostClass:
        """The class of jobs of this one's model and shape."""
        key = (job.spec.model or "", job.shape)
        if key not in self._classes:
            self._classes[key] = self.cost_class(
                job.model_in(() if self._table is None else self._table.models),
                job.shape,
                flops=job.flops,
                state_bytes=job.state_bytes,
                limits=job.limits,
            )
        return self._classes[key]

    def cost_class(
        self,
        model: str,
        shape: str,
        *,
        flops: Mapping[Stage, float],
        state_bytes: int,
        limits: Limits | None = None,
    ) -> CostClass:
        """The class of jobs of this model and shape; made when it is new."""
        key = (model, shape)
        if key not in self._classes:
            self._classes[key] = CostClass(model, shape, flops, state_bytes, limits=limits or Limits())
        return self._classes[key]

    def known_class(self, model: str, shape: str) -> CostClass:
        """The class of jobs of this model and shape, which has been made."""
        return self._classes[model, shape]

    def task_s(
        self, cost_class: CostClass, stage: Stage, degrees: Degrees, *, is_handed_out: bool = True
    ) -> float:
        """Predicted execution time of one task, as long as the other ranks are busy.

        What is handed out stays as it is until a notable change; who asks only to look ahead leaves no trace.
        """
        key = (stage, degrees)
        published = cost_class.published.get(key)
        if published is None:
            estimate = self.estimate(cost_class, stage, degrees)
            if not is_handed_out:
                return estimate.loaded_s
            published = cost_class.published[key] = estimate.loaded_s
            if estimate.provenance >= Provenance.EXTRAPOLATED:
                self._doubts.add(
                    UncertainEstimate(estimate.provenance, cost_class.model, cost_class.shape, stage, degrees)
                )
        return published

    def expected_s(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> float:
        """The same for saying when a task ends: all that was measured counts at once."""
        measured = cost_class.measured.get((stage, degrees))
        return self.task_s(cost_class, stage, degrees) if measured is None else measured.value

    def estimate(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> Estimate:
        """The same as of this moment, with its provenance."""
        measured = cost_class.measured.get((stage, degrees))
        if measured is not None:
            return Estimate(measured.value, measured.value, Provenance.MEASURED)
        profiled = self._profiled(cost_class, stage, degrees)
        if profiled is not None:
            return profiled.scaled(self._drift(cost_class.model, stage), profiled.provenance)
        return self._by_rate(cost_class, stage, degrees)

    @property
    def classes(self) -> Collection[CostClass]:
        """All that were asked for, some of them under two names."""
        return self._classes.values()

    @property
    def doubts(self) -> Sequence[UncertainEstimate]:
        """Estimates that were extrapolated or guessed when they were handed out, the worst last."""
        return sorted(self._doubts)

    def is_measured(self, cost_class: CostClass) -> bool:
        """Whether estimates rest on a measurement of this model, be it with another shape."""
        if self._table is not None and cost_class.model in self._table.models:
            return True
        denoise = (cost_class.model, Stage.DENOISE)
        return denoise in self._rates or any(stage is Stage.DENOISE for stage, _ in cost_class.measured)

    def has_seen(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> bool:
        """Whether a task like this has run, here or for the profile: its prediction is more than a guess."""
        if (stage, degrees) in cost_class.measured:
            return True
        return self._table is not None and self._table.has(cost_class.model, cost_class.shape, stage, degrees)

    def remaining_s(
        self,
        cost_class: CostClass,
        task: Task,
        num_tasks: int,
        degrees: Degrees,
        *,
        is_handed_out: bool = True,
    ) -> float:
        """Predicted time from `task` to the end of its job, with its steps on these degrees.

        The decode is on the same ranks, or on as many of them as make it quickest.
        """
        num_left = num_tasks - task.index
        num_steps = min(num_left - 1, num_tasks - 3)
        total_s = num_steps * self.task_s(cost_class, Stage.DENOISE, degrees, is_handed_out=is_handed_out)
        in_bands = self._decode_degrees(cost_class, math.prod(degrees))
        total_s += self.task_s(cost_class, Stage.DECODE, in_bands, is_handed_out=is_handed_out)
        if task.index < 2:
            total_s += self.task_s(cost_class, Stage.PREPARE, _ONE, is_handed_out=is_handed_out)
        if task.index < 1:
            total_s += self.task_s(cost_class, Stage.ENCODE, _ONE, is_handed_out=is_handed_out)
        return total_s

    def rest_alone_s(self, cost_class: CostClass, task: Task, num_tasks: int) -> float:
        """The same on one rank, which is asked for every job: of jobs that are alike it is added up once."""
        key = (min(task.index, 2), num_tasks - task.index)  # all that `remaining_s` depends on
        rest_s = cost_class.rests.get(key)
        if rest_s is None:
            rest_s = cost_class.rests[key] = self.remaining_s(cost_class, task, num_tasks, _ONE)
        return rest_s

    def arrangement(self, cost_class: CostClass) -> Arrangement:
        """How tasks of this class use ranks best, as far as is predicted; changes with `version` only."""
        if cost_class.arrangement is None or cost_class.arrangement[0] != self.version:
            steps = [self._best_way(cost_class, number) for number in range(1, MAX_RANKS + 1)]
            chosen = Arrangement(steps=tuple(steps), decodes=tuple(self._best_numbers(cost_class)))
            cost_class.arrangement = (self.version, chosen)
        return cost_class.arrangement[1]

    def _best_way(self, cost_class: CostClass, num_ranks: int) -> Degrees:
        """Of the degrees in which a step can use so many ranks: the usual ones, or clearly quicker ones."""
        usual, *others = cost_class.limits.ways(num_ranks)
        best, best_s = usual, _CLEAR_GAIN * self._known_s(cost_class, Stage.DENOISE, usual)
        for degrees in others:
            seconds = self._known_s(cost_class, Stage.DENOISE, degrees)
            if seconds < best_s < math.inf:
                best, best_s = degrees, seconds
        return best

    def _best_numbers(self, cost_class: CostClass) -> Iterator[int]:
        """Of 1 rank, of 2 and so on: all of them for a decode, or fewer that are known to be as quick."""
        chosen, best, best_s = 1, 1, math.inf
        for number in range(1, MAX_RANKS + 1):
            if number <= cost_class.limits.max_decode_degree:
                seconds = self._known_s(cost_class, Stage.DECODE, (1, number, 1))
                if seconds < best_s:
                    best, best_s = number, seconds
                chosen = best if seconds < math.inf else number
            yield chosen

    def _known_s(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> float:
        """An estimate that rests on tasks of the same degrees; infinite where there were none."""
        if (stage, degrees) in cost_class.measured or self._has_degrees(cost_class, stage, degrees):
            return self.estimate(cost_class, stage, degrees).loaded_s
        return math.inf

    def _decode_degrees(self, cost_class: CostClass, num_ranks: int) -> Degrees:
        if num_ranks == 1:
            return _ONE
        return (1, self.arrangement(cost_class).decodes[num_ranks - 1], 1)

    def move_s(self, cost_class: CostClass, source: Layout | None, layout: Layout) -> float:
        """Predicted time to bring a job's state to a layout; 0 where it is already."""
        if source is None or source == layout or set(layout.ranks).issubset(source.ranks):
            return 0.0
        return self._move_s + cost_class.state_bytes / self._move_bytes_per_s

    def observe(self, cost_class: CostClass, stage: Stage, degrees: Degrees, duration_s: float) -> None:
        """Learn from a completed task."""
        key = (stage, degrees)
        profiled = self._profiled(cost_class, stage, degrees)
        if key not in cost_class.measured:
            is_prior = profiled is not None and profiled.provenance is Provenance.PROFILED
            prior = _Mean(profiled.loaded_s, count=1) if profiled and is_prior else _Mean()
            cost_class.measured[key] = prior
        cost_class.measured[key].add(duration_s)
        cost_class.samples.setdefault(key, deque(maxlen=_MAX_SAMPLES)).append(duration_s)
        if profiled is not None and profiled.loaded_s > 0 and self._has_degrees(cost_class, stage, degrees):
            drift = self._drifts.setdefault((cost_class.model, stage), _Mean())
            drift.add(duration_s / profiled.loaded_s)
        if duration_s > OVERHEAD_S and cost_class.flops[stage] > 0:
            rate = cost_class.flops[stage] / (duration_s - OVERHEAD_S) / speed_up(math.prod(degrees))
            self._rates.setdefault((cost_class.model, stage), _Mean()).add(rate)
        published = cost_class.published.get(key)
        if published is None:
            return
        if abs(cost_class.measured[key].value - published) > _NOTABLE * published:
            for other in self._classes.values():  # some under two names
                if other.model == cost_class.model:
                    other.published.clear()
                    other.rests.clear()
            self.version += 1

    def _profiled(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> Estimate | None:
        if self._table is None:
            return None
        key = (stage, degrees)
        if key not in cost_class.profiled:
            cost_class.profiled[key] = self._table.task(
                cost_class.model, cost_class.shape, stage, degrees, cost_class.work(stage)
            )
        return cost_class.profiled[key]

    def _has_degrees(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> bool:
        """Whether the profile has them; else it may be off because of them and not of the machine."""
        return self._table is not None and self._table.has_degrees(cost_class.model, stage, degrees)

    def _drift(self, model: str, stage: Stage) -> float:
        """What the profile is off by here; 1 until something was measured."""
        drift = self._drifts.get((model, stage)) or self._drifts.get((model, Stage.DENOISE))
        return drift.value if drift else 1.0

    def _by_rate(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> Estimate:
        rate = self._rates.get((cost_class.model, stage)) or self._rates.get(
            (cost_class.model, Stage.DENOISE)
        )
        flops_per_s = (rate.value if rate else DEFAULT_FLOPS_PER_S) * speed_up(math.prod(degrees))
        seconds = cost_class.flops[stage] / flops_per_s + OVERHEAD_S
        return Estimate(seconds, seconds, Provenance.EXTRAPOLATED if rate else Provenance.GUESSED)


def uncertain(doubts: Sequence[UncertainEstimate], *, has_writes: bool) -> str | None:
    """What `in_one_line` says, and that a simulation leaves out writes where its profile has none."""
    parts = [in_one_line(doubts), None if has_writes else "the writing of files is left out"]
    return "; ".join(filter(None, parts)) or None


def in_one_line(doubts: Sequence[UncertainEstimate]) -> str | None:
    """What a person should know of the estimates that a prediction rests on; None when all are sound."""
    by_kind: dict[Provenance, dict[tuple[str, str], list[UncertainEstimate]]] = {}
    for doubt in doubts:
        shapes = by_kind.setdefault(doubt.provenance, {})
        shapes.setdefault((doubt.model, doubt.shape), []).append(doubt)
    parts = []
    for kind, shapes in sorted(by_kind.items()):
        names = [f"{model} {shape} ({_tasks(found)})" for (model, shape), found in shapes.items()]
        others = list(shapes)[_MAX_NAMED:]
        models = " and ".join(dict.fromkeys(model for model, _ in others))
        noun = "shape" if len(others) == 1 else "shapes"
        rest = f" and {len(others)} more {noun} of {models}" if others else ""
        parts.append(f"{kind.name.lower()}, not measured: {', '.join(names[:_MAX_NAMED])}{rest}")
    return "; ".join(parts) or None


def _tasks(doubts: Sequence[UncertainEstimate]) -> str:
    """'encode, decode, denoise on 1 rank and cfg 2': the stages, and the layouts of the steps."""
    stages = {doubt.stage for doubt in doubts}
    named = [str(stage) for stage in Stage if stage in stages and stage is not Stage.DENOISE]
    layouts = [_words(doubt.degrees) for doubt in doubts if doubt.stage is Stage.DENOISE]
    if len(layouts) > _MAX_NAMED:
        layouts = [f"{len(layouts)} layouts"]
    steps = " and ".join(filter(None, [", ".join(layouts[:-1]), *layouts[-1:]]))
    return ", ".join([*named, *([f"{Stage.DENOISE} on {steps}"] if steps else [])])


def _words(degrees: Degrees) -> str:
    """'cfg 2 x ulysses 2', or '1 rank'."""
    named = zip(("cfg", "ulysses", "ring"), degrees, strict=True)
    return " x ".join(f"{name} {degree}" for name, degree in named if degree > 1) or "1 rank"
