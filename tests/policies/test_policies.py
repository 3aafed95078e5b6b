import math
from dataclasses import replace
from functools import partial

import pytest
from builders import STEP_S, make_job, simulate, simulated_control, with_limits
from hypothesis import given, settings
from hypothesis import strategies as st

from gfgen.errors import PolicyError
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.policies.catalog import BUILT_IN, load_policy
from gfgen.policies.edf import edf
from gfgen.policies.fcfs import fcfs, legacy
from gfgen.policies.srtf import srtf
from gfgen.snapshot import Arrangement, JobView, RankView, Snapshot


class LinearCosts:
    """A step takes a second on one rank, and speeds up with every further one."""

    def __init__(self, islands=()):
        self.islands = islands

    def task_s(self, task, layout):
        return 1.0 / layout.degree

    def remaining_s(self, task, layout):
        return 10.0 / layout.degree

    def first_use_s(self, task, layout):
        return 0.0

    def move_s(self, job_id, source, layout):
        return 0.0

    def sets(self, ranks, degree=1):
        found = [tuple(rank for rank in ranks if rank in island) for island in self.islands or [ranks]]
        return tuple(filter(None, found))


def view(job_id, *, remaining_s=10.0, arrival_s=0.0, deadline_s=math.inf, priority=0, ranks=None):
    return JobView(
        job_id=job_id,
        tag=None,
        model="m",
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        precedence=-priority,
        next_task=Task(job_id, 2, Stage.DENOISE, 0),
        num_tasks=10,
        remaining_s=remaining_s,
        last_layout=Layout(ranks, ulysses=len(ranks)) if ranks else None,
        max_sequence_degree=8,
    )


def snapshot(*jobs, free=(0, 1), num_ranks=2, busy=(), max_degree=1, islands=None):
    return Snapshot(
        now_s=0.0,
        open={job.job_id: job for job in jobs},
        busy={job.job_id: job for job in busy},
        running=(),
        ranks=tuple(RankView(r, 0.0, r in free, frozenset()) for r in range(num_ranks)),
        max_degree=max_degree,
        costs=LinearCosts(islands),
    )


@pytest.mark.parametrize(
    ("uses_cfg", "num_ranks", "degrees"),
    [(False, 4, (1, 2, 2)), (False, 3, (1, 1, 3)), (True, 4, (2, 2, 1)), (True, 8, (2, 2, 2))],
)
def test_a_job_with_few_heads_gets_rings(uses_cfg, num_ranks, degrees):
    job = replace(view("a"), uses_cfg=uses_cfg, max_ulysses_degree=2)
    assert job.layout(range(num_ranks)).degrees == degrees


def placed(decisions):
    return {decision.task.job_id: decision.layout.ranks for decision in decisions}


def test_srtf_prefers_the_job_with_the_least_work_left():
    jobs = [view("long", remaining_s=9), view("short", remaining_s=1), view("medium", remaining_s=5)]
    assert set(placed(srtf(snapshot(*jobs)))) == {"short", "medium"}


def test_srtf_keeps_a_job_on_its_group():
    decisions = srtf(snapshot(view("a", ranks=(1,))))
    assert placed(decisions) == {"a": (1,)}


def test_srtf_gives_an_idle_group_the_job_that_waits_elsewhere():
    decisions = srtf(snapshot(view("a", ranks=(0,)), free=(1,)))
    assert placed(decisions) == {"a": (1,)}


def test_srtf_places_a_new_job_on_the_least_loaded_group():
    busy = [view("b", remaining_s=50, ranks=(0,))]
    assert placed(srtf(snapshot(view("new"), busy=busy))) == {"new": (1,)}


def test_srtf_heeds_priorities_before_length():
    jobs = [view("short", remaining_s=1), view("vip", remaining_s=99, priority=1)]
    assert set(placed(srtf(snapshot(*jobs, free=(0,))))) == {"vip"}


def test_srtf_uses_groups_of_its_degree():
    decisions = srtf(snapshot(view("a"), view("b"), free=range(4), num_ranks=4, max_degree=4), degree=2)
    assert sorted(placed(decisions).values()) == [(0, 1), (2, 3)]


def test_fcfs_takes_jobs_in_order_of_arrival():
    jobs = [view("third", arrival_s=3), view("first", arrival_s=1), view("second", arrival_s=2)]
    assert placed(fcfs(snapshot(*jobs))) == {"first": (0,), "second": (1,)}


def test_fcfs_does_not_start_a_job_where_another_has_begun():
    decisions = fcfs(snapshot(view("new"), view("begun", ranks=(0,), arrival_s=5), free=(0,)))
    assert placed(decisions) == {"begun": (0,)}


def test_fcfs_lets_jobs_go_on_where_each_has_begun():
    jobs = [view("right", ranks=(1,)), view("left", ranks=(0,), arrival_s=1.0), view("new", arrival_s=-1.0)]
    assert placed(fcfs(snapshot(*jobs))) == {"right": (1,), "left": (0,)}


