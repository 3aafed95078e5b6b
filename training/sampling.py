"""Many videos at once from a trained model, as the pipelines make each of them.

Source: diffusers 0.42 WanPipeline.__call__ and WanImageToVideoPipeline.__call__ (expand_timesteps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gfgen.models.geometry.wan import TEXT_TOKENS
from training.codec import LatentScale, decode_clip, encode_moments
from training.parts import FLOW_SHIFT, GUIDANCE_SCALE, STEPS, Parts, unipc


@dataclass(frozen=True, slots=True)
class Recipe:
    """How videos are made."""

    width: int = 128
    height: int = 128
    frames: int = 17
    steps: int = STEPS
    guidance_scale: float = GUIDANCE_SCALE
    flow_shift: float = FLOW_SHIFT


@torch.no_grad()
def sample_videos(
    parts: Parts,
    prompts: Sequence[str],
    recipe: Recipe,
    *,
    seeds: Sequence[int],
    images_BCHW: Tensor | None = None,
) -> Tensor:
    """Videos of prompts ([B, T, H, W, 3] uint8); images in [0, 1] give their first frames.

    Each has noise from a seed of its own, as a job has.
    """
    device = next(parts.transformer.parameters()).device
    scale = LatentScale(parts.vae, device)
    embeds = [prompt_embeds(parts, prompts)]
    if recipe.guidance_scale > 1:
        embeds.append(prompt_embeds(parts, [""] * len(prompts)))
    given_BCTHW = None
    if images_BCHW is not None:
        clip = images_BCHW.to(device)[:, :, None] * 2 - 1
        given_BCTHW = scale.normalize(encode_moments(parts.vae, clip)[0])
    latents = _noise(parts, seeds, recipe).to(device)
    scheduler = unipc(flow_shift=recipe.flow_shift)
    scheduler.set_timesteps(recipe.steps)
    for timestep in scheduler.timesteps:
        model_input = latents if given_BCTHW is None else torch.cat([given_BCTHW, latents[:, :, 1:]], dim=2)
        times_BT = timestep.to(device, torch.float32).expand(latents.shape[0], latents.shape[2]).clone()
        if given_BCTHW is not None:
            times_BT[:, 0] = 0
        times = token_timesteps(times_BT, latents)
        flows = [_flow(parts, model_input, times, branch) for branch in embeds]
        flow = flows[0] if len(flows) == 1 else flows[1] + recipe.guidance_scale * (flows[0] - flows[1])
        latents = scheduler.step(flow, timestep, latents, return_dict=False)[0]
    if given_BCTHW is not None:
        latents = torch.cat([given_BCTHW, latents[:, :, 1:]], dim=2)
    clip_BCTHW = decode_clip(parts.vae, scale.denormalize(latents)).clamp(-1, 1)
    return ((clip_BCTHW + 1) / 2 * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


def prompt_embeds(parts: Parts, prompts: Sequence[str]) -> Tensor:
    """[B, 512, D], zero behind each prompt."""
    device = next(parts.text_encoder.parameters()).device
    found = parts.tokenizer(
        list(prompts), padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
    )
    ids, mask = found.input_ids.to(device), found.attention_mask.to(device)
    embeds: Tensor = parts.text_encoder(ids, mask).last_hidden_state * mask[..., None]
    return embeds


def _noise(parts: Parts, seeds: Sequence[int], recipe: Recipe) -> Tensor:
    frames = (recipe.frames - 1) // parts.vae.config.scale_factor_temporal + 1
    factor = parts.vae.config.scale_factor_spatial
    shape = (parts.vae.config.z_dim, frames, recipe.height // factor, recipe.width // factor)
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def _flow(parts: Parts, model_input: Tensor, times: Tensor, embeds: Tensor) -> Tensor:
    flow: Tensor = parts.transformer(
        hidden_states=model_input, timestep=times, encoder_hidden_states=embeds, return_dict=False
    )[0]
    return flow


def token_timesteps(timestep_BT: Tensor, latents_BCTHW: Tensor) -> Tensor:
    """[B, tokens]: each frame's timestep for all its tokens, which are patches of 2 x 2."""
    _, _, _, height, width = latents_BCTHW.shape
    return timestep_BT.repeat_interleave(height // 2 * (width // 2), dim=1)
