import json

import pytest
from builders import make_job

from gfgen.bench.compare import table
from gfgen.bench.scores import makespan_bound_s, score
from gfgen.bench.workloads import WorkloadOptions, admitted, make_workload, stand_alone, weightless_model
from gfgen.cli.main import main
from gfgen.policies.catalog import load_policy
from gfgen.runtime.cost import CostModel
from gfgen.runtime.observer import JobOutcome
from gfgen.runtime.profile import load_profile
from gfgen.runtime.profiles import SHIPPED
from gfgen.runtime.simulation import simulate


def outcome(job_id, *, ended_s, deadline_s=10.0, status="done"):
    return JobOutcome(
        info=make_job(job_id).info,
        status=status,
        arrival_s=0.0,
        started_s=0.0,
        ended_s=ended_s,
        deadline_s=deadline_s,
        busy_s=1.0,
        layouts=(),
    )


def test_a_failed_job_misses_its_deadline_and_has_no_latency():
    found = score("p", [outcome("a", ended_s=4.0), outcome("b", ended_s=1.0, status="failed")], slack_s=0)
    assert (found.attainment, found.mean_s, found.num_failed) == (0.5, 4.0, 1)


def test_the_clients_slack_counts_for_the_client_alone():
    found = score("p", [outcome("a", ended_s=12.0)], slack_s=5)
    assert (found.attainment, found.attainment_client) == (0.0, 1.0)


def test_deadlines_can_be_replaced_by_others():
    found = score("p", [outcome("a", ended_s=12.0)], slack_s=0, deadlines_s={"a": 13.0})
    assert found.attainment == 1.0


def test_ratios_are_to_the_first_policy():
    slow = score("legacy", [outcome("a", ended_s=8.0), outcome("b", ended_s=40.0)], slack_s=0)
    fast = score("auto", [outcome("a", ended_s=4.0), outcome("b", ended_s=8.0)], slack_s=0)
    line = table([slow, fast])[-1]
    assert line.startswith("| auto | 100% |")
    assert line.endswith("| 0.25 | 0.20 | 5.00 | 0.00 |")


def test_no_policy_ends_a_night_before_the_bound():
    model = weightless_model("qwen-image")
    profile = load_profile(SHIPPED / "h200-goals.json")
    times = stand_alone(model, CostModel(profile))
    jobs = admitted(make_workload("overnight", model.name, times, WorkloadOptions(num_jobs=60)), model)
    bound_s = makespan_bound_s(jobs, CostModel(profile), num_ranks=4)
    ends_s = {
        name: simulate(jobs, policy=load_policy(name), num_ranks=4, profile=profile).summary.makespan_s
        for name in ("legacy", "makespan", "auto")
    }
    assert bound_s <= min(ends_s.values())
    assert ends_s["makespan"] < 1.05 * bound_s
    assert ends_s["auto"] < 1.05 * bound_s < ends_s["legacy"]


@pytest.mark.parametrize("words", [["compare", "--against", "legacy"], ["--compare", "legacy"]])
def test_bench_compares_policies_in_virtual_time(words, tmp_path, capsys):
    arguments = ["--simulate", "--policy", "auto", "--policy", "srtf", "--jobs", "12", "-o", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        main(["bench", *words, *arguments])
    assert end.value.code == 0
    assert "| legacy |" in capsys.readouterr().out
    found = json.loads((tmp_path / "compare.json").read_text())
    assert [run["policy"] for run in found["runs"]] == ["legacy", "auto", "srtf"]
    assert found["simulated"] is True
    assert (tmp_path / "compare.md").read_text().count("| auto |") == 1


def test_a_workload_is_written_as_a_job_file(tmp_path, capsys):
    path = tmp_path / "bursts.jsonl"
    with pytest.raises(SystemExit) as end:
        main(["bench", "workload", "foreground-burst", "--jobs", "9", "--seed", "5", "-o", str(path)])
    assert end.value.code == 0
    lines = path.read_text().splitlines()
    assert lines[0] == (
        "# foreground-burst, wan2.2-ti2v-5b, load 0.9 of 4 ranks, seed 5, gfgen bench workload"
    )
    assert len(lines) == 10
    assert f"gfgen run {path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--profile", "x.json"], "has no effect without --simulate"),
        (["compare", "--simulate", "--model", "wan2.2-t2v-a14b"], "no workload is defined for it"),
        (["compare", "--simulate", "--policy", "atuo"], "did you mean auto"),
        (["workload", "overnight", "--minutes", "3"], "--minutes"),
        (["workload", "short", "--ranks", "8"], "knows 1 to 4 ranks"),
    ],
)
def test_what_cannot_be_compared_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
