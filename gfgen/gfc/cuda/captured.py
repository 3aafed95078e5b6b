"""CUDA graphs of collectives that run on any group of the same degrees.

    captured = Captured(group, lambda group: step(group))     # once per shape and degrees
    group = endpoint.group(other_descriptor); group.enter()   # any ranks, same degrees
    captured.replay(group)

A graph holds the context's address, local shapes and degrees, but no ranks and no slot: kernels read both
from the context, where `enter` has put them. Local shard lengths are part of the graph, so it serves all
slots that have the same lengths.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from gfgen.errors import LayoutError
from gfgen.gfc.cuda.device_group import CudaGroup
from gfgen.gfc.cuda.kernels import NUM_BANKS

T = TypeVar("T")
Capturing = Callable[[Any], AbstractContextManager[Any]]
"""Makes a context manager that captures all launches inside it in this graph."""


class Captured(Generic[T]):
    """A CUDA graph of collectives and computation; `result` is what its function returned.

    The group has been entered or is `CudaEndpoint.unentered`. Run the function once before, so that all
    kernels are loaded.
    """

    def __init__(
        self,
        group: CudaGroup,
        function: Callable[[CudaGroup], T],
        *,
        copies: int = 1,
        capturing: Capturing = torch.cuda.graph,
    ) -> None:
        self._degrees = group.descriptor.layout.degrees
        run = group._run
        before = list(run.counts)
        self._parities = [count % NUM_BANKS for count in before]
        self._graph = torch.cuda.CUDAGraph()
        try:
            with capturing(self._graph):
                for _ in range(copies):
                    self.result = function(group)
            # Capturing runs nothing: the device has not counted these.
            self._counted = [after - count for after, count in zip(run.counts, before, strict=True)]
        finally:
            run.counts[:] = before

    def replay(self, group: CudaGroup) -> T:
        """Runs the graph on the current stream among the ranks of an entered group.

        Raises: the failure of the group's dispatch, if it is already known.
        """
        run, endpoint = group._run, group._endpoint
        if endpoint.failed.value:
            endpoint.check(run.dispatch)
        assert run.has_entered, "a replay before the entry barrier"
        self.match_banks(group)
        self._graph.replay()
        for kind, counted in enumerate(self._counted):
            run.counts[kind] += counted
        return self.result

    def match_banks(self, group: CudaGroup) -> None:
        """Brings the group's counts to where those of the capture began; `replay` does it first.

        Addresses in the graph fix the bank of each exchange. One barrier more selects the other bank.
        """
        if group.descriptor.layout.degrees != self._degrees:
            raise LayoutError(f"captured for degrees {self._degrees}, replayed on {group.descriptor.layout}")
        for kind in self.unmatched(group):
            group.of_kind(kind).barrier()

    def unmatched(self, group: CudaGroup) -> list[int]:
        """Kinds whose next exchange would use another bank than their first one in the capture."""
        counts = group._run.counts
        return [
            kind
            for kind, counted in enumerate(self._counted)
            if counted and counts[kind] % NUM_BANKS != self._parities[kind]
        ]


class CapturedAlone(Generic[T]):
    """A CUDA graph of a call without collectives."""

    def __init__(self, function: Callable[[], T], *, capturing: Capturing = torch.cuda.graph) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            self.result = function()

    def replay(self) -> T:
        self._graph.replay()
        return self.result


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disables garbage collection: freeing a graph in a cycle would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class SharedPool:
    """Memory that many graphs share, and the stream on which they are captured.

    Graphs may use the same memory, since their replays follow each other on one stream and each result is
    used up before the next replay. The pool's memory is released with its last graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        # A separate stream: the allocator notes the streams that use a block when it is freed, and none of
        # them may be captured at that moment (pytorch issue 193982).
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for dtype in (torch.float32, torch.bfloat16):  # allocates cuBLAS' workspace outside the pool
                x = torch.ones(16, 16, device=device, dtype=dtype)
                torch.nn.functional.linear(x, x, x[0])

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """For `Captured`. Does not wait; other threads may use their own streams meanwhile."""
        if not self._graphs:  # torch may have freed the old pool, and then refuses to use it again
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream), _without_collections():
            # With "global", another thread's allocation of pinned memory would end the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture has failed, which is raised below
                    self._end(graph)
                raise
            self._end(graph)
        self._graphs.add(graph)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # if torch has already ended it
                self._end_what_is_invalid()
            raise

    def _end_what_is_invalid(self) -> None:
        """Ends in torch 2.11 a capture that became invalid, which CUDA has ended already.

        Without this, torch's allocator waits for the end, the pool counts one graph too many and takes no
        more, and random numbers fail until another capture ends properly.
        """
        torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
        torch._C._cuda_releasePool(self._stream.device_index, self._pool)
        self._graphs.clear()
        self._capture_next_to_nothing()

    def _capture_next_to_nothing(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            torch.ones(1, device=self._device)
            graph.capture_end()
