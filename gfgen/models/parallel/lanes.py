"""Exchanges beside computation: on a GPU on a stream of their own, on a CPU in the order of the calls.

Order: a rank's exchanges never run at the same time, for they share its context (csrc/gfc/cuda/
context.h). So all of them from a `beside` to the next `join` are issued inside `beside`, and with
them only; what the task's stream does meanwhile is computation. `beside` makes them wait for what
the task's stream was given before, `join` makes the task's stream wait for them. Forks and joins
are events, which a captured graph keeps as dependencies.

Memory that is allocated inside `beside` belongs to the lane's stream. It is used again by what
comes later inside a `beside`, which waits for all readers on the task's stream that were enqueued
before; so holding it until those readers are enqueued is enough.
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
        """What is called inside starts after all that came before, and runs beside what follows."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """All that has been called beside so far."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: Mark) -> None:
        """What follows runs after what was called beside up to the mark."""
        if self._stream is not None and mark is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)


def synchronize(device: torch.device) -> None:
    """Wait for all that was called beside, also where an exception came before the join."""
    if device.type == "cuda":
        _exchange_stream(device).synchronize()


@cache
def _exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device. Of high priority: its few blocks go first when a multiprocessor is free."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
