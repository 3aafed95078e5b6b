"""Small causal VAEs of each kind, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

from gfgen.models.loading.random_weights import draw_weights

SMALL = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
SCALES = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
VAES: dict[str, Callable[[], Any]] = {
    # Wan 2.2: shortcuts around its levels, and patches of two pixels.
    "wan 2.2": lambda: AutoencoderKLWan(
        **SMALL,
        **SCALES,
        decoder_base_dim=12,
        temperal_downsample=[True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=8,
    ),
    "wan 2.1": lambda: AutoencoderKLWan(**SMALL, **SCALES, temperal_downsample=[False, True]),
    "qwen-image": lambda: AutoencoderKLQwenImage(**SMALL, **SCALES, temperal_downsample=[False, True]),
}


def small_vae(name: str) -> Any:
    vae = VAES[name]().eval()
    draw_weights(vae, name=name)
    return vae


def small_latents(*, frames: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn((1, 4, frames, rows, 3), generator=generator)
