import math
import re
import signal
from dataclasses import replace

import pytest
from builders import make_job, with_limits

from gfgen.errors import InterruptedRunError, PolicyFault
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.decider import Decider, check_types
from gfgen.runtime.control.ranks import lookahead_of
from gfgen.runtime.control.state import MIN_FILES, State
from gfgen.runtime.core import events
from gfgen.runtime.core.events import Clock
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.snapshot import Decision


class Cluster:
    """A state with ready ranks and arrived jobs, and short words to drive it."""

    def __init__(self, *jobs, num_ranks=2, lookahead_s=0.0, max_degree=None):
        self.clock = Clock(virtual=True)
        self.jobs = {job.job_id: job for job in jobs}
        costs = CostModel()
        if lookahead_s:
            self.warm_up(costs, jobs[0])
        self.state = State(
            jobs,
            RunStart(num_ranks=num_ranks, lookahead_s=lookahead_s, max_degree=max_degree),
            clock=self.clock,
            costs=costs,
        )
        for rank in range(num_ranks):
            self.state.apply(events.RankReady(0.0, rank, 1, 0.0))
        for job in jobs:
            self.state.apply(events.JobArrived(0.0, job.job_id))

    def warm_up(self, costs, job):
        """Tasks like these have run before, and took 0.1 s."""
        known = costs.cost_class("fake", job.shape, flops=job.flops, state_bytes=job.state_bytes)
        for stage in Stage:
            costs.observe(known, stage, (1, 1, 1), 0.1)

    def decision(self, job_id, index, *ranks):
        return Decision(self.jobs[job_id].trajectory.task(index), Layout(ranks, ulysses=len(ranks)))

    def begin(self, job_id, index, *ranks):
        return self.state.begin(self.decision(job_id, index, *ranks))[0]

    def done(self, dispatch, seconds=0.1):
        end_s = self.clock.now_s + seconds
        self.clock.advance(end_s)
        times = [events.RankTimes(rank, end_s - seconds, end_s) for rank in dispatch.layout.ranks]
        return self.state.apply(events.TaskDone(end_s, dispatch.number, tuple(times)))

    def failed(self, dispatch, reason="boom", *, void=False):
        return self.state.apply(events.TaskFailed(self.clock.now_s, dispatch.number, reason, void))


def test_a_job_is_open_from_its_arrival_on():
    cluster = Cluster(make_job("a"))
    assert list(cluster.state.snapshot().open) == ["a"]


def test_a_running_job_is_busy_and_its_rank_is_taken():
    cluster = Cluster(make_job("a"))
    cluster.begin("a", 0, 1)
    snapshot = cluster.state.snapshot()
    assert (list(snapshot.open), list(snapshot.busy)) == ([], ["a"])
    assert snapshot.free_ranks == (0,)


def test_a_time_of_day_is_that_after_the_first_arrival():
    """The job arrived the evening before at 22:00; it goes on at 7:00, when 6:00 has passed."""
    evening, morning, next_due = (20_000 * 86_400.0 + hours * 3600 for hours in (22, 31, 54))
    job = make_job("a", deadline_at=next_due, deadline_clock="06:00 UTC")
    for arrived_at, deadline_s in (({}, 23 * 3600), ({("a", "hash of a"): evening}, -3600)):
        start = RunStart(num_ranks=1, started_at=morning, arrived_at=arrived_at)
        state = State([job], start, clock=Clock(virtual=True), costs=CostModel())
        assert state.jobs.records["a"].deadline_s == deadline_s


def test_a_run_is_not_stuck_while_a_file_is_being_written():
    """Its writer would answer a run that is over, or the next one on the same pool."""
    cluster = Cluster(make_job("a", steps=1), make_job("poor"))
    assert cluster.state.is_stuck
    for index in range(4):
        dispatch = cluster.begin("a", index, 0)
        assert not cluster.state.is_stuck
        cluster.done(dispatch)
    assert not cluster.state.is_stuck
    cluster.state.apply(events.OutputWritten(cluster.clock.now_s, "a", "a.png", 1, 0.1))
    assert cluster.state.is_stuck


def test_a_run_that_stops_ends_with_the_last_task_and_the_last_file():
    cluster = Cluster(make_job("a", steps=1), make_job("b"))
    other = cluster.begin("b", 0, 1)
    for index in range(4):
        cluster.done(cluster.begin("a", index, 0))
    cluster.state.apply(events.StopRequested(cluster.clock.now_s, signal.SIGTERM))
    assert not cluster.state.finished
    cluster.done(other)
    assert not cluster.state.finished
    cluster.state.apply(events.OutputWritten(cluster.clock.now_s, "a", "a.png", 1, 0.1))
    assert cluster.state.finished


def test_a_completed_task_opens_the_next_one():
    cluster = Cluster(make_job("a"))
    cluster.done(cluster.begin("a", 0, 0))
    assert cluster.state.snapshot().open["a"].next_task.stage is Stage.PREPARE


def test_a_snapshot_does_not_change_afterwards():
    cluster = Cluster(make_job("a"))
    before = cluster.state.snapshot()
    cluster.begin("a", 0, 0)
    assert list(before.open) == ["a"]


