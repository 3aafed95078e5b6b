"""What one rank keeps of a job, and how the job's state comes to the rank and leaves it.

State reaches a rank from the ranks that ran the last task (`receive_state`, by transfers that
the control plane planned), or from the job's slab in host memory: the prompt's embeddings and
the condition always, the latents when nobody holds them any more.
"""

from __future__ import annotations

import math
import mmap
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gfgen.graph import Task
from gfgen.models.adapter import Fields
from gfgen.runtime.messages import StartJob
from gfgen.runtime.migration import Transfer
from gfgen.runtime.slab import Slab

Store = Callable[[torch.Tensor, memoryview], None]
"""Copies a dense tensor into host memory; it is there when this returns."""
TakeIn = Callable[[Fields], Fields]
"""Copies of fields that lie in a slab, where the rank computes; the slab may change when this returns."""

_POLL_S = (0.0, 0.0, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3)
"""Pauses between looks at a producer's word: short first, a millisecond at last."""
_HEADER_BYTES = 4096
"""Names, shapes and scalars of a job's state, pickled; UniPC's take about 500 bytes."""


class Transfers(Protocol):
    """What an endpoint does between two ranks."""

    def send(self, x: torch.Tensor, *, to: int, dispatch: int, label: int = 0) -> None:
        """Push a tensor to a rank."""
        ...

    def recv(
        self, shape: Sequence[int], dtype: torch.dtype, *, source: int, dispatch: int, label: int = 0
    ) -> torch.Tensor:
        """The tensor that a rank sends under this dispatch and label."""
        ...


class InputVoidError(Exception):
    """The dispatch that was to make this task's input has failed, or this one was given up."""


def copied(fields: Fields) -> Fields:
    """The same fields in memory of their own."""
    return Fields({name: tensor.clone() for name, tensor in fields.tensors.items()}, fields.scalars)


def store_bytes(tensor: torch.Tensor, place: memoryview) -> None:
    """Copy a tensor on the CPU into host memory."""
    torch.frombuffer(place, dtype=torch.uint8).copy_(as_bytes(tensor))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What a dense tensor holds, as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


@dataclass(slots=True, eq=False)
class RankJob:
    """A job as one rank knows it."""

    start: StartJob
    slab: Slab
    take_in: TakeIn = copied
    artifacts: dict[str, Fields] = field(default_factory=dict)
    producer: int | None = None
    """The dispatch that made the latents in `artifacts`; None when they are not here."""
    unfinished: dict[int, Fields] = field(default_factory=dict)
    """Latents by dispatch that a device has yet to make: for its own next task, not for sending on."""
    wanted: dict[int, list[Future[Fields]]] = field(default_factory=dict)
    """Who waits for latents of a dispatch, to send them on."""

    def keep(self, made: Mapping[str, Fields], *, dispatch: int, is_finished: bool = True) -> None:
        """Take over what a task has made, and hand it to those who wait to send it on."""
        self.artifacts.update(made)
        if "latents" in made:
            self.producer = dispatch
            self.unfinished[dispatch] = made["latents"]
            if is_finished:
                self.finish(dispatch)

    def finish(self, dispatch: int) -> None:
        """What a dispatch makes is there: those who wait to send it on may do so."""
        latents = self.unfinished.pop(dispatch, None)
        for future in self.wanted.pop(dispatch, ()) if latents else ():
            assert latents is not None
            future.set_result(latents)

    def latents_of(self, dispatch: int) -> Future[Fields]:
        """The latents that a dispatch made here, or will make here."""
        future: Future[Fields] = Future()
        if self.producer == dispatch and dispatch not in self.unfinished:
            future.set_result(self.artifacts["latents"])
        else:
            self.wanted.setdefault(dispatch, []).append(future)
        return future

    def drop(self, dispatch: int) -> None:
        """A dispatch has failed: nobody will get what it was to make."""
        if self.producer == dispatch:
            self.producer = None
        self.unfinished.pop(dispatch, None)
        for future in self.wanted.pop(dispatch, ()):
            future.set_exception(InputVoidError())

    def drop_all(self) -> None:
        """The job is forgotten: nobody gets what was not made, nor waits for it."""
        for dispatch in list(self.wanted):
            self.drop(dispatch)

    def fetch_constants(self, task: Task) -> None:
        """Copy prompt and condition out of the slab when they are not here yet."""
        versions = {"prompt": 1, "condition": 2} if task.index > 1 else {"prompt": 1} if task.index else {}
        for name, version in versions.items():
            if name not in self.artifacts:
                self.artifacts[name] = fetch(self.slab, name, version, self.take_in)

    def fetch_latents(self, task: Task, producer: int) -> None:
        """Copy the latents that `producer` published out of the slab."""
        self.artifacts["latents"] = fetch(self.slab, "latents", task.index, self.take_in)
        self.producer = producer

    def await_published(self, task: Task, producer: int, *, is_void: Callable[[], bool]) -> None:
        """Wait until the slab has what the task needs, made by that very dispatch.

        Raises: InputVoidError as soon as `is_void` says that it will not come.
        """
        name = "prompt" if task.index == 1 else "latents"
        looks = 0
        while self.slab.producer(name, task.index) != producer:
            if is_void():
                raise InputVoidError
            time.sleep(_POLL_S[min(looks, len(_POLL_S) - 1)])
            looks += 1


