"""The worker process: one rank, all models, and the state of the jobs that visit it.

A receiver thread takes messages off the channel; the main thread runs tasks in the order in
which they were dispatched. A task finds its input in this process when the job's last task
ran here, and in the job's slab otherwise; what it makes is published to the slab.
"""

from __future__ import annotations

import ctypes
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gfgen.graph import Stage, Task
from gfgen.models.adapter import Adapter, Fields
from gfgen.models.registry import load_adapter
from gfgen.runtime.channel import Channel
from gfgen.runtime.messages import (
    ForgetJob,
    Reset,
    RunTask,
    StartJob,
    TaskFault,
    TaskReport,
    VoidTask,
    WorkerFailed,
    WorkerReady,
)
from gfgen.runtime.slab import Slab, SlabPlan

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_POLL_S = (0.0, 0.0, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3)
"""Pauses between looks at a producer's version word: short first, a millisecond at last."""


class _InputVoid(Exception):
    """The task that was to make this task's input has failed."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told when it starts."""

    rank: int
    checkpoints: tuple[str, ...]
    device: str = "cpu"
    num_threads: int = 1


@dataclass(slots=True, eq=False)
class _Job:
    """What this rank keeps of a job between its tasks."""

    start: StartJob
    slab: Slab
    artifacts: dict[str, Fields] = field(default_factory=dict)
    latents_producer: int | None = None
    """The dispatch that made the latents in `artifacts`; None when they are not here."""


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    """Entry of the process: load, then serve until the channel is closed."""
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the control plane decides; it closes the channel
    channel = Channel(channel_socket)
    started_s = time.monotonic()
    try:
        torch.set_num_threads(settings.num_threads)
        worker = Worker(channel, _load(settings))
    except Exception as error:
        logger.debug("rank %d cannot start", settings.rank, exc_info=True)
        channel.send(WorkerFailed(settings.rank, _reason(error)))
        return
    channel.send(WorkerReady(settings.rank, time.monotonic() - started_s))
    worker.serve()


