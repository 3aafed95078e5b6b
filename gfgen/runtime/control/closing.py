"""Closing time: when a run is to stop by itself, and which jobs no longer fit before it."""

from __future__ import annotations

from datetime import datetime, timedelta

from gfgen.errors import InputError
from gfgen.graph import Stage, Task
from gfgen.job.fields import MAX_YEAR, MIN_YEAR, parse_duration
from gfgen.layout import Degrees, Layout
from gfgen.runtime.predict.cost import CostClass, CostModel

CAUTION = 1.1
"""Predictions leave out waiting, moves and the writing of the file: a tenth more is allowed for."""
_FIRST_TASK = Task("", 0, Stage.ENCODE)
"""Of any job: what is left of it counts, and that is told by where it stands."""
_CLOCK_FORMATS = ("%H:%M", "%H:%M:%S")
_ACCEPTED = 'a time of day like "06:00", a time like "2026-11-21T06:00", or a duration like "8h" is accepted'


def closing_at(text: str, *, now: float, option: str = "--until") -> float:
    """Unix time of what an option says; a time of day is the next one on this machine's clock.

    Raises: InputError for what is no time, and for a time that has passed.
    """
    moment = _time_of_day(text, now) or _date_and_time(text)
    if moment is None:
        duration_s = parse_duration(text)
        if not duration_s:
            raise InputError(f"{option} {text!r}: {_ACCEPTED}")
        return now + duration_s
    if not MIN_YEAR <= moment.year <= MAX_YEAR:
        raise InputError(f"{option} {text!r}: a year from {MIN_YEAR} to {MAX_YEAR} is accepted")
    if moment.timestamp() <= now:
        raise InputError(f"{option} {text!r}: has passed; {_ACCEPTED}")
    return moment.timestamp()


def _time_of_day(text: str, now: float) -> datetime | None:
    today = datetime.fromtimestamp(now)
    for form in _CLOCK_FORMATS:
        try:
            at = datetime.strptime(text.strip(), form).time()
        except ValueError:
            continue
        moment = datetime.combine(today.date(), at)
        if moment.timestamp() <= now:
            moment = datetime.combine(today.date() + timedelta(days=1), at)
        return moment
    return None


def _date_and_time(text: str) -> datetime | None:
    """A date without a time of day is refused: 2026-11-21 could mean its begin or its end."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return moment if ":" in text else None


class Closing:
    """Which jobs may still begin before `closes_s`.

    A prediction counts once a denoising step of the model was measured: until then jobs begin
    as if they fitted, since what has begun is not lost, and a wrong guess could waste the night.
    """

    def __init__(self, closes_s: float, costs: CostModel) -> None:
        self.closes_s = closes_s
        self._costs = costs
        self._degrees: dict[str, Degrees] = {}

    def note(self, cost_class: CostClass, layout: Layout) -> None:
        """A step of this model is being run so: the next job's steps are predicted so."""
        self._degrees[cost_class.model] = layout.degrees

    def holds_back(self, cost_class: CostClass, num_tasks: int, *, now_s: float) -> bool:
        """Whether a job of this class that would begin now is predicted not to be done in time."""
        if not self._costs.is_measured(cost_class):
            return False
        degrees = self._degrees.get(cost_class.model, (1, 1, 1))
        remaining_s = self._costs.remaining_s(cost_class, _FIRST_TASK, num_tasks, degrees)
        return now_s + CAUTION * remaining_s > self.closes_s
