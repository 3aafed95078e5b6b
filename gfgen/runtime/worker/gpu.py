"""The worker process of a rank on a GPU.

It differs from a CPU rank in that a task's launch is not its end. The main thread enqueues a task on
its stream and goes on to the next one; a fourth thread, the watcher, waits for the device, looks how
the task went, copies what it made to host memory and reports. Latents may be used as soon as they are
enqueued: by their own rank, whose stream has an order, and by others, to whom another stream sends them
behind the event that says that they are there. What they are like the slab tells at once (slab.py). So a
job goes from GPU to GPU without a thread in between.

    main stream    tasks, in the order of dispatch; collectives too
    arrivals       state that other ranks send, so that it need not come after the task before
    departures     state that goes to other ranks
    copies         what goes to host memory
    frames         those of decodes, by a fifth thread, so that no report waits for them

Every dispatch is `inside` from its start until the device is done with it: so when a rank says that
it has left, none of its kernels can touch another rank's arena any more.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch

from gfgen.errors import RunError
from gfgen.gfc.arena import Plan
from gfgen.gfc.cuda.driver import driver
from gfgen.gfc.cuda.endpoint import CudaEndpoint, Outcome
from gfgen.gfc.cuda.kernels import Kernels
from gfgen.gfc.cuda.memory import DeviceArena, arena_bytes
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.models.families.adapter import Adapter, Fields
from gfgen.models.fast import stopping
from gfgen.models.fast.graphs import Graphs, Recorder
from gfgen.models.fast.rows import try_kernels
from gfgen.models.parallel import counted_attention, lanes
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.runtime.core.memory_check import CONTEXT_BYTES
from gfgen.runtime.ipc.arenas import SIDE_BYTES
from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.messages import (
    Arenas,
    FramesStored,
    MemoryUse,
    ReplacePeer,
    RunTask,
    SendState,
    SetModels,
    TaskReport,
    WarmedUp,
    WarmUp,
    WorkerFailed,
)
from gfgen.runtime.worker.forwards import Forwards, Kind
from gfgen.runtime.worker.host import (
    LoadModel,
    Worker,
    WorkerSettings,
    load,
    load_model,
    reason_of,
    run_worker,
)
from gfgen.runtime.worker.jobs import (
    InputVoidError,
    Outline,
    RankJob,
    Shipment,
    frames_shape,
    outline,
    place_of,
    publish,
    receive_state,
    require_finite,
    send_state,
    sum_of,
)
from gfgen.runtime.worker.memory import DeviceMemory
from gfgen.runtime.worker.recorder import CudaRecorder
from gfgen.runtime.worker.staging import Staging

logger = logging.getLogger(__name__)

__all__ = ["WorkerSettings", "main"]

_AFTER_ALL = 2**63
"""A number that no dispatch has, beyond all of them."""
_FIRST_STEPS = 2
"""So many steps differ from all later ones: UniPC of order 2 corrects from the second one on, and solves a
system of equations from the third."""
_SHORT_S = 0.25
"""A task that is expected to end sooner may be launched as a whole: stopping it would gain nothing."""
_NUM_SUMS = 16
"""More than a rank has tasks under way, which are two at most."""


def main(
    channel_socket: socket.socket, settings: WorkerSettings, *, worker_class: type[GpuWorker] | None = None
) -> None:
    """Entry of a GPU rank's process; its worker is a `GpuWorker` unless told otherwise."""

    def make(channel: Channel) -> Worker:
        device = torch.device("cuda", settings.gpu)
        torch.cuda.set_device(device)
        Kernels(settings.gpu)  # compiled and kept on disk before anyone waits for this rank
        try_kernels(device)
        if settings.memory_limit is not None:
            _limit_memory(settings, device)
        adapters = load(settings, channel=channel, device=str(device))
        torch.cuda.synchronize(device)
        worker = (worker_class or GpuWorker)(
            channel,
            settings.rank,
            adapters,
            Plan(*settings.arena_bytes),
            gpu=settings.gpu,
            load_model=partial(load_model, settings, device=str(device)),
            tuned_tables=settings.tuned_tables,
        )
        worker.set_up_forwards(CudaRecorder(device), may_record=settings.has_graphs)
        return worker

    run_worker(channel_socket, settings, make)


