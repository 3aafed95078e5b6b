"""What a rank's tasks take of its GPU's memory.

torch keeps the memory that it has taken from the device, and gives it out again. Where that is not
enough it asks the device for more, or gives back what it keeps; then it waits for all that runs on
the device, with the context locked, so that no other thread of the rank can send or publish. Where
the device waits for a rank that waits for this one, nothing would ever move again. So a task counts
as familiar when one of its kind was launched before without asking the device, and when as much is
free as that one took: then nothing of its launch can wait.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Look:
    """torch's counts at a moment."""

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    num_asked: int
    """How often it took memory from the device, or gave some back."""

    @property
    def free_bytes(self) -> int:
        """Kept by torch, and used by nobody."""
        return self.reserved_bytes - self.allocated_bytes


class DeviceMemory:
    """The memory of one rank's device as its main thread uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._needed: dict[Hashable, int] = {}
        """By familiar kind of task: the bytes that its launch took at once."""
        self._peaks: dict[str, int] = {}

    def is_familiar(self, kinds: Collection[Hashable]) -> bool:
        """Whether a task that is of all of these kinds can be launched without waiting for the device."""
        if not all(kind in self._needed for kind in kinds):
            return False
        return max(self._needed[kind] for kind in kinds) <= self._look().free_bytes

    @contextmanager
    def launching(self, kinds: Collection[Hashable], *, model: str | None = None) -> Iterator[None]:
        """Around the launch of a task; one that raises leaves its kinds as they were."""
        self._reset_peak()
        before = self._look()
        yield
        after = self._look()
        if model is not None:
            self._peaks[model] = max(self._peaks.get(model, 0), after.peak_bytes)
        for kind in kinds:
            if after.num_asked == before.num_asked:
                self._needed[kind] = max(0, after.peak_bytes - before.allocated_bytes)
            else:
                self._needed.pop(kind, None)

    @property
    def peaks(self) -> Mapping[str, int]:
        """By model: the most that was in use while one of its tasks was launched, weights included."""
        return dict(self._peaks)

    @property
    def reserved_bytes(self) -> int:
        """What torch has taken from the device by now."""
        return self._look().reserved_bytes

    def forget(self) -> None:
        """Count anew: another run begins."""
        self._peaks.clear()

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
