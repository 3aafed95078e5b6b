"""The worker of one rank: takes messages, runs tasks and reports them.

    receiver    takes messages from the channel; urgent ones take effect at once
    main        runs tasks, in the order of dispatch
    sender      sends the state of jobs to other ranks, in the same order

So a rank that computes can send, and a rank that waits can be stopped. If the device runs ahead of the host
(`Device.runs_ahead`), two more threads keep the main thread free:

    watcher     waits for the end of each task, publishes its output and reports
    frames      copies the frames of decodes to the writer, so that no report waits for them
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import mmap
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from gfgen.errors import AbortedError, JobError, ModelError
from gfgen.models.families.adapter import Fields
from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.messages import (
    Abandon,
    Arenas,
    EdgesRestarted,
    ForgetJob,
    FramesStored,
    Loading,
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
)
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.worker.device import Device, RankTask, Run
from gfgen.runtime.worker.dispatches import AFTER_ALL, Dispatches, InputVoidError
from gfgen.runtime.worker.jobs import (
    RankJob,
    Shipment,
    map_output,
    outline,
    place_of,
    publish,
    require_finite,
)

logger = logging.getLogger(__name__)

Handler = Callable[[Any, Sequence[int]], None]


@dataclass(slots=True)
class Launched:
    """A task whose work is enqueued, and the writer's memory if it is a decode."""

    work: RankTask
    run: Run
    frames_fd: int | None