def test_dispatch_numbers_rise_and_name_the_producer():
    cluster = Cluster(make_job("a"), make_job("b"))
    first, other = cluster.begin("a", 0, 0), cluster.begin("b", 0, 1)
    cluster.done(first)
    second = cluster.begin("a", 1, 0)
    assert [first.number, other.number, second.number] == [1, 2, 3]
    assert (first.producer, second.producer) == (None, 1)


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (("a", 1, 0), "is not its next task"),
        (("b", 0, 0), "rank 0 is not free"),
        (("b", 0, 1, 2), "runs on one rank"),
        (("a", 0, 1), "is not its next task"),
        (("a", 2, 1), "is not its next task"),
    ],
)
def test_illegal_decisions_are_refused_with_the_reason(decision, reason):
    cluster = Cluster(make_job("a"), make_job("b"), num_ranks=3)
    cluster.begin("a", 0, 0)
    if decision == ("a", 1, 0):
        decision, reason = ("a", 1, 1), "its input does not exist yet"
    with pytest.raises(PolicyFault, match=reason):
        cluster.begin(*decision)


NEXT = Task("a", 0, Stage.ENCODE)
HERE = Layout.single(0)


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (None, "type NoneType; a Decision"),
        ("a", "type str; a Decision"),
        ((NEXT, HERE), "type tuple; a Decision"),
        (Decision(None, HERE), "a Decision(NoneType, Layout)"),
        (Decision(Task(["a"], 0, Stage.ENCODE), HERE), "the job's next_task and a Layout are accepted"),
        (Decision(NEXT, 0), "a Decision(Task, int)"),
        (Decision(NEXT, Layout([0])), "a tuple of whole numbers"),
        (Decision(NEXT, Layout((0.0,))), "a tuple of whole numbers"),
        (Decision(NEXT, Layout((0, 1), ulysses=2.0)), "a tuple of whole numbers"),
    ],
)
def test_what_is_no_decision_at_all_is_a_named_fault(decision, reason):
    with pytest.raises(PolicyFault, match=re.escape(reason)):
        check_types(decision)


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (Decision(Task("a", 0, Stage.DECODE), HERE), "decode (number 0) is not its next task"),
        (Decision(Task("a", "x", Stage.ENCODE), HERE), "is not its next task"),
        (Decision(Task("a", 0, Stage.ENCODE, step=0), HERE), "is not its next task"),
        (Decision(NEXT, Layout.single(99)), "the ranks of [99] do not reach each other"),
    ],
)
def test_a_decision_of_another_task_or_rank_is_a_named_fault(decision, reason):
    cluster = Cluster(make_job("a"))
    with pytest.raises(PolicyFault, match=re.escape(reason)):
        cluster.state.begin(decision)
    assert cluster.begin("a", 0, 0).number == 1


def test_ranks_that_do_not_reach_each_other_share_no_task():
    cluster = Cluster(make_job("a"), num_ranks=4)
    cluster.state.ranks.islands = ((0, 1), (2, 3))
    for index in (0, 1):
        cluster.done(cluster.begin("a", index, 0))
    with pytest.raises(PolicyFault, match="do not reach each other"):
        cluster.begin("a", 2, 1, 2)
    assert cluster.begin("a", 2, 2, 3).layout.ranks == (2, 3)


@pytest.mark.parametrize("lost", [False, True])
def test_lost_frames_are_decoded_again_from_the_same_latents(lost):
    cluster = Cluster(make_job("a", steps=1), num_ranks=2)
    for index in (0, 1, 2):
        made = cluster.begin("a", index, 0)
        cluster.done(made)
    for attempt in range(2):
        cluster.done(cluster.begin("a", 3, attempt))
        outcomes = cluster.state.apply(events.FramesLost(9.0, "a", "no room", lost=lost))
        if attempt == 0 or lost:
            assert not list(outcomes)
            assert cluster.state.snapshot().open["a"].next_task.stage is Stage.DECODE
            assert cluster.state.jobs.stopped_at(cluster.state.ranks.records) == {"a": (3, made.number)}
        else:
            (outcome,) = outcomes
            assert (outcome.status, outcome.error) == ("failed", "decode: no room")


def test_a_job_whose_time_was_up_when_its_frames_were_lost_is_not_decoded_again():
    cluster = Cluster(make_job("a", steps=1, timeout_s=5.0))
    for index in range(4):
        cluster.done(cluster.begin("a", index, 0))
    assert not list(cluster.state.apply(events.JobTimedOut(5.0, "a"))), "its file is being written"
    (outcome,) = cluster.state.apply(events.FramesLost(9.0, "a", "no room", lost=True))
    assert outcome.error == "timed out 5 s after its arrival"


def test_state_goes_to_another_island_by_way_of_main_memory():
    cluster = Cluster(make_job("a"), num_ranks=4)
    cluster.state.ranks.islands = ((0, 1), (2, 3))
    for index in (0, 1):
        cluster.done(cluster.begin("a", index, 0))
    near = cluster.begin("a", 2, 1)
    assert {(part.source, part.destination) for part in near.transfers} == {(0, 1)}
    cluster.done(near)
    far = cluster.begin("a", 3, 2)
    assert (far.source.ranks, far.transfers, far.producer) == ((1,), (), near.number)


