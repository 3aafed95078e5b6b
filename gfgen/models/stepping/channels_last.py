"""UNets and VAEs with channels last in memory, the order of a GPU's convolutions; equal up to rounding.

Group norms keep this order, in which torch would copy each input first, and compute the SiLU behind them.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.nn import functional


def channels_last(pipeline: Any) -> None:
    """Change the order in a pipeline that has a UNet, permanently."""
    parts = [x for x in pipeline.components.values() if isinstance(x, (AutoencoderKL, UNet2DConditionModel))]
    if not any(isinstance(part, UNet2DConditionModel) for part in parts):
        return
    for module in [
        module for part in parts for module in part.to(memory_format=torch.channels_last).modules()
    ]:
        if type(module) is nn.GroupNorm:
            module.__class__ = _Norm
        elif isinstance(module, ResnetBlock2D) and _is_activated(module):
            module.nonlinearity = _OfEmbeddings()
            module.norm1.activates = module.norm2.activates = True


def _is_activated(block: Any) -> bool:
    """Whether SiLU follows both norms of a residual block at once."""
    return type(block.nonlinearity) is nn.SiLU and block.time_embedding_norm != "scale_shift"


class _Norm(nn.GroupNorm):
    """A group norm, and SiLU where it `activates`."""

    activates = False

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dim() == 4:
            from gfgen.models.fast import row_kernels

            x_NHWC = x.permute(0, 2, 3, 1).contiguous()
            result = torch.empty_like(x_NHWC)
            row_kernels.group_norm(x_NHWC, torch.float32, self, result, activate=self.activates)
            return result.permute(0, 3, 1, 2)
        normed = super().forward(x)
        return functional.silu(normed) if self.activates else normed


class _OfEmbeddings(nn.SiLU):
    """SiLU of embeddings; pictures have had theirs."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.dim() == 4 else super().forward(x)
