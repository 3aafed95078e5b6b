"""A rank on a GPU, where a task ends after its launch.

The main thread enqueues a task on its stream and continues with the next one; the watcher waits for the
device and reports. Latents may be used as soon as they are enqueued: their own rank uses the same stream, and
another stream sends them to other ranks after the event that follows them. The slab describes them at once
(slab.py). So a job goes from GPU to GPU and waits for no thread.

    main stream    tasks, in the order of dispatch; collectives too
    arrivals       state that other ranks send, so that it does not wait for the previous task
    departures     state that goes to other ranks
    copies         to host memory
    frames         of decodes

A rank is inside a dispatch from its start until the device is done with it. So when the rank says that it
has left, none of its kernels can touch another rank's arena.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gfgen.errors import ModelError, RunError
from gfgen.gfc.cuda.device_arena import DeviceArena, HostArena
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint, DispatchOutcome
from gfgen.gfc.cuda.driver import driver
from gfgen.gfc.cuda.kernels import Kernels
from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.models.families.adapter import HOST, Adapter, Fields
from gfgen.models.fast import stop_checks
from gfgen.models.fast.recording import Graphs, LaunchRecorder
from gfgen.models.fast.rows import try_kernels
from gfgen.models.parallel import cudnn_attention, parallel
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.runtime.ipc.messages import Abandoned, Arenas, Channel, MemoryUse, SendState, WarmUp
from gfgen.runtime.ipc.settings import CONTEXT_BYTES, SIDE_BYTES, RankSettings, WorkerSettings
from gfgen.runtime.predict.profile_file import peak_key
from gfgen.runtime.worker.device import Device, Thread, execute, meet, share_time, task_kind
from gfgen.runtime.worker.dispatches import Dispatches, InputVoidError
from gfgen.runtime.worker.entry import load_model, load_models, run_worker
from gfgen.runtime.worker.forwards import FIRST_STEPS, CudaRecorder, Forwards, Kind
from gfgen.runtime.worker.jobs import Outline, RankTask, Shipment, receive_state, sum_of
from gfgen.runtime.worker.loop import Worker
from gfgen.runtime.worker.memory import DeviceMemory, Staging
from gfgen.system.machine import peak_bytes

logger = logging.getLogger(__name__)

_SHORT_S = 0.25  # a task expected to end sooner is launched as a whole: stopping it would gain nothing
_NUM_SUMS = 64  # more than a rank has tasks under way, which are two at most, or shared ones


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    run_worker(channel_socket, settings, make_worker)


def make_worker(channel: Channel, settings: WorkerSettings) -> Worker:
    device = torch.device("cuda", settings.gpu)
    torch.cuda.set_device(device)
    attention = threading.Thread(target=cudnn_attention.load, args=(device,))
    attention.start()
    Kernels(settings.gpu)  # compile and keep them on disk before another rank waits for this one
    try_kernels(device)
    attention.join()
    if settings.ranks.memory_limit is not None:
        _limit_memory(settings.ranks, device)
    load, ranks = partial(load_model, settings, device=str(device)), settings.ranks
    adapters = load_models(channel, settings, load)
    torch.cuda.synchronize(device)
    dispatches = Dispatches(lambda numbers: channel.send(Abandoned(numbers)))
    gpu = GpuDevice(
        settings,
        adapters,
        dispatches,
        load_model=load,
        device=device,
        own_arena=DeviceArena.create(ranks.arena_plan, device=settings.gpu)
        if ranks.has_own_arena(settings.rank)
        else None,
        recorder=CudaRecorder(device),
    )
    return Worker(channel, settings.rank, gpu, dispatches)


Arrival = tuple[torch.cuda.Event, torch.cuda.Event]  # of other ranks' state: its first part, and all of it


@dataclass(slots=True)
class _Launch:
    works: Sequence[RankTask]
    begun: torch.cuda.Event
    entered: torch.cuda.Event
    outcome: DispatchOutcome | None
    arrival: Arrival | None


class _Streams:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        new = partial(torch.cuda.Stream, device)
        self.main, self.arrivals, self.departures = new(), new(priority=-1), new(priority=-1)
        self.copies, self.frames = Staging(device, new()), Staging(device, new())
        self.incoming = Staging(device, self.arrivals)

    def of(self, thread: Thread) -> torch.cuda.Stream:
        """The stream on which this thread of the worker launches."""
        streams: dict[Thread, torch.cuda.Stream] = {
            "main": self.main,
            "receiver": self.arrivals,
            "sender": self.departures,
            "watcher": self.copies.stream,
            "frames": self.frames.stream,
        }
        return streams[thread]

    def load_transfers(self) -> None:
        """Load the kernels that move state, and take their memory: later, both would wait for the device."""
        for stream in (self.arrivals, self.departures):
            with torch.cuda.stream(stream):
                for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
                    whole = torch.zeros((2, 4, 6), dtype=dtype, device=self.device)
                    part = whole[:, 1:3]
                    part.copy_(part.contiguous())
                torch.empty(SIDE_BYTES // 2, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)


class GpuDevice(Device):
    """The GPU that the settings name."""

    maps_between_tasks = True

    def __init__(
        self,
        settings: WorkerSettings,
        adapters: dict[str, Adapter],
        dispatches: Dispatches,
        *,
        load_model: Callable[[str], Adapter],
        device: torch.device,
        own_arena: tuple[DeviceArena, int] | None,
        recorder: LaunchRecorder,
    ) -> None:
        near = settings.ranks.near_to(settings.rank)
        super().__init__(settings.rank, adapters, dispatches, load_model=load_model, near=near)
        self.counts_tokens = cudnn_attention.is_fast(device, torch.bfloat16)
        self._own_arena = None
        if own_arena is not None:
            self._own_arena, arena_fd = own_arena
            self.arena_fds = (arena_fd,)
        self._settings = settings
        self._device = device
        self._streams = _Streams(device)
        self._memory = DeviceMemory(device, stream=self._streams.main.cuda_stream)
        self._graphs = graphs = Graphs(recorder, device, may_record=settings.ranks.has_graphs)
        self._task_peaks = Counter[str]()  # as in `MemoryUse`
        self.forwards = Forwards(adapters, graphs, rank=settings.rank, unentered=self._unentered, near=near)
        self._sums = itertools.cycle(torch.empty(_NUM_SUMS, pin_memory=True).unbind())
        """Host memory for the sums of tasks, in turn; allocated now, because pinning waits for the device."""
        self._last_end: torch.cuda.Event | None = None
        self._has_peers = True
        self._arrival: Arrival | None = None  # the enqueued input of the task that is launched next
        self._is_short = False  # memory ran out: the main thread releases what it keeps before its next task
        self._streams.load_transfers()

    def use(self, thread: Thread) -> None:
        """Set torch's device and stream, and the launches' context, which torch leaves out for device 0."""
        driver().use(self._device.index)
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._streams.of(thread))

    def connect(self, message: Arenas, fds: Sequence[int]) -> None:
        pad_as_others(message, can_pad=self.counts_tokens)
        self._has_peers = len(message.incarnations) > 1
        arenas = dict(zip(message.ranks, fds[:-1], strict=True))
        plan = self._settings.ranks.arena_plan
        host = None
        if self._settings.ranks.near is not None:
            host = HostArena.open(arenas[self._rank], plan, device=self._settings.gpu)
        self.endpoint = CudaEndpoint(
            self._own_arena,
            host=host,
            near=self._near,
            rank=self._rank,
            peer_fds={peer: fd for peer, fd in arenas.items() if peer != self._rank},
            incarnations=dict(enumerate(message.incarnations)),
            control_fd=fds[-1],
            tables=self._settings.tuned_tables,
            link_bytes_per_s=self._settings.ranks.link_bytes_per_s,
        )

    # Models -----------------------------------------------------------------------------------

    def drop(self, paths: Collection[str]) -> None:
        self.forwards.forget()
        super().drop(paths)
        torch.cuda.empty_cache()  # otherwise other models would have to fit into the gaps

    def warm_up(self, message: WarmUp) -> Iterator[None]:
        try:
            yield from self.forwards.warm_up(message)
        except Exception:
            torch.cuda.empty_cache()
            raise

    def _unentered(self, layout: Layout) -> Parallel | None:
        """The ranks of a step before they meet, for rehearsals and records."""
        return None if layout.degree == 1 else parallel_from(self.endpoint.unentered(layout))

    # Input ------------------------------------------------------------------------------------

    def fetch(self, work: RankTask) -> None:
        job, message = work.job, work.message
        self._arrival = None
        if not message.transfers and job.producer == message.producer:
            return
        kind = arrival_kind(work)
        if self._has_peers and not self._memory.is_known({kind}):
            self._dispatches.await_clear(work.number, may_block=True, but_own=True)
        with self._memory.launching({kind}):
            super().fetch(work)

    def _receive(self, work: RankTask, outline: Outline) -> Fields:
        """Enqueue the arrival of latents, which may not be made yet."""
        stream = self._streams.arrivals
        with torch.cuda.stream(stream):
            begun = self.event(stream)
            unused = [begun]

            def recv(*arguments: Any, **options: Any) -> torch.Tensor:
                """Records `begun` when the first part is there."""
                begun = unused.pop() if unused else None
                return self.endpoint.recv(*arguments, **options, begun=begun)  # type: ignore[no-any-return]

            fields = receive_state(recv, work.message.transfers, outline, dispatch=work.number)
            self._arrival = (begun, self.event(stream))
        return self._arrived(fields)

    def take_in(self, fields: Fields) -> Fields:
        """Copy on the arrivals stream, which does not wait for the previous task."""
        with torch.cuda.stream(self._streams.arrivals):
            brought = self._streams.incoming.brought
            found = {
                name: tensor.clone() if name.startswith(HOST) else brought(tensor)
                for name, tensor in fields.tensors.items()
            }
        return self._arrived(Fields(found, fields.scalars))

    def _arrived(self, fields: Fields) -> Fields:
        """Let tasks use fields of the arrivals stream."""
        self._streams.main.wait_stream(self._streams.arrivals)
        for name, tensor in fields.tensors.items():
            if not name.startswith(HOST):
                tensor.record_stream(self._streams.main)
        return fields

    # Tasks ------------------------------------------------------------------------------------

    def run(self, works: Sequence[RankTask]) -> None:
        work = works[-1]
        message, job = work.message, work.job
        arrival, self._arrival = self._arrival, None
        arrived_s = time.monotonic()
        has_forward = work.task.stage is Stage.DENOISE and len(works) == 1  # no shared one is recorded
        forward = self.forwards.kind_of(work) if has_forward else None
        if work.task.stage is Stage.REFINE:  # nothing is recorded; ranks of a step count exchanges alike
            self.forwards.attach(job.start.checkpoint)
        kinds = task_kinds(work, self._rank, forward)
        if len(works) > 1:
            kinds = kinds.union({len(works)}, *[task_kinds(each, self._rank, None) for each in works])
        is_sure = not self._has_peers or self._memory.is_familiar(kinds)
        prepared_s = self._get_ready(work, forward, may_block=not is_sure)
        ready_s, num_replays = time.monotonic(), self._graphs.num_replays
        self._memory.beside_bytes = sum(x.kept.pages.num_bytes for x in self.adapters.values() if x.kept)
        with self._memory.launching(kinds, model=job.start.spec.model or ""):
            begun = self.event()
            group = meet(self.endpoint, message)
            entered = self.event()
            with stop_checks.watching(self._watch_of(works)):
                execute(self.adapters, works, group)
            for each in works:
                each.made = {name: _dense(fields) for name, fields in each.made.items()}
                if (total := sum_of(each.made)) is not None:  # copied to where the watcher reads it
                    each.total = next(self._sums).copy_(total, non_blocking=True)
        is_alike = group is None and len({each.job.start.shape for each in works}) == 1
        if is_alike and num_replays == self._graphs.num_replays:  # records have memory of their own
            model, vae_dtype = job.start.spec.model, self._settings.ranks.vae_dtype
            key = peak_key(model, job.start.shape, work.task.stage, vae_dtype)
            self._task_peaks |= Counter({key: self._memory.last_own_bytes})
        outcome = None
        if group is not None or message.transfers:
            sources = {transfer.source for transfer in message.transfers}
            outcome = self.endpoint.outcome(message.number, sources=sources)
        good = [each for each in works if each.error is None]
        launch, is_there = _Launch(good, begun, entered, outcome, arrival), self.event()
        is_first_use = self.note_used(kinds - patch_kinds(work)) or prepared_s > 0
        for each in works:
            each.launch, each.is_there = launch, is_there
            each.note(
                waited_s=each.times.waited_s + ready_s - arrived_s,
                peak_bytes=self._memory.last_peak_bytes,
                is_first_use=is_first_use,
                prepared_s=prepared_s / len(works),
            )

    def _watch_of(self, works: Sequence[RankTask]) -> stop_checks.Watch:
        watch = super()._watch_of(works)
        if works[-1].message.expected_s * len(works) < _SHORT_S:
            return watch
        return stop_checks.DeviceWatch(watch.is_stopped, record=self.event)

    def _get_ready(self, work: RankTask, forward: Kind | None, *, may_block: bool) -> float:
        """Prepare a step's `forward` while nobody waits; returns the time of recording."""
        forwards, number = self.forwards, work.number
        is_to_record = (
            forward is not None and forwards.is_to_record(forward, work) and not self._dispatches.has_unsent
        )
        try:
            self._dispatches.await_clear(number, may_block=may_block or is_to_record or self._is_short)
        except InputVoidError:
            self._streams.arrivals.synchronize()  # its arrivals were aborted with it
            raise
        if self._is_short:  # nothing is under way
            self._is_short = False
            forwards.clear()
            torch.cuda.empty_cache()
        if forward is None:
            return 0.0
        began_s = ended_s = time.monotonic()
        if is_to_record and not self._dispatches.has_unsent:
            forwards.record(forward, work)
            ended_s = time.monotonic()
        forwards.begin(forward)
        return ended_s - began_s

    def finish(self, work: RankTask) -> None:
        launch: _Launch = work.launch
        work.launch = None  # so that no cycle keeps its tensors
        work.is_there.synchronize()
        ended_s = time.monotonic()
        last_end, self._last_end = self._last_end, work.is_there
        if work is launch.works[0]:
            share_time(launch.works, ended_s - launch.entered.elapsed_time(work.is_there) / 1e3, ended_s)
        if self._dispatches.is_void(work.number):
            raise InputVoidError
        if launch.outcome is not None:
            launch.outcome.require()
        waited_s, moved_s = work.times.waited_s, work.times.moved_s
        waited_s += launch.begun.elapsed_time(launch.entered) / 1e3
        if launch.arrival is not None:
            moved_s += launch.arrival[0].elapsed_time(launch.arrival[1]) / 1e3
        idle_s = None if last_end is None else last_end.elapsed_time(launch.entered) / 1e3
        idle_s = idle_s if work is launch.works[0] else 0.0
        work.note(waited_s=waited_s, moved_s=moved_s, idle_s=idle_s)

    def event(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """An event that is recorded, on the stream of tasks unless another is given."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream or self._streams.main)
        return event

    # Output -----------------------------------------------------------------------------------

    def store(self, tensor: torch.Tensor, place: memoryview) -> None:
        self._streams.copies.store(tensor, place)

    def store_rows(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        self._streams.frames.store_rows(rows, target)

    def send(self, shipment: Shipment, message: SendState) -> None:
        """Enqueue it after the event that follows the latents."""
        if shipment.is_there is not None:
            self._streams.departures.wait_event(shipment.is_there)
        super().send(shipment, message)

    def await_sent(self, message: SendState) -> None:
        self._streams.departures.synchronize()
        for destination in {transfer.destination for transfer in message.transfers}:
            self.endpoint.require(destination, dispatch=message.number)

    def drain(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if stream == self._streams.main:
            self._streams.arrivals.synchronize()
            parallel.synchronize(self._device)
        stream.synchronize()

    # Memory, and a device that is lost ----------------------------------------------------------

    def memory_use(self) -> MemoryUse:
        return MemoryUse(
            peak_bytes(),
            device_peaks=self._memory.peaks,
            reserved_bytes=self._memory.reserved_bytes,
            arena_bytes=self._settings.ranks.gpu_arena_bytes,
            task_peaks=dict(self._task_peaks),
        )

    def forget_peaks(self) -> None:
        super().forget_peaks()
        self._memory.forget()

    def note_shortage(self) -> None:
        self._is_short = True  # only the main thread may release it

    def exit_if_lost(self, error: BaseException) -> None:
        """End the process if its CUDA context is broken; a new one replaces it."""
        is_ours = isinstance(error, RunError) and str(error).startswith("CUDA:")
        if is_ours or isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            logger.error("the GPU is lost to this process: %s", error)
            sys.stderr.flush()
            os._exit(1)


def pad_as_others(message: Arenas, *, can_pad: bool) -> None:
    """Pad texts if all ranks of the run do. Raises: ModelError if they do and this rank cannot."""
    if message.counts_tokens and not can_pad:
        raise ModelError("cuDNN's attention with padding works on the other ranks, and not on this one")
    if not message.counts_tokens:
        cudnn_attention.forgo()


def task_kinds(work: RankTask, rank: int, forward: Kind | None) -> frozenset[object]:
    """What determines which kernels a task launches: shapes, the solver's order, place, patches, prompts."""
    start, patches = work.job.start, patch_kinds(work)
    own = (*task_kind(work, rank), start.trajectory.artifacts, min(work.task.step or 0, FIRST_STEPS - 1))
    merging = {(start.checkpoint, "patches")} if patches else set()
    return frozenset({own} | merging | patches | ({forward} if forward is not None else set()))


def patch_kinds(work: RankTask) -> frozenset[object]:
    """The kinds of its patches. Loading one is a part of each switch to it, so it is no first use."""
    start = work.job.start
    return frozenset({(start.checkpoint, patch.sha256, patch.target) for patch in start.spec.patches})


def arrival_kind(work: RankTask) -> object:
    """The kind that determines how much memory a task's input takes when it arrives."""
    parts = tuple([(part.field, part.axis, part.start, part.stop) for part in work.message.transfers])
    start = work.job.start
    return ("arrival", start.shape, start.trajectory.artifacts, work.task.stage, parts)


def _dense(fields: Fields) -> Fields:
    """Make fields dense, so that copying and sending them launches nothing else."""
    return Fields({name: tensor.contiguous() for name, tensor in fields.tensors.items()}, fields.scalars)


def _limit_memory(ranks: RankSettings, device: torch.device) -> None:
    """Limit torch's memory to the part of the limit that the arena and the context leave."""
    assert ranks.memory_limit is not None
    total = torch.cuda.get_device_properties(device).total_memory
    left = ranks.memory_limit - ranks.gpu_arena_bytes - CONTEXT_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, left / total)), device)