def test_state_of_a_rank_that_loads_other_models_is_taken_from_main_memory():
    """It may have to load for long, and to map the arena of a rank that has come meanwhile."""
    cluster = Cluster(make_job("a"))
    for index in (0, 1):
        made = cluster.begin("a", index, 0)
        cluster.done(made)
    cluster.state.apply(events.ModelsChanged(1.0, ("fake", "other"), 5.0, "as told"))
    cluster.state.apply(events.RankLoaded(2.0, 1, 1.0))
    moved = cluster.begin("a", 2, 1)
    assert (moved.source.ranks, moved.transfers, moved.producer) == ((0,), (), made.number)


def test_a_refused_decision_changes_nothing():
    cluster = Cluster(make_job("a"))
    with pytest.raises(PolicyFault):
        cluster.begin("a", 3, 0)
    assert cluster.begin("a", 0, 0).number == 1


def test_a_consumer_may_be_queued_when_its_producer_is_about_to_end():
    cluster = Cluster(make_job("a"), lookahead_s=0.05)
    first = cluster.begin("a", 0, 0)
    assert cluster.state.choice() is None or first.predicted_end_s <= 0.05
    cluster.clock.advance(first.predicted_end_s - 0.01)
    assert cluster.state.snapshot().free_ranks == (0, 1)
    second = cluster.begin("a", 1, 1)
    assert second.producer == first.number
    assert "a" in cluster.state.snapshot().busy


@pytest.mark.parametrize("early_s", [0.0015, 0.0025])
def test_what_follows_a_task_is_decided_earlier_than_the_lookahead_says_by_a_share_of_it(early_s):
    cluster = Cluster(make_job("a"), lookahead_s=0.0001)
    running = cluster.begin("a", 0, 0)
    look_s = running.predicted_end_s - 0.0001 - 0.02 * 0.1
    assert cluster.state.flights.next_look_s(0.0) == pytest.approx(look_s)
    assert cluster.state.flights.next_look_s(cluster.state.flights.next_look_s(0.0)) == math.inf
    cluster.clock.advance(running.predicted_end_s - early_s)
    assert cluster.state.snapshot().free_ranks == ((0, 1) if early_s < 0.0021 else (1,))


def test_what_follows_a_task_is_decided_before_the_shortest_of_the_recent_ones_would_end():
    cluster = Cluster(make_job("a"), lookahead_s=0.005)
    for index, seconds in enumerate((0.1, 0.1, 0.2, 0.126, 0.126)):
        cluster.done(cluster.begin("a", index, 0), seconds)
    begun_s = cluster.clock.now_s
    running = cluster.begin("a", 5, 0)
    assert running.predicted_end_s == pytest.approx(begun_s + 0.126)
    look_s = begun_s + 0.1 - 0.005 - 0.02 * 0.126
    assert cluster.state.flights.next_look_s(begun_s) == pytest.approx(look_s)


def test_what_follows_a_queued_task_is_decided_by_the_real_end_of_the_one_before_it():
    cluster = Cluster(make_job("a", steps=6), lookahead_s=0.005)
    for index, seconds in enumerate((0.1, 0.1, 0.3, 0.125, 0.125)):
        cluster.done(cluster.begin("a", index, 0), seconds)
    begun_s = cluster.clock.now_s
    running = cluster.begin("a", 5, 0)
    cluster.clock.advance(cluster.state.flights.next_look_s(begun_s))
    cluster.begin("a", 6, 0)
    cluster.done(running, 0.25)
    ended_s = cluster.clock.now_s
    look_s = ended_s + 0.1 - 0.005 - 0.02 * 0.125
    assert cluster.state.flights.next_look_s(ended_s) == pytest.approx(look_s)


def test_what_follows_a_task_that_moves_is_decided_as_if_its_state_were_there():
    cluster = Cluster(make_job("a"), lookahead_s=0.005)
    for index in range(3):
        cluster.done(cluster.begin("a", index, 0))
    begun_s = cluster.clock.now_s
    moving = cluster.begin("a", 3, 1)
    assert moving.predicted_end_s > begun_s + 0.1
    assert cluster.state.flights.next_look_s(begun_s) <= begun_s + 0.1 - 0.005


def test_a_rank_that_ends_before_the_others_gets_its_next_task_in_time():
    cluster = Cluster(make_job("a"), lookahead_s=0.005)
    for index in range(2):
        cluster.done(cluster.begin("a", index, 0))
    begun_s = cluster.clock.now_s
    wide = cluster.begin("a", 2, 0, 1)
    cluster.clock.advance(begun_s + 0.15)
    times = (events.RankTimes(0, begun_s, begun_s + 0.1), events.RankTimes(1, begun_s, begun_s + 0.15))
    cluster.state.apply(events.TaskDone(begun_s + 0.15, wide.number, times))
    begun_s = cluster.clock.now_s
    cluster.begin("a", 3, 0, 1)
    look_s = begun_s + 0.1 - 0.005 - 0.02 * 0.15
    assert cluster.state.flights.next_look_s(begun_s) == pytest.approx(look_s)


