"""Predicted durations: an analytic estimate at first, what was measured as soon as it was.

Jobs of one model and shape share a `CostClass`. For each (stage, degrees) of a class the
estimate is, in this order: the measured mean; the profile's row; the class's floating-point
operations over the rate that the same model has reached in the same stage with other shapes; or over
the rate of its denoising steps; or over a default rate. Waiting and moving are no part of a duration
(DESIGN section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.profile import Degrees, Profile

_ONE: Degrees = (1, 1, 1)
DEFAULT_FLOPS_PER_S = 2e10
"""One CPU rank before anything was measured; 20 GFLOP/s is a core's order of magnitude."""
PARALLEL_EFFICIENCY = 0.9
"""Share of the ideal speed-up that is assumed until a degree was measured."""
OVERHEAD_S = 2e-3
"""Per task: launching from Python, publishing the state."""
MOVE_BYTES_PER_S = 2e9
"""Copy through shared memory on one core."""
_RECENT = 0.2
"""Weight of a new measurement once five were seen; follows drift, damps noise."""
_NOTABLE = 0.1
"""A change of an estimate below this share does not reorder jobs."""


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
    published: dict[tuple[Stage, Degrees], float] = field(default_factory=dict)
    """Estimates handed out since the last notable change."""


class CostModel:
    """Durations of tasks and moves, refined by every completed task."""

    def __init__(self, profile: Profile | None = None) -> None:
        self.version = 0
        """Rises when an estimate that was handed out has changed notably."""
        self._profiled = (
            {(row.model, row.shape, row.stage, row.degrees): row.seconds for row in profile.rows}
            if profile
            else {}
        )
        self._classes: dict[tuple[str, str], CostClass] = {}
        self._rates: dict[tuple[str, Stage], _Mean] = {}

    def cost_class(
        self, model: str, shape: str, *, flops: Mapping[Stage, float], state_bytes: int
    ) -> CostClass:
        """The class of jobs of this model and shape; made when it is new."""
        key = (model, shape)
        if key not in self._classes:
            self._classes[key] = CostClass(model, shape, flops, state_bytes)
        return self._classes[key]

    def task_s(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> float:
        """Predicted execution time of one task."""
        key = (stage, degrees)
        published = cost_class.published.get(key)
        if published is None:
            published = cost_class.published[key] = self._estimate(cost_class, stage, degrees)
        return published

    def is_measured(self, cost_class: CostClass) -> bool:
        """Whether estimates rest on a measurement of this model, be it with another shape."""
        denoise = (cost_class.model, Stage.DENOISE)
        return denoise in self._rates or any(stage is Stage.DENOISE for stage, _ in cost_class.measured)

    def has_seen(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> bool:
        """Whether a task like this has run: its prediction is more than a guess."""
        return (stage, degrees) in cost_class.measured

    def remaining_s(self, cost_class: CostClass, task: Task, num_tasks: int, degrees: Degrees) -> float:
        """Predicted time from `task` to the end of its job, with its steps on these degrees."""
        num_left = num_tasks - task.index
        num_steps = min(num_left - 1, num_tasks - 3)
        total_s = num_steps * self.task_s(cost_class, Stage.DENOISE, degrees)
        total_s += self.task_s(cost_class, Stage.DECODE, _ONE)
        if task.index < 2:
            total_s += self.task_s(cost_class, Stage.PREPARE, _ONE)
        if task.index < 1:
            total_s += self.task_s(cost_class, Stage.ENCODE, _ONE)
        return total_s

    def move_s(self, cost_class: CostClass, source: Layout | None, layout: Layout) -> float:
        """Predicted time to bring a job's state to a layout; 0 where it is already."""
        if source is None or source == layout:
            return 0.0
        return cost_class.state_bytes / MOVE_BYTES_PER_S

    def observe(self, cost_class: CostClass, stage: Stage, degrees: Degrees, duration_s: float) -> None:
        """Learn from a completed task."""
        key = (stage, degrees)
        cost_class.measured.setdefault(key, _Mean()).add(duration_s)
        degree = degrees[0] * degrees[1] * degrees[2]
        if duration_s > OVERHEAD_S and cost_class.flops[stage] > 0:
            rate = cost_class.flops[stage] / (duration_s - OVERHEAD_S) / _speedup(degree)
            self._rates.setdefault((cost_class.model, stage), _Mean()).add(rate)
        published = cost_class.published.get(key)
        if published is None:
            return
        if abs(cost_class.measured[key].value - published) > _NOTABLE * published:
            for other in self._classes.values():
                if other.model == cost_class.model:
                    other.published.clear()
            self.version += 1

    def _estimate(self, cost_class: CostClass, stage: Stage, degrees: Degrees) -> float:
        measured = cost_class.measured.get((stage, degrees))
        if measured is not None:
            return measured.value
        profiled = self._profiled.get((cost_class.model, cost_class.shape, stage, degrees))
        if profiled is not None:
            return profiled
        rate = self._rates.get((cost_class.model, stage)) or self._rates.get(
            (cost_class.model, Stage.DENOISE)
        )
        degree = degrees[0] * degrees[1] * degrees[2]
        flops_per_s = (rate.value if rate else DEFAULT_FLOPS_PER_S) * _speedup(degree)
        return cost_class.flops[stage] / flops_per_s + OVERHEAD_S


def _speedup(degree: int) -> float:
    return 1.0 if degree == 1 else degree * PARALLEL_EFFICIENCY
