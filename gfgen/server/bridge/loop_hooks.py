"""What `gfgen serve` adds to the control loop: the timing of its turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gfgen.runtime.control.control import Backend
from gfgen.runtime.core.events import Event


class LoopTimer:
    """A backend that measures the time between two waits, that is, the turns of the control loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._left_s: float | None = None
        self._longest_s = 0.0
        self._num_turns = 0

    def take(self) -> tuple[float, int]:
        """(the longest turn in seconds, number of turns) since the last call."""
        taken = (self._longest_s, self._num_turns)
        self._longest_s, self._num_turns = 0.0, 0
        return taken

    def wait(self, until: float | None) -> Sequence[Event]:
        now_s = time.perf_counter()
        if self._left_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._left_s)
            self._num_turns += 1
        events = self._backend.wait(until)
        self._left_s = time.perf_counter()
        return events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
