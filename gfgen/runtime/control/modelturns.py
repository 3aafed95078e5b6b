"""Which models the ranks hold, where not all fit, and the jobs that wait until the turn of theirs comes."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from gfgen.runtime.core.clock import Clock

RETRY_LOAD_S = 600.0
"""A model that no rank could load is tried again for jobs that arrive this much later."""

Urgency = tuple[float, float]
"""Minus the priority, and the deadline."""


class _Parked(NamedTuple):
    """A job that waits for its model."""

    urgency: Urgency
    model: str
    since_s: float


class ModelTurns:
    """The resident models, and the jobs of other models, which are parked: policies do not see them.

    If `is_limited` is false all models fit, and no job is parked.
    """

    def __init__(self, resident: Collection[str], *, is_limited: bool, clock: Clock) -> None:
        self._clock = clock
        self.resident = frozenset(resident)
        self.is_limited = is_limited
        self._parked: dict[str, _Parked] = {}
        """By job, the longest first."""
        self._urgent: set[str] = set()
        """Those of them that have a deadline or a raised priority."""
        self._unloadable: dict[str, tuple[float, str]] = {}
        """By model that no rank could load: until when its jobs fail at once, and why."""

    @property
    def num_parked(self) -> int:
        """Jobs that wait for their models."""
        return len(self._parked)

    @property
    def has_urgent(self) -> bool:
        """Whether a waiting job has a deadline or a raised priority."""
        return bool(self._urgent)

    @property
    def longest_parked(self) -> tuple[str, float]:
        """The model of the job that has waited longest for it, and since when; some job waits."""
        job = next(iter(self._parked.values()))
        return job.model, job.since_s

    def wanted(self) -> list[str]:
        """Models that jobs wait for, the most urgent first."""
        by_urgency = sorted(self._parked.values(), key=lambda job: job.urgency)
        return list(dict.fromkeys([job.model for job in by_urgency]))

    def admit(self, job_id: str, model: str, urgency: Urgency, *, can_run: bool) -> bool:
        """Whether a job can run and its model is resident; if only that is missing, the job is parked."""
        if not can_run or model in self.resident:
            self.unpark(job_id)
            return can_run
        if job_id not in self._parked:
            self._parked[job_id] = _Parked(urgency, model, self._clock.turn_s)
            if urgency[0] < 0 or urgency[1] < math.inf:
                self._urgent.add(job_id)
        return False

    def unpark(self, job_id: str) -> None:
        """The job does not wait for its model, or has ended."""
        self._parked.pop(job_id, None)
        self._urgent.discard(job_id)

    def change(self, models: Collection[str]) -> None:
        """Ranks hold these models from now on, each once it has loaded them."""
        self.resident = frozenset(models)

    def give_up(self, models: Collection[str], reason: str, *, now_s: float) -> str:
        """No rank can load these models, which are one; the reason for which their jobs fail."""
        self.resident -= set(models)
        doom = f"model {' and '.join(models)} cannot be loaded: {reason}"
        # Where all models fit, ranks load only at the start.
        until_s = now_s + RETRY_LOAD_S if self.is_limited else math.inf
        self._unloadable |= dict.fromkeys(models, (until_s, doom))
        return doom

    def doom_of(self, model: str, *, now_s: float) -> str | None:
        """Why a job of this model that arrives now fails; None if its model can be loaded, or tried again."""
        until_s, doom = self._unloadable.get(model, (-math.inf, None))
        return doom if now_s < until_s else None

    def check(self) -> None:
        """Assert what always holds."""
        assert self.is_limited or not self._parked, "jobs are parked although all models fit"
        assert self._urgent <= self._parked.keys(), "an urgent job waits that is not parked"
        waiting = {job.model for job in self._parked.values()}
        assert not waiting & self.resident, f"jobs wait for models that are resident: {waiting}"
