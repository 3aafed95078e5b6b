"""A worker and a writer without torch, which fail where a plan of faults says so.

The worker speaks the messages of the real one over the real channel, with the same threads. A
job's state is a chain of hashes, so that a step which is lost, doubled, stale or out of order
shows in the final bytes:

    prompt = H(job)    latents = H(prompt)    latents = H(latents, prompt, step) ...    frames
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_mail import BrokenPromiseError, Mail, VoidError
from fault_plan import FaultFolder, FaultKind, FaultPoint, Faults, ScriptedError
from slabs import publish

from gfgen.graph import Stage, Task
from gfgen.layout import Layout, shard_bounds
from gfgen.runtime.files import writer
from gfgen.runtime.ipc import messages
from gfgen.runtime.ipc.messages import Channel, RankTimes, RunTask, SendState, StartJob, TaskFault, TaskReport
from gfgen.runtime.ipc.settings import WorkerSettings
from gfgen.runtime.ipc.slab import Slab, SlabPlan

STATE_BYTES = 32
_POLL_S = 2e-4


def prompt_of(job_id: str) -> bytes:
    return _hash(b"encode", job_id.encode())


def latents_after(before: bytes, prompt: bytes, step: int | None) -> bytes:
    """The state after a step, or after `prepare`, whose step is None."""
    return _hash(before, prompt, str(step).encode())


def frames_of(latents: bytes, size_bytes: int) -> bytes:
    return hashlib.shake_128(latents).digest(size_bytes)


def frames_of_job(job_id: str, num_steps: int, size_bytes: int) -> bytes:
    """What an undisturbed run makes."""
    prompt = prompt_of(job_id)
    latents = latents_after(b"", prompt, None)
    for step in range(num_steps):
        latents = latents_after(latents, prompt, step)
    return frames_of(latents, size_bytes)


def main(end: socket.socket, settings: WorkerSettings) -> None:
    """Entry of a worker's process; the one checkpoint is the folder of the faults."""
    channel = Channel(end)
    faults = Faults(FaultFolder(Path(settings.checkpoints[0])), rank=settings.rank)
    try:
        faults.visit(FaultPoint.LOADING)
    except ScriptedError as error:
        channel.send(messages.WorkerFailed(settings.rank, repr(error)))
        return
    channel.send(messages.WorkerReady(settings.rank, 0.0))
    FakeWorker(channel, settings.rank, faults).serve()


def write(end: socket.socket) -> None:
    """Entry of a writer's process: the real writer, but for its faults."""
    channel = Channel(end)
    channel.send(messages.WriterReady())
    while (received := channel.receive()) is not None:
        request, fds = received
        faults = Faults(FaultFolder(Path(request.path).parent.parent / "faults"), rank=None)
        try:
            faults.visit(FaultPoint.WRITING, job_id=request.job_id)
        except ScriptedError as error:
            channel.send(messages.WriteFailed(request.job_id, repr(error)))
            continue
        answer = writer.handle(request, fds[0])
        faults.visit(FaultPoint.WRITTEN, job_id=request.job_id)
        channel.send(answer)


@dataclass(slots=True, eq=False)
class _HeldJob:
    """A job as one rank knows it."""

    start: StartJob
    slab: Slab
    prompt: bytes | None = None
    latents: bytes = b""
    producer: int | None = None
    """The dispatch that made the latents that are here."""
    wanted: dict[int, list[Future[bytes]]] = field(default_factory=dict)

    def keep(self, latents: bytes, producer: int | None) -> None:
        self.latents, self.producer = latents, producer
        for future in self.wanted.pop(producer or 0, ()):
            future.set_result(latents)

    def latents_of(self, producer: int) -> Future[bytes]:
        future: Future[bytes] = Future()
        if self.producer == producer:
            future.set_result(self.latents)
        else:
            self.wanted.setdefault(producer, []).append(future)
        return future

    def drop(self, producer: int) -> None:
        if self.producer == producer:
            self.producer = None
        for future in self.wanted.pop(producer, ()):
            future.set_exception(VoidError())


