"""Layouts that choose their own degrees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gfgen.layout import Layout, Limits


@pytest.mark.parametrize(
    ("num_ranks", "heads", "degrees"),
    [(4, 24, (4, 1)), (4, 2, (2, 2)), (3, 2, (1, 3)), (6, 4, (3, 2)), (8, 5, (4, 2)), (7, 6, (1, 7))],
)
def test_as_many_ranks_as_can_share_heads_and_rings_share_keys(
    num_ranks: int, heads: int, degrees: tuple[int, int]
) -> None:
    layout = Layout.sharing(tuple(range(num_ranks)), cfg=1, most_ulysses=heads)
    assert (layout.ulysses, layout.ring) == degrees


@given(num_shards=st.integers(1, 4), cfg=st.integers(1, 2), heads=st.integers(1, 40))
def test_every_rank_is_used_whatever_the_heads(num_shards: int, cfg: int, heads: int) -> None:
    layout = Layout.sharing(tuple(range(cfg * num_shards)), cfg=cfg, most_ulysses=heads)
    assert layout.cfg == cfg
    assert layout.sequence_degree == num_shards
    assert layout.ulysses <= heads


@pytest.mark.parametrize(
    ("limits", "num_ranks", "ways"),
    [
        (Limits(True, 99), 4, ((2, 2, 1), (1, 4, 1))),
        (Limits(True, 99), 3, ((1, 3, 1),)),
        (Limits(False, 99), 4, ((1, 4, 1),)),
        (Limits(True, 99, 2), 8, ((2, 2, 2), (1, 2, 4))),
        (Limits(True, 3), 4, ((2, 2, 1),)),  # all in turn could use three of them only
        (Limits(True, 3), 8, ((2, 3, 1),)),
        (Limits(True, 99, link_bytes_per_s=1e9), 4, ((2, 1, 1, 2), (1, 1, 1, 4))),
        (Limits(False, 99, 2, link_bytes_per_s=1e9), 4, ((1, 1, 2, 2),)),
        (Limits(True, 99, link_bytes_per_s=1e9), 2, ((2, 1, 1), (1, 1, 1, 2))),
        (Limits(True, 99, link_bytes_per_s=1e9, num_near=2), 2, ((2, 1, 1), (1, 2, 1))),
        (Limits(True, 99, link_bytes_per_s=1e9, num_near=2), 4, ((2, 2, 1), (1, 2, 1, 2))),
        (Limits(True, 99, link_bytes_per_s=1e9, num_near=2), 8, ((2, 2, 1, 2), (1, 2, 1, 4))),
        (Limits(False, 99, link_bytes_per_s=1e9, num_near=4), 8, ((1, 4, 1, 2),)),
        (Limits(False, 99, link_bytes_per_s=1e9, num_near=2), 3, ((1, 1, 1, 3),)),
        (Limits(False, 99, 2, link_bytes_per_s=1e9, num_near=2), 8, ((1, 1, 4, 2),)),
        (Limits(False, 99, 4, link_bytes_per_s=1e9, num_near=4), 8, ((1, 2, 2, 2),)),
    ],
    ids=str,
)
def test_guidance_branches_have_halves_or_all_ranks_in_turn(
    limits: Limits, num_ranks: int, ways: tuple[tuple[int, int, int], ...]
) -> None:
    assert limits.ways(num_ranks) == ways


@given(
    num_near=st.integers(1, 4), num_sets=st.integers(1, 4), heads=st.integers(1, 40), uses_cfg=st.booleans()
)
def test_ranks_that_share_heads_before_attention_reach_each_other(
    num_near: int, num_sets: int, heads: int, *, uses_cfg: bool
) -> None:
    num_ranks = min(8, num_near * num_sets)
    limits = Limits(uses_cfg, 99, heads, link_bytes_per_s=1e9, num_near=num_near)
    for degrees in limits.ways(num_ranks):
        layout = Layout(tuple(range(num_ranks)), *degrees)
        for first in range(0, num_ranks, layout.ulysses):
            assert len({rank // num_near for rank in range(first, first + layout.ulysses)}) == 1
        assert limits.num_apart(degrees) % layout.torus == 0
        assert heads >= layout.head_degree
