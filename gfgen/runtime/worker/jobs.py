"""The state of a job on one rank: latents from the last task's ranks or its slab; the rest from the slab."""

from __future__ import annotations

import functools
import math
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from gfgen.errors import ModelError
from gfgen.graph import Task
from gfgen.models.families.adapter import SAMPLE, SOUND, SOUND_RATE, UNCHECKED, Fields, StepInput
from gfgen.runtime.ipc.messages import RankTimes, RunTask, StartJob, Transfer
from gfgen.runtime.ipc.slab import OutputShape, Slab, map_for
from gfgen.runtime.worker.dispatches import InputVoidError

Store = Callable[[torch.Tensor, memoryview], None]  # copies a dense tensor to host memory; complete on return
TakeIn = Callable[[Fields], Fields]  # copies fields of a slab to the device; the slab may change then

_POLL_S = (0.0, 0.0, 5e-5, 1e-4, 2e-4)  # pauses between looks at a producer's word

Outline = tuple[Mapping[str, tuple[torch.dtype, tuple[int, ...]]], Mapping[str, Any]]
"""Dtype and shape of each tensor of an artifact, and its scalars."""


class Shipment(NamedTuple):
    """Latents to send on."""

    fields: Fields
    is_there: Any = None  # the device's event that follows them if they are only enqueued, otherwise None


def sum_of(made: Mapping[str, Fields]) -> torch.Tensor | None:
    """The sum of a task's output, which is NaN or infinite if any number is. None if it has no floats."""
    tensors: list[torch.Tensor] = []
    for fields in made.values():
        if UNCHECKED in fields.scalars:
            continue
        sample = fields.tensors.get(SAMPLE)
        tensors += fields.tensors.values() if sample is None else [sample]
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors if tensor.is_floating_point()]
    return functools.reduce(torch.add, sums) if sums else None


def require_finite(made: Mapping[str, Fields], total: torch.Tensor | None) -> None:
    """Raises ModelError if `total`, which is `sum_of(made)`, shows NaN or infinity in what a task made."""
    if total is None or math.isfinite(total):
        return
    names = " and ".join(name for name, fields in made.items() if fields.tensors)
    advice = "--vae-dtype float32" if "frames" in made else "a smaller guidance_scale or other weights"
    raise ModelError(f"NaN or infinity in the {names}; {advice} may help")


def copied(fields: Fields) -> Fields:
    return Fields({name: tensor.clone() for name, tensor in fields.tensors.items()}, fields.scalars)


def store_bytes(tensor: torch.Tensor, place: memoryview) -> None:
    """Copy a tensor on the CPU into host memory."""
    torch.frombuffer(place, dtype=torch.uint8).copy_(as_bytes(tensor))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


