import json

import pytest
from builders import make_job

from gfgen.bench.policy_comparison import PolicyComparison, PolicyRun, score
from gfgen.bench.workloads import (
    WorkloadOptions,
    admitted,
    alone_s,
    make_workload,
    stand_alone,
    weightless_model,
)
from gfgen.cli.bench.commands import figures
from gfgen.cli.main import main
from gfgen.cli.shown.picture import draw_runs
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import load_profile
from gfgen.runtime.predict.profile_store import SHIPPED
from gfgen.runtime.simulate.simulation import simulate


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


def test_ratios_are_to_the_first_policy():
    slow = PolicyRun("legacy", [outcome("a", ended_s=8.0), outcome("b", ended_s=40.0)])
    fast = PolicyRun("auto", [outcome("a", ended_s=4.0), outcome("b", ended_s=8.0)])
    line = comparison_of(slow, fast).table()[-1]
    assert line.startswith("| auto | 100% |")
    assert line.endswith("| 0.25 | 0.20 | 5.00 | 0.00 |")


def comparison_of(*runs, baseline="legacy"):
    comparison = PolicyComparison(tuple(run.policy for run in runs), baseline=baseline, slack_s=0.0)
    for run in runs:
        comparison.add(run)
    return comparison


def test_without_the_baseline_there_are_no_ratios():
    comparison = comparison_of(
        PolicyRun("legacy", error="it starves"), PolicyRun("auto", [outcome("a", ended_s=4.0)])
    )
    assert comparison.table()[-1].endswith("| 0 | - | - | - | - |")
    assert comparison.remarks() == ["legacy: it starves"]


def test_where_no_job_is_done_there_is_no_latency():
    comparison = comparison_of(PolicyRun("legacy", [outcome("a", ended_s=4.0, status="failed")]))
    assert comparison.table()[-1] == "| legacy | 0% | 0% | - | - | - | 0.0 | 1 | - | - | - | 1.00 |"
    (run,) = json.loads(comparison.as_json({}))["runs"]
    assert (run["mean_s"], run["p50_s"], run["p95_s"], run["num_failed"]) == (None, None, None, 1)
    panels = draw_runs(figures(comparison), title="").axes
    texts = [text.get_text() for panel in panels for text in panel.texts]
    assert texts == ["0%", "-", "-", "0.00"]


def test_a_policy_that_was_replaced_is_marked_wherever_it_is_shown():
    comparison = comparison_of(PolicyRun("mine", [outcome("a", ended_s=4.0)], fault="boom"), baseline="mine")
    assert comparison.table()[-1].startswith("| mine (replaced by fcfs) | 100% |")
    assert figures(comparison)[0].name == "mine\n(replaced by fcfs)"
    assert json.loads(comparison.as_json({}))["runs"][0]["replaced_by"] == "fcfs"
    assert comparison.remarks() == ["mine failed too often (boom): fcfs took over"]


