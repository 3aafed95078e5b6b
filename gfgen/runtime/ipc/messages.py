"""Messages between the control plane and its processes, and the channel that carries them.

They are frozen values, mostly named tuples, which pickle faster.
"""

from __future__ import annotations

import pickle
import socket
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gfgen.graph import Trajectory
from gfgen.job.spec import JobSpec
from gfgen.layout import Degrees, Layout
from gfgen.runtime.ipc.content import Content, NamedContent


class Transfer(NamedTuple):
    """Elements `start` to `stop` of a field of a job's state along an axis, from one rank to another."""

    source: int
    destination: int
    field: str
    axis: int
    start: int
    stop: int
    size_bytes: int


# --- Workers: from the control plane --------------------------------------------------------


class StartJob(NamedTuple):
    """Make a job known to a worker; sent once, before its first task there, with the slab as a memfd."""

    spec: JobSpec
    trajectory: Trajectory
    checkpoint: str
    shape: str = ""


class RunTask(NamedTuple):
    """Run a task, whose input is here, arrives by `transfers` or is in the slab; with a memfd for frames."""

    number: int
    job_id: str
    task_index: int
    producer: int | None
    layout: Layout
    incarnations: tuple[int, ...]
    transfers: tuple[Transfer, ...] = ()
    wait_s: float | None = None  # bounds each wait for another rank; None for the collectives' default
    expected_s: float = 0.0
    last_sharer: int | None = None  # the last dispatch that shares its reads: it waits for those up to it
    is_approximate: bool = False  # whether a policy chose that the step runs no transformer


class SendState(NamedTuple):
    """Send the output of dispatch `producer` to the ranks that run dispatch `number`."""

    number: int
    job_id: str
    producer: int
    transfers: tuple[Transfer, ...]


class SetModels(NamedTuple):
    """After earlier tasks, hold only the models of these checkpoints; answer `ModelsSet`."""

    checkpoints: tuple[str, ...]
    kept: tuple[str, ...] = ()  # others that may come back from main memory


class Arenas(NamedTuple):
    """The arenas of all ranks as file descriptors; for a GPU the last one is its own page in host memory."""

    data_bytes: int
    post_bytes: int
    incarnations: tuple[int, ...]  # of all ranks, by rank
    ranks: tuple[int, ...]  # the ranks of the arenas, in the order of the descriptors
    counts_tokens: bool = False
    """Whether all ranks of the run pad texts (models/parallel/cudnn_attention.py); otherwise none does."""


class ReplacePeer(NamedTuple):
    """Map the arena of a dead rank's successor, and answer `PeerReplaced`: counts of transfers restart."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Prepare tasks of jobs like this one, before any job of its model runs; answer `WarmedUp`."""

    number: int
    spec: JobSpec
    checkpoint: str
    degrees: tuple[Degrees, ...] = ()  # of the layouts whose steps to prepare, in any slot
    decodes: tuple[int, ...] = ()  # the numbers of ranks that may share a decode
    has_texts: bool = False  # whether to prepare prompts of all lengths
    in_own_slot: bool = False  # only in the slot that the rank has if all layouts begin with rank 0


