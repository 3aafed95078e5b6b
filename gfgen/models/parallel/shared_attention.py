"""One attention on several ranks: heads are split within Ulysses groups, keys among rings of them.

The ranks of a guidance branch are numbered by slot. Consecutive slots form the Ulysses groups; ranks at the
same position of each group form a ring. Inside a group, ranks exchange tokens for heads. Then the ranks of
a ring hold the same heads of different tokens, and each attends from its group's queries to the keys of all
groups (ring_attention.py). Either degree may be 1.

Within a group, keys are in the order of slots (in fused joint attention: picture 0, text 0, picture 1,
...). In a ring, they are in the order of groups, starting with the own group. Attention does not depend on
this order; the mask is joined in the same order, and the exchange of results restores the order of tokens.

Legend: B batch, S tokens of the whole sequence, L tokens of this rank, H heads, D head dimension.
Source: USP (arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gfgen.errors import LayoutError
from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import shard_bounds
from gfgen.models.parallel.cudnn_attention import like_query
from gfgen.models.parallel.parallel import Lane, Mark, Parallel
from gfgen.models.parallel.ring_attention import (
    Arriving,
    Partial,
    attend_with_lse,
    merged,
    ring_attention,
    start_ring,
)


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

    token_sizes: of every shard, by slot. attend: attention on one rank, if there is no ring. All ranks make
    the same exchanges in the same order. Attention reads results in an arena before they may be overwritten
    (`group.Collectives`), and nothing in an arena is returned.

    Shapes: query, key, value [B, L, H, D], mask bool [B, 1, 1, L] or None -> [B, L, H, D],
            fresh memory.
    Raises: LayoutError when a rank would have no head.
    """
    num_heads, degree = query.shape[2], parallel.ulysses.size
    if num_heads < degree:
        raise LayoutError(f"{num_heads} heads cannot be shared among {degree} ranks")
    sizes = TokenSizes(tuple(token_sizes), degree)
    if mask is not None:
        # First: its exchanges are of the same kinds as those whose results stay in the arena.
        mask = _gathered_mask(mask, parallel, sizes)
    chunks = head_chunks(num_heads, degree, _num_chunks(query, parallel, sizes))
    if len(chunks) > 1:
        chunked = ChunkedAttention(
            query, key, value, mask, parallel=parallel, sizes=sizes, attend=attend, scale=scale
        )
        return chunked.run(chunks)
    return _at_once(query, key, value, mask, parallel=parallel, sizes=sizes, attend=attend, scale=scale)


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


def _gathered_mask(mask: Tensor, parallel: Parallel, sizes: TokenSizes) -> Tensor:
    """[B, 1, 1, L] -> [B, 1, 1, S], in the order of the keys."""
    ulysses, ring = parallel.ulysses, parallel.ring
    if ulysses.size > 1:
        mask = ulysses.all_gather(mask.contiguous(), dim=3, sizes=sizes.in_group(ring.slot))
    if ring.size > 1:
        (mask_BS11,) = ring.gather_tokens(mask.permute(0, 3, 1, 2), token_sizes=sizes.blocks)
        mask = mask_BS11.permute(0, 2, 3, 1)
    return mask


def _at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    parallel: Parallel,
    sizes: TokenSizes,
    attend: Attend,
    scale: float | None,
) -> Tensor:
    """All heads in one exchange, whose results attention reads in the arena."""
    ulysses, ring = parallel.ulysses, parallel.ring
    tokens, heads = sizes.in_group(ring.slot), shard_sizes(query.shape[2], ulysses.size)
    q, k, v = query, key, value
    if ulysses.size > 1:
        q, k, v = ulysses.heads_from_tokens(
            query, key, value, token_sizes=tokens, head_sizes=heads, in_arena=True
        )
    if ring.size > 1:
        lane = Lane(query.device)
        arriving = start_ring(k, v, ring=ring, block_sizes=sizes.blocks, lane=lane, in_arena=True)
        result = ring_attention(q, (k, v), arriving, mask, lane=lane, scale=scale)
    else:
        result = attend(q, k, v, mask)
    result = like_query(result, query)
    if ulysses.size == 1:
        return result.contiguous()
    return ulysses.tokens_from_heads(result, token_sizes=tokens, head_sizes=heads)


def _num_chunks(query: Tensor, parallel: Parallel, sizes: TokenSizes) -> int:
    """The requested or fastest number of chunks, or more until each chunk fits in a bank."""
    wanted = parallel.num_chunks or best_num_chunks(query.device, parallel.ulysses.size, sum(sizes.by_slot))
    most = query.shape[2] // parallel.ulysses.size
    fitting = (count for count in range(wanted, most + 1) if _fits(query, parallel, sizes, num_chunks=count))
    return next(fitting, most)


