"""Causal video VAEs of diffusers near the speed of their convolutions: equal up to rounding, for a GPU.

`install` replaces a VAE's loop over latent frames. Modules keep their weights, with channels last in memory:

    passes        what lies between two convolutions is one pass over memory (frame_kernels.py): the bias of
                  the first, the shortcut, norm and activation. It writes the input of the second behind the
                  two frames before it, and keeps the last two for the next latent frame
    upsampling    repeated rows and columns followed by 3x3 weights are four 2x2 convolutions of the small
                  frame, one for each place of a pixel among four: 4/9 of the operations
    first frame   has no frames before it, so only the last of three slices of each kernel counts

Legend: T frames, H W rows and columns, C channels; one sample.
Source: diffusers 0.42 AutoencoderKLWan and AutoencoderKLQwenImage.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from torch import Tensor, nn
from torch.nn import functional

from gfgen.models.fast import stop_checks
from gfgen.models.parallel.shared_decode import present_bands


@torch.no_grad()
def install(vae: Any) -> None:
    """Replace a VAE's encode and decode; once for each instance, on the device where it stays."""
    for conv in vae.modules():
        if isinstance(conv, nn.Conv3d):
            conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last_3d)
        elif isinstance(conv, nn.Conv2d):
            conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    for block in vae.decoder.modules():
        if hasattr(block, "resample"):
            _, conv = block.resample
            conv.register_buffer("phases", _phases_of(conv.weight), persistent=False)
    vae._encode = functools.partial(_encode, vae)
    vae._decode = functools.partial(_decode, vae)


def _phases_of(weight: Tensor) -> Tensor:
    """3x3 weights for an enlarged frame as 2x2 weights for the frame: [O, I, 3, 3] -> [4, O, 2, 2, I].

    A pixel in an upper row reads the row above it and twice its own row of the small frame, one in a lower
    row twice its own and the row below; likewise for columns.
    """
    upper, lower = ((1, 0, 0), (0, 1, 1)), ((1, 1, 0), (0, 0, 1))  # by place, by row of the small frame
    sums = torch.tensor((upper, lower), dtype=torch.float64, device=weight.device)
    phases = torch.einsum("aui,bvj,ocij->abouvc", sums, sums, weight.double())
    return phases.flatten(0, 1).to(weight.dtype).contiguous()


FAST_OUTPUTS = 32
"""Channels of an fp32 convolution's output are a multiple of this; cuDNN takes 12.0 ms for the 12 of Wan 2.2
at 1280x704 and 3.3 ms for 32, in bf16 1.9 and 2.5 (benchmarks/results/decode.md)."""


class Repeats(NamedTuple):
    """How a shortcut gets the size of what it is added to: by repeating channels, which then become frames,
    rows and columns (DupUp3D)."""

    frames: int
    channels: int
    skip: int
    """Frames that are left out at the start of a video."""


@dataclass(slots=True)
class Frames:
    """Frames that are not added up yet: a convolution's output, its bias, and a shortcut.

    Shapes: parts one [T, H, W, C], or four [T, H/2 + 1, W/2 + 1, C] whose pixels are those of every second
    row and column; shortcut [T, H, W, C], or what `repeats` makes this size.
    """

    parts: tuple[Tensor, ...]
    bias: Tensor | None = None
    shortcut: Tensor | None = None
    repeats: Repeats | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        frames, height, width, channels = self.parts[0].shape
        if len(self.parts) == 4:
            height, width = 2 * (height - 1), 2 * (width - 1)
        return frames, height, width, channels

    def settle(self, total: Tensor) -> None:
        """From now on these are added up, and the parts' memory is free."""
        self.parts, self.bias, self.shortcut, self.repeats = (total,), None, None, None


