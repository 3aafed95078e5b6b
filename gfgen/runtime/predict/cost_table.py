"""Task times from a profile, for measured tasks and similar ones. Pure.

Shapes between two profiled ones are interpolated over the work of a task: its floating-point operations
(attention and matrix products together; between two shapes a straight line is close to both), or the bytes of
the job's state for stages without arithmetic. A shape below all profiled ones takes the same share of its
time on one rank as the smallest profiled one. Missing degrees follow from existing ones by Amdahl's law, with
the serial share that the table shows. Shared steps stand for other tasks only where the step of a single
job was not measured.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gfgen.graph import Stage
from gfgen.layout import ALONE, Degrees, with_torus
from gfgen.runtime.predict.profile_file import IN_BATCHES, Profile, ProfileRow

PARALLEL_EFFICIENCY = 0.9
"""Assumed share of the ideal speed-up of a degree without measurements."""


class Provenance(IntEnum):
    """The source of an estimate; higher is less reliable."""

    MEASURED = 0
    """In this run."""
    PROFILED = 1
    """The profile has exactly this task."""
    INTERPOLATED = 2
    """Between shapes that the profile has, on the same degrees."""
    EXTRAPOLATED = 3
    """Beyond the profile's shapes, or on other degrees; or from this run's other shapes."""
    GUESSED = 4
    """From operations over an assumed rate, or from a first use."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one task, alone and while all other ranks are busy."""

    seconds: float
    loaded_s: float
    provenance: Provenance
    spread_s: float = 0.0
    """Interquartile range around `seconds`."""

    def scaled(self, factor: float, provenance: Provenance) -> Estimate:
        seconds, loaded_s, spread_s = self.seconds * factor, self.loaded_s * factor, self.spread_s * factor
        return Estimate(seconds, loaded_s, max(provenance, self.provenance), spread_s)


@dataclass(frozen=True, slots=True)
class TaskWork:
    flops: float
    state_bytes: int


Value = Callable[[ProfileRow], float]


class CostTable:
    """A profile's times for any shape and degrees."""

    def __init__(self, profile: Profile) -> None:
        self._exact = {row.task: row for row in profile.rows}
        self._rows: dict[tuple[str, Stage], dict[Degrees, list[ProfileRow]]] = defaultdict(dict)
        for row in profile.rows:
            single, is_in_batch, _ = row.shape.partition(IN_BATCHES)
            is_alike = with_torus(row.degrees)[3] == 1  # what slow links add does not follow the work
            if is_alike and not (is_in_batch and self.has(row.model, single, row.stage, row.degrees)):
                self._rows[row.model, row.stage].setdefault(row.degrees, []).append(row)
        self.models = profile.models
        self._write_s = profile.write_s

    def has(self, model: str, shape: str, stage: Stage, degrees: Degrees) -> bool:
        return (model, shape, stage, degrees) in self._exact

    def is_known(self, model: str, shape: str, stage: Stage, degrees: Degrees) -> bool:
        """Whether this shape was measured with these degrees, or others from which its time follows."""
        return self.has(model, shape, stage, degrees) or degrees in self._rows.get((model, stage), {})

    def task(self, model: str, shape: str, stage: Stage, degrees: Degrees, work: TaskWork) -> Estimate | None:
        """The duration of a task; None if no similar task was measured."""
        if (row := self._exact.get((model, shape, stage, degrees))) is not None:
            return Estimate(row.seconds, row.under_load_s, Provenance.PROFILED, row.spread_s)
        by_degrees = self._rows.get((model, stage))
        if not by_degrees:
            return None
        base = degrees
        if degrees not in by_degrees:
            base = min(by_degrees, key=lambda other: _distance(other, degrees))
        rows, alone = by_degrees[base], by_degrees.get(ALONE, ())
        found = _below(rows, alone, shape, work) or _over_shapes(rows, shape, work)
        if base == degrees:
            return found
        serial = self._serial_share(model, stage)
        time_ratio = _amdahl(math.prod(degrees), serial) / _amdahl(math.prod(base), serial)
        return found.scaled(time_ratio, Provenance.EXTRAPOLATED)

    def pace(self, model: str) -> float | None:
        """Seconds per operation of the model's steps on one rank; None if that is unknown."""
        rows = self._rows.get((model, Stage.DENOISE), {}).get(ALONE, ())
        paces = [row.under_load_s / row.flops for row in rows if row.flops > 0]
        return statistics.median(paces) if paces else None

    def write_s(self, model: str, shape: str, work: TaskWork) -> float:
        """From the end of a decode to its file; without rows of the model, the profile's own, or 0."""
        by_degrees = sorted(self._rows.get((model, Stage.DECODE), {}).items())  # those of one rank first
        rows = [row for _, own in by_degrees for row in own if row.write_s is not None]
        if not rows:
            return self._write_s
        return _value_over_shapes(rows, shape, work, value=lambda row: row.write_s or 0.0)[0]

    def _serial_share(self, model: str, stage: Stage) -> float | None:
        """The share of a task that more ranks do not speed up, from this model or else from the others."""
        shares = self._shares_of(model, stage)
        if not shares:
            shares = [
                share for other in sorted(self.models) for share in self._shares_of(other, Stage.DENOISE)
            ]
        return statistics.median(shares) if shares else None

    def _shares_of(self, model: str, stage: Stage) -> list[float]:
        """The serial share by shape, from the most ranks that the shape was measured on."""
        by_degrees = self._rows.get((model, stage), {})
        shares: dict[str, tuple[int, float]] = {}
        for degrees, rows in by_degrees.items():
            num_ranks = math.prod(degrees)
            for row in rows:
                alone = self._exact.get((model, row.shape, stage, ALONE))
                if num_ranks > 1 and alone is not None and alone.seconds > 0:
                    share = (num_ranks * row.seconds / alone.seconds - 1) / (num_ranks - 1)
                    shares[row.shape] = max(shares.get(row.shape, (0, 0.0)), (num_ranks, max(0.0, share)))
        return [share for _, share in shares.values()]


