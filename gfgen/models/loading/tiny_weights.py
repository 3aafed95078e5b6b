"""Weights that make a tiny untrained model draw soft, colourful shapes instead of noise.

Plain random weights give uniform grey. These are random, too, with two changes:

- the VAE's convolutions mix channels at random but blur in space and time, so a decoder enlarges its latents
  smoothly, in random colours;
- the transformer predicts its input minus a local mean (attention whose logits fall with distance, by the
  rotary embedding), so denoising keeps what neighbouring tokens have in common; the prompt adds a tint.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

BLUR = torch.outer(torch.tensor([1.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 1.0])) / 16
CONTRAST = 1.2
"""Spread of decoded values around mid-grey, where -1 and 1 are black and white."""


@torch.no_grad()
def shape_vae(vae: Any) -> None:
    """Weights for AutoencoderKLWan (both variants) and AutoencoderKLQwenImage."""
    for coder in (vae.encoder, vae.decoder):
        for module in coder.modules():
            if isinstance(module, nn.Conv3d):
                _shape_conv(module, taps=(0.0, 0.3, 0.7))
        for module in coder.modules():
            if hasattr(module, "conv2"):
                _ignore_common_part(module.conv1)
                _ignore_common_part(module.conv2)
                module.conv2.weight.mul_(0.5)
            if hasattr(module, "to_qkv"):
                module.proj.weight.mul_(0.2)
    for module in vae.encoder.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            _shape_conv(module)
    _identity(vae.post_quant_conv)
    _shape_upsamplers(vae.decoder)
    _shape_colours(vae.decoder.conv_out)


@torch.no_grad()
def shape_wan_transformer(model: Any) -> None:
    """Weights for WanTransformer3DModel."""
    inner = model.proj_out.in_features
    patch: nn.Conv3d = model.patch_embedding
    _read_and_write_patches(patch, model.proj_out)
    model.scale_shift_table.zero_()
    model.condition_embedder.time_proj.weight.mul_(0.3)
    text = model.condition_embedder.text_embedder
    for linear in (text.linear_1, text.linear_2):
        _random_linear(linear, gain=1.5)
    for block in model.blocks:
        # rows: shift, scale and gate of attention, then of the feed-forward
        block.scale_shift_table.zero_()
        block.scale_shift_table[:, 2] = 1.0
        block.scale_shift_table[:, 5] = 0.3
        _local_mean(block.attn1, head_dim=inner // block.attn1.heads, weight=-0.6)
        _tint(block.attn2)


@torch.no_grad()
def shape_qwen_transformer(model: Any) -> None:
    """Weights for QwenImageTransformer2DModel."""
    basis = _orthogonal(model.img_in.out_features, model.img_in.in_features)
    model.img_in.weight.copy_(basis)
    model.proj_out.weight.copy_(basis.T)
    for block in model.transformer_blocks:
        block.img_mod[1].weight.mul_(0.3)
        # thirds of each half: shift, scale, gate
        gates = block.img_mod[1].bias.view(2, 3, -1)[:, 2]
        gates[0] = 1.0
        gates[1] = 0.3
        _local_mean(block.attn, head_dim=model.config.attention_head_dim, weight=-0.6)
        _random_linear(block.attn.add_k_proj, gain=1.0)
        _random_linear(block.attn.add_v_proj, gain=1.0)
        block.attn.norm_added_k.weight.fill_(4.0)


def _shape_conv(conv: Any, *, taps: tuple[float, float, float] | None = None) -> None:
    """A random mix of channels, blurred in space and, by `taps`, over the last three frames."""
    mix = _orthogonal(conv.out_channels, conv.in_channels)
    spatial = BLUR if conv.kernel_size[-1] == 3 else torch.ones(1, 1)
    kernel = spatial
    if len(conv.kernel_size) == 3:
        over_time = torch.tensor(taps) if conv.kernel_size[0] == 3 else torch.ones(1)
        kernel = over_time[:, None, None] * spatial
    conv.weight.copy_(mix.view(*mix.shape, *[1] * kernel.ndim) * kernel)
    conv.bias.zero_()


def _shape_upsamplers(decoder: Any) -> None:
    """Enlarge smoothly: blur the nearest-neighbour enlargement.

    The residual variant adds the nearest-neighbour enlargement itself, so its branch is blur minus identity.
    """
    for block in decoder.up_blocks:
        residual = getattr(block, "avg_shortcut", None) is not None
        upsamplers = [block.upsampler] if hasattr(block, "upsampler") else list(block.upsamplers or [])
        for upsampler in filter(None, upsamplers):
            conv = upsampler.resample[1]
            _shape_conv(conv)
            if residual:
                sharp = torch.zeros(3, 3)
                sharp[1, 1] = 1.0
                same = torch.eye(conv.out_channels)[:, :, None, None]
                conv.weight.copy_(same * (BLUR - sharp))
            if hasattr(upsampler, "time_conv"):
                _interpolate_frames(upsampler.time_conv)


def _interpolate_frames(conv: Any) -> None:
    """Two frames for one: the mean with the frame before, then the frame itself."""
    same = torch.eye(conv.in_channels)
    conv.weight.zero_()
    conv.bias.zero_()
    conv.weight[: conv.in_channels, :, 1, 0, 0] = 0.5 * same
    conv.weight[: conv.in_channels, :, 2, 0, 0] = 0.5 * same
    conv.weight[conv.in_channels :, :, 2, 0, 0] = same


def _shape_colours(conv: Any) -> None:
    """Random colours, the same for all pixels of a patch, blended a little over three frames."""
    conv.bias.zero_()
    pixels = conv.out_channels // 3
    colours = CONTRAST * _orthogonal(3, conv.in_channels) / math.sqrt(conv.in_channels / 3)
    kernel = torch.tensor([0.1, 0.25, 0.65])[:, None, None] * BLUR
    weight = colours.repeat_interleave(pixels, dim=0)
    conv.weight.copy_(weight[:, :, None, None, None] * kernel)
    _ignore_common_part(conv)


def _ignore_common_part(conv: Any) -> None:
    """No response to what all channels share: after SiLU that is one tint everywhere."""
    conv.weight.sub_(conv.weight.mean(dim=1, keepdim=True))


def _read_and_write_patches(patch: Any, proj_out: Any) -> None:
    """Patches into the hidden state by an orthogonal map, and out again by its inverse.

    What comes in beyond the latents' channels (the image condition) is subtracted: a pull
    towards the image.
    """
    inner, channels = patch.out_channels, patch.in_channels
    volume = math.prod(patch.kernel_size)
    out_channels = proj_out.out_features // volume
    basis = _orthogonal(inner, channels * volume).view(inner, channels, *patch.kernel_size)
    patch.weight.copy_(basis)
    patch.bias.zero_()
    inverse = basis[:, :out_channels].permute(2, 3, 4, 1, 0).reshape(proj_out.out_features, inner)
    proj_out.weight.copy_(inverse)
    if channels > out_channels:
        condition = basis[:, channels - out_channels :].permute(2, 3, 4, 1, 0).reshape(-1, inner)
        proj_out.weight.sub_(0.5 * condition)


def _local_mean(attention: Any, *, head_dim: int, weight: float) -> None:
    """Self-attention that adds `weight` times a mean over nearby tokens.

    Queries and keys are mostly one constant vector, so that logits depend on the distance
    alone, through the rotary embedding; values pass through.
    """
    inner = attention.to_q.out_features
    constant = torch.randn(inner).view(-1, head_dim)
    constant = (constant / constant.norm(dim=-1, keepdim=True)).flatten() * math.sqrt(head_dim)
    for linear in (attention.to_q, attention.to_k):
        linear.weight.mul_(0.3)
        linear.bias.copy_(constant)
    for norm in (attention.norm_q, attention.norm_k):
        norm.weight.fill_(1.7)
    attention.to_v.weight.copy_(torch.eye(inner) + 0.3 * _orthogonal(inner, inner))
    attention.to_out[0].weight.copy_(weight * torch.eye(inner))


def _tint(attention: Any) -> None:
    """Cross-attention that adds a mix of the prompt's words.

    Padding is zero before it and stays zero without biases, so it takes no part in the mix
    beyond its share of the softmax, which sharp logits keep small.
    """
    for linear in (attention.to_q, attention.to_k, attention.to_v, attention.to_out[0]):
        _random_linear(linear, gain=1.0)
    attention.to_out[0].weight.mul_(0.6)
    for norm in (attention.norm_q, attention.norm_k):
        norm.weight.fill_(2.0)


def _random_linear(linear: Any, *, gain: float) -> None:
    linear.weight.copy_(gain * _orthogonal(linear.out_features, linear.in_features))
    linear.bias.zero_()


def _identity(conv: Any) -> None:
    conv.weight.copy_(torch.eye(conv.out_channels)[:, :, None, None, None])
    conv.bias.zero_()


def _orthogonal(rows: int, columns: int) -> torch.Tensor:
    """A random matrix that keeps lengths, or on average keeps them when it has fewer rows."""
    matrix = torch.empty(rows, columns)
    nn.init.orthogonal_(matrix)
    return matrix * max(1.0, math.sqrt(columns / rows))
