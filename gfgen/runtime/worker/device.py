"""What a worker needs of the device that its rank computes on, and what all devices do alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.group import LayoutGroup
from gfgen.graph import Stage, Task
from gfgen.models.families.adapter import Adapter, Fields
from gfgen.models.parallel.parallel import Parallel
from gfgen.runtime.ipc.messages import Arenas, MemoryUse, RunTask, SendState, WarmUp
from gfgen.runtime.worker.jobs import Outline, RankJob, Shipment

Thread = Literal["main", "receiver", "sender", "watcher", "frames"]


@dataclass(frozen=True, slots=True)
class RankTask:
    """A dispatch as one rank runs it."""

    message: RunTask
    job: RankJob
    task: Task

    @property
    def number(self) -> int:
        return self.message.number


@dataclass(slots=True)
class Run:
    """A task that a device has executed, or has only launched."""

    made: dict[str, Fields]
    total: torch.Tensor | None
    """`sum_of` what it made; in host memory once the task has ended."""
    started_s: float = 0.0
    ended_s: float | None = None
    """None where the task ends when its output is published."""
    waited_s: float = 0.0
    moved_s: float = 0.0
    idle_s: float | None = None
    """By the device's clock: from the end of the task before it until this one had begun."""
    is_there: Any = None
    """A device's event, if what the task made is only enqueued."""


class Device(Protocol):
    """Where one rank keeps its models and runs its tasks."""

    runs_ahead: bool
    """`run` and `store_rows` only launch: a thread waits for the end of each task, and another for frames.
    New arenas are mapped by the main thread, because mapping waits for the device."""
    arena_fds: tuple[int, ...]
    """The control plane hands these to the other ranks."""
    counts_tokens: bool
    """Padded texts cost next to nothing here."""
    adapters: dict[str, Adapter]
    endpoint: Any
    """None before `connect`."""

    def use(self, thread: Thread) -> None:
        """Prepare the calling thread."""
        ...

    def connect(self, message: Arenas, fds: Sequence[int]) -> None:
        """Map the arenas of all ranks."""
        ...

    def load(self, path: str) -> None:
        """Load the model of this checkpoint."""
        ...

    def drop(self, paths: Sequence[str]) -> None:
        """Let go of models and of their memory."""
        ...

    def warm_up(self, message: WarmUp) -> None:
        """Get steps ready, alone. Raises: what the model raises."""
        ...

    def take_in(self, fields: Fields) -> Fields:
        """Copies of fields that lie in a slab, where this rank computes."""
        ...

    def fetch(self, work: RankTask) -> None:
        """Bring what a task needs and this rank lacks. Raises: InputVoidError when it is given up."""
        ...

    def run(self, work: RankTask) -> Run:
        """Meet the other ranks and execute the task. Raises: InputVoidError when it is given up."""
        ...

    def finish(self, run: Any) -> None:
        """Wait until a run has ended and complete its times.

        Raises: InputVoidError when it was given up; what went wrong between the ranks.
        """
        ...

    def store(self, tensor: torch.Tensor, place: memoryview) -> None:
        """Copy a dense tensor that was computed into a slab; it is there on return."""
        ...

    def store_rows(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a rank's rows of all frames into the writer's memory; they are there on return."""
        ...

    def send(self, shipment: Shipment, message: SendState) -> None:
        """Send what a job's next task needs elsewhere, or enqueue that."""
        ...

    def await_sent(self, message: SendState) -> None:
        """Wait until it has left. Raises: what went wrong with a receiver."""
        ...

    def drain(self) -> None:
        """Wait until nothing is under way that the calling thread has begun."""
        ...

    def memory_use(self) -> MemoryUse:
        """What this rank has taken of memory since `forget_peaks`."""
        ...

    def forget_peaks(self) -> None:
        """Another run begins."""
        ...

    def note_shortage(self) -> None:
        """A task ran out of memory: give back what is kept for later."""
        ...

    def exit_if_lost(self, error: BaseException) -> None:
        """End the process if the error means that it cannot use the device any more."""
        ...


def bring_input(
    work: RankTask, receive: Callable[[RunTask, Outline], Fields], *, is_void: Callable[[], bool]
) -> None:
    """Bring what a task needs and this rank lacks; `receive` gets what other ranks send.

    That comes last: if its arrival is only enqueued, nothing is waited for behind it. It is for this attempt
    alone: it may never arrive if the attempt is given up, and the next one takes its input from the slab.
    """
    job, task, message = work.job, work.task, work.message
    job.fetch_constants(task, message.producer, is_void=is_void)
    if message.transfers:
        assert message.producer is not None
        outline = job.await_outline(task, message.producer, is_void=is_void)
        job.hold(receive(message, outline), producer=None)
    elif task.index > 1 and job.producer != message.producer:
        assert message.producer is not None
        job.fetch_latents(task, message.producer)


def meet(endpoint: Any, message: RunTask) -> LayoutGroup | None:
    """The group of a task on several ranks, once all of them have come; None for one rank."""
    if message.layout.degree == 1:
        return None
    group: LayoutGroup = endpoint.group(
        Descriptor(message.number, message.layout, message.incarnations), timeout_s=message.wait_s
    )
    group.enter()
    return group


def execute(adapters: Mapping[str, Adapter], work: RankTask, parallel: Parallel | None) -> dict[str, Fields]:
    """Run the task; the artifacts that it makes."""
    job, task = work.job, work.task
    adapter = adapters[job.start.checkpoint]
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
