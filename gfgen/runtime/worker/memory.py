"""The GPU memory that a rank's tasks take; copies from and to host memory (`Staging`).

torch keeps the memory that it has taken from the device. To get more it waits for all that runs there, with
the context locked, so that no other thread of the rank can send or publish. If the device waits for a rank
that waits for this one, nothing moves until the control plane gives the task up (recovery.py). So a task
counts as familiar if one of its kind was launched before without asking the device, and as much memory is
free as that one took, on the same stream. Such a launch may still ask, if free memory lies in small pieces;
then its kind is familiar no more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from gfgen.runtime.worker.jobs import as_bytes

_WITHOUT_TASKS = 0  # the default stream, which a worker leaves when it has loaded its first models


class _Look(NamedTuple):
    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    num_asked: int  # how often torch took memory from the device, or gave some back

    @property
    def free_bytes(self) -> int:
        """Kept by torch and not in use."""
        return self.reserved_bytes - self.allocated_bytes


class _Segments(NamedTuple):
    num_asked: int  # if the number is unchanged, the segments are the same
    allocated_bytes: int  # if this is unchanged as well, assume the same parts of the segments in use
    own_bytes: int
    free_bytes: int
    settled_bytes: int  # in use on the stream without tasks: weights, which stay until models change


class DeviceMemory:
    """The memory of one rank's device, for its main thread; `stream` is the handle of the one for tasks."""

    def __init__(self, device: torch.device, *, stream: int) -> None:
        self._device = device
        self._stream = stream
        self._segments: _Segments | None = None
        self._needed: dict[Hashable, int] = {}  # by familiar kind of task: what its launch took at once
        self._peaks: dict[str, int] = {}
        self.last_peak_bytes = self.last_own_bytes = 0  # of the last launch; without what was in use before
        self.beside_bytes = 0  # of weights that torch does not know (models/streaming/placing.py)

    def is_familiar(self, kinds: Collection[Hashable]) -> bool:
        """Whether a task that is of all of these kinds is likely to be launched without asking the device."""
        if not self.is_known(kinds):
            return False
        needed, look = max(self._needed[kind] for kind in kinds), self._look()
        if needed == 0:
            return True
        segments = self._segments
        if segments is None or segments.num_asked != look.num_asked:
            segments = self._list_segments(look)
        if needed <= segments.own_bytes - (look.allocated_bytes - segments.settled_bytes):
            return True  # even if everything but weights were in use on the stream of tasks
        if segments.allocated_bytes != look.allocated_bytes:
            segments = self._list_segments(look)
        return needed <= segments.free_bytes

    def is_known(self, kinds: Collection[Hashable]) -> bool:
        """The same for launches on another stream, by the memory that torch keeps for all streams."""
        if not all(kind in self._needed for kind in kinds):
            return False
        return max(self._needed[kind] for kind in kinds) <= self._look().free_bytes

    @contextmanager
    def launching(self, kinds: Collection[Hashable], *, model: str | None = None) -> Iterator[None]:
        """Wrap the launch of a task; if it raises, its kinds stay as they were."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(self._device)
        before = self._look()
        yield
        after = self._look()
        self.last_peak_bytes = after.peak_bytes + self.beside_bytes
        self.last_own_bytes = after.peak_bytes - before.allocated_bytes
        if model is not None:
            self._peaks[model] = max(self._peaks.get(model, 0), self.last_peak_bytes)
        for kind in kinds:
            if after.num_asked == before.num_asked:
                self._needed[kind] = max(0, self.last_own_bytes)
            else:
                self._needed.pop(kind, None)

    @property
    def peaks(self) -> Mapping[str, int]:
        """By model: the most that was in use while one of its tasks was launched, weights included."""
        return dict(self._peaks)

    @property
    def reserved_bytes(self) -> int:
        """Memory that torch and weights have taken from the device."""
        return self._look().reserved_bytes + self.beside_bytes

    def forget(self) -> None:
        """Forget the peaks: another run begins."""
        self._peaks.clear()

    def _list_segments(self, look: _Look) -> _Segments:
        """Takes milliseconds where models have thousands of tensors; `_look` takes microseconds."""
        own, free, settled = 0, 0, 0
        for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
            if segment["device"] != self._device.index or tuple(segment["segment_pool_id"]) != (0, 0):
                continue
            if segment["stream"] == self._stream:
                own += segment["total_size"]
                free += sum(block["size"] for block in segment["blocks"] if block["state"] == "inactive")
            elif segment["stream"] == _WITHOUT_TASKS:
                settled += segment["allocated_size"]
        self._segments = _Segments(look.num_asked, look.allocated_bytes, own, free, settled)
        return self._segments

    def _look(self) -> _Look:
        stats: Mapping[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        if not stats:  # of a device that was not used yet
            return _Look(0, 0, 0, 0)
        allocated = stats["allocated_bytes"]["all"]
        return _Look(
            allocated["current"],
            allocated["peak"],
            stats["reserved_bytes"]["all"]["current"],
            stats["num_device_alloc"] + stats["num_device_free"],
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python or in torch, whose CPU allocator has no class for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    texts = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


STAGING_BYTES = 64 << 20  # pinned for each direction. No more later: pinning waits for the device


class Staging:
    """Between a device and host memory, through a pinned buffer of two halves; one stream, one thread."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._device = device
        self._halves = torch.empty((2, STAGING_BYTES // 2), dtype=torch.uint8, pin_memory=True).unbind()
        self._used: list[torch.cuda.Event | None] = [None, None]  # by half: when the device is done with it
        self._turn = 0

    def store(self, tensor: torch.Tensor, place: memoryview) -> None:
        """Copy a dense tensor, which has been computed, into host memory; it is there on return."""
        source, target = as_bytes(tensor), torch.frombuffer(place, dtype=torch.uint8)
        self._store(source, target, self._spans(source))

    def store_rows(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        """The same for frames, uint8 [F, H, W, 3], which in host memory are rows of taller ones."""
        self._store(rows, target, _pieces(rows.shape, self._halves[0].numel()))

    def brought(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a dense tensor on the device, enqueued; the host memory may change on return."""
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = as_bytes(tensor), as_bytes(found)
        for at in self._spans(source):
            half = self._next_half(source[at])
            half.copy_(source[at])
            target[at].copy_(half, non_blocking=True)
            self._note_use()
        return found

    def _store(self, source: torch.Tensor, target: torch.Tensor, pieces: Iterable[Any]) -> None:
        arriving: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]] = []
        for at in pieces:
            if len(arriving) == 2:
                _empty(*arriving.pop(0))
            half = self._next_half(source[at])
            half.copy_(source[at], non_blocking=True)
            arriving.append((half, target[at], self._note_use()))
        for each in arriving:
            _empty(*each)

    def _spans(self, source: torch.Tensor) -> Iterator[slice]:
        """Slices of as many bytes as a half holds."""
        size = self._halves[0].numel()
        return (slice(begin, begin + size) for begin in range(0, source.numel(), size))

    def _next_half(self, piece: torch.Tensor) -> torch.Tensor:
        """A part of the free half in the shape of a piece."""
        self._turn = 1 - self._turn
        if (used := self._used[self._turn]) is not None:
            used.synchronize()
        return self._halves[self._turn][: piece.numel()].view(piece.shape)

    def _note_use(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        self._used[self._turn] = event
        return event


def _pieces(shape: Sequence[int], room_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Frames, or rows of a frame, of uint8 [F, H, W, 3] that fit into `room_bytes`, one after the other."""
    num_frames, num_rows, row_bytes = shape[0], shape[1], math.prod(shape[2:])
    rows = min(num_rows, room_bytes // row_bytes)
    frames = max(1, room_bytes // (num_rows * row_bytes))
    for frame in range(0, num_frames, frames):
        for row in range(0, num_rows, rows):
            yield slice(frame, frame + frames), slice(row, row + rows)


def _empty(place: torch.Tensor, target: torch.Tensor, there: torch.cuda.Event) -> None:
    there.synchronize()
    target.copy_(place)