class _Past:
    """The last two frames of each convolution's input, between the latent frames of one decode."""

    def __init__(self, *, has_next: bool) -> None:
        self.is_first = True
        self._has_next = has_next
        self._kept: dict[nn.Module, Tensor] = {}
        self._bands = present_bands()

    def input(self, frames: Frames, conv: Any, norm: Any = None, *, needs_total: bool = False) -> Tensor:
        """What `conv` reads: [T, H, W, C], in a video that has begun with the two frames before them, with a
        row more on either side if rows are shared. Flat convolutions read no earlier frames."""
        num_frames, height, width, channels = frames.shape
        is_causal = isinstance(conv, nn.Conv3d)
        is_wide = self._bands is not None and conv.kernel_size[-2] == 3
        if is_causal and self._has_next and conv not in self._kept:
            self._kept[conv] = frames.parts[0].new_zeros((2, height, width, channels))
        front = 2 if is_causal and not self.is_first else 0
        padded = frames.parts[0].new_empty((front + num_frames, height + 2 * is_wide, width, channels))
        added(frames, norm, padded, kept=self._kept.get(conv), needs_total=needs_total)
        return self._widened(padded) if is_wide else padded

    def _widened(self, padded: Tensor) -> Tensor:
        """With the neighbours' rows, or zeros at the picture's edge, in the first and the last row."""
        assert self._bands is not None
        rows = padded.flatten(2)
        for row, edge in zip((0, -1), self._bands.halo(rows[:, 1:-1]), strict=True):
            rows[:, row] = 0 if edge is None else edge
        return padded

    def convolved(self, x: Tensor, conv: Any) -> Tensor:
        rows, columns = ((size - 1) // 2 for size in conv.kernel_size[1:])
        rows = 0 if self._bands is not None else rows
        weight = conv.weight
        if weight.dtype == torch.float32 and (missing := -conv.out_channels % FAST_OUTPUTS):
            weight = functional.pad(weight, (0,) * 9 + (missing,))
        if self.is_first:
            return _flat(x, weight[:, :, -1], (rows, columns))[..., : conv.out_channels].contiguous()
        y = functional.conv3d(x.permute(3, 0, 1, 2)[None], weight, padding=(0, rows, columns))
        return y[0, : conv.out_channels].permute(1, 2, 3, 0).contiguous()

    def enlarged(self, x: Tensor, conv: Any) -> Frames:
        padding = (0 if self._bands is not None else 1, 1)
        return Frames(tuple(_flat(x, each.permute(0, 3, 1, 2), padding) for each in conv.phases), conv.bias)

    def halved(self, x: Tensor, conv: Any) -> Frames:
        """Half the frames, from the last one before them; the first frame of a video stays as it is."""
        before = self._kept.get(conv)
        if self._has_next:
            self._kept[conv] = x[-1:].clone()
        if before is None:
            return Frames((x,))
        both = torch.cat((before, x)).permute(3, 0, 1, 2)[None]
        y = functional.conv3d(both, conv.weight, stride=conv.stride)
        return Frames((y[0].permute(1, 2, 3, 0).contiguous(),), conv.bias)

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._bands is not None:
            key, value = self._bands.everywhere(key, value)
        return functional.scaled_dot_product_attention(query, key, value)


def _flat(x: Tensor, weight: Tensor, padding: tuple[int, int] = (0, 0)) -> Tensor:
    """A convolution of each frame: [T, H, W, C] -> [T, H, W, O]."""
    return functional.conv2d(x.permute(0, 3, 1, 2), weight, padding=padding).permute(0, 2, 3, 1).contiguous()


# The encoder, by its modules ------------------------------------------------------------------------


@torch.no_grad()
def _encode(vae: Any, x: Tensor) -> Any:
    """In place of a VAE's `_encode`; diffusers' own code does tiles and several samples."""
    if vae.use_tiling or len(x) > 1:
        return type(vae)._encode(vae, x)
    if (patch_size := getattr(vae.config, "patch_size", None)) is not None:
        x = patchify(x, patch_size=patch_size)
    frames_THWC = x[0].permute(1, 2, 3, 0).contiguous()
    past = _Past(has_next=len(frames_THWC) > 1)
    encoded = []
    for first in range(-3, len(frames_THWC) - 3, 4):  # one frame, then four at a time
        frames = Frames((frames_THWC[max(first, 0) : first + 4],))
        encoded.append(_encoded(vae.encoder, frames, past))
        past.is_first = False
    return vae.quant_conv(torch.cat(encoded).permute(3, 0, 1, 2)[None])


def _encoded(encoder: Any, frames: Frames, past: _Past) -> Tensor:
    frames = _begun(encoder, frames, past)
    for block in encoder.down_blocks:
        frames = _down_block(block, frames, past)
    return _ended(encoder, _middle(encoder.mid_block, frames, past), past)


def _down_block(block: Any, frames: Frames, past: _Past) -> Frames:
    """Any block of an encoder: Wan 2.2 nests them, with a shortcut around each level."""
    if hasattr(block, "conv1"):
        return _residual(block, frames, past)
    if hasattr(block, "to_qkv"):
        return _attention(block, frames, past)
    if hasattr(block, "resample"):
        return _reduced(block, frames, past)
    start = frames
    for resnet in block.resnets:
        frames = _residual(resnet, frames, past)
    if block.downsampler is None:
        added(frames, None, None, needs_total=True)
    else:
        frames = _reduced(block.downsampler, frames, past)
    shortcut = block.avg_shortcut(start.parts[0].permute(3, 0, 1, 2)[None])[0]
    frames.shortcut = shortcut.permute(1, 2, 3, 0).contiguous()
    return frames


def _reduced(downsampler: Any, frames: Frames, past: _Past) -> Frames:
    """Half the rows and columns, and half the frames after the first one if the level halves them."""
    pad, conv = downsampler.resample
    x = pad(past.input(frames, conv).permute(0, 3, 1, 2))
    y = conv(x).permute(0, 2, 3, 1).contiguous()
    return past.halved(y, downsampler.time_conv) if downsampler.mode == "downsample3d" else Frames((y,))


# The decoder, by its modules ------------------------------------------------------------------------


@torch.no_grad()
def _decode(vae: Any, z: Tensor, return_dict: bool = True) -> Any:
    """In place of a VAE's `_decode`; diffusers' own code does tiles and several samples."""
    if vae.use_tiling or len(z) > 1:
        return type(vae)._decode(vae, z, return_dict=return_dict)
    latents_THWC = vae.post_quant_conv(z)[0].permute(1, 2, 3, 0).contiguous()
    past = _Past(has_next=len(latents_THWC) > 1)
    pixels, num_done = z.new_empty(0), 0
    for latent in latents_THWC.split(1):
        decoded = _decoded(vae.decoder, Frames((latent,)), past).permute(3, 0, 1, 2)[None]
        if (patch_size := getattr(vae.config, "patch_size", None)) is not None:
            decoded = unpatchify(decoded, patch_size=patch_size)
        if past.is_first:
            num_frames = 1 + (len(latents_THWC) - 1) * 2 ** sum(vae.temperal_upsample)
            pixels = decoded.new_empty((1, decoded.shape[1], num_frames, *decoded.shape[3:]))
        num_new = decoded.shape[2]
        torch.clamp(decoded, -1.0, 1.0, out=pixels[:, :, num_done : num_done + num_new])
        past.is_first, num_done = False, num_done + num_new
    return type(vae)._decode.__globals__["DecoderOutput"](sample=pixels) if return_dict else (pixels,)


def _decoded(decoder: Any, frames: Frames, past: _Past) -> Tensor:
    frames = _middle(decoder.mid_block, _begun(decoder, frames, past), past)
    for block in decoder.up_blocks:
        frames = _up_block(block, frames, past)
    return _ended(decoder, frames, past)


def _up_block(block: Any, frames: Frames, past: _Past) -> Frames:
    start = frames
    for resnet in block.resnets:
        frames = _residual(resnet, frames, past)
    upsampler = next((each for each in block.modules() if hasattr(each, "resample")), None)
    if upsampler is None:
        return frames
    frames = _enlarged(upsampler, frames, past)
    if (shortcut := getattr(block, "avg_shortcut", None)) is not None:
        skip = shortcut.factor_t - 1 if past.is_first else 0
        frames.shortcut = start.parts[0]
        frames.repeats = Repeats(shortcut.factor_t, shortcut.repeats, skip)
    return frames


def _enlarged(upsampler: Any, frames: Frames, past: _Past) -> Frames:
    """Twice the rows and columns, and twice the frames if the video has begun and the level doubles them."""
    if upsampler.mode == "upsample3d" and not past.is_first:
        x = past.input(frames, upsampler.time_conv)
        num_frames, height, width, channels = frames.shape
        y = past.convolved(x, upsampler.time_conv) + upsampler.time_conv.bias
        doubled = y.unflatten(-1, (2, channels)).permute(0, 3, 1, 2, 4).contiguous()
        frames = Frames((doubled.view(2 * num_frames, height, width, channels),))
    _, conv = upsampler.resample
    return past.enlarged(past.input(frames, conv), conv)


# What both have -------------------------------------------------------------------------------------


def _begun(coder: Any, frames: Frames, past: _Past) -> Frames:
    x = past.input(frames, coder.conv_in)
    return Frames((past.convolved(x, coder.conv_in),), coder.conv_in.bias)


def _ended(coder: Any, frames: Frames, past: _Past) -> Tensor:
    x = past.input(frames, coder.conv_out, coder.norm_out)
    bias: Tensor = coder.conv_out.bias
    return past.convolved(x, coder.conv_out) + bias


def _middle(block: Any, frames: Frames, past: _Past) -> Frames:
    frames = _residual(block.resnets[0], frames, past)
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        frames = _residual(resnet, _attention(attention, frames, past), past)
    return frames


def _residual(block: Any, frames: Frames, past: _Past) -> Frames:
    """Two convolutions and a shortcut. `frames` are added up afterwards."""
    stop_checks.check()
    x = past.input(frames, block.conv1, block.norm1, needs_total=True)
    inner = Frames((past.convolved(x, block.conv1),), block.conv1.bias)
    x = past.input(inner, block.conv2, block.norm2)
    (shortcut,), bias = frames.parts, block.conv2.bias
    if isinstance(block.conv_shortcut, nn.Conv3d):
        shortcut = _flat(shortcut, block.conv_shortcut.weight[:, :, 0])
        bias = bias + block.conv_shortcut.bias
    return Frames((past.convolved(x, block.conv2),), bias, shortcut)


def _attention(block: Any, frames: Frames, past: _Past) -> Frames:
    num_frames, height, width, channels = frames.shape
    x = frames.parts[0].new_empty(frames.shape)
    added(frames, block.norm, x, needs_total=True, activate=False)
    rows = x.view(num_frames, 1, height * width, channels)
    projected = functional.linear(rows, block.to_qkv.weight[:, :, 0, 0], block.to_qkv.bias)
    rows = past.attended(*projected.chunk(3, dim=-1))
    y = functional.linear(rows, block.proj.weight[:, :, 0, 0]).view(frames.shape)
    return Frames((y,), block.proj.bias, frames.parts[0])


# What lies between two convolutions -----------------------------------------------------------------


def added(
    frames: Frames,
    norm: Any,
    padded: Tensor | None,
    *,
    kept: Tensor | None = None,
    needs_total: bool = False,
    activate: bool = True,
) -> None:
    """Add `frames` up and write them to `padded`, after norm and SiLU if there is a norm.

    padded: [2 or 0 + T, H or H + 2, W, C]; of H + 2 rows the outer ones are left out, and the two frames in
    front get `kept`, which then takes the last two. needs_total: `frames` are settled with their sum.
    """
    gamma = None if norm is None else norm.gamma.flatten()
    activate = activate and norm is not None
    total = frames.parts[0].new_empty(frames.shape) if needs_total else None
    if frames.parts[0].is_cpu:
        _add_in_steps(frames, gamma, activate, total, padded, kept)
    else:
        from gfgen.models.fast import frame_kernels

        frame_kernels.add_frames(frames, gamma, activate, total, padded, kept)
    if total is not None:
        frames.settle(total)


def _add_in_steps(
    frames: Frames,
    gamma: Tensor | None,
    activate: bool,
    total: Tensor | None,
    padded: Tensor | None,
    kept: Tensor | None,
) -> None:
    value = _sum(frames)
    if total is not None:
        total.copy_(value)
    if padded is None:
        return
    if gamma is not None:
        value = functional.normalize(value, dim=-1) * value.shape[-1] ** 0.5 * gamma
    if activate:
        value = functional.silu(value)
    value = value.to(padded.dtype)
    inner = padded[:, 1:-1] if padded.shape[1] > value.shape[1] else padded
    inner[-len(value) :] = value
    if len(inner) > len(value):
        assert kept is not None
        inner[:2] = kept
    if kept is not None:
        kept.copy_(torch.cat((kept, value))[-2:])


def _sum(frames: Frames) -> Tensor:
    _, height, width, channels = frames.shape
    wide = torch.promote_types(frames.parts[0].dtype, torch.float32)
    value = frames.parts[0].to(wide)
    if len(frames.parts) == 4:
        value = value.new_empty(frames.shape)
        for idx, part in enumerate(frames.parts):
            below, right = divmod(idx, 2)
            own = part[:, below : below + height // 2, right : right + width // 2]
            value[:, below::2, right::2] = own
    if frames.bias is not None:
        value = value + frames.bias
    if frames.shortcut is None:
        return value
    if frames.repeats is None:
        return value + frames.shortcut
    times, repeats, skip = frames.repeats
    repeated = frames.shortcut.repeat_interleave(repeats, dim=-1)
    places = repeated.view(-1, height // 2, width // 2, channels, times, 2, 2).permute(0, 4, 1, 5, 2, 6, 3)
    whole: Tensor = places.reshape(-1, height, width, channels)  # T, times, H, 2, W, 2, C
    return value + whole[skip:]
