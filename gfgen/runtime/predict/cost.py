"""Predicted durations: from a profile or by arithmetic at first, then from measurements.

Jobs of one model and shape share a `CostClass`. The estimate for a (stage, degrees) of a class is the first
of: 1. this run's measurement; 2. the profile's time for this task, for shapes around it, or for other degrees
(cost_table.py), times the
   ratio of measured to profiled times in this run;
3. the task's floating-point operations at the pace of the same model in the same stage with other shapes, or
   in its denoising steps, in this run or in the profile;
4. a first use of such a task, or of others of its model, or a default pace.
Every estimate has a `Provenance`. Waiting and moving are not part of a duration. Estimates are medians: one
outlier moves none by more than the spread of the others. First uses (compiling, recording graphs) are no
measurements. They have a price of their own, which `remaining_s` includes until such a task has run.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gfgen.graph import FIRST_STEP, Stage, Task
from gfgen.layout import MAX_RANKS, Degrees, Layout, Limits
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.cost_table import CostTable, Estimate, Provenance, TaskWork, speed_up
from gfgen.runtime.predict.profile_file import IN_BATCHES, Profile, interquartile_range
from gfgen.snapshot import Arrangement

_ONE: Degrees = (1, 1, 1)
DEFAULT_FLOPS_PER_S = 2e10
"""One CPU rank without measurements; a core reaches the order of 20 GFLOP/s."""
OVERHEAD_S = 2e-3
"""Per task, for launching from Python and publishing the state."""
MOVE_BYTES_PER_S = 2e9
"""Copy through shared memory on one core."""
SWITCH_S = 0.05
"""Merging other LoRAs, until this run has done so."""
_NUM_RECENT = 9
"""Durations, or other tasks, that an estimate rests on. Their median ignores the slow first steps of up to
four new shapes of prompts, and follows a lasting change after five tasks."""
_MAX_SAMPLES = 64
_NOTABLE = 0.1
"""A smaller relative change of an estimate does not reorder jobs."""
_MAX_NAMED = 3
"""The most uncertain shapes per provenance, and layouts per shape, that a line names."""
_SPREADS = (0.0, 0.0, 0.05, 0.1, 0.5)
"""By provenance: how far an estimate may be off at least, as a share of it."""
_CLEAR_GAIN = 0.98
"""Other degrees replace the usual ones if a step on them takes less than this share of the time."""


_Key = tuple[Stage, Degrees]
_Tasks = dict[tuple[str, Degrees], float]
"""Values of the last _NUM_RECENT tasks, by `CostClass.kind` and degrees."""


class Recent:
    """The last durations of one kind of task."""

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=_MAX_SAMPLES)
        """More of them, all measured in this run, for a profile."""
        self.value = 0.0
        """The median, which outliers do not lift; of two the shorter one."""
        self.soonest_s = 0.0
        """The shortest time after which a rank was free again."""
        self._durations: deque[float] = deque(maxlen=_NUM_RECENT)
        self._first_ends: deque[float] = deque(maxlen=_NUM_RECENT)

    def add(self, duration_s: float, first_end_s: float | None = None) -> None:
        """Note the time until the task ended on its last rank, and on its first one if that was earlier."""
        self._durations.append(duration_s)
        self._first_ends.append(duration_s if first_end_s is None else first_end_s)
        self.value = (statistics.median if len(self._durations) > 2 else min)(self._durations)
        self.soonest_s = min(self._first_ends)


@dataclass(slots=True, eq=False)
class CostClass:
    """All jobs of one model and shape that share their steps with as many others."""

    model: str
    shape: str
    flops: Mapping[Stage, float]
    state_bytes: int
    measured: dict[tuple[Stage, Degrees], Recent] = field(default_factory=dict)
    first_uses: dict[_Key, tuple[float, float]] = field(default_factory=dict)
    """The shortest duration of a first use, and how much longer it took with its preparation."""
    warm: set[Degrees] = field(default_factory=set)
    """Degrees that warm-ups have used before the run."""
    published: dict[tuple[Stage, Degrees], float] = field(default_factory=dict)
    """Estimates returned since the last notable change."""
    alone: dict[Stage, float] = field(default_factory=dict)
    """Estimates on one rank since the last renewal, for `rest_alone_s`."""
    rests: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """Results of `rest_alone_s` since then, by next task (2 for any step or the decode), tasks left,
    and reused steps of them."""
    rests_on: dict[tuple[Degrees, int, int, int], float] = field(default_factory=dict)
    """Results of `remaining_s` for this version, by degrees and the same."""
    profiled: dict[tuple[Stage, Degrees], Estimate | None] = field(default_factory=dict)
    """The profile's estimates, looked up once."""
    writes: Recent = field(default_factory=Recent)
    """From the end of a decode to its file; shared by the classes of this model and shape."""
    write_s: float = field(init=False)
    """Their value as of the last renewal; 0 until one is known."""
    limits: Limits = field(default_factory=Limits)
    batch: int = 1
    """Jobs that take their steps together (control/job_record.py). A step of one of them is an equal part."""
    kind: str = field(init=False)
    """The shape, in words that tell batches of different sizes apart."""
    arrangement: Arrangement | None = None
    """Chosen for this version."""
    version: int = 0
    """Rises when a returned estimate changes notably, or is renewed."""

    def __post_init__(self) -> None:
        self.kind = _kind(self.shape, self.batch)
        self.write_s = self.writes.value

    def work(self, stage: Stage) -> TaskWork:
        return TaskWork(self.flops[stage], self.state_bytes)


