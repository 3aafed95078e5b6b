"""Observers of a run: manifest, trace, metrics, progress. They decide nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gfgen.job.spec import JobSpec
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.ipc.content import Content, NamedContent
from gfgen.runtime.ipc.messages import MemoryUse
from gfgen.snapshot import Snapshot

OutcomeStatus = Literal["done", "failed", "cancelled", "skipped"]


@dataclass(frozen=True, slots=True)
class JobInfo:
    asked: JobSpec
    spec: JobSpec
    """As run: rounded, with defaults filled in."""
    num_tasks: int
    file: str
    """Name of its output in the output folder."""
    spec_hash: str
    family: str
    job_file: str | None = None
    """The job file, as the manifest names it (ownership.py); None for a job without one."""

    @property
    def job_id(self) -> str:
        return self.spec.id

    @property
    def rounding(self) -> str | None:
        """What the model rounded, for example '1280x720 -> 1280x704, 50 -> 49 frames'; None if nothing."""
        asked, spec, notes = self.asked, self.spec, []
        sizes = ((asked.width or spec.width, asked.height or spec.height), (spec.width, spec.height))
        if sizes[0] != sizes[1]:
            notes.append("{}x{} -> {}x{}".format(*sizes[0], *sizes[1]))
        if asked.frames is not None and asked.frames != spec.frames:
            notes.append(f"{asked.frames} -> {spec.frames} frames")
        return ", ".join(notes) or None

    def difference(self, made: tuple[int, int, int]) -> str | None:
        """How frames, height and width of its files differ from those that it ran with; None if equal."""
        frames, height, width = made
        if (frames, height, width) == (self.spec.frames or 1, self.spec.height, self.spec.width):
            return None
        wanted = f"{self.spec.width}x{self.spec.height} with {self.spec.frames or 1} frames"
        return f"the model made {width}x{height} with {frames} frames, not {wanted}"


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended. Times are seconds since the start of the run."""

    info: JobInfo
    status: OutcomeStatus
    arrival_s: float
    started_s: float | None
    """Start of its first task on a rank."""
    ended_s: float
    deadline_s: float | None
    busy_s: float
    """Time on ranks, summed over its tasks."""
    layouts: tuple[str, ...]
    """In order of use, without consecutive repeats."""
    error: str | None = None
    warnings: tuple[str, ...] = ()
    timings: dict[str, Any] = field(default_factory=dict)
    """Seconds by stage."""
    written: Content | None = None
    """Its file as written, the first one if there are several; None if there is none."""
    files: tuple[NamedContent, ...] = ()
    """All of them, if there are several."""
    made: tuple[int, int, int] | None = None
    """Frames, height and width of each, if only the decode knew them."""
    rank_s: float = 0.0
    """Seconds of each of its ranks, summed over its tasks: GPU-seconds."""
    first_uses_s: float = 0.0
    """The part of `busy_s` in tasks that were the first of their kind in a rank's process."""
    peak_bytes: int | None = None
    """The most that torch had allocated on one of its GPUs; None on CPU ranks."""
    num_reused: int = 0
    """Steps that ran without the transformer."""
    why_reused: str | None = None
    """Why a policy had steps reused; None if none did."""
    batch: int = 1
    """The most jobs, this one included, that a step of it was computed with."""

    @property
    def met_deadline(self) -> bool | None:
        """Whether it was done in time; None without a deadline, or if it was cancelled."""
        if self.deadline_s is None or self.status == "cancelled":
            return None
        return self.status == "done" and self.ended_s <= self.deadline_s


def skipped_outcome(info: JobInfo) -> JobOutcome:
    """The outcome of a job that an earlier run finished."""
    return JobOutcome(
        info=info,
        status="skipped",
        arrival_s=0.0,
        started_s=None,
        ended_s=0.0,
        deadline_s=None,
        busy_s=0.0,
        layouts=(),
    )


class Observer:
    """Does nothing; subclasses override what they watch."""

    refresh_s: float | None = None
    """Interval of `refreshed` in seconds; None for never."""

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        """The run starts with these jobs; skipped ones have already ended."""

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        """These jobs joined the run after its start."""

    def dispatched(self, dispatch: Dispatch) -> None:
        """A task was submitted to ranks."""

    def applied(self, event: Event) -> None:
        """The state has changed by this event."""

    def ended(self, outcome: JobOutcome) -> None:
        """A job has ended, successfully or not."""

    def node_joined(self, node: str, ranks: range) -> None:
        """A node of a cluster takes jobs with these ranks. On one machine nothing joins."""

    def node_left(self, node: str) -> None:
        """A node is gone with its ranks; their numbers do not come again."""

    def refreshed(self, snapshot: Snapshot) -> None:
        """Called about every `refresh_s`."""

    def measured(self, use: Mapping[int, MemoryUse]) -> None:
        """The run has no more tasks: memory use by rank, as far as ranks report it."""

    def close(self) -> None:
        """Called once at the end of the run, also after an error."""