@pytest.mark.parametrize(
    ("predicted_s", "lookahead_s", "found_s"), [(1.0, 0.005, 0.025), (6.0, 0.005, 0.030), (1.0, 0.0, 0.0)]
)
def test_the_lookahead_of_a_task_grows_by_a_share_of_the_task_within_bounds(
    predicted_s, lookahead_s, found_s
):
    assert lookahead_of(predicted_s, lookahead_s=lookahead_s) == pytest.approx(found_s)


def test_nothing_is_queued_by_a_guess():
    cluster = Cluster(make_job("a"), make_job("b", shape="never seen"), lookahead_s=10.0)
    cluster.begin("b", 0, 0)
    assert cluster.state.snapshot().free_ranks == (1,)
    cluster.begin("a", 0, 1)
    assert cluster.state.snapshot().free_ranks == (1,)


def test_a_task_that_is_queued_begins_when_its_own_rank_has_ended_the_one_before_it():
    cluster = Cluster(make_job("a"), make_job("b"), lookahead_s=10.0)
    for index in range(2):
        cluster.done(cluster.begin("a", index, 0))
    cluster.done(cluster.begin("a", 2, 0, 1))  # so that the next one is foreseeable
    wide = cluster.begin("a", 3, 0, 1)
    begun_s = cluster.clock.now_s
    cluster.begin("b", 0, 0)
    cluster.clock.advance(begun_s + 0.15)
    times = (events.RankTimes(0, begun_s, begun_s + 0.1), events.RankTimes(1, begun_s, begun_s + 0.15))
    cluster.state.apply(events.TaskDone(begun_s + 0.15, wide.number, times))
    (running,) = cluster.state.snapshot().running
    assert running.predicted_end_s == pytest.approx(begun_s + 0.2)


def test_nothing_is_queued_behind_a_task_that_is_late():
    cluster = Cluster(make_job("a"), lookahead_s=0.05)
    running = cluster.begin("a", 0, 0)
    cluster.clock.advance(running.predicted_end_s + 0.04)
    assert cluster.state.snapshot().free_ranks == (0, 1)
    cluster.clock.advance(running.predicted_end_s + 0.06)
    assert cluster.state.snapshot().free_ranks == (1,)


def test_no_third_task_is_queued():
    cluster = Cluster(make_job("a"), lookahead_s=10.0)
    cluster.begin("a", 0, 0)
    cluster.begin("a", 1, 0)
    with pytest.raises(PolicyFault, match="its input does not exist yet"):
        cluster.begin("a", 2, 1)
    assert cluster.state.snapshot().free_ranks == (1,)


def test_without_lookahead_only_finished_inputs_count():
    cluster = Cluster(make_job("a"))
    first = cluster.begin("a", 0, 0)
    cluster.clock.advance(first.predicted_end_s)
    assert not cluster.state.snapshot().open


def test_a_job_ends_when_its_file_is_written():
    cluster = Cluster(make_job("a", steps=1))
    for index in range(4):
        assert not cluster.done(cluster.begin("a", index, 0))
    assert not cluster.state.finished
    (outcome,) = cluster.state.apply(events.OutputWritten(1.0, "a", "a.png", 10, 0.1))
    assert outcome.status == "done"
    assert cluster.state.finished


def test_a_job_whose_file_cannot_be_written_fails():
    cluster = Cluster(make_job("a", steps=1))
    for index in range(4):
        cluster.done(cluster.begin("a", index, 0))
    (outcome,) = cluster.state.apply(events.OutputFailed(1.0, "a", "the disk is full"))
    assert (outcome.status, outcome.error) == ("failed", "the disk is full")


def test_a_job_whose_file_is_being_written_needs_its_model_no_more():
    cluster = Cluster(make_job("a", steps=1), make_job("b"))
    for index in range(4):
        cluster.done(cluster.begin("a", index, 0))
    (failed,) = cluster.state.apply(events.LoadFailed(1.0, ("fake",), "no such file"))
    assert (failed.info.job_id, failed.status) == ("b", "failed")
    (outcome,) = cluster.state.apply(events.OutputWritten(1.0, "a", "a.png", 10, 0.1))
    assert outcome.status == "done"


def test_a_choice_is_due_when_a_rank_is_ready_and_a_job_is_open():
    state = State([make_job("a")], RunStart(num_ranks=1), clock=Clock(virtual=True), costs=CostModel())
    state.apply(events.JobArrived(0.0, "a"))
    assert state.choice() is None
    state.apply(events.RankReady(0.0, 0, 1, 0.0))
    assert state.choice().open == state.snapshot().open
    assert not Cluster().state.choice()