class FakeWorker:
    """Threads: the receiver, main, and the sender of state, as in runtime/worker/loop.py."""

    def __init__(self, channel: Channel, rank: int, faults: Faults) -> None:
        self._channel = channel
        self._rank = rank
        self._faults = faults
        self._mail: Mail | None = None
        self._tasks: queue.SimpleQueue[tuple[RunTask, list[int]]] = queue.SimpleQueue()
        self._shipments: queue.SimpleQueue[tuple[SendState, Future[bytes]]] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._told = threading.Condition(self._lock)
        self._jobs: dict[str, _HeldJob] = {}
        self._abandoned: set[int] = set()
        self._running: dict[str, int] = {}
        self._leaving: list[frozenset[int]] = []
        self._last_number = 0

    def serve(self) -> None:
        """Run tasks until the receiver ends the process."""
        for loop in (self._receive, self._send):
            threading.Thread(target=self._watched, args=(loop,), daemon=True).start()
        self._watched(self._work)

    def _watched(self, loop: Any) -> None:
        """A thread that fails ends the process, and the harness learns why."""
        try:
            loop()
        except BaseException:
            text = traceback.format_exc().replace("\n", " | ")
            self._faults.folder.complain(f"rank {self._rank}: {text}")
            os._exit(8)

    # The receiver ---------------------------------------------------------------------------------

    def _receive(self) -> None:
        while (received := self._channel.receive()) is not None:
            self._faults.visit(FaultPoint.RECEIVING)
            message, fds = received
            if isinstance(message, RunTask):
                self._tasks.put((message, fds))
                continue
            with self._lock, contextlib.suppress(ConnectionError):
                self._take(message, fds)
            for fd in fds:
                os.close(fd)
        os._exit(0)

    def _take(self, message: Any, fds: Sequence[int]) -> None:
        match message:
            case SendState():
                self._shipments.put((message, self._jobs[message.job_id].latents_of(message.producer)))
            case StartJob():
                slab = Slab(fds[0], SlabPlan.of(message.trajectory))
                self._jobs[message.spec.id] = _HeldJob(message, slab)
            case messages.ForgetJob():
                self._jobs.pop(message.job_id, None)
            case messages.Abandon():
                self._abandon(message.numbers)
            case messages.Ping():
                self._channel.send(messages.Pong())
            case messages.TellMemory():
                self._channel.send(messages.MemoryUse(0))
            case messages.ReplacePeer():
                self.mail.replace(message.rank, fds[0], message.incarnation)
                self._channel.send(messages.PeerReplaced(message.rank, message.incarnation))
            case messages.RestartEdges():
                self.mail.restart(message.ranks - {self._rank})
                self._channel.send(messages.EdgesRestarted(message.numbers))
            case messages.Arenas():
                self._mail = Mail(self._rank, fds, message.incarnations)
            case messages.Reset():
                self._jobs.clear()
                self._faults.renew()
            case _:
                raise BrokenPromiseError(f"unknown message {message!r}")

    @property
    def mail(self) -> Mail:
        if self._mail is None:
            raise BrokenPromiseError("the arenas have not come")
        return self._mail

    def _abandon(self, numbers: frozenset[int]) -> None:
        self._abandoned |= numbers
        self._told.notify_all()
        for job in self._jobs.values():
            for number in numbers:
                job.drop(number)
        self._leaving.append(numbers)
        self._tell_what_was_left()

    def _tell_what_was_left(self) -> None:
        for numbers in list(self._leaving):
            if not numbers & set(self._running.values()):
                self._leaving.remove(numbers)
                self._channel.send(messages.Abandoned(numbers))

    # Being inside a dispatch ------------------------------------------------------------------------

    def _enter(self, thread: str, number: int) -> None:
        with self._lock:
            if number in self._abandoned:
                raise VoidError
            self._running[thread] = number

    def _leave(self, thread: str) -> None:
        with self._lock:
            self._running.pop(thread, None)
            self._tell_what_was_left()

    # The sender -------------------------------------------------------------------------------------

    def _send(self) -> None:
        while True:
            message, latents = self._shipments.get()
            try:
                state = latents.result()
                self._enter("sender", message.number)
                self._faults.visit(FaultPoint.SENDING, job_id=message.job_id)
                self._ship(message, state)
            except VoidError:
                pass
            finally:
                self._leave("sender")

    def _ship(self, message: SendState, state: bytes) -> None:
        for transfer in message.transfers:
            self.mail.send(
                state[transfer.start : transfer.stop],
                to=transfer.destination,
                start=transfer.start,
                dispatch=message.number,
                is_void=lambda: message.number in self._abandoned,
            )

    # Main -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            message, fds = self._tasks.get()
            self._run(message, fds)
            for fd in fds:
                os.close(fd)
            self._faults.visit(FaultPoint.BETWEEN, job_id=message.job_id, index=message.task_index)

    def _run(self, message: RunTask, fds: Sequence[int]) -> None:
        if message.number <= self._last_number:
            raise BrokenPromiseError(f"dispatch {message.number} came after {self._last_number}")
        self._last_number = message.number
        try:
            self._enter("main", message.number)
            job = self._jobs[message.job_id]
            report = self._perform(job, message, fds)
        except VoidError:
            return
        except ScriptedError as error:
            self._channel.send(TaskFault(message.number, f"ScriptedError: {error}"))
            self._leave("main")
            with self._told:  # start nothing before this is given up, with what goes with it
                self._told.wait_for(lambda: message.number in self._abandoned)
        else:
            if report is not None:
                self._channel.send(report)
        finally:
            self._leave("main")

    def _perform(self, job: _HeldJob, message: RunTask, fds: Sequence[int]) -> TaskReport | None:
        began_s = time.monotonic()
        task = job.start.trajectory.task(message.task_index)
        self._visit(FaultPoint.BEFORE, message)
        self._bring_input(job, task, message)
        peers = message.layout.ranks
        self._check_incarnations(message)
        is_void = self._is_void(message)
        if len(peers) > 1:
            self.mail.enter(peers, dispatch=message.number, is_void=is_void)
            self._visit(FaultPoint.MEETING, message)
        made = self._compute(job, task, message.layout, fds)
        if len(peers) > 1:
            self.mail.compare(made, peers, dispatch=message.number, is_void=is_void)
        if message.layout.slot_of(self._rank) == 0:
            self._publish(job, task, made, message.number)
        with self._lock:
            if task.stage is Stage.ENCODE:
                job.prompt = made
            elif task.stage is not Stage.DECODE:
                job.keep(made, message.number)
        if self._visit(FaultPoint.PUBLISHED, message) is FaultKind.MUTE:
            return None
        return TaskReport(message.number, RankTimes(self._rank, began_s, time.monotonic()))

    def _bring_input(self, job: _HeldJob, task: Task, message: RunTask) -> None:
        """Latents by transfers or out of the slab; the prompt always out of the slab."""
        if message.producer is None:
            return
        self._visit(FaultPoint.WAITING, message)
        if message.transfers:
            self._receive_latents(job, message)
        elif task.index > 1 and job.producer != message.producer:
            latents = self._fetch(job, "latents", task.index, message, made_by=message.producer)
            with self._lock:
                job.keep(latents, message.producer)
        if job.prompt is None:
            made_by = message.producer if task.index == 1 else None
            job.prompt = self._fetch(job, "prompt", 1, message, made_by=made_by)

    def _receive_latents(self, job: _HeldJob, message: RunTask) -> None:
        """Put the latents together; what is not sent is here already."""
        latents, num_bytes = bytearray(STATE_BYTES), 0
        for transfer in message.transfers:
            start, piece = self.mail.receive(
                source=transfer.source, dispatch=message.number, is_void=self._is_void(message)
            )
            if (start, start + len(piece)) != (transfer.start, transfer.stop):
                raise BrokenPromiseError(f"bytes from {start} came, not {transfer}")
            latents[start : start + len(piece)] = piece
            num_bytes += len(piece)
        if num_bytes != STATE_BYTES:
            raise BrokenPromiseError(f"{num_bytes} bytes of a state came")
        with self._lock:
            job.keep(bytes(latents), message.producer)

    def _fetch(
        self, job: _HeldJob, name: str, version: int, message: RunTask, *, made_by: int | None
    ) -> bytes:
        """An artifact out of the slab, made by that very dispatch; None trusts that it is there."""
        slab, is_void = job.slab, self._is_void(message)
        while made_by is not None and slab.producer(name, version) != made_by:
            if is_void():
                raise VoidError
            time.sleep(_POLL_S)
        made_by = slab.producer(name, version)
        meta, memory, position = slab.fetch(name, version)
        state = bytes(memory[position : position + STATE_BYTES])
        if meta != (job.start.spec.id, name, version) or slab.producer(name, version) != made_by:
            raise BrokenPromiseError(f"the slab has {meta}, not {name} {version} of {job.start.spec.id}")
        return state

    def _compute(self, job: _HeldJob, task: Task, layout: Layout, fds: Sequence[int]) -> bytes:
        if task.stage is Stage.ENCODE:
            return prompt_of(task.job_id)
        assert job.prompt is not None
        if task.stage is Stage.PREPARE:
            return latents_after(b"", job.prompt, None)
        if task.stage is Stage.DENOISE:
            return latents_after(job.latents, job.prompt, task.step)
        frames = frames_of(job.latents, os.fstat(fds[0]).st_size)
        start, stop = shard_bounds(len(frames), layout.degree, layout.slot_of(self._rank))
        os.pwrite(fds[0], frames[start:stop], start)
        return job.latents

    def _publish(self, job: _HeldJob, task: Task, made: bytes, number: int) -> None:
        if task.stage is not Stage.DECODE:
            name = "prompt" if task.stage is Stage.ENCODE else "latents"
            meta = (task.job_id, name, task.index + 1)
            publish(job.slab, name, task.index + 1, meta, [memoryview(made)], producer=number)

    def _check_incarnations(self, message: RunTask) -> None:
        """Nobody is sent into a group with a peer whose arena it does not have."""
        known = tuple([self.mail.incarnations[rank] for rank in message.layout.ranks])
        if known != message.incarnations:
            raise BrokenPromiseError(f"dispatch {message.number}: lives {message.incarnations}, not {known}")

    def _is_void(self, message: RunTask) -> Any:
        return lambda: message.number in self._abandoned

    def _visit(self, point: FaultPoint, message: RunTask) -> FaultKind | None:
        return self._faults.visit(point, job_id=message.job_id, index=message.task_index)


def _hash(*parts: bytes) -> bytes:
    return hashlib.sha256(b"\0".join(parts)).digest()
