"""triage, makespan and edf's rescue, as functions of a snapshot."""

import itertools
import math
from dataclasses import replace

import pytest
from builders import make_job, simulate
from hypothesis import given
from hypothesis import strategies as st
from test_policies import decoding, placed, snapshot, view

from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.policies.allotment import makespan
from gfgen.policies.edf import edf
from gfgen.policies.speed import rest_s
from gfgen.policies.triage import ROOM, _most_in_time, _Queue, _Room, triage
from gfgen.snapshot import Arrangement, RunningTask


class WorkCosts:
    """A job of so many seconds takes as long on one rank, and speeds up with every further one."""

    def __init__(self, *jobs, islands=()):
        self.islands = islands
        self.work_s = {job.job_id: job.remaining_s for job in jobs}

    def task_s(self, task, layout):
        return self.work_s[task.job_id] / 10 / layout.degree

    def remaining_s(self, task, layout):
        return self.work_s[task.job_id] / layout.degree

    def first_use_s(self, task, layout):
        return 0.0

    def move_s(self, job_id, source, layout):
        return 0.0

    def sets(self, ranks, degree=1):
        found = [tuple(rank for rank in ranks if rank in island) for island in self.islands or [ranks]]
        return tuple(filter(None, found))


def four_ranks(*jobs, free=(0, 1, 2, 3), busy=(), running=(), islands=()):
    picture = snapshot(*jobs, free=free, num_ranks=4, max_degree=4, busy=busy)
    return replace(picture, costs=WorkCosts(*jobs, *busy, islands=islands), running=running)


def test_triage_gives_up_the_job_that_makes_room_for_the_most_others():
    large = view("large", remaining_s=40, deadline_s=11)
    small = [view(f"small-{n}", remaining_s=8, deadline_s=12) for n in range(5)]
    assert "large" not in placed(triage(four_ranks(large, *small), degree=1))


@pytest.mark.parametrize(("last_deadline_s", "is_kept"), [(105, False), (111, True)])
def test_triage_looks_far_ahead_for_those_that_would_be_late(last_deadline_s, is_kept):
    """Each second one small job is due; the last of a hundred has no room but that of the large one."""
    large = view("large", remaining_s=40, deadline_s=11)
    small = [view(f"small-{n:02d}", remaining_s=4, deadline_s=11.5 + n) for n in range(99)]
    last = view("last", remaining_s=4, deadline_s=last_deadline_s)
    assert ("large" in placed(triage(four_ranks(large, *small, last), degree=1))) is is_kept


def test_triage_runs_a_job_that_cannot_meet_its_deadline_after_all_others():
    lost = view("lost", remaining_s=40, deadline_s=1)
    jobs = [lost, view("due", deadline_s=90), view("free", deadline_s=math.inf), view("due-2", deadline_s=80)]
    assert "lost" not in placed(triage(four_ranks(*jobs, free=(0, 1, 2)), degree=1))


def test_triage_runs_a_late_job_next_if_its_client_may_still_accept_it():
    """`late` misses its deadline, and meets one that gives it half its time again; `lost` misses both."""
    late, lost = view("late", remaining_s=40, deadline_s=9), view("lost", remaining_s=39, deadline_s=2)
    due = [view(f"due-{n}", remaining_s=2, deadline_s=3) for n in range(3)]
    for lenient in (False, True):
        found = placed(triage(four_ranks(late, lost, *due), degree=1, lenient=lenient))
        assert found.keys() == {"late", "due-0", "due-1", "due-2"}


@pytest.mark.parametrize(("lenient", "is_first"), [(False, False), (True, True)])
def test_lenient_triage_makes_a_job_late_where_that_keeps_another_from_being_lost(lenient, is_first):
    """Of two jobs on one rank one is late, and would be lost after the other, which can wait."""
    late = view("late", remaining_s=5, deadline_s=4)
    due = view("due", remaining_s=4, deadline_s=8)
    picture = replace(four_ranks(late, due, free=(0,)), max_degree=1)
    picture = replace(picture, ranks=picture.ranks[:1])
    assert ("late" in placed(triage(picture, degree=1, lenient=lenient))) is is_first