@dataclass(slots=True, eq=False)
class RankJob:
    """One rank's state of a job."""

    start: StartJob
    slab: Slab
    take_in: TakeIn = copied
    artifacts: dict[str, Fields] = field(default_factory=dict)
    makers: dict[str, int | None] = field(default_factory=dict)
    """By constant (prompt, condition) that is here: the dispatch that made it; None for long ended ones."""
    producer: int | None = None  # the dispatch that made the latents here; None if there are none
    is_there: Any = None  # the event of those latents, as in `Shipment`
    wanted: dict[int, list[Future[Shipment]]] = field(default_factory=dict)  # by dispatch: of the sender

    def keep(self, made: Mapping[str, Fields], *, dispatch: int, is_there: Any = None) -> None:
        """Keep what a task has made or enqueued, and hand latents to the sender."""
        self.artifacts.update(made)
        self.makers |= dict.fromkeys(made.keys() - {"latents"}, dispatch)
        if "latents" in made:
            self.producer, self.is_there = dispatch, is_there
            for future in self.wanted.pop(dispatch, ()):
                future.set_result(Shipment(made["latents"], is_there))

    def latents_of(self, dispatch: int) -> Future[Shipment]:
        """The latents of a dispatch on this rank, now or when it has made them."""
        future: Future[Shipment] = Future()
        if self.producer == dispatch:
            future.set_result(Shipment(self.artifacts["latents"], self.is_there))
        else:
            self.wanted.setdefault(dispatch, []).append(future)
        return future

    def drop(self, dispatch: int) -> None:
        """Use nothing that a failed dispatch made. Artifacts stay: another such task may run with them."""
        if self.producer == dispatch:
            self.producer = None
        for name, maker in list(self.makers.items()):
            if maker == dispatch:
                del self.makers[name]
        for future in self.wanted.pop(dispatch, ()):
            future.set_exception(InputVoidError())

    def drop_all(self) -> None:
        """The job has ended: expect no more latents."""
        for dispatch in list(self.wanted):
            self.drop(dispatch)

    def hold(self, latents: Fields, *, producer: int | None) -> None:
        """Keep latents that dispatch `producer` made on other ranks; None: for one attempt alone."""
        self.artifacts["latents"] = latents
        self.producer, self.is_there = producer, None

    def fetch_constants(self, task: Task, producer: int | None, *, is_void: Callable[[], bool]) -> None:
        """Copy prompt and condition from the slab, if latents came first. Raises: InputVoidError by
        `is_void`."""
        versions = {"prompt": 1, "condition": 2} if task.index > 1 else {"prompt": 1} if task.index else {}
        for name, version in versions.items():
            if name in self.makers:
                continue
            is_new = version == task.index
            if is_new:
                _await_word(partial(self._is_made_by, producer, name, version), is_void)
            self.artifacts[name] = fetch(self.slab, name, version, self.take_in)
            self.makers[name] = producer if is_new else None

    def _is_made_by(self, producer: int | None, name: str, version: int) -> bool:
        return self.slab.producer(name, version) == producer

    def await_input(self, task: Task, message: RunTask, *, is_void: Callable[[], bool]) -> None:
        """Wait until the slab has a task's input, unless it is here. Raises: InputVoidError by `is_void`."""
        if message.producer is None or self.producer == message.producer or message.transfers:
            return
        name = "prompt" if task.index == 1 else "latents"
        _await_word(partial(self._is_made_by, message.producer, name, task.index), is_void)

    def await_outline(self, task: Task, producer: int, *, is_void: Callable[[], bool]) -> Outline:
        """The outline of the latents that this dispatch makes elsewhere. Raises: InputVoidError."""
        _await_word(lambda: self.slab.outliner("latents", task.index) == producer, is_void)
        listed, scalars = self.slab.outline("latents", task.index)
        return {name: (dtype, shape) for name, dtype, shape in listed}, scalars


@dataclass(slots=True)
class RankTask:
    """A dispatch as one rank runs it, and how that went."""

    message: RunTask
    job: RankJob
    task: Task
    frames_fd: int | None = None  # the writer's memory, for a decode; the thread for frames closes it
    made: dict[str, Fields] = field(default_factory=dict)  # what the task makes, which may be only enqueued
    total: torch.Tensor | None = None  # `sum_of` its output; in host memory when the task has ended
    is_there: Any = None  # the device's event that follows the output; None if it is there
    launch: Any = None
    times: RankTimes = field(default_factory=partial(RankTimes, 0, 0.0, 0.0))
    error: Exception | None = None  # why it has failed, if steps of other jobs that ran with it have not

    @property
    def number(self) -> int:
        return self.message.number

    def note(self, **times: Any) -> None:
        """Set fields of `times`."""
        self.times = self.times._replace(**times)


def step_input(job: RankJob) -> StepInput:
    return StepInput(
        job.start.spec, job.artifacts["prompt"], job.artifacts["condition"], job.artifacts["latents"]
    )


def _await_word(is_there: Callable[[], bool], is_void: Callable[[], bool]) -> None:
    looks = 0
    while not is_there():
        if is_void():
            raise InputVoidError
        time.sleep(_POLL_S[min(looks, len(_POLL_S) - 1)])
        looks += 1


