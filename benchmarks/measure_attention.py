"""What `python -m benchmarks.attention` runs on each GPU: shared attention beside attention alone.

Times are microseconds per call in a CUDA graph, medians on the rank's device.

Legend: B batch, L tokens of this rank, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.device_group import CudaGroup
from gfgen.gfc.cuda.measure import eager_us, graph_us
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Layout
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.shared_attention import attend_with_lse, merged, shared_attention

COPIES, REPEATS = 4, 9


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """A way of sharing an attention, as it is or in chunks of heads; blocks: of an exchange beside it."""

    num_chunks: int
    blocks: int

    @property
    def name(self) -> str:
        return f"{self.num_chunks} x {self.blocks}"


@torch.no_grad()
def alone(
    endpoint: CudaEndpoint, dispatch: int, num_tokens: int, num_heads: int, head_dim: int, num_parts: int
) -> float:
    """Attention of a `num_parts`-th of the tokens to all of them, without an exchange.

    In two parts that are merged where there is more than one, as in a ring.
    """
    group = _entered(endpoint, Layout.single(endpoint.rank), dispatch)
    query, key, value = _inputs(endpoint, num_tokens, num_heads, head_dim)
    length = num_tokens // num_parts

    def run(_: CudaGroup) -> Tensor:
        if num_parts == 1:
            return _attend(query, key, value, None)
        own = attend_with_lse(query[:, :length], key[:, :length], value[:, :length], None)
        others = attend_with_lse(query[:, :length], key[:, length:], value[:, length:], None)
        return merged((own, others))

    time_us = graph_us(group, run, COPIES, REPEATS)
    group.finish()
    return time_us


@torch.no_grad()
def shared(
    endpoint: CudaEndpoint,
    layout: Layout,
    dispatch: int,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    variants: Sequence[AttentionVariant],
) -> dict[str, float]:
    """The time of each variant by name, as shipped, and of exchanges only."""
    group = _entered(endpoint, layout, dispatch)
    sizes = shard_sizes(num_tokens, layout.degree)
    tensors = query, key, value = _inputs(endpoint, sizes[group.slot], num_heads, head_dim)

    def attention(variant: AttentionVariant | None) -> Callable[[CudaGroup], Tensor]:
        num_chunks = variant.num_chunks if variant else None
        return lambda group: shared_attention(
            query,
            key,
            value,
            None,
            parallel=parallel_from(group, num_chunks=num_chunks),
            token_sizes=sizes,
            attend=_attend,
        )

    found = {
        "exchange": graph_us(group, lambda group: _exchange(group, tensors, sizes), COPIES, REPEATS),
        "eager": eager_us(group, lambda: attention(None)(group), COPIES, REPEATS),
        "shipped": graph_us(group, attention(None), COPIES, REPEATS),
    }
    for variant in variants:
        endpoint.beside_blocks = variant.blocks
        found[variant.name] = graph_us(group, attention(variant), COPIES, REPEATS)
    endpoint.beside_blocks = None
    group.finish()
    return found


def _exchange(group: CudaGroup, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """What a shared attention moves, and nothing else."""
    parallel = parallel_from(group)
    ulysses, ring = parallel.ulysses, parallel.ring
    heads = shard_sizes(tensors[0].shape[2], ulysses.size)
    mine = sizes[ring.slot * ulysses.size : (ring.slot + 1) * ulysses.size]
    query, key, value = tensors
    if ulysses.size > 1:
        query, key, value = ulysses.heads_from_tokens(
            *tensors, token_sizes=mine, head_sizes=heads, in_arena=True
        )
    if ring.size > 1:
        blocks = [sum(sizes[at : at + ulysses.size]) for at in range(0, len(sizes), ulysses.size)]
        ring.gather_tokens(key, value, token_sizes=blocks, in_arena=True)
    if ulysses.size == 1:
        return query
    return ulysses.tokens_from_heads(query.clone(), token_sizes=mine, head_sizes=heads)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _entered(endpoint: CudaEndpoint, layout: Layout, dispatch: int) -> CudaGroup:
    group = endpoint.group(Descriptor(dispatch, layout, (1,) * layout.degree))
    group.enter()
    return group


def _inputs(
    endpoint: CudaEndpoint, num_tokens: int, num_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (1, num_tokens, num_heads, head_dim)
    query, key, value = (torch.randn(shape, device=endpoint.torch_device).bfloat16() for _ in range(3))
    return query, key, value
