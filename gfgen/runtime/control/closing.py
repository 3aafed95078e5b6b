"""Closing time: when a run is to stop by itself, and which jobs no longer fit before it."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterable

from gfgen.errors import InterruptedRunError
from gfgen.graph import Stage, Task
from gfgen.layout import Degrees
from gfgen.runtime.core.openjobs import JobKind
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostClass, CostModel

logger = logging.getLogger(__name__)

CAUTION = 1.1
"""Predictions leave out waiting, moves and the writing of the file: a tenth more is allowed for."""
_FIRST_TASK = Task("", 0, Stage.ENCODE)
"""Of any job: predictions depend on its index alone."""


class Closing:
    """When and why a run stops before all jobs have ended, and which jobs may still begin before it closes.

    A prediction counts once a denoising step of the model was measured: until then jobs begin
    as if they fitted, since what has begun is not lost, and a wrong guess could waste the night.
    """

    def __init__(self, start: RunStart, costs: CostModel) -> None:
        self.closes_s = math.inf if start.closes_s is None else start.closes_s
        self.grace_s = start.grace_s
        self.stop_signal: int | None = None
        self.is_stopping = False
        """Nothing new is dispatched; what runs is left to end."""
        self.room_bytes = math.inf
        """For the files of jobs that have not begun."""
        self._costs = costs
        self._degrees: dict[str, Degrees] = {}
        """By model: of the last step."""

    def close(self) -> None:
        self.is_stopping = True

    def stop(self, signal_number: int) -> None:
        """The first signal lets running tasks end; InterruptedRunError at the second one."""
        if self.stop_signal is not None:
            raise InterruptedRunError("stopped at once; finished jobs are kept", signal_number=signal_number)
        self.stop_signal, self.is_stopping = signal_number, True
        again = "press again" if signal_number == signal.SIGINT else "a second signal"
        logger.warning("stopping after the running tasks; %s to stop at once", again)

    def note(self, cost_class: CostClass, degrees: Degrees) -> None:
        """Predict the steps of the next jobs of this model with these degrees."""
        self._degrees[cost_class.model] = degrees

    def late_kinds(self, kinds: Iterable[JobKind], *, now_s: float) -> set[JobKind]:
        """Those kinds of jobs that would not end in time if they began now."""
        return {kind for kind in kinds if self._is_late(*kind, now_s=now_s)}

    def _is_late(self, model: str, kind: str, num_tasks: int, num_reused: int, *, now_s: float) -> bool:
        cost_class = self._costs.classes[model, kind]
        if not self._costs.is_measured(cost_class):
            return False
        degrees = self._degrees.get(cost_class.model, (1, 1, 1))
        remaining_s = self._costs.remaining_s(
            cost_class, _FIRST_TASK, num_tasks, degrees, num_reused=num_reused
        )
        # A job ends with its batch.
        return now_s + CAUTION * remaining_s * cost_class.batch > self.closes_s

    def check(self) -> None:
        assert self.is_stopping or self.stop_signal is None, "a signal has come, and the run goes on"
