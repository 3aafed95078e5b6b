import functools
from dataclasses import replace

import pytest
from builders import make_job, simulated_control, with_limits

from gfgen.layout import Layout
from gfgen.policies.srtf import srtf
from gfgen.policies.triage import triage
from gfgen.runtime.core.events import JobArrived, RankReady
from gfgen.runtime.simulate import rollout
from gfgen.runtime.simulate.rollout import with_foresight
from gfgen.snapshot import RunningTask


def traffic(*jobs, num_ranks=2):
    """What a chooser is given at time 0, when these jobs have arrived."""
    control, _ = simulated_control(jobs, num_ranks=num_ranks, max_degree=num_ranks)
    for rank in range(num_ranks):
        control.record(RankReady(0.0, rank, 1, 0.0))
    for job in jobs:
        control.record(JobArrived(0.0, job.job_id))
    return control.state.snapshot_of_traffic()


def test_a_look_ahead_ends_all_present_jobs_and_changes_nothing():
    snapshot = traffic(*[make_job(f"job-{n}", steps=3 + n) for n in range(5)])
    ahead = with_foresight(snapshot)
    first = ahead.foresee(srtf)
    assert first == ahead.foresee(srtf)
    assert first.num_jobs == 5
    assert first.makespan_s == pytest.approx(
        sum(job.remaining_s for job in snapshot.open.values()) / 2, rel=0.3
    )
    assert set(ahead.open) == set(snapshot.open)


def test_a_look_ahead_counts_the_jobs_that_would_be_late():
    jobs = [make_job("late", steps=9, deadline_s=0.01), make_job("in-time", steps=9, deadline_s=900.0)]
    assert with_foresight(traffic(*jobs)).foresee(srtf).num_late == 1


def test_a_look_ahead_tells_late_jobs_from_lost_ones():
    end_s = with_foresight(traffic(make_job("a"))).foresee(srtf).makespan_s
    due = [traffic(make_job("a", deadline_s=share * end_s)) for share in (1.1, 0.9, 0.5)]
    found = [with_foresight(each).foresee(srtf) for each in due]
    assert [(each.num_late, each.num_lost) for each in found] == [(0, 0), (1, 0), (1, 1)]


def test_more_ranks_for_a_job_end_it_sooner():
    ahead = with_foresight(traffic(make_job("a", steps=20), num_ranks=4))
    wide = ahead.foresee(functools.partial(srtf, degree=4))
    narrow = ahead.foresee(functools.partial(srtf, degree=1))
    assert wide.mean_latency_s < 0.5 * narrow.mean_latency_s


def test_a_look_ahead_counts_with_decodes_on_several_ranks():
    job = make_job("a", steps=1)
    latencies = [
        with_foresight(traffic(with_limits(job, max_decode_degree=degree), num_ranks=4)).foresee(
            functools.partial(srtf, degree=4)
        )
        for degree in (1, 4)
    ]
    assert latencies[1].mean_latency_s < latencies[0].mean_latency_s


def test_recent_arrivals_are_expected_again_at_their_pace():
    snapshot = traffic(make_job("a"), make_job("b"))
    recent = tuple(
        replace(view, arrival_s=-10.0 * n) for n, view in zip((1, 0), snapshot.recent, strict=True)
    )
    outlook = with_foresight(replace(snapshot, recent=recent, expects_more=True)).foresee(srtf)
    assert outlook.num_jobs == 4
    assert outlook.spread > 0.5, "two arrivals are a small sample"
    assert with_foresight(replace(snapshot, recent=recent)).foresee(srtf).num_jobs == 2
    assert with_foresight(snapshot).foresee(srtf).num_jobs == 2, "a batch is no traffic that goes on"


def test_a_look_ahead_is_bounded(monkeypatch):
    monkeypatch.setattr(rollout, "MAX_TURNS", 5)
    calls = []

    def counted(snapshot):
        calls.append(snapshot)
        return triage(snapshot)

    outlook = with_foresight(traffic(*[make_job(f"job-{n}") for n in range(9)])).foresee(counted)
    assert len(calls) <= 5
    assert outlook.num_jobs == 9, "jobs that it did not see the end of count too"


def test_a_policy_that_starts_nothing_has_an_outlook_all_the_same():
    assert with_foresight(traffic(make_job("a", deadline_s=1e-9))).foresee(lambda _: []).num_late == 1


def test_of_many_jobs_those_that_run_are_looked_at_and_those_that_are_due_next():
    jobs = [make_job(f"job-{n}", deadline_s=1000.0 - n) for n in range(rollout.MAX_JOBS + 20)]
    snapshot = traffic(*jobs)
    running = RunningTask(snapshot.open["job-0"].next_task, Layout.single(0), 1.0)
    seen: list[list[str]] = []
    ahead = with_foresight(replace(snapshot, running=(running,)))
    ahead.foresee(lambda now: seen.append(list(now.open)) or [])
    assert seen[0] == ["job-0", *(f"job-{n}" for n in range(len(jobs) - 1, 20, -1))]
    ahead = with_foresight(snapshot)
    costs = [ahead.costs.remaining_s(job.next_task, Layout.single(0)) for job in ahead.open.values()]
    assert len(costs) == len(jobs), "a policy may ask about any job that it sees"


def test_many_jobs_are_looked_at_by_the_next_deadlines():
    jobs = [make_job(f"job-{n}", deadline_s=1000.0 - n) for n in range(rollout.MAX_JOBS + 20)]
    assert with_foresight(traffic(*jobs)).foresee(srtf).num_jobs == rollout.MAX_JOBS


def test_files_wait_for_their_writer():
    snapshot = traffic(*[make_job(f"job-{n}", steps=1) for n in range(6)])
    slow = {job_id: replace(job, write_s=30.0) for job_id, job in snapshot.open.items()}
    ends_s = []
    for number in (1, 3):
        ahead = with_foresight(replace(snapshot, open=slow, writers_free_s=(0.0,) * number))
        ends_s.append(ahead.foresee(srtf).makespan_s)
    assert ends_s == [pytest.approx(180.0, abs=2.0), pytest.approx(60.0, abs=2.0)]


def test_jobs_of_a_model_that_ranks_do_not_hold_come_after_its_load():
    snapshot = traffic(make_job("a"), make_job("b"))
    parked = {"b": replace(snapshot.open["b"], model="other")}
    picture = replace(snapshot, open={"a": snapshot.open["a"]}, parked=parked, load_s={"other": 50.0})
    alone = with_foresight(replace(picture, parked={})).foresee(srtf)
    outlook = with_foresight(picture).foresee(srtf)
    assert outlook.num_jobs == 2
    assert outlook.makespan_s == pytest.approx(2 * alone.makespan_s + 50.0)


def test_without_deadlines_a_sample_stands_for_all_jobs():
    jobs = [make_job(f"job-{n}", steps=1 + n % 7) for n in range(4 * rollout.MAX_JOBS)]
    snapshot = traffic(*jobs)
    work_s = sum(job.remaining_s for job in snapshot.open.values())
    outlook = with_foresight(snapshot).foresee(srtf)
    assert outlook.num_jobs == rollout.MAX_JOBS
    assert outlook.makespan_s == pytest.approx(work_s / 2, rel=0.03)
