"""Plans: the best choice comes first, and the words say what the numbers do."""

from dataclasses import replace

import pytest
from builders import make_job

from gfgen.cli.shown import simulated as shown
from gfgen.errors import RunError
from gfgen.graph import Stage
from gfgen.runtime.predict.cost import UncertainEstimate, uncertain
from gfgen.runtime.predict.cost_table import Provenance
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.simulate.planner import PlanOption, PlanWindow, RankPlanner, _on, best_first

STEPS = {(1, 1, 1): 10.0, (1, 2, 1): 6.0}
PROFILE = Profile(
    device="a test",
    date="2026-11-20",
    source="made up",
    num_ranks=2,
    rows=tuple(
        ProfileRow("fake", "small", stage, degrees, seconds if stage is Stage.DENOISE else 0.1, flops=1e9)
        for stage in Stage
        for degrees, seconds in STEPS.items()
        if stage is Stage.DENOISE or degrees == (1, 1, 1)
    ),
)


def plan_of(jobs, *, policies=("srtf", "fcfs"), num_ranks=2, rank_counts=(1, 2), by_s=None, profile=PROFILE):
    planner = RankPlanner(jobs=jobs, profile=profile, window=PlanWindow(1_800_000_000.0, by_s))
    return planner.plan(policies, num_ranks=num_ranks, rank_counts=rank_counts)


def words(plan):
    return shown.in_plain_words(plan, device="a test")


def option(name, *, num_late=0, end_s=100.0, mean_s=10.0):
    return PlanOption(name, 1, end_s, mean_s, ("late",) * num_late, (), (), 0, 0)


def test_what_is_in_time_goes_before_what_is_early_and_ties_go_to_the_shorter_wait():
    options = [
        option("early", num_late=1, end_s=50.0),
        option("slow", end_s=120.0, mean_s=1.0),
        option("patient", end_s=100.0, mean_s=20.0),
        option("quick", end_s=100.5, mean_s=10.0),
    ]
    assert [each.policy for each in best_first(options)] == ["quick", "patient", "slow", "early"]


def test_the_first_line_answers_and_the_fewest_ranks_are_named():
    plan = plan_of([make_job(f"job-{i}", steps=10) for i in range(4)], by_s=300.0)
    first, *rest = words(plan)
    assert first.startswith("With srtf on 2 ranks all 4 jobs are done by ")
    assert " before " in first
    assert any(line.startswith("2 ranks are enough for everything to be in time") for line in rest)
    assert plan.fewest is not None
    assert plan.fewest.num_ranks == 2
    assert len(rest) < 24


def test_what_is_late_is_named_with_how_much():
    jobs = [make_job("hopeless", steps=10, deadline_s=60.0), make_job("easy", steps=10, deadline_s=500.0)]
    plan = plan_of(jobs)
    lines = words(plan)
    assert lines[0].endswith("; 1 of 2 deadlines is missed.")
    assert any(line.startswith("  hopeless: due ") and line.endswith(" late") for line in lines)
    assert any(line.startswith("No number of ranks up to 2 meets everything") for line in lines)
    assert shown.as_json(plan)["fewest_ranks"] is None


def test_a_job_that_times_out_fails_and_is_not_late():
    late = make_job("late", steps=1, deadline_s=1.0)
    plan = plan_of([make_job("slow", steps=10, timeout_s=5.0), late])
    lines = words(plan)
    assert "1 of 2 jobs are done" in lines[0]
    assert [line for line in lines if line.startswith("One job")] == ["One job is late:", "One job fails:"]
    assert any(line.startswith("  slow: at ") and "timed out 5 s" in line for line in lines)
    assert sum(line.endswith("  1 late, 1 fails") for line in lines) == 4
    assert any(line.endswith("meets everything: on 2 ranks, 1 late, 1 fails.") for line in lines)
    best = shown.as_json(plan)["best"]
    assert [job["job"] for job in best["late"]] == ["late"]
    assert [job["job"] for job in best["failed"]] == ["slow"]


def test_of_many_late_jobs_the_rest_is_named_with_how_late_it_is():
    lines = words(plan_of([make_job(f"job-{i}", steps=1, deadline_s=1.0) for i in range(12)]))
    (rest,) = [line for line in lines if line.startswith("  and ")]
    assert rest.startswith("  and 7 more, ")
    assert rest.count("job-") == 7
    assert " s late: job-" in rest


def test_a_deadline_before_the_arrival_is_late_whatever_is_done():
    job = make_job("late", steps=1, arrival_s=100.0)
    spec = replace(job.spec, deadline_at=1_800_000_050.0)
    job = replace(job, info=replace(job.info, spec=spec))
    assert [each.job_id for each in plan_of([job]).best.late] == ["late"]


def test_a_batch_that_takes_no_time_has_a_plan():
    rows = tuple([replace(row, seconds=0.0) for row in PROFILE.rows])
    plan = plan_of([make_job("a", steps=1)], policies=("fcfs", "edf"), profile=replace(PROFILE, rows=rows))
    assert plan.best.end_s == 0
    assert "nothing late" in "\n".join(words(plan))