def frames_shape(job: RankJob) -> tuple[int, ...]:
    """Of a job's frames as the writer sees them: [F, H, W, 3]."""
    ((_, shape, _),) = job.start.trajectory.artifact("frames").fields
    return shape


def place_of(frames: Fields, memory: mmap.mmap, shape: Sequence[int]) -> torch.Tensor:
    """Where a rank's rows of all frames belong in memory of this shape, uint8 [F, H, W, 3]."""
    rows, first_row = frames.tensors["frames"], frames.scalars["first_row"]
    assert rows.dtype == torch.uint8
    assert isinstance(first_row, int)
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=math.prod(shape)).view(*shape)
    return whole[:, first_row : first_row + rows.shape[1]]


def publish(
    slab: Slab, name: str, version: int, fields: Fields, *, producer: int, store: Store = store_bytes
) -> None:
    """Copy an artifact into the slab and make it visible as made by this dispatch."""
    tensors = {key: tensor.contiguous() for key, tensor in fields.tensors.items()}
    meta = ([(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()], fields.scalars)
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    places = slab.places(name, version, meta, sizes)
    for tensor, place in zip(tensors.values(), places, strict=True):
        if place.nbytes:
            store(tensor, place)
    slab.show(name, version, producer=producer)


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


def send_state(endpoint: Transfers, fields: Fields, transfers: Sequence[Transfer], *, dispatch: int) -> None:
    """Send ranges of a job's latents: to each destination a header, then its ranges in order.

    Fields that the solver does not have yet are passed over; the header says which there are.
    """
    device = next(iter(fields.tensors.values())).device
    header = _header(fields).to(device)
    for destination in dict.fromkeys(transfer.destination for transfer in transfers):
        mine = [transfer for transfer in transfers if transfer.destination == destination]
        endpoint.send(header, to=destination, dispatch=dispatch, label=0)
        for label, transfer in enumerate(mine, start=1):
            if transfer.field in fields.tensors:
                part = _part(fields.tensors[transfer.field], transfer)
                endpoint.send(part.contiguous(), to=destination, dispatch=dispatch, label=label)


def receive_state(
    endpoint: Transfers,
    transfers: Sequence[Transfer],
    *,
    dispatch: int,
    require: Callable[[int], None] = lambda source: None,
) -> Fields:
    """Put a job's latents together from what the sources send; the counterpart of `send_state`.

    require: raises when what a rank was to send has not come; called when it is about to be read.
    """
    fields = Fields()
    for source in dict.fromkeys(transfer.source for transfer in transfers):
        theirs = [transfer for transfer in transfers if transfer.source == source]
        header = endpoint.recv((_HEADER_BYTES,), torch.uint8, source=source, dispatch=dispatch, label=0)
        on_host = header.cpu()
        require(source)
        layout, fields.scalars = pickle.loads(on_host.numpy().data)
        for label, transfer in enumerate(theirs, start=1):
            if transfer.field not in layout:
                continue
            dtype, shape = layout[transfer.field]
            part_shape = [*shape]
            part_shape[transfer.axis] = transfer.stop - transfer.start
            part = endpoint.recv(part_shape, dtype, source=source, dispatch=dispatch, label=label)
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


def _header(fields: Fields) -> torch.Tensor:
    layout: dict[str, Any] = {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in fields.tensors.items()
    }
    packed = pickle.dumps((layout, fields.scalars))
    assert len(packed) <= _HEADER_BYTES, f"the header of a job's state takes {len(packed)} bytes"
    header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
    header[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return header