class Worker:
    """Runs the tasks of one rank on its device."""

    def __init__(self, channel: Channel, rank: int, device: Device, dispatches: Dispatches) -> None:
        self.device = device
        self._channel = channel
        self._rank = rank
        self._dispatches = dispatches
        self._jobs: dict[str, RankJob] = {}
        self._tasks: queue.SimpleQueue[tuple[Any, list[int]] | None] = queue.SimpleQueue()
        self._shipments: queue.SimpleQueue[tuple[SendState, Future[Shipment]]] = queue.SimpleQueue()
        self._batch: list[RankTask] = []
        """Steps whose input is here, and which wait for the rest of their batch."""
        self._launched: queue.SimpleQueue[Launched] = queue.SimpleQueue()
        self._decoded: queue.SimpleQueue[tuple[RankTask, Fields, int]] = queue.SimpleQueue()
        """This rank's rows of frames, and the writer's memory, which is closed when it has them."""
        self.last_number = 0
        """The largest dispatch number so far."""
        self.on_main: dict[type, Handler] = {
            RunTask: self._run,
            WarmUp: self._warm_up,
            SetModels: self._set_models,
        }
        """By type: the messages that the main thread handles in their order."""
        if device.runs_ahead:
            self.on_main[ReplacePeer] = self._map_arena

    def serve(self) -> None:
        """Take messages until the channel ends."""
        self.device.use("main")
        loops = [self._receive, self._send]
        if self.device.runs_ahead:
            loops += [self._watch, self._store_frames]
        for loop in loops:
            threading.Thread(target=loop, name=loop.__name__, daemon=True).start()
        while (received := self._tasks.get()) is not None:
            message, fds = received
            try:
                self.on_main[type(message)](message, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    # The receiver thread ----------------------------------------------------------------------

    def _receive(self) -> None:
        self.device.use("receiver")
        while (received := self._channel.receive()) is not None:
            message, fds = received
            if isinstance(message, ReplacePeer):
                self._dispatches.note_arena()
            if type(message) in self.on_main:
                self._tasks.put((message, fds))
                continue
            with self._dispatches.lock, contextlib.suppress(ConnectionError):  # answers need no reader
                try:
                    self._take(message, fds)
                except Exception as error:  # without this thread the process would only be silent
                    self._resign(error)
            for fd in fds:
                os.close(fd)
        self._tasks.put(None)
        self._abort(self._dispatches.end())

    def _take(self, message: Any, fds: Sequence[int]) -> None:
        """Handle a message that takes effect at once, also during a task."""
        match message:
            case SendState():
                latents = self._jobs[message.job_id].latents_of(message.producer)
                self._dispatches.note_to_send(message.number)
                self._shipments.put((message, latents))
            case StartJob():
                slab = Slab(fds[0], SlabPlan.of(message.trajectory))
                self._jobs[message.spec.id] = RankJob(message, slab, self.device.take_in)
            case ForgetJob():
                if message.job_id in self._jobs:
                    self._jobs.pop(message.job_id).drop_all()
            case Abandon():
                for job in self._jobs.values():
                    for number in message.numbers:
                        job.drop(number)
                self._abort(self._dispatches.abandon(message.numbers))
            case Ping():
                self._channel.send(Pong())
            case ReplacePeer():
                self._map_arena(message, fds)
            case RestartEdges():
                if self.device.endpoint is not None:
                    self.device.endpoint.restart_edges(sorted(message.ranks))
                self._channel.send(EdgesRestarted(message.numbers))
            case Arenas():
                self.device.connect(message, fds)
            case TellMemory():
                self._channel.send(self.device.memory_use())
            case Reset():
                self.device.forget_peaks()
                for job in self._jobs.values():
                    job.drop_all()
                self._jobs.clear()
                self._dispatches.forgive()
            case _:
                raise AssertionError(f"unknown message {message!r}")

    def _abort(self, number: int | None) -> None:
        """Abort all exchanges up to this dispatch, which a thread is inside of."""
        if number is not None and self.device.endpoint is not None:
            self.device.endpoint.abort_through(number)

    def _map_arena(self, message: ReplacePeer, fds: Sequence[int]) -> None:
        """Map a new incarnation's arena; no task here uses the old one."""
        self.device.endpoint.replace_peer(message.rank, fds[0], message.incarnation)
        self._channel.send(PeerReplaced(message.rank, message.incarnation))
        self._dispatches.note_mapped()

    def _resign(self, error: Exception) -> NoReturn:
        """Report why this process cannot work, and end it."""
        if isinstance(error, ConnectionError):
            raise error
        logger.debug("rank %d cannot work", self._rank, exc_info=error)
        self._channel.send(WorkerFailed(self._rank, reason_of(error)))
        sys.stderr.flush()
        os._exit(1)

    # The sender thread ------------------------------------------------------------------------

    def _send(self) -> None:
        self.device.use("sender")
        while True:
            message, latents = self._shipments.get()
            self._send_one(message, latents)
            self._dispatches.note_sent(message.number)

    def _send_one(self, message: SendState, latents: Future[Shipment]) -> None:
        number = message.number
        try:
            shipment = latents.result()
        except InputVoidError:
            return
        if not self._dispatches.enter(number):
            return
        try:
            self._dispatches.await_arenas(number)
            self.device.send(shipment, message)
            self._dispatches.note_enqueued(number)
            self.device.await_sent(message)
        except InputVoidError:
            self._dispatches.leave(number)
        except Exception as error:
            # An abort ends all waits up to its number, and may hit a transfer that was not given up.
            self._fail(TaskFault(number, reason_of(error), void=isinstance(error, AbortedError)))
        else:
            self._dispatches.leave(number)

    # The main thread --------------------------------------------------------------------------

    def _warm_up(self, message: WarmUp, fds: Sequence[int]) -> None:
        """Prepare steps before a run; report a failure and continue."""
        began_s = time.monotonic()
        reason = None
        try:
            with torch.no_grad():
                self.device.warm_up(message)
        except Exception as error:
            self.device.exit_if_lost(error)
            logger.debug("warming up", exc_info=True)
            reason = reason_of(error)
        self.device.drain()
        self._channel.send(WarmedUp(message.number, time.monotonic() - began_s, reason))

    def _set_models(self, message: SetModels, fds: Sequence[int]) -> None:
        """Hold other models; a process that cannot ends with its reason."""
        with contextlib.suppress(InputVoidError):  # the control plane is gone
            self._dispatches.await_quiet(AFTER_ALL)
            started_s = time.monotonic()
            adapters = self.device.adapters
            try:
                self.device.drop([path for path in adapters if path not in message.checkpoints])
                for path in message.checkpoints:
                    if path not in adapters:
                        self._channel.send(Loading(path))
                        self.device.load(path)
                self.device.drain()
            except Exception as error:
                self._resign(error)
            self._channel.send(ModelsSet(time.monotonic() - started_s))

    def _run(self, message: RunTask, fds: Sequence[int]) -> None:
        """Run one task and report; an exception fails the task, never the worker."""
        self._dispatches.await_no_failure()  # another thread may have found one
        assert message.number > self.last_number, (
            f"dispatch {message.number} came after {self.last_number}: the global order is broken"
        )
        self.last_number = message.number
        if self._dispatches.enter(message.number):  # otherwise the control plane expects no report
            self._run_entered(message, fds)
        if message.number == message.batch_end:
            self._run_batch()

    def _run_entered(self, message: RunTask, fds: Sequence[int]) -> None:
        try:
            job = self._jobs[message.job_id]
            task = job.start.trajectory.task(message.task_index)
            work = RankTask(message, job, task.as_reused if message.is_reused else task)
            with torch.no_grad():
                self._perform(work, fds)
        except InputVoidError:
            self._dispatches.leave(message.number)
        except Exception as error:
            self._give_reason(message.number, error)

    def _perform(self, work: RankTask, fds: Sequence[int]) -> None:
        """Bring the input, meet the other ranks, execute; then publish and report, or let the watcher."""
        times = [time.monotonic()]
        self._await_input(work)
        times.append(time.monotonic())
        self.device.fetch(work)
        times.append(time.monotonic())
        if work.message.batch_end is not None:
            self._batch.append(work)
            return
        run = self.device.run(work)
        run.waited_s += times[1] - times[0]
        run.moved_s += times[2] - times[1]
        self._hand_on(work, run, fds)

    def _run_batch(self) -> None:
        """Run the steps that have come, without those that were given up meanwhile."""
        batch, self._batch = self._batch, []
        for work in [each for each in batch if self._dispatches.is_void(each.number)]:
            batch.remove(work)
            self._dispatches.leave(work.number)
        if not batch:
            return
        try:
            with torch.no_grad():
                runs = self.device.run_batch(batch)
        except InputVoidError:
            for work in batch:
                self._leave_or_fail(work.number)
        except Exception as error:
            for work in batch:
                self._give_reason(work.number, error)
        else:
            for work, run in zip(batch, runs, strict=True):
                self._hand_on_one(work, run)

    def _leave_or_fail(self, number: int) -> None:
        """Leave a dispatch whose batch does not run."""
        if self._dispatches.is_void(number):
            self._dispatches.leave(number)
        else:
            self._fail(TaskFault(number, "its batch was given up", void=True))

    def _hand_on_one(self, work: RankTask, run: Run) -> None:
        """Publish and report one step of a batch: what it made may be wrong although the others are right."""
        try:
            self._hand_on(work, run, ())
        except InputVoidError:
            self._dispatches.leave(work.number)
        except Exception as error:
            self._give_reason(work.number, error)

    def _hand_on(self, work: RankTask, run: Run, fds: Sequence[int]) -> None:
        """Publish and report a task, or let the watcher."""
        if not self.device.runs_ahead:
            self._settle(Launched(work, run, fds[0] if fds else None))
            return
        launched = Launched(work, run, os.dup(fds[0]) if fds else None)
        if "latents" in run.made and self._is_publisher(work):
            latents = run.made["latents"]
            outline(work.job.slab, "latents", work.task.index + 1, latents, producer=work.number)
        with self._dispatches.lock:
            self._keep(launched)
            self._dispatches.note_launched()
        self._launched.put(launched)

    def _await_input(self, work: RankTask) -> None:
        """Wait for input that comes through the slab; transfers wait by themselves."""
        message, job = work.message, work.job
        if message.producer is None or job.producer == message.producer or message.transfers:
            return
        job.await_published(
            work.task, message.producer, is_void=partial(self._dispatches.is_void, work.number)
        )

    def _is_publisher(self, work: RankTask) -> bool:
        return work.message.layout.slot_of(self._rank) == 0

    def _keep(self, launched: Launched) -> None:
        """Keep what a task made, except frames, for the next tasks; with the lock held."""
        run, job, number = launched.run, launched.work.job, launched.work.number
        kept = {name: fields for name, fields in run.made.items() if name != "frames"}
        job.keep(kept, dispatch=number, is_there=run.is_there)
        if self._dispatches.is_void(number):
            job.drop(number)

    # A task's end: the main thread, or the watcher ----------------------------------------------

    def _watch(self) -> None:
        self.device.use("watcher")
        while True:
            launched = self._launched.get()
            number = launched.work.number
            try:
                self._settle(launched)
            except InputVoidError:
                self._dispatches.leave(number)
            except Exception as error:
                with self._dispatches.lock:
                    launched.work.job.drop(number)
                self._give_reason(number, error)
            finally:
                if launched.frames_fd is not None:
                    os.close(launched.frames_fd)
                self._dispatches.note_settled()
            del launched

    def _settle(self, launched: Launched) -> None:
        """Publish the output of a task when it has ended, and report."""
        work, run, ahead = launched.work, launched.run, self.device.runs_ahead
        self.device.finish(run)
        require_finite(run.made, run.total)
        frames = run.made.pop("frames", None)
        if frames is not None and not ahead:
            assert launched.frames_fd is not None
            self._store(work, frames, launched.frames_fd)
        if self._is_publisher(work):
            version, store = work.task.index + 1, self.device.store
            for name, fields in run.made.items():
                publish(work.job.slab, name, version, fields, producer=work.number, store=store)
        if not ahead:
            with self._dispatches.lock:
                self._keep(launched)
        report = TaskReport(
            work.number,
            started_s=run.started_s,
            ended_s=time.monotonic() if run.ended_s is None else run.ended_s,
            waited_s=run.waited_s,
            moved_s=run.moved_s,
            do_frames_follow=frames is not None and ahead,
            idle_s=run.idle_s,
            peak_bytes=run.peak_bytes,
        )
        self._channel.send(report)
        if frames is not None and ahead:
            assert launched.frames_fd is not None
            fd, launched.frames_fd = launched.frames_fd, None
            self._decoded.put((work, frames, fd))
        self._dispatches.leave(work.number)

    def _give_reason(self, number: int, error: Exception) -> None:
        """Report a task that raised."""
        self.device.exit_if_lost(error)
        logger.debug("dispatch %d", number, exc_info=True)
        is_void, is_short = isinstance(error, AbortedError), _is_out_of_memory(error)
        reason = reason_of(error)
        if is_short:
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the attempt
            gc.collect()
            self.device.note_shortage()
            reason = f"out of memory; fewer --ranks or a smaller size may help: {reason}"
        self._fail(TaskFault(number, reason, void=is_void))

    def _fail(self, fault: TaskFault) -> None:
        """Report, and wait until the control plane has given the dispatch up."""
        with self._dispatches.lock:
            self._dispatches.note_failure(fault.number)
            self._channel.send(fault)
        self.device.drain()
        self._dispatches.leave(fault.number)
        self._dispatches.await_given_up(fault.number)

    # The thread for frames ----------------------------------------------------------------------

    def _store_frames(self) -> None:
        self.device.use("frames")
        while True:
            work, frames, fd = self._decoded.get()
            reason = None
            try:
                self._store(work, frames, fd)
            except Exception as error:
                self.device.exit_if_lost(error)
                reason = reason_of(error)
            finally:
                os.close(fd)
            with contextlib.suppress(ConnectionError):  # the writer is gone as well
                self._channel.send(FramesStored(work.number, reason))
            del work, frames

    def _store(self, work: RankTask, frames: Fields, fd: int) -> None:
        """Copy this rank's rows of all frames, and sound, into the writer's memory."""
        shape = work.job.start.trajectory.frames_shape
        if shape is not None:
            target = place_of(frames, mmap.mmap(fd, math.prod(shape)), shape)
            self.device.store_rows(frames.tensors["frames"], target)
            return
        for name, place in map_output(frames, fd).items():
            if name == "frames":
                self.device.store_rows(frames.tensors[name], place)
            else:
                place.copy_(frames.tensors[name])


def reason_of(error: BaseException) -> str:
    """One line with the exception and its place; errors that users can mend have no place."""
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