@pytest.mark.parametrize("deadline_s", [0.5, math.inf])
def test_triage_runs_a_job_first_that_is_short_and_makes_nobody_late(deadline_s):
    other = view("other", remaining_s=4, deadline_s=deadline_s)
    due = view("due", remaining_s=8, deadline_s=100)
    assert placed(triage(four_ranks(other, due, free=(0,)), degree=1)) == {"other": (0,)}
    hurried = replace(due, deadline_s=5)
    assert placed(triage(four_ranks(other, hurried, free=(0,)), degree=1)) == {"due": (0,)}


def test_triage_makes_nobody_late_by_several_that_are_short():
    """Each of them would have room before the job that is due, all of them would not."""
    others = [view(f"other-{n}", remaining_s=4, deadline_s=0.5) for n in range(4)]
    due = view("due", remaining_s=8, deadline_s=7)
    assert "due" in placed(triage(four_ranks(*others, due, free=(0, 1, 2)), degree=1))
    late = replace(due, deadline_s=100)
    assert "due" not in placed(triage(four_ranks(*others, late, free=(0, 1, 2)), degree=1))


def test_triage_heeds_priorities_before_deadlines():
    vip = view("vip", remaining_s=40, priority=1)
    due = view("due", remaining_s=4, deadline_s=30)
    assert placed(triage(four_ranks(due, vip, free=(0,)), degree=1)) == {"vip": (0,)}


def test_triage_gives_up_no_job_for_one_of_lower_priority():
    vip = view("vip", remaining_s=40, deadline_s=11, priority=1)
    small = [view(f"small-{n}", remaining_s=8, deadline_s=12) for n in range(5)]
    assert "vip" in placed(triage(four_ranks(vip, *small), degree=1))


def test_triage_lets_short_jobs_overtake_while_long_ones_keep_room():
    long = view("long", remaining_s=40, deadline_s=100)
    short = view("short", remaining_s=4, deadline_s=200)
    assert placed(triage(four_ranks(long, short, free=(0,)), degree=1)) == {"short": (0,)}
    hurried = replace(long, deadline_s=14)
    assert placed(triage(four_ranks(hurried, short, free=(0,)), degree=1)) == {"long": (0,)}


def test_triage_does_not_go_by_what_it_has_kept_of_a_job_that_has_changed():
    jobs = [view("long", remaining_s=40, deadline_s=100), view("short", remaining_s=4, deadline_s=200)]
    first = four_ranks(*jobs, free=(0,))
    assert placed(triage(first, degree=1)) == {"short": (0,)}
    assert first.kept
    longer = replace(jobs[1], remaining_s=120)
    second = replace(four_ranks(jobs[0], longer, free=(0,)), kept=first.kept)
    assert placed(triage(second, degree=1)) == {"long": (0,)}


@pytest.mark.parametrize(("deadline_s", "degree"), [(100, 1), (11, 2), (4, 4)])
def test_triage_uses_the_fewest_ranks_that_meet_a_deadline_with_ease(deadline_s, degree):
    others = [view(f"other-{n}", remaining_s=1, deadline_s=900) for n in range(4)]
    job = view("a", remaining_s=10, deadline_s=deadline_s, priority=1)
    assert len(placed(triage(four_ranks(job, *others), degree=1))["a"]) == degree


def test_ranks_that_nobody_waits_for_widen_what_runs():
    assert sorted(placed(triage(four_ranks(view("a"), view("b")), degree=1)).values()) == [(0, 1), (2, 3)]
    assert placed(triage(four_ranks(view("a")), degree=1)) == {"a": (0, 1, 2, 3)}