def _fits(query: Tensor, parallel: Parallel, sizes: TokenSizes, *, num_chunks: int) -> bool:
    """Whether the exchanges of each chunk of heads fit in a bank."""
    num_heads, degree = query.shape[2], parallel.ulysses.size
    longest = max(stop - start for start, stop in head_chunks(num_heads, degree, num_chunks))
    head_bytes = query.shape[0] * query.shape[3] * query.element_size() * -(-longest // degree)
    needed = ((parallel.ulysses, 3 * max(sizes.blocks)), (parallel.ring, 2 * sum(sizes.by_slot)))
    return all(ranks.room_bytes is None or head_bytes * rows <= ranks.room_bytes for ranks, rows in needed)


# Chunks of heads ------------------------------------------------------------------------------------


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention on one rank: query, key, value [B, L, H, D] and a mask -> [B, L, H, D]."""


@dataclass(frozen=True, slots=True)
class TokenSizes:
    """Tokens of every shard by slot of the sequence, and as Ulysses groups and rings join them."""

    by_slot: tuple[int, ...]
    ulysses_degree: int

    @property
    def blocks(self) -> tuple[int, ...]:
        """Tokens of each Ulysses group, by position in the ring."""
        step = self.ulysses_degree
        return tuple(sum(self.by_slot[at : at + step]) for at in range(0, len(self.by_slot), step))

    def in_group(self, ring_idx: int) -> tuple[int, ...]:
        """Tokens of the ranks of one Ulysses group."""
        start = ring_idx * self.ulysses_degree
        return self.by_slot[start : start + self.ulysses_degree]


class OverlapRule(NamedTuple):
    """How many chunks are fastest in groups of this degree, for `from_tokens` up to less than `to_tokens`.

    Measured with one sample. Batches, and halves of a layout that run at the same time, use it too.
    """

    ulysses_degree: int
    from_tokens: int
    to_tokens: int
    num_chunks: int


OVERLAP_RULES = (OverlapRule(4, 9_000, 10_000, num_chunks=2),)
"""On GPUs; elsewhere one chunk. On 4 H200 two chunks of 9,216 tokens took 568 us, one took 611. For other
sequences from 1,024 to 27,280 tokens on 2 to 4 ranks one chunk was fastest: attention to half of the heads
leaves more of the device idle than the exchange does (benchmarks/results/2026-11-20-attention.md)."""

CHUNK_BLOCKS = 32
"""Blocks of an exchange during attention: a quarter of an H200's multiprocessors."""


def best_num_chunks(device: torch.device, ulysses_degree: int, num_tokens: int) -> int:
    """How many chunks are fastest where memory does not ask for more."""
    for rule in OVERLAP_RULES if device.type == "cuda" else ():
        if rule.ulysses_degree == ulysses_degree and rule.from_tokens <= num_tokens < rule.to_tokens:
            return rule.num_chunks
    return 1


class _Chunk(NamedTuple):
    """Some heads of the group's tokens, and of all keys where there is a ring."""

    query: Tensor
    key: Tensor
    value: Tensor
    mark: Mark
    arriving: Arriving | None


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


class ChunkedAttention:
    """One shared attention, chunk by chunk.

    Order on the lane of every rank: chunk 0 in, 1 in, [attention 0] 0 out, 2 in, [attention 1] 1 out, ...
    Exchanges that overlap no attention use the whole device, the others a part of it.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        parallel: Parallel,
        sizes: TokenSizes,
        attend: Attend,
        scale: float | None,
    ) -> None:
        self._inputs, self._mask = (query, key, value), mask
        self._parallel, self._sizes = parallel, sizes
        self._attend, self._scale = attend, scale
        self._tokens = sizes.in_group(parallel.ring.slot)
        self._lane = Lane(query.device)

    def run(self, chunks: Sequence[tuple[int, int]]) -> Tensor:
        """[B, L, H, D], fresh memory."""
        query = self._inputs[0]
        result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        fetched = [self._fetch(*chunks[0], is_alone=True)]
        parts = []  # kept until the join: the lane reads them, and the task's stream reads what was fetched
        for idx, (start, stop) in enumerate(chunks):
            is_last = idx + 1 == len(chunks)
            if not is_last:
                fetched.append(self._fetch(*chunks[idx + 1], is_alone=False))
            parts.append(like_query(self._attend_to(fetched[idx]), query))
            with self._lane.beside():
                result[:, :, start:stop] = self._returned(parts[idx], stop - start, is_alone=is_last)
        self._lane.join(self._lane.mark())
        return result

    def _fetch(self, start: int, stop: int, *, is_alone: bool) -> _Chunk:
        ulysses, ring = self._parallel.ulysses, self._parallel.ring
        tensors = tuple(x[:, :, start:stop] for x in self._inputs)
        mark: Mark = None
        if ulysses.size > 1:
            with self._lane.beside():
                tensors = (ulysses if is_alone else self._sparing()).heads_from_tokens(
                    *tensors,
                    token_sizes=self._tokens,
                    head_sizes=shard_sizes(stop - start, ulysses.size),
                )
            mark = self._lane.mark()
        query, key, value = tensors
        arriving = None
        if ring.size > 1:
            # The lane keeps its order: this comes after the exchange above without a join.
            arriving = start_ring(
                key, value, ring=ring, block_sizes=self._sizes.blocks, lane=self._lane, in_arena=False
            )
        return _Chunk(query, key, value, mark, arriving)

    def _attend_to(self, chunk: _Chunk) -> Tensor:
        self._lane.join(chunk.mark)
        if chunk.arriving is None:
            return self._attend(chunk.query, chunk.key, chunk.value, self._mask)
        return ring_attention(
            chunk.query,
            (chunk.key, chunk.value),
            chunk.arriving,
            self._mask,
            lane=self._lane,
            scale=self._scale,
        )

    def _sparing(self) -> Collectives:
        """The Ulysses group, for exchanges during attention."""
        return self._parallel.ulysses.beside(CHUNK_BLOCKS)

    def _returned(self, part: Tensor, num_heads: int, *, is_alone: bool) -> Tensor:
        ulysses = self._parallel.ulysses
        if ulysses.size == 1:
            return part
        return (ulysses if is_alone else self._sparing()).tokens_from_heads(
            part, token_sizes=self._tokens, head_sizes=shard_sizes(num_heads, ulysses.size)
        )