def speed_up(num_ranks: int) -> float:
    return 1.0 if num_ranks == 1 else num_ranks * PARALLEL_EFFICIENCY


def _amdahl(num_ranks: int, serial: float | None) -> float:
    """Time on several ranks as a share of the time on one."""
    return 1 / speed_up(num_ranks) if serial is None else serial + (1 - serial) / num_ranks


def _distance(other: Degrees, degrees: Degrees) -> tuple[float, float, Degrees]:
    """Nearest are degrees with an equal number of ranks, then those with equal guidance branches."""
    ratio = math.prod(other) / math.prod(degrees)
    return abs(math.log(ratio)), abs(other[0] - degrees[0]), other


def _over_shapes(rows: Sequence[ProfileRow], shape: str, work: TaskWork) -> Estimate:
    seconds, provenance = _value_over_shapes(rows, shape, work, value=lambda row: row.seconds)
    loaded_s, _ = _value_over_shapes(rows, shape, work, value=lambda row: row.under_load_s)
    spread_s, _ = _value_over_shapes(rows, shape, work, value=lambda row: row.spread_s)
    return Estimate(seconds, loaded_s, provenance, spread_s)


def _below(
    rows: Sequence[ProfileRow], alone: Sequence[ProfileRow], shape: str, work: TaskWork
) -> Estimate | None:
    """The estimate for a shape below all that were measured on these degrees, from its time on one rank.

    It takes the same share of that time as the smallest measured shape. Lines through the shapes of each
    degree would cross near zero and predict two ranks to be five times as fast as one. The gain is at most
    proportional to the ranks. None for other shapes.
    """
    points, x = _points(rows, work, lambda row: row.seconds)
    if not points or x >= points[0][0] or any(row.shape == shape for row in rows):
        return None
    smallest = next(row for row in rows if points[0][0] in (row.flops, row.state_bytes))
    if smallest.degrees == ALONE or not alone:
        return None
    there = _over_shapes(alone, smallest.shape, TaskWork(smallest.flops, smallest.state_bytes))
    if not there.seconds or not there.loaded_s:
        return None
    here = _over_shapes(alone, shape, work)
    share = max(1 / math.prod(smallest.degrees), smallest.seconds / there.seconds)
    seconds, spread_s = here.seconds * share, here.spread_s * share
    loaded_s = max(seconds, here.loaded_s * smallest.under_load_s / there.loaded_s)
    return Estimate(seconds, loaded_s, Provenance.EXTRAPOLATED, spread_s)


def _value_over_shapes(
    rows: Sequence[ProfileRow], shape: str, work: TaskWork, *, value: Value
) -> tuple[float, Provenance]:
    """The value for a shape from at least one row of the same model, stage and degrees."""
    for row in rows:
        if row.shape == shape:
            return value(row), Provenance.PROFILED
    points, x = _points(rows, work, value)
    if not points:
        return statistics.median(map(value, rows)), Provenance.GUESSED
    if points[0][0] <= x <= points[-1][0]:
        return _between(points, x), Provenance.INTERPOLATED
    return _beyond(points, x), Provenance.EXTRAPOLATED


def _points(
    rows: Sequence[ProfileRow], work: TaskWork, value: Value
) -> tuple[list[tuple[float, float]], float]:
    """Rising (work, median value), empty if work is unknown, and the work of the task."""
    by_work: dict[float, list[float]] = defaultdict(list)
    counts_flops = work.flops > 0 and any(row.flops > 0 for row in rows)
    for row in rows:
        amount = row.flops if counts_flops else float(row.state_bytes)
        if amount > 0:
            by_work[amount].append(value(row))
    points = sorted((amount, statistics.median(values)) for amount, values in by_work.items())
    return points, work.flops if counts_flops else float(work.state_bytes)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    idx = bisect_left(points, (x, -math.inf))
    x1, y1 = points[idx]
    if x == x1:
        return y1
    x0, y0 = points[idx - 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _beyond(points: Sequence[tuple[float, float]], x: float) -> float:
    """Along the nearest line; proportional with one point, or if the line would fall below that."""
    (x0, y0), nearest = (points[0], points[:2]) if x < points[0][0] else (points[-1], points[-2:])
    proportional = y0 * x / x0
    if len(points) == 1:
        return proportional
    (xa, ya), (xb, yb) = nearest
    along = y0 + (yb - ya) / (xb - xa) * (x - x0)
    return max(along, proportional) if x < x0 else max(along, y0)
