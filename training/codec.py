"""The VAE over whole clips at once: the same numbers as `encode` and `decode`, in two passes.

diffusers goes through a video in chunks of one latent frame, with a cache of features between them.
The first frame needs a pass of its own; all the others may share one, which keeps a GPU busy.

Legend: B clips, C channels, T H W frames, rows, columns (of pixels, or of latents).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from torch import Tensor, nn


def encode_moments(vae: Any, clip_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance of the latents of clips in [-1, 1]; T is 4k + 1."""
    patches_BCTHW = patchify(clip_BCTHW, vae.config.patch_size)
    cache: list[Any] = [None] * vae._cached_conv_counts["encoder"]
    parts = [
        vae.encoder(chunk, feat_cache=cache, feat_idx=[0])
        for chunk in patches_BCTHW.split([1, patches_BCTHW.shape[2] - 1], dim=2)
        if chunk.shape[2]
    ]
    mean, log_variance = vae.quant_conv(torch.cat(parts, dim=2)).chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode_clip(vae: Any, latents_BCTHW: Tensor) -> Tensor:
    """Clips in about [-1, 1] (not clamped) of latents in the VAE's own scale."""
    hidden_BCTHW = vae.post_quant_conv(latents_BCTHW)
    cache: list[Any] = [None] * vae._cached_conv_counts["decoder"]
    parts = [
        vae.decoder(chunk, feat_cache=cache, feat_idx=[0], first_chunk=idx == 0)
        for idx, chunk in enumerate(hidden_BCTHW.split([1, hidden_BCTHW.shape[2] - 1], dim=2))
        if chunk.shape[2]
    ]
    clip: Tensor = unpatchify(torch.cat(parts, dim=2), vae.config.patch_size)
    return clip


def lay_out(vae: Any) -> None:
    """The kernels' channels last in memory, as tensor cores want them."""
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        elif isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class LatentScale:
    """Latents as the transformer sees them: with mean 0 and deviation 1 in each channel.

    Source: diffusers 0.42 WanImageToVideoPipeline.prepare_latents.
    """

    def __init__(self, vae: Any, device: torch.device | str) -> None:
        self.mean_C = _per_channel(vae.config.latents_mean, device)
        self.std_C = _per_channel(vae.config.latents_std, device)

    def normalize(self, latents_BCTHW: Tensor) -> Tensor:
        return (latents_BCTHW - self.mean_C) / self.std_C

    def denormalize(self, latents_BCTHW: Tensor) -> Tensor:
        return latents_BCTHW * self.std_C + self.mean_C


def _per_channel(values: Sequence[float], device: torch.device | str) -> Tensor:
    return torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
