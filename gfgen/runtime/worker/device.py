"""A rank's models on the CPU, where a task has ended when its launch returns; a GPU is in gpu.py."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from gfgen.errors import RunError
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import Endpoint
from gfgen.gfc.group import Collectives
from gfgen.graph import Stage
from gfgen.models.families.adapter import Adapter, Fields
from gfgen.models.fast import stop_checks
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.models.streaming.turns import in_turns
from gfgen.runtime.ipc.messages import Arenas, MemoryUse, RunTask, SendState, WarmUp
from gfgen.runtime.worker import jobs
from gfgen.runtime.worker.dispatches import Dispatches
from gfgen.runtime.worker.jobs import RankTask, step_input
from gfgen.system.machine import forget_peak, give_back_freed_memory, peak_bytes

Thread = Literal["main", "receiver", "sender", "watcher", "frames"]


class Device:
    """Keeps a rank's models and runs its tasks in main memory, where arenas are shared memory."""

    maps_between_tasks = False  # new arenas are mapped by the main thread: mapping waits for the device
    arena_fds: tuple[int, ...] = ()  # the control plane hands these to the other ranks
    counts_tokens = False  # whether this device can pad texts at almost no cost

    def __init__(
        self,
        rank: int,
        adapters: dict[str, Adapter],
        dispatches: Dispatches,
        *,
        load_model: Callable[[str], Adapter],
        link_bytes_per_s: float = 0.0,
        near: Collection[int] = (),
    ) -> None:
        self._link_bytes_per_s, self._near = link_bytes_per_s, near
        self.adapters = adapters
        self.endpoint: Any = None  # None before `connect`
        self._rank = rank
        self._dispatches = dispatches
        self._load_model = load_model
        self._away: dict[str, Adapter] = {}  # by checkpoint: models off the device that may come back
        self._used: set[object] = set()

    def use(self, thread: Thread) -> None:
        """Prepare the calling thread."""

    def connect(self, message: Arenas, fds: Sequence[int]) -> None:
        """Map the arenas of all ranks."""
        self.endpoint = Endpoint(
            ArenaPlan(message.data_bytes, message.post_bytes),
            rank=self._rank,
            fds=dict(zip(message.ranks, fds, strict=True)),
            incarnations=dict(enumerate(message.incarnations)),
            link_bytes_per_s=self._link_bytes_per_s,
            near=self._near,
        )

    @property
    def read_bytes_per_s(self) -> float:
        """Of models with streamed blocks; 0 without any."""
        return max((each.read_bytes_per_s for each in self.adapters.values()), default=0.0)

    def load(self, path: str) -> bool:
        """Load the model of this checkpoint; whether it has come back from main memory."""
        if (away := self._away.get(path)) is None or away.kept is None:
            self.adapters[path] = self._load_model(path)
            return False
        try:
            away.kept.come_back()
        except RunError:  # there is no room beside what is kept for other models
            self.drop(())
            away.kept.come_back()
        self.adapters[path] = self._away.pop(path)
        return True

    def release(self, held: Collection[str], *, kept: Collection[str] = ()) -> None:
        """Release all models but these; those of `kept` may come back from main memory."""
        for path in [each for each in self.adapters if each in kept and each not in held]:
            if (weights := self.adapters[path].kept) is not None:
                self.adapters[path].patches.take_out()
                weights.leave()
                self._away[path] = self.adapters.pop(path)
        gone = [each for each in self.adapters if each not in held]
        gone += [each for each in self._away if each not in (*held, *kept)]
        if gone or not {*self.adapters, *self._away}.issuperset(held):
            self.drop(gone)

    def drop(self, paths: Collection[str]) -> None:
        """Release models and their memory, and what is kept for tasks."""
        for path in paths:
            del (self.adapters if path in self.adapters else self._away)[path]
        self._used.clear()
        gc.collect()
        give_back_freed_memory()

    def warm_up(self, message: WarmUp) -> Iterator[None]:
        """Prepare tasks in parts, without other ranks. Raises: what the model raises."""
        return iter(())

    def note_used(self, kinds: Collection[object]) -> bool:
        """Remember kinds of tasks that have run here; whether one of them is new."""
        is_new = not self._used.issuperset(kinds)
        self._used.update(kinds)
        return is_new

    def take_in(self, fields: Fields) -> Fields:
        """Copies of fields of a slab on this device."""
        return jobs.copied(fields)

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
            job.hold(self._receive(work, outline), producer=None)
        elif task.index > 1 and job.producer != message.producer:
            assert message.producer is not None
            latents = jobs.fetch(job.slab, "latents", task.index, job.take_in)
            job.hold(latents, producer=message.producer)

    def _receive(self, work: RankTask, outline: jobs.Outline) -> Fields:
        return jobs.receive_state(
            self.endpoint.recv, work.message.transfers, outline, dispatch=work.message.number
        )

    def run(self, works: Sequence[RankTask]) -> None:
        """Meet the other ranks and launch a task, or steps of jobs. Raises: InputVoidError; AbortedError."""
        arrived_s = time.monotonic()
        group = meet(self.endpoint, works[0].message)
        started_s = time.monotonic()
        with stop_checks.watching(self._watch_of(works)):
            execute(self.adapters, works, group)
        is_first_use = self.note_used({task_kind(each, self._rank) for each in works})
        for work in works:
            work.total = jobs.sum_of(work.made)
            work.note(is_first_use=is_first_use, waited_s=work.times.waited_s + started_s - arrived_s)
        share_time(works, started_s, time.monotonic())

    def _watch_of(self, works: Sequence[RankTask]) -> stop_checks.Watch:
        numbers = [work.number for work in works]
        return stop_checks.Watch(lambda: all(map(self._dispatches.is_void, numbers)))

    def finish(self, work: RankTask) -> None:
        """Wait for the end of a launched task, and complete its times. Raises: InputVoidError."""

    def store(self, tensor: torch.Tensor, place: memoryview) -> None:
        """Copy a computed dense tensor into a slab; the copy is complete on return."""
        jobs.store_bytes(tensor, place)

    def store_rows(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a rank's rows of all frames into the writer's memory; complete on return."""
        target.copy_(rows)

    def send(self, shipment: jobs.Shipment, message: SendState) -> None:
        """Send, or enqueue, state that a job's next task needs on other ranks."""
        jobs.send_state(self.endpoint, shipment.fields, message.transfers, dispatch=message.number)

    def await_sent(self, message: SendState) -> None:
        """Wait until it has left. Raises: the error of a receiver."""

    def drain(self) -> None:
        """Wait until the device has done all that the calling thread has launched."""

    def memory_use(self) -> MemoryUse:
        """The memory that this rank has used since `forget_peaks`."""
        return MemoryUse(peak_bytes())

    def forget_peaks(self) -> None:
        """Another run begins."""
        forget_peak()

    def note_shortage(self) -> None:
        """A task ran out of memory: release what is kept for later."""

    def exit_if_lost(self, error: BaseException) -> None:
        """End the process if the error means that it has lost the device."""


def task_kind(work: RankTask, rank: int) -> tuple[object, ...]:
    """What tasks have in common that run the same code on equal shapes, at the same place in a layout."""
    start, layout = work.job.start, work.message.layout
    return start.checkpoint, work.task.stage, start.shape, layout.degrees, layout.slot_of(rank)


def meet(endpoint: Any, message: RunTask) -> Collectives | None:
    """The group of a task on several ranks when all of them are there; None for one rank."""
    if message.layout.degree == 1:
        return None
    group: Collectives = endpoint.group(
        Descriptor(message.number, message.layout, message.incarnations), timeout_s=message.wait_s
    )
    group.enter()
    return group


def share_time(works: Sequence[RankTask], started_s: float, ended_s: float) -> None:
    """Each of shared steps gets an equal part of their time, in turn."""
    share_s = (ended_s - started_s) / len(works)
    for place, work in enumerate(works):
        work.note(started_s=started_s + place * share_s, ended_s=started_s + (place + 1) * share_s)


def execute(adapters: Mapping[str, Adapter], works: Sequence[RankTask], group: Collectives | None) -> None:
    """Run a task, or steps of several jobs, which share reads of blocks; one that raises gets its `error`."""
    adapter = adapters[works[-1].job.start.checkpoint]
    if len(works) == 1:
        works[0].made = _executed(adapter, works[0], None if group is None else parallel_from(group))
        return
    steps = [partial(_take_step, adapter, work) for work in works]
    in_turns(steps) if adapter.takes_turns else [step() for step in steps]


def _take_step(adapter: Adapter, work: RankTask) -> None:
    try:
        work.made = _executed(adapter, work, None)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they hold tensors while the others go on
        work.error = error


def _executed(adapter: Adapter, work: RankTask, parallel: Parallel | None) -> dict[str, Fields]:
    task, spec, artifacts = work.task, work.job.start.spec, work.job.artifacts
    match task.stage:
        case Stage.ENCODE:
            return {"prompt": adapter.encode(spec)}
        case Stage.PREPARE:
            condition, latents = adapter.prepare(spec, artifacts["prompt"])
            return {"condition": condition, "latents": latents}
        case Stage.DENOISE | Stage.REFINE:
            assert task.step is not None
            return {"latents": adapter.denoise(*step_input(work.job), step=task.step, parallel=parallel)}
        case Stage.APPROXIMATE:
            assert task.step is not None
            return {"latents": adapter.approximate(*step_input(work.job), step=task.step)}
        case Stage.DECODE:
            return {"frames": adapter.decode(spec, artifacts["latents"], parallel=parallel)}
