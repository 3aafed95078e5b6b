"""The worker process: one rank, all models, and the state of the jobs that visit it.

Three threads share what the rank knows, under one lock:

    receiver    takes messages off the channel; what is urgent takes effect at once
    main        runs tasks, in the order in which they were dispatched
    sender      sends the state of jobs on to other ranks, in the same order

so a rank that computes still sends, and a rank that waits can still be told to give up.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gfgen.errors import AbortedError
from gfgen.gfc.arena import Plan
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import Endpoint
from gfgen.graph import Stage, Task
from gfgen.models.adapter import Adapter, Fields
from gfgen.models.parallel import Parallel, parallel_from
from gfgen.models.registry import load_adapter
from gfgen.runtime.allocator import keep_freed_memory
from gfgen.runtime.channel import Channel
from gfgen.runtime.messages import (
    Abandon,
    Arenas,
    EdgesRestarted,
    ForgetJob,
    Left,
    Ping,
    Pong,
    ReplacePeer,
    Reset,
    RestartEdges,
    RunTask,
    SendState,
    StartJob,
    TaskFault,
    TaskReport,
    WorkerFailed,
    WorkerReady,
)
from gfgen.runtime.slab import Slab, SlabPlan
from gfgen.runtime.worker_jobs import InputVoidError, RankJob, publish, receive_state, send_state

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told when it starts."""

    rank: int
    checkpoints: tuple[str, ...]
    device: str = "cpu"
    num_threads: int = 1


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    """Entry of the process: load, then serve until the channel is closed."""
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the control plane decides; it closes the channel
    channel = Channel(channel_socket)
    started_s = time.monotonic()
    try:
        torch.set_num_threads(settings.num_threads)
        keep_freed_memory()
        worker = Worker(channel, settings.rank, _load(settings))
    except Exception as error:
        logger.debug("rank %d cannot start", settings.rank, exc_info=True)
        with contextlib.suppress(ConnectionError):
            channel.send(WorkerFailed(settings.rank, _reason(error)))
        return
    with contextlib.suppress(ConnectionError):  # the control plane is gone, and nobody waits for a report
        channel.send(WorkerReady(settings.rank, time.monotonic() - started_s))
        worker.serve()