def test_fcfs_leaves_a_group_to_its_job_between_two_steps():
    decisions = fcfs(snapshot(view("new"), busy=[view("begun", ranks=(0,))], free=(0,)))
    assert placed(decisions) == {}


@pytest.mark.parametrize("policy", ["fcfs", "triage", "legacy"])
def test_eight_ranks_are_the_largest_group(policy):
    assert load_policy(f"{policy},degree=8").decide.keywords == {"degree": 8}
    with pytest.raises(PolicyError, match="degree = 9"):
        load_policy(f"{policy},degree=9")


def test_legacy_uses_all_ranks_for_one_job():
    decisions = legacy(snapshot(view("a"), view("b"), free=range(4), num_ranks=4, max_degree=4))
    assert placed(decisions) == {"a": (0, 1, 2, 3)}


def test_legacy_at_degree_one_is_a_replica_on_every_rank():
    jobs = [view("a"), view("b"), view("c")]
    assert sorted(placed(legacy(snapshot(*jobs), degree=1)).values()) == [(0,), (1,)]


def test_edf_prefers_the_next_deadline_and_puts_jobs_without_one_last():
    jobs = [view("none"), view("late", deadline_s=50), view("soon", deadline_s=20)]
    assert set(placed(edf(snapshot(*jobs)))) == {"soon", "late"}


@pytest.mark.parametrize(("deadline_s", "degree"), [(20, 1), (6, 2), (3, 4), (0.1, 1), (math.inf, 1)])
def test_edf_uses_the_fewest_ranks_that_meet_the_deadline(deadline_s, degree):
    decisions = edf(snapshot(view("a", deadline_s=deadline_s), free=range(4), num_ranks=4, max_degree=4))
    assert len(placed(decisions)["a"]) == degree


def test_edf_as_in_the_paper_gives_all_ranks_to_a_job_past_rescue():
    picture = snapshot(view("a", deadline_s=0.1), free=range(4), num_ranks=4, max_degree=4)
    assert len(placed(edf(picture, rescue=False))["a"]) == 4


def test_edf_keeps_a_job_where_its_state_is():
    decisions = edf(snapshot(view("a", deadline_s=50, ranks=(1,))))
    assert placed(decisions) == {"a": (1,)}
    decisions = edf(snapshot(view("a", deadline_s=50, ranks=(0, 1)), free=(1,)))
    assert placed(decisions) == {"a": (1,)}


def test_no_layout_crosses_islands():
    islands = ((0, 1), (2, 3))
    picture = snapshot(view("a", deadline_s=0.1), free=(1, 2), num_ranks=4, max_degree=4, islands=islands)
    assert placed(edf(picture)) == {"a": (1,)}
    assert picture.groups(2) == [(0, 1), (2, 3)]


def decoding(job_id, **fields):
    return replace(view(job_id, **fields), next_task=Task(job_id, 9, Stage.DECODE), max_decode_degree=8)


@pytest.mark.parametrize("policy", [legacy, partial(fcfs, degree=4), partial(srtf, degree=4)])
def test_the_group_that_denoised_decodes(policy):
    job = decoding("a", ranks=(0, 1, 2, 3))
    (decision,) = policy(snapshot(job, free=range(4), num_ranks=4, max_degree=4))
    assert decision.layout == Layout.bands((0, 1, 2, 3))


@pytest.mark.parametrize(("deadline_s", "degree"), [(20, 1), (6, 2), (3, 4)])
def test_edf_decodes_on_the_fewest_ranks_that_meet_the_deadline(deadline_s, degree):
    job = decoding("a", deadline_s=deadline_s)
    (decision,) = edf(snapshot(job, free=range(4), num_ranks=4, max_degree=4))
    assert decision.layout.degree == degree


def test_a_decode_leaves_ranks_to_others_that_would_not_make_it_quicker():
    arrangement = Arrangement(steps=((1, 1, 1),) * 8, decodes=(1, 2, 2, 2, 2, 2, 2, 2))
    job = replace(decoding("a", deadline_s=0.1), arrangement=arrangement)
    decisions = edf(snapshot(job, view("b"), free=range(4), num_ranks=4, max_degree=4), rescue=False)
    assert [decision.layout.degree for decision in decisions] == [2, 1]


