"""Time since the start of a run, and scheduled events: wall time, or virtual time that is advanced."""

from __future__ import annotations

import heapq
import itertools
import math
import time

from gfgen.runtime.core import events
from gfgen.runtime.core.events import Event

_KINDS = {kind: number for number, kind in enumerate(vars(events).values()) if isinstance(kind, type)}
"""The order of simultaneous events."""


class Clock:
    def __init__(self, *, virtual: bool = False) -> None:
        self._epoch_s: float | None = None if virtual else time.monotonic()
        self.started_at = 0.0 if virtual else time.time()  # in Unix time; 0 in virtual time
        self._virtual_s = 0.0
        self._has_turned = False
        self.turn_s = 0.0  # for which this turn decides: that of the snapshot, and of the journal's record
        self._due: list[tuple[float, int, int, Event]] = []
        self._numbers = itertools.count()
        self.look_s = math.inf  # when to turn without an event, to decide what follows a task

    @property
    def now_s(self) -> float:
        return self._virtual_s if self._epoch_s is None else time.monotonic() - self._epoch_s

    def begin_turn(self) -> None:
        self._has_turned = True
        self.turn_s = self.now_s

    def from_monotonic(self, monotonic_s: float) -> float:
        """Convert a reading of the machine's monotonic clock, from any process, to this clock."""
        assert self._epoch_s is not None, "virtual time has no relation to the machine's clock"
        return monotonic_s - self._epoch_s

    def at(self, event: Event) -> None:
        """Schedule an event at its `time_s`."""
        heapq.heappush(self._due, (event.time_s, _KINDS[type(event)], next(self._numbers), event))

    def next_wakeup(self) -> float | None:
        """When the next event or look is due; None if nothing is scheduled."""
        next_s = min(self._due[0][0], self.look_s) if self._due else self.look_s
        return None if next_s == math.inf else next_s

    def brings_more(self, *, before_s: float, than: tuple[type[Event], ...]) -> bool:
        """Whether an event of a kind other than `than` is scheduled before `before_s`."""
        return any(time_s < before_s and not isinstance(event, than) for time_s, _, _, event in self._due)

    def due(self) -> list[Event]:
        """Take the events that are due, in their total order."""
        now_s, due, released = self.now_s, self._due, []
        while due and due[0][0] <= now_s:
            released.append(heapq.heappop(due)[3])
        return released

    def advance(self, to_s: float) -> None:
        assert self._epoch_s is None, "wall time passes by itself"
        self._virtual_s = max(self._virtual_s, to_s)
        if not self._has_turned:
            self.turn_s = self._virtual_s
