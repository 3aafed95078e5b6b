"""One attention on several ranks: heads are split within Ulysses groups and tori, keys among rings of them.

The ranks of a guidance branch are numbered by slot. Consecutive slots form the Ulysses groups; ranks at the
same position of consecutive groups form a ring; ranks at the same position of the rings form a torus. Inside
a group, ranks exchange tokens for heads. Then the ranks of a ring hold the same heads of different tokens,
and each attends from its group's queries to the keys of all groups. The ranks of a torus exchange tokens for
heads once more, while they attend to what is there already. Any of the degrees may be 1.

Within a group, keys are in the order of slots (in fused joint attention: picture 0, text 0, picture 1,
...). In a ring, they are in the order of groups, starting with the own group. Attention does not depend on
this order; the mask is joined in the same order, and the exchange of results restores the order of tokens.

Legend: B batch, S tokens of the whole sequence, L tokens of this rank, H heads, D head dimension.
Source: USP (arXiv 2405.07719); Torus attention of StreamFusion, inside one machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from gfgen.errors import LayoutError
from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import shard_bounds
from gfgen.models.parallel.cudnn_attention import E4M3, like_query, opened
from gfgen.models.parallel.parallel import Lane, Mark, Parallel


def shared_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    parallel: Parallel,
    token_sizes: Sequence[int],
    attend: Attend,
    scale: float | None = None,
) -> Tensor:
    """The attention of this rank's tokens to all tokens.

    token_sizes: of every shard, by slot. attend: attention on one rank, if there is no ring and no torus.
    All ranks make the same exchanges in the same order. Attention reads results in an arena before they may
    be overwritten (`group.Collectives`), and nothing in an arena is returned.

    Shapes: query, key, value [B, L, H, D], mask bool [B, 1, 1, L] or None -> [B, L, H, D],
            fresh memory.
    Raises: LayoutError when a rank would have no head.
    """
    num_heads, degree = query.shape[2], parallel.ulysses.size * parallel.torus.size
    if num_heads < degree:
        raise LayoutError(f"{num_heads} heads cannot be shared among {degree} ranks")
    sizes = TokenSizes(tuple(token_sizes), parallel.ulysses.size, parallel.ring.size)
    # First: its exchanges are of the same kinds as those whose results stay in the arena.
    masks = _Masks(None, None) if mask is None else _gathered_masks(mask, parallel, sizes)
    attention = SharedAttention(
        (query, key, value), masks, parallel=parallel, sizes=sizes, attend=attend, scale=scale
    )
    return attention.run(head_chunks(num_heads, degree, _num_chunks(query, parallel, sizes)))


def attention_to_shards(
    query: Tensor, key: Tensor, value: Tensor, *, ranks: Collectives, scale: float | None
) -> Tensor:
    """The attention of queries that every rank has, to keys and values in shards.

    Each rank attends to its own keys, and all merge all parts. If the queries are few, this moves much less
    than gathering the keys.

    Shapes: query [B, L, H, D] alike on all ranks, key, value [B, shard, H, D] -> [B, L, H, D], alike on all.
    """
    own = attend_with_lse(query, key, value, None, scale=scale)
    outs, lses = (ranks.all_gather(x.contiguous()[None], dim=0) for x in own)
    return merged([Partial(out, lse) for out, lse in zip(outs, lses, strict=True)])


class _Masks(NamedTuple):
    """Of the keys, in the order in which they arrive; None: all are open.

    near [B, 1, 1, keys of the own ring]; far: those of the other rings of the torus.
    """

    near: Tensor | None
    far: Tensor | None


def _gathered_masks(mask: Tensor, parallel: Parallel, sizes: TokenSizes) -> _Masks:
    """From [B, 1, 1, L]."""
    ulysses, ring, torus = parallel.ulysses, parallel.ring, parallel.torus
    if ulysses.size > 1:
        mask = ulysses.all_gather(mask.contiguous(), dim=3, sizes=sizes.in_group(ring.slot, torus.slot))
    near = mask.permute(0, 3, 1, 2)
    far = None
    if torus.size > 1:
        tokens = sizes.in_torus(ring.slot)
        whole = torus.all_gather(near.contiguous(), dim=1, sizes=tokens)
        far = _without(whole, tokens, torus.slot)
    if ring.size > 1:
        (near,) = ring.gather_tokens(near, token_sizes=sizes.in_ring(torus.slot))
        if far is not None:
            (far,) = ring.gather_tokens(far, token_sizes=sizes.beyond(torus.slot))
    return _Masks(*(None if each is None else each.permute(0, 2, 3, 1) for each in (near, far)))


def _num_chunks(query: Tensor, parallel: Parallel, sizes: TokenSizes) -> int:
    """The requested or fastest number of chunks, or more until each chunk fits in a bank.

    Not in a torus: banks differ between transports, and the bits may differ with the number of chunks. What
    does not fit there goes in rounds.
    """
    if parallel.torus.size > 1:
        return parallel.num_chunks or 1
    degree = parallel.ulysses.size
    wanted = parallel.num_chunks or best_num_chunks(query.device, degree, sum(sizes.by_slot))
    most = query.shape[2] // degree
    fitting = (count for count in range(wanted, most + 1) if _fits(query, parallel, sizes, num_chunks=count))
    return next(fitting, most)


def _fits(query: Tensor, parallel: Parallel, sizes: TokenSizes, *, num_chunks: int) -> bool:
    num_heads, degree = query.shape[2], parallel.ulysses.size
    longest = max(stop - start for start, stop in head_chunks(num_heads, degree, num_chunks))
    head_bytes = query.shape[0] * query.shape[3] * query.element_size() * -(-longest // degree)
    needed = ((parallel.ulysses, 3 * max(sizes.blocks)), (parallel.ring, 2 * sum(sizes.by_slot)))
    return all(ranks.room_bytes is None or head_bytes * rows <= ranks.room_bytes for ranks, rows in needed)


# Chunks of heads ------------------------------------------------------------------------------------
# The exchange of one chunk overlaps the attention of another: for exchanges whose results do not fit in a
# bank, and for shapes that are faster so. Two banks are enough for any number of chunks: every exchange here
# returns fresh memory, which its kernel fills from the arena before it ends, and a rank's exchanges never
# overlap each other. In the arena a peer may overwrite chunk i with chunk i + 2 as soon as this rank has
# begun to push i + 1. In a torus the way back is a third exchange of the same kind, and so the same holds.


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention on one rank: query, key, value [B, L, H, D] and a mask -> [B, L, H, D]."""


