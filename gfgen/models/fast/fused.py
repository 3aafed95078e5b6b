"""Blocks of diffusers' transformers in fewer and larger operations: equal up to rounding, for bf16 on a GPU.

`fuse` changes a transformer in place, after `install` has put its hooks there. Modules keep their weights:

    projections   one product computes query, key and value of an attention
    rows          norms, modulations, gates and rotations in one pass over each row (rows.py)
    activations   the GELU of a feed-forward in the epilogue of its product
    modulation    Qwen-Image's, a third of the weights, for all blocks at once: each rank computes some.
                  Wan's, where tokens have one of two timesteps, for these two instead of every token

Nothing is tuned at run time, so no first call is slow and every rank adds in the same order. All samples of a
batch have the same timestep, which is given once. Texts may be padded, which attention ignores: then
`attention_kwargs` has their `text_lengths`, or the `num_tokens` of picture and text on the device (texts.py).

Legend: B batch, L tokens of this rank, N = B L, H heads, D head dimension, C channels (H D).
Source: diffusers 0.42 transformer_wan.py, transformer_qwenimage.py, attention.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from gfgen.models.fast.linears import LinearGelu, fuse_modulation, joined, quantise, takes_fp8
from gfgen.models.fast.rows import Fp8Rows, RowNorm, add_gated, add_norm, batched, heads, norm, padded_to
from gfgen.models.parallel.cudnn_attention import E4M3, VALUE_SCALE, from_fp8
from gfgen.models.parallel.plans import TEXT
from gfgen.models.parallel.sequence_parallel import attend, own_length
from gfgen.models.streaming.placing import IN_PLACE, placing_of
from gfgen.models.streaming.turns import CallLocal


@torch.no_grad()
def fuse(transformer: nn.Module, *, fp8_on: torch.device | None = None, attends_in_fp8: bool = False) -> None:
    """Fuse all known blocks, unless quantized; once for each instance, on the device where it stays.

    fp8_on: takes one block after the other to this device and into fp8 there, and then all that remains.
    attends_in_fp8: attentions whose tokens ranks share are in fp8 (cudnn_attention.py).
    """
    if getattr(transformer, "is_quantized", False):
        return
    wan_blocks = [module for module in transformer.modules() if isinstance(module, WanTransformerBlock)]
    if wan_blocks and all(map(_is_usual, wan_blocks)):
        _fuse_wan(transformer, wan_blocks, fp8_on)
    else:
        assert not wan_blocks or fp8_on is None, "a form of Wan that no adapter has"
    qwen_blocks = [each for each in transformer.modules() if isinstance(each, QwenImageTransformerBlock)]
    if qwen_blocks:
        fuse_modulation(transformer, int8_on=fp8_on)
    for block in qwen_blocks:
        with _final(block, fp8_on):
            _fuse_qwen_block(block)
    _fuse_activations(transformer)
    if fp8_on is not None and placing_of(transformer) is IN_PLACE:
        transformer.to(fp8_on)
    for attention in (*(block.attn1 for block in wan_blocks), *(block.attn for block in qwen_blocks)):
        attention.attends_in_fp8 = attends_in_fp8


@contextmanager
def _final(block: nn.Module, fp8_on: torch.device | None) -> Iterator[None]:
    """Around the fusing of a block, which is placed then."""
    with placing_of(block).final(block):
        if fp8_on is not None:
            block.to(fp8_on)
        yield
        _fuse_activations(block)
        if fp8_on is not None:
            quantise(block)


# Wan --------------------------------------------------------------------------------------------


def _is_usual(block: WanTransformerBlock) -> bool:
    """Whether a block has the form of Wan2.2; Wan 2.1 also attends to an image's embeddings."""
    return isinstance(block.norm2, nn.LayerNorm) and block.attn2.add_k_proj is None


def _fuse_wan(transformer: Any, blocks: Sequence[WanTransformerBlock], fp8_on: torch.device | None) -> None:
    current = CallLocal()
    embedder = transformer.condition_embedder
    embedder.forward = functools.partial(_wan_conditions, embedder, current)
    for block in blocks:
        with _final(block, fp8_on):
            _fuse_wan_block(block, current)


def _wan_conditions(
    embedder: Any,
    current: CallLocal,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_image: Tensor | None = None,
    timestep_seq_len: int | None = None,
) -> tuple[Tensor, ...]:
    """In place of the embedder's forward: (timesteps, modulation, text, image), embedded.

    With a timestep per token, [L] of one or two values (image to video: 0 in the given frame), the
    modulation is [1, 2, 6 C], and `current.kinds_N` selects one of the two for each token of the batch. A
    third value makes everything NaN, since an error here would have to wait for the device.
    """
    conditions = functools.partial(type(embedder).forward, embedder)
    if timestep_seq_len is None:
        result: tuple[Tensor, ...] = conditions(timestep, encoder_hidden_states, encoder_hidden_states_image)
        return result
    assert len(timestep) == timestep_seq_len, "timesteps differ between the samples of a batch"
    low, high = timestep.aminmax()
    is_high_L = timestep == high
    has_third = ((timestep != low) & ~is_high_L).any()
    both = torch.stack((low, high.masked_fill(has_third, torch.nan)))
    times_KC, modulation, *texts = conditions(both, encoder_hidden_states, encoder_hidden_states_image)
    kinds_L = is_high_L.int()
    current.kinds_N = kinds_L.repeat(len(encoder_hidden_states))
    return times_KC.index_select(0, kinds_L)[None], modulation[None], *texts