def test_looks_ahead_know_what_has_ended_and_what_it_may_take():
    cluster = Cluster(make_job("a", steps=1), make_job("b"))
    for index in range(4):
        cluster.done(cluster.begin("a", index, 0))
    cluster.state.apply(events.OutputWritten(1.0, "a", "a.png", 10, 0.1))
    ahead = cluster.state.snapshot_of_traffic({"fake": 3.0})
    assert [view.job_id for view in ahead.recent] == ["a", "b"]
    assert (set(ahead.open), ahead.parked, ahead.load_s) == ({"b"}, {}, {"fake": 3.0})
    assert ahead.writers_free_s == (cluster.clock.turn_s,)


def test_steps_need_patches_and_so_do_texts_of_general_pipelines():
    own = Cluster(make_job("a")).state.jobs.records["a"]
    general = Cluster(replace(make_job("a"), has_nominal_flops=True)).state.jobs.records["a"]
    assert [stage for stage in Stage if own.needs_patches(stage)] == [Stage.DENOISE]
    assert set(Stage) - {stage for stage in Stage if general.needs_patches(stage)} == {Stage.APPROXIMATE}


def test_the_outcome_has_the_size_that_the_model_made():
    cluster = Cluster(make_job("a", steps=1))
    for index in range(4):
        cluster.done(cluster.begin("a", index, 0))
    (outcome,) = cluster.state.apply(events.OutputWritten(1.0, "a", "a.mp4", 10, 0.1, made=(9, 128, 256)))
    assert outcome.made == (9, 128, 256)
    assert outcome.warnings[-1].startswith("the model made 256x128 with 9 frames, not ")


def test_the_outcome_tells_layouts_and_time_by_stage():
    cluster = Cluster(make_job("a", steps=2))
    for index, rank in enumerate((0, 0, 1, 0, 0)):
        cluster.done(cluster.begin("a", index, rank), seconds=1.0)
    (outcome,) = cluster.state.apply(events.OutputWritten(5.0, "a", "a.png", 10, 0.1))
    assert outcome.layouts == ("[0]", "[1]", "[0]")
    assert outcome.timings == {"encode": 1.0, "prepare": 1.0, "denoise": 2.0, "decode": 1.0}
    assert outcome.busy_s == 5.0


def test_a_task_that_fails_once_is_tried_again():
    cluster = Cluster(make_job("a"))
    first = cluster.done(cluster.begin("a", 0, 0)) or cluster.begin("a", 1, 0)
    assert not cluster.failed(first)
    again = cluster.begin("a", 1, 1)
    assert again.producer == 1


def test_a_task_that_fails_twice_fails_its_job():
    cluster = Cluster(make_job("a"))
    cluster.failed(cluster.begin("a", 0, 0))
    (outcome,) = cluster.failed(cluster.begin("a", 0, 1), "out of luck")
    assert outcome.status == "failed"
    assert outcome.error == "encode: out of luck"
    assert cluster.state.finished


def test_what_was_queued_on_a_failed_task_is_void_and_counts_no_failure():
    cluster = Cluster(make_job("a"), lookahead_s=10.0)
    first, second = cluster.begin("a", 0, 0), cluster.begin("a", 1, 1)
    cluster.failed(first)
    assert "a" in cluster.state.snapshot().busy
    cluster.failed(second, void=True)
    assert cluster.state.snapshot().open["a"].next_task.index == 0
    cluster.done(cluster.begin("a", 0, 0))
    cluster.failed(cluster.begin("a", 1, 0))
    assert cluster.state.snapshot().open["a"].next_task.index == 1


def test_a_queued_task_that_fails_before_its_producer_reports_costs_that_one_nothing():
    cluster = Cluster(make_job("a"), lookahead_s=10.0)
    producer = cluster.begin("a", 0, 0)
    queued = cluster.begin("a", 1, 1)
    cluster.failed(queued)
    cluster.done(producer)
    again = cluster.begin("a", 1, 1)
    assert again.producer == producer.number
    cluster.done(again)


def test_decodes_wait_while_too_many_files_are_under_way_and_failed_ones_count_no_more():
    jobs = [make_job(f"job-{number}", steps=1) for number in range(MIN_FILES + 1)]
    cluster, last = Cluster(*jobs), jobs[0].trajectory.num_tasks - 1
    for job in jobs:
        for index in range(last):
            cluster.done(cluster.begin(job.job_id, index, 0))
    for job in jobs[2:-1]:
        cluster.done(cluster.begin(job.job_id, last, 0))
    asked = cluster.decision(jobs[-1].job_id, last, 0)
    decodes, held_back = [], []
    for happens in (
        lambda: decodes.append(cluster.begin("job-0", last, 0)),
        lambda: decodes.append(cluster.begin("job-1", last, 1)),
        lambda: cluster.failed(decodes[1], "out of memory"),
        lambda: decodes.append(cluster.begin("job-1", last, 1)),
        lambda: cluster.done(decodes[0]),
        lambda: cluster.state.apply(events.FramesLost(9.0, "job-0", "its rank died")),
        lambda: cluster.begin("job-0", last, 0),
        lambda: cluster.done(decodes[2]),
        lambda: cluster.state.apply(events.OutputWritten(9.0, "job-1", "a.png", 1, 0.1)),
    ):
        happens()
        held_back.append(cluster.state.holds_back(asked))
        assert not cluster.state.holds_back(cluster.decision(jobs[-1].job_id, last - 1, 0))
    assert held_back == [False, True, False, True, True, False, True, True, False]


