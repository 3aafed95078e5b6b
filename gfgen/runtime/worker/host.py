"""The worker process: one rank, all models, and the state of the jobs that visit it.

Three threads share what the rank knows, under one lock:

    receiver    takes messages off the channel; what is urgent takes effect at once
    main        runs tasks, in the order in which they were dispatched
    sender      sends the state of jobs on to other ranks, in the same order

so a rank that computes still sends, and a rank that waits can still be told to give up.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import mmap
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from gfgen.errors import AbortedError, JobError, ModelError
from gfgen.gfc.arena import Plan
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import Endpoint
from gfgen.gfc.group import Collectives
from gfgen.graph import Stage, Task
from gfgen.models.families.adapter import Adapter, Fields
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import stopping
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.messages import (
    Abandon,
    Abandoned,
    Arenas,
    EdgesRestarted,
    ForgetJob,
    Loading,
    MemoryUse,
    ModelsSet,
    PeerReplaced,
    Ping,
    Pong,
    ReplacePeer,
    Reset,
    RestartEdges,
    RunTask,
    SendState,
    SetModels,
    StartJob,
    TaskFault,
    TaskReport,
    TellMemory,
    WarmedUp,
    WarmUp,
    WorkerFailed,
    WorkerReady,
)
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.worker.jobs import (
    InputVoidError,
    Outline,
    RankJob,
    Shipment,
    copied,
    frames_shape,
    place_of,
    publish,
    receive_state,
    require_finite,
    send_state,
    sum_of,
)
from gfgen.system.allocator import give_back_freed_memory, keep_freed_memory
from gfgen.system.signals import leave_to_the_run

logger = logging.getLogger(__name__)

LoadModel = Callable[[str], Adapter]
"""From a checkpoint to its adapter, where the rank computes."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told when it starts."""

    rank: int
    checkpoints: tuple[str, ...]
    device: str = "cpu"
    has_random_weights: bool = False
    vae_dtype: str = "auto"
    arena_bytes: tuple[int, int] = (0, 0)
    """For exchanges and for a chunk of a transfer, where the rank makes its own arena (`Plan`)."""
    num_threads: int = 1
    has_graphs: bool = False
    """On a GPU: whether forwards may be recorded, to be launched at once."""
    memory_limit: int | None = None
    """Bytes of its GPU that a rank may use; None for all."""
    num_gpus: int = 0
    """GPUs that the ranks use; fewer than ranks where they share them, 0 if each has its own."""
    tuned_tables: Mapping[str, str] = field(default_factory=dict)
    """On a GPU: by which all ranks choose kernels of exchanges (gfc/cuda/selector.py)."""

    @property
    def gpu(self) -> int:
        """The number of this rank's GPU."""
        return self.rank % self.num_gpus if self.num_gpus else self.rank


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    """Entry of a CPU rank's process: load, then serve until the channel is closed."""

    def make(channel: Channel) -> Worker:
        adapters = load(settings, channel=channel)
        return Worker(channel, settings.rank, adapters, load_model=partial(load_model, settings))

    run_worker(channel_socket, settings, make)


def run_worker(
    channel_socket: socket.socket, settings: WorkerSettings, make: Callable[[Channel], Worker]
) -> None:
    """The life of a worker that `make` sets up."""
    leave_to_the_run()  # which closes the channel
    channel = Channel(channel_socket)
    started_s = time.monotonic()
    try:
        torch.set_num_threads(settings.num_threads)
        keep_freed_memory()
        worker = make(channel)
    except Exception as error:
        logger.debug("rank %d cannot start", settings.rank, exc_info=True)
        with contextlib.suppress(ConnectionError):
            channel.send(WorkerFailed(settings.rank, reason_of(error)))
        return
    with contextlib.suppress(ConnectionError):  # the control plane is gone, and nobody waits for a report
        ready = WorkerReady(settings.rank, time.monotonic() - started_s, worker.counts_tokens)
        channel.send(ready, worker.arena_fds)
        worker.serve()


