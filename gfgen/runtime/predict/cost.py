"""Predicted durations: from a profile or by arithmetic at first, then from measurements.

Jobs of one model and shape share a `CostClass`. The estimate for a (stage, degrees) of a class is the first
of: 1. this run's measurement; 2. the profile's time for this task, for shapes around it, or for other degrees
   (cost_table.py), times the ratio of measured to profiled times in this run;
3. the task's floating-point operations at the pace of the same model in the same stage with other shapes, or
   in its denoising steps, in this run or in the profile;
4. a first use of such a task, or of others of its model, or a default pace.
Every estimate has a `Provenance`. Policies are told `task_s` of one task and `remaining_s` from a task to the
end of its job; both change only when an estimate has changed notably, and leave out waiting and moving.
Estimates are medians: one outlier moves none by more than the spread of the others. First uses (compiling,
recording graphs) are no measurements. They have a price of their own, which `remaining_s` includes until such
a task has run.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gfgen.graph import FIRST_STEP, STEPS, Stage, Task
from gfgen.layout import ALONE, MAX_RANKS, Degrees, Layout, Limits, with_torus
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import sets_of
from gfgen.runtime.predict.cost_table import CostTable, Estimate, Provenance, TaskWork, speed_up
from gfgen.runtime.predict.links import exposed_s
from gfgen.runtime.predict.profile_file import IN_BATCHES, NO_PROFILE, Profile, interquartile_range
from gfgen.snapshot import Arrangement

DEFAULT_FLOPS_PER_S = 2e10
"""One CPU rank without measurements; a core reaches the order of 20 GFLOP/s."""
OVERHEAD_S = 2e-3
"""Per task, for launching from Python and publishing the state."""
SWITCH_S = 0.05
"""Merging other patches, until this run has done so."""
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
_READING = 1.1
"""A step that takes up to this many times its reads tells nothing about computing."""
_PAYS = 0.12
"""Over slow links, twice as many ranks have to be faster by this share: other jobs could use them. Without it
late jobs took eight ranks for a gain of 1.1, and fewer met their deadlines than without wide layouts
(benchmarks/slow_links.py)."""
_CLEAR_GAIN = 0.98
"""Other degrees replace the usual ones if a step on them takes less than this share of the time."""


_Key = tuple[Stage, Degrees]
_Tasks = dict[tuple[str, Degrees], float]
"""Values of the last _NUM_RECENT tasks, by `CostClass.kind` and degrees."""
_Rest = tuple[Degrees | None, int, int, int]
"""The degrees of a job's steps, its next task (2: any step or decode), tasks left, approximate steps."""


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
class ModelTimes:
    """What tasks of one model teach about its other tasks."""

    classes: list[CostClass] = field(default_factory=list)
    paces: defaultdict[Stage, _Tasks] = field(default_factory=lambda: defaultdict(dict))
    """Seconds per operation, on one rank."""
    first_paces: dict[Stage, float] = field(default_factory=dict)
    """The shortest of first uses."""
    drifts: defaultdict[Stage, _Tasks] = field(default_factory=lambda: defaultdict(dict))
    """Ratios of measured to profiled durations."""
    first_uses: Recent | None = None
    """How much longer first uses took than other tasks of their kind."""
    switches: Recent | None = None
    """Seconds to merge other patches."""
    writes: defaultdict[str, Recent] = field(default_factory=lambda: defaultdict(Recent))
    """From the end of a decode to its file, by shape."""

    def drift(self, stage: Stage) -> float:
        """The ratio of measured to profiled times; 1 until there is a measurement."""
        drifts = self.drifts[stage] or self.drifts[Stage.DENOISE]
        return statistics.median(drifts.values()) if drifts else 1.0

    def pace(self, stage: Stage) -> float | None:
        paces = self.paces[stage] or self.paces[Stage.DENOISE]
        return statistics.median(paces.values()) if paces else None


