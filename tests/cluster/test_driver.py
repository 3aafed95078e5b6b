"""The driver over simulated nodes: what is handed out when, and what deaths of nodes cost."""

import os
from collections import Counter

import pytest
from builders import STEP_S, Recorder, make_job
from fake_cluster import FakeCluster, FaultyCluster, driver_on

from gfgen.cluster.driver import Links
from gfgen.cluster.node import LANES_PER_RANK, JobEnded
from gfgen.cluster.simulated import LATENCY_S, simulate_nodes
from gfgen.graph import Stage
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.events import PolicyChanged, PriorityChanged, TaskDone, TaskFailed
from gfgen.runtime.predict.profile_file import Profile, ProfileRow

NUM_SEEDS = int(os.environ.get("NUM_SEEDS", "10"))
"""Schedules of faults."""
JOB_S = 7 * STEP_S
"""Encode, prepare, four steps, decode."""


@pytest.mark.parametrize("policy", ["srtf", "fcfs,degree=2", "edf", "triage", "makespan", "auto"])
def test_all_jobs_are_done_whatever_the_policy(policy):
    jobs = [make_job(f"job-{n}", steps=1 + n % 3, arrival_s=0.1 * (n % 5)) for n in range(12)]
    driver, recorder = driver_on(FakeCluster(num_nodes=2, policy=policy), jobs, policy=policy)
    assert driver.run().num_done == 12
    assert sorted(recorder.end_order) == sorted(job.job_id for job in jobs)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_nothing_is_lost_or_doubled_whatever_dies(seed):
    jobs = [make_job(f"job-{n}", steps=1 + n % 3, arrival_s=0.2 * (n % 4)) for n in range(16)]
    cluster = FaultyCluster(seed, num_nodes=2)
    driver, recorder = driver_on(cluster, jobs, num_slots=40)
    applied = driver.state.apply

    def checked(event):
        outcomes = applied(event)
        driver.state.check()
        return outcomes

    driver.state.apply = checked
    summary = driver.run()
    assert Counter(recorder.end_order) == Counter(job.job_id for job in jobs)
    assert summary.num_done + summary.num_failed == len(jobs)
    numbers = [dispatch.number for dispatch in recorder.dispatches]
    assert numbers == sorted(set(numbers))
    ends = Counter(e.dispatch for e in recorder.events if isinstance(e, TaskDone | TaskFailed))
    assert ends == Counter(numbers), "each attempt ends once"
    for outcome in recorder.outcomes:
        assert outcome.status == "done" or "3 workers died under it" in outcome.error


def test_a_node_gets_its_next_job_before_it_needs_it():
    jobs = [make_job(f"job-{n}") for n in range(20)]
    cluster = FakeCluster(num_nodes=1)
    driver, _ = driver_on(cluster, jobs)
    summary = driver.run()
    assert summary.makespan_s == pytest.approx(10 * JOB_S, abs=3 * LATENCY_S), (
        "no rank waits for a round trip"
    )


def test_an_urgent_job_overtakes_jobs_that_were_handed_out():
    long = [make_job(f"long-{n}", steps=50) for n in range(12)]
    urgent = make_job("urgent", priority=1, arrival_s=1.0)
    driver, recorder = driver_on(FakeCluster(num_nodes=2), [*long, urgent])
    driver.run()
    outcome = recorder.outcomes[0]
    assert outcome.info.job_id == "urgent"
    assert outcome.ended_s - outcome.arrival_s < JOB_S + 2 * STEP_S


def test_urgent_jobs_overtake_on_the_least_busy_node():
    long = [make_job(f"long-{n}", steps=50 + n) for n in range(4)]
    urgent = [make_job(f"urgent-{n}", priority=1, arrival_s=1.0) for n in range(4)]
    driver, recorder = driver_on(FakeCluster(num_nodes=2), [*long, *urgent])
    driver.run()
    assert places(recorder, "urgent") == {0: 2, 1: 2}


def test_the_last_jobs_are_split_evenly():
    driver, recorder = driver_on(FakeCluster(num_nodes=2), [make_job(f"job-{n}") for n in range(4)])
    driver.run()
    assert places(recorder, "job") == {0: 2, 1: 2}


