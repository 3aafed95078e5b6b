"""The simulated backend: dispatches take the time they are said to take, on a virtual clock.

It differs from the process backend in `wait` and `submit` alone; control plane, state and
policies are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gfgen.graph import Stage
from gfgen.runtime.admission import AdmittedJob
from gfgen.runtime.clock import Clock
from gfgen.runtime.dispatch import Dispatch
from gfgen.runtime.events import Event, OutputWritten, RankReady, TaskDone


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    """Durations in seconds."""

    task_s: Callable[[Dispatch], float]
    write_s: float = 0.0


class SimulatedBackend:
    """Ranks that work through what they are given, in order, in virtual time."""

    def __init__(self, clock: Clock, *, num_ranks: int, times: SimulatedTimes) -> None:
        self._clock = clock
        self._times = times
        self._free_s = [0.0] * num_ranks
        self._made_s: dict[int, float] = {}
        for rank in range(num_ranks):
            clock.at(RankReady(clock.now_s, rank, 1, 0.0))

    def wait(self, until: float | None) -> list[Event]:
        """Let time pass until the next event falls due."""
        assert until is not None, "nothing is scheduled: the run would wait for ever"
        self._clock.advance(until)
        return self._clock.due()

    def submit(self, dispatch: Dispatch) -> None:
        """A task starts when its ranks are free and its input is made."""
        ranks = dispatch.layout.ranks
        queued_s = max(self._clock.now_s, *(self._free_s[rank] for rank in ranks))
        started_s = max(queued_s, self._made_s.pop(dispatch.producer or 0, 0.0))
        ended_s = started_s + self._times.task_s(dispatch)
        self._made_s[dispatch.number] = ended_s
        for rank in ranks:
            self._free_s[rank] = ended_s
            waited_s = started_s - queued_s
            self._clock.at(TaskDone(ended_s, dispatch.number, rank, started_s, ended_s, waited_s))
        if dispatch.task.stage is Stage.DECODE:
            written_s = ended_s + self._times.write_s
            self._clock.at(OutputWritten(written_s, dispatch.task.job_id, "", 0, self._times.write_s))

    def release(self, job_id: str) -> None:
        """Nothing is kept for a job."""

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        """Nothing has to be known of a job."""
