"""UNets and VAEs with channels last in memory, the order of a GPU's convolutions; equal up to rounding."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel


def channels_last(pipeline: Any) -> None:
    """Change the order in a pipeline that has a UNet, permanently."""
    parts = [x for x in pipeline.components.values() if isinstance(x, (AutoencoderKL, UNet2DConditionModel))]
    if any(isinstance(part, UNet2DConditionModel) for part in parts):
        for part in parts:
            part.to(memory_format=torch.channels_last)
