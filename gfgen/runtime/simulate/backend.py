"""The simulated backend: dispatches take given times on a virtual clock.

Control plane, state and policies are the same as with the process backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gfgen.graph import Stage
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.dispatch import Dispatch, GivenUp
from gfgen.runtime.core.events import (
    Event,
    OutputWritten,
    RankLoaded,
    RankReady,
    RankTimes,
    TaskDone,
    TaskFailed,
)
from gfgen.runtime.ipc.messages import MemoryUse

DispatchSeconds = Callable[[Dispatch], float]


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    task_s: DispatchSeconds
    """A task while the other ranks idle."""
    loaded_s: DispatchSeconds | None = None
    """A task while all other ranks are busy; None if they make no difference."""
    move_s: DispatchSeconds = lambda _: 0.0
    """The move of a task's input to its ranks."""
    write_s: DispatchSeconds = lambda _: 0.0
    """The file of a decode; each writer writes one file after the other."""
    num_writers: int = 1
    dispatch_s: float = 0.0
    """From a decision to the task's start on a free rank."""


class SimulatedBackend:
    """Ranks that run their dispatches in order, in virtual time."""

    def __init__(self, clock: Clock, *, num_ranks: int, times: SimulatedTimes) -> None:
        self._clock = clock
        self._times = times
        self._free_s = [0.0] * num_ranks
        self._made_s: dict[int, float] = {}
        self._submitted: list[Dispatch] = []
        """Dispatches of this turn of the loop; their durations depend on each other."""
        self._writers_free_s = [0.0] * times.num_writers
        self._stopped: set[int] = set()
        """Stopped dispatches; their scheduled ends are dropped."""
        self._called_off: set[str] = set()
        """Jobs with a stopped decode; their files are not written."""
        for rank in range(num_ranks):
            clock.at(RankReady(clock.now_s, rank, 1, 0.0))

    def wait(self, until: float | None) -> list[Event]:
        if self._submitted:
            self.start_submitted()
            until = self._clock.next_wakeup()
        assert until is not None, "nothing is scheduled: the run would wait forever"
        self._clock.advance(until)
        return [event for event in self._clock.due() if self._comes_about(event)]

    def _comes_about(self, event: Event) -> bool:
        """Whether the task of a scheduled event was not stopped."""
        if isinstance(event, TaskDone):
            return event.dispatch not in self._stopped
        return not (isinstance(event, OutputWritten) and event.job_id in self._called_off)

    def submit(self, dispatch: Dispatch) -> None:
        """A task starts when its ranks are free and its input has arrived."""
        self._submitted.append(dispatch)

    def stop(self, dispatches: Sequence[Dispatch]) -> None:
        """Stop dispatches; their ranks leave them at once."""
        now_s = self._clock.now_s
        for dispatch in dispatches:
            self._stopped.add(dispatch.number)
            ended_s = self._made_s.pop(dispatch.number, None)
            if dispatch.task.stage is Stage.DECODE:
                self._called_off.add(dispatch.task.job_id)
            for rank in dispatch.layout.ranks:
                if self._free_s[rank] == ended_s:  # no other task is queued
                    self._free_s[rank] = now_s
            self._clock.at(TaskFailed(now_s, dispatch.number, "stopped", void=True))

    def release(self, job_id: str) -> None:
        """No effect: jobs take no memory."""

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        """No effect: jobs need no preparation."""

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        """Each rank loads for the predicted time, after its dispatches."""
        if self._submitted:
            self.start_submitted()
        for rank, free_s in enumerate(self._free_s):
            self._free_s[rank] = max(self._clock.now_s, free_s) + load_s
            self._clock.at(RankLoaded(self._free_s[rank], rank, load_s))

    def save(self, job_id: str, *, next_index: int, producer: int, given_up: GivenUp) -> None:
        """No effect: there is no state to save."""

    def memory_use(self) -> Mapping[int, MemoryUse]:
        return {}

    def start_submitted(self) -> None:
        """Schedule the ends of what was submitted in this turn of the loop."""
        submitted, self._submitted = self._submitted, []
        busy_s = self._free_s
        if self._times.loaded_s:
            busy_s = list(self._free_s)
            for dispatch in submitted:
                for rank in dispatch.layout.ranks:
                    busy_s[rank] = max(busy_s[rank], self._clock.now_s) + self._times.task_s(dispatch)
        for dispatch in submitted:
            self._start(dispatch, busy_s)

    def _start(self, dispatch: Dispatch, busy_s: Sequence[float]) -> None:
        times, ranks = self._times, dispatch.layout.ranks
        free_s = max([self._free_s[rank] for rank in ranks])
        queued_s = max(self._clock.now_s + times.dispatch_s, free_s)
        input_s = max(queued_s, self._made_s.pop(dispatch.producer or 0, 0.0))
        moved_s = times.move_s(dispatch)
        started_s = input_s + moved_s
        ended_s = started_s + dispatch.switch_s + self._duration(dispatch, started_s, busy_s)
        self._made_s[dispatch.number] = ended_s
        waited_s = input_s - queued_s
        for rank in ranks:
            self._free_s[rank] = ended_s
        parts = tuple([RankTimes(rank, started_s, ended_s, waited_s, moved_s) for rank in ranks])
        self._clock.at(TaskDone(ended_s, dispatch.number, parts))
        if dispatch.task.stage is Stage.DECODE:
            self._write(dispatch, ended_s)

    def _duration(self, dispatch: Dispatch, started_s: float, busy_s: Sequence[float]) -> float:
        """Interpolated between the times alone and under load, by the share of other ranks that are busy."""
        alone_s, ranks = self._times.task_s(dispatch), dispatch.layout.ranks
        if self._times.loaded_s is None or len(ranks) == len(busy_s):
            return alone_s
        others = [until_s > started_s for rank, until_s in enumerate(busy_s) if rank not in ranks]
        return alone_s + (self._times.loaded_s(dispatch) - alone_s) * sum(others) / len(others)

    def _write(self, dispatch: Dispatch, ended_s: float) -> None:
        lasts_s = self._times.write_s(dispatch)
        free_s = self._writers_free_s
        writer = free_s.index(min(free_s))
        free_s[writer] = max(ended_s, free_s[writer]) + lasts_s
        self._clock.at(OutputWritten(free_s[writer], dispatch.task.job_id, "", 0, lasts_s, writer))
