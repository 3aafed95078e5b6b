"""Attention in chunks of heads: the exchange of one chunk overlaps the attention of another.

It serves exchanges whose results do not fit in a bank of the arena, and shapes for which overlap is faster.

Two banks are enough for any number of chunks: every exchange here returns fresh memory, which its kernel
fills from the arena before it ends, and a rank's exchanges never overlap each other (parallel.py). In the
arena, chunk i would be overwritten while it is in use: a peer may push chunk i + 2 into the same bank as
soon as this rank has begun to push chunk i + 1.

Legend: B batch, L tokens of this rank, H heads, D head dimension.
Source: Torus attention of StreamFusion, inside one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import shard_bounds
from gfgen.models.parallel.fp8_attention import like_query
from gfgen.models.parallel.parallel import Lane, Mark, Parallel
from gfgen.models.parallel.ring_attention import Arriving, ring_attention, start_ring

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