def test_a_night_takes_little_longer_than_all_its_work_on_single_ranks():
    model = weightless_model("qwen-image")
    profile = load_profile(SHIPPED / "h200.json")
    times = stand_alone(model, CostModel(profile))
    jobs = admitted(make_workload("overnight", model.name, times, WorkloadOptions(num_jobs=60)), model)
    bound_s = sum(alone_s(job, CostModel(profile), degree=1) for job in jobs) / 4
    ends_s = {
        name: simulate(jobs, policy=load_policy(name), num_ranks=4, profile=profile).summary.makespan_s
        for name in ("legacy", "makespan", "auto")
    }
    assert ends_s["makespan"] < 1.05 * bound_s
    assert ends_s["auto"] < 1.05 * bound_s < ends_s["legacy"]


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--against", "legacy", "--policy", "auto", "--policy", "srtf"],
        ["--compare", "legacy", "--policy", "auto", "--policy", "srtf"],
        ["--compare=legacy", "--compare", "auto", "--policy", "srtf"],
    ],
)
def test_bench_compares_policies_in_virtual_time(words, tmp_path, capsys):
    arguments = ["--simulate", "--jobs", "12", "-o", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        main(["bench", *words, *arguments])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "| legacy |" in out
    found = json.loads((tmp_path / "compare.json").read_text())
    assert [run["policy"] for run in found["runs"]] == ["legacy", "auto", "srtf"]
    assert found["simulated"] is True
    assert (tmp_path / "compare.md").read_text().count("| auto |") == 1


def test_a_policy_runs_with_reused_steps_beside_without(tmp_path, capsys):
    arguments = ["--simulate", "--policy", "auto", "--policy", "auto,reuse=0.4", "--against", "srtf"]
    with pytest.raises(SystemExit) as end:
        main(["bench", "compare", *arguments, "--jobs", "12", "-o", str(tmp_path)])
    assert end.value.code == 0
    assert "auto,reuse=0.4: 40.0% of the steps were reused" in capsys.readouterr().out
    full, with_reuse = json.loads((tmp_path / "compare.json").read_text())["runs"][1:]
    assert with_reuse["mean_s"] < full["mean_s"]


@pytest.mark.parametrize(
    ("policy", "steps", "reason"),
    [
        ("auto,reuse=", 25, 'reuse, which comes last, is "never"'),
        ("auto,reuse=often", 25, 'reuse, which comes last, is "never", "if-late", or the share'),
        ("auto,reuse=if-late", 6, "needs at least 12 steps, and this job has 6"),
        ("automatic,reuse=0.4", 25, "did you mean auto?"),
    ],
)
def test_reuse_that_is_not_possible_is_one_line(policy, steps, reason, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(
            ["bench", "compare", "--simulate", "--policy", policy, "--steps", str(steps), "-o", str(tmp_path)]
        )
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


UNFAIR = """
from dataclasses import replace
from gfgen.policies.fcfs import fcfs

def starving(snapshot):
    return fcfs(replace(snapshot, open={i: job for i, job in snapshot.open.items() if not i.startswith("L")}))

def raising(snapshot):
    raise ValueError("no")
"""


def compare_simulated(folder, *arguments, code=0):
    """What `compare.json` has, and the options of the comparison."""
    (folder / "unfair.py").write_text(UNFAIR)
    with pytest.raises(SystemExit) as end:
        main(["bench", "compare", "--simulate", *arguments, "--jobs", "30", "-o", str(folder)])
    assert end.value.code == code
    return json.loads((folder / "compare.json").read_text())


@pytest.mark.parametrize("workload", ["overnight", "short"])
def test_a_policy_that_starves_jobs_is_named_beside_the_others(tmp_path, capsys, workload):
    """Those of `short` would time out one day, those of `overnight` never."""
    starving = f"{tmp_path}/unfair.py:starving"
    arguments = ["--workload", workload, "--policy", starving, "--policy", "srtf"]
    found = compare_simulated(tmp_path, *arguments, code=1)
    assert [run["policy"] for run in found["runs"]] == ["legacy", "srtf"]
    assert list(found["failures"]) == [starving]
    assert "starts nothing although all ranks are free" in found["failures"][starving]
    assert f"{starving}: policy {starving} starts nothing" in capsys.readouterr().out


def test_jobs_that_time_out_while_others_still_arrive_are_named(tmp_path):
    starving = f"{tmp_path}/unfair.py:starving"
    found = compare_simulated(tmp_path, "--policy", starving, "--timeout", "20")
    assert [run["policy"] for run in found["runs"]] == ["legacy", starving]
    (note,) = found["notes"]
    assert note.startswith(f"{starving} gave ")
    assert "no rank until it was too late (timed out 20 s after its arrival): L-0" in note


def test_a_policy_that_fails_too_often_does_not_pass_for_what_replaced_it(tmp_path, capsys):
    raising = f"{tmp_path}/unfair.py:raising"
    found = compare_simulated(tmp_path, "--policy", raising)
    assert [run["replaced_by"] for run in found["runs"]] == [None, "fcfs"]
    out = capsys.readouterr().out
    assert f"| {raising} (replaced by fcfs) |" in out
    assert f"{raising} failed too often (ValueError: no): fcfs took over" in out


@pytest.mark.parametrize(("last", "num_done"), [("legacy", 0), ("srtf", 2)])
def test_an_interrupted_comparison_keeps_what_is_done_and_says_so(
    tmp_path, capsys, monkeypatch, last, num_done
):
    def simulate_until(jobs, *, policy, **options):
        if policy.name == last:
            raise KeyboardInterrupt
        return simulate(jobs, policy=policy, **options)

    monkeypatch.setattr("gfgen.bench.policy_comparison.simulate", simulate_until)
    arguments = ["--simulate", "--policy", "fcfs", "--policy", "srtf", "--jobs", "9", "-o", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        main(["bench", "compare", *arguments])
    assert end.value.code == 130
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    if num_done == 0:
        assert err == "gfgen: stopped; no policy was done, nothing is kept\n"
        assert not list(tmp_path.iterdir())
        return
    assert f"stopped; 2 of 3 policies are done and kept in {tmp_path}/" in err
    found = json.loads((tmp_path / "compare.json").read_text())
    assert [run["policy"] for run in found["runs"]] == ["legacy", "fcfs"]
    assert found["not_run"] == ["srtf"]
    assert "interrupted; not run: srtf" in (tmp_path / "compare.md").read_text()
