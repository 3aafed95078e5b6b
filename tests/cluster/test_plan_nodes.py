"""How many machines are enough."""

import pytest
from builders import make_job

import gfgen.cluster.simulated
import gfgen.runtime.simulate.planner
from gfgen.cli.shown.simulated import in_plain_words
from gfgen.cluster.simulated import NodePlanner, Nodes
from gfgen.errors import RunError
from gfgen.graph import Stage
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.simulate.planner import PlanWindow

ROWS = tuple(ProfileRow("fake", "small", stage, (1, 1, 1), 1.0, flops=1e9) for stage in Stage)
PROFILE = Profile("a machine", "2026-11-20", "a test", num_ranks=1, rows=ROWS)
JOBS = [make_job(f"job-{n}", shape="small") for n in range(32)]
"""28 s on 4 nodes of 2 ranks, 56 s on 2, 112 s on 1."""


def planner_of(jobs, nodes, window):
    return NodePlanner(jobs=jobs, nodes=nodes, profile=PROFILE, window=window)


@pytest.mark.parametrize(
    ("by_s", "fewest", "words"),
    [
        (60.0, 2, "2 nodes are enough for everything to be in time, with fcfs."),
        (200.0, 1, "1 node is enough for everything to be in time, with fcfs."),
        (10.0, None, "No number of nodes up to 4 meets everything: on 4 nodes, 24 late."),
    ],
)
def test_the_fewest_nodes_are_found(by_s, fewest, words):
    planner = planner_of(JOBS, Nodes(4, 2), PlanWindow(1_800_000_000.0, by_s))
    plan = planner.plan(["fcfs"])
    assert words in in_plain_words(plan, device="a test")
    assert (plan.fewest and plan.fewest.num_ranks // 2) == fewest


def test_large_batches_are_estimated_except_for_the_best_policy(monkeypatch):
    monkeypatch.setattr(gfgen.runtime.simulate.planner, "FULL_TASKS", 100)
    planner = planner_of(JOBS, Nodes(4, 2), PlanWindow(1_800_000_000.0, 60.0))
    plan = planner.plan(["fcfs", "srtf"])
    assert [option.is_estimated for option in plan.by_policy] == [False, True]
    assert plan.by_policy[1].end_s == pytest.approx(plan.best.end_s, rel=0.02)
    assert [(option.num_ranks // 2, option.is_estimated) for option in plan.by_ranks] == [
        (1, True), (2, True), (4, False),
    ]  # fmt: skip


def test_a_policy_that_fails_is_left_out(monkeypatch):
    simulate_nodes = gfgen.cluster.simulated.simulate_nodes

    def failing(jobs, *, policy, **options):
        if policy.name == "edf":
            raise RunError("policy edf failed: it has a fault")
        return simulate_nodes(jobs, policy=policy, **options)

    monkeypatch.setattr(gfgen.cluster.simulated, "simulate_nodes", failing)
    plan = planner_of(JOBS[:8], Nodes(2, 2), PlanWindow(0.0)).plan(["edf", "fcfs"])
    assert [option.policy for option in plan.by_policy] == ["fcfs"]
    assert plan.refused == ("policy edf failed: it has a fault",)


def test_steps_use_no_more_ranks_than_the_profile_has_times_of():
    planner = planner_of(JOBS[:1], Nodes(2, 2), PlanWindow(0.0))
    assert planner.plan(["fcfs,degree=2"]).best.end_s == pytest.approx(7.0, abs=0.1), "as on one rank"