def test_a_timed_out_job_ends_at_its_next_task_boundary():
    cluster = Cluster(make_job("a", timeout_s=1.0))
    running = cluster.begin("a", 0, 0)
    assert not cluster.state.apply(events.JobTimedOut(1.0, "a"))
    (outcome,) = cluster.done(running)
    assert outcome.error == "timed out 1 s after its arrival"


def test_a_waiting_job_that_times_out_ends_at_once():
    cluster = Cluster(make_job("a", timeout_s=1.0))
    (outcome,) = cluster.state.apply(events.JobTimedOut(1.0, "a"))
    assert outcome.status == "failed"


def test_a_cancelled_job_ends_at_its_next_task_boundary_and_releases_its_ranks():
    cluster = Cluster(make_job("a", deadline_s=9.0), num_ranks=1)
    running = cluster.begin("a", 0, 0)
    assert not cluster.state.apply(events.JobCancelled(0.0, "a"))
    assert cluster.state.snapshot().open == {}
    (outcome,) = cluster.done(running)
    assert (outcome.status, outcome.error, outcome.met_deadline) == ("cancelled", "cancelled", None)
    assert cluster.state.snapshot().free_ranks == (0,)
    assert not cluster.state.jobs.records


def test_a_waiting_job_that_is_cancelled_ends_at_once():
    cluster = Cluster(make_job("a"))
    (outcome,) = cluster.state.apply(events.JobCancelled(0.0, "a"))
    assert outcome.status == "cancelled"
    assert not cluster.state.apply(events.JobCancelled(0.0, "a"))


def test_what_was_queued_behind_a_cancelled_jobs_step_ends_too():
    cluster = Cluster(make_job("a"), lookahead_s=10.0)
    running, queued = cluster.begin("a", 0, 0), cluster.begin("a", 1, 1)
    cluster.state.apply(events.JobCancelled(0.0, "a"))
    assert not cluster.done(running)
    (outcome,) = cluster.done(queued)
    assert outcome.status == "cancelled"


def test_a_job_has_another_priority_until_it_ends():
    cluster = Cluster(make_job("a"), make_job("b"))
    cluster.begin("b", 0, 0)
    for job_id in ("a", "b", "ended"):
        assert not cluster.state.apply(events.PriorityChanged(0.0, job_id, 7))
    snapshot = cluster.state.snapshot()
    assert (snapshot.open["a"].precedence, snapshot.busy["b"].precedence) == (-7, -7)


def test_a_job_that_is_cancelled_before_it_arrives_never_does():
    cluster = Cluster(make_job("a"))
    cluster.state.jobs.add(make_job("b", arrival_s=5.0))
    (outcome,) = cluster.state.apply(events.JobCancelled(0.0, "b"))
    assert outcome.info.job_id == "b"
    assert not cluster.state.apply(events.JobArrived(5.0, "b"))
    assert cluster.state.jobs.open.ids == ("a",)


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (events.OutputWritten(1.0, "a", "a.png", 1, 0.0), "done"),
        (events.FramesLost(1.0, "a", "no memory"), "cancelled"),
    ],
    ids=["too late", "not decoded again"],
)
def test_a_job_that_is_cancelled_while_its_file_is_written_ends_as_the_file_does(last, status):
    job = make_job("a", steps=1)
    cluster = Cluster(job, num_ranks=1)
    for index in range(job.trajectory.num_tasks):
        cluster.done(cluster.begin("a", index, 0))
    assert not cluster.state.apply(events.JobCancelled(1.0, "a"))
    (outcome,) = cluster.state.apply(last)
    assert outcome.status == status


def test_a_model_that_could_not_be_loaded_fails_later_jobs_too_where_no_rank_loads_again():
    job = make_job("a")
    cluster = Cluster(make_job("other"))
    cluster.state.apply(events.LoadFailed(0.0, (job.spec.model or "",), "no such file"))
    cluster.state.jobs.add(job)
    (outcome,) = cluster.state.apply(events.JobArrived(1e6, "a"))
    assert "no such file" in outcome.error


def test_a_failure_of_a_cancelled_job_is_no_failure():
    cluster = Cluster(make_job("a"))
    running = cluster.begin("a", 0, 0)
    cluster.state.apply(events.JobCancelled(0.0, "a"))
    (outcome,) = cluster.failed(running)
    assert outcome.status == "cancelled"


def test_stopping_waits_for_what_runs_and_no_longer():
    cluster = Cluster(make_job("a"), make_job("b"))
    running = cluster.begin("a", 0, 0)
    cluster.state.apply(events.StopRequested(0.0, 2))
    assert not cluster.state.finished
    cluster.done(running)
    assert cluster.state.finished
    assert len(cluster.state.jobs.records)


@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGINT, "press again"), (signal.SIGTERM, "a second signal")]
)
def test_the_first_signal_tells_what_happens_now_and_what_a_second_one_does(caplog, number, again):
    cluster = Cluster(make_job("a"))
    cluster.state.apply(events.StopRequested(0.0, number))
    assert f"stopping after the running tasks; {again} to stop at once" in caplog.text


