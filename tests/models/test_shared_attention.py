"""Attention on several ranks against attention on one in float64: Ulysses, rings, tori, mixed, in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from gfc_fake import FakeCluster
from hypothesis import given
from hypothesis import strategies as st

from gfgen.errors import LayoutError
from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Layout
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.models.parallel.shared_attention import (
    TokenSizes,
    attend_with_lse,
    best_num_chunks,
    head_chunks,
    merged,
    shared_attention,
)

torch.set_num_threads(1)

ULYSSES = [(degree, 1) for degree in range(2, 9)]
RINGS = [(1, degree) for degree in (2, 3, 4, 8)]
BOTH = [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2)]
TORI = [
    (ulysses, ring, torus)
    for torus in range(2, 9)
    for ring in range(1, 5)
    for ulysses in range(1, 5)
    if ulysses * ring * torus <= 8
]
"""All products of up to 8 ranks."""
STREAMS = (3, 29)
"""Tokens of text and picture: uneven for every degree, and text for fewer ranks than eight."""
TOLERANCE = 2e-6
"""Of outputs of magnitude 1 to 4: rounding of fp32 sums in another order."""
RELATIVE = 1e-6
"""Of the largest output."""
Degrees = tuple[int, ...]
"""ulysses, ring, and torus if there is one"""


class Inputs(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None


def random_inputs(
    *, tokens: int = sum(STREAMS), heads: int = 11, batch: int = 1, closed: Sequence[slice] = ()
) -> Inputs:
    noise = torch.Generator().manual_seed(tokens * 100 + heads)
    q, k, v = (torch.randn(batch, tokens, heads, 8, generator=noise) for _ in range(3))
    if not closed:
        return Inputs(q, 2 * k, v)
    mask = torch.ones(batch, 1, 1, tokens, dtype=torch.bool)
    for part in closed:
        mask[..., part] = False
    return Inputs(q, 2 * k, v, mask)


def alone(inputs: Inputs, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Written out, as in the definition."""
    q, k, v = (x.to(dtype).transpose(1, 2) for x in inputs[:3])
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if inputs.mask is not None:
        scores = scores.masked_fill(~inputs.mask, -math.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def on_one_rank(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def shards(x: torch.Tensor, streams: Sequence[int], degree: int, *, dim: int) -> list[torch.Tensor]:
    """What each slot holds: its part of every stream, behind each other."""
    parts = [torch.tensor_split(stream, degree, dim) for stream in torch.split(x, list(streams), dim)]
    return [torch.cat([stream[slot] for stream in parts], dim) for slot in range(degree)]


def on_ranks(
    inputs: Inputs,
    degrees: Degrees,
    *,
    streams: Sequence[int] = STREAMS,
    num_chunks: int | None = None,
    watch: Callable[[Parallel], Parallel] = lambda parallel: parallel,
) -> torch.Tensor:
    """The shared attention, put together again in the order of the streams."""
    ulysses, ring, torus = (*degrees, 1)[:3]
    degree = ulysses * ring * torus
    shares = [shards(x, streams, degree, dim=1) for x in inputs[:3]]
    masks = [None] * degree if inputs.mask is None else shards(inputs.mask, streams, degree, dim=3)
    sizes = [share.shape[1] for share in shares[0]]

    def program(group: Any) -> torch.Tensor:
        torch.set_num_threads(1)
        slot = group.slot
        return shared_attention(
            *(share[slot] for share in shares),
            masks[slot],
            parallel=watch(parallel_from(group, num_chunks=num_chunks)),
            token_sizes=sizes,
            attend=on_one_rank,
        )

    layout = Layout(tuple(range(degree)), ulysses=ulysses, ring=ring, torus=torus)
    results = FakeCluster().run(layout, program)
    lengths = [shard_sizes(length, degree) for length in streams]
    cut = [torch.split(x, [of[slot] for of in lengths], 1) for slot, x in enumerate(results)]
    return torch.cat([cut[slot][idx] for idx in range(len(streams)) for slot in range(degree)], 1)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.isfinite().all()
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("num_chunks", [None, 2, 5])
@pytest.mark.parametrize("degrees", [*ULYSSES, *RINGS, *BOTH, *TORI], ids=str)
def test_any_degrees_give_the_attention_of_one_rank(degrees: Degrees, num_chunks: int | None) -> None:
    inputs = random_inputs()
    wanted = alone(inputs)
    assert error(on_ranks(inputs, degrees, num_chunks=num_chunks), wanted) < RELATIVE * wanted.abs().max()


@pytest.mark.parametrize("num_chunks", [None, 3])
@pytest.mark.parametrize("degrees", [(3, 1), *RINGS, *BOTH, *TORI], ids=str)
def test_masked_keys_are_not_attended_to_on_any_rank(degrees: Degrees, num_chunks: int | None) -> None:
    inputs = random_inputs(batch=2, closed=[slice(1, 3), slice(20, 25)])
    wanted = alone(inputs)
    assert error(alone(Inputs(*inputs[:3])), wanted) > 0.1  # or the mask does nothing here
    assert error(on_ranks(inputs, degrees, num_chunks=num_chunks), wanted) < TOLERANCE


@pytest.mark.parametrize("degrees", [(1, 2), (1, 4), (2, 2), (1, 1, 2), (1, 2, 2), (2, 1, 4)], ids=str)
def test_ranks_whose_keys_are_all_masked_have_no_part(degrees: Degrees) -> None:
    for closed in (slice(0, 16), slice(16, 32)):
        inputs = random_inputs(closed=[closed])
        assert error(on_ranks(inputs, degrees, streams=(32,)), alone(inputs)) < TOLERANCE


@pytest.mark.parametrize("degrees", [(2, 2), (1, 4), (3, 2), (4, 2), (1, 1, 7), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("text_tokens", [1, 2])
def test_text_may_be_shorter_than_the_degree(degrees: Degrees, text_tokens: int) -> None:
    streams = (text_tokens, 13)
    inputs = random_inputs(tokens=sum(streams))
    assert error(on_ranks(inputs, degrees, streams=streams), alone(inputs)) < TOLERANCE


def test_heads_fewer_than_ranks_are_shared_with_a_ring_only() -> None:
    inputs = random_inputs(heads=2)
    assert error(on_ranks(inputs, (2, 2)), alone(inputs)) < TOLERANCE
    assert error(on_ranks(inputs, (2, 2), num_chunks=4), alone(inputs)) < TOLERANCE
    for degrees in ((3, 1), (1, 1, 3)):
        with pytest.raises(LayoutError, match="2 heads cannot be shared among 3 ranks"):
            on_ranks(inputs, degrees)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 3), (2, 2), (1, 1, 2), (1, 2, 3)], ids=str)
def test_sixteen_bit_inputs_keep_their_type_and_lose_no_more_than_on_one_rank(
    degrees: Degrees,
) -> None:
    inputs = Inputs(*(x.bfloat16() for x in random_inputs()[:3]))
    wanted = alone(inputs)
    found = on_ranks(inputs, degrees)
    assert found.dtype == torch.bfloat16
    assert error(found, wanted) < 2 * error(on_one_rank(*inputs[:3], None), wanted)


class Logged:
    """Ranks that note their exchanges and how many bytes each brings; a bank may be small."""

    def __init__(self, ranks: Collectives, log: list[tuple[str, int]], room_bytes: int | None) -> None:
        self._ranks, self._log = ranks, log
        self.size, self.slot = ranks.size, ranks.slot
        self.room_bytes = room_bytes if ranks.size > 1 else None

    def beside(self, max_blocks: int) -> Logged:
        return self

    def __getattr__(self, name: str) -> Any:
        def exchange(*tensors: torch.Tensor, **sizes: Any) -> Any:
            results = getattr(self._ranks, name)(*tensors, **sizes)
            brought = results if isinstance(results, tuple) else (results,)
            self._log.append((name, sum(x.numel() * x.element_size() for x in brought)))
            return results

        return exchange


def logged(
    degrees: Degrees, *, num_chunks: int | None = None, room_bytes: int | None = None
) -> list[list[tuple[str, int]]]:
    """Names and bytes of every rank's exchanges; the result is checked, too."""
    logs: list[list[tuple[str, int]]] = []

    def watch(parallel: Parallel) -> Parallel:
        log: list[tuple[str, int]] = []
        logs.append(log)
        kinds: dict[str, Any] = {
            name: Logged(getattr(parallel, name), log, room_bytes)
            for name in ("sequence", "ulysses", "ring", "torus")
        }
        return replace(parallel, **kinds)

    inputs = random_inputs(heads=12)
    found = on_ranks(inputs, degrees, num_chunks=num_chunks, watch=watch)
    assert error(found, alone(inputs)) < TOLERANCE
    return logs


def test_the_next_chunk_is_on_its_way_before_the_present_one_is_attended_to() -> None:
    come, gather, go = "heads_from_tokens", "gather_tokens", "tokens_from_heads"
    for log in logged((2, 1), num_chunks=3):
        assert [name for name, _ in log] == [come, come, go, come, go, go]
    for log in logged((2, 2), num_chunks=2):
        assert [name for name, _ in log] == [come, gather, come, gather, go, go]


def test_keys_of_a_torus_follow_its_queries_and_results_leave_before_the_last_attention() -> None:
    come, gather, go = "heads_from_tokens", "gather_tokens", "tokens_from_heads"
    for log in logged((1, 1, 2)):
        assert [name for name, _ in log] == [come, come, go]
        queries, keys, _ = (size for _, size in log)
        assert 2 * queries == keys  # keys and values
    for log in logged((1, 2, 2)):
        assert [name for name, _ in log] == [come, gather, come, gather, go]
    for log in logged((2, 1, 2), num_chunks=2):
        assert [name for name, _ in log] == [*[come] * 6, go, go, go, go]


@pytest.mark.parametrize("degrees", [(2, 1), (3, 1), (1, 2), (2, 2)], ids=str)
def test_what_does_not_fit_in_a_bank_comes_in_chunks_that_do(degrees: Degrees) -> None:
    room_bytes = 8192
    assert max(size for log in logged(degrees) for _, size in log) > room_bytes
    assert max(size for log in logged(degrees, room_bytes=room_bytes) for _, size in log) <= room_bytes
    assert logged(degrees, room_bytes=1)  # not even one head fits: as small as can be


def test_chunks_of_a_torus_do_not_depend_on_banks_so_that_its_bits_do_not() -> None:
    for degrees in ((1, 1, 2), (2, 1, 2)):
        assert logged(degrees, room_bytes=1) == logged(degrees)


@given(heads=st.integers(1, 64), degree=st.integers(1, 8), num_chunks=st.integers(1, 9))
def test_chunks_cover_all_heads_and_give_each_rank_some(heads: int, degree: int, num_chunks: int) -> None:
    if heads < degree:
        return
    chunks = head_chunks(heads, degree, num_chunks)
    assert [start for start, _ in chunks] == [0, *(stop for _, stop in chunks[:-1])]
    assert chunks[-1][1] == heads
    assert len(chunks) == min(num_chunks, heads // degree)
    assert all(stop - start >= degree for start, stop in chunks)
    assert all((stop - start) % degree == 0 for start, stop in chunks[:-1])


def test_sizes_of_groups_and_rings_follow_the_slots() -> None:
    sizes = TokenSizes((5, 4, 4, 3, 3, 2), 2)
    assert sizes.blocks == sizes.in_ring(0) == (9, 7, 5)
    assert [sizes.in_group(idx) for idx in range(3)] == [(5, 4), (4, 3), (3, 2)]
    torus = TokenSizes((5, 4, 4, 3, 3, 2, 2, 1), 2, 2)
    assert [torus.in_group(ring, idx) for idx in (0, 1) for ring in (0, 1)] == [
        (5, 4),
        (4, 3),
        (3, 2),
        (2, 1),
    ]
    assert [torus.in_ring(idx) for idx in (0, 1)] == [(9, 7), (5, 3)]
    assert [torus.in_torus(idx) for idx in (0, 1)] == [(9, 5), (7, 3)]
    assert [torus.beyond(idx) for idx in (0, 1)] == [(5, 3), (9, 7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cuts", [(0, 32), (0, 1, 32), (0, 10, 20, 32), (0, 0, 7, 7, 32)], ids=str)
def test_parts_merge_to_the_whole(dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    inputs = random_inputs(closed=[slice(3, 9)])
    query, key, value, mask = inputs
    assert mask is not None
    query, key, value = (x.to(dtype) for x in (query, key, value))
    parts = [
        attend_with_lse(query, key[:, low:high], value[:, low:high], mask[..., low:high])
        for low, high in pairwise(cuts)
    ]
    assert error(merged(parts), alone(inputs)) < (TOLERANCE if dtype == torch.float32 else 1e-14)


def test_log_sum_exp_is_that_of_the_scores() -> None:
    inputs = random_inputs()
    _, lse = attend_with_lse(*inputs[:3], None, scale=0.25)
    scores = torch.einsum("blhd,bshd->bhls", inputs.query.double(), inputs.key.double()) * 0.25
    assert error(lse, torch.logsumexp(scores, -1)) < TOLERANCE


def test_queries_without_any_key_get_zeros() -> None:
    query, key, value, mask = random_inputs(closed=[slice(0, 32)])
    assert mask is not None
    parts = [attend_with_lse(query, key, value, mask), attend_with_lse(query, key[:, :0], value[:, :0], None)]
    assert all((part.lse == -math.inf).all() for part in parts)
    assert torch.equal(merged(parts), torch.zeros_like(query))


def test_chunks_are_taken_where_they_were_measured_to_win() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert best_num_chunks(gpu, 4, 9216) == 2
    assert [best_num_chunks(gpu, degree, tokens) for degree, tokens in ((2, 9216), (4, 18480))] == [1, 1]
    assert best_num_chunks(cpu, 4, 9216) == 1