class Worker:
    """Runs tasks with the adapters of one rank."""

    def __init__(self, channel: Channel, adapters: dict[str, Adapter]) -> None:
        self._channel = channel
        self._adapters = adapters
        self._inbox: queue.SimpleQueue[tuple[Any, list[int]] | None] = queue.SimpleQueue()
        self._voids: set[int] = set()
        self._jobs: dict[str, _Job] = {}
        self._last_number = 0

    def serve(self) -> None:
        """Take messages until the channel ends."""
        threading.Thread(target=self._receive, name="receiver", daemon=True).start()
        while (received := self._inbox.get()) is not None:
            message, fds = received
            match message:
                case RunTask():
                    self._run(message, fds)
                case StartJob():
                    slab = Slab(fds[0], SlabPlan.of(message.trajectory))
                    os.close(fds[0])
                    self._jobs[message.spec.id] = _Job(message, slab)
                case ForgetJob():
                    self._jobs.pop(message.job_id, None)
                case Reset():
                    self._jobs.clear()
                    self._voids.clear()
                    self._last_number = 0

    def _receive(self) -> None:
        """Hand messages to the main thread; a void must get past the tasks that wait in line."""
        while (received := self._channel.receive()) is not None:
            message, _ = received
            if isinstance(message, VoidTask):
                self._voids.add(message.producer)
            else:
                self._inbox.put(received)
        self._inbox.put(None)

    def _run(self, message: RunTask, fds: list[int]) -> None:
        """Run one task and report; an exception fails the task, never the worker."""
        assert message.number > self._last_number, (
            f"dispatch {message.number} came after {self._last_number}: the global order is broken"
        )
        self._last_number = message.number
        job = self._jobs[message.job_id]
        task = job.start.trajectory.task(message.index)
        received_s = time.monotonic()
        try:
            with torch.no_grad():
                self._await_input(job, task, message.producer)
                waited_until_s = time.monotonic()
                self._bring_input(job, task, message.producer)
                started_s = time.monotonic()
                self._execute(job, task, message.number, fds)
                ended_s = time.monotonic()
        except _InputVoid:
            self._channel.send(TaskFault(message.number, "its input failed", void=True))
        except Exception as error:
            logger.debug("dispatch %d", message.number, exc_info=True)
            job.latents_producer = None
            self._voids.add(message.number)
            self._channel.send(TaskFault(message.number, _reason(error)))
        else:
            self._channel.send(
                TaskReport(
                    message.number,
                    started_s,
                    ended_s,
                    waited_s=waited_until_s - received_s,
                    moved_s=started_s - waited_until_s,
                )
            )
        finally:
            for fd in fds:
                os.close(fd)

    def _await_input(self, job: _Job, task: Task, producer: int | None) -> None:
        """Wait until what the task needs is published, wherever it is made.

        The wait ends with the producer's output or its failure: the control plane sends
        VoidTask when it fails or its rank dies.
        """
        if producer is None or job.latents_producer == producer:
            return
        name = "prompt" if task.index == 1 else "latents"
        looks = 0
        while job.slab.producer(name, task.index) != producer:
            if producer in self._voids:
                raise _InputVoid
            time.sleep(_POLL_S[min(looks, len(_POLL_S) - 1)])
            looks += 1

    def _bring_input(self, job: _Job, task: Task, producer: int | None) -> None:
        """Copy what is not here yet out of the slab."""
        constants = {"prompt": 1, "condition": 2} if task.index > 1 else {"prompt": 1}
        for name, version in constants.items() if task.index else ():
            if name not in job.artifacts:
                job.artifacts[name] = _fetch(job.slab, name, version)
        if task.index > 1 and job.latents_producer != producer:
            job.artifacts["latents"] = _fetch(job.slab, "latents", task.index)
            job.latents_producer = producer

    def _execute(self, job: _Job, task: Task, number: int, fds: Sequence[int]) -> None:
        """Run the task and publish what it makes."""
        adapter = self._adapters[job.start.checkpoint]
        spec, artifacts = job.start.spec, job.artifacts
        made: dict[str, Fields] = {}
        match task.stage:
            case Stage.ENCODE:
                made["prompt"] = adapter.encode(spec)
            case Stage.PREPARE:
                made["condition"], made["latents"] = adapter.prepare(spec, artifacts["prompt"])
            case Stage.DENOISE:
                assert task.step is not None
                made["latents"] = adapter.denoise(
                    spec, artifacts["prompt"], artifacts["condition"], artifacts["latents"], step=task.step
                )
            case Stage.DECODE:
                _store_frames(adapter.decode(spec, artifacts["latents"]), fds[0])
        for name, fields in made.items():
            _publish(job.slab, name, task.index + 1, fields, producer=number)
        artifacts.update(made)
        if "latents" in made:
            job.latents_producer = number


def _load(settings: WorkerSettings) -> dict[str, Adapter]:
    return {path: load_adapter(Path(path), device=settings.device) for path in settings.checkpoints}


def _publish(slab: Slab, name: str, version: int, fields: Fields, *, producer: int) -> None:
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in fields.tensors.items()}
    meta = ([(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()], fields.scalars)
    buffers = [tensor.view(-1).view(torch.uint8).numpy().data for tensor in tensors.values()]
    slab.publish(name, version, meta, buffers, producer=producer)


def _fetch(slab: Slab, name: str, version: int) -> Fields:
    (layout, scalars), memory, position = slab.fetch(name, version)
    fields = Fields(scalars=scalars)
    for key, dtype, shape in layout:
        count = 1
        for length in shape:
            count *= length
        num_bytes = count * dtype.itemsize
        if num_bytes:
            shared = torch.frombuffer(memory, dtype=dtype, count=count, offset=position)
            fields.tensors[key] = shared.clone().view(shape)
        else:
            fields.tensors[key] = torch.empty(shape, dtype=dtype)
        position += -(-num_bytes // 64) * 64
    return fields


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


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that forked it dies."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
