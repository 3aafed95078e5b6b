"""The GPU memory that a rank's tasks take.

torch keeps the memory that it has taken from the device and reuses it. If that is not enough, it asks the
device for more or gives memory back. Then it waits for everything that runs on the device, with the context
locked, so that no other thread of the rank can send or publish. If the device waits for a rank that waits for
this one, nothing moves until the control plane gives the task up (recovery.py). So a task counts as familiar
if a task of its kind was launched before without asking the device, and if as much memory is free as that one
took, on the stream of the launch: a task cannot use what torch keeps for another stream or for records.

A familiar launch is unlikely to ask the device, but it may: free memory may lie in pieces that are too small.
A kind whose launch asked the device is not familiar the next time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_WITHOUT_TASKS = 0
"""The default stream, which a worker leaves when it has loaded its first models."""


@dataclass(frozen=True, slots=True)
class _Look:
    """torch's counts at a moment."""

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    num_asked: int
    """How often torch took memory from the device, or gave some back."""

    @property
    def free_bytes(self) -> int:
        """Kept by torch and not in use."""
        return self.reserved_bytes - self.allocated_bytes


@dataclass(frozen=True, slots=True)
class _Segments:
    """The memory that torch has taken from the device at a moment, by a list of all segments."""

    num_asked: int
    """If the number is unchanged, the segments are the same."""
    allocated_bytes: int
    """If this is unchanged as well, assume that the same parts of the segments are in use."""
    own_bytes: int
    """In segments of the stream of tasks."""
    free_bytes: int
    """The unused part of `own_bytes`."""
    settled_bytes: int
    """In use on the stream without tasks: weights, which stay until models change."""


class DeviceMemory:
    """The memory of one rank's device, for its main thread; `stream` is the handle of the one for tasks."""

    def __init__(self, device: torch.device, *, stream: int) -> None:
        self._device = device
        self._stream = stream
        self._segments: _Segments | None = None
        self._needed: dict[Hashable, int] = {}
        """By familiar kind of task: the bytes that its launch took at once."""
        self._peaks: dict[str, int] = {}
        self.last_peak_bytes = self.last_own_bytes = 0
        """Of the last launch; without what was in use before."""

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
        self._reset_peak()
        before = self._look()
        yield
        after = self._look()
        self.last_peak_bytes = after.peak_bytes
        self.last_own_bytes = after.peak_bytes - before.allocated_bytes
        if model is not None:
            self._peaks[model] = max(self._peaks.get(model, 0), after.peak_bytes)
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
        """Memory that torch has taken from the device."""
        return self._look().reserved_bytes

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

    def _reset_peak(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(self._device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python or in torch, whose CPU allocator has no class for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    texts = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
