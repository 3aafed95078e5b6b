"""What the control plane and its processes send each other: frozen values, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gfgen.graph import Trajectory
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.runtime.ipc.content import Content
from gfgen.runtime.ipc.migration import Transfer

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
    """Run a task as dispatch `number`; for a decode, the memfd for its frames comes along.

    The task's input is on this rank already, or comes by `transfers`, or is in the slab.
    """

    number: int
    job_id: str
    index: int
    producer: int | None
    layout: Layout
    incarnations: tuple[int, ...]
    """Of the layout's ranks, by slot."""
    transfers: tuple[Transfer, ...] = ()
    """To this rank, in order."""
    wait_s: float | None = None
    """Bounds each wait for another rank in the middle of the task; None: as the collectives do."""
    expected_s: float = 0.0
    """How long the task is predicted to take."""


@dataclass(frozen=True, slots=True)
class SendState:
    """Send what dispatch `producer` makes to the ranks that run dispatch `number`."""

    number: int
    job_id: str
    producer: int
    transfers: tuple[Transfer, ...]
    """From this rank, in order."""


@dataclass(frozen=True, slots=True)
class SetModels:
    """Hold the models of these checkpoints and no others, after the tasks before; answer `ModelsSet`."""

    checkpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arenas:
    """The memory for exchanges between ranks: arenas come along as file descriptors.

    For a rank on a GPU, its own page in host memory comes behind them.
    """

    data_bytes: int
    post_bytes: int
    incarnations: tuple[int, ...]
    """Of all ranks, by rank."""
    ranks: tuple[int, ...]
    """Whose arenas these are, in the order of the descriptors."""
    counts_tokens: bool = False
    """All ranks of the run pad texts (models/parallel/counted_attention.py); else none does."""


@dataclass(frozen=True, slots=True)
class ReplacePeer:
    """A rank has died and a new process has its number: map its new arena, which comes along.

    Answer `PeerReplaced`. Transfers with it are counted anew, so there may be none before that.
    """

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Get steps of jobs like this one ready, before any job of its model runs; answer `WarmedUp`."""

    number: int
    spec: JobSpec
    checkpoint: str
    degrees: tuple[tuple[int, int, int], ...]
    """(cfg, ulysses, ring) of the layouts that are to be ready, in any slot."""


@dataclass(frozen=True, slots=True)
class RunBare:
    """Run jobs without a control plane, one after the other, as comparisons do; answer `BareTimes`.

    For workers of worker_bare.py, all of them at once. Numbers from `first_number` on are used up, one for
    each task of each job.
    """

    first_number: int
    spec: JobSpec
    checkpoint: str
    layouts: tuple[Layout, ...]
    """Of each task of a job; encode and prepare are done by every rank for itself."""
    incarnations: tuple[int, ...]
    """Of all ranks, by rank."""
    num_jobs: int

    @property
    def last_number(self) -> int:
        return self.first_number + self.num_jobs * len(self.layouts) - 1


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer `Pong`, whatever the rank is doing."""


@dataclass(frozen=True, slots=True)
class TellMemory:
    """Answer `MemoryUse`."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Leave these dispatches and do not start them; answer `Abandoned` when none of them is running."""

    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class RestartEdges:
    """Count transfers to and from these ranks, if any, from the beginning; answer `EdgesRestarted`."""

    numbers: frozenset[int]
    """The dispatches that were abandoned before."""
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """The job has ended."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Reset:
    """A new run begins on this worker: forget all jobs. Dispatch numbers go on rising."""


# --- Workers: to the control plane; times are readings of the machine's monotonic clock ------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The models are loaded. The arena of a rank on a GPU comes along."""

    rank: int
    startup_s: float
    counts_tokens: bool = False
    """It could pad texts, and leave the padding out of attention."""


@dataclass(frozen=True, slots=True)
class PeerReplaced:
    """This rank knows the new incarnation, and counts its transfers with it from the beginning."""

    rank: int
    """Of the new process."""
    incarnation: int


@dataclass(frozen=True, slots=True)
class Loading:
    """The worker begins to load a model: whatever ends it before it is ready is laid to that model."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker is of no use, because it cannot load a model for example, and ends."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """What `WarmUp` asked for is ready here, or why it is not."""

    number: int
    seconds: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class BareTimes:
    """What `RunBare` asked for took: seconds by job."""

    jobs_s: tuple[float, ...]
    steps_s: tuple[float, ...]
    """Of them, from the begin of the first step to the end of the last one."""


@dataclass(frozen=True, slots=True)
class ModelsSet:
    """Done as told by `SetModels`; a rank that cannot sends `WorkerFailed`, and ends."""

    load_s: float


@dataclass(frozen=True, slots=True)
class TaskReport:
    """A task has run and its output is published."""

    number: int
    started_s: float
    ended_s: float
    waited_s: float
    moved_s: float
    do_frames_follow: bool = False
    """Its frames are still on their way to the writer's memory; `FramesStored` says when they are there."""
    idle_s: float | None = None
    """On a GPU, by its own clock: from the end of the task before it until this one had begun."""


@dataclass(frozen=True, slots=True)
class FramesStored:
    """The frames of a decode are in the writer's memory; or they are lost, for a reason."""

    number: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class TaskFault:
    """A task raised; `void` means that it was given up for no fault of its own."""

    number: int
    reason: str
    void: bool = False


@dataclass(frozen=True, slots=True)
class Pong:
    """This process is alive."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a rank has taken since its run began, or since it started, in bytes."""

    host_bytes: int
    """Of main memory at most; mapped weights, which ranks share, are in it as far as they were read."""
    device_peaks: Mapping[str, int] = field(default_factory=dict)
    """By model: what was in use on its GPU at most while one of its tasks was launched, weights included."""
    reserved_bytes: int = 0
    """What torch has taken from the GPU by now."""
    arena_bytes: int = 0
    """Of the GPU, for exchanges with other ranks."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """None of the abandoned dispatches is running on this rank, and none will."""

    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class EdgesRestarted:
    """Done as told by `RestartEdges`."""

    numbers: frozenset[int]


# --- Writers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriterReady:
    """This process has started: should it end, then by what it was asked to write."""


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Write a job's frames; they come along as a memfd, uint8 [F, H, W, 3]."""

    job_id: str
    shape: tuple[int, int, int, int]
    path: str
    fps: int | None
    metadata: Mapping[str, str | int | float]
    replaces: Content | None = None
    """What a file of that name has to hold to be replaced; None: it is not replaced."""
    made_for: Mapping[str, Any] | None = None
    """The file's mark until the manifest has its line. An earlier try of the same job has the same one."""


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The file is complete under its name."""

    job_id: str
    path: str
    size_bytes: int
    write_s: float
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """There is no file, or the one that was there before; the reason says what to do."""

    job_id: str
    reason: str