def test_a_free_rank_is_held_for_a_job_that_goes_on_wider_soon():
    first = view("first", remaining_s=10, deadline_s=4, ranks=(0,))
    running = RunningTask(Task("first", 1, Stage.DENOISE, 0), Layout.single(0), 0.5)
    long = view("long", remaining_s=40, deadline_s=100)
    held = four_ranks(long, free=(1, 2, 3), busy=(first,), running=(running,))
    assert placed(triage(held, degree=1)) == {}
    short = view("short", remaining_s=4, deadline_s=100)
    assert len(placed(triage(replace(held, open={"short": short}, costs=WorkCosts(first, short))))) == 1


def test_ranks_are_held_for_a_wider_job_that_has_not_quite_left_its_own():
    """A rank whose task is about to end can already be given the next one, while its job is not yet open."""
    first = view("first", remaining_s=10, deadline_s=4, ranks=(1,))
    running = RunningTask(Task("first", 1, Stage.PREPARE), Layout.single(1), 0.01)
    long = view("long", remaining_s=40, deadline_s=100)
    held = four_ranks(long, free=(0, 1, 2, 3), busy=(first,), running=(running,))
    assert placed(triage(held, degree=1)) == {}


@pytest.mark.parametrize(("decode_work_s", "has_waited"), [(0.5, True), (20, False)])
def test_a_step_waits_for_the_ranks_of_a_short_decode(decode_work_s, has_waited):
    """Whether the decode is running, or starts in the same turn; a step of `long` on two ranks takes 2 s."""
    first = replace(decoding("first", remaining_s=decode_work_s), max_decode_degree=1)
    long = view("long", remaining_s=40, deadline_s=200)
    picture = four_ranks(first, long, free=(0, 1))
    picture = replace(picture, ranks=picture.ranks[:2], max_degree=2)
    assert placed(triage(picture, degree=2)) == {"first": (0,)} | ({} if has_waited else {"long": (1,)})
    running = RunningTask(first.next_task, Layout.single(0), decode_work_s / 10)
    ranks = (replace(picture.ranks[0], can_take=False, free_at_s=decode_work_s / 10), picture.ranks[1])
    later = replace(picture, open={"long": long}, running=(running,), ranks=ranks)
    assert placed(triage(later, degree=2)) == ({} if has_waited else {"long": (1,)})


@pytest.mark.parametrize(("idle_since_s", "has_waited"), [(0.0, False), (-0.4, False), (-0.5, True)])
def test_a_step_waits_for_a_quarter_of_its_length_however_many_decodes_follow_each_other(
    idle_since_s, has_waited
):
    """A step of `long` on two ranks takes 2 s; the decode on rank 0 ends in 50 ms."""
    long = view("long", remaining_s=40, deadline_s=200)
    picture = four_ranks(long, free=(1,))
    busy = replace(picture.ranks[0], free_at_s=0.05)
    idle = replace(picture.ranks[1], free_at_s=idle_since_s)
    picture = replace(picture, ranks=(busy, idle), max_degree=2)
    assert placed(triage(picture, degree=2)) == ({"long": (1,)} if has_waited else {})


ISLANDS = ((0, 1), (2, 3))


def test_no_rank_is_held_for_a_job_that_runs_on_another_island():
    """It could not go on there and here together."""
    first = view("first", remaining_s=10, deadline_s=6, ranks=(0,))
    running = RunningTask(Task("first", 1, Stage.DENOISE, 0), Layout.single(0), 0.5)
    long = view("long", remaining_s=40, deadline_s=100)
    picture = four_ranks(long, free=(2, 3), busy=(first,), running=(running,), islands=ISLANDS)
    picture = replace(picture, max_degree=2)
    assert placed(triage(picture, degree=1)) == {"long": (2, 3)}
    here = four_ranks(long, free=(1,), busy=(first,), running=(running,), islands=ISLANDS)
    assert placed(triage(replace(here, max_degree=2), degree=1)) == {}


def test_what_a_job_lacks_of_its_island_is_not_held_on_another_one():
    wide = view("wide", remaining_s=10, deadline_s=5.2, priority=1)
    other = view("other", remaining_s=40, deadline_s=100)
    picture = replace(four_ranks(wide, other, free=(0, 2), islands=ISLANDS), max_degree=2)
    assert placed(triage(picture, degree=1)) == {"wide": (0,), "other": (2,)}


