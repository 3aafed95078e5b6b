"""The transformer of `shapes` as it is trained: the same result, computed for batches of short prompts.

diffusers' own forward keeps six modulations for every token, though all tokens of a frame share them,
and attends to 512 tokens of text, most of them padding. Here a modulation is kept per frame, and one
key stands for all the padding: its logit is raised by the logarithm of how many there are. Heads of 12
are filled up to 16, since fast attention wants multiples of 8; in cross-attention two of the places that
this adds carry the logits' offsets, so that no mask is needed, which the fastest kernels do not take.

Legend: B samples, C channels, T H W latent frames, rows, columns; S tokens of a frame; D width;
        L words; H heads, E width of a head, R rotary pairs of a head.
Source: diffusers 0.42 WanTransformer3DModel.forward, WanTransformerBlock.forward, WanAttnProcessor;
        tests/models/test_shapes_training.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gfgen.models.geometry.wan import TEXT_TOKENS
from training.parts import NUM_HEADS, Parts

EPS = 1e-6
"""Of all norms. Source: diffusers 0.42 WanTransformer3DModel.__init__."""
RECOMPILE_LIMIT = 64
"""Versions of a block that the compiler may make before it gives up; a size more may need one more."""
NEVER = -1e4
"""The logit of a place where there is no word: its weight is 0 in any dtype."""

Weights = Mapping[str, Tensor]


class FlowModel(nn.Module):
    """Text encoder and transformer, as one is trained with the other."""

    def __init__(self, parts: Parts, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.text_encoder = parts.text_encoder
        self.transformer = parts.transformer
        self.dtype = dtype
        self._block = block_states

    def compile_blocks(self, *, backend: str = "inductor") -> None:
        """Let torch's compiler fuse what blocks do: once for videos of all sizes, once for pictures."""
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self._block = torch.compile(block_states, dynamic=True, fullgraph=True, backend=backend)

    def forward(self, noisy_BCTHW: Tensor, timestep_BT: Tensor, tokens_BL: Tensor) -> Tensor:
        """The predicted velocity ([B, C, T, H, W] fp32), with a timestep for each frame."""
        model = self.transformer
        text_BLD, offset_BL2 = self._text(tokens_BL)
        time_BTD, modulation_BT6D = self._times(timestep_BT)
        cos_TSR, sin_TSR = rotations(model, noisy_BCTHW)
        patches_BTSP = patches_of(noisy_BCTHW).to(self.dtype)
        kernel_DP = model.patch_embedding.weight.flatten(1)
        hidden_BTSD = _linear(patches_BTSP, kernel_DP, model.patch_embedding.bias)
        for block in model.blocks:
            weights = dict(block.named_parameters())
            hidden_BTSD = self._block(
                weights, hidden_BTSD, text_BLD, offset_BL2, modulation_BT6D, cos_TSR, sin_TSR
            )
        shift, scale = (model.scale_shift_table + time_BTD[:, :, None]).unsqueeze(3).unbind(2)
        hidden_BTSD = _modulated(hidden_BTSD, shift, scale)
        patches_BTSP = _linear(hidden_BTSD, model.proj_out.weight, model.proj_out.bias)
        return unpatched(patches_BTSP.float(), noisy_BCTHW.shape)

    def _text(self, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Prompts with a place for all padding behind each, and what to add to their logits."""
        mask_BL = tokens_BL != 0
        embeds_BLD = text_states(self.text_encoder, tokens_BL, mask_BL) * mask_BL[..., None]
        text_BLD = self.transformer.condition_embedder.text_embedder(F.pad(embeds_BLD, (0, 0, 0, 1)))
        scale = self.transformer.config.attention_head_dim**0.5
        return text_BLD.to(self.dtype), in_two_parts(text_offsets(mask_BL) * scale, self.dtype)

    def _times(self, timestep_BT: Tensor) -> tuple[Tensor, Tensor]:
        embedder = self.transformer.condition_embedder
        waves_BTF = embedder.timesteps_proj(timestep_BT.flatten()).unflatten(0, timestep_BT.shape)
        time_BTD = embedder.time_embedder(waves_BTF)
        return time_BTD, embedder.time_proj(F.silu(time_BTD)).unflatten(2, (6, -1))


def block_states(
    weights: Weights,
    hidden_BTSD: Tensor,
    text_BLD: Tensor,
    offset_BL2: Tensor,
    modulation_BT6D: Tensor,
    cos_TSR: Tensor,
    sin_TSR: Tensor,
) -> Tensor:
    """What one of the transformer's blocks makes of its input.

    A function of tensors alone, so that one compiled version serves all blocks.
    """
    modulation_BT61D = (weights["scale_shift_table"] + modulation_BT6D).unsqueeze(3)
    shift, scale, gate, shift_ffn, scale_ffn, gate_ffn = modulation_BT61D.unbind(2)
    normed_BTSD = _modulated(hidden_BTSD, shift, scale)
    mixed_BTSD = _self_attention(weights, normed_BTSD, cos_TSR, sin_TSR)
    hidden_BTSD = (hidden_BTSD + mixed_BTSD * gate).to(hidden_BTSD.dtype)
    normed_BTSD = _normed(hidden_BTSD) * weights["norm2.weight"] + weights["norm2.bias"]
    hidden_BTSD = hidden_BTSD + _cross_attention(
        weights, normed_BTSD.to(hidden_BTSD.dtype), text_BLD, offset_BL2
    )
    inner = _projected(weights, "ffn.net.0.proj", _modulated(hidden_BTSD, shift_ffn, scale_ffn))
    outer_BTSD = _projected(weights, "ffn.net.2", F.gelu(inner, approximate="tanh"))
    return (hidden_BTSD + outer_BTSD * gate_ffn).to(hidden_BTSD.dtype)


def _self_attention(weights: Weights, x_BTSD: Tensor, cos_TSR: Tensor, sin_TSR: Tensor) -> Tensor:
    query, key = (
        _rotated(_heads(_rms_normed(_projected(weights, f"attn1.to_{name}", x_BTSD), norm)), cos_TSR, sin_TSR)
        for name, norm in (("q", weights["attn1.norm_q.weight"]), ("k", weights["attn1.norm_k.weight"]))
    )
    value = _heads(_projected(weights, "attn1.to_v", x_BTSD))
    width = value.shape[-1]
    filled = (F.pad(x.to(x_BTSD.dtype), (0, -width % 8)).flatten(1, 2) for x in (query, key, value))
    mixed_BTSD = _attend(*filled, width=width).view_as(x_BTSD)
    return _projected(weights, "attn1.to_out.0", mixed_BTSD)


def _cross_attention(weights: Weights, x_BTSD: Tensor, text_BLD: Tensor, offset_BL2: Tensor) -> Tensor:
    """offset_BL2: in what queries and keys are before they are scaled."""
    query = _heads(_rms_normed(_projected(weights, "attn2.to_q", x_BTSD), weights["attn2.norm_q.weight"]))
    key = _heads(_rms_normed(_projected(weights, "attn2.to_k", text_BLD), weights["attn2.norm_k.weight"]))
    value = _heads(_projected(weights, "attn2.to_v", text_BLD))
    width = value.shape[-1]
    room = -(width + 2) % 8
    query = F.pad(F.pad(query, (0, 2), value=1.0), (0, room)).flatten(1, 2)
    offset_BLH2 = offset_BL2[:, :, None].expand(-1, -1, NUM_HEADS, -1)
    key = F.pad(torch.cat([key, offset_BLH2], dim=-1), (0, room))
    filled = (x.to(x_BTSD.dtype) for x in (query, key, F.pad(value, (0, 2 + room))))
    mixed_BTSD = _attend(*filled, width=width).view_as(x_BTSD)
    return _projected(weights, "attn2.to_out.0", mixed_BTSD)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, width: int) -> Tensor:
    """Attention of heads of this width ([B, tokens, H, E], E filled up with zeros) -> [B, tokens, D]."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(q, k, v, scale=width**-0.5)
    return mixed[..., :width].transpose(1, 2).flatten(2)


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], NUM_HEADS, -1)


