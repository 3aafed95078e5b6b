"""What the control plane and its processes send each other: frozen values, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gfgen.graph import Trajectory
from gfgen.jobspec import JobSpec
from gfgen.layout import Layout

# --- Workers: from the control plane --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartJob:
    """What a worker keeps of a job; sent once, before its first task there.

    The job's slab comes along as a memfd.
    """

    spec: JobSpec
    trajectory: Trajectory
    checkpoint: str


@dataclass(frozen=True, slots=True)
class RunTask:
    """Run a task as dispatch `number`; for a decode, the memfd for its frames comes along."""

    number: int
    job_id: str
    index: int
    producer: int | None
    layout: Layout


@dataclass(frozen=True, slots=True)
class VoidTask:
    """Dispatch `producer` has failed: what waits for its output will wait in vain."""

    producer: int


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """The job has ended."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Reset:
    """A new run begins on this worker: forget all jobs, count dispatches from 1 again."""


# --- Workers: to the control plane; times are readings of the machine's monotonic clock ------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The models are loaded."""

    rank: int
    startup_s: float


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker cannot start, and ends."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class TaskReport:
    """A task has run and its output is published."""

    number: int
    started_s: float
    ended_s: float
    waited_s: float
    moved_s: float


@dataclass(frozen=True, slots=True)
class TaskFault:
    """A task raised; `void` means that it never began, because its producer failed."""

    number: int
    reason: str
    void: bool = False


# --- Writers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Write a job's frames; they come along as a memfd, uint8 [F, H, W, 3]."""

    job_id: str
    shape: tuple[int, int, int, int]
    path: str
    fps: int | None
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The file is complete under its name."""

    job_id: str
    path: str
    size_bytes: int
    write_s: float


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """There is no file, or the one that was there before; the reason says what to do."""

    job_id: str
    reason: str