def places(recorder, name, *, num_lanes=2 * LANES_PER_RANK):
    """By slot, how many of these jobs its node got."""
    dispatches = [d for d in recorder.dispatches if d.task.job_id.startswith(name)]
    return Counter(d.layout.ranks[0] // num_lanes for d in dispatches)


def test_a_dead_node_gives_its_jobs_back():
    cluster = FakeCluster(num_nodes=2)
    driver, recorder = driver_on(cluster, [make_job(f"job-{n}") for n in range(4)])
    driver.begin()
    while len(recorder.dispatches) < 4:
        driver.turn()
    cluster.kill("node 1")
    while not driver.state.finished:
        driver.turn()
    assert driver.metrics.summary().num_done == 4
    assert len(recorder.dispatches) == 6
    again = [outcome for outcome in recorder.outcomes if outcome.warnings]
    assert len(again) == 2
    assert "node node 1 is gone: killed" in again[0].warnings[0]


def test_a_late_result_of_a_lost_node_is_dropped(caplog):
    cluster = FakeCluster(num_nodes=2)
    driver, recorder = driver_on(cluster, [make_job("job")])
    driver.begin()
    while not recorder.dispatches:
        driver.turn()
    cluster.kill("node 1")
    cluster.report(JobEnded("node 1", 1, recorder.outcomes), cluster.clock.now_s + 0.1)
    with caplog.at_level("INFO"):
        while not driver.state.finished:
            driver.turn()
    assert [d.number for d in recorder.dispatches] == [1, 2]
    assert recorder.outcomes[0].status == "done"
    assert "a late result of attempt 1 on node 1 is dropped" in caplog.text


def test_a_timeout_stops_a_job_on_its_node():
    driver, recorder = driver_on(FakeCluster(num_nodes=1), [make_job("slow", steps=100, timeout_s=1.0)])
    driver.run()
    (outcome,) = recorder.outcomes
    assert outcome.error == "timed out 1 s after its arrival"
    assert outcome.ended_s < 1.0 + 2 * STEP_S


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_the_work_is_split_nearly_perfectly(num_nodes):
    profile = profile_of(shapes={"small": 1.0, "large": 5.0})
    jobs = [make_job(f"job-{n}", shape="large" if n % 4 == 0 else "small") for n in range(30 * num_nodes)]
    run = simulate_nodes(
        jobs, policy=load_policy("makespan"), num_nodes=num_nodes, num_ranks=2, profile=profile
    )
    assert run.summary.num_done == len(jobs)
    assert run.summary.num_tasks == 7 * len(jobs)
    assert run.summary.utilisation > 0.97


def test_the_longest_jobs_are_spread_over_the_nodes():
    profile, recorder = profile_of(shapes={"small": 1.0, "large": 10.0}), Recorder()
    shapes = ["large"] * 24 + ["small"] * 96
    jobs = [make_job(f"{shape}-{n}", shape=shape) for n, shape in enumerate(shapes)]
    simulate_nodes(
        jobs,
        policy=load_policy("makespan"),
        num_nodes=4,
        num_ranks=4,
        profile=profile,
        observers=[recorder],
    )
    assert places(recorder, "large", num_lanes=4 * LANES_PER_RANK) == dict.fromkeys(range(4), 6)


def profile_of(*, shapes):
    rows = [
        ProfileRow("fake", shape, stage, (1, 1, 1), seconds, flops=1e9)
        for shape, seconds in shapes.items()
        for stage in Stage
    ]
    return Profile("a machine", "2026-11-20", "a test", num_ranks=2, rows=tuple(rows))


def test_another_policy_and_priority_reach_the_nodes_and_the_driver_still_hands_out():
    jobs = [make_job(f"job-{n}") for n in range(12)]
    driver, _ = driver_on(FakeCluster(num_nodes=2), jobs, policy="fcfs")
    told = []
    driver.backend.links = Links(tell=told.append)
    change = PolicyChanged(0.0, "srtf", "requested")
    urgent = PriorityChanged(0.0, "job-11", 5)
    driver.clock.at(change)
    driver.clock.at(urgent)
    assert driver.run().num_done == 12
    assert {change, urgent} == set(told)
    assert driver.decider.policy.name == "srtf"
    assert driver.decider.policy.decide == driver.handout.decide
