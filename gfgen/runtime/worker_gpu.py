"""The worker process of a rank on a GPU.

It differs from a CPU rank in that a task's launch is not its end. The main thread enqueues a task on
its stream and goes on to the next one; a fourth thread, the watcher, waits for the device, looks how
the task went, copies what it made to host memory and reports. A task's own rank may use its latents as
soon as they are enqueued, other ranks are sent them when they are there.

    main stream    tasks, in the order of dispatch; collectives too
    arrivals       state that other ranks send, so that a task's header is not behind the task before
    departures     state that goes to other ranks
    copies         what goes to host memory

Every dispatch is `inside` from its start until the device is done with it: so when a rank says that
it has left, none of its kernels can touch another rank's arena any more.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import queue
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gfgen.errors import RunError, WorkerError
from gfgen.gfc.arena import Plan
from gfgen.gfc.cuda.driver import driver
from gfgen.gfc.cuda.endpoint import CudaEndpoint, Outcome
from gfgen.gfc.cuda.kernels import Kernels
from gfgen.gfc.cuda.memory import DeviceArena
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.models import lanes
from gfgen.models.adapter import Adapter, Fields
from gfgen.models.graphs import Graphs, Recorder
from gfgen.models.parallel import Parallel, parallel_from
from gfgen.runtime.channel import Channel
from gfgen.runtime.messages import (
    Arenas,
    ReplacePeer,
    RunTask,
    SendState,
    TaskReport,
    WarmedUp,
    WarmUp,
)
from gfgen.runtime.worker import Worker, WorkerSettings, load, reason_of, run_worker
from gfgen.runtime.worker_forwards import Forwards, Kind
from gfgen.runtime.worker_graphs import CudaRecorder
from gfgen.runtime.worker_jobs import (
    InputVoidError,
    RankJob,
    frames_shape,
    place_of,
    publish,
    receive_state,
    send_state,
)

logger = logging.getLogger(__name__)

__all__ = ["WorkerSettings", "main"]

STAGING_BYTES = 64 << 20
"""Of pinned host memory: more than a job's latents with the solver's state, but for the largest shapes."""

_FIRST_STEPS = 2
"""So many steps differ from all later ones: UniPC of order 2 corrects from the second one on, and solves a
system of equations from the third."""


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    """Entry of a GPU rank's process."""

    def make(channel: Channel) -> Worker:
        _refuse_inherited_cuda()
        device = torch.device("cuda", settings.rank)
        torch.cuda.set_device(device)
        Kernels(settings.rank)  # compiled and kept on disk before anyone waits for this rank
        adapters = load(settings, device=str(device))
        torch.cuda.synchronize(device)
        worker = GpuWorker(channel, settings.rank, adapters, Plan(*settings.arena_bytes))
        worker.set_up_forwards(CudaRecorder(device), may_record=settings.has_graphs)
        return worker

    run_worker(channel_socket, settings, make)


@dataclass(slots=True)
class Launched:
    """A task whose work is enqueued, and what is to be done when it has run."""

    message: RunTask
    job: RankJob
    task: Task
    made: dict[str, Fields]
    begun: torch.cuda.Event
    entered: torch.cuda.Event
    ended: torch.cuda.Event
    outcome: Outcome | None
    waited_s: float
    """On the host: for its input, for others, for what had to be ready."""
    moved_s: float
    frames_fd: int | None = None
    forward: Kind | None = None
    """Of a step whose launches are all timed: nothing was loaded between them."""
    launch_s: float = 0.0