def test_a_step_waits_for_ranks_of_one_island_alone():
    job = view("a", remaining_s=40, deadline_s=100)
    running = RunningTask(Task("b", 9, Stage.DECODE), Layout.single(3), 0.1)
    picture = replace(four_ranks(job, free=(0,), running=(running,), islands=ISLANDS), max_degree=2)
    ranks = tuple(replace(rank, free_at_s=0.1) if rank.rank == 3 else rank for rank in picture.ranks)
    assert placed(triage(replace(picture, ranks=ranks), degree=2)) == {"a": (0,)}


def test_a_step_waits_for_ranks_that_are_about_to_be_free():
    job = view("a", remaining_s=40, deadline_s=100)
    running = RunningTask(Task("b", 9, Stage.DECODE), Layout.single(3), 0.1)
    picture = four_ranks(job, free=(0, 1, 2), running=(running,))
    ranks = tuple(replace(rank, free_at_s=0.1) if rank.rank == 3 else rank for rank in picture.ranks)
    assert placed(triage(replace(picture, ranks=ranks), degree=4)) == {}
    late = tuple(replace(rank, free_at_s=9.0) if rank.rank == 3 else rank for rank in picture.ranks)
    assert placed(triage(replace(picture, ranks=late), degree=4)) == {"a": (0, 1)}


def test_a_decode_is_as_wide_as_a_step_and_no_wider_than_is_quick():
    job = decoding("a")
    assert placed(triage(four_ranks(job), degree=1)) == {"a": (0, 1, 2, 3)}
    arrangement = Arrangement(steps=((1, 1, 1),) * 8, decodes=(1, 2, 2, 2, 2, 2, 2, 2))
    narrow, other = replace(job, arrangement=arrangement), view("b", remaining_s=40)
    assert placed(triage(four_ranks(narrow, other), degree=4)) == {"a": (0, 1), "b": (2, 3)}


def test_makespan_takes_the_longest_jobs_narrow_while_many_wait_and_wide_at_the_tail():
    jobs = [view(f"job-{n}", remaining_s=n + 1) for n in range(6)]
    assert set(placed(makespan(four_ranks(*jobs)))) == {"job-5", "job-4", "job-3", "job-2"}
    assert placed(makespan(four_ranks(jobs[0]))) == {"job-0": (0, 1, 2, 3)}


def test_makespan_leaves_no_rank_of_many_idle():
    jobs, ranks = [view(f"job-{n}", remaining_s=n + 1) for n in range(40)], tuple(range(32))
    picture = snapshot(*jobs, free=ranks, num_ranks=32, max_degree=8)
    assert len(placed(makespan(replace(picture, costs=WorkCosts(*jobs))))) == 32


def test_makespan_heeds_priorities_before_length():
    jobs = [view("long", remaining_s=99), view("vip", remaining_s=1, priority=1)]
    assert placed(makespan(four_ranks(*jobs, free=(2,)))) == {"vip": (2,)}


@pytest.mark.parametrize("priority", [0, 1])
def test_makespan_lets_what_has_begun_go_on_before_longer_jobs(priority):
    begun = [view(f"begun-{n}", remaining_s=n + 1, ranks=(n,), priority=priority) for n in range(2)]
    fresh = [view(f"fresh-{n}", remaining_s=9, priority=priority) for n in range(20)]
    vip = view("vip", remaining_s=1, priority=1)
    for jobs in ([*begun, *fresh], [*fresh, *reversed(begun)]):
        decisions = placed(makespan(four_ranks(vip, *jobs, free=(0, 1, 2))))
        assert {"begun-0", "begun-1"} < decisions.keys()
        assert ("vip" in decisions) is (priority == 0)


def test_makespan_ends_jobs_all_along():
    """As many are done half-way as are by any other policy; they would all end at the end."""
    jobs = [make_job(f"job-{n}", steps=n + 2) for n in range(12)]
    ends_s = [outcome.ended_s for outcome in simulate(jobs, policy="makespan", num_ranks=2).outcomes]
    assert sum(end_s < ends_s[-1] / 2 for end_s in ends_s) >= 3


