"""Training the transformer of `shapes` together with its text encoder, by flow matching.

A latent is (1 - sigma) x latents + sigma x noise, and the transformer tells noise - latents; that is
what the scheduler expects of a flow prediction. A part of the videos has its first latent frame
given: clean and at time 0, as in image to video.

Legend: B samples, C channels, T H W latent frames, rows, columns; L words.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from training.codec import lay_out
from training.flow_model import FlowModel
from training.graphs import Recorder, with_gradients
from training.muon import Muon
from training.parts import Parts
from training.reservoir import BUCKETS, Bucket, Reservoir
from training.session import Average, Session
from training.supply import Supply

LEARNING_RATE = 2e-3
"""Of matrices in blocks (Muon)."""
OTHER_RATE = 1e-3
"""Of everything else (AdamW)."""
TEXT_RATE = 2e-4
"""Of the text encoder, which understands prompts already (text_training.py)."""
WEIGHT_DECAY = 0.02
EMA_DECAY = 0.9993
TRAIN_SHIFTS = (1.0, 40.0)
"""Between which the shift of a sample's time is drawn, evenly by its logarithm. Flat colours show through
all but the strongest noise: what a video shows is decided above a sigma of 0.9, where it is told from the
prompt alone, and edges below."""
USUAL_ERROR = (0.02, 0.01)
"""Parameters of `_usual_error`, as seen with pictures and videos."""
IMAGE_SHARE = 0.2
"""Of videos, those whose first frame is given."""


def train_flow(
    session: Session,
    parts: Parts,
    supply: Supply,
    buckets: Sequence[Bucket] = BUCKETS,
    *,
    compiles: bool = False,
) -> None:
    """Train until the session's time is over; the weights end as their moving average."""
    parts.vae.to(session.device).eval().requires_grad_(False)
    lay_out(parts.vae)
    model = FlowModel(parts, dtype=session.dtype).to(session.device).train()
    average = Average({"text_encoder": parts.text_encoder, "transformer": parts.transformer}, decay=EMA_DECAY)
    session.begin(average=average, optimizers=optimizers_of(model, is_fused=session.is_cuda))
    if compiles:
        model.compile_blocks()
    key = f"flow-{session.seed}-{session.step}"
    rng = Random(key)
    torch.manual_seed(rng.randrange(2**31))
    recorder = Recorder(session.device, uses_graphs=session.uses_graphs)
    step_of = with_gradients(model.parameters(), lambda latents, tokens: (flow_loss(model, latents, tokens),))
    reservoirs = [
        Reservoir(
            bucket, parts, supply, recorder=recorder, device=session.device, seed=f"{key}-{bucket.name}"
        )
        for bucket in buckets
    ]
    replays = [recorder.capture(step_of, *reservoir.take()) for reservoir in reservoirs]
    shares = [bucket.share for bucket in buckets]
    for _ in session.steps():
        (idx,) = rng.choices(range(len(buckets)), shares)
        (loss,) = replays[idx](*reservoirs[idx].take())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        session.update(loss=loss)
    average.swap_in()
    model.eval()


def flow_loss(model: nn.Module, clean_BCTHW: Tensor, tokens_BL: Tensor) -> Tensor:
    """Squared error of the velocity, without frames that are given, over the root of its usual size.

    Where there is next to nothing but noise most of the error cannot be avoided: unweighted it would
    drown what is learned elsewhere.
    """
    count, _, frames, _, _ = clean_BCTHW.shape
    device = clean_BCTHW.device
    noise_BCTHW = torch.randn_like(clean_BCTHW)
    low, high = TRAIN_SHIFTS
    shift_B = low * (high / low) ** torch.rand(count, device=device)
    sigma_B = shifted(torch.rand(count, device=device), shift_B)
    sigma_BT = sigma_B[:, None].expand(-1, frames)
    is_open_BT = torch.ones(count, frames, device=device)
    if frames > 1:
        is_given_B = torch.rand(count, device=device) < IMAGE_SHARE
        is_first_T = torch.arange(frames, device=device) == 0
        is_open_BT = 1.0 - (is_given_B[:, None] & is_first_T).float()
    weight_BT = is_open_BT * _usual_error(sigma_BT).rsqrt()
    sigma_BT = sigma_BT * is_open_BT
    noisy_BCTHW = torch.lerp(clean_BCTHW, noise_BCTHW, sigma_BT[:, None, :, None, None])
    error_BCTHW = model(noisy_BCTHW, 1000 * sigma_BT, tokens_BL) - (noise_BCTHW - clean_BCTHW)
    error_BT = error_BCTHW.square().mean(dim=(1, 3, 4))
    loss: Tensor = (error_BT * weight_BT).sum() / weight_BT.sum()
    return loss


def _usual_error(sigma: Tensor) -> Tensor:
    """About the mean squared error of a trained model at this time."""
    knee, floor = USUAL_ERROR
    return knee / (knee + 1 - sigma) + floor


def shifted(sigma: Tensor, shift: Tensor) -> Tensor:
    """Source: diffusers 0.42 UniPCMultistepScheduler.set_timesteps, use_flow_sigmas."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def optimizers_of(model: FlowModel, *, is_fused: bool) -> dict[str, torch.optim.Optimizer]:
    """Muon for the matrices of the transformer's blocks, AdamW for everything else."""
    matrices = [p for block in model.transformer.blocks for p in block.parameters() if p.ndim == 2]
    own = {id(parameter) for parameter in matrices}
    others = [p for p in model.transformer.parameters() if id(p) not in own]
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": list(model.text_encoder.parameters()), "lr": TEXT_RATE},
    ]
    return {
        "muon": Muon(matrices, lr=LEARNING_RATE, momentum=0.95, weight_decay=WEIGHT_DECAY),
        "adamw": torch.optim.AdamW(
            groups, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=is_fused
        ),
    }