@dataclass(frozen=True, slots=True)
class TokenSizes:
    """Tokens of every shard by slot of the sequence, and as groups, rings and tori join them."""

    by_slot: tuple[int, ...]
    ulysses_degree: int
    ring_degree: int = 0
    """0: all groups are one ring."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Tokens of each Ulysses group, by position in the ring, ring by ring."""
        step = self.ulysses_degree
        return tuple(sum(self.by_slot[at : at + step]) for at in range(0, len(self.by_slot), step))

    def in_group(self, ring_idx: int, torus_idx: int = 0) -> tuple[int, ...]:
        """Tokens of the ranks of one Ulysses group."""
        start = (torus_idx * self.ring_degree + ring_idx) * self.ulysses_degree
        return self.by_slot[start : start + self.ulysses_degree]

    def in_ring(self, torus_idx: int) -> tuple[int, ...]:
        """Tokens of each group of one ring."""
        step = self.ring_degree or len(self.blocks)
        return self.blocks[torus_idx * step : (torus_idx + 1) * step]

    def in_torus(self, ring_idx: int) -> tuple[int, ...]:
        """Tokens of the groups at this position of each ring."""
        return self.blocks[ring_idx :: self.ring_degree or len(self.blocks)]

    def beyond(self, torus_idx: int) -> tuple[int, ...]:
        """By position in the ring, the tokens of the groups there of all other rings."""
        own = self.in_ring(torus_idx)
        return tuple(sum(self.in_torus(idx)) - tokens for idx, tokens in enumerate(own))