@dataclass(slots=True)
class Arrival:
    """When state that other ranks send comes, by the device's clock."""

    begun: torch.cuda.Event
    """The first of it is there."""
    ended: torch.cuda.Event

    @property
    def seconds(self) -> float:
        milliseconds: float = self.begun.elapsed_time(self.ended)
        return milliseconds / 1e3


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
    total: torch.Tensor | None = None
    """In host memory: `sum_of` what it made, when it has run."""
    arrival: Arrival | None = None
    """Of the input, where other ranks send it."""
    frames_fd: int | None = None
    forward: Kind | None = None
    """Of a step whose launches are all timed: nothing was loaded between them."""
    launch_s: float = 0.0


@dataclass(slots=True)
class Decoded:
    """Frames on the device, and the writer's memory, which is closed when they are there."""

    number: int
    frames: Fields
    """This rank's rows of all of them."""
    fd: int
    shape: tuple[int, ...]
    """Of that memory, uint8 [F, H, W, 3]."""


class GpuWorker(Worker):
    """Runs tasks with the adapters of one rank on the GPU with the number `gpu`."""

    def __init__(
        self,
        channel: Channel,
        rank: int,
        adapters: dict[str, Adapter],
        plan: Plan,
        *,
        gpu: int,
        load_model: LoadModel | None = None,
        tuned_tables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(channel, rank, adapters, load_model=load_model)
        self.device = torch.device("cuda", gpu)
        self._plan = plan
        self._tuned_tables = tuned_tables or {}
        self.counts_tokens = counted_attention.is_fast(self.device, torch.bfloat16)
        self._own_arena, arena_fd = DeviceArena.create(plan, device=gpu)
        self.arena_fds = (arena_fd,)
        self._set_up_streams()
        self._load_transfers()

    def _set_up_streams(self) -> None:
        self._main_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._arrivals = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._departures = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._host = Staging(self.device, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        self._outgoing = Staging(self.device, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        self._incoming = Staging(self.device, self._arrivals)
        self._memory = DeviceMemory(self.device, stream=self._main_stream.cuda_stream)
        self._launched: queue.SimpleQueue[Launched] = queue.SimpleQueue()
        self._decoded: queue.SimpleQueue[Decoded] = queue.SimpleQueue()
        self._departing: set[int] = set()
        """Members of `_unsent` for which nothing is left to be done by the host."""
        self._num_replaced = self._num_mapped = 0
        """Peers whose new arena has come, and those of them that the main thread has mapped."""
        self._mapped_before: dict[int, int] = {}
        """By dispatch whose state is to be sent: how many must be mapped before."""
        self._last_end: torch.cuda.Event | None = None
        """Of the last task that the watcher has seen to its end."""
        self._num_unsettled = 0
        """Tasks that are launched, and that the watcher has yet to see to their end."""
        self._has_peers = True
        self._arrival: Arrival | None = None
        """What the main thread has enqueued of the task that it is about to launch."""
        self._is_short = False
        """A task has run out of memory: the main thread is to give back what it keeps."""
        self._sums = itertools.cycle(torch.empty(_NUM_SUMS, pin_memory=True).unbind())
        """Host memory for sums of what tasks make, in turn; made now, since pinning waits for the device."""

    def set_up_forwards(self, recorder: Recorder, *, may_record: bool) -> None:
        """To be called once, before tasks come."""
        graphs = Graphs(recorder, self.device, may_record=may_record)
        self._forwards = Forwards(self._adapters, graphs, rank=self._rank, unentered=self._unentered)

    def _load_transfers(self) -> None:
        """Load what moves state, and take memory for it: either would wait for the device later on."""
        for stream in (self._arrivals, self._departures):
            with torch.cuda.stream(stream):
                for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
                    whole = torch.zeros((2, 4, 6), dtype=dtype, device=self.device)
                    part = whole[:, 1:3]
                    part.copy_(part.contiguous())
                torch.empty(SIDE_BYTES // 2, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)

    def serve(self) -> None:
        self._use_device(self._main_stream)
        super().serve()
        # At once: teardown would wait for kernels that wait for other ranks.
        sys.stderr.flush()
        os._exit(0)

    def _loops(self) -> list[Callable[[], None]]:
        return [*super()._loops(), self._watch, self._store]

    def _use_device(self, stream: torch.cuda.Stream) -> None:
        """For the calling thread: torch's device and stream, and the context that our launches need.

        torch leaves the context alone where the device is 0, which every thread begins with.
        """
        driver().use(self.device.index)
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(stream)

    # The receiver thread ----------------------------------------------------------------------

    def _receive(self) -> None:
        self._use_device(self._arrivals)
        super()._receive()

    def _connect(self, message: Arenas, fds: Sequence[int]) -> None:
        self._do_as_others(message)
        self._has_peers = len(message.incarnations) > 1
        arenas = dict(zip(message.ranks, fds[:-1], strict=True))
        self._endpoint = CudaEndpoint(
            self._plan,
            rank=self._rank,
            device=self.device.index,
            own=self._own_arena,
            peer_fds={peer: fd for peer, fd in arenas.items() if peer != self._rank},
            incarnations=dict(enumerate(message.incarnations)),
            control_fd=fds[-1],
            tables=self._tuned_tables,
        )

    def _do_as_others(self, message: Arenas) -> None:
        """Pad texts if all ranks of the run do; a rank that cannot when they do is of no use."""
        if message.counts_tokens and not self.counts_tokens:
            reason = "cuDNN's attention with padding works on the other ranks, and not on this one"
            self._channel.send(WorkerFailed(self._rank, reason))
            os._exit(1)
        if not message.counts_tokens:
            counted_attention.forgo()

    def _memory_use(self) -> MemoryUse:
        use = super()._memory_use()
        return replace(
            use,
            device_peaks=self._memory.peaks,
            reserved_bytes=self._memory.reserved_bytes,
            arena_bytes=arena_bytes(self._plan),
        )

    def _forget_peaks(self) -> None:
        super()._forget_peaks()
        self._memory.forget()

    def _replace_peer(self, message: ReplacePeer, fd: int) -> None:
        """Leaves it to the main thread, between two tasks: mapping waits for the device.

        This thread must stay free to abort a task that hangs.
        """
        self._num_replaced += 1
        self._tasks.put((message, [os.dup(fd)]))

    def _take(self, message: object, fds: Sequence[int]) -> None:
        if isinstance(message, SendState):
            self._mapped_before[message.number] = self._num_replaced
        super()._take(message, fds)

    # The sender thread ------------------------------------------------------------------------

    def _send(self) -> None:
        self._use_device(self._departures)
        super()._send()

    def _send_one(self, message: SendState, latents: Future[Shipment]) -> None:
        super()._send_one(message, latents)
        with self._told:
            self._departing.discard(message.number)
            del self._mapped_before[message.number]

    def _ship(self, message: SendState, shipment: Shipment) -> None:
        """Only when all arenas are mapped that came before: mapping waits for the device, so for sends that
        are enqueued behind it, and those for ranks that may wait with theirs for this one's sends."""
        with self._told:
            due = self._mapped_before[message.number]
            self._told.wait_for(lambda: self._num_mapped >= due or self._is_void(message.number))
            if self._is_void(message.number):
                raise InputVoidError
        if shipment.is_there is not None:
            self._departures.wait_event(shipment.is_there)
        send_state(self._endpoint, shipment.fields, message.transfers, dispatch=message.number)
        with self._told:
            self._departing.add(message.number)
            self._told.notify_all()
        self._departures.synchronize()
        for destination in {transfer.destination for transfer in message.transfers}:
            self._endpoint.require(destination, dispatch=message.number)

    # The main thread --------------------------------------------------------------------------

    def _run(self, message: RunTask | ReplacePeer, fds: Sequence[int]) -> None:
        if isinstance(message, ReplacePeer):
            super()._replace_peer(message, fds[0])
            with self._told:
                self._num_mapped += 1
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

    def _set_models(self, message: SetModels) -> None:
        with contextlib.suppress(InputVoidError):  # nobody is left who wants them
            self._see_to_the_end(_AFTER_ALL)
            super()._set_models(message)

    def _drop_models(self, paths: Sequence[str]) -> None:
        self._forwards.forget()
        super()._drop_models(paths)
        torch.cuda.empty_cache()  # so that other models do not have to fit into the gaps

    def _perform(self, job: RankJob, message: RunTask, fds: Sequence[int]) -> None:
        """Enqueue a task; the watcher does the rest."""
        task = job.start.trajectory.task(message.index)
        times = [time.monotonic()]
        self._await_input(job, task, message)
        times.append(time.monotonic())
        if message.transfers or job.producer != message.producer:
            kind = self._arrival_kind(job, task, message)
            if self._has_peers and not self._memory.is_known({kind}):
                self._see_to_the_end(message.number)
            with self._memory.launching({kind}):
                self._bring_input(job, task, message)
        arrival, self._arrival = self._arrival, None
        times.append(time.monotonic())
        is_step = task.stage is Stage.DENOISE
        forward = self._forwards.kind_of(job, message.layout) if is_step else None
        kinds = self._kinds(job, task, message, forward)
        is_familiar = self._memory.is_familiar(kinds)
        self._get_ready(job, task, message, forward, is_new=self._has_peers and not is_familiar)
        times.append(time.monotonic())
        with self._memory.launching(kinds, model=job.start.spec.model or ""):
            begun = self._event()
            group = self._meet(message)
            entered = self._event()
            watch = self._watch_of(message)
            with stopping.watching(watch):
                made = self._execute(job, task, None if group is None else parallel_from(group))
            made = {name: _dense(fields) for name, fields in made.items()}
            total = self._on_host(sum_of(made))
        times.append(time.monotonic())
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
            total=total,
            arrival=arrival,
            frames_fd=os.dup(fds[0]) if fds else None,
            forward=forward if is_familiar else None,
            launch_s=times[4] - times[3] - watch.waited_s,
        )
        kept = {name: fields for name, fields in made.items() if name != "frames"}
        if "latents" in kept and message.layout.slot_of(self._rank) == 0:
            outline(job.slab, "latents", task.index + 1, kept["latents"], producer=message.number)
        with self._lock:
            job.keep(kept, dispatch=message.number, is_there=launched.ended)
            if message.number in self._abandoned:
                job.drop(message.number)
            self._num_unsettled += 1
        self._launched.put(launched)

    def _watch_of(self, message: RunTask) -> stopping.Watch:
        is_void = partial(self._is_void, message.number)
        if message.expected_s < _SHORT_S:
            return stopping.Watch(is_void)
        return stopping.DeviceWatch(is_void, record=self._event, now_s=time.monotonic)

    def _on_host(self, total: torch.Tensor | None) -> torch.Tensor | None:
        """Enqueues its copy to memory that the watcher reads when the task has run."""
        return None if total is None else next(self._sums).copy_(total, non_blocking=True)

    def _kinds(self, job: RankJob, task: Task, message: RunTask, forward: Kind | None) -> frozenset[object]:
        """What decides which kernels a task launches, for its own part and for the transformer's.

        Shapes; the solver's order; the place in the layout; and what forwards know of how long prompts are.
        """
        start, layout = job.start, message.layout
        what = (start.checkpoint, task.stage, start.trajectory.artifacts)
        place = (layout.degrees, layout.slot_of(self._rank))
        own = (*what, place, min(task.step or 0, _FIRST_STEPS))
        return frozenset({own} if forward is None else {own, forward})

    def _get_ready(
        self, job: RankJob, task: Task, message: RunTask, forward: Kind | None, *, is_new: bool
    ) -> None:
        """See to it that nobody will wait for this rank inside the task; `forward` is a step's.

        Forwards are recorded while nothing runs here, nor is about to be sent: that may wait for the device.
        """
        forwards = self._forwards
        if forward is None:
            self._clear_the_way(message.number, is_new=is_new or self._is_short)
            self._give_back_if_short()
            return
        is_to_record = forwards.is_to_record(job, task, forward) and not self._unsent
        self._clear_the_way(message.number, is_new=is_new or is_to_record or self._is_short)
        self._give_back_if_short()
        if is_to_record and not self._unsent:
            forwards.record(job, task, forward, message.layout)
        forwards.attach(job.start.checkpoint)

    def _give_back_if_short(self) -> None:
        """Records, and what torch has kept, after an attempt that ran out of memory; nothing is under way."""
        if self._is_short:
            self._is_short = False
            self._forwards.clear()
            torch.cuda.empty_cache()

    def _unentered(self, layout: Layout) -> Parallel | None:
        """The ranks of a step, of whom none has come, for rehearsals and records."""
        return None if layout.degree == 1 else parallel_from(self._endpoint.unentered(layout))

    def _arrival_kind(self, job: RankJob, task: Task, message: RunTask) -> object:
        """What decides which memory a task's input takes when it arrives."""
        parts = tuple([(part.field, part.axis, part.start, part.stop) for part in message.transfers])
        return ("arrival", job.start.trajectory.artifacts, task.stage, parts)

    def _see_to_the_end(self, number: int) -> None:
        """Before input arrives for which torch may have to take memory: nothing that others wait for is left.

        What was launched here has ended, and what goes out for earlier dispatches is sent; see
        `_clear_the_way`. What goes out for this one may wait for what arrives for it.
        """
        with self._told:
            self._told.wait_for(
                lambda: (
                    self._is_void(number)
                    or (not self._num_unsettled and all(unsent >= number for unsent in self._unsent))
                )
            )
            if self._is_void(number):
                raise InputVoidError

    def _clear_the_way(self, number: int, *, is_new: bool) -> None:
        """Let all go out that other ranks may wait for, before kernels here wait for those ranks.

        CUDA loads a kernel's code when it is first launched, and torch may have to take memory; for
        either, the thread waits for the device with the context locked, so that no other thread can send
        or publish meanwhile. Where the device waits in an entry barrier for a rank that waits for this
        one's state, nothing would ever move again (seen: a job that went from one rank to four, in its
        first shared step). So the sending of state for this dispatch or an earlier one is enqueued before
        it is entered; and before a task whose launch may wait, that is seen to its end, as is all that was
        launched here.
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
        unsent = self._unsent if is_new else self._unsent - self._departing
        return all(each > number for each in unsent)

    def _receive_state(self, message: RunTask, outline: Outline) -> Fields:
        """Enqueue its arrival: it may not be there yet, nor be made."""
        with torch.cuda.stream(self._arrivals):
            begun = self._event(self._arrivals)
            timed = _TimedArrivals(self._endpoint, begun)
            fields = receive_state(timed, message.transfers, outline, dispatch=message.number)
            self._arrival = Arrival(begun, self._event(self._arrivals))
        return self._arrived(fields)

    def _take_in(self, fields: Fields) -> Fields:
        """Not behind the task before, and not from memory that a copy would have to be made of first."""
        with torch.cuda.stream(self._arrivals):
            found = {name: self._incoming.brought(tensor) for name, tensor in fields.tensors.items()}
        return self._arrived(Fields(found, fields.scalars))

    def _arrived(self, fields: Fields) -> Fields:
        """Fields of the stream of arrivals, for tasks."""
        self._main_stream.wait_stream(self._arrivals)
        for tensor in fields.tensors.values():
            tensor.record_stream(self._main_stream)
        return fields

    def _give_reason(self, number: int, error: Exception) -> None:
        _exit_if_lost(error)
        super()._give_reason(number, error)

    def _release_memory(self) -> None:
        self._is_short = True  # what is kept is the main thread's; it gives it back before its next step

    def _drain(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        if stream == self._main_stream:
            self._arrivals.synchronize()
            lanes.synchronize(self.device)
        stream.synchronize()

    def _event(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """Recorded, on the stream of tasks unless told otherwise."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream or self._main_stream)
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
        last_end, self._last_end = self._last_end, launched.ended
        if self._is_void(message.number):
            raise InputVoidError
        if launched.outcome is not None:
            launched.outcome.require()
        require_finite(launched.made, launched.total)
        if launched.forward is not None:
            device_s = launched.entered.elapsed_time(launched.ended) / 1e3
            self._forwards.observe(launched.forward, launch_s=launched.launch_s, device_s=device_s)
        frames = launched.made.pop("frames", None)
        if message.layout.slot_of(self._rank) == 0:
            version, store = launched.task.index + 1, self._host.store
            for name, fields in launched.made.items():
                publish(job.slab, name, version, fields, producer=message.number, store=store)
        report = TaskReport(
            message.number,
            started_s=ended_s - launched.entered.elapsed_time(launched.ended) / 1e3,
            ended_s=ended_s,
            waited_s=launched.waited_s + launched.begun.elapsed_time(launched.entered) / 1e3,
            moved_s=launched.moved_s + (0.0 if launched.arrival is None else launched.arrival.seconds),
            do_frames_follow=frames is not None,
            idle_s=None if last_end is None else last_end.elapsed_time(launched.entered) / 1e3,
        )
        self._channel.send(report)
        if frames is not None:
            assert launched.frames_fd is not None
            fd, launched.frames_fd = launched.frames_fd, None
            self._decoded.put(Decoded(message.number, frames, fd, frames_shape(job)))
        self._leave(message.number)

    # The thread for frames ----------------------------------------------------------------------

    def _store(self) -> None:
        self._use_device(self._outgoing.stream)
        while True:
            decoded = self._decoded.get()
            reason = None
            try:
                self._store_frames(decoded)
            except Exception as error:
                _exit_if_lost(error)
                reason = reason_of(error)
            finally:
                os.close(decoded.fd)
            with contextlib.suppress(ConnectionError):  # nobody is left to write them
                self._channel.send(FramesStored(decoded.number, reason))
            del decoded

    def _store_frames(self, decoded: Decoded) -> None:
        """Put this rank's rows of all frames into the memory that the writer will read."""
        rows = decoded.frames.tensors["frames"]
        with mmap.mmap(decoded.fd, math.prod(decoded.shape)) as memory:
            self._outgoing.store_rows(rows, place_of(decoded.frames, memory, decoded.shape))


class _TimedArrivals:
    """A device's endpoint as `receive_state` uses it; `begun` is recorded when the first of it is there."""

    def __init__(self, endpoint: CudaEndpoint, begun: torch.cuda.Event) -> None:
        self._endpoint = endpoint
        self._begun: torch.cuda.Event | None = begun

    def recv(
        self, shape: Sequence[int], dtype: torch.dtype, *, source: int, dispatch: int, label: int = 0
    ) -> torch.Tensor:
        begun, self._begun = self._begun, None
        return self._endpoint.recv(shape, dtype, source=source, dispatch=dispatch, label=label, begun=begun)


def _dense(fields: Fields) -> Fields:
    """So that nothing has to be launched on them when they go to the host or to other ranks."""
    return Fields({name: tensor.contiguous() for name, tensor in fields.tensors.items()}, fields.scalars)


def _limit_memory(settings: WorkerSettings, device: torch.device) -> None:
    """Let torch take no more of the device than what is left of the limit beside the rest."""
    assert settings.memory_limit is not None
    total = torch.cuda.get_device_properties(device).total_memory
    left = settings.memory_limit - arena_bytes(Plan(*settings.arena_bytes)) - CONTEXT_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, left / total)), device)


def _exit_if_lost(error: BaseException) -> None:
    """End the process when its CUDA context is broken for good: a new one takes its place."""
    is_ours = isinstance(error, RunError) and str(error).startswith("CUDA:")
    if is_ours or isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
        logger.error("the GPU is lost to this process: %s", error)
        sys.stderr.flush()
        os._exit(1)