class Worker:
    """Runs tasks with the adapters of one rank. What a GPU does otherwise is in gpu.py."""

    arena_fds: tuple[int, ...] = ()
    """What the control plane is to hand to the other ranks."""
    counts_tokens = False
    """Texts that are padded cost it next to nothing."""

    def __init__(
        self,
        channel: Channel,
        rank: int,
        adapters: dict[str, Adapter],
        *,
        load_model: LoadModel | None = None,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._adapters = adapters
        self._load_model = load_model
        """None where models never change."""
        self._endpoint: Any = None
        """None before the arenas have come."""
        self._tasks: queue.SimpleQueue[tuple[Any, list[int]] | None] = queue.SimpleQueue()
        self._shipments: queue.SimpleQueue[tuple[SendState, Future[Shipment]]] = queue.SimpleQueue()
        self._unsent: set[int] = set()
        """Dispatches that wait for state which this rank has yet to send."""
        self._lock = threading.RLock()
        self._told = threading.Condition(self._lock)
        """Notified when `_failed` or `_unsent` has lost a member, and when dispatches are given up."""
        self._failed: set[int] = set()
        """Dispatches that failed here and that the control plane has not given up yet."""
        self._jobs: dict[str, RankJob] = {}
        self._abandoned: set[int] = set()
        self._is_over = False
        """The channel has ended: nobody wants anything of this rank any more."""
        self._inside: Counter[int] = Counter()
        """Dispatches that run here, or send: once for each thread that is inside."""
        self._leaving: list[frozenset[int]] = []
        """Sets of dispatches that this rank has been told to leave, and is not yet out of."""
        self._last_number = 0

    def serve(self) -> None:
        """Take messages until the channel ends."""
        for loop in self._loops():
            threading.Thread(target=loop, name=loop.__name__, daemon=True).start()
        while (received := self._tasks.get()) is not None:
            message, fds = received
            try:
                if isinstance(message, WarmUp):
                    self._channel.send(self._warm_up(message))
                elif isinstance(message, SetModels):
                    self._set_models(message)
                else:
                    self._run(message, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _loops(self) -> list[Callable[[], None]]:
        """What the threads beside the main one do."""
        return [self._receive, self._send]

    # The receiver thread ----------------------------------------------------------------------

    def _receive(self) -> None:
        while (received := self._channel.receive()) is not None:
            message, fds = received
            if isinstance(message, RunTask | WarmUp | SetModels):
                self._tasks.put((message, fds))
                continue
            with self._lock, contextlib.suppress(ConnectionError):  # of answers that nobody is left to read
                try:
                    self._take(message, fds)
                except Exception as error:  # without this thread the process would only be silent
                    self._resign(error)
            for fd in fds:
                os.close(fd)
        self._tasks.put(None)
        with self._told:
            self._is_over = True
            self._forgive()
            if self._inside and self._endpoint is not None:
                self._endpoint.abort_through(max(self._inside))

    def _take(self, message: Any, fds: Sequence[int]) -> None:
        """What takes effect at once, also while a task runs."""
        match message:
            case SendState():
                latents = self._jobs[message.job_id].latents_of(message.producer)
                self._unsent.add(message.number)
                self._shipments.put((message, latents))
            case StartJob():
                slab = Slab(fds[0], SlabPlan.of(message.trajectory))
                self._jobs[message.spec.id] = RankJob(message, slab, self._take_in)
            case ForgetJob():
                if message.job_id in self._jobs:
                    self._jobs.pop(message.job_id).drop_all()
            case Abandon():
                self._abandon(message.numbers)
            case Ping():
                self._channel.send(Pong())
            case ReplacePeer():
                self._replace_peer(message, fds[0])
            case RestartEdges():
                if self._endpoint is not None:
                    self._endpoint.restart_edges(sorted(message.ranks))
                self._channel.send(EdgesRestarted(message.numbers))
            case Arenas():
                self._connect(message, fds)
            case TellMemory():
                self._channel.send(self._memory_use())
            case Reset():
                self._forget_peaks()
                for job in self._jobs.values():
                    job.drop_all()
                self._jobs.clear()
                self._forgive()
            case _:
                raise AssertionError(f"unknown message {message!r}")

    def _connect(self, message: Arenas, fds: Sequence[int]) -> None:
        """Map everyone's arena."""
        self._endpoint = Endpoint(
            Plan(message.data_bytes, message.post_bytes),
            rank=self._rank,
            fds=dict(zip(message.ranks, fds, strict=True)),
            incarnations=dict(enumerate(message.incarnations)),
        )

    def _memory_use(self) -> MemoryUse:
        """What this rank has taken of memory."""
        return MemoryUse(peak_host_bytes())

    def _forget_peaks(self) -> None:
        """Count memory anew: another run begins."""
        reset_host_peak()

    def _replace_peer(self, message: ReplacePeer, fd: int) -> None:
        """Map a new incarnation's arena; nothing runs here that involves the old one."""
        self._endpoint.replace_peer(message.rank, fd, message.incarnation)
        self._channel.send(PeerReplaced(message.rank, message.incarnation))

    def _take_in(self, fields: Fields) -> Fields:
        """Copies of what lies in a slab, where this rank computes."""
        return copied(fields)

    def _is_void(self, number: int) -> bool:
        """Whether a dispatch was given up, by itself or with everything."""
        return self._is_over or number in self._abandoned

    def _forgive(self) -> None:
        """No control plane is left that would give up what has failed here."""
        with self._told:
            self._failed.clear()
            self._told.notify_all()

    def _abandon(self, numbers: frozenset[int]) -> None:
        """Give dispatches up: those that run here are aborted, those that wait will not start."""
        self._abandoned |= numbers
        self._failed -= numbers
        self._told.notify_all()
        for job in self._jobs.values():
            for number in numbers:
                job.drop(number)
        inside = [number for number in self._inside if number in numbers]
        if inside and self._endpoint is not None:
            self._endpoint.abort_through(max(inside))
        self._leaving.append(numbers)
        self._tell_what_was_left()

    def _tell_what_was_left(self) -> None:
        """Answer for the abandoned dispatches that no thread is inside of (any more)."""
        for numbers in list(self._leaving):
            if not numbers & self._inside.keys():
                self._leaving.remove(numbers)
                self._channel.send(Abandoned(numbers))

    # Being inside a dispatch: main and sender -------------------------------------------------

    def _enter(self, number: int) -> bool:
        """From here on an abort of this dispatch reaches the thread; False when it was given up."""
        with self._lock:
            if self._is_void(number):
                return False
            self._inside[number] += 1
            return True

    def _leave(self, number: int) -> None:
        with self._lock:
            self._inside[number] -= 1
            self._inside += Counter()  # forgets those that nobody is inside of
            self._tell_what_was_left()

    def _fail(self, fault: TaskFault) -> None:
        """Report, and start nothing else before the control plane has given up what goes with it.

        What comes next may use the same edges, and would take for its own what was sent for this
        dispatch. Whoever waits to send its output goes on waiting, for the same reason.
        """
        with self._told:
            if not self._is_void(fault.number):
                self._failed.add(fault.number)
            self._channel.send(fault)
        self._drain()
        self._leave(fault.number)
        with self._told:
            self._told.wait_for(lambda: fault.number not in self._failed)

    def _drain(self) -> None:
        """Wait until nothing is under way that this thread has begun."""

    # The sender thread ------------------------------------------------------------------------

    def _send(self) -> None:
        while True:
            message, latents = self._shipments.get()
            self._send_one(message, latents)
            with self._told:
                self._unsent.discard(message.number)
                self._told.notify_all()

    def _send_one(self, message: SendState, latents: Future[Shipment]) -> None:
        try:
            shipment = latents.result()
        except InputVoidError:
            return
        if not self._enter(message.number):
            return
        try:
            self._ship(message, shipment)
        except InputVoidError:
            self._leave(message.number)
        except Exception as error:
            # An abort ends all waits up to its number, and so may hit a transfer that nobody gave up.
            is_void = isinstance(error, AbortedError)
            self._fail(TaskFault(message.number, reason_of(error), void=is_void))
        else:
            self._leave(message.number)

    def _ship(self, message: SendState, shipment: Shipment) -> None:
        """Send what a job's next task needs elsewhere; it has arrived, or will, when this returns."""
        send_state(self._endpoint, shipment.fields, message.transfers, dispatch=message.number)

    # The main thread --------------------------------------------------------------------------

    def _warm_up(self, message: WarmUp) -> WarmedUp:
        """On a CPU there is nothing to load."""
        return WarmedUp(message.number, 0.0)

    def _set_models(self, message: SetModels) -> None:
        """Hold other models; a process that cannot is of no use, and ends with its reason."""
        started_s = time.monotonic()
        try:
            self._drop_models([path for path in self._adapters if path not in message.checkpoints])
            for path in message.checkpoints:
                if path not in self._adapters:
                    assert self._load_model is not None
                    self._channel.send(Loading(path))
                    self._adapters[path] = self._load_model(path)
            self._drain()
        except Exception as error:
            self._resign(error)
        self._channel.send(ModelsSet(time.monotonic() - started_s))

    def _resign(self, error: Exception) -> NoReturn:
        """Say why this process is of no use, and end it."""
        if isinstance(error, ConnectionError):
            raise error
        logger.debug("rank %d is of no use", self._rank, exc_info=error)
        self._channel.send(WorkerFailed(self._rank, reason_of(error)))
        sys.stderr.flush()
        os._exit(1)

    def _drop_models(self, paths: Sequence[str]) -> None:
        """Let go of models, and of the memory that they had."""
        for path in paths:
            del self._adapters[path]
        gc.collect()
        give_back_freed_memory()

    def _run(self, message: RunTask, fds: Sequence[int]) -> None:
        """Run one task and report; an exception fails the task, never the worker."""
        assert message.number > self._last_number, (
            f"dispatch {message.number} came after {self._last_number}: the global order is broken"
        )
        self._last_number = message.number
        if not self._enter(message.number):
            return  # the control plane has given it up and expects no report
        try:
            with torch.no_grad():
                self._perform(self._jobs[message.job_id], message, fds)
        except InputVoidError:
            self._leave(message.number)
        except Exception as error:
            self._give_reason(message.number, error)

    def _give_reason(self, number: int, error: Exception) -> None:
        """Report a task that raised."""
        logger.debug("dispatch %d", number, exc_info=True)
        is_void, is_short = isinstance(error, AbortedError), _is_out_of_memory(error)
        reason = reason_of(error)
        if is_short:
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the attempt
            gc.collect()
            self._release_memory()
            reason = f"out of memory; fewer --ranks or a smaller size may help: {reason}"
        self._fail(TaskFault(number, reason, void=is_void))

    def _release_memory(self) -> None:
        """Give back what is kept for later, after an attempt that ran out of memory."""

    def _perform(self, job: RankJob, message: RunTask, fds: Sequence[int]) -> None:
        """Bring the input, meet the other ranks, execute, publish; report the times of it all."""
        task = job.start.trajectory.task(message.index)
        times = [time.monotonic()]
        self._await_input(job, task, message)
        times.append(time.monotonic())
        self._bring_input(job, task, message)
        times.append(time.monotonic())
        group = self._meet(message)
        times.append(time.monotonic())
        with stopping.watching(self._watch_of(message)):
            made = self._execute(job, task, None if group is None else parallel_from(group))
        require_finite(made, sum_of(made))
        self._hand_out(job, task, message, made, fds)
        with self._lock:
            job.keep(made, dispatch=message.number)
        times.append(time.monotonic())
        report = TaskReport(
            message.number,
            started_s=times[3],
            ended_s=times[4],
            waited_s=times[1] - times[0] + times[3] - times[2],
            moved_s=times[2] - times[1],
        )
        self._channel.send(report)
        self._leave(message.number)

    def _hand_out(
        self, job: RankJob, task: Task, message: RunTask, made: dict[str, Fields], fds: Sequence[int]
    ) -> None:
        """Frames to the writer's memory; everything else, by one rank, to the slab."""
        frames = made.pop("frames", None)
        if frames is not None:
            store_frames(frames, fds[0], shape=frames_shape(job))
        if message.layout.slot_of(self._rank) == 0:
            for name, fields in made.items():
                publish(job.slab, name, task.index + 1, fields, producer=message.number)

    def _await_input(self, job: RankJob, task: Task, message: RunTask) -> None:
        """Wait for input that comes through the slab; transfers wait by themselves."""
        if message.producer is None or job.producer == message.producer or message.transfers:
            return
        job.await_published(task, message.producer, is_void=partial(self._is_void, message.number))

    def _bring_input(self, job: RankJob, task: Task, message: RunTask) -> None:
        """Bring what the task needs and this rank does not have.

        What other ranks send comes last: where its arrival is only enqueued, nothing is waited for behind it.
        It is for this attempt alone: should that be given up it may never arrive, and the next one goes by
        the slab.
        """
        is_void = partial(self._is_void, message.number)
        job.fetch_constants(task, message.producer, is_void=is_void)
        if message.transfers:
            assert message.producer is not None
            outline = job.await_outline(task, message.producer, is_void=is_void)
            job.hold(self._receive_state(message, outline), producer=None)
        elif task.index > 1 and job.producer != message.producer:
            assert message.producer is not None
            job.fetch_latents(task, message.producer)

    def _receive_state(self, message: RunTask, outline: Outline) -> Fields:
        """What other ranks send of the job's latents."""
        return receive_state(self._endpoint, message.transfers, outline, dispatch=message.number)

    def _meet(self, message: RunTask) -> Collectives | None:
        """The group of a task on several ranks, once all of them have come; None for one rank."""
        if message.layout.degree == 1:
            return None
        group: Collectives = self._endpoint.group(
            Descriptor(message.number, message.layout, message.incarnations), timeout_s=message.wait_s
        )
        group.enter()
        return group

    def _watch_of(self, message: RunTask) -> stopping.Watch:
        """What ends a task that was given up while it runs."""
        return stopping.Watch(partial(self._is_void, message.number))

    def _execute(self, job: RankJob, task: Task, parallel: Parallel | None) -> dict[str, Fields]:
        """Run the task; the artifacts that it makes."""
        adapter = self._adapters[job.start.checkpoint]
        spec, artifacts = job.start.spec, job.artifacts
        match task.stage:
            case Stage.ENCODE:
                return {"prompt": adapter.encode(spec)}
            case Stage.PREPARE:
                condition, latents = adapter.prepare(spec, artifacts["prompt"])
                return {"condition": condition, "latents": latents}
            case Stage.DENOISE:
                assert task.step is not None
                inputs = (artifacts[name] for name in ("prompt", "condition", "latents"))
                return {"latents": adapter.denoise(spec, *inputs, step=task.step, parallel=parallel)}
            case Stage.DECODE:
                return {"frames": adapter.decode(spec, artifacts["latents"], parallel=parallel)}


def load(settings: WorkerSettings, *, channel: Channel, device: str = "cpu") -> dict[str, Adapter]:
    """The adapters of the models that a rank holds at first, by checkpoint."""
    adapters = {}
    for path in settings.checkpoints:
        channel.send(Loading(path))
        adapters[path] = load_model(settings, path, device=device)
    return adapters


def load_model(settings: WorkerSettings, path: str, *, device: str = "cpu") -> Adapter:
    """The adapter of one model."""
    adapter = load_adapter(
        Path(path),
        device=device,
        vae_dtype=settings.vae_dtype,
        has_random_weights=settings.has_random_weights,
    )
    give_back_freed_memory()
    return adapter


def store_frames(frames: Fields, fd: int, *, shape: Sequence[int]) -> None:
    """Put this rank's rows of all frames into the memory that the writer will read.

    shape: of that memory, uint8 [F, H, W, 3].
    """
    with mmap.mmap(fd, math.prod(shape)) as memory:
        target = place_of(frames, memory, shape)
        target.copy_(frames.tensors["frames"])
        del target


def peak_host_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The most main memory that this process has held; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_host_peak() -> None:
    """Let `peak_host_bytes` count from now on, where the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def reason_of(error: BaseException) -> str:
    """One line that names the exception and where it was raised; or what the user can mend, as it is."""
    text = " ".join(str(error).split())[:500] or "no message"
    if isinstance(error, JobError | ModelError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python or in torch, whose CPU allocator has no class for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    texts = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