jobs_strategy = st.lists(
    st.builds(
        dict,
        steps=st.integers(1, 6),
        arrival_s=st.floats(0, 3),
        deadline_s=st.one_of(st.none(), st.floats(0.1, 10)),
        priority=st.integers(-2, 2),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(
    fields=jobs_strategy,
    policy=st.sampled_from(
        [
            *BUILT_IN,
            *("legacy,degree=1", "fcfs,degree=2", "srtf,degree=3", "edf,rescue=false", "triage,degree=4"),
        ]
    ),
    num_ranks=st.integers(1, 5),
    lookahead_s=st.sampled_from([0.0, 0.03]),
)
def test_every_policy_ends_every_batch_without_a_fault(fields, policy, num_ranks, lookahead_s):
    jobs = [make_job(f"job-{i}", **values) for i, values in enumerate(fields)]
    recorder = simulate(
        jobs, policy=policy, num_ranks=num_ranks, lookahead_s=lookahead_s, max_degree=num_ranks
    )
    assert len(recorder.outcomes) == len(jobs)
    assert not [e for e in recorder.events if type(e).__name__ == "PolicyChanged"]


@pytest.mark.parametrize("deadline_s", [None, 0.5, 6.0, 100.0])
@pytest.mark.parametrize(
    "policy",
    ["legacy,degree=1", "fcfs", "srtf", "edf", "edf,rescue=false", "triage,degree=1", "makespan", "auto"],
)
def test_equal_jobs_do_not_take_turns(policy, deadline_s):
    """What has begun goes on: with every policy no more jobs are under way than there are ranks."""
    jobs = [make_job(f"job-{n}", deadline_s=deadline_s, priority=n % 2) for n in range(12)]
    assert most_under_way(simulate(jobs, policy=policy, num_ranks=2)) == 2


@pytest.mark.parametrize("policy", ["srtf", "edf", "triage,degree=1"])
def test_started_jobs_go_on_while_tasks_take_longer_and_longer(policy):
    """Waiting jobs do not overtake them with predictions that have not been renewed."""
    recorder = simulate(
        [make_job(f"job-{n}") for n in range(40)],
        policy=policy,
        num_ranks=2,
        task_s=lambda dispatch: STEP_S * (1 + dispatch.number / 20),
    )
    assert most_under_way(recorder) == 2


def most_under_way(recorder):
    """The most jobs that had begun and not ended."""
    begun, ended, most = set(), set(), 0
    for dispatch in recorder.dispatches:
        begun.add(dispatch.task.job_id)
        most = max(most, len(begun - ended))
        if dispatch.task.stage is Stage.DECODE:
            ended.add(dispatch.task.job_id)
    return most


def test_fcfs_lets_jobs_that_another_policy_has_begun_go_on_one_after_the_other():
    begun = [view("ahead", remaining_s=3, ranks=(0,)), view("behind", remaining_s=5, ranks=(0,))]
    for jobs in (begun, reversed(begun)):
        assert placed(fcfs(snapshot(*jobs, free=(0,)))) == {"ahead": (0,)}


@settings(max_examples=40, deadline=None)
@given(
    fields=jobs_strategy,
    policy=st.sampled_from(["legacy", "fcfs,degree=4", "srtf,degree=2", "edf", "triage", "makespan", "auto"]),
    islands=st.sampled_from(
        [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,), (3,))]
    ),
    lookahead_s=st.sampled_from([0.0, 0.03]),
)
def test_every_policy_keeps_to_islands(fields, policy, islands, lookahead_s):
    # Jobs of one shape have equally many branches of guidance, and are arranged alike.
    kinds = [{"uses_cfg": True, "shape": "small+cfg"}, {"uses_cfg": False}]
    jobs = [make_job(f"job-{i}", **values, **kinds[i % 2]) for i, values in enumerate(fields)]
    control, recorder = simulated_control(
        jobs, policy=policy, num_ranks=4, lookahead_s=lookahead_s, islands=islands
    )
    control.run()
    assert len(recorder.outcomes) == len(jobs)
    assert control.decider.num_faults == 0
    assert control.decider.given_up is None
    assert control.state.max_degree == max(map(len, islands))


@settings(max_examples=40, deadline=None)
@given(
    fields=jobs_strategy,
    policy=st.sampled_from(["legacy", "fcfs,degree=4", "srtf,degree=2", "edf", "triage", "makespan", "auto"]),
    near=st.sampled_from(
        [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1), (2, 3), (4,)), ((0, 4), (1, 5), (2, 6), (3, 7))]
    ),
    lookahead_s=st.sampled_from([0.0, 0.03]),
)
def test_every_policy_keeps_shared_heads_inside_pairs(fields, policy, near, lookahead_s):
    kinds = [{"uses_cfg": True, "shape": "small+cfg"}, {"uses_cfg": False}]
    links = {"link_bytes_per_s": 1e12, "num_near": 2, "exchanged_bytes": 1.0}
    jobs = [
        with_limits(make_job(f"job-{i}", **values, **kinds[i % 2]), **links)
        for i, values in enumerate(fields)
    ]
    control, recorder = simulated_control(
        jobs, policy=policy, num_ranks=sum(map(len, near)), lookahead_s=lookahead_s, near=near
    )
    control.run()
    assert control.decider.num_faults == 0
    pairs = {frozenset(each) for each in near}
    for dispatch in recorder.dispatches:
        layout = dispatch.layout
        if dispatch.task.stage is Stage.DENOISE and layout.ulysses == 2:
            rows = [layout.ranks[at : at + 2] for at in range(0, layout.degree, 2)]
            assert {frozenset(row) for row in rows} <= pairs


def test_srtf_ends_short_jobs_before_long_ones_that_came_first():
    jobs = [make_job("long", steps=40), make_job("short", steps=2, arrival_s=0.5)]
    assert simulate(jobs, policy="srtf", num_ranks=1).end_order == ["short", "long"]
    assert simulate(jobs, policy="fcfs", num_ranks=1).end_order == ["long", "short"]
