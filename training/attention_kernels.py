"""Which of torch's attention kernels trains fastest on this GPU, and right.

Heads of 12 are so small that attention is about half of a training step; which kernel is the fastest
there depends on the GPU and on torch's version, so it is measured: a second at the start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from training.parts import NUM_HEADS

logger = logging.getLogger(__name__)

CANDIDATES = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SAMPLES = 128
QUERIES = 320
"""Tokens of a video of 17 frames, 128 x 128."""
KEYS = (320, 56)
"""Of self-attention, and of cross-attention to prompts."""
HEAD_DIM = 16
REPEATS = 5
MAX_ERROR = 0.05
"""Of outputs and gradients in bf16, as a share of the largest value in fp32."""


def use_fastest_attention(device: torch.device) -> Mapping[str, float | None]:
    """Milliseconds of each kernel, None where it does not work; from now on the fastest is used."""
    times_ms = {name: _time_ms(backend, device) for name, backend in CANDIDATES.items()}
    working = {name: time_ms for name, time_ms in times_ms.items() if time_ms is not None}
    if working:
        best = min(working, key=lambda name: working[name])
        torch.backends.cuda.enable_cudnn_sdp(best == "cudnn")
        torch.backends.cuda.enable_flash_sdp(best == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(best == "efficient")
    return times_ms


def _time_ms(backend: SDPBackend, device: torch.device) -> float | None:
    try:
        with sdpa_kernel(backend):
            return sum(_time_of(backend, device, keys) for keys in KEYS)
    except RuntimeError as error:
        logger.info("attention by %s: %s", backend, str(error).strip().splitlines()[0])
        return None


def _time_of(backend: SDPBackend, device: torch.device, keys: int) -> float:
    inputs = _inputs(device, keys)
    found = _gradients([x.clone() for x in inputs])
    with sdpa_kernel(SDPBackend.MATH):
        expected = _gradients([x.float() for x in inputs])
    for one, other in zip(found, expected, strict=True):
        error = float((one.float() - other).abs().max() / other.abs().max())
        if not error < MAX_ERROR:
            raise RuntimeError(f"{backend} is wrong by {error:.3f}")
    torch.cuda.synchronize(device)
    began_s = time.monotonic()
    for _ in range(REPEATS):
        _gradients(inputs)
    torch.cuda.synchronize(device)
    return 1000 * (time.monotonic() - began_s) / REPEATS


def _inputs(device: torch.device, keys: int) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(
            SAMPLES, tokens, NUM_HEADS, HEAD_DIM, generator=generator, device=device, dtype=torch.bfloat16
        ).transpose(1, 2)
        for tokens in (QUERIES, keys, keys)
    ]


def _gradients(inputs: list[Tensor]) -> list[Tensor]:
    """The attention's result and its gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2])
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]