def test_edf_puts_jobs_past_rescue_before_those_of_lower_priority():
    vip = view("vip", remaining_s=40, deadline_s=1, priority=1)
    others = [view(f"other-{n}", deadline_s=50 + n) for n in range(6)]
    assert placed(edf(four_ranks(vip, *others, free=(0,)))) == {"vip": (0,)}
    assert placed(edf(four_ranks(vip, *others)))["vip"] == (0,)


def test_edf_leaves_jobs_past_rescue_for_last_on_one_rank():
    lost = view("lost", remaining_s=40, deadline_s=1)
    saved = [view(f"saved-{n}", deadline_s=50 + n) for n in range(2)]
    assert placed(edf(four_ranks(lost, *saved, free=(0, 1)))) == {"saved-0": (0,), "saved-1": (1,)}
    assert placed(edf(four_ranks(lost, *saved)))["lost"] == (2,)
    assert len(placed(edf(four_ranks(lost, *saved), rescue=False))["lost"]) == 4


seconds = st.integers(1, 60).map(float)


@pytest.mark.parametrize("policy", [edf, triage])
@given(
    jobs=st.lists(st.tuples(seconds, seconds, st.integers(-1, 1)), min_size=1, max_size=12), later_s=seconds
)
def test_no_decision_depends_on_which_jobs_were_found_to_be_lost(policy, jobs, later_s):
    views = [
        view(f"job-{n}", remaining_s=4 * work_s, deadline_s=due_s, priority=priority)
        for n, (work_s, due_s, priority) in enumerate(jobs)
    ]
    first, fewer = four_ranks(*views), snapshot(*views, free=(0,), num_ranks=1, max_degree=1)
    policy(first)
    for picture in (first, replace(fewer, costs=first.costs), first):
        now = replace(picture, now_s=later_s)
        assert placed(policy(replace(now, kept=first.kept))) == placed(policy(replace(now, kept={})))


def test_a_job_gives_up_steps_for_as_long_as_it_would_be_late():
    """The first case is late by 2 s of its 10; the next starts when it ends, and the third is lost alone."""
    first = replace(view("first", remaining_s=10, deadline_s=8), saving_s=4.0)
    second, third = view("second", remaining_s=5, deadline_s=13), view("third", remaining_s=9, deadline_s=14)
    cases, waits_s = [(job, job.remaining_s, 0.0) for job in (first, second, third)], dict[str, float]()
    kept, given_up, end_s = _most_in_time(0.0, cases, waits_s, end_s=0.0)
    assert ([job.job_id for job, _, _ in kept], end_s, waits_s) == (["first", "second"], 13.0, {"first": 2.0})
    assert given_up == cases[2:]


def test_a_job_that_may_save_too_little_gives_no_steps_up():
    """Of its 4 s of work on ten ranks, 1 s can be saved; it would be late by 2 s."""
    first = replace(view("first", remaining_s=40, deadline_s=2), saving_s=10.0)
    waits_s = dict[str, float]()
    kept, given_up, _ = _most_in_time(0.0, [(first, 4.0, 0.0)], waits_s, end_s=0.0)
    assert (kept, [job.job_id for job, _, _ in given_up], waits_s) == ([], ["first"], {})


def test_a_job_with_two_ranks_at_most_that_two_would_save_is_not_lost():
    """On two ranks its 10 s take 5 s. Alone it would be late."""
    job = view("a", remaining_s=10, deadline_s=6)
    picture = replace(snapshot(job, max_degree=2), costs=WorkCosts(job))
    assert placed(triage(picture, degree=1)) == {"a": (0, 1)}
    queue = _Queue(picture, 1, lenient=False)
    assert [least_s for _, _, least_s in queue._cases_of([job])] == [5.0]