def test_a_run_without_grace_announces_no_second_signal(caplog):
    cluster = Cluster(make_job("a"))
    cluster.state.closing.grace_s = 0.0
    cluster.state.apply(events.StopRequested(0.0, signal.SIGTERM))
    assert "stopping" not in caplog.text


def test_a_second_signal_does_not_wait():
    cluster = Cluster(make_job("a"))
    cluster.begin("a", 0, 0)
    cluster.state.apply(events.StopRequested(0.0, 15))
    with pytest.raises(InterruptedRunError) as stopped:
        cluster.state.apply(events.StopRequested(0.1, 15))
    assert stopped.value.exit_code == 143


def test_ranks_write_into_each_others_memory_if_they_share_a_task_or_its_state_moves():
    cluster = Cluster(make_job("a"), max_degree=2)
    assert not cluster.begin("a", 0, 0).communicates
    cluster = Cluster(make_job("a"), num_ranks=3, max_degree=2)
    for index in range(2):
        cluster.done(cluster.begin("a", index, 0))
    step = cluster.begin("a", 2, 0, 1)
    assert step.communicates
    assert replace(step, transfers=()).communicates
    cluster.done(step)
    assert cluster.begin("a", 3, 2).communicates


def test_a_failure_counts_unless_it_is_said_to_be_void():
    failure = events.TaskFailed(0.0, 1, "boom")
    assert not failure.void
    assert not failure.lost


def test_a_task_on_several_ranks_frees_all_of_them():
    cluster = Cluster(make_job("a"), max_degree=2)
    cluster.done(cluster.begin("a", 0, 0))
    cluster.done(cluster.begin("a", 1, 0))
    dispatch = cluster.begin("a", 2, 1, 0)
    snapshot = cluster.state.snapshot()
    assert (list(snapshot.busy), snapshot.free_ranks) == (["a"], ())
    cluster.done(dispatch)
    snapshot = cluster.state.snapshot()
    assert (list(snapshot.open), snapshot.free_ranks) == (["a"], (0, 1))


def test_a_task_that_moves_says_what_has_to_come_from_where():
    cluster = Cluster(make_job("a"), num_ranks=3)
    for index, rank in enumerate((0, 0, 1)):
        dispatch = cluster.begin("a", index, rank)
        cluster.done(dispatch)
    (transfer,) = dispatch.transfers
    assert (transfer.source, transfer.destination, transfer.field) == (0, 1, "latents")
    wider = cluster.begin("a", 3, 1, 2)
    assert {(t.source, t.destination) for t in wider.transfers} == {(1, 2)}
    cluster.done(wider)
    assert not cluster.begin("a", 4, 1, 2).transfers


def test_after_a_failure_the_state_comes_from_the_slab():
    cluster = Cluster(make_job("a"), num_ranks=2)
    for index in range(3):
        cluster.done(cluster.begin("a", index, 0))
    cluster.failed(cluster.begin("a", 3, 1))
    again = cluster.begin("a", 3, 1)
    assert (again.transfers, again.producer) == ((), 3)


@pytest.mark.parametrize(
    ("fields", "layout", "reason"),
    [
        ({}, Layout((0, 1), cfg=2), "one guidance branch"),
        ({}, Layout((0, 1, 2, 3), ulysses=4), "3 attention heads, too few"),
        ({}, Layout(tuple(range(8)), ulysses=2, ring=4), "7 parts at most"),
        ({"uses_cfg": True}, Layout(tuple(range(8)), ring=8), "7 parts at most"),
    ],
)
def test_degrees_that_a_job_cannot_use_are_refused(fields, layout, reason):
    job = with_limits(make_job("a", **fields), max_sequence_degree=7, max_ulysses_degree=3)
    cluster = Cluster(job, num_ranks=8)
    cluster.done(cluster.begin("a", 0, 0))
    cluster.done(cluster.begin("a", 1, 0))
    with pytest.raises(PolicyFault, match=reason):
        cluster.state.begin(Decision(job.trajectory.task(2), layout))


def test_only_steps_and_decodes_are_shared():
    cluster = Cluster(make_job("a"))
    with pytest.raises(PolicyFault, match="encode runs on one rank"):
        cluster.begin("a", 0, 0, 1)


def at_its_decode(**fields):
    """A cluster whose one job has nothing left to do but its decode."""
    cluster = Cluster(with_limits(make_job("a", steps=1, uses_cfg=True), **fields), num_ranks=4)
    for index in range(3):
        cluster.done(cluster.begin("a", index, 0))
    return cluster


