"""All events of a run, which alone change its state, in the order of receipt or (time_s, kind, number).

The kinds are in the order of simultaneous events: ends first, so that a rank that becomes free can take an
arriving job. The clock gives out those that are due.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gfgen.runtime.ipc.content import NamedContent
from gfgen.runtime.ipc.messages import RankTimes


@dataclass(frozen=True, slots=True)
class Event:
    """`time_s` is when the control plane learned of the event."""

    time_s: float


@dataclass(frozen=True, slots=True)
class RankLost(Event):
    """A worker process has died; unless the rank is retired, a new one is starting."""

    rank: int
    incarnation: int
    reason: str
    is_retired: bool = False


@dataclass(frozen=True, slots=True)
class RankReady(Event):
    """A worker has loaded its models and takes tasks."""

    rank: int
    incarnation: int
    startup_s: float


@dataclass(frozen=True, slots=True)
class RankLoaded(Event):
    """A rank holds the models of the last change and takes tasks again."""

    rank: int
    load_s: float
    copied: tuple[str, ...] = ()  # models that came back from main memory (models/streaming/placing.py)


@dataclass(frozen=True, slots=True)
class TaskFailed(Event):
    """A dispatch failed: a rank raised or died (`lost`), or what it depends on failed (`void`)."""

    dispatch: int
    reason: str
    void: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class TaskDone(Event):
    """A dispatch has ended on all of its ranks."""

    dispatch: int
    times: tuple[RankTimes, ...]

    @property
    def started_s(self) -> float:
        return min([each.started_s for each in self.times])

    @property
    def ended_s(self) -> float:
        return max([each.ended_s for each in self.times])

    @property
    def busy_s(self) -> float:
        """Execution time on the slowest rank."""
        return max([each.ended_s - each.started_s for each in self.times])

    @property
    def first_end_s(self) -> float:
        """From the start on the last rank to the end on the first one: a rank is free again then."""
        times = self.times
        return min([each.ended_s for each in times]) - max([each.started_s for each in times])

    @property
    def is_first_use(self) -> bool:
        """Whether it was one on any of its ranks: its duration is not that of other such tasks."""
        return any(each.is_first_use for each in self.times)

    @property
    def rank_s(self) -> float:
        """Execution times of all ranks together."""
        return sum([each.ended_s - each.started_s for each in self.times])


@dataclass(frozen=True, slots=True)
class FramesLost(Event):
    """A decode has run, but its rank failed to copy the frames, or died (`lost`): it runs again."""

    job_id: str
    reason: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class OutputFailed(Event):
    """A job's frames could not be encoded or written."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class OutputWritten(Event):
    """A job's file has its final name: the job is done."""

    job_id: str
    path: str
    size_bytes: int
    write_s: float
    writer: int = 0
    sha256: str | None = None  # in hex
    files: tuple[NamedContent, ...] = ()  # all files of a job with several; `path` is the first one
    made: tuple[int, int, int] | None = None  # frames, height, width of each, if only the decode knew


@dataclass(frozen=True, slots=True)
class JobTimedOut(Event):
    """A job's timeout has passed: unless the job has ended, its running task is stopped and it fails."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobCancelled(Event):
    """A job was cancelled: its running task is stopped, and no other task starts."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobArrived(Event):
    job_id: str
    spec_hash: str = ""
    seed: int | None = None  # drawn for a job that asks for a random one


@dataclass(frozen=True, slots=True)
class PriorityChanged(Event):
    job_id: str
    priority: int


@dataclass(frozen=True, slots=True)
class PolicyChanged(Event):
    policy: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoadFailed(Event):
    """No rank can load this one model: ranks no longer hold it, and its jobs fail."""

    models: Sequence[str]
    reason: str


@dataclass(frozen=True, slots=True)
class ModelsChanged(Event):
    """Ranks hold these models from now on, and load missing ones after their current task."""

    models: Sequence[str]
    load_s: float  # predicted
    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """A signal stops the run at the next task boundaries."""

    signal_number: int


@dataclass(frozen=True, slots=True)
class SpaceLeft(Event):
    """What is free on the disk of the output folder, while that may not hold the files of all jobs."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class ClosingTime(Event):
    """The closing time has come, or nothing left fits before it."""


@dataclass(frozen=True, slots=True)
class GraceOver(Event):
    """The grace period of a stopping run is over: tasks that still run are stopped."""


@dataclass(frozen=True, slots=True)
class Wakeup(Event):
    """A task is predicted to end within the lookahead, so the next one may be queued behind it."""


_KINDS = {kind: number for number, kind in enumerate(list(globals().values())) if isinstance(kind, type)}
"""The order of simultaneous events."""


class Clock:
    """Time since the start of a run, and scheduled events: wall time, or virtual time that is advanced."""

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
