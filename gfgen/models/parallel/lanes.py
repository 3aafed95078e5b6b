"""Exchanges that overlap computation: on a GPU on a separate stream, on a CPU in the order of the calls.

A rank's exchanges must not overlap each other, since they share its context (csrc/gfc/cuda/context.h). So
all exchanges from a `beside` to the next `join` are issued inside `beside`, and nothing else is; the task's
stream only computes meanwhile. `beside` makes them wait for earlier work of the task's stream, `join` makes
the task's stream wait for them. Both are events, which a captured graph keeps as dependencies.

Memory allocated inside `beside` belongs to the lane's stream. Only later work inside a `beside` reuses it,
and that waits for all readers that were enqueued before on the task's stream. So keep the memory until its
readers are enqueued.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

Mark = torch.cuda.Event | None


class Lane:
    """Where the exchanges of one operator run on a device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _exchange_stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Work issued inside starts after all earlier work and overlaps what follows."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """All work issued inside `beside` so far."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: Mark) -> None:
        """Later work runs after what was issued inside `beside` up to the mark."""
        if self._stream is not None and mark is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)


def synchronize(device: torch.device) -> None:
    """Wait for all work issued inside `beside`, also if an exception prevented the join."""
    if device.type == "cuda":
        _exchange_stream(device).synchronize()


@cache
def _exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device. Of high priority: its few blocks go first when a multiprocessor is free."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