@dataclass(slots=True, eq=False)
class CostClass:
    """All jobs of one model and shape that share their steps with as many others."""

    model: str
    shape: str
    flops: Mapping[Stage, float]
    state_bytes: int
    limits: Limits
    num_sharers: int
    """Jobs that share their steps' reads (control/sharing.py). A step of one of them is an equal part."""
    shared: ModelTimes = field(repr=False)
    reads_s: tuple[float, ...] = (0.0, 0.0)
    """How long a step reads streamed blocks: on one rank, and with a rank for each branch."""
    num_refined: int = 0
    """The last steps of each of its jobs that are of a second pass."""
    kind: str = field(init=False)
    """The shape, in words that tell different numbers of sharers apart."""
    measured: dict[_Key, Recent] = field(default_factory=dict)
    first_uses: dict[_Key, tuple[float, float]] = field(default_factory=dict)
    """The shortest duration of a first use, and how much longer it took with its preparation."""
    warm: set[_Key] = field(default_factory=set)
    """What warm-ups have used before the run."""
    profiled: dict[_Key, Estimate | None] = field(default_factory=dict)
    """The profile's estimates, looked up once."""
    published: dict[_Key, float] = field(default_factory=dict)
    """Estimates returned since the last notable change."""
    alone: dict[Stage, float] = field(default_factory=dict)
    """Estimates on one rank since the last renewal."""
    rests: dict[_Rest, float] = field(default_factory=dict)
    """Results of `remaining_s`: for this version, and those from `alone` since the last renewal."""
    write_s: float = field(init=False)
    """From the end of a decode to its file, as of the last renewal; 0 until that is known."""
    arrangement: Arrangement | None = None
    """Chosen for this version."""
    version: int = 0
    """Rises when a returned estimate changes notably, or is renewed."""

    def __post_init__(self) -> None:
        self.kind = _kind(self.shape, self.num_sharers)
        self.write_s = self.writes.value
        self.shared.classes.append(self)

    @property
    def writes(self) -> Recent:
        return self.shared.writes[self.shape]

    def least_s(self, stage: Stage, degrees: Degrees) -> float:
        """What a task takes because of its reads; jobs that share a step share them (control/sharing.py)."""
        read_s = self.reads_s[degrees[0] - 1] if stage in (Stage.DENOISE, Stage.REFINE) else 0.0
        return read_s / self.num_sharers if stage is Stage.DENOISE and degrees == ALONE else read_s


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
        self._profile = profile or NO_PROFILE
        self._table = CostTable(self._profile)
        self.shares_cores = shares_cores or self._profile.shares_cores
        """Whether ranks slow each other down, so that durations depend on what else ran."""
        self.classes: dict[tuple[str, str], CostClass] = {}
        """By model and `CostClass.kind`; a class may have two names."""
        self.changed: set[CostClass] = set()
        """Classes of which an estimate has changed notably since their last renewal."""
        self.corrected: set[CostClass] = set()
        """Those of them that had no measurement: their views are too far off to wait for the others."""
        self.reads_s: Mapping[str, float] = {}  # that of `RunStart`, before there are classes
        self.kept: dict[Any, Any] = {}
        """As in snapshots: emptied whenever a returned estimate changes."""
        self._models = defaultdict[str, ModelTimes](ModelTimes)
        self._default_first_use_s = 0.0
        self._warm: Collection[tuple[str, str, Degrees]] = ()
        self.doubts: set[UncertainEstimate] = set()
        """Estimates that were extrapolated or guessed when they were returned."""

    def class_of(self, job: AdmittedJob, *, num_sharers: int = 1) -> CostClass:
        name, shape = job.spec.model or "", _kind(job.shape, num_sharers)
        if (name, shape) not in self.classes:
            found = self.classes[name, shape] = self.cost_class(
                job.model_in(self._table.models),
                job.shape,
                flops=job.flops,
                state_bytes=job.state_bytes,
                limits=job.limits,
                num_sharers=num_sharers,
            )
            found.num_refined = job.trajectory.num_refined
            found.reads_s = tuple([number * self.reads_s.get(name, 0.0) for number in job.num_reads])
            for way in [way for *what, way in self._warm if what == [name, shape]]:
                found.warm |= {(Stage.DENOISE, way), (Stage.DECODE, (1, math.prod(way), 1))}
        return self.classes[name, shape]

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
        num_sharers: int = 1,
    ) -> CostClass:
        """The class of jobs of this model and shape, created if new."""
        key, shared = (model, _kind(shape, num_sharers)), self._models[model]
        if key not in self.classes:
            if shape not in shared.writes:
                profiled_s = self._table.write_s(model, shape, TaskWork(flops[Stage.DECODE], state_bytes))
                if profiled_s:
                    shared.writes[shape].add(profiled_s)
            limits = limits or Limits()
            self.classes[key] = CostClass(model, shape, flops, state_bytes, limits, num_sharers, shared)
        return self.classes[key]

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
                self.doubts.add(
                    UncertainEstimate(estimate.provenance, cost_class.model, cost_class.kind, stage, degrees)
                )
        return published

    def ends_after_s(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> tuple[float, float]:
        """When a task that starts now ends, and its first rank may be free; by every measurement at once."""
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
        if stage is Stage.APPROXIMATE:
            seconds = OVERHEAD_S + cost_class.state_bytes / self._profile.move_bytes_per_s
            return Estimate(seconds, seconds, Provenance.EXTRAPOLATED)
        profiled, least_s = self._profiled(cost_class, (stage, degrees)), cost_class.least_s(stage, degrees)
        if profiled is not None:
            found = profiled.scaled(cost_class.shared.drift(stage), profiled.provenance)
        else:
            found = self._by_pace(cost_class, stage, degrees)
        is_profiled = self._table.has(cost_class.model, cost_class.shape, stage, degrees)
        if stage in STEPS and not (is_profiled and with_torus(degrees)[3] > 1):
            seconds = exposed_s(cost_class.limits, degrees, found.seconds)
            found = replace(found, seconds=found.seconds + seconds, loaded_s=found.loaded_s + seconds)
        if found.seconds >= least_s:
            return found
        return replace(found, seconds=least_s, loaded_s=max(found.loaded_s, least_s))

    def spread(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> float:
        """How far the estimate may be off, as a share of it: the interquartile range, or more."""
        measured = cost_class.measured.get((stage, degrees))
        if measured is not None:
            return interquartile_range(measured.samples) / max(measured.value, OVERHEAD_S)
        found = self.estimate(cost_class, stage, degrees)
        return max(_SPREADS[found.provenance], found.spread_s / max(found.seconds, OVERHEAD_S))

    def is_measured(self, cost_class: CostClass) -> bool:
        """Whether estimates rest on a measurement of this model, possibly with another shape."""
        if cost_class.model in self._table.models or cost_class.shared.paces[Stage.DENOISE]:
            return True
        return any(stage is Stage.DENOISE for stage, _ in cost_class.measured)

    def has_seen(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> bool:
        """Whether such a task has run, in this run or for the profile."""
        is_measured = (stage, degrees) in cost_class.measured
        return is_measured or self._table.has(cost_class.model, cost_class.shape, stage, degrees)

    def remaining_s(
        self,
        cost_class: CostClass,
        task: Task,
        num_tasks: int,
        degrees: Degrees | None = None,
        *,
        num_approximate: int = 0,
        is_handed_out: bool = True,
    ) -> float:
        """Predicted time from `task` to the end of its job, with its steps on these degrees.

        num_approximate: of these steps. The decode runs on as many of the same ranks as make it fastest.

        Without degrees, on one rank by the estimates of the last renewal. All views of equal jobs then agree.
        If the rest of a started job came from newer and longer estimates, jobs that have not started would
        overtake it.
        """
        index = task.index
        key = (degrees, index if index < FIRST_STEP else FIRST_STEP, num_tasks - index, num_approximate)
        if (rest_s := cost_class.rests.get(key)) is not None:
            return rest_s
        on = degrees or ALONE
        bands = 1 if on == ALONE else self.arrangement(cost_class).decodes[math.prod(on) - 1]
        own = {**dict.fromkeys(STEPS, on), Stage.DECODE: (1, bands, 1)}

        def stage_s(stage: Stage) -> float:
            if degrees is not None:
                return self.task_s(cost_class, stage, own.get(stage, ALONE), is_handed_out=is_handed_out)
            if stage not in cost_class.alone:
                cost_class.alone[stage] = self.task_s(cost_class, stage, ALONE)
            return cost_class.alone[stage]

        if num_tasks == 1:  # a whole job, as a driver of nodes sees it
            rest_s = stage_s(Stage.DENOISE)
        else:
            num_steps = min(num_tasks - task.index - 1, num_tasks - 3) - num_approximate
            num_refined = min(num_steps, cost_class.num_refined)
            rest_s = (num_steps - num_refined) * stage_s(Stage.DENOISE)
            rest_s += num_refined * stage_s(Stage.REFINE) if num_refined else 0.0
            rest_s += num_approximate * stage_s(Stage.APPROXIMATE) if num_approximate else 0.0
            rest_s += stage_s(Stage.DECODE)
            for stage in (Stage.PREPARE, Stage.ENCODE)[: max(0, 2 - task.index)]:
                rest_s += stage_s(stage)
        rest_s += self.first_use_s(cost_class, Stage.DECODE, own[Stage.DECODE])
        if task.index < num_tasks - 1:
            rest_s += self.first_use_s(cost_class, Stage.DENOISE, on)
        if is_handed_out:
            cost_class.rests[key] = rest_s
        return rest_s

    def first_use_s(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> float:
        """The price of the first step or decode of this class on these degrees; 0 once there was one."""
        key, default_s = (stage, degrees), self._default_first_use_s
        if not default_s or stage not in (Stage.DENOISE, Stage.DECODE):
            return 0.0
        if key in cost_class.measured or key in cost_class.first_uses or key in cost_class.warm:
            return 0.0
        learned = cost_class.shared.first_uses
        return (default_s if learned is None else learned.value) / cost_class.num_sharers

    def renew(self, classes: Iterable[CostClass]) -> None:
        """Let the views of these classes have the present estimates."""
        classes = list(classes)
        self._rise(classes)
        for each in classes:
            each.alone.clear()
            each.rests.clear()
            each.write_s = each.writes.value
            self.changed.discard(each)
            self.corrected.discard(each)

    def _rise(self, classes: Collection[CostClass]) -> None:
        for each in classes:
            each.version += 1
            each.arrangement = None
            each.rests = {key: rest_s for key, rest_s in each.rests.items() if key[0] is None}
        self.changed.update(classes)
        self.kept.clear()

    def arrangement(self, cost_class: CostClass) -> Arrangement:
        """The best predicted use of ranks by tasks of this class; changes only with its version."""
        if cost_class.arrangement is not None:
            return cost_class.arrangement

        def known_s(stage: Stage, degrees: Degrees) -> float:
            """An estimate from tasks of the same degrees; infinite if there are none."""
            is_measured = (stage, degrees) in cost_class.measured
            if is_measured or self._table.is_known(cost_class.model, cost_class.shape, stage, degrees):
                return self.estimate(cost_class, stage, degrees).loaded_s
            return math.inf

        limits, numbers = cost_class.limits, range(1, MAX_RANKS + 1)
        steps = [_best_way(limits.ways(number), known_s) for number in numbers]
        for idx in range(limits.num_near, MAX_RANKS if 0 < limits.link_bytes_per_s < math.inf else 0):
            wide, narrow = steps[idx], steps[idx - 1]
            wide_s, narrow_s = (
                self.estimate(cost_class, Stage.DENOISE, each).loaded_s for each in (wide, narrow)
            )
            has_price = limits.exchanged_bytes > 0 or limits.num_apart(wide) == 1
            has_price = has_price or known_s(Stage.DENOISE, wide) < math.inf
            pays = narrow_s >= wide_s * (1 + _PAYS * (math.prod(wide) / math.prod(narrow) - 1))
            if not (has_price and pays):
                steps[idx] = narrow
        decodes = tuple(_best_numbers(limits.max_decode_degree, known_s))
        cost_class.arrangement = Arrangement(tuple(steps), decodes)
        return cost_class.arrangement

    def move_s(self, cost_class: CostClass, source: Layout | None, layout: Layout) -> float:
        """Predicted time to move a job's state to a layout; 0 if it is already there."""
        if source is None or source == layout or set(layout.ranks).issubset(source.ranks):
            return 0.0
        return self._profile.move_s + cost_class.state_bytes / self._profile.move_bytes_per_s

    def switch_s(self, cost_class: CostClass) -> float:
        learned = cost_class.shared.switches
        return SWITCH_S if learned is None else learned.value

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
        key, shared, task = (stage, degrees), cost_class.shared, (cost_class.kind, degrees)
        profiled, price_s = self._profiled(cost_class, key), self.first_use_s(cost_class, stage, degrees)
        measured, least_s = cost_class.measured.get(key), cost_class.least_s(*key)
        is_first, is_computing = measured is None, duration_s > _READING * least_s
        if measured is None:
            if (first_use := cost_class.first_uses.get(key)) is not None:
                self._learn_price(cost_class, sum(first_use) - duration_s)
            measured = cost_class.measured[key] = Recent()
            if profiled is not None and profiled.provenance is Provenance.PROFILED:
                soonest_s = max(least_s, profiled.seconds - profiled.spread_s)
                measured.add(max(least_s, profiled.loaded_s), soonest_s)
        measured.add(duration_s, first_end_s)
        measured.samples.append(duration_s)
        if profiled is not None and profiled.loaded_s > 0 and is_computing:
            # Only then a deviation is due to the machine, and not to shared reads or to degrees.
            is_alike = cost_class.num_sharers == 1 or profiled.provenance is Provenance.PROFILED
            if is_alike and self._table.is_known(cost_class.model, cost_class.shape, *key):
                _note(shared.drifts[stage], task, measured.value / profiled.loaded_s)
        if is_computing and (pace := _pace(cost_class, stage, degrees, measured.value)) is not None:
            _note(shared.paces[stage], task, pace)
        self._note_learned(cost_class, key, measured.value, is_first=is_first, price_s=price_s)

    def observe_switch(
        self, cost_class: CostClass, stage: Stage, degrees: Degrees, duration_s: float
    ) -> None:
        """Learn from a completed task that merged other patches first."""
        usual, shared = cost_class.measured.get((stage, degrees)), cost_class.shared
        if usual is None:
            switch_s = self.switch_s(cost_class) / cost_class.num_sharers
            self.observe(cost_class, stage, degrees, max(0.0, duration_s - switch_s))
        else:
            shared.switches = shared.switches or Recent()
            shared.switches.add(max(0.0, duration_s - usual.value) * cost_class.num_sharers)

    def observe_first_use(
        self, cost_class: CostClass, stage: Stage, degrees: Degrees, duration_s: float, *, prepared_s: float
    ) -> None:
        """Learn what a first use costs; its duration predicts others only if nothing else can."""
        key, paces = (stage, degrees), cost_class.shared.first_paces
        price_s, before = self.first_use_s(cost_class, *key), cost_class.first_uses.get(key)
        if before is None or duration_s < before[0]:
            cost_class.first_uses[key] = (duration_s, prepared_s)
            if (pace := _pace(cost_class, stage, degrees, duration_s)) is not None:
                paces[stage] = min(pace, paces.get(stage, pace))
        if (measured := cost_class.measured.get(key)) is not None:
            self._learn_price(cost_class, duration_s + prepared_s - measured.value)
        estimate_s = self.estimate(cost_class, *key).loaded_s
        self._note_learned(cost_class, key, estimate_s, is_first=before is None, price_s=price_s)

    def observe_write(self, cost_class: CostClass, duration_s: float) -> None:
        writes = cost_class.writes
        writes.add(duration_s)
        writes.samples.append(duration_s)
        alike = (each for each in cost_class.shared.classes if each.shape == cost_class.shape)
        self.changed.update(each for each in alike if _is_notable(writes.value, each.write_s))

    def _learn_price(self, cost_class: CostClass, extra_s: float) -> None:
        if self._default_first_use_s:
            shared = cost_class.shared
            shared.first_uses = shared.first_uses or Recent()
            shared.first_uses.add(max(0.0, extra_s) * cost_class.num_sharers)
            self._rise(shared.classes)
            self.corrected.update(shared.classes)

    def _note_learned(
        self, cost_class: CostClass, key: _Key, estimate_s: float, *, is_first: bool, price_s: float
    ) -> None:
        """Let estimates change that are wrong now; `price_s` was that of a first use before this task."""
        published, alike = cost_class.published.get(key), cost_class.shared.classes
        if published is not None and _is_notable(estimate_s, published):
            for each in alike:
                each.published.clear()
            self._rise(alike)
        for each in alike if is_first else ():
            found = ((self.estimate(each, stage, ALONE), before_s) for stage, before_s in each.alone.items())
            if any(_is_notable(estimate.loaded_s, before_s) for estimate, before_s in found):
                self.changed.add(each)
                self.corrected.add(each)
        if price_s:
            self._rise([cost_class])
            self.corrected.add(cost_class)

    def _profiled(self, cost_class: CostClass, key: _Key) -> Estimate | None:
        if key not in cost_class.profiled:
            stage, degrees = key
            # A table without steps that so many jobs share takes those of the same work: of single jobs.
            shape = cost_class.kind if stage is Stage.DENOISE else cost_class.shape
            work = TaskWork(cost_class.flops[stage], cost_class.state_bytes)
            found = self._table.task(cost_class.model, shape, stage, degrees, work)
            cost_class.profiled[key] = None if stage is Stage.APPROXIMATE else found
        return cost_class.profiled[key]

    def _by_pace(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> Estimate:
        """From other tasks of the model. A first use bounds the estimate, and replaces a guess."""
        shared, provenance = cost_class.shared, Provenance.EXTRAPOLATED
        first_s, _ = cost_class.first_uses.get((stage, degrees), (math.inf, 0.0))
        pace = shared.pace(stage)
        if pace is None:
            pace = self._table.pace(cost_class.model)
        if pace is None:
            provenance = Provenance.GUESSED
            if first_s < math.inf:
                return Estimate(first_s, first_s, provenance)
            found = (shared.first_paces.get(each) for each in (stage, Stage.DENOISE))
            pace = next(filter(None, found), 1 / DEFAULT_FLOPS_PER_S)
        seconds = cost_class.flops[stage] * pace / speed_up(math.prod(degrees)) + OVERHEAD_S
        return Estimate(min(seconds, first_s), min(seconds, first_s), provenance)


class PricedJob(Protocol):
    """What `JobCosts` knows of a job (control/job_record.py)."""

    job: AdmittedJob
    cost_class: CostClass
    num_tasks: int


class JobCosts:
    """The cost model, asked by job."""

    __slots__ = ("_are_handed_out", "_costs", "_jobs", "_near")

    def __init__(
        self,
        jobs: Mapping[str, PricedJob],
        costs: CostModel,
        *,
        near: tuple[tuple[int, ...], ...],
        are_handed_out: bool = True,
    ) -> None:
        self._near = near
        self._jobs = jobs
        self._costs = costs
        self._are_handed_out = are_handed_out

    def of_records(self, jobs: Mapping[str, PricedJob]) -> JobCosts:
        """The same for looks ahead, which record no estimate as handed out."""
        return JobCosts(jobs, self._costs, near=self._near, are_handed_out=False)

    def task_s(self, task: Task, layout: Layout) -> float:
        cost_class = self._jobs[task.job_id].cost_class
        return self._costs.task_s(cost_class, task.stage, layout.degrees, is_handed_out=self._are_handed_out)

    def remaining_s(self, task: Task, layout: Layout, *, num_given_up: int = 0) -> float:
        record = self._jobs[task.job_id]
        return self._costs.remaining_s(
            record.cost_class,
            task,
            record.num_tasks,
            layout.degrees,
            num_approximate=num_given_up + record.job.trajectory.num_approximate_from(task.index),
            is_handed_out=self._are_handed_out,
        )

    def first_use_s(self, task: Task, layout: Layout) -> float:
        return self._costs.first_use_s(self._jobs[task.job_id].cost_class, task.stage, layout.degrees)

    def move_s(self, job_id: str, source: Layout | None, layout: Layout) -> float:
        return self._costs.move_s(self._jobs[job_id].cost_class, source, layout)

    def sets(self, ranks: Sequence[int], degree: int = 1) -> tuple[tuple[int, ...], ...]:
        return (tuple(ranks),) if len(self._near) == 1 else sets_of(ranks, self._near, degree)

    def spread(self, task: Task, layout: Layout) -> float:
        return self._costs.spread(self._jobs[task.job_id].cost_class, task.stage, layout.degrees)


def _best_way(ways: Sequence[Degrees], known_s: Callable[[Stage, Degrees], float]) -> Degrees:
    """The usual degrees of a step, which are the first, or clearly faster ones."""
    best, *others = ways
    best_s = _CLEAR_GAIN * known_s(Stage.DENOISE, best) if others else 0.0
    for degrees in others:
        seconds = known_s(Stage.DENOISE, degrees)
        if seconds < best_s < math.inf:
            best, best_s = degrees, seconds
    return best


def _best_numbers(most: int, known_s: Callable[[Stage, Degrees], float]) -> Iterator[int]:
    """For each number of ranks: how many of them, at most `most`, make a decode fastest."""
    chosen, best, best_s = 1, 1, math.inf
    for number in range(1, MAX_RANKS + 1):
        if number <= most:
            seconds = known_s(Stage.DECODE, (1, number, 1))
            if seconds < best_s:
                best, best_s = number, seconds
            chosen = best if seconds < math.inf else number
        yield chosen


def _note(values: _Tasks, task: tuple[str, Degrees], value: float) -> None:
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


def _kind(shape: str, num_sharers: int) -> str:
    return shape if num_sharers == 1 else f"{shape}{IN_BATCHES}{num_sharers}"


def _is_notable(seconds: float, before_s: float) -> bool:
    return abs(seconds - before_s) > _NOTABLE * before_s


def uncertain(doubts: Collection[UncertainEstimate], *, has_writes: bool) -> str | None:
    """The uncertain estimates of a prediction in one line; `has_writes`: the profile has times of files."""
    by_kind: dict[Provenance, dict[tuple[str, str], list[UncertainEstimate]]] = {}
    for doubt in sorted(doubts):
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
    named = zip(("cfg", "ulysses", "ring", "torus"), degrees, strict=False)
    return " x ".join(f"{name} {degree}" for name, degree in named if degree > 1) or "1 rank"
