"""Estimates of plans, and policies that do not return."""

import math
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from builders import make_job
from test_plan import PROFILE, plan_of, words

from gfgen.errors import RunError
from gfgen.policies.catalog import load_policy
from gfgen.runtime.control import decider
from gfgen.runtime.simulate import estimate, planner
from gfgen.runtime.simulate.estimate import SeldomAsked, decides_first, everything_open
from gfgen.runtime.simulate.simulation import simulate
from gfgen.system.signals import DecisionTimeout, within

JOBS = [
    make_job(f"job-{n}", steps=3 + n % 5, arrival_s=7.0 * (n // 6), deadline_s=90.0 + 30 * (n % 7))
    for n in range(24)
]
HANGING = "def policy(snapshot):\n    while True:\n        pass\n"


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    for module in (decider, estimate):
        monkeypatch.setattr(module, "DECISION_LIMIT_S", 0.05)
    path = tmp_path / "hangs.py"
    path.write_text(HANGING)
    return str(path)


def ends_of(policy, *, num_ranks=2):
    snapshot = everything_open(JOBS, num_ranks=num_ranks, profile=PROFILE)
    outcomes = estimate.estimate(JOBS, snapshot, decides_first(load_policy(policy), snapshot))
    return {outcome.info.job_id: outcome.ended_s for outcome in outcomes}


@pytest.mark.parametrize("policy", ["fcfs", "srtf", "srtf,degree=2", "edf", "triage", "makespan"])
def test_an_estimate_is_close_to_the_simulation(policy):
    found = ends_of(policy)
    run = simulate(JOBS, policy=load_policy(policy), num_ranks=2, profile=PROFILE)
    really = {outcome.info.job_id: outcome.ended_s for outcome in run.outcomes}
    assert found.keys() == really.keys()
    # A policy that changes its mind in the middle of a job (triage) is asked less often than it would be.
    tolerance = 0.2 if policy == "triage" else 0.05
    assert max(found.values()) == pytest.approx(max(really.values()), rel=tolerance)
    assert math.fsum(found.values()) == pytest.approx(math.fsum(really.values()), rel=tolerance)


@pytest.mark.parametrize("policy", ["fcfs", "srtf,degree=2", "edf", "triage", "makespan"])
def test_a_policy_that_is_asked_seldom_ends_the_jobs_at_about_the_same_time(policy):
    jobs = [make_job(f"job-{n}", steps=30, arrival_s=40.0 * (n // 3), deadline_s=400.0) for n in range(9)]
    named = load_policy(policy)
    numbers, ends_s = [], []
    for seldom in (False, True):
        asked = []
        decide = lambda snapshot: asked.append(1) or list(named.decide(snapshot))  # noqa: B023, E731
        each = replace(named, decide=SeldomAsked(decide) if seldom else decide)
        run = simulate(jobs, policy=each, num_ranks=2, profile=PROFILE)
        assert [outcome.status for outcome in run.outcomes] == ["done"] * len(jobs)
        numbers.append(len(asked))
        ends_s.append(math.fsum(outcome.ended_s for outcome in run.outcomes))
    assert numbers[1] < numbers[0] / 3
    assert ends_s[1] == pytest.approx(ends_s[0], rel=0.05)


def test_a_policy_that_chooses_others_is_estimated_as_its_first_choice():
    assert ends_of("auto") in (
        ends_of("triage,degree=1"),
        ends_of("triage,degree=2"),
        ends_of("srtf,degree=2"),
    )


def test_of_many_jobs_only_the_best_policy_is_simulated_and_the_rest_is_marked(monkeypatch):
    monkeypatch.setattr(planner, "FULL_TASKS", 10)
    simulated = []
    monkeypatch.setattr(
        planner,
        "simulate",
        lambda *_, **given: simulated.append(given["policy"].name) or simulate(*_, **given),
    )
    policies = ("fcfs", "srtf", "edf", "auto")
    found = plan_of(JOBS, policies=policies)
    assert len(simulated) == 1
    assert simulated[0] == found.best.policy
    assert [each.is_estimated for each in found.by_policy] == [False, True, True, True]
    assert [each.is_estimated for each in found.by_ranks] == [True, False]
    lines = words(found)
    assert sum("  ~" in line for line in lines) == 4
    assert any(line.startswith("~ Estimated") for line in lines)
    monkeypatch.undo()
    assert not any(each.is_estimated for each in plan_of(JOBS, policies=policies).by_policy)
    assert not any("~" in line for line in words(plan_of(JOBS)))


def test_a_policy_that_ends_later_than_its_estimate_is_not_recommended_for_it(monkeypatch):
    monkeypatch.setattr(planner, "FULL_TASKS", 10)
    policies = ("fcfs", "srtf", "edf")
    first = plan_of(JOBS, policies=policies).best.policy
    in_full = planner.RankPlanner.in_full

    def slow(self, policy, number):
        found = in_full(self, policy, number)
        return replace(found, end_s=10 * found.end_s, late=found.late * 10) if policy == first else found

    monkeypatch.setattr(planner.RankPlanner, "in_full", slow)
    found = plan_of(JOBS, policies=policies)
    assert found.best.policy != first
    assert not found.best.is_estimated
    assert found.by_policy == planner.best_first(found.by_policy)


def test_jobs_that_time_out_and_jobs_that_starve_are_found_by_estimates_too(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "FULL_TASKS", 10)
    slow = make_job("slow", steps=10, timeout_s=5.0)
    found = plan_of([slow, *JOBS], policies=("fcfs", "srtf"))
    assert all([job.job_id for job in each.failed] == ["slow"] for each in found.by_policy)
    (tmp_path / "idle.py").write_text("def policy(snapshot):\n    return []\n")
    found = plan_of(JOBS, policies=("fcfs", str(tmp_path / "idle.py")))
    assert [each.policy for each in found.by_policy] == ["fcfs"]
    assert "starts nothing although all ranks are free" in found.refused[0]


@pytest.mark.parametrize("most", [10, 10_000])
def test_progress_adds_up_to_the_whole(monkeypatch, most):
    monkeypatch.setattr(planner, "FULL_TASKS", most)
    shares = []
    made = planner.RankPlanner(
        jobs=JOBS[:12],
        profile=PROFILE,
        window=planner.PlanWindow(0.0),
        progress=lambda what, share: shares.append(share),
    )
    made.plan(["fcfs", "srtf"], num_ranks=2, rank_counts=[1, 2])
    assert math.fsum(shares) >= 0.99


@pytest.mark.parametrize("most", [10, 10_000])
def test_a_policy_that_does_not_return_is_left_out_of_a_plan_by_name(hanging, monkeypatch, most):
    monkeypatch.setattr(planner, "FULL_TASKS", most)
    found = plan_of(JOBS, policies=("fcfs", hanging))
    assert [each.policy for each in found.by_policy] == ["fcfs"]
    (reason,) = found.refused
    assert "hangs.py" in reason
    assert reason.endswith("it did not decide within 0.05 s")
    with pytest.raises(RunError, match=r"hangs\.py"):
        plan_of(JOBS, policies=(hanging,))


def test_a_run_goes_on_without_a_policy_that_does_not_return(hanging, caplog):
    run = simulate(JOBS, policy=load_policy(hanging), num_ranks=2, profile=PROFILE)
    assert run.summary.num_done == len(JOBS)
    assert run.summary.policy_fault == "it did not decide within 0.05 s"
    assert "hangs.py failed 3 times; going on with fcfs" in caplog.text


# The time limit -------------------------------------------------------------------------------


def test_what_returns_in_time_is_not_touched():
    before = signal.getsignal(signal.SIGALRM)
    assert within(10.0, partial(max, 1), 2) == 2
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_function_that_catches_the_first_interruption_is_interrupted_again(monkeypatch):
    monkeypatch.setattr("gfgen.system.signals._AGAIN_S", 0.01)
    caught = []

    def stubborn(_):
        try:
            threading.Event().wait()
        except DecisionTimeout:
            caught.append(1)
            threading.Event().wait()

    with pytest.raises(DecisionTimeout):
        within(0.01, stubborn, None)
    assert caught


def test_in_another_thread_there_is_no_limit():
    found = []
    thread = threading.Thread(target=lambda: found.append(within(0.01, lambda x: time.sleep(0.05) or x, 3)))
    thread.start()
    thread.join()
    assert found == [3]
