"""Blocks of diffusers' transformers in fewer and larger operations: equal up to rounding, for bf16 on a GPU.

`fuse` changes a transformer in place, after `install` has put its hooks there. Its modules keep their
weights; what changes is how a block goes through them:

    projections   query, key and value of an attention in one product
    rows          norms, modulations, gates and rotations in one pass over each row (rows.py)
    activations   the GELU of a feed-forward in the epilogue of its product
    modulation    Qwen-Image's, of all blocks at once, each rank its part of the blocks: a third of the
                  transformer's weights serve nothing else, and are read once in place of on every rank

Nothing is compiled or tuned at run time: there is no first call to wait for, and every rank adds up in
the same order.

Legend: B batch (1), L tokens of this rank, H heads, D head dimension, C channels (H D).
Source: diffusers 0.42 transformer_wan.py, transformer_qwenimage.py, attention.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import shard_bounds
from gfgen.models.rows import add_gated, add_norm, heads, norm
from gfgen.models.sequence_parallel import attend, sharing_ranks


@torch.no_grad()
def fuse(transformer: nn.Module) -> None:
    """Fuse the blocks that are known; once for each instance, on the device where it stays."""
    for module in list(transformer.modules()):
        if isinstance(module, WanTransformerBlock) and _is_usual(module):
            _fuse_wan_block(module)
        elif isinstance(module, QwenImageTransformerBlock):
            _fuse_qwen_block(module)
    _fuse_activations(transformer)
    if any(isinstance(module, QwenImageTransformerBlock) for module in transformer.modules()):
        _fuse_modulation(transformer)


def _concatenated(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are those of several, one behind the other."""
    first = linears[0]
    with torch.device("meta"):
        width = sum(each.out_features for each in linears)
        fused = nn.Linear(first.in_features, width, bias=first.bias is not None)
    names = [name for name, _ in fused.named_parameters()]
    parts = {name: torch.cat([getattr(each, name).data for each in linears]) for name in names}
    fused.load_state_dict(parts, assign=True)
    return fused.requires_grad_(False)


# Wan --------------------------------------------------------------------------------------------


def _is_usual(block: WanTransformerBlock) -> bool:
    """Whether a block is as in Wan2.2; Wan 2.1 attends to an image's embeddings, too."""
    return isinstance(block.norm2, nn.LayerNorm) and block.attn2.add_k_proj is None


def _fuse_wan_block(block: WanTransformerBlock) -> None:
    block.attn1.fuse_projections()
    block.attn2.fuse_projections()
    for attention, names in ((block.attn1, ("to_q", "to_k", "to_v")), (block.attn2, ("to_k", "to_v"))):
        for name in names:
            delattr(attention, name)
    block.forward = functools.partial(_wan_block, block)


def _wan_block(
    block: WanTransformerBlock,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: tuple[Tensor, Tensor],
) -> Tensor:
    """In place of a block's forward. Shapes: hidden_states [1, L, C], encoder_hidden_states [1, text, C],
    temb [1, 6, C], rotary_emb cosines and sines [1, L, 1, D], each value twice -> [1, L, C]."""
    if temb.ndim == 4:  # a timestep for each token, so that all rows differ
        whole: Tensor = type(block).forward(block, hidden_states, encoder_hidden_states, temb, rotary_emb)
        return whole
    shift, scale, gate, ff_shift, ff_scale, ff_gate = (block.scale_shift_table + temb.float())[0]
    x = norm(hidden_states, weight=scale, bias=shift, eps=block.norm1.eps, plus_one=True)
    update = _wan_attention(block.attn1, x, rotary_emb)
    weights: dict[str, Any] = {"weight": block.norm2.weight, "bias": block.norm2.bias}
    hidden_states, x = add_norm(hidden_states, update, gate, **weights, eps=block.norm2.eps, plus_one=False)
    update = _wan_cross_attention(block.attn2, x, encoder_hidden_states)
    hidden_states, x = add_norm(
        hidden_states, update, None, weight=ff_scale, bias=ff_shift, eps=block.norm3.eps, plus_one=True
    )
    return add_gated(hidden_states, block.ffn(x), ff_gate)


