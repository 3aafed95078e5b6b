"""Collectives on real processes against the oracle: exact equality, whatever the layout."""

from __future__ import annotations

import time

import gfc_oracle as oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor

from gfgen.errors import CollectiveError, LayoutError
from gfgen.gfc.arena import ArenaPlan, create_arena
from gfgen.gfc.descriptor import GROUP_KINDS, Descriptor, GroupKind, subgroup_slots
from gfgen.gfc.endpoint import Endpoint
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Layout

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
PROPERTY = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    size = draw(st.integers(1, 8))
    ranks = tuple(draw(st.permutations(range(8)))[:size])
    cfg = draw(st.sampled_from([n for n in (1, 2) if size % n == 0]))
    ulysses = draw(st.sampled_from([n for n in range(1, 9) if size // cfg % n == 0]))
    left = size // cfg // ulysses
    torus = draw(st.sampled_from([n for n in range(1, 9) if left % n == 0]))
    return Layout(ranks, cfg=cfg, ulysses=ulysses, ring=left // torus, torus=torus)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int) -> Tensor:
    """Random bytes; the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype == torch.complex64:
        return torch.view_as_complex(torch.randn(*shape, 2, generator=generator))
    return torch.randint(0, 250, shape, generator=generator).to(dtype)


def strided(x: Tensor, *, seed: int) -> Tensor:
    """The same values, with the dimensions in another order in memory and a gap behind rows."""
    if x.dim() == 0:
        return x
    order = torch.randperm(x.dim(), generator=torch.Generator().manual_seed(seed)).tolist()
    extents = [x.shape[dim] for dim in order]
    extents[-1] += seed % 2
    inverse = [order.index(dim) for dim in range(x.dim())]
    storage = torch.empty(extents, dtype=x.dtype).permute(inverse)
    view = storage[tuple(slice(extent) for extent in x.shape)]
    return view.copy_(x)


def equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and bool((x == y).all())


def attention_round_trip(
    endpoint: Endpoint, descriptor: Descriptor, kind: GroupKind, sizes: tuple[int, ...], seed: int
) -> str:
    """Both exchanges of attention on one rank, compared to the oracle over all ranks."""
    batch, num_tokens, num_heads, head_dim = sizes
    dtype = DTYPES[seed % len(DTYPES)]
    whole = endpoint.group(descriptor)
    whole.enter()
    group = whole.subgroup(kind)
    tokens = shard_sizes(num_tokens, group.size)
    heads = shard_sizes(num_heads, group.size)
    inputs = [
        [
            tensor((batch, length, num_heads, head_dim), dtype, seed=seed + 10 * slot + part)
            for slot, length in enumerate(tokens)
        ]
        for part in range(3)
    ]
    own = [strided(shards[group.slot], seed=seed + part) for part, shards in enumerate(inputs)]
    found = group.heads_from_tokens(*own, token_sizes=tokens, head_sizes=heads)
    wanted = [oracle.heads_from_tokens(shards, head_sizes=heads) for shards in inputs]
    for part in range(3):
        if not equal(found[part], wanted[part][group.slot]):
            return f"part {part} differs on the way in"
    back = group.tokens_from_heads(strided(found[0], seed=seed), token_sizes=tokens, head_sizes=heads)
    if not equal(back, inputs[0][group.slot]):
        return "differs on the way back"
    return ""


@PROPERTY
@given(
    layout=layouts(),
    kind=st.sampled_from(sorted(GROUP_KINDS)),
    batch=st.integers(1, 2),
    num_tokens=st.integers(0, 40),
    extra_heads=st.integers(0, 5),
    head_dim=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 1 << 20),
)
def test_attention_exchange_equals_its_oracle_and_comes_back(
    shared_ranks: Ranks,
    layout: Layout,
    kind: GroupKind,
    batch: int,
    num_tokens: int,
    extra_heads: int,
    head_dim: int,
    seed: int,
) -> None:
    size = len(subgroup_slots(layout.degrees, kind, 0))
    descriptor = Descriptor(shared_ranks.next_dispatch(), layout, (1,) * layout.degree)
    sizes = (batch, num_tokens, size + extra_heads, head_dim)
    results = shared_ranks.run(layout.ranks, attention_round_trip, descriptor, kind, sizes, seed)
    assert results == [""] * layout.degree


def gather_and_mix(endpoint: Endpoint, descriptor: Descriptor, sizes: list[int], seed: int) -> str:
    dtype = DTYPES[seed % len(DTYPES)]
    group = endpoint.group(descriptor)
    group.enter()
    shards = [tensor((2, size, 3), dtype, seed=seed + slot) for slot, size in enumerate(sizes)]
    own = strided(shards[group.slot], seed=seed)
    gathered = group.all_gather(own, dim=1, sizes=sizes)
    if not equal(gathered, oracle.all_gather(shards, dim=1)[group.slot]):
        return "all_gather differs"
    (turned,) = group.gather_tokens(own, token_sizes=sizes)
    if not equal(turned, oracle.gather_tokens(shards)[group.slot]):
        return "gather_tokens differs"
    group.barrier()
    return ""


@PROPERTY
@given(layout=layouts(), data=st.data(), seed=st.integers(0, 1 << 20))
def test_gathers_equal_their_oracles(
    shared_ranks: Ranks, layout: Layout, data: st.DataObject, seed: int
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 900), min_size=layout.degree, max_size=layout.degree))
    descriptor = Descriptor(shared_ranks.next_dispatch(), layout, (1,) * layout.degree)
    results = shared_ranks.run(layout.ranks, gather_and_mix, descriptor, sizes, seed)
    assert results == [""] * layout.degree


def pass_on(endpoint: Endpoint, dispatch: int, shape: tuple[int, ...], seed: int) -> bool:
    """Sends to the next rank and receives from the one before; a ring of eight."""
    x = strided(tensor(shape, torch.int64, seed=seed + endpoint.rank), seed=seed)
    endpoint_before = (endpoint.rank - 1) % 8
    if endpoint.rank % 2:  # beyond two chunks a send waits for its receiver: half receive first
        y = endpoint.recv(shape, torch.int64, source=endpoint_before, dispatch=dispatch)
        endpoint.send(x, to=(endpoint.rank + 1) % 8, dispatch=dispatch)
    else:
        endpoint.send(x, to=(endpoint.rank + 1) % 8, dispatch=dispatch)
        y = endpoint.recv(shape, torch.int64, source=endpoint_before, dispatch=dispatch)
    return equal(y, tensor(shape, torch.int64, seed=seed + endpoint_before))


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 31, 9), (2, 3, 4, 5)])
def test_point_to_point_moves_every_byte(shared_ranks: Ranks, shape: tuple[int, ...]) -> None:
    dispatch = shared_ranks.next_dispatch()
    assert shared_ranks.run(range(8), pass_on, dispatch, shape, 7) == [True] * 8


def result_is_fresh(endpoint: Endpoint, descriptor: Descriptor) -> bool:
    group = endpoint.group(descriptor)
    group.enter()
    first = group.all_gather(torch.full((4,), endpoint.rank))
    kept = first.clone()
    for value in range(4):
        group.all_gather(torch.full((4,), 100 + value))
    return bool((first == kept).all())


def test_results_do_not_change_with_later_exchanges(shared_ranks: Ranks) -> None:
    layout = Layout((3, 1, 4), ulysses=3)
    descriptor = Descriptor(shared_ranks.next_dispatch(), layout, (1, 1, 1))
    assert shared_ranks.run(layout.ranks, result_is_fresh, descriptor) == [True] * 3


def alone() -> Endpoint:
    plan = ArenaPlan(data_bytes=1 << 16, post_bytes=1 << 10)
    fd = create_arena(plan, rank=0, incarnation=1)
    return Endpoint(plan, rank=0, fds={0: fd}, incarnations={0: 1})


def test_group_of_one_rank_needs_nobody() -> None:
    group = alone().group(Descriptor(1, Layout.single(0), (1,)))
    group.enter()
    group.barrier()
    x = torch.randn(1, 3, 2, 4)
    assert equal(group.all_gather(x), x)
    assert equal(group.heads_from_tokens(x, token_sizes=[3], head_sizes=[x.shape[2]])[0], x)


def test_sizes_that_do_not_fit_name_dimension_and_sizes() -> None:
    group = alone().group(Descriptor(1, Layout.single(0), (1,)))
    with pytest.raises(LayoutError, match="dimension 1"):
        group.heads_from_tokens(torch.zeros(1, 3, 2, 4), token_sizes=[4], head_sizes=[2])
    with pytest.raises(LayoutError, match="0 heads"):
        group.heads_from_tokens(torch.zeros(1, 3, 0, 4), token_sizes=[3], head_sizes=[0])


def test_arena_of_another_plan_is_refused() -> None:
    plan, other = ArenaPlan(data_bytes=1 << 16), ArenaPlan(data_bytes=1 << 16, first_sequence=1)
    fd = create_arena(plan, rank=0, incarnation=1)
    with pytest.raises(CollectiveError, match="another rank, incarnation or plan"):
        Endpoint(other, rank=0, fds={0: fd}, incarnations={0: 1})


def test_descriptor_is_small_and_its_members_match_the_native_ones() -> None:
    layout = Layout((5, 2, 7, 0, 1, 3, 4, 6), cfg=2, ulysses=2, ring=2)
    descriptor = Descriptor(9, layout, (1,) * 8)
    assert len(descriptor.encode(7)) <= 64
    assert subgroup_slots(layout.degrees, "cfg", 5) == (4, 5, 6, 7)
    assert subgroup_slots(layout.degrees, "ulysses", 5) == (4, 5)
    assert subgroup_slots(layout.degrees, "ring", 5) == (5, 7)
    assert subgroup_slots(layout.degrees, "cfg_pair", 5) == (1, 5)


def _over_a_slow_link(endpoint: Endpoint) -> tuple[Tensor, float]:
    endpoint.limit_link(1e6)
    group = endpoint.group(Descriptor(1, Layout((0, 1), ulysses=2), (1, 1)))
    group.enter()
    began_s = time.monotonic()
    found = group.all_gather(torch.full((5000,), endpoint.rank, dtype=torch.uint8))
    return found, time.monotonic() - began_s


def test_over_a_limited_link_cpu_ranks_get_the_same_no_sooner_than_it_allows(make_ranks) -> None:
    for found, took_s in make_ranks(2).run((0, 1), _over_a_slow_link):
        assert equal(found, torch.tensor([0] * 5000 + [1] * 5000, dtype=torch.uint8))
        assert took_s >= 5000 / 1e6
