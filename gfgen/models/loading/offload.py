"""Components that stay in host memory until they are used, by accelerate's hooks (`--offload`).

A text encoder never is on the device as a whole: each of its layers is copied there for its own forward. Of
two experts, the one that a step needs takes the place of the other. Both copies wait for the device, so a
rank does this only when nothing is under way that others wait for (worker/gpu.py).
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import cpu_offload, cpu_offload_with_hook

from gfgen.models.geometry.weights import EXPERTS, TEXT_ENCODER


def offload(pipeline: Any, device: torch.device) -> None:
    """Let components that are in host memory (`weights.is_offloaded`) compute on the device; once each."""
    for name, part in pipeline.components.items():
        if TEXT_ENCODER.fullmatch(name) and isinstance(part, torch.nn.Module):
            cpu_offload(part, device)
    experts = [pipeline.components.get(name) for name in EXPERTS]
    if None not in experts:
        _take_turns(experts, device)


def _take_turns(experts: list[Any], device: torch.device) -> None:
    """Each expert sends the other one to host memory before its own forward."""
    hooks = [cpu_offload_with_hook(expert, device)[1] for expert in experts]
    for own, other in zip(hooks, reversed(hooks), strict=True):
        own.hook.prev_module_hook = other
