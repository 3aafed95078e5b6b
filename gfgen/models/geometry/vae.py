"""FLOPs of the causal video VAEs of Wan and Qwen-Image, from their config files.

Counts the convolutions, which are nearly all of it, and the attention in the middle, one per latent frame.
Both classes share one architecture: Wan 2.1 and Qwen-Image halve the channels in the upsampler; Wan 2.2
keeps them and adds a patch of pixels.

Source: diffusers 0.42 AutoencoderKLWan and AutoencoderKLQwenImage.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gfgen.models.geometry.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class VaeShape:
    z_dim: int
    encoder_dim: int
    decoder_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temporal_downsample: tuple[bool, ...]
    is_residual: bool
    pixel_channels: int
    """Channels after pixels are folded into patches: 3, or 12 for patches of 2 x 2."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> VaeShape:
        config = checkpoint.configs["vae"]
        base_dim = checkpoint.value("vae", "base_dim")
        return cls(
            z_dim=checkpoint.value("vae", "z_dim"),
            encoder_dim=base_dim,
            decoder_dim=config.get("decoder_base_dim") or base_dim,
            dim_mult=tuple(checkpoint.value("vae", "dim_mult")),
            num_res_blocks=checkpoint.value("vae", "num_res_blocks"),
            temporal_downsample=tuple(checkpoint.value("vae", "temperal_downsample")),
            is_residual=bool(config.get("is_residual", False)),
            pixel_channels=config.get("out_channels") or config.get("input_channels", 3),
        )

    def decode_flops(self, *, frames: int, height: int, width: int) -> float:
        """FLOPs of decoding latents [z_dim, frames, height, width]."""
        dims = [self.decoder_dim * factor for factor in (self.dim_mult[-1], *reversed(self.dim_mult))]
        volume = frames * height * width
        total = _conv(volume, self.z_dim, self.z_dim, 1) + _conv(volume, self.z_dim, dims[0], 27)
        total += self._middle_flops(dims[0], frames=frames, pixels=height * width)
        upsample = (*reversed(self.temporal_downsample), None)
        for level, (before, after) in enumerate(itertools.pairwise(dims)):
            before = before // 2 if level > 0 and not self.is_residual else before
            total += _residual(volume, before, after) + self.num_res_blocks * _residual(volume, after, after)
            in_time = upsample[level]
            if in_time is None:
                continue
            if in_time:
                total += _conv(volume, after, 2 * after, 3)
                volume = volume // frames * (2 * frames - 1)
                frames = 2 * frames - 1
            volume *= 4
            total += _conv(volume, after, after if self.is_residual else after // 2, 9)
        return total + _conv(volume, dims[-1], self.pixel_channels, 27)

    def encode_flops(self, *, frames: int, height: int, width: int) -> float:
        """FLOPs of encoding pixels that decode from latents [z_dim, frames, height, width]."""
        dims = [self.encoder_dim * factor for factor in (1, *self.dim_mult)]
        num_spatial = len(self.temporal_downsample)
        frames = (frames - 1) * 2 ** sum(self.temporal_downsample) + 1
        volume = frames * height * width * 4**num_spatial
        total = _conv(volume, self.pixel_channels, dims[0], 27)
        downsample = (*self.temporal_downsample, None)
        for level, (before, after) in enumerate(itertools.pairwise(dims)):
            total += _residual(volume, before, after)
            total += (self.num_res_blocks - 1) * _residual(volume, after, after)
            in_time = downsample[level]
            if in_time is None:
                continue
            volume //= 4
            total += _conv(volume, after, after, 9)
            if in_time:
                volume = volume // frames * ((frames + 1) // 2)
                frames = (frames + 1) // 2
                total += _conv(volume, after, after, 3)
        total += self._middle_flops(dims[-1], frames=frames, pixels=volume // frames)
        total += _conv(volume, dims[-1], 2 * self.z_dim, 27)
        return total + _conv(volume, 2 * self.z_dim, 2 * self.z_dim, 1)

    def _middle_flops(self, dim: int, *, frames: int, pixels: int) -> float:
        volume = frames * pixels
        attention = _conv(volume, dim, 4 * dim, 1) + 4.0 * frames * pixels**2 * dim
        return 2 * _residual(volume, dim, dim) + attention


def _conv(volume: int, channels_in: int, channels_out: int, kernel: int) -> float:
    return 2.0 * volume * channels_in * channels_out * kernel


def _residual(volume: int, channels_in: int, channels_out: int) -> float:
    shortcut = 0.0 if channels_in == channels_out else _conv(volume, channels_in, channels_out, 1)
    both = _conv(volume, channels_in, channels_out, 27) + _conv(volume, channels_out, channels_out, 27)
    return both + shortcut