CHUNK_BLOCKS = 32
"""Blocks of an exchange during attention: a quarter of an H200's multiprocessors."""


def best_num_chunks(device: torch.device, ulysses_degree: int, num_tokens: int) -> int:
    """How many chunks are fastest where memory does not ask for more: one but for one kind of attention.

    On 4 H200 two chunks of 9,216 tokens of one sample took 568 us, one took 611. For other sequences from
    1,024 to 27,280 tokens on 2 to 4 ranks one was fastest: attention to half of the heads leaves more of the
    device idle than the exchange does (benchmarks/results/forward.md).
    """
    return 2 if device.type == "cuda" and ulysses_degree == 4 and 9_000 <= num_tokens < 10_000 else 1


def head_chunks(num_heads: int, degree: int, num_chunks: int) -> list[tuple[int, int]]:
    """First and one-past-last head of each chunk; at most `num_chunks`.

    Chunks are multiples of the degree, so that all ranks get equally many heads. The last one also has the
    rest.
    """
    rows = num_heads // degree
    count = max(1, min(num_chunks, rows))
    bounds = [shard_bounds(rows, count, idx) for idx in range(count)]
    chunks = [(start * degree, stop * degree) for start, stop in bounds]
    chunks[-1] = (chunks[-1][0], num_heads)
    return chunks


class _Chunk(NamedTuple):
    """Some heads of the group's tokens: in a torus the own ones of them; and what arrives beside."""

    query: Tensor
    key: Tensor
    value: Tensor
    mark: Mark
    near: Arriving | None
    """Where there is a ring: all keys of it."""
    other_queries: tuple[Tensor, Mark] | None
    """Where there is a torus: those of its other ranks, by slot."""
    far: Arriving | None
    """Where there is a torus: the keys of all other rings."""
    head_sizes: tuple[int, ...]
    """How the torus shares the group's heads."""