class GpuWorker(Worker):
    """Runs tasks with the adapters of one rank, on the GPU of its number."""

    def __init__(self, channel: Channel, rank: int, adapters: dict[str, Adapter], plan: Plan) -> None:
        super().__init__(channel, rank, adapters)
        self.device = torch.device("cuda", rank)
        self._plan = plan
        self._own_arena, arena_fd = DeviceArena.create(plan, device=rank)
        self.arena_fds = (arena_fd,)
        self._set_up_streams()

    def _set_up_streams(self) -> None:
        self._main_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._arrivals = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._departures = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._host = HostCopies(self.device)
        self._launched: queue.SimpleQueue[Launched] = queue.SimpleQueue()
        self._newcomers: Counter[int] = Counter()
        """Ranks whose new arena the main thread has yet to map; one may have died again meanwhile."""
        self._num_unsettled = 0
        """Tasks that are launched, and that the watcher has yet to see to their end."""
        self._seen: set[object] = set()
        """Kinds of tasks that this process has launched before."""
        self._is_short = False
        """A task has run out of memory: the main thread is to give back what it keeps."""

    def set_up_forwards(self, recorder: Recorder, *, may_record: bool) -> None:
        """To be called once, before tasks come."""
        graphs = Graphs(recorder, self.device, may_record=may_record)
        self._forwards = Forwards(self._adapters, graphs, rank=self._rank, unentered=self._unentered)

    def serve(self) -> None:
        self._use_device(self._main_stream)
        super().serve()
        # At once: teardown would wait for kernels that wait for other ranks.
        sys.stderr.flush()
        os._exit(0)

    def _loops(self) -> list[Callable[[], None]]:
        return [*super()._loops(), self._watch]

    def _use_device(self, stream: torch.cuda.Stream) -> None:
        """For the calling thread: torch's device and stream, and the context that our launches need.

        torch leaves the context alone where the device is 0, which every thread begins with.
        """
        driver().use(self._rank)
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(stream)

    # The receiver thread ----------------------------------------------------------------------

    def _receive(self) -> None:
        self._use_device(self._arrivals)
        super()._receive()

    def _connect(self, message: Arenas, fds: Sequence[int]) -> None:
        arenas = dict(zip(message.ranks, fds[:-1], strict=True))
        self._endpoint = CudaEndpoint(
            self._plan,
            rank=self._rank,
            device=self._rank,
            own=self._own_arena,
            peer_fds={peer: fd for peer, fd in arenas.items() if peer != self._rank},
            incarnations=dict(enumerate(message.incarnations)),
            control_fd=fds[-1],
        )

    def _replace_peer(self, message: ReplacePeer, fd: int) -> None:
        """Leaves it to the main thread, between two tasks: mapping waits for the device.

        This thread must stay free to abort a task that hangs.
        """
        self._newcomers[message.rank] += 1
        self._tasks.put((message, [os.dup(fd)]))

    # The sender thread ------------------------------------------------------------------------

    def _send(self) -> None:
        self._use_device(self._departures)
        super()._send()

    def _ship(self, message: SendState, fields: Fields) -> None:
        destinations = {transfer.destination for transfer in message.transfers}
        with self._told:
            self._told.wait_for(
                lambda: not destinations & self._newcomers.keys() or self._is_void(message.number)
            )
            if self._is_void(message.number):
                raise InputVoidError
        send_state(self._endpoint, fields, message.transfers, dispatch=message.number)
        self._departures.synchronize()
        for destination in destinations:
            self._endpoint.require(destination, dispatch=message.number)

    # The main thread --------------------------------------------------------------------------

    def _run(self, message: RunTask | ReplacePeer, fds: Sequence[int]) -> None:
        if isinstance(message, ReplacePeer):
            self._endpoint.replace_peer(message.rank, fds[0], message.incarnation)
            with self._told:
                self._newcomers[message.rank] -= 1
                self._newcomers += Counter()  # forgets those that are mapped
                self._told.notify_all()
            return
        with self._told:  # the watcher may have found a failure meanwhile
            self._told.wait_for(lambda: not self._failed)
        super()._run(message, fds)

    def _warm_up(self, message: WarmUp) -> WarmedUp:
        """Run steps alone, before a run; what cannot be is told, and left as it is."""
        began_s = time.monotonic()
        reason = None
        try:
            with torch.no_grad():
                self._forwards.warm_up(message)
        except Exception as error:
            _exit_if_lost(error)
            logger.debug("warming up", exc_info=True)
            reason = reason_of(error)
            torch.cuda.empty_cache()
        self._drain()
        return WarmedUp(message.number, time.monotonic() - began_s, reason)

    def _perform(self, job: RankJob, message: RunTask, fds: Sequence[int]) -> None:
        """Enqueue a task; the watcher does the rest."""
        task = job.start.trajectory.task(message.index)
        times = [time.monotonic()]
        self._await_input(job, task, message)
        times.append(time.monotonic())
        self._bring_input(job, task, message)
        times.append(time.monotonic())
        kinds = self._kinds(job, task, message)
        is_new = not kinds <= self._seen
        forward = self._get_ready(job, task, message, is_new=is_new)
        times.append(time.monotonic())
        begun = self._event()
        group = self._meet(message)
        entered = self._event()
        made = self._execute(job, task, None if group is None else parallel_from(group))
        times.append(time.monotonic())
        self._seen |= kinds  # now, since one that is given up or fails first has loaded nothing
        outcome = None
        if group is not None or message.transfers:
            sources = {transfer.source for transfer in message.transfers}
            outcome = self._endpoint.outcome(message.number, sources=sources)
        launched = Launched(
            message,
            job,
            task,
            made,
            begun=begun,
            entered=entered,
            ended=self._event(),
            outcome=outcome,
            waited_s=times[1] - times[0] + times[3] - times[2],
            moved_s=times[2] - times[1],
            frames_fd=os.dup(fds[0]) if fds else None,
            forward=None if is_new else forward,
            launch_s=times[4] - times[3],
        )
        kept = {name: fields for name, fields in made.items() if name != "frames"}
        with self._lock:
            job.keep(kept, dispatch=message.number, is_finished=False)
            if message.number in self._abandoned:
                job.drop(message.number)
            self._num_unsettled += 1
        self._launched.put(launched)

    def _kinds(self, job: RankJob, task: Task, message: RunTask) -> frozenset[object]:
        """What decides which kernels a task launches, for its own part and for the transformer's.

        Shapes; the solver's order; the place in the layout; and how long prompts are, for those whose texts
        are not padded.
        """
        start, layout = job.start, message.layout
        what = (start.checkpoint, task.stage, start.trajectory.artifacts)
        place = (layout.degrees, layout.slot_of(self._rank))
        own = (*what, place, min(task.step or 0, _FIRST_STEPS))
        if task.stage is not Stage.DENOISE:
            return frozenset({own})
        texts = tuple(x.shape[1] for x in job.artifacts["prompt"].tensors.values())
        return frozenset({own, (*what, place, texts)})

    def _get_ready(self, job: RankJob, task: Task, message: RunTask, *, is_new: bool) -> Kind | None:
        """See to it that nobody will wait for this rank inside the task; the kind of a step's forwards.

        Forwards are recorded while nothing runs here, nor is about to be sent: that may wait for the device.
        """
        if task.stage is not Stage.DENOISE:
            self._clear_the_way(message.number, is_new=is_new)
            return None
        forwards, layout = self._forwards, message.layout
        kind = forwards.kind_of(job, layout)
        is_to_record = forwards.is_to_record(job, task, kind) and not self._unsent
        self._clear_the_way(message.number, is_new=is_new or is_to_record or self._is_short)
        if self._is_short:
            self._is_short = False
            forwards.clear()
            torch.cuda.empty_cache()
        if is_to_record and not self._unsent:
            forwards.record(job, task, kind, layout)
        forwards.attach(job.start.checkpoint)
        return kind

    def _unentered(self, layout: Layout) -> Parallel | None:
        """The ranks of a step, of whom none has come, for rehearsals and records."""
        return None if layout.degree == 1 else parallel_from(self._endpoint.unentered(layout))

    def _clear_the_way(self, number: int, *, is_new: bool) -> None:
        """Let all go out that other ranks may wait for, before kernels here wait for those ranks.

        CUDA loads a kernel's code when it is first launched; for that it waits for the device, with the
        context locked, so that no other thread can send or publish meanwhile. Where the device
        waits in an entry barrier for a rank that waits for this one's state, nothing would ever move
        again (seen: a job that went from one rank to four, in its first shared step). So state that
        goes out for this dispatch or an earlier one is sent before it is entered; and before the first
        task of a kind, all that was launched here is seen to its end.
        """
        with self._told:
            self._told.wait_for(lambda: self._is_clear(number, is_new=is_new))
            is_void = self._is_void(number)
        if is_void:
            self._arrivals.synchronize()  # what was to arrive for it has been aborted with it
            raise InputVoidError

    def _is_clear(self, number: int, *, is_new: bool) -> bool:
        if self._is_void(number):
            return True
        if is_new and self._num_unsettled:
            return False
        return all(unsent > number for unsent in self._unsent)

    def _receive_state(self, message: RunTask) -> Fields:
        def require(source: int) -> None:
            self._endpoint.require(source, dispatch=message.number)

        with torch.cuda.stream(self._arrivals):
            fields = receive_state(
                self._endpoint, message.transfers, dispatch=message.number, require=require
            )
        self._main_stream.wait_stream(self._arrivals)
        for tensor in fields.tensors.values():
            tensor.record_stream(self._main_stream)
        return fields

    def _give_reason(self, number: int, error: Exception) -> None:
        _exit_if_lost(error)
        super()._give_reason(number, error)

    def _release_memory(self) -> None:
        self._is_short = True  # records are the main thread's; it gives them back before its next step
        self._drain()
        torch.cuda.empty_cache()

    def _drain(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        if stream == self._main_stream:
            self._arrivals.synchronize()
            lanes.synchronize(self.device)
        stream.synchronize()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._main_stream)
        return event

    # The watcher thread -----------------------------------------------------------------------

    def _watch(self) -> None:
        self._use_device(self._host.stream)
        while True:
            launched = self._launched.get()
            try:
                self._settle(launched)
            except InputVoidError:
                self._leave(launched.message.number)
            except Exception as error:
                with self._lock:
                    launched.job.drop(launched.message.number)
                self._give_reason(launched.message.number, error)
            finally:
                if launched.frames_fd is not None:
                    os.close(launched.frames_fd)
                with self._told:
                    self._num_unsettled -= 1
                    self._told.notify_all()
            del launched

    def _settle(self, launched: Launched) -> None:
        """Wait until the device has run a task, publish what it made, report."""
        message, job = launched.message, launched.job
        launched.ended.synchronize()
        ended_s = time.monotonic()
        if self._is_void(message.number):
            raise InputVoidError
        if launched.outcome is not None:
            launched.outcome.require()
        if launched.forward is not None:
            device_s = launched.entered.elapsed_time(launched.ended) / 1e3
            self._forwards.observe(launched.forward, launch_s=launched.launch_s, device_s=device_s)
        frames = launched.made.pop("frames", None)
        if frames is not None:
            assert launched.frames_fd is not None
            self._host.store(frames, launched.frames_fd, shape=frames_shape(job))
        if message.layout.slot_of(self._rank) == 0:
            for name, fields in launched.made.items():
                with self._host.copied(fields) as on_host:
                    publish(job.slab, name, launched.task.index + 1, on_host, producer=message.number)
        with self._lock:
            job.finish(message.number)
        report = TaskReport(
            message.number,
            started_s=ended_s - launched.entered.elapsed_time(launched.ended) / 1e3,
            ended_s=ended_s,
            waited_s=launched.waited_s + launched.begun.elapsed_time(launched.entered) / 1e3,
            moved_s=launched.moved_s,
        )
        self._channel.send(report)
        self._leave(message.number)