def test_a_degree_is_called_by_what_it_counts_on_other_numbers_of_ranks():
    plan = plan_of([make_job("a", steps=3), make_job("b", steps=3)], policies=["srtf,degree=2"])
    assert [(each.num_ranks, each.policy) for each in plan.by_ranks] == [
        (1, "srtf"),
        (2, "srtf,degree=2"),
    ]


def test_a_degree_above_the_ranks_that_are_there_is_called_by_what_is_done(caplog):
    jobs = [make_job("a", steps=3), make_job("b", steps=3)]
    plan = plan_of(jobs, policies=["triage,degree=8", "srtf", "triage,degree=2"])
    assert sorted(each.policy for each in plan.by_policy) == ["srtf", "triage,degree=2"]
    assert caplog.messages == ["policy triage,degree=8: on 2 ranks it is triage,degree=2"]


def test_a_degree_that_a_policy_does_not_take_counts_as_the_next_one_that_it_does():
    assert [_on("triage,degree=4", count) for count in (4, 3, 2)] == [
        "triage,degree=4",
        "triage,degree=2",
        "triage,degree=2",
    ]
    assert _on("srtf,degree=4", 3) == "srtf,degree=3"
    assert _on("auto", 3) == "auto"


def test_times_that_are_far_away_have_their_day_or_date():
    plan = plan_of([make_job("a", steps=1)])
    day_s = 86400.0
    assert shown.clock_time(plan, 3600.0).count(" ") == 0
    assert shown.clock_time(plan, 2 * day_s).split()[0].isalpha()
    assert shown.clock_time(plan, -400 * day_s).startswith("2025-")
    assert shown.clock_time(plan, 400 * day_s).startswith("2028-")


def test_a_policy_that_starves_a_job_is_left_out_by_name(tmp_path):
    (tmp_path / "unfair.py").write_text(
        "from gfgen.policies.fcfs import fcfs\nfrom dataclasses import replace\n"
        "def policy(snapshot):\n"
        "    rest = {i: job for i, job in snapshot.open.items() if i != 'poor'}\n"
        "    return fcfs(replace(snapshot, open=rest))\n"
    )
    jobs = [make_job("poor", steps=1), make_job("rich", steps=1)]
    plan = plan_of(jobs, policies=["fcfs", str(tmp_path / "unfair.py")])
    assert [each.policy for each in plan.by_policy] == ["fcfs"]
    assert any("1 job waits: poor" in line for line in words(plan))
    with pytest.raises(RunError, match="1 job waits: poor"):
        plan_of(jobs, policies=[str(tmp_path / "unfair.py")])


def test_what_was_extrapolated_is_said():
    sound = plan_of([make_job("a", steps=1)], profile=replace(PROFILE, write_s=0.1))
    assert not any(line.startswith("Uncertain") for line in words(sound))
    huge = replace(make_job("a", steps=1, shape="huge"), flops=dict.fromkeys(Stage, 1e12))
    (unknown,) = [line for line in words(plan_of([huge])) if line.startswith("Uncertain: ")]
    assert "extrapolated, not measured: fake huge (encode, prepare, decode, denoise on 1 rank" in unknown


def test_that_the_writing_of_files_is_left_out_is_said():
    plan = plan_of([make_job("a", steps=1)])
    assert "Uncertain: the writing of files is left out." in words(plan)
    assert shown.as_json(plan)["doubts"] == "the writing of files is left out"
    rows = [replace(row, write_s=0.1) if row.stage is Stage.DECODE else row for row in PROFILE.rows]
    measured = plan_of([make_job("a", steps=1)], profile=replace(PROFILE, rows=tuple(rows)))
    assert shown.as_json(measured)["doubts"] is None


def test_doubts_say_which_tasks_and_of_which_models_the_rest_is():
    def doubt(shape, stage, *degrees):
        return UncertainEstimate(Provenance.EXTRAPOLATED, "wan", shape, stage, degrees)

    steps = [doubt("s1", Stage.DENOISE, 1, 1, 1), doubt("s1", Stage.DENOISE, 2, 2, 1)]
    assert uncertain([*steps, doubt("s1", Stage.DECODE, 1, 1, 1)], has_writes=True) == (
        "extrapolated, not measured: wan s1 (decode, denoise on 1 rank and cfg 2 x ulysses 2)"
    )
    many = [doubt("s1", Stage.DENOISE, 1, n, 1) for n in range(1, 6)]
    many += [doubt(f"s{n}", Stage.ENCODE, 1, 1, 1) for n in range(2, 6)]
    assert uncertain(many, has_writes=True) == (
        "extrapolated, not measured: wan s1 (denoise on 5 layouts), wan s2 (encode), wan s3 (encode) "
        "and 2 more shapes of wan"
    )