def test_a_decode_is_shared_by_the_ranks_that_hold_the_latents_and_others_are_sent_them():
    cluster = at_its_decode(max_decode_degree=3)
    job = cluster.state.snapshot().open["a"]
    assert (job.max_degree, job.layout((0, 2, 3, 1))) == (3, Layout.bands((0, 2, 3)))
    dispatch = cluster.state.begin(Decision(job.next_task, job.layout((0, 2, 3))))[0]
    assert {(t.source, t.destination) for t in dispatch.transfers} == {(0, 2), (0, 3)}


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout((0, 1), cfg=2), "in bands of rows"),
        (Layout((0, 1), ring=2), "in bands of rows"),
        (Layout.bands((0, 1, 2, 3)), "3 bands of rows at most"),
    ],
)
def test_layouts_that_a_decode_cannot_use_are_refused(layout, reason):
    cluster = at_its_decode(max_decode_degree=3)
    task = cluster.state.snapshot().open["a"].next_task
    with pytest.raises(PolicyFault, match=reason):
        cluster.state.begin(Decision(task, layout))


def test_what_was_about_to_end_in_the_snapshot_may_be_late_by_now():
    cluster = Cluster(make_job("a"), lookahead_s=0.05)
    running = cluster.begin("a", 0, 0)
    cluster.clock.advance(running.predicted_end_s)
    cluster.clock.begin_turn()
    cluster.clock.advance(running.predicted_end_s + 1.0)  # so long does the policy think
    dispatch = cluster.begin("a", 1, 0)
    assert (dispatch.producer, dispatch.submitted_s) == (running.number, running.predicted_end_s)


def test_what_is_late_in_the_snapshot_has_no_successor():
    cluster = Cluster(make_job("a"), lookahead_s=0.05)
    running = cluster.begin("a", 0, 0)
    cluster.clock.advance(running.predicted_end_s + 1.0)
    cluster.clock.begin_turn()
    with pytest.raises(PolicyFault, match="its input does not exist yet"):
        cluster.begin("a", 1, 0)


def test_a_rank_is_free_since_it_became_idle_whoever_looks_on():
    cluster = Cluster(make_job("a"))
    cluster.clock.advance(3.0)
    cluster.state.snapshot()
    cluster.done(cluster.begin("a", 0, 0))
    cluster.clock.advance(5.0)
    assert [rank.free_at_s for rank in cluster.state.snapshot().ranks] == pytest.approx([3.1, 0.0])


def test_the_time_out_of_an_earlier_job_of_the_same_id_is_not_its_own():
    cluster = Cluster(make_job("a", timeout_s=5.0))
    assert not cluster.state.apply(events.JobTimedOut(3.0, "a"))
    assert "a" in cluster.state.snapshot().open


REFUSED = "ValueError: height has to be divisible by 8 (pipeline.py:3)"


def test_what_a_pipeline_refuses_is_not_tried_again():
    cluster = Cluster(make_job("a"), make_job("b"))
    (outcome,) = cluster.failed(cluster.begin("a", 0, 1), REFUSED)
    assert outcome.error == f"encode: {REFUSED}"
    assert outcome.is_refused
    assert list(cluster.state.jobs.records) == ["b"]


PADDING = "RuntimeError: Padding size should be less than the corresponding input dimension (conv.py:3)"


@pytest.mark.parametrize("reason", [REFUSED, PADDING])
def test_a_decode_that_fails_twice_for_the_arguments_is_a_refusal(reason):
    cluster = Cluster(make_job("a"), make_job("b"))
    decode = cluster.state.jobs.records["a"].num_tasks - 1
    for index in range(decode):
        cluster.done(cluster.begin("a", index, 1))
    assert not cluster.failed(cluster.begin("a", decode, 1), reason)
    (outcome,) = cluster.failed(cluster.begin("a", decode, 1), reason)
    assert outcome.is_refused


def test_a_decode_that_fails_twice_for_another_reason_is_no_refusal():
    cluster = Cluster(make_job("a"), make_job("b"))
    decode = cluster.state.jobs.records["a"].num_tasks - 1
    for index in range(decode):
        cluster.done(cluster.begin("a", index, 1))
    assert not cluster.failed(cluster.begin("a", decode, 1), "RuntimeError: CUDA error: unknown error")
    (outcome,) = cluster.failed(cluster.begin("a", decode, 1), "RuntimeError: CUDA error: unknown error")
    assert not outcome.is_refused


def test_other_failures_and_those_of_steps_are_tried_again():
    cluster = Cluster(make_job("a"))
    assert not cluster.failed(cluster.begin("a", 0, 1), "RuntimeError: boom")
    cluster.done(cluster.begin("a", 0, 1))
    cluster.done(cluster.begin("a", 1, 1))
    assert not cluster.failed(cluster.begin("a", 2, 1), REFUSED)


def test_a_choice_is_due_after_a_change_and_then_after_as_many_as_there_were():
    decider, due = Decider(load_policy("srtf"), clock=Clock(virtual=True), chooser=None), []
    for _ in range(9):
        decider.note_change()
        due.append(decider.is_choice_due(10))
    assert due == [True, True, False, True, False, False, False, True, False]


def test_what_a_users_policy_returns_is_looked_at():
    mine = NamedPolicy("mine", lambda snapshot: ["nonsense"])
    decider = Decider(mine, clock=Clock(virtual=True), chooser=None)
    (decision,) = decider.decide(Cluster(make_job("a"), num_ranks=1).state.snapshot())
    assert (decision.task.job_id, decider.num_faults) == ("a", 1)
