"""The interface of a worker to the device of its rank, and what all devices have in common."""

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
    """`sum_of` its output; in host memory when the task has ended."""
    started_s: float = 0.0
    ended_s: float | None = None
    """None where the task ends when its output is published."""
    waited_s: float = 0.0
    moved_s: float = 0.0
    idle_s: float | None = None
    """By the device's clock: from the end of the previous task to the start of this one."""
    is_there: Any = None
    """The device's event, if the output is only enqueued."""
    peak_bytes: int | None = None
    """The most that was allocated on a GPU while the task was launched."""


class Device(Protocol):
    """Where one rank keeps its models and runs its tasks."""

    runs_ahead: bool
    """`run` and `store_rows` only launch: a thread waits for the end of each task, and another for frames.
    New arenas are mapped by the main thread, because mapping waits for the device."""
    arena_fds: tuple[int, ...]
    """The control plane hands these to the other ranks."""
    counts_tokens: bool
    """Whether this device can pad texts at almost no cost."""
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
        """Release models and their memory."""
        ...

    def warm_up(self, message: WarmUp) -> None:
        """Prepare steps without other ranks. Raises: what the model raises."""
        ...

    def take_in(self, fields: Fields) -> Fields:
        """Copies of fields of a slab on this device."""
        ...

    def fetch(self, work: RankTask) -> None:
        """Bring the input that this rank lacks. Raises: InputVoidError when it is given up."""
        ...

    def run(self, work: RankTask) -> Run:
        """Meet the other ranks and execute the task. Raises: InputVoidError when it is given up."""
        ...

    def finish(self, run: Any) -> None:
        """Wait until a run has ended and complete its times.

        Raises: InputVoidError when it was given up; the error of an exchange between ranks.
        """
        ...

    def store(self, tensor: torch.Tensor, place: memoryview) -> None:
        """Copy a computed dense tensor into a slab; the copy is complete on return."""
        ...

    def store_rows(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a rank's rows of all frames into the writer's memory; complete on return."""
        ...

    def send(self, shipment: Shipment, message: SendState) -> None:
        """Send, or enqueue, state that a job's next task needs on other ranks."""
        ...

    def await_sent(self, message: SendState) -> None:
        """Wait until it has left. Raises: the error of a receiver."""
        ...

    def drain(self) -> None:
        """Wait until the device has done all that the calling thread has launched."""
        ...

    def memory_use(self) -> MemoryUse:
        """The memory that this rank has used since `forget_peaks`."""
        ...

    def forget_peaks(self) -> None:
        """Another run begins."""
        ...

    def note_shortage(self) -> None:
        """A task ran out of memory: release what is kept for later."""
        ...

    def exit_if_lost(self, error: BaseException) -> None:
        """End the process if the error means that it has lost the device."""
        ...


def bring_input(
    work: RankTask, receive: Callable[[RunTask, Outline], Fields], *, is_void: Callable[[], bool]
) -> None:
    """Bring the input that this rank lacks; `receive` gets what other ranks send.

    `receive` comes last: if the arrival is only enqueued, nothing waits behind it. What arrives is for this
    attempt alone: if the attempt is given up, it may never arrive, and the next one reads the slab.
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
    """The group of a task on several ranks when all of them are there; None for one rank."""
    if message.layout.degree == 1:
        return None
    group: LayoutGroup = endpoint.group(
        Descriptor(message.number, message.layout, message.incarnations), timeout_s=message.wait_s
    )
    group.enter()
    return group


def execute(adapters: Mapping[str, Adapter], work: RankTask, parallel: Parallel | None) -> dict[str, Fields]:
    """Run the task; returns the artifacts that it makes."""
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
        case Stage.REUSE:
            assert task.step is not None
            inputs = (artifacts[name] for name in ("prompt", "condition", "latents"))
            return {"latents": adapter.reuse(spec, *inputs, step=task.step)}
        case Stage.DECODE:
            return {"frames": adapter.decode(spec, artifacts["latents"], parallel=parallel)}
