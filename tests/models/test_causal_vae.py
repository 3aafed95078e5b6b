"""Fast decodes and encodes: those of diffusers up to rounding, and a GPU's kernel does what the steps do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_vaes import VAES, small_latents, small_vae
from torch import Tensor

from benchmarks.vae import Case, errors
from gfgen.models.fast import causal_vae
from gfgen.models.fast.causal_vae import Frames, Repeats

TOLERANCE = 1e-6
"""In fp64, of values up to 1: diffusers rounds to fp32 where it repeats rows and columns."""


@pytest.mark.parametrize("num_frames", [1, 3])
@pytest.mark.parametrize("name", VAES)
@torch.no_grad()
def test_pixels_and_latents_are_those_of_diffusers(name: str, num_frames: int) -> None:
    plain, fast = (torch.nn.Module.to(small_vae(name), torch.float64) for _ in range(2))
    causal_vae.install(fast)
    latents = small_latents(frames=num_frames, rows=4).double()
    pixels = plain.decode(latents, return_dict=False)[0]
    assert pixels.std() > 0.01, "a decode of nothing tells nothing"
    assert (fast.decode(latents, return_dict=False)[0] - pixels).abs().max() < TOLERANCE
    wanted = plain.encode(pixels).latent_dist.mode()
    assert (fast.encode(pixels).latent_dist.mode() - wanted).abs().max() < TOLERANCE


@torch.no_grad()
def test_several_samples_are_left_to_diffusers() -> None:
    plain, fast = small_vae("wan 2.1"), small_vae("wan 2.1")
    causal_vae.install(fast)
    latents = small_latents(frames=2, rows=4).expand(2, -1, -1, -1, -1)
    pixels = plain.decode(latents).sample
    torch.testing.assert_close(fast.decode(latents).sample, pixels)
    torch.testing.assert_close(
        fast.encode(pixels).latent_dist.mode(), plain.encode(pixels).latent_dist.mode()
    )


def test_the_benchmark_compares_with_fp64() -> None:
    found = errors(Case("tiny-qwen-image", 16, 16, 1), "tf32", "cpu", draw=1)
    assert all(0 < error < 2e-6 for error in found)


SHAPE = (3, 6, 10, 96)


def frames_of(case: str, random: Any) -> Frames:
    frames, height, width, channels = SHAPE
    if case == "one frame":
        return Frames((random(1, height, width, channels),), random(channels))
    if case == "shortcut":
        return Frames((random(*SHAPE),), random(channels), random(*SHAPE))
    parts = tuple(random(frames, height // 2 + 1, width // 2 + 1, channels) for _ in range(4))
    shortcut = random(2, height // 2, width // 2, 2 * channels)
    return Frames(parts, random(channels), shortcut, Repeats(frames=2, channels=4, skip=1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_past", [False, True])
@pytest.mark.parametrize("case", ["one frame", "shortcut", "enlarged"])
def test_the_kernel_does_what_the_steps_do(case: str, has_past: bool, dtype: torch.dtype) -> None:
    found = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(5)

        def random(*size: int) -> Tensor:
            drawn = torch.randn(size, generator=generator)  # noqa: B023 (called at once)
            return drawn.to(device, dtype)  # noqa: B023

        frames = frames_of(case, random)
        num_frames, height, width, channels = frames.shape
        norm = SimpleNamespace(gamma=random(channels, 1, 1, 1))
        kept = random(2, height, width, channels) * has_past
        padded = random(2 * has_past + num_frames, height + 2, width, channels)
        causal_vae.added(frames, norm, padded, kept=kept, needs_total=True)
        found.append([each.cpu().float() for each in (padded, kept, *frames.parts)])
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    for wanted, result in zip(*found, strict=True):
        torch.testing.assert_close(result, wanted, rtol=rounding, atol=rounding)