class Worker:
    """Runs tasks with the adapters of one rank."""

    def __init__(self, channel: Channel, rank: int, adapters: dict[str, Adapter]) -> None:
        self._channel = channel
        self._rank = rank
        self._adapters = adapters
        self._endpoint: Endpoint | None = None
        self._tasks: queue.SimpleQueue[tuple[RunTask, list[int]] | None] = queue.SimpleQueue()
        self._shipments: queue.SimpleQueue[tuple[SendState, Future[Fields]]] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._told = threading.Condition(self._lock)
        """Notified when `_failed` has lost a member."""
        self._failed: set[int] = set()
        """Dispatches that failed here and that the control plane has not given up yet."""
        self._jobs: dict[str, RankJob] = {}
        self._abandoned: set[int] = set()
        self._running: dict[str, int] = {}
        """By thread, main or sender: the dispatch that it is inside of."""
        self._leaving: list[frozenset[int]] = []
        """Sets of dispatches that this rank has been told to leave, and is not yet out of."""
        self._last_number = 0

    def serve(self) -> None:
        """Take messages until the channel ends."""
        for name, loop in (("receiver", self._receive), ("sender", self._send)):
            threading.Thread(target=loop, name=name, daemon=True).start()
        while (received := self._tasks.get()) is not None:
            message, fds = received
            try:
                self._run(message, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    # The receiver thread ----------------------------------------------------------------------

    def _receive(self) -> None:
        while (received := self._channel.receive()) is not None:
            message, fds = received
            if isinstance(message, RunTask):
                self._tasks.put((message, fds))
                continue
            with self._lock:
                self._take(message, fds)
            for fd in fds:
                os.close(fd)
        self._tasks.put(None)
        self._forgive()

    def _take(self, message: Any, fds: Sequence[int]) -> None:
        """What takes effect at once, also while a task runs."""
        match message:
            case SendState():
                latents = self._jobs[message.job_id].latents_of(message.producer)
                self._shipments.put((message, latents))
            case StartJob():
                slab = Slab(fds[0], SlabPlan.of(message.trajectory))
                self._jobs[message.spec.id] = RankJob(message, slab)
            case ForgetJob():
                self._jobs.pop(message.job_id, None)
            case Abandon():
                self._abandon(message.numbers)
            case Ping():
                self._channel.send(Pong())
            case ReplacePeer():
                assert self._endpoint is not None
                self._endpoint.replace_peer(message.rank, fds[0], message.incarnation)
            case RestartEdges():
                if self._endpoint is not None:
                    self._endpoint.restart_edges(sorted(message.ranks))
                self._channel.send(EdgesRestarted(message.numbers))
            case Arenas():
                self._endpoint = Endpoint(
                    Plan(message.data_bytes, message.post_bytes),
                    rank=self._rank,
                    fds=dict(enumerate(fds)),
                    incarnations=dict(enumerate(message.incarnations)),
                )
            case Reset():
                self._jobs.clear()
                self._forgive()
            case _:
                raise AssertionError(f"unknown message {message!r}")

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
        inside = [number for number in self._running.values() if number in numbers]
        if inside and self._endpoint is not None:
            self._endpoint.abort_through(max(inside))
        self._leaving.append(numbers)
        self._tell_what_was_left()

    def _tell_what_was_left(self) -> None:
        """Answer for the abandoned dispatches that no thread is inside of (any more)."""
        for numbers in list(self._leaving):
            if not numbers & set(self._running.values()):
                self._leaving.remove(numbers)
                self._channel.send(Left(numbers))

    # Being inside a dispatch: main and sender -------------------------------------------------

    def _enter(self, thread: str, number: int) -> None:
        """From here on an abort of this dispatch reaches the thread."""
        with self._lock:
            if number in self._abandoned:
                raise InputVoidError
            self._running[thread] = number

    def _leave(self, thread: str) -> None:
        with self._lock:
            self._running.pop(thread, None)
            self._tell_what_was_left()

    def _fail(self, thread: str, fault: TaskFault) -> None:
        """Report, and start nothing else before the control plane has given up what goes with it.

        What comes next may use the same edges, and would take for its own what was sent for this
        dispatch. Whoever waits to send its output goes on waiting, for the same reason.
        """
        with self._told:
            if fault.number not in self._abandoned:
                self._failed.add(fault.number)
            self._channel.send(fault)
            self._leave(thread)
            self._told.wait_for(lambda: fault.number not in self._failed)

    # The sender thread ------------------------------------------------------------------------

    def _send(self) -> None:
        while True:
            message, latents = self._shipments.get()
            try:
                fields = latents.result()
                self._enter("sender", message.number)
                assert self._endpoint is not None
                send_state(self._endpoint, fields, message.transfers, dispatch=message.number)
            except InputVoidError:
                logger.debug("dispatch %d: its state is not sent", message.number)
            except Exception as error:
                # An abort ends all waits up to its number, and so may hit a transfer that nobody gave up.
                is_void = isinstance(error, AbortedError)
                self._fail("sender", TaskFault(message.number, _reason(error), void=is_void))
            finally:
                self._leave("sender")

    # The main thread --------------------------------------------------------------------------

    def _run(self, message: RunTask, fds: Sequence[int]) -> None:
        """Run one task and report; an exception fails the task, never the worker."""
        assert message.number > self._last_number, (
            f"dispatch {message.number} came after {self._last_number}: the global order is broken"
        )
        self._last_number = message.number
        try:
            self._enter("main", message.number)
            job = self._jobs[message.job_id]
            with torch.no_grad():
                report = self._perform(job, message, fds)
        except InputVoidError:
            return  # the control plane has given it up and expects no report
        except Exception as error:
            logger.debug("dispatch %d", message.number, exc_info=True)
            is_void, is_short = isinstance(error, AbortedError), _is_out_of_memory(error)
            reason = _reason(error)
            if is_short:
                traceback.clear_frames(error.__traceback__)  # they hold the tensors of the attempt
                gc.collect()
                reason = f"out of memory; fewer --ranks or a smaller size may help: {reason}"
            self._fail("main", TaskFault(message.number, reason, void=is_void))
        else:
            self._channel.send(report)
        finally:
            self._leave("main")

    def _perform(self, job: RankJob, message: RunTask, fds: Sequence[int]) -> TaskReport:
        """Bring the input, meet the other ranks, execute, publish; the times of it all."""
        task = job.start.trajectory.task(message.index)
        times = [time.monotonic()]
        self._await_input(job, task, message)
        times.append(time.monotonic())
        self._bring_input(job, task, message)
        times.append(time.monotonic())
        parallel = self._meet(message)
        times.append(time.monotonic())
        made = self._execute(job, task, fds, parallel)
        if message.layout.slot_of(self._rank) == 0:
            for name, fields in made.items():
                publish(job.slab, name, task.index + 1, fields, producer=message.number)
        with self._lock:
            job.keep(made, dispatch=message.number)
        times.append(time.monotonic())
        return TaskReport(
            message.number,
            started_s=times[3],
            ended_s=times[4],
            waited_s=times[1] - times[0] + times[3] - times[2],
            moved_s=times[2] - times[1],
        )

    def _await_input(self, job: RankJob, task: Task, message: RunTask) -> None:
        """Wait for input that comes through the slab; transfers wait by themselves."""
        if message.producer is None or job.producer == message.producer or message.transfers:
            return
        is_void = self._abandoned.__contains__
        job.await_published(task, message.producer, is_void=lambda: is_void(message.number))

    def _bring_input(self, job: RankJob, task: Task, message: RunTask) -> None:
        """Bring what the task needs and this rank does not have.

        The constants last: a rank publishes them before it sends the latents that go with them.
        """
        if message.transfers:
            assert self._endpoint is not None
            fields = receive_state(self._endpoint, message.transfers, dispatch=message.number)
            job.artifacts["latents"], job.producer = fields, message.producer
        elif task.index > 1 and job.producer != message.producer:
            assert message.producer is not None
            job.fetch_latents(task, message.producer)
        job.fetch_constants(task)

    def _meet(self, message: RunTask) -> Parallel | None:
        """The group of a task on several ranks, once all of them have come; None for one rank."""
        if message.layout.degree == 1:
            return None
        assert self._endpoint is not None
        group = self._endpoint.group(Descriptor(message.number, message.layout, message.incarnations))
        group.enter()
        return parallel_from(group)

    def _execute(
        self, job: RankJob, task: Task, fds: Sequence[int], parallel: Parallel | None
    ) -> dict[str, Fields]:
        """Run the task; the artifacts that it makes, but for frames, which go where they belong."""
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
                _store_frames(adapter.decode(spec, artifacts["latents"]), fds[0])
                return {}


def _load(settings: WorkerSettings) -> dict[str, Adapter]:
    return {path: load_adapter(Path(path), device=settings.device) for path in settings.checkpoints}


def _store_frames(frames: torch.Tensor, fd: int) -> None:
    """Put uint8 [F, H, W, 3] into the memory that the writer will read."""
    assert frames.dtype == torch.uint8
    with mmap.mmap(fd, frames.numel()) as memory:
        target = torch.frombuffer(memory, dtype=torch.uint8).view(frames.shape)
        target.copy_(frames)
        del target


def _reason(error: BaseException) -> str:
    """One line that names the exception and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:500]}{place}"


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python or in torch, whose CPU allocator has no class for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    texts = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that forked it dies."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
