"""The policies of docs/examples/policies/ run jobs of two models to their end, without a fault."""

from pathlib import Path

import pytest

from gfgen.bench.paper.cells import Cell, admitted_of
from gfgen.policies.catalog import load_policy
from gfgen.runtime.predict.profile_file import load_profile
from gfgen.runtime.predict.profile_store import SHIPPED
from gfgen.runtime.simulate.simulation import Simulated, simulate

FOLDER = Path(__file__).parents[2] / "docs/examples/policies"
H200 = load_profile(SHIPPED / "h200.json")


def ran(policy: str, *, num_ranks: int = 4) -> Simulated:
    cell = Cell(
        model="qwen-image+wan2.2-ti2v-5b",
        workload="foreground-burst",
        load=1.1,
        num_jobs=24,
        steps=4,
        seed=1,
        policy=f"{FOLDER}/{policy}",
    )
    jobs = admitted_of(cell, H200, num_ranks=num_ranks)
    return simulate(jobs, policy=load_policy(cell.policy), num_ranks=num_ranks, profile=H200)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.py")))
def test_a_rival_runs_all_jobs(name: str, num_ranks: int) -> None:
    found = ran(name, num_ranks=num_ranks)
    assert found.summary.policy_fault is None
    assert found.summary.num_done == 24


def test_options_of_rivals_change_what_they_do() -> None:
    for name, option in [("rssp.py", "short=1"), ("preempt.py", "demote=true"), ("split.py", "images=1")]:
        ends = [
            sorted(each.ended_s for each in ran(policy).outcomes) for policy in (name, f"{name},{option}")
        ]
        assert ends[0] != ends[1]