class SharedAttention:
    """One shared attention, in one chunk of heads or several.

    Order on the lane of every rank: chunk 0 in, 1 in, [attention 0] 0 out, 2 in, [attention 1] 1 out, ...
    Exchanges that overlap no attention use the whole device, the others a part of it. If there is one chunk,
    its exchange in the group needs no lane, and attention reads its results in the arena.
    """

    def __init__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        masks: _Masks,
        *,
        parallel: Parallel,
        sizes: TokenSizes,
        attend: Attend,
        scale: float | None,
    ) -> None:
        self._inputs, self._masks = inputs, masks
        self._parallel, self._sizes = parallel, sizes
        self._attend, self._scale = attend, scale
        self._tokens = sizes.in_group(parallel.ring.slot, parallel.torus.slot)
        self._lane = Lane(inputs[0].device)
        self._kept: list[object] = []
        """What the lane reads, until the join."""

    def run(self, chunks: Sequence[tuple[int, int]]) -> Tensor:
        """[B, L, H, D], fresh memory."""
        query = self._inputs[0]
        if len(chunks) == 1:
            part = like_query(self._attend_to(self._fetch(*chunks[0], is_only=True)), query)
            if self._parallel.ulysses.size == 1:
                return part.contiguous()
            return self._returned(part, query.shape[2], is_alone=True)
        result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        fetched = [self._fetch(*chunks[0], is_alone=True)]
        for idx, (start, stop) in enumerate(chunks):
            is_last = idx + 1 == len(chunks)
            if not is_last:
                fetched.append(self._fetch(*chunks[idx + 1]))
            part = like_query(self._attend_to(fetched[idx]), query)
            self._kept += [part, fetched[idx]]  # the task's stream reads what was fetched
            with self._lane.beside():
                result[:, :, start:stop] = self._returned(part, stop - start, is_alone=is_last)
        self._lane.join(self._lane.mark())
        return result

    def _fetch(self, start: int, stop: int, *, is_alone: bool = False, is_only: bool = False) -> _Chunk:
        """Start to bring some heads. is_only: of one chunk, whose first exchange the task's stream makes."""
        parallel, lane = self._parallel, self._lane
        ulysses, ring, torus = parallel.ulysses, parallel.ring, parallel.torus
        tensors = tuple(x[:, :, start:stop] for x in self._inputs)
        heads = shard_sizes(stop - start, ulysses.size)
        mark: Mark = None
        if ulysses.size > 1 and is_only:
            tensors = ulysses.heads_from_tokens(
                *tensors, token_sizes=self._tokens, head_sizes=heads, in_arena=True
            )
        elif ulysses.size > 1:
            with lane.beside():
                ranks = ulysses if is_alone else ulysses.beside(CHUNK_BLOCKS)
                tensors = ranks.heads_from_tokens(*tensors, token_sizes=self._tokens, head_sizes=heads)
            mark = lane.mark()
        # The lane keeps its order: what follows comes after the exchange above without a join.
        query, key, value = tensors
        of_torus = shard_sizes(heads[ulysses.slot], torus.size)
        others = near = far = None
        if torus.size > 1:
            begin = sum(of_torus[: torus.slot])
            own = slice(begin, begin + of_torus[torus.slot])
            others = self._queries_of_others(query, of_torus)
            query, key_own, value_own = (x[:, :, own] for x in tensors)
        else:
            key_own, value_own = key, value
        if ring.size > 1:
            blocks = self._sizes.in_ring(torus.slot)
            sparing = ring.beside(next(number for least, number in BESIDE_RULES if sum(blocks) >= least))
            in_arena = is_only and torus.size == 1  # the attention comes before other exchanges of the ring
            with lane.beside():
                found = sparing.gather_tokens(key_own, value_own, token_sizes=blocks, in_arena=in_arena)
            near = Arriving(found[0], found[1], lane.mark())
        if torus.size > 1:
            far = self._keys_from_afar(key, value, of_torus)
        return _Chunk(query, key_own, value_own, mark, near, others, far, of_torus)

    def _queries_of_others(self, query: Tensor, head_sizes: tuple[int, ...]) -> tuple[Tensor, Mark]:
        torus, tokens = self._parallel.torus, self._sizes.in_torus(self._parallel.ring.slot)
        with self._lane.beside():
            ranks = torus.beside(CHUNK_BLOCKS)
            (whole,) = ranks.heads_from_tokens(query, token_sizes=tokens, head_sizes=head_sizes)
            others = _without(whole, tokens, torus.slot)
        return others, self._lane.mark()

    def _keys_from_afar(self, key: Tensor, value: Tensor, head_sizes: tuple[int, ...]) -> Arriving:
        ring, torus = self._parallel.ring, self._parallel.torus
        tokens = self._sizes.in_torus(ring.slot)
        with self._lane.beside():
            ranks = torus.beside(CHUNK_BLOCKS)
            whole = ranks.heads_from_tokens(key, value, token_sizes=tokens, head_sizes=head_sizes)
            keys, values = (_without(x, tokens, torus.slot) for x in whole)
            if ring.size > 1:
                ranks = ring.beside(CHUNK_BLOCKS)
                keys, values = ranks.gather_tokens(keys, values, token_sizes=self._sizes.beyond(torus.slot))
        return Arriving(keys, values, self._lane.mark())

    def _attend_to(self, chunk: _Chunk) -> Tensor:
        """Attention of the group's tokens, with the heads that the group's exchange brought."""
        self._lane.join(chunk.mark)
        if chunk.far is not None and chunk.other_queries is not None:
            return self._in_torus(chunk, chunk.far, *chunk.other_queries)
        mask, near, length = self._masks.near, chunk.near, chunk.key.shape[1]
        if near is None:
            return self._attend(chunk.query, chunk.key, chunk.value, mask)
        own_mask, other_mask = (None, None) if mask is None else (mask[..., :length], mask[..., length:])
        first = self._partial(chunk.query, chunk.key, chunk.value, own_mask)
        self._lane.join(near.mark)
        rest = self._partial(chunk.query, near.key[:, length:], near.value[:, length:], other_mask)
        return merged((first, rest))

    def _in_torus(self, chunk: _Chunk, far: Arriving, others: Tensor, others_mark: Mark) -> Tensor:
        """Attention while queries of the torus arrive, then keys; the other ranks' results leave meanwhile.

        Four attentions for any degree: own queries to near keys, others' queries to near and to far keys, and
        own queries to far keys.
        """
        torus, lane, tokens = self._parallel.torus, self._lane, self._sizes.in_torus(self._parallel.ring.slot)
        near_mask, far_mask = self._masks
        near = chunk.key, chunk.value
        length = near[0].shape[1]
        own_mask = None if near_mask is None else near_mask[..., :length]
        own = [self._partial(chunk.query, *near, own_mask)]
        if chunk.near is not None:
            lane.join(chunk.near.mark)
            near = chunk.near.key, chunk.near.value
            rest = near[0][:, length:], near[1][:, length:]
            rest_mask = None if near_mask is None else near_mask[..., length:]
            own.append(self._partial(chunk.query, *rest, rest_mask))
        lane.join(others_mark)
        parts = [self._partial(others, *near, near_mask)]
        lane.join(far.mark)
        parts.append(self._partial(others, far.key, far.value, far_mask))
        sent = merged(parts)
        first = sum(tokens[: torus.slot])
        own_tokens = sent.new_empty((sent.shape[0], tokens[torus.slot], *sent.shape[2:]))
        sent = torch.cat((sent[:, :first], own_tokens, sent[:, first:]), 1)
        with lane.beside():
            ranks = torus.beside(CHUNK_BLOCKS)
            result = ranks.tokens_from_heads(sent, token_sizes=tokens, head_sizes=chunk.head_sizes)
        own.append(self._partial(chunk.query, far.key, far.value, far_mask))
        kept = merged(own)
        lane.join(lane.mark())
        begin = sum(chunk.head_sizes[: torus.slot])
        result[:, :, begin : begin + kept.shape[2]] = kept
        return result

    def _partial(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Partial:
        return attend_with_lse(query, key, value, mask, scale=self._scale)

    def _returned(self, part: Tensor, num_heads: int, *, is_alone: bool) -> Tensor:
        ulysses = self._parallel.ulysses
        if ulysses.size == 1:
            return part
        return (ulysses if is_alone else ulysses.beside(CHUNK_BLOCKS)).tokens_from_heads(
            part, token_sizes=self._tokens, head_sizes=shard_sizes(num_heads, ulysses.size)
        )


def _without(x: Tensor, sizes: Sequence[int], slot: int) -> Tensor:
    """Tokens [B, S, ...] without those of one slot; a view if they are at an end."""
    start = sum(sizes[:slot])
    stop = start + sizes[slot]
    if start == 0 or stop == x.shape[1]:
        return x[:, stop:] if start == 0 else x[:, :start]
    return torch.cat((x[:, :start], x[:, stop:]), 1)


# Rings ----------------------------------------------------------------------------------------------
# Each rank keeps its queries. One exchange pushes the keys and values of the other ranks of the ring into its
# arena while it attends to its own keys; then it attends to the others. The own keys come first, then those
# of the next slots: the order follows from the slot alone, and a captured graph, which knows no slot, finds
# the own keys at the same place in all slots. Source: Ring Attention (arXiv 2310.01889); the merge is that of
# FlashAttention's blocks (2205.14135).


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
