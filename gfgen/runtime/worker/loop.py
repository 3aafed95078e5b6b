"""The worker of one rank: takes messages, runs tasks and reports them.

    receiver    takes messages from the channel; urgent ones take effect at once
    main        launches tasks, in the order of dispatch
    watcher     waits for the end of each task, publishes its output and reports
    frames      copies the frames of decodes to the writer, so that no report waits for them
    sender      sends the state of jobs to other ranks, in the order of dispatch

So a rank that computes can send, and a rank that waits can be stopped. On a GPU a launch is not the end of a
task (gpu.py); on a CPU the next task runs while the watcher publishes the last one.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from gfgen.errors import AbortedError, PeerTimeoutError
from gfgen.runtime.ipc import messages
from gfgen.runtime.ipc.messages import Channel
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.worker import jobs
from gfgen.runtime.worker.device import Device, Thread
from gfgen.runtime.worker.dispatches import Dispatches, InputVoidError
from gfgen.runtime.worker.jobs import RankTask, Shipment
from gfgen.runtime.worker.memory import is_out_of_memory
from gfgen.runtime.worker.preparing import Preparation, reason_of, resign

logger = logging.getLogger(__name__)

IDLE_S = 0.02  # so long without a task, a rank prepares later ones; between two steps it waits 1 ms

Handler = Callable[[Any, Sequence[int]], None]


class Worker:
    def __init__(self, channel: Channel, rank: int, device: Device, dispatches: Dispatches) -> None:
        self.device = device
        self._channel = channel
        self._rank = rank
        self._dispatches = dispatches
        self._jobs: dict[str, jobs.RankJob] = {}
        self._tasks: queue.SimpleQueue[tuple[Any, list[int]] | None] = queue.SimpleQueue()
        self._shipments: queue.SimpleQueue[tuple[messages.SendState, Future[jobs.Shipment]]] = (
            queue.SimpleQueue()
        )
        self._sharing: list[RankTask] = []  # steps whose input is here, which wait for the rest
        self._launched: queue.SimpleQueue[tuple[RankTask]] = queue.SimpleQueue()
        self._decoded: queue.SimpleQueue[tuple[RankTask]] = queue.SimpleQueue()
        self.last_number = 0
        self._preparation = preparation = Preparation(channel, rank, device, dispatches)
        self.on_main: dict[type, Handler] = {
            messages.RunTask: self._run,
            messages.WarmUp: preparation.warm_up,
            messages.WarmUpLater: preparation.warm_up_later,
            messages.SetModels: preparation.set_models,
        }
        """By type: the messages that the main thread handles in their order."""
        if device.maps_between_tasks:
            self.on_main[messages.ReplacePeer] = self._map_arena

    def serve(self) -> None:
        self.device.use("main")
        threading.Thread(target=self._receive, name="receiver", daemon=True).start()
        for name, source, handle in (
            ("sender", self._shipments, self._send),
            ("watcher", self._launched, self._watch),
            ("frames", self._decoded, self._store_frames),
        ):
            threading.Thread(
                target=self._handle_all, args=(name, source, handle), name=name, daemon=True
            ).start()
        while (received := self._next()) is not None:
            message, fds = received
            try:
                self.on_main[type(message)](message, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _handle_all(self, name: Thread, source: Any, handle: Callable[..., None]) -> None:
        self.device.use(name)
        with contextlib.suppress(ConnectionError):  # the control plane is gone: the receiver ends the process
            while True:
                handle(*source.get())

    # The receiver thread ----------------------------------------------------------------------

    def _receive(self) -> None:
        self.device.use("receiver")
        while (received := self._channel.receive()) is not None:
            message, fds = received
            if isinstance(message, messages.ReplacePeer):
                self._dispatches.note_arena()
            if type(message) in self.on_main:
                self._tasks.put((message, fds))
                continue
            with self._dispatches.lock, contextlib.suppress(ConnectionError):  # answers need no reader
                try:
                    self._take(message, fds)
                except Exception as error:  # without this thread the process would only be silent
                    resign(self._channel, self._rank, error)
            for fd in fds:
                os.close(fd)
        self._tasks.put(None)
        self._abort(self._dispatches.end())

    def _take(self, message: Any, fds: Sequence[int]) -> None:
        """Handle a message that takes effect at once, also during a task."""
        match message:
            case messages.SendState():
                latents = self._jobs[message.job_id].latents_of(message.producer)
                self._dispatches.note_to_send(message.number)
                self._shipments.put((message, latents))
            case messages.StartJob():
                slab = Slab(fds[0], SlabPlan.of(message.trajectory))
                self._jobs[message.spec.id] = jobs.RankJob(message, slab, self.device.take_in)
            case messages.ForgetJob():
                if message.job_id in self._jobs:
                    self._jobs.pop(message.job_id).drop_all()
            case messages.Abandon():
                for job in self._jobs.values():
                    for number in message.numbers:
                        job.drop(number)
                self._abort(self._dispatches.abandon(message.numbers))
            case messages.Ping():
                self._channel.send(messages.Pong())
            case messages.ReplacePeer():
                self._map_arena(message, fds)
            case messages.RestartEdges():
                if self.device.endpoint is not None:
                    self.device.endpoint.restart_edges(sorted(message.ranks))
                self._channel.send(messages.EdgesRestarted(message.numbers))
            case messages.Arenas():
                self.device.connect(message, fds)
            case messages.TellMemory():
                self._channel.send(self.device.memory_use())
            case messages.Reset():
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

    def _map_arena(self, message: messages.ReplacePeer, fds: Sequence[int]) -> None:
        """Map a new incarnation's arena; no task here uses the old one."""
        self.device.endpoint.replace_peer(message.rank, fds[0], message.incarnation)
        self._channel.send(messages.PeerReplaced(message.rank, message.incarnation))
        self._dispatches.note_mapped()

    # The sender thread ------------------------------------------------------------------------

    def _send(self, message: messages.SendState, latents: Future[Shipment]) -> None:
        number = message.number
        with contextlib.suppress(InputVoidError):
            shipment = latents.result()
            if self._dispatches.enter(number):
                with self._answering(number):
                    self._dispatches.await_arenas(number)
                    self.device.send(shipment, message)
                    self._dispatches.note_enqueued(number)
                    self.device.await_sent(message)
                    self._dispatches.leave(number)
        self._dispatches.note_sent(number)

    # The main thread --------------------------------------------------------------------------

    def _next(self) -> tuple[Any, list[int]] | None:
        """The next message; prepares later tasks as long as there is none and this rank is idle."""
        while self._preparation.later:
            with contextlib.suppress(queue.Empty):
                return self._tasks.get(timeout=IDLE_S)
            if self._dispatches.is_idle:
                self._preparation.go_on()
        return self._tasks.get()

    @torch.no_grad()
    def _run(self, message: messages.RunTask, fds: Sequence[int]) -> None:
        """Run one task; an exception fails the task, never the worker."""
        self._dispatches.await_no_failure()  # another thread may have found one
        assert message.number > self.last_number, (
            f"dispatch {message.number} came after {self.last_number}: the global order is broken"
        )
        self.last_number = message.number
        works = [] if message.last_sharer is None else self._sharing
        if self._dispatches.enter(message.number):  # otherwise the control plane expects no report
            with self._answering(message.number):
                works.append(self._fetched(message, fds))
        if message.last_sharer == message.number:
            self._sharing = []
            for work in [each for each in works if self._dispatches.is_void(each.number)]:
                works.remove(work)  # it was given up meanwhile
                self._dispatches.leave(work.number)
        if works and message.last_sharer in (None, message.number):
            self._launch(works)

    def _fetched(self, message: messages.RunTask, fds: Sequence[int]) -> RankTask:
        job = self._jobs[message.job_id]
        task = job.start.trajectory.task(message.task_index)
        task = task.as_approximate if message.is_approximate else task
        work = RankTask(message, job, task, frames_fd=fds[0] if fds else None)
        times = [time.monotonic()]
        job.await_input(task, message, is_void=partial(self._dispatches.is_void, message.number))
        times.append(time.monotonic())
        self.device.fetch(work)
        times.append(time.monotonic())
        work.note(rank=self._rank, waited_s=times[1] - times[0], moved_s=times[2] - times[1])
        return work

    def _launch(self, works: Sequence[RankTask]) -> None:
        """Meet the other ranks, launch a task or shared ones, and let the watcher publish and report."""
        with self._answering(*[work.number for work in works]):
            self.device.run(works)
            for work in sorted(works, key=lambda each: each.error is not None):
                with self._answering(work.number):  # what it made may be wrong although the others are right
                    if work.error is not None:
                        raise work.error
                    self._hand_on(work)

    def _hand_on(self, work: RankTask) -> None:
        """Keep what a task made, except frames, for the next tasks, and let the watcher go on."""
        if "latents" in work.made and self._is_publisher(work):
            latents = work.made["latents"]
            jobs.outline(work.job.slab, "latents", work.task.index + 1, latents, producer=work.number)
        work.frames_fd = None if work.frames_fd is None else os.dup(work.frames_fd)
        kept = {name: fields for name, fields in work.made.items() if name != "frames"}
        with self._dispatches.lock:
            work.job.keep(kept, dispatch=work.number, is_there=work.is_there)
            if self._dispatches.is_void(work.number):
                work.job.drop(work.number)
            self._dispatches.note_launched()
        self._launched.put((work,))

    def _is_publisher(self, work: RankTask) -> bool:
        return work.message.layout.slot_of(self._rank) == 0

    # A task's end -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _answering(self, *numbers: int) -> Iterator[None]:
        """Inside dispatches: if they are given up leave them, if they fail report them."""
        try:
            yield
        except InputVoidError:
            for number in numbers:
                if self._dispatches.is_void(number):
                    self._dispatches.leave(number)
                else:
                    self._fail(
                        messages.TaskFault(number, "a task that shares its reads was given up", void=True)
                    )
        except Exception as error:
            for number in numbers:
                self._give_reason(number, error)

    def _watch(self, work: RankTask) -> None:
        with self._answering(work.number):
            try:
                self._settle(work)
            except Exception:
                work.made.clear()
                with self._dispatches.lock:
                    work.job.drop(work.number)
                raise
        if work.frames_fd is not None:
            self._decoded.put((work,))
        self._dispatches.note_settled()

    def _settle(self, work: RankTask) -> None:
        self.device.finish(work)
        jobs.require_finite(work.made, work.total)
        if self._is_publisher(work):
            version, store = work.task.index + 1, self.device.store
            for name, fields in work.made.items():
                if name != "frames":
                    jobs.publish(work.job.slab, name, version, fields, producer=work.number, store=store)
        do_frames_follow = "frames" in work.made
        self._channel.send(messages.TaskReport(work.number, work.times, do_frames_follow))
        self._dispatches.leave(work.number)

    def _give_reason(self, number: int, error: Exception) -> None:
        self.device.exit_if_lost(error)
        logger.debug("dispatch %d", number, exc_info=True)
        # An abort ends all waits up to its number, and may hit a transfer that was not given up.
        is_void, reason = isinstance(error, AbortedError), reason_of(error)
        if is_out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the attempt
            gc.collect()
            self.device.note_shortage()
            reason = f"out of memory; fewer --ranks or a smaller size may help: {reason}"
        self._fail(messages.TaskFault(number, reason, is_void, is_late=isinstance(error, PeerTimeoutError)))

    def _fail(self, fault: messages.TaskFault) -> None:
        """Report, and wait until the control plane has given the dispatch up."""
        with self._dispatches.lock:
            self._dispatches.note_failure(fault.number)
            self._channel.send(fault)
        self.device.drain()
        self._dispatches.leave(fault.number)
        self._dispatches.await_no_failure()

    def _store_frames(self, work: RankTask) -> None:
        """Store the frames of a decode unless it has failed, and close the writer's memory."""
        assert work.frames_fd is not None
        reason = None
        try:
            if "frames" in work.made:
                self._store(work, work.frames_fd)
        except Exception as error:
            self.device.exit_if_lost(error)
            reason = reason_of(error)
        finally:
            os.close(work.frames_fd)
        if "frames" in work.made:
            self._channel.send(messages.FramesStored(work.number, reason))

    def _store(self, work: RankTask, fd: int) -> None:
        """Copy this rank's rows of all frames, and sound, into the writer's memory."""
        frames = work.made["frames"]
        for name, place in jobs.output_places(frames, fd, work.job.start.trajectory.frames_shape).items():
            if name == "frames":
                self.device.store_rows(frames.tensors[name], place)
            else:
                place.copy_(frames.tensors[name])