class HostCopies:
    """From the device to host memory, through a pinned buffer, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)

    @contextlib.contextmanager
    def copied(self, fields: Fields) -> Iterator[Fields]:
        """The fields on the host, until the end of the block; what they hold has been computed."""
        parts = {name: tensor.contiguous() for name, tensor in fields.tensors.items()}
        needed = sum(_aligned(part.numel() * part.element_size()) for part in parts.values())
        if needed > self._staging.numel():
            self._staging = torch.empty(needed, dtype=torch.uint8, pin_memory=True)
        on_host, position = Fields(scalars=fields.scalars), 0
        for name, part in parts.items():
            num_bytes = part.numel() * part.element_size()
            place = self._staging[position : position + num_bytes].view(part.dtype).view(part.shape)
            on_host.tensors[name] = place.copy_(part, non_blocking=True)
            position += _aligned(num_bytes)
        self.stream.synchronize()
        yield on_host

    def store(self, frames: Fields, fd: int, *, shape: Sequence[int]) -> None:
        """Put this rank's rows of all frames into the memory that the writer will read.

        In halves of the buffer: one is filled by the device while the other one is emptied.
        shape: of that memory, uint8 [F, H, W, 3].
        """
        rows = frames.tensors["frames"]
        half = self._staging.numel() // 2
        with mmap.mmap(fd, math.prod(shape)) as memory:
            target = place_of(frames, memory, shape)
            arriving: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]] = []
            for idx, at in enumerate(_pieces(rows.shape, half)):
                piece = rows[at]
                place = self._staging[idx % 2 * half :][: piece.numel()].view(piece.shape)
                if len(arriving) == 2:
                    _empty(*arriving.pop(0))
                place.copy_(piece, non_blocking=True)
                there = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                there.record(self.stream)
                arriving.append((place, target[at], there))
            for each in arriving:
                _empty(*each)
            del target, arriving, each


def _pieces(shape: Sequence[int], room_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Frames, or rows of a frame, of uint8 [F, H, W, 3] that fit into so much room, one after the other."""
    num_frames, num_rows, row_bytes = shape[0], shape[1], math.prod(shape[2:])
    rows = min(num_rows, room_bytes // row_bytes)
    frames = max(1, room_bytes // (num_rows * row_bytes))
    for frame in range(0, num_frames, frames):
        for row in range(0, num_rows, rows):
            yield slice(frame, frame + frames), slice(row, row + rows)


def _empty(place: torch.Tensor, target: torch.Tensor, there: torch.cuda.Event) -> None:
    there.synchronize()
    target.copy_(place)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def _exit_if_lost(error: BaseException) -> None:
    """End the process when its CUDA context is broken for good: a new one takes its place."""
    is_ours = isinstance(error, RunError) and str(error).startswith("CUDA:")
    if is_ours or isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
        logger.error("the GPU is lost to this process: %s", error)
        sys.stderr.flush()
        os._exit(1)


def _refuse_inherited_cuda() -> None:
    """CUDA does not survive a fork: no descriptor of a GPU may come from the fork server."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                raise WorkerError("CUDA was initialised before this process was forked")