def _wan_attention(attention: Any, x: Tensor, rotary_emb: tuple[Tensor, Tensor]) -> Tensor:
    """Among the tokens of the video, shared among ranks."""
    cos, sin = (table[0, :, 0] for table in rotary_emb)
    projected = attention.to_qkv(x)
    query, key = heads(
        projected,
        num_heads=attention.heads,
        head_dim=cos.shape[-1],
        weights=(attention.norm_q.weight, attention.norm_k.weight),
        eps=attention.norm_q.eps,
        turns=(cos[:, 0::2], sin[:, 1::2]),
    )
    value = _last(projected, like=key)
    return _attended(attention, query, key, value, is_shared=True)


def _wan_cross_attention(attention: Any, x: Tensor, text: Tensor) -> Tensor:
    """To the prompt's tokens, which every rank has."""
    shape = {"num_heads": attention.heads, "head_dim": x.shape[-1] // attention.heads}
    projected = attention.to_kv(text)
    (query,) = heads(attention.to_q(x), **shape, weights=(attention.norm_q.weight,), eps=attention.norm_q.eps)
    (key,) = heads(projected, **shape, weights=(attention.norm_k.weight,), eps=attention.norm_k.eps)
    return _attended(attention, query, key, _last(projected, like=key), is_shared=False)


def _last(projected: Tensor, *, like: Tensor) -> Tensor:
    """The values at the end of a projection, as they lie: [1, L, .. C] -> [1, L, H, D]."""
    return projected[..., -like.shape[-2] * like.shape[-1] :].view(like.shape)


def _attended(attention: Any, query: Tensor, key: Tensor, value: Tensor, *, is_shared: bool) -> Tensor:
    processor = attention.processor
    result = attend(
        query,
        key,
        value,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config if is_shared else None,
    )
    projected: Tensor = attention.to_out[0](result.flatten(2, 3))
    return projected


# Qwen-Image -------------------------------------------------------------------------------------


def _fuse_qwen_block(block: QwenImageTransformerBlock) -> None:
    attention = block.attn
    attention.to_qkv = _concatenated([attention.to_q, attention.to_k, attention.to_v])
    attention.to_added_qkv = _concatenated([attention.add_q_proj, attention.add_k_proj, attention.add_v_proj])
    for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
        delattr(attention, name)
    block.forward = functools.partial(_qwen_block, block)


def _qwen_block(
    block: QwenImageTransformerBlock,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """In place of a block's forward. Shapes: hidden_states [1, L, C] of the picture, encoder_hidden_states
    [1, text, C], temb [2, 6 C] (this block's modulation of picture and text), image_rotary_emb complex
    [L, D/2] and [text, D/2] -> text, picture."""
    assert encoder_hidden_states_mask is None, "one prompt per task is never padded"
    assert modulate_index is None
    assert not joint_attention_kwargs
    streams = (encoder_hidden_states, hidden_states)
    modulations = [rows.view(6, -1).unbind(0) for rows in (temb[1], temb[0])]
    eps = block.img_norm1.eps
    text, picture = (
        norm(x, weight=scale, bias=shift, eps=eps, plus_one=True)
        for x, (shift, scale, *_) in zip(streams, modulations, strict=True)
    )
    updates = _joint_attention(block.attn, text, picture, image_rotary_emb)
    results = []
    feed_forwards = (block.txt_mlp, block.img_mlp)
    for x, update, modulation, feed_forward in zip(streams, updates, modulations, feed_forwards, strict=True):
        _, _, gate, shift, scale, ff_gate = modulation
        x, inner = add_norm(x, update, gate, weight=scale, bias=shift, eps=eps, plus_one=True)
        results.append(add_gated(x, feed_forward(inner), ff_gate))
    return results[0], results[1]


def _joint_attention(
    attention: Any, text: Tensor, picture: Tensor, rotary_emb: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Among the tokens of text and picture, in this order, shared among ranks; what each stream gets."""
    head_dim = attention.inner_dim // attention.heads
    length, num_text = text.shape[1] + picture.shape[1], text.shape[1]
    joint = picture.new_empty((3, 1, length, attention.heads, head_dim))
    picture_turns, text_turns = rotary_emb
    for projected, norms, turns, tokens in (
        (
            attention.to_added_qkv(text),
            (attention.norm_added_q, attention.norm_added_k),
            text_turns,
            slice(0, num_text),
        ),
        (
            attention.to_qkv(picture),
            (attention.norm_q, attention.norm_k),
            picture_turns,
            slice(num_text, None),
        ),
    ):
        heads(
            projected,
            num_heads=attention.heads,
            head_dim=head_dim,
            weights=tuple(each.weight for each in norms),
            eps=norms[0].eps,
            turns=(turns.real, turns.imag),
            into=joint[:, :, tokens],
        )
    processor = attention.processor
    result = attend(
        *joint, backend=processor._attention_backend, parallel_config=processor._parallel_config
    ).flatten(2, 3)
    return attention.to_add_out(result[:, :num_text]), attention.to_out[0](result[:, num_text:])


def _fuse_modulation(transformer: Any) -> None:
    """The modulation of all blocks at the start of a forward, in place of each block's own."""
    blocks = transformer.transformer_blocks
    assert not transformer.zero_cond_t
    transformer.modulation = Modulation(
        [part[1] for block in blocks for part in (block.img_mod, block.txt_mod)]
    )
    for idx, block in enumerate(blocks):
        del block.img_mod, block.txt_mod
        hook = functools.partial(_hand_over, modulation=transformer.modulation, idx=idx)
        block.register_forward_pre_hook(hook, with_kwargs=True)
    transformer.time_text_embed.register_forward_hook(
        functools.partial(_modulate, modulation=transformer.modulation)
    )


class Modulation(nn.Module):
    """Shifts, scales and gates of all blocks: those of picture and text take turns among the layers."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.current = threading.local()
        """`rows`: of the forward that this thread is in."""

    def forward(self, temb: Tensor) -> Tensor:
        """[1, C] -> [layers, 6 C], whole on each rank; each computes its part of the layers."""
        activated = nn.functional.silu(temb)
        ranks = sharing_ranks()
        size, slot = (1, 0) if ranks is None else (ranks.size, ranks.slot)
        start, stop = shard_bounds(len(self.layers), size, slot)
        rows = torch.cat([self.layers[idx](activated) for idx in range(start, stop)])
        if ranks is None:
            return rows
        return ranks.all_gather(rows, dim=0, sizes=shard_sizes(len(self.layers), size))


def _modulate(module: nn.Module, args: Any, temb: Tensor, *, modulation: Modulation) -> None:
    """A forward hook of the timestep's embedding, whose output goes on as it is."""
    assert temb.shape[0] == 1, "one prompt per task"
    modulation.current.rows = modulation(temb)


def _hand_over(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, modulation: Modulation, idx: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A pre-forward hook of a block: its modulation in place of the timestep's embedding."""
    return args, {**kwargs, "temb": modulation.current.rows[2 * idx : 2 * idx + 2]}


# Both -------------------------------------------------------------------------------------------


def _fuse_activations(transformer: nn.Module) -> None:
    """Every `Linear` with a tanh GELU behind it becomes one operation."""
    for module in list(transformer.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, GELU) and child.approximate == "tanh" and child.proj.bias is not None:
                setattr(module, name, LinearGelu(child.proj))


class LinearGelu(nn.Module):
    """[..., C] -> [..., features]: gelu(x W' + b), tanh approximation."""

    def __init__(self, proj: nn.Linear) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.proj.weight, self.proj.bias
        if not x.is_cuda or not x.numel():  # on a CPU the epilogue is the exact GELU
            return nn.functional.gelu(nn.functional.linear(x, weight, bias), approximate="tanh")
        flat = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
        return flat.view(*x.shape[:-1], weight.shape[0])
