"""What `python -m benchmarks.decode` runs on each GPU: a VAE's decode, alone and in bands of rows.

Random weights and latents, the same on every rank. Each rank decodes the whole picture or video first; what
ranks decode together is compared with that. `python -m benchmarks.vae` compares with diffusers.

Legend: B batch, C channels, T H W latent frames, rows, columns.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.measured import MeasuredShape
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.descriptor import Descriptor
from gfgen.layout import Layout
from gfgen.models.families.pictures import to_uint8
from gfgen.models.fast import causal_vae
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.loading.random_weights import random_component
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.models.parallel.shared_decode import decode_rows, install

REPEATS = 3
"""Of a decode on several ranks, after a first one that does not count."""
REPEATS_ALONE = 1
"""Of one on a rank alone; all GPUs of the machine do it at the same time, each for itself."""

DecodeResult = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DecodeShape(MeasuredShape):
    """What is decoded."""

    is_exact: bool = False
    """With fp32 as such; torch computes fp32 convolutions in TF32 unless told otherwise."""

    @property
    def variant(self) -> str:
        return "-exact" if self.is_exact else ""

    @property
    def latents(self) -> tuple[int, ...]:
        """[B, C, T, H, W]"""
        channels, factor = (16, 8) if self.model == "qwen-image" else (48, 16)
        return 1, channels, (self.frames - 1) // 4 + 1, self.height // factor, self.width // factor


@dataclass(slots=True)
class Decode:
    """A VAE, what it is to decode, and what it made alone."""

    vae: Any
    latents_BCTHW: Tensor
    whole: Tensor | None = None
    frames: Tensor | None = None
    """What it made in fp32, as bytes."""


_KEPT: dict[DecodeShape, Decode] = {}
"""The last shape's, between calls: bands are compared with it."""


@torch.no_grad()
def alone(endpoint: CudaEndpoint, shape: DecodeShape, dtype: str) -> DecodeResult:
    """Times of a whole decode on this GPU; in bf16 also how far it is from fp32, measured before."""
    torch.cuda.set_device(endpoint.device)
    torch.backends.cudnn.allow_tf32 = not shape.is_exact
    if shape not in _KEPT:
        _KEPT.clear()
        gc.collect()
        torch.cuda.empty_cache()
        vae = random_component(
            CONFIGS / shape.model, "vae", device=str(endpoint.torch_device), dtype=torch.float32
        )
        install(vae)
        causal_vae.install(vae)
        _KEPT[shape] = Decode(vae, random_latents(shape.latents, endpoint.torch_device))
    decode = _KEPT[shape]
    torch.nn.Module.to(decode.vae, getattr(torch, dtype))  # diffusers' own warns that it casts
    torch.cuda.reset_peak_memory_stats()
    found = decode_alone(decode)
    return {**found, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


@torch.no_grad()
def shared(endpoint: CudaEndpoint, shape: DecodeShape, layout: Layout, dispatch: int) -> DecodeResult:
    """Times of a decode with other GPUs, and how far this one's rows are from those of `alone`."""
    torch.cuda.set_device(endpoint.device)
    numbers = iter(range(dispatch, dispatch + REPEATS + 1))

    def meet() -> Parallel:
        group = endpoint.group(Descriptor(next(numbers), layout, (1,) * layout.degree))
        group.enter()
        return parallel_from(group)

    torch.cuda.reset_peak_memory_stats()
    found = decode_shared(_KEPT[shape], meet)
    endpoint.check(endpoint.last_dispatch)
    return {**found, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def random_latents(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Latents as a VAE takes them, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


def decode_alone(decode: Decode) -> DecodeResult:
    """A whole decode; the first one does not count."""
    latents_BCTHW = decode.latents_BCTHW.to(decode.vae.dtype)
    times_s = []
    for _ in range(REPEATS_ALONE + 1):
        decode.whole = None
        seconds, (decode.whole, _) = _timed(lambda: decode_rows(decode.vae, latents_BCTHW, None))
        times_s.append(seconds)
    assert decode.whole is not None
    frames = _bytes_of(decode.whole)
    psnr_db = None if decode.frames is None else psnr(frames, decode.frames)
    if decode.frames is None:
        decode.frames = frames
    return {
        "first_s": times_s[0],
        "times_s": times_s[1:],
        "spread": float(frames.float().std()),
        "psnr_db": psnr_db,
    }


def decode_shared(decode: Decode, meet: Callable[[], Parallel]) -> DecodeResult:
    """A decode of this rank's rows; the clock runs from when all ranks have come until this one is done."""
    assert decode.whole is not None
    latents_BCTHW = decode.latents_BCTHW.to(decode.vae.dtype)
    times_s = []
    for _ in range(REPEATS + 1):
        parallel = meet()
        seconds, (rows, first_row) = _timed(lambda: decode_rows(decode.vae, latents_BCTHW, parallel))  # noqa: B023
        times_s.append(seconds)
    wanted = decode.whole[:, :, :, first_row : first_row + rows.shape[3]]
    apart = float((rows.float() - wanted.float()).abs().max())
    levels = (_bytes_of(rows).int() - _bytes_of(wanted).int()).abs()
    return {
        "first_s": times_s[0],
        "times_s": times_s[1:],
        "distance": apart / float(decode.whole.abs().max()),
        "max_levels": int(levels.max()),
        "share_differing": float((levels > 0).float().mean()),
        "psnr_db": psnr(_bytes_of(rows), _bytes_of(wanted)),
    }


def psnr(one: Tensor, other: Tensor) -> float:
    """Of bytes, in decibels; infinite where they are equal."""
    error = torch.zeros((), dtype=torch.float64, device=one.device)
    for a, b in zip(one, other, strict=True):  # a frame at a time: differences are eight times as large
        error += (a.double() - b.double()).square().mean() / len(one)
    return math.inf if error == 0 else 10 * math.log10(255**2 / float(error))


def _bytes_of(pixels: Tensor) -> Tensor:
    """[1, 3, T, H, W] in [-1, 1] as uint8 [T, H, W, 3], as an adapter makes it."""
    return to_uint8((pixels[0].permute(1, 0, 2, 3).float() / 2 + 0.5).clamp(0, 1))


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    _finish()
    began_s = time.perf_counter()
    result = run()
    _finish()
    return time.perf_counter() - began_s, result


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
