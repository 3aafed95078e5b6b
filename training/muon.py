"""Muon: momentum, orthogonalized. For the matrices of a transformer's blocks.

Source: https://kellerjordan.github.io/posts/muon, with the scale of https://arxiv.org/abs/2502.16982
        (section 2.2), by which an update is as large as AdamW's at the same learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
ADAMW_SCALE = 0.2
"""Root mean square of AdamW's usual update, in learning rates."""


class Muon(torch.optim.Optimizer):
    """Matrices of equal shape are orthogonalized together: few large launches, not many small ones."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            for shape, parameters in by_shape.items():
                self._step_of(parameters, shape, group)

    def _step_of(self, parameters: list[Tensor], shape: tuple[int, ...], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        buffers = [self._buffer(parameter) for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
        updates = orthogonalized(torch.stack(ahead)).to(parameters[0].dtype).unbind()
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"] * ADAMW_SCALE * math.sqrt(max(shape)))

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def orthogonalized(matrices_NRC: Tensor) -> Tensor:
    """About the nearest matrices with singular values of 1, in bf16 (Newton-Schulz iteration)."""
    a, b, c = COEFFICIENTS
    is_tall = matrices_NRC.shape[-2] > matrices_NRC.shape[-1]
    x: Tensor = matrices_NRC.bfloat16()
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x
