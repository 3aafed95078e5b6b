"""What no schedule can surpass: by hand where that is easy, and beside all policies where it is not."""

import math

import pytest
from builders import make_job, with_limits
from hypothesis import given, settings
from hypothesis import strategies as st

from gfgen.bench.paper.bounds import least_makespan_s
from gfgen.bench.policy_comparison import score
from gfgen.graph import Stage
from gfgen.policies.catalog import load_policy
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.simulate.simulation import SimulatedTimes, profiled_times, simulate

ALONE_S = {Stage.ENCODE: 1.0, Stage.PREPARE: 1.0, Stage.DENOISE: 10.0, Stage.DECODE: 4.0}
JOB_S = 1 + 1 + 2 * 10 + 4
POLICIES = ("legacy", "legacy,degree=1", "fcfs,degree=2", "srtf", "edf", "triage", "makespan", "auto")


def job(job_id, **fields):
    """Of two steps."""
    return with_limits(make_job(job_id, steps=2, **fields), max_decode_degree=2)


def bound_s(*jobs, num_ranks=1, share=1.0, **times):
    """On n ranks a step takes 1 / n ** share of its time alone, and so does a decode on two."""

    def task_s(dispatch):
        return ALONE_S[dispatch.task.stage] / dispatch.layout.degree**share

    return least_makespan_s(jobs, SimulatedTimes(task_s=task_s, **times), num_ranks=num_ranks)


def test_one_rank_never_pauses():
    assert bound_s(job("a"), job("b"), make_job("long", steps=4)) == 2 * JOB_S + (JOB_S + 20)


def test_a_job_that_has_all_ranks_takes_its_tasks_at_their_quickest():
    found_s = bound_s(job("a", arrival_s=3.0), num_ranks=4, dispatch_s=0.5, write_s=lambda _: 2.0)
    assert found_s == 0.5 + (1 + 1 + 2 * 10 / 4 + 4 / 2) + 2.0


def test_jobs_that_never_meet_do_not_wait():
    jobs = [job(str(number), arrival_s=100.0 * number) for number in range(3)]
    alone_s = 2 + (2 * 10 + 4) / math.sqrt(2)
    assert bound_s(*jobs, num_ranks=2, share=0.5) == pytest.approx(200 + alone_s)


def test_work_counts_on_the_cheapest_ranks():
    jobs = [job(str(number)) for number in range(40)]
    assert bound_s(*jobs, num_ranks=4, share=0.5) == pytest.approx(10 * JOB_S)


@st.composite
def profiles(draw):
    """Machines on which anything may take any time: more ranks may be slower, or more than pay off."""
    seconds = st.floats(0.01, 3.0)
    tasks = [(Stage.ENCODE, (1, 1, 1)), (Stage.PREPARE, (1, 1, 1))]
    tasks += [(Stage.DENOISE, degrees) for degrees in ((1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1))]
    tasks += [(Stage.DECODE, (1, number, 1)) for number in (1, 2, 4)]
    has_load = draw(st.booleans())
    rows = []
    for shape in ("small", "large"):
        for stage, degrees in tasks:
            taken_s = draw(seconds)
            rows.append(
                ProfileRow(
                    "fake",
                    shape,
                    stage,
                    degrees,
                    taken_s,
                    spread_s=draw(st.sampled_from((0.0, 0.1, 0.5))) * taken_s,
                    loaded_s=taken_s * draw(st.floats(0.9, 2.0)) if has_load else None,
                    flops=1e9,
                    write_s=draw(st.floats(0, 1)) if stage is Stage.DECODE else None,
                )
            )
    return Profile(
        "a machine",
        "2026-11-21",
        "a test",
        num_ranks=4,
        rows=tuple(rows),
        dispatch_s=draw(st.sampled_from((0.0, 0.02))),
        move_s=draw(st.sampled_from((0.0, 0.05))),
    )


@st.composite
def workloads(draw):
    """A dozen jobs or fewer, some with deadlines and time-outs, one by one or at once."""
    jobs = []
    for number in range(draw(st.integers(1, 12))):
        made = make_job(
            f"job-{number}",
            steps=draw(st.integers(1, 4)),
            shape=draw(st.sampled_from(("small", "large"))),
            uses_cfg=True,
            arrival_s=draw(st.sampled_from((0.0, 1.0)) | st.floats(0, 30)),
            deadline_s=draw(st.none() | st.floats(0.5, 40)),
            timeout_s=draw(st.none() | st.none() | st.floats(0.5, 60)),
        )
        jobs.append(with_limits(made, max_decode_degree=4))
    return jobs


@settings(max_examples=60, deadline=None)
@given(profile=profiles(), jobs=workloads(), num_ranks=st.integers(1, 4))
def test_no_policy_surpasses_the_bound(profile, jobs, num_ranks):
    least_s = least_makespan_s(jobs, profiled_times(profile, jobs, num_ranks=num_ranks), num_ranks=num_ranks)
    for policy in POLICIES:
        run = simulate(jobs, policy=load_policy(policy), num_ranks=num_ranks, profile=profile)
        found = score(policy, run.outcomes, slack_s=0.0)
        if not found.num_failed:
            assert found.makespan_s >= least_s * (1 - 1e-9)
