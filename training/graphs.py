"""Functions of tensors with fixed shapes, replayed as CUDA graphs.

A training step of this model is thousands of small launches; a replay is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Function = Callable[..., tuple[Tensor, ...]]
NUM_WARM_UPS = 2


class Recorder:
    """Captures functions into graphs that share their memory: no two of them ever run at once.

    What a replay returns is overwritten by the next replay of any of them. On a CPU, and without
    graphs, a captured function is the function itself.
    """

    def __init__(self, device: torch.device, *, uses_graphs: bool) -> None:
        self._is_on = uses_graphs and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_on else None
        self._stream = torch.cuda.Stream() if self._is_on else None  # type: ignore[no-untyped-call]

    def capture(self, function: Function, *examples: Tensor) -> Function:
        """The function for arguments of the examples' shapes. It runs a few times with the examples."""
        if not self._is_on:
            return function
        inputs = [example.clone() for example in examples]
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            results = function(*inputs)

        def replay(*arguments: Tensor) -> tuple[Tensor, ...]:
            for own, argument in zip(inputs, arguments, strict=True):
                own.copy_(argument)
            graph.replay()
            return results

        return replay


def with_gradients(parameters: Iterable[nn.Parameter], loss_of: Function) -> Function:
    """A function that also leaves the gradients of its first result, in tensors that stay the same."""
    trained = list(parameters)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]

    def step(*arguments: Tensor) -> tuple[Tensor, ...]:
        torch._foreach_zero_(gradients)
        results = loss_of(*arguments)
        results[0].backward()  # type: ignore[no-untyped-call]
        return tuple(result.detach() for result in results)

    return step
