"""Fits the colours of a model's latents to its own VAE, for rough previews.

    python -m gfgen.models.loading.colour_fit CHECKPOINT FILE

encodes small random pictures and writes the linear map from a latent pixel to the mean colour of the pixels
that it stands for. It runs as a process of low priority on the CPU, next to ranks that are at work.

Legend: N latent pixels of all pictures, C channels of the latents.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch.nn import functional

from gfgen.system.linefile import write_whole

NUM_PICTURES = 24
SIDE = 128
SEED = 1
_PRIOR = 1e-3
"""Weight of a zero matrix against one latent pixel; decides only where channels are always zero."""


def random_pictures() -> Iterator[torch.Tensor]:
    """Pictures [3, 1, SIDE, SIDE] in [-1, 1] of random colours, strongest in coarse parts."""
    noise = torch.Generator().manual_seed(SEED)
    for _ in range(NUM_PICTURES):
        picture = torch.zeros(3, SIDE, SIDE)
        for cells in (1, 2, 4, 8, 16, 32):
            part = torch.randn(1, 3, cells, cells, generator=noise) / cells**0.5
            mode = "nearest" if torch.rand((), generator=noise) < 0.5 else "bicubic"
            picture += functional.interpolate(part, (SIDE, SIDE), mode=mode)[0]
        yield picture.clamp(-1, 1)[:, None]


def fit_colours(vae: Any, videos_CTHW: Iterable[torch.Tensor]) -> dict[str, Any]:
    """The map `latents_C @ matrix + offset`, RGB in [-1, 1], for latents as the transformer sees them."""
    pairs = [_pair(vae, video) for video in videos_CTHW]
    latents_NC, colours_N3 = (torch.cat(each).double() for each in zip(*pairs, strict=True))
    inputs = torch.cat([latents_NC, torch.ones(len(latents_NC), 1)], dim=1)
    products = inputs.T @ inputs + _PRIOR * torch.eye(inputs.shape[1])
    found = torch.linalg.solve(products, inputs.T @ colours_N3).round(decimals=4)
    rest = ((inputs @ found - colours_N3) ** 2).mean().sqrt()
    return {
        "matrix": found[:-1].tolist(),
        "offset": found[-1].tolist(),
        "residual": round(float(rest), 4),
        "source": f"fitted to {type(vae).__name__} of this model by gfgen.models.loading.colour_fit",
    }


@torch.no_grad()
def _pair(vae: Any, video_CTHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent pixels of a video [N, C], normalised as by its pipeline, and their mean colours [N, 3]."""
    config, is_video = vae.config, getattr(vae.config, "latents_mean", None) is not None
    latents = vae.encode((video_CTHW if is_video else video_CTHW[:, 0])[None]).latent_dist.mode()[0]
    if is_video:
        mean, std = (torch.tensor(x)[:, None, None, None] for x in (config.latents_mean, config.latents_std))
        latents = (latents - mean) / std
    else:
        latents = (latents - (config.shift_factor or 0.0)) * config.scaling_factor
    num_missing = 3 if video_CTHW.shape[1] > 1 else 0  # the first latent frame has one frame, others four
    padded = functional.pad(video_CTHW[None], (0, 0, 0, 0, num_missing, 0), mode="replicate")
    size = latents.shape[1:] if is_video else (1, *latents.shape[1:])
    colours = functional.adaptive_avg_pool3d(padded[0], size)
    return latents.flatten(1).T, colours.flatten(1).T


def load_vae(checkpoint: Path) -> Any:
    _, name = json.loads((checkpoint / "model_index.json").read_text())["vae"]
    vae = getattr(diffusers, name).from_pretrained(checkpoint / "vae", torch_dtype=torch.float32)
    return vae.eval()


def main(checkpoint: str, file: str) -> None:
    os.nice(19)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))
    diffusers.utils.logging.disable_progress_bar()
    text = json.dumps(fit_colours(load_vae(Path(checkpoint)), random_pictures())) + "\n"
    write_whole(Path(file), text)


if __name__ == "__main__":
    main(*sys.argv[1:])
