"""Components that wait in host memory until they are used, by accelerate's hooks (`--offload`).

A text encoder never is on the device as a whole: each of its layers is copied there for its own forward. Of
two experts, the one that a step needs takes the place of the other, layer by layer, so neither memory holds
more than one of them and a layer. Both copies wait for the device, so a rank does this only when nothing is
under way that others wait for (worker/gpu.py).
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from accelerate import cpu_offload
from accelerate.hooks import CpuOffload, add_hook_to_module

from gfgen.models.geometry.weights import EXPERTS, TEXT_ENCODER


def let_wait(pipeline: Any, device: torch.device) -> None:
    """Let components that are in host memory (`Placement.waits`) compute on the device; once each."""
    for name, part in pipeline.components.items():
        if TEXT_ENCODER.fullmatch(name) and isinstance(part, torch.nn.Module):
            cpu_offload(part, device)
    experts = [pipeline.components.get(name) for name in EXPERTS]
    if None not in experts:
        for own, other in zip(experts, reversed(experts), strict=True):
            add_hook_to_module(own, _InPlaceOf(other, device), append=True)


def waits(model: torch.nn.Module) -> bool:
    """Whether accelerate brings some of its weights from host memory."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


class _InPlaceOf(CpuOffload):  # type: ignore[misc]  # accelerate has no types
    """Before an expert's forward, sends each layer of the other one to host memory and brings its own."""

    def __init__(self, other: Any, device: torch.device) -> None:
        super().__init__(device)
        self._other = other

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        device = self.execution_device
        if next(module.parameters()).device.type != device.type:
            for own, other in itertools.zip_longest(module.modules(), self._other.modules()):
                for layer, place in ((other, torch.device("cpu")), (own, device)):
                    if layer is not None:
                        layer._apply(partial(torch.Tensor.to, device=place), recurse=False)
        return args, kwargs
