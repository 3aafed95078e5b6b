"""Captured sequences of collectives that know no group.

    captured = capture(group, lambda group: step(group))      # once per shape and degrees
    group = endpoint.group(other_descriptor); group.enter()   # any ranks, same degrees
    captured.replay(group)

A capture holds the context's address, local shapes and compile-time degrees, no ranks and no
slot: kernels find both in the context, where `enter` has put them. Local shard lengths are part of
what was captured, so a capture serves all slots that have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from gfgen.errors import LayoutError
from gfgen.gfc.cuda.group import CudaGroup

T = TypeVar("T")


class Captured(Generic[T]):
    """A CUDA graph of collectives and computation; `result` is what its function returned."""

    def __init__(self, group: CudaGroup, function: Callable[[CudaGroup], T], *, copies: int = 1) -> None:
        self._degrees = group.descriptor.layout.degrees
        run = group._run
        before = list(run.counts)
        self._parities = [count % 2 for count in before]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(copies):
                self.result = function(group)
        # Capturing runs nothing: the device has not counted these.
        self._counted = [after - count for after, count in zip(run.counts, before, strict=True)]
        run.counts[:] = before

    def replay(self, group: CudaGroup) -> T:
        """Runs the sequence on the current stream among the ranks of an entered group."""
        run = group._run
        self.match_banks(group)
        self._graph.replay()
        for kind, counted in enumerate(self._counted):
            run.counts[kind] += counted
        return self.result

    def match_banks(self, group: CudaGroup) -> None:
        """What `replay` does first: brings the group's counts to where those of the capture began.

        Addresses in the graph fix the bank of each exchange; a barrier more sets it right.
        """
        if group.descriptor.layout.degrees != self._degrees:
            raise LayoutError(f"captured for degrees {self._degrees}, replayed on {group.descriptor.layout}")
        for kind, counted in enumerate(self._counted):
            if counted and group._run.counts[kind] % 2 != self._parities[kind]:
                group.of_kind(kind).barrier()


def capture(group: CudaGroup, function: Callable[[CudaGroup], T], *, copies: int = 1) -> Captured[T]:
    """Captures what a function does on a group that has been entered.

    The function has run once before, so that everything is loaded and prepared.
    """
    return Captured(group, function, copies=copies)
