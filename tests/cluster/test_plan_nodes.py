"""How many machines are enough."""

import pytest
from builders import make_job

from gfgen.cluster.plan import NodePlanner, Nodes
from gfgen.graph import Stage
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.simulate.plan_report import in_plain_words
from gfgen.runtime.simulate.planner import PlanWindow

ROWS = tuple(ProfileRow("fake", "small", stage, (1, 1, 1), 1.0, flops=1e9) for stage in Stage)
PROFILE = Profile("a machine", "2026-11-20", "a test", num_ranks=1, rows=ROWS)
JOBS = [make_job(f"job-{n}", shape="small") for n in range(32)]
"""28 s on 4 nodes of 2 ranks, 56 s on 2, 112 s on 1."""


@pytest.mark.parametrize(
    ("by_s", "fewest", "words"),
    [
        (60.0, 2, "2 nodes are enough for everything to be in time, with fcfs."),
        (200.0, 1, "1 node is enough for everything to be in time, with fcfs."),
        (10.0, None, "No number of nodes up to 4 meets everything: on 4 nodes, 24 late."),
    ],
)
def test_the_fewest_nodes_are_found(by_s, fewest, words):
    planner = NodePlanner(JOBS, Nodes(4, 2), PROFILE, PlanWindow(1_800_000_000.0, by_s))
    plan = planner.plan(["fcfs"])
    assert words in in_plain_words(plan, device="a test")
    assert (plan.fewest and plan.fewest.num_ranks // 2) == fewest