class WarmUpLater(NamedTuple):
    """Prepare these, in order, whenever no task is here; there is no answer."""

    items: tuple[WarmUp, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer `Pong` at once, also during a task."""


@dataclass(frozen=True, slots=True)
class TellMemory:
    """Answer `MemoryUse`."""


class Abandon(NamedTuple):
    """Leave these dispatches and do not start them; answer `Abandoned` when none is running."""

    numbers: frozenset[int]


class RestartEdges(NamedTuple):
    """Restart the count of transfers to and from these ranks; answer `EdgesRestarted`."""

    numbers: frozenset[int]
    ranks: frozenset[int]


class ForgetJob(NamedTuple):
    """The job has ended."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Reset:
    """A new run begins on this worker: forget all jobs. Dispatch numbers continue to rise."""


# --- Workers: to the control plane; times are readings of the machine's monotonic clock ------


class WorkerReady(NamedTuple):
    """The models are loaded. A rank on a GPU sends its arena with this message."""

    rank: int
    startup_s: float
    counts_tokens: bool = False  # whether it can pad texts and exclude the padding from attention
    read_bytes_per_s: float = 0.0  # of streamed blocks; 0 if it has none


class PeerReplaced(NamedTuple):
    """This rank knows the new incarnation, and restarts the count of transfers with it."""

    rank: int
    incarnation: int


class Loading(NamedTuple):
    """The worker begins to load a model; if it dies before it is ready, that model is the cause."""

    checkpoint: str


class WorkerFailed(NamedTuple):
    """The worker cannot work, for example because a model does not load, and ends."""

    rank: int
    reason: str


class WarmedUp(NamedTuple):
    """The result of `WarmUp`; `reason` says why it failed."""

    number: int
    seconds: float
    reason: str | None = None


class ModelsSet(NamedTuple):
    """`SetModels` is done; a rank that cannot do it sends `WorkerFailed` and ends."""

    load_s: float
    read_bytes_per_s: float = 0.0  # as in `WorkerReady`
    copied: tuple[str, ...] = ()  # the checkpoints that came back from main memory


class RankTimes(NamedTuple):
    """When one rank ran its part of a dispatch; a tuple, so that the journal writes it as a list."""

    rank: int
    started_s: float
    ended_s: float  # the rank executes nothing else from `started_s` until then
    waited_s: float = 0.0  # wait for the task's input, before `started_s`
    moved_s: float = 0.0  # copy of the input, before `started_s`
    idle_s: float | None = None  # on a GPU, by its clock: from the end of the rank's last task to `started_s`
    peak_bytes: int | None = None  # on a GPU: the most that torch had allocated while the task was launched
    is_first_use: bool = False  # it compiled, recorded graphs, or was the first of its kind here
    prepared_s: float = 0.0  # the part of `waited_s` in which the rank recorded graphs for it

    @property
    def busy_s(self) -> float:
        return self.ended_s - self.started_s


class TaskReport(NamedTuple):
    """A task has run and its output is published."""

    number: int
    times: RankTimes
    do_frames_follow: bool = False  # its frames are still being copied; `FramesStored` follows


class FramesStored(NamedTuple):
    """The frames of a decode are in the writer's memory; with a reason, they are lost."""

    number: int
    reason: str | None = None


class TaskFault(NamedTuple):
    """A task raised; `void` if it was given up because something that it depends on failed."""

    number: int
    reason: str
    void: bool = False
    is_late: bool = False  # it waited too long for another rank


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers `Ping`."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of memory that a rank has used since the start of its run or process."""

    host_bytes: int  # peak of main memory, including the pages read of mapped weights, which ranks share
    device_peaks: Mapping[str, int] = field(default_factory=dict)  # by model: in its tasks, with weights
    reserved_bytes: int = 0
    arena_bytes: int = 0  # GPU memory for exchanges with other ranks
    task_peaks: Mapping[str, int] = field(default_factory=dict)  # as `Profile.peaks`


class Abandoned(NamedTuple):
    """None of the abandoned dispatches is running on this rank, and none will."""

    numbers: frozenset[int]


class EdgesRestarted(NamedTuple):
    numbers: frozenset[int]


# --- Writers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriterReady:
    """This process has started; if it ends later, the cause is a request."""


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Write a job's frames; sent with a memfd of uint8 [F, H, W, 3]."""

    job_id: str
    shape: tuple[int, int, int, int] | None  # None if the memory says it (slab.py)
    path: str
    fps: float | None
    metadata: Mapping[str, Any]
    replaces: Content | None = None  # an existing file is replaced only if it is this; None: never
    made_for: Mapping[str, Any] | None = None  # the file's mark until the manifest has its line
    replaces_numbered: Mapping[str, Content] = field(default_factory=dict)  # the same for pictures, by name


class WriteDone(NamedTuple):
    """The complete file has its final name."""

    job_id: str
    path: str
    size_bytes: int
    write_s: float
    sha256: str | None = None
    files: tuple[NamedContent, ...] = ()  # if there are several: all, first that of `path`
    made: tuple[int, int, int] | None = None  # frames, height, width of each, if only the decode knew


class WriteFailed(NamedTuple):
    """No file was written; an earlier one remains. The reason says what to do."""

    job_id: str
    reason: str
    is_full: bool = False  # the disk, or the user's quota, has no room


# --- The channel ----------------------------------------------------------------------------

MAX_MESSAGE_BYTES = 1 << 18  # above Linux's limit for one message with default socket buffers (208 KiB)
MAX_FDS = 9  # the arenas of 8 ranks, and the receiver's own page
_ANCILLARY_BYTES = socket.CMSG_LEN(MAX_FDS * array("i").itemsize)


class Channel:
    """One end of a Unix socket pair (SOCK_SEQPACKET) for pickled messages, and descriptors."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray(MAX_MESSAGE_BYTES)  # of `receive`; a new one each time would take 15 us
        self.sent_bytes = 0

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, fds: tuple[int, ...] = (), *, wait: bool = True) -> None:
        """Raises: OSError if the other end is closed; BlockingIOError if it is full and `wait` is false."""
        packed = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self.sent_bytes += len(packed)
        flags = 0 if wait else socket.MSG_DONTWAIT
        if fds:
            socket.send_fds(self._socket, [packed], fds, flags)
        else:
            self._socket.send(packed, flags)

    def receive(self) -> tuple[Any, list[int]] | None:
        """The next message and its descriptors, which the caller must close; None at the end."""
        try:
            size_bytes, fds = self._receive()
        except ConnectionResetError:  # the peer left messages unread; its own are still here
            try:
                size_bytes, fds = self._receive()
            except ConnectionError:
                return None
        except ConnectionError:
            return None
        if not size_bytes:
            return None
        return pickle.loads(memoryview(self._buffer)[:size_bytes]), fds

    def _receive(self) -> tuple[int, list[int]]:
        size_bytes, ancillary, _, _ = self._socket.recvmsg_into((self._buffer,), _ANCILLARY_BYTES)
        fds = array("i")
        for _, _, content in ancillary:  # descriptors are all that is sent this way
            fds.frombytes(content)
        return size_bytes, fds.tolist()

    def close(self) -> None:
        self._socket.close()
