"""diffusers' caches on the built-in model, and how many blocks each saves."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from torch import Tensor

from benchmarks.reuse_sampling import CONTEXTS, guided_flow, sampled
from training.evaluation import Question
from training.parts import Parts
from training.sampling import Recipe

FIRST_BLOCK = (0.03, 0.05, 0.1, 0.2)
"""Thresholds."""
TAYLORSEER = ((12, 2), (3, 2), (3, 3))
"""First step that may be predicted, and interval of computed steps; with `use_lite_mode`, without which it
computes all feed-forward layers."""
MAGCACHE = (0.01, 0.02, 0.06, 0.24)
"""Thresholds; all else as diffusers has it."""


def cases(num_steps: int, ratios: Sequence[float]) -> Iterator[tuple[str, str, Any]]:
    """Name, setting and config."""
    for threshold in FIRST_BLOCK:
        yield "first block", f"threshold {threshold:g}", FirstBlockCacheConfig(threshold=threshold)
    for first, interval in TAYLORSEER:
        config = TaylorSeerCacheConfig(
            cache_interval=interval,
            disable_cache_before_step=first,
            taylor_factors_dtype=torch.float32,
            use_lite_mode=True,
        )
        yield "taylorseer", f"interval {interval} from {first}", config
    for threshold in MAGCACHE:
        settings = MagCacheConfig(threshold, num_inference_steps=num_steps, mag_ratios=list(ratios))
        yield "magcache", f"threshold {threshold:g}", settings


def cached_latents(
    parts: Parts, asked: Sequence[Question], num_steps: int, recipe: Recipe, config: Any
) -> tuple[Tensor, float]:
    """Latents of prompts and the share of blocks saved; each sampled alone, as caches decide by contents."""
    found, num_computed = [], 0

    def count(*_: object) -> None:
        nonlocal num_computed
        num_computed += 1

    blocks = parts.transformer.blocks
    handles = [block.attn1.register_forward_pre_hook(count) for block in blocks]
    for question in asked:
        parts.transformer.enable_cache(config)
        found.append(sampled(parts, [question], num_steps, recipe, lambda _, each: guided_flow(each, recipe)))
        parts.transformer.disable_cache()
    for handle in handles:
        handle.remove()
    num_all = len(asked) * num_steps * len(CONTEXTS) * len(blocks)
    return torch.cat(found), 1 - num_computed / num_all


def mag_ratios(parts: Parts, question: Question, num_steps: int, recipe: Recipe) -> list[float]:
    """What MagCache needs of a model, calibrated on one prompt; diffusers prints it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cached_latents(
            parts,
            [question],
            num_steps,
            recipe,
            MagCacheConfig(calibrate=True, num_inference_steps=num_steps),
        )
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("[") and line[1:2].isdigit()]
    ratios: list[float] = json.loads(lines[0])
    return ratios