@dataclass(frozen=True, slots=True, order=True)
class UncertainEstimate:
    """An estimate that was used without a measurement of the same task."""

    provenance: Provenance
    model: str
    shape: str
    stage: Stage
    degrees: Degrees


class CostModel:
    """Durations of tasks and moves, refined by every completed task."""

    def __init__(self, profile: Profile | None = None, *, shares_cores: bool = False) -> None:
        self.shares_cores = shares_cores or (profile is not None and profile.shares_cores)
        """Whether ranks slow each other down, so that durations depend on what else ran."""
        self.changed: set[CostClass] = set()
        """Classes of which an estimate has changed notably since their last renewal."""
        self.corrected: set[CostClass] = set()
        """Those of them that had no measurement: `rest_alone_s` is too far off to wait for the others."""
        self.kept: dict[Any, Any] = {}
        """As in snapshots: emptied whenever a returned estimate changes."""
        self._table = None if profile is None else CostTable(profile)
        self._move_s = 0.0 if profile is None else profile.move_s
        self._move_bytes_per_s = MOVE_BYTES_PER_S if profile is None else profile.move_bytes_per_s
        self._classes: dict[tuple[str, str], CostClass] = {}
        self._paces: dict[tuple[str, Stage], _Tasks] = {}
        """Seconds per operation, on one rank."""
        self._first_paces: dict[tuple[str, Stage], float] = {}
        """The shortest of first uses."""
        self._drifts: dict[tuple[str, Stage], _Tasks] = {}
        """Ratios of measured to profiled durations."""
        self._default_first_use_s = 0.0
        self._warm: Collection[tuple[str, str, Degrees]] = ()
        self._first_uses: dict[str, Recent] = {}
        """By model: how much longer first uses took than other tasks of their kind."""
        self._switches: dict[str, Recent] = {}
        """Seconds to merge other LoRAs, by model."""
        self._writes: dict[tuple[str, str], Recent] = {}
        """`CostClass.writes`, by model and shape."""
        self._doubts: set[UncertainEstimate] = set()

    def class_of(self, job: AdmittedJob, *, batch: int = 1) -> CostClass:
        key = (job.spec.model or "", _kind(job.shape, batch))
        if key not in self._classes:
            self._classes[key] = self.cost_class(
                job.model_in(() if self._table is None else self._table.models),
                job.shape,
                flops=job.flops,
                state_bytes=job.state_bytes,
                limits=job.limits,
                batch=batch,
            )
            name, shape = job.spec.model or "", _kind(job.shape, batch)
            self._classes[key].warm.update(way for *what, way in self._warm if what == [name, shape])
        return self._classes[key]

    def price_first_uses(self, default_s: float, warm: Collection[tuple[str, str, Degrees]]) -> None:
        """Set `RunStart.first_use_s` and `RunStart.warm`, before there are classes."""
        self._default_first_use_s, self._warm = default_s, warm

    def cost_class(
        self,
        model: str,
        shape: str,
        *,
        flops: Mapping[Stage, float],
        state_bytes: int,
        limits: Limits | None = None,
        batch: int = 1,
    ) -> CostClass:
        """The class of jobs of this model and shape, created if new."""
        key = (model, _kind(shape, batch))
        if key not in self._classes:
            limits = limits or Limits()
            writes = self._writes_of(model, shape, TaskWork(flops[Stage.DECODE], state_bytes))
            self._classes[key] = CostClass(
                model, shape, flops, state_bytes, limits=limits, batch=batch, writes=writes
            )
        return self._classes[key]

    def known_class(self, model: str, kind: str) -> CostClass:
        """The existing class of this model and `CostClass.kind`."""
        return self._classes[model, kind]

    def task_s(
        self, cost_class: CostClass, stage: Stage, degrees: Degrees, *, is_handed_out: bool = True
    ) -> float:
        """Predicted execution time of one task while the other ranks are busy.

        The value stays constant until a notable change. If not `is_handed_out`, for lookaheads, it is not
        recorded.
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
                    UncertainEstimate(estimate.provenance, cost_class.model, cost_class.kind, stage, degrees)
                )
        return published

    def expected_s(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> tuple[float, float]:
        """The same for predicting the end of a task, and the least time after which a rank of it is free.

        Every measurement counts at once.
        """
        measured = cost_class.measured.get((stage, degrees))
        if measured is not None:
            return measured.value, measured.soonest_s
        estimate = self.estimate(cost_class, stage, degrees)
        return self.task_s(cost_class, stage, degrees), max(0.0, estimate.seconds - estimate.spread_s)

    def estimate(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> Estimate:
        """The current estimate with its provenance."""
        measured = cost_class.measured.get((stage, degrees))
        if measured is not None:
            return Estimate(measured.value, measured.value, Provenance.MEASURED)
        if stage is Stage.REUSE:
            seconds = OVERHEAD_S + cost_class.state_bytes / self._move_bytes_per_s
            return Estimate(seconds, seconds, Provenance.EXTRAPOLATED)
        profiled = self._profiled(cost_class, stage, degrees)
        if profiled is not None:
            return profiled.scaled(self._drift(cost_class.model, stage), profiled.provenance)
        return self._by_pace(cost_class, stage, degrees)

    def spread(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> float:
        """How far the estimate may be off, as a share of it: the interquartile range, or more if it is not
        measured."""
        measured = cost_class.measured.get((stage, degrees))
        if measured is not None:
            return interquartile_range(measured.samples) / max(measured.value, OVERHEAD_S)
        found = self.estimate(cost_class, stage, degrees)
        return max(_SPREADS[found.provenance], found.spread_s / max(found.seconds, OVERHEAD_S))

    @property
    def classes(self) -> Collection[CostClass]:
        """All classes; a class may appear under two names."""
        return self._classes.values()

    @property
    def doubts(self) -> Sequence[UncertainEstimate]:
        """Estimates that were extrapolated or guessed when they were returned, the worst last."""
        return sorted(self._doubts)

    def is_measured(self, cost_class: CostClass) -> bool:
        """Whether estimates rest on a measurement of this model, possibly with another shape."""
        if self._table is not None and cost_class.model in self._table.models:
            return True
        denoise = (cost_class.model, Stage.DENOISE)
        return denoise in self._paces or any(stage is Stage.DENOISE for stage, _ in cost_class.measured)

    def has_seen(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> bool:
        """Whether such a task has run, in this run or for the profile."""
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
        num_reused: int = 0,
        is_handed_out: bool = True,
    ) -> float:
        """Predicted time from `task` to the end of its job, with its steps on these degrees.

        num_reused: of these steps. The decode runs on as many of the same ranks as make it fastest.
        """
        key = (degrees, min(task.index, 2), num_tasks - task.index, num_reused)
        if (rest_s := cost_class.rests_on.get(key)) is not None:
            return rest_s
        bands = 1 if degrees == _ONE else self.arrangement(cost_class).decodes[math.prod(degrees) - 1]
        own = {Stage.DENOISE: degrees, Stage.REUSE: degrees, Stage.DECODE: (1, bands, 1)}

        def stage_s(stage: Stage) -> float:
            return self.task_s(cost_class, stage, own.get(stage, _ONE), is_handed_out=is_handed_out)

        rest_s = self._rest_s(stage_s, task, num_tasks, num_reused=num_reused)
        rest_s += self.first_use_s(cost_class, Stage.DECODE, own[Stage.DECODE])
        if task.index < num_tasks - 1:
            rest_s += self.first_use_s(cost_class, Stage.DENOISE, degrees)
        if is_handed_out:
            cost_class.rests_on[key] = rest_s
        return rest_s

    def rest_alone_s(
        self, cost_class: CostClass, task: Task, num_tasks: int, *, num_reused: int = 0
    ) -> float:
        """The same on one rank, by the estimates of the last renewal.

        All views of equal jobs then agree. If the rest of a started job came from newer and longer estimates,
        jobs that have not started would overtake it.
        """
        # All that `remaining_s` depends on.
        key = (min(task.index, FIRST_STEP), num_tasks - task.index, num_reused)
        rest_s = cost_class.rests.get(key)
        if rest_s is None:

            def stage_s(stage: Stage) -> float:
                if stage not in cost_class.alone:
                    cost_class.alone[stage] = self.task_s(cost_class, stage, _ONE)
                return cost_class.alone[stage]

            rest_s = self._rest_s(stage_s, task, num_tasks, num_reused=num_reused)
            stages = (Stage.DENOISE, Stage.DECODE)[task.index == num_tasks - 1 :]
            rest_s += sum(self.first_use_s(cost_class, stage, _ONE) for stage in stages)
            cost_class.rests[key] = rest_s
        return rest_s

    def first_use_s(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> float:
        """The price of the first step or decode of this class on these degrees; 0 once there was one."""
        key, default_s = (stage, degrees), self._default_first_use_s
        if not default_s or stage not in (Stage.DENOISE, Stage.DECODE):
            return 0.0
        if key in cost_class.measured or key in cost_class.first_uses:
            return 0.0
        ways = (way if stage is Stage.DENOISE else (1, math.prod(way), 1) for way in cost_class.warm)
        if degrees in ways:
            return 0.0
        learned = self._first_uses.get(cost_class.model)
        return (default_s if learned is None else learned.value) / cost_class.batch

    def _rest_s(
        self, stage_s: Callable[[Stage], float], task: Task, num_tasks: int, *, num_reused: int
    ) -> float:
        """The sum of the tasks from `task` on, by the time of each stage."""
        num_steps = min(num_tasks - task.index - 1, num_tasks - 3) - num_reused
        total_s = num_steps * stage_s(Stage.DENOISE)
        if num_reused:
            total_s += num_reused * stage_s(Stage.REUSE)
        total_s += stage_s(Stage.DECODE)
        if task.index < FIRST_STEP:
            total_s += stage_s(Stage.PREPARE)
        if task.index < 1:
            total_s += stage_s(Stage.ENCODE)
        return total_s

    def renew(self, classes: Iterable[CostClass]) -> None:
        """Let `rest_alone_s` use the present estimates of these classes."""
        for each in list(classes):
            self._rise(each)
            each.alone.clear()
            each.rests.clear()
            each.write_s = each.writes.value
            self.changed.discard(each)
            self.corrected.discard(each)

    def _rise(self, cost_class: CostClass) -> None:
        """Begin another version of a class."""
        cost_class.version += 1
        cost_class.arrangement = None
        cost_class.rests_on.clear()
        self.kept.clear()

    def arrangement(self, cost_class: CostClass) -> Arrangement:
        """The best predicted use of ranks by tasks of this class; changes only with its version."""
        if cost_class.arrangement is None:
            steps = [self._best_way(cost_class, number) for number in range(1, MAX_RANKS + 1)]
            decodes = tuple(self._best_numbers(cost_class))
            cost_class.arrangement = Arrangement(steps=tuple(steps), decodes=decodes)
        return cost_class.arrangement

    def _best_way(self, cost_class: CostClass, num_ranks: int) -> Degrees:
        """The usual degrees of a step on this many ranks, or clearly faster ones."""
        usual, *others = cost_class.limits.ways(num_ranks)
        if not others:
            return usual
        best, best_s = usual, _CLEAR_GAIN * self._known_s(cost_class, Stage.DENOISE, usual)
        for degrees in others:
            seconds = self._known_s(cost_class, Stage.DENOISE, degrees)
            if seconds < best_s < math.inf:
                best, best_s = degrees, seconds
        return best

    def _best_numbers(self, cost_class: CostClass) -> Iterator[int]:
        """For 1 rank, 2 ranks and so on: how many of them a decode uses; fewer if those are known to be as
        fast."""
        chosen, best, best_s = 1, 1, math.inf
        for number in range(1, MAX_RANKS + 1):
            if number <= cost_class.limits.max_decode_degree:
                seconds = self._known_s(cost_class, Stage.DECODE, (1, number, 1))
                if seconds < best_s:
                    best, best_s = number, seconds
                chosen = best if seconds < math.inf else number
            yield chosen

    def _known_s(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> float:
        """An estimate from tasks of the same degrees; infinite if there are none."""
        if (stage, degrees) in cost_class.measured or self._has_degrees(cost_class, stage, degrees):
            return self.estimate(cost_class, stage, degrees).loaded_s
        return math.inf

    def move_s(self, cost_class: CostClass, source: Layout | None, layout: Layout) -> float:
        """Predicted time to move a job's state to a layout; 0 if it is already there."""
        if source is None or source == layout or set(layout.ranks).issubset(source.ranks):
            return 0.0
        return self._move_s + cost_class.state_bytes / self._move_bytes_per_s

    def switch_s(self, cost_class: CostClass) -> float:
        """Predicted time to merge other LoRAs into a model."""
        recent = self._switches.get(cost_class.model)
        return SWITCH_S if recent is None else recent.value

    def observe_switch(
        self, cost_class: CostClass, stage: Stage, degrees: Degrees, duration_s: float
    ) -> None:
        """Learn from a completed task that merged other LoRAs first."""
        usual = cost_class.measured.get((stage, degrees))
        if usual is None:
            switch_s = self.switch_s(cost_class) / cost_class.batch
            self.observe(cost_class, stage, degrees, max(0.0, duration_s - switch_s))
        else:
            switch_s = max(0.0, duration_s - usual.value) * cost_class.batch
            self._switches.setdefault(cost_class.model, Recent()).add(switch_s)

    def observe_write(self, cost_class: CostClass, duration_s: float) -> None:
        """Learn from a file that was written."""
        cost_class.writes.add(duration_s)
        cost_class.writes.samples.append(duration_s)
        for each in self._of_model(cost_class.model):
            if each.writes is cost_class.writes and _is_notable(each.writes.value, each.write_s):
                self.changed.add(each)

    def _writes_of(self, model: str, shape: str, decode: TaskWork) -> Recent:
        """Of all classes of this model and shape: at first the profile's time, if it has one."""
        if (model, shape) not in self._writes:
            writes = self._writes[model, shape] = Recent()
            profiled_s = 0.0 if self._table is None else self._table.write_s(model, shape, decode)
            if profiled_s:
                writes.add(profiled_s)
        return self._writes[model, shape]

    def observe(
        self,
        cost_class: CostClass,
        stage: Stage,
        degrees: Degrees,
        duration_s: float,
        *,
        first_end_s: float | None = None,
    ) -> None:
        """Learn from a completed task; `first_end_s` is when the first of its ranks was free, if earlier."""
        key, model, task = (stage, degrees), cost_class.model, (cost_class.kind, degrees)
        profiled = None if self._table is None else self._profiled(cost_class, stage, degrees)
        measured, price_s = cost_class.measured.get(key), self.first_use_s(cost_class, stage, degrees)
        is_first = measured is None
        if measured is None:
            if (first_use := cost_class.first_uses.get(key)) is not None:
                self._learn_price(cost_class, sum(first_use) - duration_s)
            measured = cost_class.measured[key] = Recent()
            if profiled is not None and profiled.provenance is Provenance.PROFILED:
                measured.add(profiled.loaded_s, max(0.0, profiled.seconds - profiled.spread_s))
        measured.add(duration_s, first_end_s)
        measured.samples.append(duration_s)
        if profiled is not None and self._shows_drift(cost_class, stage, degrees, profiled):
            _note(self._drifts.setdefault((model, stage), {}), task, measured.value / profiled.loaded_s)
        if (pace := _pace(cost_class, stage, degrees, measured.value)) is not None:
            _note(self._paces.setdefault((model, stage), {}), task, pace)
        self._note_learned(cost_class, key, measured.value, is_first=is_first, price_s=price_s)

    def observe_first_use(
        self, cost_class: CostClass, stage: Stage, degrees: Degrees, duration_s: float, *, prepared_s: float
    ) -> None:
        """Learn what a first use costs; its duration predicts others only if nothing else can."""
        key, model = (stage, degrees), cost_class.model
        price_s, before = self.first_use_s(cost_class, stage, degrees), cost_class.first_uses.get(key)
        if before is None or duration_s < before[0]:
            cost_class.first_uses[key] = (duration_s, prepared_s)
            if (pace := _pace(cost_class, stage, degrees, duration_s)) is not None:
                self._first_paces[model, stage] = min(pace, self._first_paces.get((model, stage), pace))
        if (measured := cost_class.measured.get(key)) is not None:
            self._learn_price(cost_class, duration_s + prepared_s - measured.value)
        estimate_s = self.estimate(cost_class, stage, degrees).loaded_s
        self._note_learned(cost_class, key, estimate_s, is_first=before is None, price_s=price_s)

    def _learn_price(self, cost_class: CostClass, extra_s: float) -> None:
        if self._default_first_use_s:
            model = cost_class.model
            self._first_uses.setdefault(model, Recent()).add(max(0.0, extra_s) * cost_class.batch)
            self._correct(self._of_model(model))

    def _note_learned(
        self, cost_class: CostClass, key: _Key, estimate_s: float, *, is_first: bool, price_s: float
    ) -> None:
        """Let estimates change that are wrong now; `price_s` was that of a first use before this task."""
        published = cost_class.published.get(key)
        if published is not None and _is_notable(estimate_s, published):
            for other in self._of_model(cost_class.model):
                other.published.clear()
                self._rise(other)
                self.changed.add(other)
        if is_first:
            self._note_corrected(cost_class.model)
        if price_s:
            self._correct([cost_class])

    def _correct(self, classes: Collection[CostClass]) -> None:
        """Renew these classes at the next decision."""
        for each in classes:
            self._rise(each)
        self.changed.update(classes)
        self.corrected.update(classes)

    def _of_model(self, model: str) -> set[CostClass]:
        return {each for each in self._classes.values() if each.model == model}

    def _note_corrected(self, model: str) -> None:
        """After a first measurement: find the classes of which `rest_alone_s` is notably wrong."""
        for each in self._of_model(model):
            if any(
                _is_notable(self.estimate(each, stage, _ONE).loaded_s, alone_s)
                for stage, alone_s in each.alone.items()
            ):
                self.changed.add(each)
                self.corrected.add(each)

    def _profiled(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> Estimate | None:
        if self._table is None or stage is Stage.REUSE:
            return None
        key = (stage, degrees)
        if key not in cost_class.profiled:
            # A table without steps of such a batch takes those of the same work: of single jobs.
            shape = cost_class.kind if stage is Stage.DENOISE else cost_class.shape
            work = cost_class.work(stage)
            cost_class.profiled[key] = self._table.task(cost_class.model, shape, stage, degrees, work)
        return cost_class.profiled[key]

    def _has_degrees(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> bool:
        """Whether the profile has these degrees."""
        return self._table is not None and self._table.has_degrees(cost_class.model, stage, degrees)

    def _shows_drift(self, cost_class: CostClass, stage: Stage, degrees: Degrees, profiled: Estimate) -> bool:
        """Whether a deviation from the profile is due to the machine, and not to degrees or a batch."""
        is_alike = cost_class.batch == 1 or profiled.provenance is Provenance.PROFILED
        return is_alike and profiled.loaded_s > 0 and self._has_degrees(cost_class, stage, degrees)

    def _drift(self, model: str, stage: Stage) -> float:
        """The ratio of measured to profiled times; 1 until there is a measurement."""
        drifts = self._drifts.get((model, stage)) or self._drifts.get((model, Stage.DENOISE))
        return statistics.median(drifts.values()) if drifts else 1.0

    def _by_pace(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> Estimate:
        """From other tasks of the model. A first use bounds the estimate, and replaces a guess."""
        model, provenance = cost_class.model, Provenance.EXTRAPOLATED
        first_s, _ = cost_class.first_uses.get((stage, degrees), (math.inf, 0.0))
        paces = self._paces.get((model, stage)) or self._paces.get((model, Stage.DENOISE))
        pace = statistics.median(paces.values()) if paces else None
        if pace is None and self._table is not None:
            pace = self._table.pace(model)
        if pace is None:
            provenance = Provenance.GUESSED
            if first_s < math.inf:
                return Estimate(first_s, first_s, provenance)
            found = (self._first_paces.get((model, each)) for each in (stage, Stage.DENOISE))
            pace = next(filter(None, found), 1 / DEFAULT_FLOPS_PER_S)
        seconds = cost_class.flops[stage] * pace / speed_up(math.prod(degrees)) + OVERHEAD_S
        return Estimate(min(seconds, first_s), min(seconds, first_s), provenance)


def _note(values: _Tasks, task: tuple[str, Degrees], value: float) -> None:
    """Keep the value of a task, and of those that ran last besides."""
    values.pop(task, None)
    values[task] = value
    if len(values) > _NUM_RECENT:
        del values[next(iter(values))]


def _pace(cost_class: CostClass, stage: Stage, degrees: Degrees, duration_s: float) -> float | None:
    """Seconds per operation on one rank; None for tasks without arithmetic."""
    flops = cost_class.flops[stage]
    if duration_s <= OVERHEAD_S or flops <= 0:
        return None
    return (duration_s - OVERHEAD_S) * speed_up(math.prod(degrees)) / flops


def _kind(shape: str, batch: int) -> str:
    return shape if batch == 1 else f"{shape}{IN_BATCHES}{batch}"


def _is_notable(seconds: float, before_s: float) -> bool:
    return abs(seconds - before_s) > _NOTABLE * before_s


def uncertain(doubts: Sequence[UncertainEstimate], *, has_writes: bool) -> str | None:
    """Describe in one line the uncertain estimates of a prediction; None if there are none.

    has_writes: whether the profile has times for writing files.
    """
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
    if not has_writes:
        parts.append("the writing of files is left out")
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
