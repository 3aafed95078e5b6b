"""Copies between a GPU and host memory, through pinned memory that is allocated once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from gfgen.runtime.worker.jobs import as_bytes

STAGING_BYTES = 64 << 20
"""Pinned host memory for each direction. No more is pinned later, because pinning waits for the device."""


class Staging:
    """Between a device and host memory, through a pinned buffer of two halves; one stream, one thread."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._device = device
        self._halves = torch.empty((2, STAGING_BYTES // 2), dtype=torch.uint8, pin_memory=True).unbind()
        self._used: list[torch.cuda.Event | None] = [None, None]
        """By half: when the device is done with it."""
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
