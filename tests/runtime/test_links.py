"""Prices of slow links: as measured on two GPUs, and wide layouts where they pay."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from builders import Recorder, make_job, with_limits

from gfgen.graph import Stage
from gfgen.layout import ALONE, Layout, Limits
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.devices import sets_of
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.links import (
    DEFAULT_BYTES_PER_S,
    exposed_s,
    host_bytes_per_s,
    keep_links,
    links_path,
)
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.simulate.simulation import simulate
from gfgen.snapshot import Arrangement

TORUS = (1, 1, 1, 2)
WAN = Limits(
    max_sequence_degree=5070,
    exchanged_bytes=8.0 * 5070 * 30 * 3072,
    attention=8.4 / 50.1,
    link_bytes_per_s=31e9,
)


@pytest.mark.parametrize(
    ("tokens", "layers", "attention_ms", "alone_ms", "peer_ms", "host_ms"),
    [(5070, 30, 8.4, 91.2, 50.1, 71.2), (9280, 60, 56.0, 331.5, 178.2, 240.9)],
)
def test_two_gpus_gain_what_was_measured(tokens, layers, attention_ms, alone_ms, peer_ms, host_ms):
    """Source: benchmarks/results/collectives.md, Wan2.2-5B 832x480x49 and Qwen-Image 1536."""
    bytes_ = 8.0 * tokens * layers * 3072
    limits = replace(WAN, exchanged_bytes=bytes_, attention=attention_ms / peer_ms)
    predicted_ms = peer_ms + 1e3 * exposed_s(limits, TORUS, peer_ms / 1e3)
    assert alone_ms / predicted_ms == pytest.approx(alone_ms / host_ms, rel=0.03)


def test_peer_memory_one_rank_and_halves_of_guidance_cost_nothing():
    assert exposed_s(replace(WAN, link_bytes_per_s=0), TORUS, 0.05) == 0
    assert exposed_s(WAN, ALONE, 0.09) == 0
    assert exposed_s(replace(WAN, uses_cfg=True), (2, 1, 1), 0.09) == 0


ROWS = tuple(
    ProfileRow("wan", "832x480x49", Stage.DENOISE, degrees, seconds, 0.0, 9)
    for degrees, seconds in {ALONE: 0.0912, (1, 2, 1): 0.0501}.items()
)
PROFILE = Profile("a GPU", "2026-01-01", "test", 2, ROWS)


def arrangement(limits: Limits, shape: str = "832x480x49", **more: ProfileRow) -> Arrangement:
    costs = CostModel(replace(PROFILE, rows=(*ROWS, *more.values())))
    flops = dict.fromkeys(Stage, 1e12)
    found = costs.cost_class("wan", shape, flops=flops, state_bytes=10, limits=limits)
    return costs.arrangement(found)


def degrees_on_two(limits: Limits, shape: str = "832x480x49", **more: ProfileRow) -> tuple[int, ...]:
    return arrangement(limits, shape, **more).steps[1]


def test_a_time_over_the_link_is_of_its_shape_alone():
    row = ProfileRow("wan", "832x480x49", Stage.DENOISE, TORUS, 0.2, 0.0, 9)
    assert degrees_on_two(WAN, kept=row) == ALONE
    assert degrees_on_two(WAN, "832x480x81", kept=row) == degrees_on_two(WAN, "832x480x81") == TORUS


def test_a_pipeline_without_a_price_takes_more_ranks_where_they_were_measured():
    limits = replace(WAN, exchanged_bytes=0.0)
    assert degrees_on_two(limits) == ALONE
    assert degrees_on_two(replace(limits, uses_cfg=True)) == (2, 1, 1)
    row = ProfileRow("wan", "832x480x49", Stage.DENOISE, TORUS, 0.06, 0.0, 9)
    assert degrees_on_two(limits, kept=row) == TORUS


def test_two_ranks_share_a_step_where_the_link_lets_them_gain():
    assert degrees_on_two(replace(WAN, link_bytes_per_s=0)) == (1, 2, 1)
    assert degrees_on_two(WAN) == TORUS
    assert degrees_on_two(replace(WAN, link_bytes_per_s=25e9)) == TORUS
    assert degrees_on_two(replace(WAN, link_bytes_per_s=6e9)) == ALONE


@pytest.mark.parametrize("num_near", [1, 2, 4])
def test_only_what_crosses_the_slow_link_has_a_price(num_near):
    limits = replace(WAN, num_near=num_near, attention=0.0)
    moved = limits.exchanged_bytes / limits.link_bytes_per_s
    expected = {1: 7 / 64, 2: 3 / 32, 4: 1 / 16}  # each rank sends what is of other sets
    (wide,) = limits.ways(8)
    assert exposed_s(limits, wide, 0.05) == pytest.approx(moved * expected[num_near])
    assert exposed_s(limits, limits.ways(num_near)[0], 0.05) == 0
    halves = replace(limits, uses_cfg=True).ways(2 * num_near)[0]
    assert exposed_s(limits, halves, 0.05) == 0


@pytest.mark.parametrize(("gb_per_s", "degrees"), [(100, (1, 2, 1, 2)), (25, (1, 2, 1, 2)), (2, (1, 2, 1))])
def test_four_ranks_in_two_pairs_share_a_step_where_the_link_lets_them_gain(gb_per_s, degrees):
    limits = replace(WAN, link_bytes_per_s=1e9 * gb_per_s, num_near=2)
    steps = arrangement(limits).steps
    assert steps[:2] == (ALONE, (1, 2, 1))
    assert steps[3] == degrees


def test_sets_have_ranks_that_reach_each_other_in_a_row():
    pairs = ((0, 2), (1, 3), (4,))
    assert sets_of(range(5), pairs) == sets_of(range(5), pairs, 2) == pairs
    assert sets_of(range(5), pairs, 4) == ((0, 2, 1, 3), (4,))
    assert sets_of((0, 1, 2), pairs, 4) == ((0, 2), (1,))  # half of a pair does not help
    assert sets_of((0, 2, 3), ((0,), (1,), (2,), (3,))) == ((0, 2, 3),)


PAIRS = ((0, 1), (2, 3))


@pytest.mark.parametrize("policy", ["edf", "triage", "auto", "legacy", "srtf,degree=4"])
@pytest.mark.parametrize(("gb_per_s", "crosses"), [(100, True), (1, False)])
def test_policies_take_both_pairs_for_an_urgent_job_where_that_pays(policy, gb_per_s, crosses):
    limits = asdict(replace(WAN, link_bytes_per_s=1e9 * gb_per_s, num_near=2))
    job = make_job("urgent", steps=20, shape="832x480x49", deadline_s=0.9)  # 1.0 s on two
    job = with_limits(replace(job, flops=dict.fromkeys(Stage, 1.0)), **limits)
    seen = Recorder()
    simulate(
        [job],
        policy=load_policy(policy),
        num_ranks=4,
        profile=replace(PROFILE, rows=tuple(replace(row, model="fake") for row in PROFILE.rows)),
        near=PAIRS,
        observers=[seen],
    )
    layouts = {each.layout for each in seen.dispatches if each.task.stage is Stage.DENOISE}
    assert (Layout((0, 1, 2, 3), ulysses=2, torus=2) in layouts) is crosses
    if not crosses:
        assert all(any(set(pair).issuperset(each.ranks) for pair in PAIRS) for each in layouts)


def test_two_halves_of_guidance_are_taken_over_any_link():
    limits = replace(WAN, uses_cfg=True, link_bytes_per_s=1e8)
    assert degrees_on_two(limits) == (2, 1, 1)


def test_the_slowest_measured_link_counts_and_a_limit_is_one(monkeypatch, tmp_path):
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path))
    assert host_bytes_per_s(None, None) == math.inf
    assert host_bytes_per_s("a GPU", None) == DEFAULT_BYTES_PER_S
    rates = {("host", 1): 24.0, ("host", 2): 11.5, ("peer", 1): 300.0}
    keep_links(
        "a GPU",
        [{"transport": t, "from": 0, "to": to, "gb_per_s": r, "us": 9} for (t, to), r in rates.items()],
    )
    assert host_bytes_per_s("a GPU", None) == 11.5e9
    assert host_bytes_per_s("a GPU", 5e9) == 5e9
    links_path("a GPU").write_text("{")
    assert host_bytes_per_s("a GPU", None) == DEFAULT_BYTES_PER_S
