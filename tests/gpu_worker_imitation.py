"""A GPU rank's worker on a CPU: everything of gpu.py but CUDA.

Streams and events do nothing, since what a CPU is told to do is done when the call returns; arenas
are memfds that the worker makes itself, as a GPU's rank does. So its threads, what it answers to the
control plane and how it recovers are tested on any machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from faulty_worker import FAULTS, FaultyAdapter

from gfgen.errors import ProtocolError
from gfgen.gfc import native
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import CpuGroup, Endpoint
from gfgen.layout import Layout
from gfgen.models.parallel.parallel import rehearsal
from gfgen.models.streaming.placing import Kept
from gfgen.runtime.ipc.messages import Abandoned, Arenas, Channel
from gfgen.runtime.ipc.settings import WorkerSettings
from gfgen.runtime.worker import forwards, gpu, memory
from gfgen.runtime.worker.dispatches import Dispatches
from gfgen.runtime.worker.entry import load_model, load_models, run_worker
from gfgen.runtime.worker.loop import Worker
from gfgen.runtime.worker.memory import DeviceMemory

MAPPING_S = 20.0
LATE_S = 1.0
LAUNCH_BYTES = 1000
STAGING_BYTES = 1 << 16
"""So little that frames go through it in many pieces."""


class Stream:
    """A stream of a device that is always done."""

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = 0

    def synchronize(self) -> None: ...
    def wait_stream(self, _: Stream) -> None: ...
    def wait_event(self, _: Event) -> None: ...


class Event:
    """When it was recorded, which is when all before it was done."""

    def __init__(self, **_: object) -> None:
        self.at_s = 0.0

    def record(self, _: object = None) -> None:
        self.at_s = time.monotonic()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


class Outcome:
    """Nothing goes wrong that was not raised at once."""

    def require(self) -> None: ...


class ImitationRecorder:
    """Records by keeping the function, which reads where a record would and is told a replay's ranks.

    Where a capture runs nothing, it is called with nobody else there.
    """

    def __init__(self) -> None:
        self.num_records = self.num_replays = self.num_aligned = 0

    def align(self, parallel: Any) -> None:
        self.num_aligned += 1

    def record(self, function: Any, parallel: Any) -> Any:
        self.num_records += 1
        function(None if parallel is None else rehearsal(parallel))

        def replay(parallel: Any) -> torch.Tensor:
            self.num_replays += 1
            result: torch.Tensor = function(parallel)
            return result

        return replay

    def has_room(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class ImitationEndpoint(Endpoint):
    """A CPU's endpoint with what a GPU's has beside it."""

    def unentered(self, layout: Layout) -> CpuGroup:
        return self.group(Descriptor(1, layout, (1,) * layout.degree))

    def outcome(self, dispatch: int, *, sources: Sequence[int] = ()) -> Outcome:
        return Outcome()

    def require(self, peer: int, *, dispatch: int) -> None: ...

    def recv(self, *arguments: Any, begun: Event | None = None, **options: Any) -> torch.Tensor:
        x = super().recv(*arguments, **options)
        if begun is not None:
            begun.record()
        return x

    def replace_peer(self, rank: int, fd: int, incarnation: int) -> None:
        if taken_order(f"mapping by {self.rank}") == "late":
            time.sleep(LATE_S)
        when_formatted(lambda: super(ImitationEndpoint, self).replace_peer(rank, fd, incarnation))


class ImitationMemory(DeviceMemory):
    """Each launch takes as many bytes."""

    @contextlib.contextmanager
    def launching(self, kinds: Any, *, model: str | None = None) -> Iterator[None]:
        with super().launching(kinds, model=model):
            yield
        self.last_own_bytes = LAUNCH_BYTES


class ImitationDevice(gpu.GpuDevice):
    """The arena's header needs the incarnation, which comes with the others' arenas."""

    def use(self, thread: str) -> None: ...

    def store_rows(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        order = taken_order("frames")
        if order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if order == "fail":
            raise RuntimeError("as told by a file")
        super().store_rows(rows, target)

    def connect(self, message: Arenas, fds: Sequence[int]) -> None:
        rank, library = self._settings.rank, native.library()
        plan = self._settings.ranks.arena_plan
        (fd,) = self.arena_fds
        address = library.gfc_arena_map(fd, plan.arena_bytes)
        library.gfc_arena_format(address, plan.as_native(), rank, message.incarnations[rank])
        library.gfc_arena_unmap(address, plan.arena_bytes)
        self.endpoint = when_formatted(
            lambda: ImitationEndpoint(
                plan,
                rank=rank,
                fds=dict(zip(message.ranks, fds[:-1], strict=True)),
                incarnations=dict(enumerate(message.incarnations)),
            )
        )


def taken_order(name: str) -> str | None:
    """What a file of the faults' folder tells a worker to do, once."""
    fault = Path(os.environ["GFGEN_TEST_FAULTS"]) / name
    taken = fault.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        fault.rename(taken)
        return taken.read_text()
    return None


def dying(method: Any) -> Any:
    """A method in which a process dies if a file tells it to."""

    def wrapped(*arguments: Any) -> Any:
        if taken_order(method.__name__) == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments)

    return wrapped


def when_formatted(map_arenas: Any) -> Any:
    """What `map_arenas` returns, once the other ranks have written their headers."""
    deadline_s = time.monotonic() + MAPPING_S
    while True:
        try:
            return map_arenas()
        except ProtocolError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def imitate_cuda() -> None:
    """In this process, which is a worker's, torch.cuda does nothing."""
    torch.cuda.Stream = Stream  # type: ignore[assignment, misc]
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.current_stream = lambda _=None: Stream()  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None
    torch.cuda.synchronize = lambda _=None: None  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment]
    real_empty = torch.empty
    torch.empty = lambda *size, pin_memory=False, **options: real_empty(*size, **options)
    for name in ("leave", "come_back"):
        setattr(Kept, name, dying(getattr(Kept, name)))
    memory.STAGING_BYTES = STAGING_BYTES
    gpu.DeviceMemory = ImitationMemory  # type: ignore[misc]
    forwards.MIN_REPLAYS = 1


def imitation_worker(channel: Channel, settings: WorkerSettings, load: Any, *, may_record: bool) -> Worker:
    """With models as `load` has them."""
    ranks = settings.ranks
    fd = os.memfd_create(f"imitation {settings.rank}")
    os.ftruncate(fd, ranks.arena_plan.arena_bytes)
    dispatches = Dispatches(lambda numbers: channel.send(Abandoned(numbers)))
    device = ImitationDevice(
        replace(settings, ranks=replace(ranks, has_graphs=may_record)),
        load_models(channel, settings, load),
        dispatches,
        load_model=load,
        device=torch.device("cpu"),
        own_arena=(None, fd),  # type: ignore[arg-type]
        recorder=ImitationRecorder(),
    )
    return Worker(channel, settings.rank, device, dispatches)


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    def make(channel: Channel, settings: WorkerSettings) -> Worker:
        imitate_cuda()

        def load(path: str) -> FaultyAdapter:
            if taken_order("load") == "fail":
                raise RuntimeError("as told by a file")
            return FaultyAdapter(load_model(settings, path), settings.rank, faults=FAULTS)

        return imitation_worker(channel, settings, load, may_record=True)

    run_worker(channel_socket, settings, make)
