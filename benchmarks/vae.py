"""`python -m benchmarks.vae`: VAEs as diffusers has them and as gfgen runs them, in one run on one GPU.

Random weights. Errors are those of a small picture or video against fp64 with the same weights, means over
several sets of weights.

Legend: B batch, C channels, T H W frames, rows, columns.
"""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import click
import torch
from diffusers.models.autoencoders import autoencoder_kl_qwenimage, autoencoder_kl_wan
from torch import Tensor

from benchmarks.measured import head, host_s, row
from gfgen.models.fast import causal_vae
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.loading.random_weights import random_component

WAN, WAN_MOE, QWEN = "wan2.2-ti2v-5b", "wan2.2-i2v-a14b", "qwen-image"
PRECISIONS = {"bf16": torch.bfloat16, "tf32": torch.float32}
"""tf32: fp32 with the convolutions' products in TF32, torch's default."""
NUM_DRAWS = 6
"""Sets of weights over which errors are averaged: those of one set differ by 10% in either direction."""


class Case(NamedTuple):
    """What is encoded or decoded."""

    model: str
    width: int
    height: int
    frames: int
    stage: str = "decode"

    @property
    def name(self) -> str:
        return f"{self.model} {self.width}x{self.height}x{self.frames} {self.stage}"

    def input(self, vae: Any) -> Tensor:
        """Random latents, or pixels."""
        factor = vae.spatial_compression_ratio
        shape = (1, vae.config.z_dim, (self.frames - 1) // 4 + 1, self.height // factor, self.width // factor)
        if self.stage == "encode":
            shape = (1, 3, self.frames, self.height, self.width)
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        drawn = drawn.clamp(-1, 1) if self.stage == "encode" else drawn
        return drawn.to(vae.device, vae.dtype)

    def run(self, vae: Any, x: Tensor) -> Tensor:
        result: Tensor = vae.encode(x).latent_dist.mode() if self.stage == "encode" else vae.decode(x).sample
        return result


SPEED = (
    Case(QWEN, 1024, 1024, 1),
    Case(WAN, 1280, 704, 81),
    Case(WAN, 832, 480, 49),
    Case(QWEN, 512, 512, 1),
    Case(WAN_MOE, 832, 480, 81),
    Case(WAN_MOE, 832, 480, 81, "encode"),
)
ERRORS = tuple(
    Case(model, 128, 128, frames, stage)
    for model, frames in ((QWEN, 1), (WAN, 5), (WAN_MOE, 5))
    for stage in ("decode", "encode")
)


def new_vae(model: str, precision: str, device: str, draw: int = 0) -> Any:
    """With random weights, also of norms and biases."""
    vae: Any = random_component(CONFIGS / model, "vae", device=device, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    for name, weight in vae.named_parameters():
        if "gamma" in name or "bias" in name:
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
        weight.data = weight.data.roll(draw, 0)
    return torch.nn.Module.to(vae, PRECISIONS[precision])


@torch.no_grad()
def errors(case: Case, precision: str, device: str, draw: int = 0) -> list[float]:
    """Relative errors, root mean squares: diffusers', gfgen's."""
    plain = new_vae(case.model, precision, device, draw)
    fast = copy.deepcopy(plain)
    causal_vae.install(fast)
    x = case.input(plain)
    results = [case.run(vae, x).double() for vae in (plain, fast)]
    exact = case.run(_exact(plain), x.double())
    return [float((result - exact).norm() / exact.norm()) for result in results]


def _exact(vae: Any) -> Any:
    """In fp64, also where diffusers rounds to fp32: as it repeats rows and columns."""
    for module in vae.modules():
        if isinstance(module, autoencoder_kl_wan.WanUpsample | autoencoder_kl_qwenimage.QwenImageUpsample):
            module.__class__ = torch.nn.Upsample
    return torch.nn.Module.to(vae, torch.float64)


@torch.no_grad()
def speeds(case: Case, precision: str, device: str) -> Iterator[tuple[str, float, float, float]]:
    """Of diffusers, then of gfgen: the name, seconds (median), seconds of the first run, peak GB."""
    vae = new_vae(case.model, precision, device)
    x = case.input(vae)
    for name in ("diffusers", "gfgen"):
        if name == "gfgen":
            causal_vae.install(vae)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times_s = [host_s(lambda: case.run(vae, x)) for _ in range(8 if case.frames == 1 else 3)]
        peak_gb = torch.cuda.max_memory_allocated() / 1e9 if device != "cpu" else 0.0
        yield name, statistics.median(times_s[1:]), times_s[0], peak_gb


def speed_table(device: str, until_s: float) -> Iterator[str]:
    yield head("case", "dtype", "diffusers s", "gfgen s", "x", "first s", "peak GB", "gfgen's peak GB")
    for case, precision in itertools.product(SPEED, PRECISIONS):
        if time.monotonic() < until_s:
            (_, plain_s, _, plain_gb), (_, fast_s, first_s, fast_gb) = speeds(case, precision, device)
            times = (f"{plain_s:.4f}", f"{fast_s:.4f}", f"{plain_s / fast_s:.2f}", f"{first_s:.1f}")
            yield row(case.name, precision, *times, f"{plain_gb:.2f}", f"{fast_gb:.2f}")


def error_table(device: str, until_s: float) -> Iterator[str]:
    yield head("case", "dtype", "diffusers' error", "gfgen's", "ratios of single sets")
    for case, precision in itertools.product(ERRORS, PRECISIONS):
        if time.monotonic() < until_s:
            found = [errors(case, precision, device, draw) for draw in range(NUM_DRAWS)]
            plain, fast = map(statistics.mean, zip(*found, strict=True))
            ratios = sorted(own / other for other, own in found)
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            yield row(case.name, precision, f"{plain:.2e}", f"{fast:.2e}", spread)


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--seconds", type=float, default=600.0, show_default=True, help="Start nothing after this time."
)
def main(*, device: str, seconds: float) -> None:
    """Seconds, memory and errors of diffusers' VAEs and of gfgen's, as Markdown."""
    until_s = time.monotonic() + seconds
    for line in itertools.chain(speed_table(device, until_s), [""], error_table(device, until_s)):
        click.echo(line)


if __name__ == "__main__":
    main()