def _fuse_wan_block(block: WanTransformerBlock, current: CallLocal) -> None:
    block.attn1.to_qkv = joined([block.attn1.to_q, block.attn1.to_k, block.attn1.to_v])
    block.attn2.to_kv = joined([block.attn2.to_k, block.attn2.to_v])
    for attention, names in ((block.attn1, ("to_q", "to_k", "to_v")), (block.attn2, ("to_k", "to_v"))):
        for name in names:
            delattr(attention, name)
    block.forward = functools.partial(_wan_block, block, current)


def _wan_block(
    block: WanTransformerBlock,
    current: CallLocal,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: tuple[Tensor, Tensor],
) -> Tensor:
    """In place of a block's forward. Shapes: hidden_states [B, L, C], encoder_hidden_states [B, text, C],
    temb [1, 6, C], or [1, 2, 6, C] for two kinds of tokens, rotary_emb cosines and sines [1, L, 1, D], each
    value twice -> [B, L, C]."""
    assert temb.shape[0] == 1, "a batch has one timestep"
    kinds_N = current.kinds_N if temb.ndim == 4 else None
    rows = (block.scale_shift_table + temb.float())[0].unbind(-2)  # [C] or [2, C] each
    shift, scale, gate, ff_shift, ff_scale, ff_gate = rows
    first = RowNorm(scale, shift, eps=block.norm1.eps, plus_one=True)
    x = norm(hidden_states, first, kinds_N=kinds_N, in_fp8=takes_fp8(block.attn1.to_qkv))
    update = _wan_attention(block.attn1, x, rotary_emb)
    second = RowNorm(block.norm2.weight, block.norm2.bias, eps=block.norm2.eps, plus_one=False)
    hidden_states, x = add_norm(
        hidden_states, update, gate, second, kinds_N=kinds_N, in_fp8=takes_fp8(block.attn2.to_q)
    )
    update = _wan_cross_attention(block.attn2, x, encoder_hidden_states)
    third = RowNorm(ff_scale, ff_shift, eps=block.norm3.eps, plus_one=True)
    hidden_states, x = add_norm(
        hidden_states, update, None, third, kinds_N=kinds_N, in_fp8=takes_fp8(block.ffn.net[0])
    )
    return add_gated(hidden_states, _feed_forward(block.ffn, x), ff_gate, kinds_N=kinds_N)


def _wan_attention(attention: Any, x: Any, rotary_emb: tuple[Tensor, Tensor]) -> Tensor:
    """Self-attention among the tokens of the video, shared among ranks."""
    cos, sin = (table[0, :, 0] for table in rotary_emb)
    projected = attention.to_qkv(x)
    into = None
    if attention.attends_in_fp8:
        shape = (3, *projected.shape[:2], attention.heads, cos.shape[-1])
        into = projected.new_empty(shape, dtype=E4M3)
    query, key, *values = heads(
        projected,
        num_heads=attention.heads,
        head_dim=cos.shape[-1],
        weights=(attention.norm_q.weight, attention.norm_k.weight),
        eps=attention.norm_q.eps,
        turns=(cos[:, 0::2], sin[:, 1::2]),
        into=into,
    )
    value = values[0] if values else _last(projected, like=key)
    return _attended(attention, query, key, value, is_shared=True)


