"""Dispatches that have not ended, when they are predicted to end, and when to decide what follows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gfgen.runtime.core.dispatch import Dispatch
from gfgen.snapshot import RunningTask

LOOKAHEAD_S = 0.005
"""The default: dispatching takes a millisecond or two, on a busy machine more."""
SHARE, MAX_SHARE_S = 0.02, 0.025
"""A task adds this share of its predicted time, by which it may vary, to the lookahead. The share is limited:
an early decision may be wrong, and a long task can bear a gap."""
MAX_EARLY_S = 0.1
"""A task is not expected to end more than this before its predicted end, for the same reasons."""
_ROUNDING_S = 1e-9
"""The loop turns at the soonest end less the lookahead, and sums of floats are not exact."""
_SAME_END = 0.1
"""A predicted end that is off by less than this share of the lookahead stays as it is."""


def lookahead_of(predicted_s: float, *, lookahead_s: float) -> float:
    """How long before its soonest end the task after this one may be queued."""
    return lookahead_s + min(SHARE * predicted_s, MAX_SHARE_S) if lookahead_s > 0 else 0.0


@dataclass(slots=True, eq=False)
class Flight:
    """A dispatch that has not ended."""

    dispatch: Dispatch
    view: RunningTask
    """Its predicted end is corrected when the task before it has ended."""
    lookahead_s: float
    """How long before its soonest and after its predicted end the next task may be queued; 0 if never."""
    failure: str | None = None
    is_void: bool = False
    look_s: float = math.inf
    """When to decide what follows it; infinity if nothing may be queued behind it."""
    opens_s: float = math.inf
    """The same, less an allowance for rounding."""
    late_s: float = 0.0
    """From here on nothing may be queued: a task that is so late may end at any time, or not for long,
    and a task queued behind it would wait on a rank that other jobs could use."""

    def set_end(self, view: RunningTask, soonest_s: float) -> None:
        """Predict this end, and that no rank of it is free before `soonest_s`.

        What follows is decided in time for the soonest end: a decision after the end leaves ranks idle.
        """
        self.view, end_s = view, view.predicted_end_s
        soonest_s = min(end_s, max(soonest_s, end_s - MAX_EARLY_S))
        self.look_s = soonest_s - self.lookahead_s if self.lookahead_s > 0 else math.inf
        self.opens_s = self.look_s - _ROUNDING_S
        self.late_s = end_s + self.lookahead_s

    def is_ending(self, now_s: float) -> bool:
        """Whether the next task may be queued behind it."""
        return self.opens_s <= now_s <= self.late_s and self.failure is None


class Flights:
    """All flights of a run, in the order of their dispatches."""

    def __init__(self, *, lookahead_s: float, last_number: int) -> None:
        self._lookahead_s = lookahead_s
        self._flights: dict[int, Flight] = {}
        self.unwanted: set[int] = set()
        """Dispatches to stop that `take_unwanted` has not returned yet."""
        self.last_number = last_number
        """Of the last dispatch."""

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights.values())

    def add(
        self, dispatch: Dispatch, *, soonest_s: float, is_foreseeable: bool, owner: str | None = None
    ) -> Flight:
        """Note a dispatch; nothing is queued behind it by a mere guess of when it ends."""
        assert dispatch.number == self.last_number + 1, f"{dispatch} is not the next dispatch"
        view = RunningTask(dispatch.task, dispatch.layout, dispatch.predicted_end_s, owner)
        predicted_s = dispatch.predicted_end_s - dispatch.predicted_start_s
        own_s = lookahead_of(predicted_s, lookahead_s=self._lookahead_s) if is_foreseeable else 0.0
        flight = self._flights[dispatch.number] = Flight(dispatch, view, own_s)
        flight.set_end(view, soonest_s)
        self.last_number = dispatch.number
        return flight

    def remove(self, number: int) -> Flight:
        """The flight of a dispatch that has ended."""
        return self._flights.pop(number)

    def ending(self, now_s: float) -> list[Flight]:
        """Flights behind which the next tasks may be queued."""
        flights = self._flights.values()
        return [each for each in flights if each.opens_s <= now_s <= each.late_s and each.failure is None]

    def next_look_s(self, now_s: float) -> float:
        """When to decide next what follows a flight; infinity if there is nothing to decide."""
        return min([each.look_s for each in self._flights.values() if each.look_s > now_s], default=math.inf)

    def move_end(self, flight: Flight, end_s: float, *, soonest_s: float) -> bool:
        """Predict other ends; whether that changes what policies see."""
        view = flight.view
        has_moved = abs(end_s - view.predicted_end_s) > _SAME_END * self._lookahead_s
        if has_moved:
            view = RunningTask(view.task, view.layout, end_s, view.owner)
        flight.set_end(view, soonest_s)
        return has_moved

    def give_up(self, flights: Iterable[Flight]) -> None:
        """Nobody wants the results of these dispatches any more."""
        self.unwanted.update(flight.dispatch.number for flight in flights)

    def take_unwanted(self) -> list[Dispatch]:
        """Dispatches to stop, each returned once."""
        unwanted, self.unwanted = self.unwanted, set()
        return [self._flights[number].dispatch for number in sorted(unwanted & self._flights.keys())]

    def check(self) -> None:
        """Assert what always holds."""
        numbers = list(self._flights)
        assert numbers == sorted(numbers), f"dispatches out of order: {numbers}"
        assert not numbers or numbers[-1] <= self.last_number, f"{numbers[-1]} is past {self.last_number}"
