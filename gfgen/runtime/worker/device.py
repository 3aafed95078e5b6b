"""The interface of a worker to the device of its rank, and what all devices have in common."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.group import LayoutGroup
from gfgen.graph import Stage, Task
from gfgen.models.families.adapter import Adapter, BatchAdapter, Fields
from gfgen.models.parallel.parallel import Parallel
from gfgen.runtime.ipc.messages import Arenas, MemoryUse, RunTask, SendState, WarmUp
from gfgen.runtime.worker.dispatches import Dispatches
from gfgen.runtime.worker.jobs import Outline, RankJob, Shipment, send_state, step_input
from gfgen.system.allocator import give_back_freed_memory

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


class Device:
    """Where one rank keeps its models and runs its tasks; most steps are none on a CPU."""

    runs_ahead = False
    """`run` and `store_rows` only launch: a thread waits for the end of each task, and another for frames.
    New arenas are mapped by the main thread, because mapping waits for the device."""
    arena_fds: tuple[int, ...] = ()
    """The control plane hands these to the other ranks."""
    counts_tokens = False
    """Whether this device can pad texts at almost no cost."""

    def __init__(
        self,
        rank: int,
        adapters: dict[str, Adapter],
        dispatches: Dispatches,
        *,
        load_model: Callable[[str], Adapter],
    ) -> None:
        self.adapters = adapters
        self.endpoint: Any = None
        """None before `connect`."""
        self._rank = rank
        self._dispatches = dispatches
        self._load_model = load_model

    def use(self, thread: Thread) -> None:
        """Prepare the calling thread."""

    def connect(self, message: Arenas, fds: Sequence[int]) -> None:
        """Map the arenas of all ranks."""
        raise NotImplementedError

    def load(self, path: str) -> None:
        """Load the model of this checkpoint."""
        self.adapters[path] = self._load_model(path)

    def drop(self, paths: Sequence[str]) -> None:
        """Release models and their memory."""
        for path in paths:
            del self.adapters[path]
        gc.collect()
        give_back_freed_memory()

    def warm_up(self, message: WarmUp) -> None:
        """Prepare steps without other ranks. Raises: what the model raises."""

    def take_in(self, fields: Fields) -> Fields:
        """Copies of fields of a slab on this device."""
        raise NotImplementedError

    def fetch(self, work: RankTask) -> None:
        """Bring the input that this rank lacks. Raises: InputVoidError when it is given up.

        What other ranks send comes last: if the arrival is only enqueued, nothing waits behind it. It is for
        this attempt alone: if the attempt is given up, it may never arrive, and the next one reads the slab.
        """
        job, task, message = work.job, work.task, work.message
        is_void = partial(self._dispatches.is_void, work.number)
        job.fetch_constants(task, message.producer, is_void=is_void)
        if message.transfers:
            assert message.producer is not None
            outline = job.await_outline(task, message.producer, is_void=is_void)
            job.hold(self._receive(message, outline), producer=None)
        elif task.index > 1 and job.producer != message.producer:
            assert message.producer is not None
            job.fetch_latents(task, message.producer)

    def _receive(self, message: RunTask, outline: Outline) -> Fields:
        """The latents that other ranks send."""
        raise NotImplementedError

    def run(self, work: RankTask) -> Run:
        """Meet the other ranks and execute the task. Raises: InputVoidError when it is given up."""
        raise NotImplementedError

    def run_batch(self, works: Sequence[RankTask]) -> list[Run]:
        """Execute steps of a batch together, on this rank alone; each gets an equal part of the time.

        Raises: InputVoidError when all of them are given up.
        """
        raise NotImplementedError

    def finish(self, run: Any) -> None:
        """Wait until a run has ended and complete its times.

        Raises: InputVoidError when it was given up; the error of an exchange between ranks.
        """

    def store(self, tensor: torch.Tensor, place: memoryview) -> None:
        """Copy a computed dense tensor into a slab; the copy is complete on return."""
        raise NotImplementedError

    def store_rows(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a rank's rows of all frames into the writer's memory; complete on return."""
        raise NotImplementedError

    def send(self, shipment: Shipment, message: SendState) -> None:
        """Send, or enqueue, state that a job's next task needs on other ranks."""
        send_state(self.endpoint, shipment.fields, message.transfers, dispatch=message.number)

    def await_sent(self, message: SendState) -> None:
        """Wait until it has left. Raises: the error of a receiver."""

    def drain(self) -> None:
        """Wait until the device has done all that the calling thread has launched."""

    def memory_use(self) -> MemoryUse:
        """The memory that this rank has used since `forget_peaks`."""
        return MemoryUse(peak_host_bytes())

    def forget_peaks(self) -> None:
        """Another run begins."""
        reset_host_peak()

    def note_shortage(self) -> None:
        """A task ran out of memory: release what is kept for later."""

    def exit_if_lost(self, error: BaseException) -> None:
        """End the process if the error means that it has lost the device."""


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


def execute_batch(adapters: Mapping[str, Adapter], works: Sequence[RankTask]) -> list[dict[str, Fields]]:
    """Run a step of several jobs; returns what it makes for each."""
    first = works[0]
    adapter = cast(BatchAdapter, adapters[first.job.start.checkpoint])
    assert first.task.step is not None
    made = adapter.denoise_batch([step_input(work.job) for work in works], step=first.task.step)
    return [{"latents": latents} for latents in made]


def peak_host_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Peak of this process's main memory; 0 where the system does not report it."""
    with contextlib.suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_host_peak() -> None:
    """Reset the peak of `peak_host_bytes`, where the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
