"""The ranks that share one denoising step, as an adapter sees them; and lanes for their exchanges.

The worker makes a `Parallel` from the dispatch's group. It is all that adapters and hooks know of layouts,
processes and arenas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import Resharding
from gfgen.layout import Degrees

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RehearsalGroup(Collectives):
    """A group as one rank sees it whose other ranks take no part; see `group.Collectives`.

    What a shared forward needs before it runs without delay (kernels compiled and loaded) depends on shapes
    alone. So a rank can prepare without the others: exchanges return zeros in the shapes that the others
    would have sent. The results are meaningless.
    """

    size: int
    slot: int
    room_bytes: int | None
    is_far: bool = False

    def _move(
        self, tensors: Sequence[Tensor], resharding: Resharding | None, *, in_arena: bool
    ) -> tuple[Tensor, ...]:
        assert resharding is not None
        return tuple(x.new_zeros(resharding.result_shape(x.shape, self.slot)) for x in tensors)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the ranks of a layout share a denoising step.

    cfg: one rank of each guidance branch, in the order of the branches; they exchange noise predictions.
    sequence: the ranks that share the tokens of one branch, by slot. Each of them is in one group
    `ulysses`, whose ranks have consecutive slots and share heads, in one `ring`, whose ranks have the
    same heads and share keys, and in one `torus`, whose ranks share heads, too, but during attention.
    num_chunks: chunks of heads, for which exchange and attention overlap; None: the fastest number.
    """

    cfg: Collectives
    sequence: Collectives
    ulysses: Collectives
    ring: Collectives
    num_chunks: int | None = None
    torus: Collectives = RehearsalGroup(1, 0, None)

    @property
    def degrees(self) -> Degrees:
        """As `Layout.degrees`."""
        degrees = self.cfg.size, self.ulysses.size, self.ring.size
        return degrees if self.torus.size == 1 else (*degrees, self.torus.size)


def parallel_from(group: Collectives, *, num_chunks: int | None = None) -> Parallel:
    """The step's ranks, from the group of a whole layout. Involves no other rank."""
    return Parallel(
        cfg=group.subgroup("cfg_pair"),
        sequence=group.subgroup("cfg"),
        ulysses=group.subgroup("ulysses"),
        ring=group.subgroup("ring"),
        num_chunks=num_chunks,
        torus=group.subgroup("torus"),
    )


def rehearsal(parallel: Parallel) -> Parallel:
    groups = {name: getattr(parallel, name) for name in ("cfg", "sequence", "ulysses", "ring", "torus")}
    alone: Any = {
        name: RehearsalGroup(each.size, each.slot, each.room_bytes, each.is_far)
        for name, each in groups.items()
    }
    return replace(parallel, **alone)


@contextmanager
def held(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, and on this thread, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


Mark = torch.cuda.Event | None


class Lane:
    """Where the exchanges of one operator run: on a GPU a stream beside the task's, on a CPU in their order.

    A rank's exchanges must not overlap each other, since they share its context (csrc/gfc/cuda/context.h). So
    all exchanges from a `beside` to the next `join` are issued inside `beside`, and nothing else is. Both are
    events, which a captured graph keeps.

    Memory allocated inside `beside` belongs to the lane's stream: only later work inside a `beside` reuses
    it. So keep the memory until its readers are enqueued on the task's stream.
    """

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
