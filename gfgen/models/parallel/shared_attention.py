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

from collections.abc import Sequence

from torch import Tensor

from gfgen.errors import LayoutError
from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import shard_sizes
from gfgen.models.parallel.chunked_attention import (
    Attend,
    ChunkedAttention,
    TokenSizes,
    best_num_chunks,
    head_chunks,
)
from gfgen.models.parallel.fp8_attention import like_query
from gfgen.models.parallel.parallel import Lane, Parallel
from gfgen.models.parallel.ring_attention import (
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