def test_jobs_that_are_late_in_any_case_leave_the_others_their_time():
    jobs = [view(f"job-{n}", remaining_s=4, deadline_s=due_s) for n, due_s in enumerate((3, 4, 8, 9, 12))]
    cases = [(job, 4.0, 4.0) for job in jobs]
    kept, given_up, end_s = _most_in_time(0.0, cases, {}, end_s=0.0)
    assert (len(kept), end_s) == (3, 12.0)
    assert cases[0] in given_up


@pytest.mark.parametrize(("deadline_s", "is_first"), [(22.0, True), (21.9, False)])
def test_a_short_job_goes_first_if_twice_the_time_of_both_is_left(deadline_s, is_first):
    """On four ranks they take 10 s and 1 s."""
    long, short = view("long", remaining_s=40, deadline_s=deadline_s), view("short", remaining_s=4)
    assert ("short" in placed(triage(four_ranks(long, short, free=(0,)), degree=1))) is is_first


@given(
    saved=st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=9),
    others=st.lists(seconds, max_size=4),
)
def test_the_next_job_is_the_first_that_fits_of_all_by_length(saved, others):
    """Room before a saved job is half of its time, less the work up to its end and what overtook it."""
    saved = [
        (view(f"saved-{n}", remaining_s=s, deadline_s=2 * due_s), work_s / 8, s)
        for n, (s, work_s, due_s) in enumerate(saved)
    ]
    others = [(view(f"other-{n}", remaining_s=s), s / 8, s) for n, s in enumerate(others)]
    ends_s = itertools.accumulate(work_s for _, work_s, _ in saved)
    rooms_s = [job.due_s / ROOM - end_s for (job, _, _), end_s in zip(saved, ends_s, strict=True)]
    places = {job.job_id: place for place, (job, _, _) in enumerate([*saved, *others])}
    works_s = {job.job_id: work_s for job, work_s, _ in (*saved, *others)}
    left = sorted([job for job, _, _ in (*saved, *others)], key=lambda job: job.remaining_s)
    room, gone = _Room([job.due_s for job, _, _ in saved], saved, others, 0.0), set()
    while any(job.job_id.startswith("saved") for job in left):
        fitting = (x for x in left if works_s[x.job_id] <= min(rooms_s[: places[x.job_id]], default=math.inf))
        right, work_s = next(fitting), works_s[left[0].job_id]
        assert right is (left[0] if room.is_enough_for(work_s) else room.shortest(gone))
        left.remove(right)
        gone.add(right.job_id)
        room.take(right.job_id, works_s[right.job_id])
        place = places[right.job_id]
        rooms_s[:place] = [each_s - works_s[right.job_id] for each_s in rooms_s[:place]]
        rooms_s[place : place + 1] = [math.inf] * (place < len(rooms_s))


@pytest.mark.parametrize(
    ("degree", "num_given_up", "rest"), [(1, 0, 10.0), (2, 0, 5.0), (1, 3, 7.0), (2, 3, 3.5)]
)
def test_the_rest_of_a_job_is_shorter_on_more_ranks_and_with_fewer_steps(degree, num_given_up, rest):
    class Costs(WorkCosts):
        def remaining_s(self, task, layout, *, num_given_up=0):
            return (self.work_s[task.job_id] - num_given_up) / layout.degree

    job = view("a", remaining_s=10.0)
    picture = replace(four_ranks(job), costs=Costs(job))
    assert rest_s(picture, job, degree, num_given_up=num_given_up) == rest


def test_no_more_ranks_are_held_for_a_running_job_than_it_lacks():
    """It runs on rank 0 and wants two; two other jobs take the other two."""
    first = view("first", remaining_s=10, deadline_s=7, ranks=(0,))
    running = RunningTask(Task("first", 1, Stage.DENOISE, 0), Layout.single(0), 0.5)
    jobs = [view(f"long-{n}", remaining_s=40, deadline_s=100) for n in range(2)]
    held = four_ranks(*jobs, free=(1, 2, 3), busy=(first,), running=(running,))
    assert sorted(placed(triage(held, degree=1)).values()) == [(2,), (3,)]