def _rotated(x_BTSHE: Tensor, cos_TSR: Tensor, sin_TSR: Tensor) -> Tensor:
    real, imaginary = x_BTSHE.view(*x_BTSHE.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos_TSR[:, :, None], sin_TSR[:, :, None]
    return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), x.shape[-1:], eps=EPS)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return (_normed(x) * (1 + scale) + shift).to(x.dtype)


def _rms_normed(x: Tensor, weight_D: Tensor) -> Tensor:
    """In fp32, as the rotation that follows."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS) * weight_D


def _projected(weights: Weights, name: str, x: Tensor) -> Tensor:
    return _linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """In x's dtype, whatever the weights have."""
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


def rotations(model: Any, latents_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each token's rotary pairs."""
    frames = latents_BCTHW.shape[2]
    cos, sin = (x.view(frames, -1, x.shape[-1]) for x in model.rope(latents_BCTHW))
    # Each value is there twice. Copies: views would let the compiler see strides that depend on the size.
    return cos[..., 0::2].contiguous(), sin[..., 1::2].contiguous()


def patches_of(latents_BCTHW: Tensor) -> Tensor:
    """[B, T, S, 4C]: patches of 2 x 2, in the order of the patch embedding's kernel."""
    batch, channels, frames, height, width = latents_BCTHW.shape
    pairs: Tensor = latents_BCTHW.reshape(batch, channels, frames, height // 2, 2, width // 2, 2)
    return pairs.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch, frames, -1, 4 * channels)


def unpatched(patches_BTSP: Tensor, shape: torch.Size) -> Tensor:
    """Latents of this shape, of patches in the order of the output projection."""
    batch, channels, frames, height, width = shape
    pairs = patches_BTSP.reshape(batch, frames, height // 2, width // 2, 2, 2, channels)
    return pairs.permute(0, 6, 1, 2, 4, 3, 5).reshape(shape)


def text_states(text_encoder: Any, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """What the text encoder's own call returns, in a way that a graph can capture.

    Source: transformers 5.17 UMT5Stack.forward, UMT5Attention.forward.
    """
    stack = text_encoder.encoder
    hidden_BLD = stack.embed_tokens(tokens_BL)
    length = tokens_BL.shape[1]
    offset_B11L = torch.where(mask_BL, 0.0, NEVER)[:, None, None]
    for block in stack.block:
        attention = block.layer[0].SelfAttention
        normed = block.layer[0].layer_norm(hidden_BLD)
        query, key, value = (
            project(normed).unflatten(2, (attention.n_heads, -1)).transpose(1, 2)
            for project in (attention.q, attention.k, attention.v)
        )
        logits = (
            query @ key.mT + attention.compute_bias(length, length, device=tokens_BL.device) + offset_B11L
        )
        mixed = logits.softmax(dim=-1) @ value
        hidden_BLD = block.layer[-1](hidden_BLD + attention.o(mixed.transpose(1, 2).flatten(2)))
    states: Tensor = stack.final_layer_norm(hidden_BLD)
    return states


def text_offsets(mask_BL: Tensor) -> Tensor:
    """[B, L + 1]: added to logits. 0 for words; the last place is for all the padding up to 512."""
    words_BL = torch.where(mask_BL, 0.0, NEVER)
    padding_B1 = (TEXT_TOKENS - mask_BL.sum(dim=1, keepdim=True)).float().log()
    return torch.cat([words_BL, padding_B1], dim=1)


def in_two_parts(offset_BL: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, L, 2] of this dtype: numbers, and what rounding takes from them."""
    rounded_BL = offset_BL.to(dtype)
    return torch.stack((rounded_BL, (offset_BL - rounded_BL.float()).to(dtype)), dim=-1)
