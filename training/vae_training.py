"""Training the VAE of `shapes`: on drawn clips, whole and cropped.

Loss: absolute and squared error of pixels, absolute error of their differences to the right and below
(edges) and to the next frame (flicker), and a little KL. Latents are decoded with a little more noise
than the posterior has, so that what the transformer gets slightly wrong still gives clean edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from training.codec import decode_clip, encode_moments, lay_out
from training.drawing import draw, sketch
from training.graphs import Recorder, with_gradients
from training.scenes import sample_scene
from training.session import Average, Session
from training.supply import Supply

LEARNING_RATE = 1.5e-3
KL_WEIGHT = 1e-4
SQUARE_WEIGHT = 2.0
EDGE_WEIGHT = 0.5
FLICKER_WEIGHT = 0.5
LATENT_NOISE = 0.05
EMA_DECAY = 0.998


@dataclass(frozen=True, slots=True)
class ClipShape:
    """Pixels of a training clip: cut out of a larger drawing, or all of it."""

    batch: int
    frames: int
    width: int
    height: int
    is_crop: bool


# A crop of a quarter costs a quarter, and shows as many edges as there are; half of a video costs half. But
# who has seen nothing longer draws the last frames of a video less well.
CLIPS = (
    ClipShape(batch=96, frames=9, width=64, height=64, is_crop=True),
    ClipShape(batch=12, frames=17, width=128, height=128, is_crop=False),
    ClipShape(batch=192, frames=1, width=128, height=128, is_crop=False),
)
MINIATURE_CLIPS = (
    ClipShape(batch=1, frames=5, width=32, height=32, is_crop=True),
    ClipShape(batch=1, frames=1, width=64, height=64, is_crop=False),
)


def train_vae(session: Session, vae: Any, supply: Supply, clips: Sequence[ClipShape] = CLIPS) -> None:
    """Train until the session's time is over; the weights end as their moving average."""
    vae.to(session.device).train()
    lay_out(vae)
    average = Average({"vae": vae}, decay=EMA_DECAY)
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=session.is_cuda
    )
    session.begin(average=average, optimizers={"adamw": optimizer})

    def loss_of(clip_BCTHW: Tensor) -> tuple[Tensor, ...]:
        with session.autocast():
            return vae_loss(vae, clip_BCTHW)

    drawn = [
        draw_clips(supply, shape, session.device, seed=f"vae-{session.seed}-{session.step}")
        for shape in clips
    ]
    recorder = Recorder(session.device, uses_graphs=session.uses_graphs)
    step_of = with_gradients(vae.parameters(), loss_of)
    replays = [recorder.capture(step_of, next(clip)) for clip in drawn]
    for step in session.steps():
        idx = step % len(clips)
        loss, pixels, kl = replays[idx](next(drawn[idx]))
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        session.update(loss=loss, pixels=pixels, kl=kl)
    average.swap_in()
    vae.eval()


def vae_loss(vae: Any, clip_BCTHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss; of its terms, the error of pixels and the KL."""
    mean, log_variance = encode_moments(vae, clip_BCTHW)
    mean, log_variance = mean.float(), log_variance.float()
    deviation = (torch.exp(log_variance) + LATENT_NOISE**2).sqrt()
    decoded = decode_clip(vae, mean + deviation * torch.randn_like(mean)).float()
    error = decoded - clip_BCTHW
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    flicker = error.diff(dim=2).abs().mean() if error.shape[2] > 1 else error.new_zeros(())
    kl = 0.5 * (mean**2 + torch.exp(log_variance) - 1 - log_variance).mean()
    pixels = error.abs().mean()
    weighted = SQUARE_WEIGHT * error.square().mean() + EDGE_WEIGHT * edges + FLICKER_WEIGHT * flicker
    loss = pixels + weighted + KL_WEIGHT * kl
    return loss, pixels, kl


def draw_clips(supply: Supply, shape: ClipShape, device: torch.device, *, seed: str) -> Iterator[Tensor]:
    """Batches of [B, 3, T, H, W] in [-1, 1], as fast as in videos of 17 frames, a third of them of 33."""
    canvas = 128 if shape.is_crop else 0
    width, height = canvas or shape.width, canvas or shape.height
    rng = Random(f"{seed}-{shape}")
    for batch in supply.stream(width=width, height=height, count=shape.batch, seed=f"{seed}-{shape}"):
        frames = rng.choice((17, 17, 33)) if shape.frames > 1 else 1
        video = draw(sketch(batch.scenes).to(device), width=width, height=height, frames=frames)
        first = rng.randrange(frames - shape.frames + 1)
        video = video[:, :, first : first + shape.frames]
        if shape.is_crop:
            top, left = rng.randrange(canvas - shape.height + 1), rng.randrange(canvas - shape.width + 1)
            video = video[..., top : top + shape.height, left : left + shape.width]
        yield video * 2 - 1


@torch.no_grad()
def measure_latents(vae: Any, device: torch.device, *, num_videos: int) -> tuple[list[float], list[float]]:
    """Mean and deviation of each latent channel over drawn videos.

    A channel that the VAE does not use gets no less than a tenth of the widest one's deviation.
    """
    samples = [
        encode_moments(vae, clip)[0].transpose(0, 1).flatten(1)
        for clip in _videos("latents", num_videos, device)
    ]
    values_CN = torch.cat(samples, dim=1)
    std_C = values_CN.std(dim=1)
    return values_CN.mean(dim=1).tolist(), std_C.clamp(min=0.1 * float(std_C.max())).tolist()


@torch.no_grad()
def reconstruction_db(vae: Any, device: torch.device, *, num_videos: int) -> float:
    """Mean peak signal-to-noise ratio of decoded videos that training has not seen, of pixels in [0, 1]."""
    values = []
    for clip in _videos("reconstruction", num_videos, device):
        decoded = decode_clip(vae, encode_moments(vae, clip)[0]).clamp(-1, 1)
        error_B = ((decoded - clip) / 2).square().flatten(1).mean(dim=1)
        values += [-10 * math.log10(max(value, 1e-10)) for value in error_B.tolist()]
    return sum(values) / len(values)


def _videos(seed: str, count: int, device: torch.device) -> Iterator[Tensor]:
    rng = Random(seed)
    scenes = [sample_scene(rng, width=128, height=128, held_out=True) for _ in range(count)]
    for first in range(0, count, 16):
        yield draw(sketch(scenes[first : first + 16]).to(device), width=128, height=128, frames=17) * 2 - 1
