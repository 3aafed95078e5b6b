"""Blocks of Flux.1 in fewer and larger operations, as in fused.py: equal up to rounding, for a GPU.

Single blocks also compute the projections of attention and the feed-forward's first one from one norm, and
add both parts of `proj_out` in the product itself: text and picture stay one tensor from block to block.
The weights of a fused projection are the memory of its parts, so each block can still run as diffusers' own:
for `own` kernels (kernels.py), for inputs that only some pipelines have, and in fp16, which diffusers clips.

Legend: B batch, L tokens of this rank, N = B L, H heads, D head dimension, C channels (H D).
Source: diffusers 0.42 transformer_flux.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.transformers.transformer_flux import (
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from gfgen.models.fast.kernels import present_choice
from gfgen.models.fast.linears import joined_in_place, linear_gelu
from gfgen.models.fast.rows import RowNorm, add_gated, add_norm, heads, norm
from gfgen.models.parallel.sequence_parallel import attend
from gfgen.models.streaming.placing import placing_of

_QUERY_KEY_VALUE = ("to_q", "to_k", "to_v")
_ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")


@torch.no_grad()
def fuse_flux(transformer: nn.Module) -> None:
    """Fuse all blocks of Flux.1; once for each instance, on the device where it stays."""
    for block in list(transformer.modules()):
        if isinstance(block, FluxTransformerBlock) and _is_usual(block):
            with placing_of(block).final(block):
                _join(block.attn, "to_qkv", _QUERY_KEY_VALUE)
                _join(block.attn, "to_added_qkv", _ADDED)
            block.forward = functools.partial(_forward, block, block.forward, _double_block)
        elif isinstance(block, FluxSingleTransformerBlock) and _is_usual(block):
            with placing_of(block).final(block):
                _join(block.attn, "to_qkv", _QUERY_KEY_VALUE)
            block.forward = functools.partial(_forward, block, block.forward, _single_block)


def has_fused_blocks(transformer: nn.Module) -> bool:
    kinds = (FluxTransformerBlock, FluxSingleTransformerBlock)
    return any(isinstance(module, kinds) and _is_usual(module) for module in transformer.modules())


def _is_usual(block: Any) -> bool:
    activations = [block.act_mlp] if hasattr(block, "act_mlp") else [block.ff.net[0], block.ff_context.net[0]]
    return all(isinstance(each, (nn.GELU, GELU)) and each.approximate == "tanh" for each in activations)


def _join(attention: Any, name: str, parts: Sequence[str]) -> None:
    whole = joined_in_place([getattr(attention, part) for part in parts])
    # Not a submodule: state dicts and sums of weights have the parts.
    object.__setattr__(attention, name, whole)


def _forward(
    block: Any,
    own: Any,
    fused: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """In place of a block's forward. Shapes: hidden_states [B, L, C] of the picture, encoder_hidden_states
    [B, text, C], temb [B, C], image_rotary_emb cosines and sines [text + L, D], each value twice -> text,
    picture."""
    given = hidden_states, encoder_hidden_states, temb, image_rotary_emb
    is_other = bool(joint_attention_kwargs) or type(block.attn.processor) is not FluxAttnProcessor
    is_own = present_choice() == "own" or hidden_states.dtype == torch.float16 or is_other
    result: tuple[Tensor, Tensor] = own(*given, joint_attention_kwargs) if is_own else fused(block, *given)
    return result


def _double_block(
    block: Any, own_picture: Tensor, own_text: Tensor, temb: Tensor, turns: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    attention, num_text = block.attn, own_text.shape[1]
    streams = (own_text, own_picture)
    modulations = [_rows(each.linear(silu(temb)), 6) for each in (block.norm1_context, block.norm1)]
    kinds = [_kinds(x) for x in streams]
    eps = block.norm1.norm.eps
    text, picture = (
        norm(x, RowNorm(scale, shift, eps=eps, plus_one=True), kinds_N=kinds_N)
        for x, (shift, scale, *_), kinds_N in zip(streams, modulations, kinds, strict=True)
    )
    parts = (
        (attention.to_added_qkv(text), (attention.norm_added_q, attention.norm_added_k)),
        (attention.to_qkv(picture), (attention.norm_q, attention.norm_k)),
    )
    attended = _attended(attention, parts, turns)
    updates = (attention.to_add_out(attended[:, :num_text]), attention.to_out[0](attended[:, num_text:]))
    results = []
    for x, update, modulation, feed_forward, kinds_N in zip(
        streams, updates, modulations, (block.ff_context, block.ff), kinds, strict=True
    ):
        _, _, gate, shift, scale, ff_gate = modulation
        second = RowNorm(scale, shift, eps=block.norm2.eps, plus_one=True)
        x, inner = add_norm(x, update, gate, second, kinds_N=kinds_N)
        first = feed_forward.net[0].proj
        change = feed_forward.net[2](linear_gelu(inner, first.weight, first.bias))
        results.append(add_gated(x, change, ff_gate, kinds_N=kinds_N))
    return results[0], results[1]


def _single_block(
    block: Any, own_picture: Tensor, own_text: Tensor, temb: Tensor, turns: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    attention, num_text = block.attn, own_text.shape[1]
    x = _joined(own_text, own_picture)
    shift, scale, gate = _rows(block.norm.linear(silu(temb)), 3)
    kinds_N = _kinds(x)
    inner = norm(x, RowNorm(scale, shift, eps=block.norm.norm.eps, plus_one=True), kinds_N=kinds_N)
    parts = ((attention.to_qkv(inner), (attention.norm_q, attention.norm_k)),)
    attended = _attended(attention, parts, turns)
    weight, channels = block.proj_out.weight, attended.shape[-1]
    change = linear(attended, weight[:, :channels], block.proj_out.bias)
    wide = linear_gelu(inner, block.proj_mlp.weight, block.proj_mlp.bias)
    change.view(-1, channels).addmm_(wide.view(-1, wide.shape[-1]), weight[:, channels:].t())
    x = add_gated(x, change, gate, kinds_N=kinds_N)
    return x[:, :num_text], x[:, num_text:]


def _attended(
    attention: Any, parts: Sequence[tuple[Tensor, tuple[Any, Any]]], rotary_emb: tuple[Tensor, Tensor]
) -> Tensor:
    """Attention among the tokens of all parts, one behind the other: [B, L, C].

    Each part is a projection [B, L, 3 C] with the norms of its queries and keys.
    """
    projections = [projected for projected, _ in parts]
    batch, length = projections[0].shape[0], sum(each.shape[1] for each in projections)
    joint = projections[0].new_empty((3, batch, length, attention.heads, attention.head_dim))
    turns = rotary_emb[0][:, 0::2], rotary_emb[1][:, 0::2]
    start = 0
    for projected, norms in parts:
        stop = start + projected.shape[1]
        for idx in range(batch):
            heads(
                projected[idx : idx + 1],
                num_heads=attention.heads,
                head_dim=attention.head_dim,
                weights=tuple(each.weight for each in norms),
                eps=norms[0].eps,
                turns=(turns[0][start:stop], turns[1][start:stop]),
                into=joint[:, idx : idx + 1, start:stop],
            )
        start = stop
    processor = attention.processor
    result = attend(*joint, backend=processor._attention_backend, parallel_config=processor._parallel_config)
    return result.flatten(2, 3)


def _joined(text: Tensor, picture: Tensor) -> Tensor:
    """[B, text + L, C]; not copied where both already are parts of one such tensor of one sample."""
    is_one = (
        text.shape[0] == 1
        and text.numel() > 0
        and text.untyped_storage().data_ptr() == picture.untyped_storage().data_ptr()
        and text.is_contiguous()
        and picture.is_contiguous()
        and text.storage_offset() + text.numel() == picture.storage_offset()
    )
    if not is_one:
        return torch.cat([text, picture], dim=1)
    shape = (1, text.shape[1] + picture.shape[1], text.shape[2])
    return text.as_strided(shape, (shape[1] * shape[2], shape[2], 1))


def _rows(modulation: Tensor, number: int) -> Sequence[Tensor]:
    """[B, number C] -> [C] each for one sample, otherwise [B, C]."""
    rows = modulation.chunk(number, dim=1)
    return [row[0] for row in rows] if len(modulation) == 1 else rows


def _kinds(x: Tensor) -> Tensor | None:
    """Which row of the modulation each token takes, int32 [N]; None for one sample."""
    batch, length = x.shape[:2]
    if batch == 1:
        return None
    return torch.arange(batch, dtype=torch.int32, device=x.device).repeat_interleave(length)
