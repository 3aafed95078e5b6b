"""Denoising loops of the built-in model in which a step's output may come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from training.evaluation import Question
from training.parts import Parts, unipc
from training.sampling import Recipe, _flow, _noise, prompt_embeds, token_timesteps

CONTEXTS = ("cond", "uncond")
"""What diffusers' pipelines call the branches of guidance."""


def guided_flow(evaluate: Callable[[int], Tensor], recipe: Recipe) -> Tensor:
    """Both branches, as the pipelines join them."""
    guided, unguided = evaluate(0), evaluate(1)
    return unguided + recipe.guidance_scale * (guided - unguided)


@torch.no_grad()
def sampled(
    parts: Parts,
    asked: Sequence[Question],
    num_steps: int,
    recipe: Recipe,
    flow: Callable[[int, Callable[[int], Tensor]], Tensor],
) -> Tensor:
    """Latents of prompts after all steps.

    flow: the guided output of a step, given its number and a function that evaluates a branch: 0 with the
    prompt, 1 without.
    """
    embeds = [prompt_embeds(parts, [q.prompt for q in asked]), prompt_embeds(parts, [""] * len(asked))]
    latents = _noise(parts, [q.seed for q in asked], recipe)
    scheduler = unipc(flow_shift=recipe.flow_shift)
    scheduler.set_timesteps(num_steps)
    for step, timestep in enumerate(scheduler.timesteps):
        times_BT = timestep.float().expand(latents.shape[0], latents.shape[2])
        times = token_timesteps(times_BT, latents)

        def evaluate(branch: int, latents: Tensor = latents, times: Tensor = times) -> Tensor:
            with parts.transformer.cache_context(CONTEXTS[branch]):
                return _flow(parts, latents, times, embeds[branch])

        latents = scheduler.step(flow(step, evaluate), timestep, latents, return_dict=False)[0]
    return latents
