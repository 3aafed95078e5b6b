"""Latents on their way into a VAE."""

from __future__ import annotations

from typing import Any

import torch


def denormalize_latents(latents_BCTHW: torch.Tensor, config: Any) -> torch.Tensor:
    """Latents in the VAE's own scale.

    Term by term as the pipelines write it (a division by the inverse), for equal bits.

    Source: diffusers 0.42, the end of WanPipeline.__call__ and QwenImagePipeline.__call__.
    """
    shape = (1, config.z_dim, 1, 1, 1)
    mean = torch.tensor(config.latents_mean).view(shape).to(latents_BCTHW.device, latents_BCTHW.dtype)
    inverse_std = 1.0 / torch.tensor(config.latents_std).view(shape).to(
        latents_BCTHW.device, latents_BCTHW.dtype
    )
    return latents_BCTHW / inverse_std + mean
