"""Attention to keys that other ranks hold, in parts that are merged by their log-sum-exp.

Each rank keeps its queries. One exchange pushes the keys and values of the other ranks of the ring into its
arena while it attends to its own keys; then it attends to the others. So all links carry all blocks at
once. Passing blocks from neighbour to neighbour would move as many bytes, but wait at every step. The own
keys come first, then those of the next slots in turn. So the order follows from the slot alone (equal
layouts give equal bits), and a captured graph, which knows no slot, finds the own keys at the same place in
all slots.

Legend: B batch, L tokens of the queries here, S tokens of the whole sequence, H heads, D head
dimension.
Source: Ring Attention (arXiv 2310.01889); the merge is that of FlashAttention's blocks (2205.14135).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from gfgen.gfc.group import Collectives
from gfgen.models.parallel.cudnn_attention import E4M3, opened
from gfgen.models.parallel.parallel import Lane, Mark

BESIDE_RULES = ((14_000, 32), (0, 64))
"""(least number of tokens, blocks) of an exchange during attention, whose work grows faster than the
exchange's. On 4 H200 in rings of 4: 9,216 tokens 952 us with 32 blocks, 713 with 64, 768 with all;
18,480 tokens 2323, 2355 and 2533."""

_BIAS_ALIGNMENT = 16
"""Items: rows of a bias for the efficient kernels begin at multiples of it."""


class Arriving(NamedTuple):
    """Keys and values of a whole ring [B, S, H, D], the own ones first; complete at the mark."""

    key: Tensor
    value: Tensor
    mark: Mark


class Partial(NamedTuple):
    """Attention to some of the keys: `out` [B, L, H, D], and `lse` [B, H, L], -inf where all are masked."""

    out: Tensor
    lse: Tensor


def start_ring(
    key: Tensor, value: Tensor, *, ring: Collectives, block_sizes: Sequence[int], lane: Lane, in_arena: bool
) -> Arriving:
    """Start to gather the ring's keys and values during what follows.

    in_arena: the caller issues the attention to them before any other exchange of the ring.
    Shapes: key, value [B, L, H, D] with any strides.
    """
    with lane.beside():
        sparing = ring.beside(_blocks_beside(sum(block_sizes)))
        keys, values = sparing.gather_tokens(key, value, token_sizes=block_sizes, in_arena=in_arena)
    return Arriving(keys, values, lane.mark())


def _blocks_beside(num_tokens: int) -> int:
    return next(blocks for from_tokens, blocks in BESIDE_RULES if num_tokens >= from_tokens)


def ring_attention(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    arriving: Arriving,
    mask: Tensor | None,
    *,
    lane: Lane,
    scale: float | None,
) -> Tensor:
    """Attention to all keys of the ring; the mask is in the order in which they arrive.

    Shapes: query [B, L, H, D], mask bool [B, 1, 1, S] or None -> [B, L, H, D], fresh memory.
    """
    length = own[0].shape[1]
    own_mask, other_mask = (None, None) if mask is None else (mask[..., :length], mask[..., length:])
    first = attend_with_lse(query, *own, own_mask, scale=scale)
    lane.join(arriving.mark)
    others = arriving.key[:, length:], arriving.value[:, length:]
    return merged((first, attend_with_lse(query, *others, other_mask, scale=scale)))


def merged(parts: Sequence[Partial]) -> Tensor:
    """Attention to all keys, from attentions to some of them; in fp32 at least; 0 where all are masked."""
    lse_NBHL = torch.stack([part.lse for part in parts])
    # A column of only -inf has no softmax: all its keys are masked.
    weights = torch.softmax(lse_NBHL, 0).nan_to_num(0.0).transpose(2, 3).unsqueeze(-1)
    total = parts[0].out * weights[0]
    for part, weight_BLH1 in zip(parts[1:], weights[1:], strict=True):
        total = torch.addcmul(total, part.out, weight_BLH1)
    return total.to(parts[0].out.dtype)


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None = None
) -> Partial:
    """Attention to these keys alone, by the kernel that torch itself would choose.

    A block of keys may be empty or completely masked: its part then has no weight.
    In fp8 (cudnn_attention.py) they are opened first, since cuDNN's attention in fp8 has no log-sum-exp here.
    Shapes: query [B, L, H, D], key and value [B, S, H, D], mask bool [B, 1, 1, S] or None.
    """
    if query.dtype == E4M3:
        query, key, value = opened(query, key, value, torch.bfloat16)
    batch, length, heads, _ = query.shape
    if key.shape[1] == 0:
        nothing = query.new_full((batch, heads, length), -math.inf, dtype=_exact(query.dtype))
        return Partial(torch.zeros_like(query), nothing)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if mask is None:
        out, lse = _fused(q, k, v, None, scale)
        return Partial(out.transpose(1, 2), lse)
    # Kernels differ in their results for a row without keys, so they never get one.
    is_closed_B111 = ~mask.any(dim=-1, keepdim=True)
    out, lse = _fused(q, k, v, _bias(mask | is_closed_B111, query.dtype), scale)
    return Partial(out.transpose(1, 2), lse.masked_fill(is_closed_B111[..., 0], -math.inf))


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(output [B, H, L, D], log-sum-exp [B, H, L])."""
    ops = torch.ops.aten
    choice = _choice(q, k, v, bias, scale)
    if choice == SDPBackend.MATH:
        return _exactly(q, k, v, bias, scale)
    if q.device.type == "cpu":
        found = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    elif choice == SDPBackend.CUDNN_ATTENTION and bias is None:
        found = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
    elif choice == SDPBackend.FLASH_ATTENTION and bias is None:
        found = ops._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    else:
        whole = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
        found = ops._scaled_dot_product_efficient_attention(q, k, v, whole, True, scale=scale)
    out, lse = found[0], found[1]
    # cuDNN's has a further dimension of one, and the efficient kernels' is padded along L.
    return out, lse.reshape(*q.shape[:2], -1)[..., : q.shape[2]]


def _choice(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> SDPBackend:
    """What `scaled_dot_product_attention` would choose; not a fused kernel where it would pad heads first."""
    if q.device.type == "cuda" and q.shape[-1] % 8 != 0:
        return SDPBackend.MATH
    return SDPBackend(torch._fused_sdp_choice(q, k, v, attn_mask=bias, scale=scale))


def _exactly(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Without a fused kernel: all scores at once, in fp32 at least."""
    dtype = _exact(q.dtype)
    scores = q.to(dtype) @ k.to(dtype).transpose(2, 3) * (scale or q.shape[-1] ** -0.5)
    if bias is not None:
        scores = scores + bias
    lse = torch.logsumexp(scores, dim=-1)
    return (torch.exp(scores - lse[..., None]) @ v.to(dtype)).to(q.dtype), lse


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is open and -inf elsewhere; rows begin at aligned addresses."""
    length = mask.shape[-1]
    padded = -(-length // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    bias = torch.zeros(*mask.shape[:-1], padded, dtype=dtype, device=mask.device)[..., :length]
    return bias.masked_fill_(~mask, -math.inf)