def output_places(made: Fields, fd: int, shape: Sequence[int] | None) -> dict[str, torch.Tensor]:
    """The places of this rank's rows of all frames, and of sound, in the writer's memory.

    shape: of all frames, uint8 [F, H, W, 3]; None if only the decode knows it, which runs on one rank. Then
    the memory gets the size that it needs.
    """
    rows, sound = made.tensors["frames"], made.tensors.get(SOUND)
    assert rows.dtype == torch.uint8
    if shape is not None:
        memory, first_row = mmap.mmap(fd, math.prod(shape)), made.number("first_row")
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=math.prod(shape)).view(*shape)
        return {"frames": whole[:, first_row : first_row + rows.shape[1]]}
    num_frames, height, width, channels = rows.shape
    output = OutputShape((num_frames, height, width, channels))
    if sound is not None:
        sound_shape = (sound.shape[0], sound.shape[1])
        output = replace(output, sound=sound_shape, sound_rate=made.number(SOUND_RATE))
    memory = map_for(fd, output)
    place = partial(torch.frombuffer, memory)
    places = {"frames": place(dtype=torch.uint8, count=rows.numel(), offset=output.pictures_offset)}
    if sound is not None:
        places[SOUND] = place(dtype=torch.float32, count=sound.numel(), offset=output.sound_offset)
    return {name: flat.view(made.tensors[name].shape) for name, flat in places.items()}


def publish(
    slab: Slab, name: str, version: int, fields: Fields, *, producer: int, store: Store = store_bytes
) -> None:
    """Copy an artifact into the slab and show it as the output of this dispatch."""
    places = _places(slab, name, version, fields)
    for tensor, place in zip(fields.tensors.values(), places, strict=True):
        if place.nbytes:
            store(tensor.contiguous(), place)
    slab.show(name, version, producer=producer)


def outline(slab: Slab, name: str, version: int, fields: Fields, *, producer: int) -> None:
    """Publish the outline of an artifact that this dispatch makes."""
    _places(slab, name, version, fields)
    slab.show_outline(name, version, producer=producer)


def _places(slab: Slab, name: str, version: int, fields: Fields) -> list[memoryview]:
    meta = [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in fields.tensors.items()]
    sizes = [tensor.numel() * tensor.element_size() for tensor in fields.tensors.values()]
    return slab.places(name, version, (meta, fields.scalars), sizes)


def fetch(slab: Slab, name: str, version: int, take_in: TakeIn = copied) -> Fields:
    """An artifact of the slab, copied by `take_in`."""
    (layout, scalars), memory, position = slab.fetch(name, version)
    shared = Fields(scalars=scalars)
    for key, dtype, shape in layout:
        count = math.prod(shape)
        if count:
            found = torch.frombuffer(memory, dtype=dtype, count=count, offset=position)
            shared.tensors[key] = found.view(shape)
        else:
            shared.tensors[key] = torch.empty(shape, dtype=dtype)
        position += -(-count * dtype.itemsize // 64) * 64
    return take_in(shared)


def send_state(endpoint: Any, fields: Fields, transfers: Sequence[Transfer], *, dispatch: int) -> None:
    """Send ranges of a job's latents, to each destination in order, without fields that are not there yet."""
    for destination in dict.fromkeys(transfer.destination for transfer in transfers):
        mine = [transfer for transfer in transfers if transfer.destination == destination]
        for label, transfer in enumerate(mine):
            if transfer.field in fields.tensors:
                part = _part(fields.tensors[transfer.field], transfer)
                endpoint.send(part.contiguous(), to=destination, dispatch=dispatch, label=label)


def receive_state(
    recv: Callable[..., torch.Tensor], transfers: Sequence[Transfer], outline: Outline, *, dispatch: int
) -> Fields:
    """Assemble a job's latents, by an endpoint's `recv`, from what `send_state` sends on other ranks."""
    listed, scalars = outline
    fields = Fields(scalars=dict(scalars))
    for source in dict.fromkeys(transfer.source for transfer in transfers):
        theirs = [transfer for transfer in transfers if transfer.source == source]
        for label, transfer in enumerate(theirs):
            if transfer.field not in listed:
                continue
            dtype, shape = listed[transfer.field]
            part_shape = [*shape]
            part_shape[transfer.axis] = transfer.stop - transfer.start
            part = recv(part_shape, dtype, source=source, dispatch=dispatch, label=label)
            if part_shape == list(shape):
                fields.tensors[transfer.field] = part
            else:
                if transfer.field not in fields.tensors:
                    fields.tensors[transfer.field] = torch.empty(shape, dtype=dtype, device=part.device)
                whole = fields.tensors[transfer.field]
                _part(whole, transfer).copy_(part)
    return fields


def _part(tensor: torch.Tensor, transfer: Transfer) -> torch.Tensor:
    return tensor.narrow(transfer.axis, transfer.start, transfer.stop - transfer.start)