def _wan_cross_attention(attention: Any, x: Any, text: Tensor) -> Tensor:
    """Attention to the prompt's tokens, which every rank has."""
    asked, projected = attention.to_q(x), attention.to_kv(text)
    shape = {"num_heads": attention.heads, "head_dim": asked.shape[-1] // attention.heads}
    (query,) = heads(asked, **shape, weights=(attention.norm_q.weight,), eps=attention.norm_q.eps)
    (key,) = heads(projected, **shape, weights=(attention.norm_k.weight,), eps=attention.norm_k.eps)
    return _attended(attention, query, key, _last(projected, like=key), is_shared=False)


def _last(projected: Tensor, *, like: Tensor) -> Tensor:
    """The values at the end of a projection, not copied: [B, L, .. C] -> [B, L, H, D]."""
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
    return _projected(attention.to_out[0], result.flatten(2, 3))


def _projected(layer: Any, attended: Tensor) -> Tensor:
    """The layer behind an attention, of its result [B, L, C], which may be in fp8."""
    given: Any = attended
    if attended.dtype == E4M3 and takes_fp8(layer):
        num_rows = attended.numel() // attended.shape[-1]
        scales = torch.full((num_rows, 1), 1 / VALUE_SCALE, device=attended.device)
        given = Fp8Rows(attended, scales)
    elif attended.dtype == E4M3:
        given = from_fp8(attended, layer.weight.dtype, scale=VALUE_SCALE)
    projected: Tensor = layer(given)
    return projected


# Qwen-Image -------------------------------------------------------------------------------------


def _fuse_qwen_block(block: QwenImageTransformerBlock) -> None:
    attention = block.attn
    attention.to_qkv = joined([attention.to_q, attention.to_k, attention.to_v])
    attention.to_added_qkv = joined([attention.add_q_proj, attention.add_k_proj, attention.add_v_proj])
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
    """In place of a block's forward. Shapes: hidden_states [B, L, C] of the picture, encoder_hidden_states
    [B, text, C], temb [2, 6 C] (this block's modulation of picture and text), image_rotary_emb complex
    [L, D/2] and [text, D/2] -> text, picture."""
    assert encoder_hidden_states_mask is None, "masks make attention slow; lengths leave padding out"
    assert modulate_index is None
    streams = (encoder_hidden_states, hidden_states)
    modulations = [rows.view(6, -1).unbind(0) for rows in (temb[1], temb[0])]
    projections = (block.attn.to_added_qkv, block.attn.to_qkv)
    eps = block.img_norm1.eps
    text, picture = (
        norm(x, RowNorm(scale, shift, eps=eps, plus_one=True), in_fp8=takes_fp8(layer))
        for x, layer, (shift, scale, *_) in zip(streams, projections, modulations, strict=True)
    )
    updates = _joint_attention(block.attn, text, picture, image_rotary_emb, **joint_attention_kwargs or {})
    results = []
    feed_forwards = (block.txt_mlp, block.img_mlp)
    for x, update, modulation, feed_forward in zip(streams, updates, modulations, feed_forwards, strict=True):
        _, _, gate, shift, scale, ff_gate = modulation
        second = RowNorm(scale, shift, eps=eps, plus_one=True)
        x, inner = add_norm(x, update, gate, second, in_fp8=takes_fp8(feed_forward.net[0]))
        results.append(add_gated(x, _feed_forward(feed_forward, inner), ff_gate))
    return results[0], results[1]


def _joint_attention(
    attention: Any,
    text: Any,
    picture: Any,
    rotary_emb: tuple[Tensor, Tensor],
    *,
    text_lengths: Sequence[int] | None = None,
    num_tokens: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The output of joint attention for text and picture; samples do not attend to each other.

    text_lengths: of the whole texts; num_tokens: of each whole picture and text together, int32 [1]. The
    local part of their padding gets zeros.
    """
    projected_text, projected_picture = attention.to_added_qkv(text), attention.to_qkv(picture)
    batch, padded_length = projected_text.shape[:2]
    assert text_lengths or num_tokens or batch == 1, "a batch of texts of unknown lengths"
    attended = []
    for idx in range(batch):
        length = text_lengths[idx] if text_lengths else None
        own = slice(None if length is None else own_length(TEXT, length))
        attended.append(
            _joint_sample(
                attention,
                projected_text[idx : idx + 1, own],
                projected_picture[idx : idx + 1],
                rotary_emb,
                text_length=length,
                num_tokens_B=num_tokens[idx] if num_tokens else None,
            )
        )
    texts, pictures = zip(*attended, strict=True)
    return (
        _projected(attention.to_add_out, batched([padded_to(padded_length, x) for x in texts])),
        _projected(attention.to_out[0], batched(pictures)),
    )


def _joint_sample(
    attention: Any,
    projected_text: Tensor,
    projected_picture: Tensor,
    rotary_emb: tuple[Tensor, Tensor],
    *,
    text_length: int | None = None,
    num_tokens_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention among the tokens of one picture and its text, in this order, shared among ranks."""
    head_dim = attention.inner_dim // attention.heads
    num_text, num_picture = projected_text.shape[1], projected_picture.shape[1]
    joint = torch.empty(
        (3, 1, num_picture + num_text, attention.heads, head_dim),
        dtype=E4M3 if attention.attends_in_fp8 else projected_picture.dtype,
        device=projected_picture.device,
    )
    picture_turns, text_turns = rotary_emb
    text_norms = (attention.norm_added_q, attention.norm_added_k)
    for projected, norms, turns, tokens in (
        (projected_picture, (attention.norm_q, attention.norm_k), picture_turns, slice(0, num_picture)),
        (projected_text, text_norms, text_turns[:num_text], slice(num_picture, None)),
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
        *joint,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config,
        text_length=text_length,
        num_tokens_B=num_tokens_B,
    ).flatten(2, 3)
    return result[:, num_picture:], result[:, :num_picture]


# Both -------------------------------------------------------------------------------------------


def _feed_forward(layers: Any, x: Any) -> Tensor:
    """Without the dropout between the two layers, which does nothing."""
    first, _, last = layers.net
    result: Tensor = last(first(x))
    return result


def _fuse_activations(transformer: nn.Module) -> None:
    """Replace every `Linear` followed by a tanh GELU by one operation."""
    for module in list(transformer.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, GELU) and child.approximate == "tanh" and child.proj.bias is not None:
                setattr(module, name, LinearGelu(child.proj))
