"""What `gfgen serve` adds to the control loop: turn timing, and a chooser that follows policy changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gfgen.runtime.control.control import Backend
from gfgen.runtime.core.events import Event
from gfgen.runtime.predict.choosers import ThreadedChooser
from gfgen.snapshot import Choice, Choose, Snapshot


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


class SwitchableChooser:
    """Runs the chooser of the current policy (`auto`), if it has one."""

    def __init__(self, choose: Choose | None) -> None:
        self._inner: ThreadedChooser | None = None
        self.follow(choose)

    def follow(self, choose: Choose | None) -> None:
        """Use another chooser, or none, from now on."""
        if self._inner is not None:
            self._inner.abandon()
        self._inner = None if choose is None else ThreadedChooser(choose)

    def consider(self, snapshot: Snapshot) -> None:
        if self._inner is not None:
            self._inner.consider(snapshot)

    def take(self) -> Choice | None:
        return None if self._inner is None else self._inner.take()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
