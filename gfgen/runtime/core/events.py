"""Everything that can happen to a run. State changes on events and on nothing else.

`time_s` counts from the start of the run. Events have a total order: order of receipt, and
among those that a clock releases together (time_s, kind, number), so that a simulated run
is the same every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; `time_s` is when the control plane learned of it."""

    time_s: float


@dataclass(frozen=True, slots=True)
class JobArrived(Event):
    """A job's arrival time has come."""

    job_id: str
    spec_hash: str = ""


@dataclass(frozen=True, slots=True)
class JobTimedOut(Event):
    """A job's timeout has passed: unless it has ended, its running task is stopped and it fails."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobCancelled(Event):
    """Nobody wants a job any more: its running task is stopped, and nothing new begins."""

    job_id: str


@dataclass(frozen=True, slots=True)
class RankReady(Event):
    """A worker has loaded its models and takes tasks."""

    rank: int
    incarnation: int
    startup_s: float


@dataclass(frozen=True, slots=True)
class RankLost(Event):
    """A worker process is gone; unless the rank is retired, a new one is being started."""

    rank: int
    incarnation: int
    reason: str
    is_retired: bool = False


class RankTimes(NamedTuple):
    """When one rank ran its part of a dispatch; a tuple, so that a journal writes it as a list."""

    rank: int
    started_s: float
    ended_s: float
    """From `started_s` to here the rank executes, and does nothing else."""
    waited_s: float = 0.0
    """Before `started_s`: waiting for the task's input."""
    moved_s: float = 0.0
    """Before `started_s`: copying the input."""
    idle_s: float | None = None
    """By a GPU's own clock: from the end of the rank's last task to `started_s`."""

    @property
    def busy_s(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class TaskDone(Event):
    """A dispatch has ended on all of its ranks."""

    dispatch: int
    times: tuple[RankTimes, ...]
    """Of each rank of its layout, by slot."""

    @property
    def started_s(self) -> float:
        return min([each.started_s for each in self.times])

    @property
    def ended_s(self) -> float:
        return max([each.ended_s for each in self.times])

    @property
    def busy_s(self) -> float:
        """The execution on the rank that took longest."""
        return max([each.busy_s for each in self.times])


@dataclass(frozen=True, slots=True)
class TaskFailed(Event):
    """A dispatch has failed, and all of its ranks have left it.

    It raised on a rank; or a worker died (`lost`); or it was given up for no fault of its own,
    because something that it depends on failed (`void`).
    """

    dispatch: int
    reason: str
    void: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class OutputWritten(Event):
    """A job's file is renamed into place: the job has ended well."""

    job_id: str
    path: str
    size_bytes: int
    write_s: float
    writer: int = 0
    """Which of the writer processes wrote it."""
    sha256: str | None = None
    """Of the file, in hex."""


@dataclass(frozen=True, slots=True)
class OutputFailed(Event):
    """A job's frames could not be encoded or written."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class FramesLost(Event):
    """A decode has run, and what it made did not reach the writer: it has to run again.

    The rank failed to copy it; or its worker died (`lost`).
    """

    job_id: str
    reason: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class PolicyChanged(Event):
    """Decisions are made by another policy from here on."""

    policy: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelsChanged(Event):
    """From here on ranks hold these models, and load after their present task what they lack."""

    models: Sequence[str]
    load_s: float
    """Predicted."""
    reason: str


@dataclass(frozen=True, slots=True)
class RankLoaded(Event):
    """A rank holds the models of the last change, and takes tasks again."""

    rank: int
    load_s: float


@dataclass(frozen=True, slots=True)
class LoadFailed(Event):
    """No rank can load these models, which are one: ranks hold them no more, and their jobs fail."""

    models: Sequence[str]
    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """A signal asks the run to stop at the next task boundaries."""

    signal_number: int


@dataclass(frozen=True, slots=True)
class ClosingTime(Event):
    """The time until which the run may work has come, or nothing that is left fits before it."""


@dataclass(frozen=True, slots=True)
class GraceOver(Event):
    """Tasks that still run although the run is to stop have had their time: they are stopped, too."""


@dataclass(frozen=True, slots=True)
class Wakeup(Event):
    """A task is predicted to end within the lookahead: the next one may be queued behind it."""
