"""Running tasks that nobody wants any more: cancelled, timed out, or in the way of a run that is to stop."""

from __future__ import annotations

import pytest
from builders import Recorder, make_job, simulated_control
from test_elastic import following
from test_workers import PICTURE, admitted, run

from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.runtime.core.events import (
    ClosingTime,
    GraceOver,
    JobCancelled,
    OutputWritten,
    RankLost,
    StopRequested,
    TaskFailed,
)
from gfgen.runtime.core.observer import Observer
from gfgen.runtime.files import resume
from gfgen.runtime.processes.child import Patience

IMPATIENT = Patience(stopping_s=0.3)


def job(name, order="", **fields):
    return JobSpec(id=name, prompt=f"a fox | {order}", **PICTURE | fields)


def statuses(recorder):
    return {outcome.info.job_id: outcome.status for outcome in recorder.outcomes}


def of_kind(recorder, kind):
    return [event for event in recorder.events if isinstance(event, kind)]


def once_begun(job_id, make_event, *, step=1, after_s=0.2):
    """A watcher that brings an event shortly after a step was dispatched for the first time."""

    class Once(Observer):
        def __init__(self, clock):
            self.clock = clock
            self.is_over = False

        def dispatched(self, dispatch):
            if not self.is_over and (dispatch.task.job_id, dispatch.task.step) == (job_id, step):
                self.is_over = True
                self.clock.at(make_event(self.clock.now_s + after_s))

    return Once


def cancelling(job_id):
    return once_begun(job_id, lambda at_s: JobCancelled(at_s, job_id))


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_cancelled_job_leaves_its_ranks_at_the_next_block(mortal_pool, tmp_path, ranks):
    processes = [worker.process.pid for worker in mortal_pool.workers]
    specs = [job("unwanted", f"crawl rank=0 step=1 times=9 {ranks}"), job("other")]
    recorder = run(mortal_pool, tmp_path, *specs, policy=following(ranks), watchers=[cancelling("unwanted")])
    assert statuses(recorder) == {"unwanted": "cancelled", "other": "done"}
    assert [worker.process.pid for worker in mortal_pool.workers] == processes
    assert all(event.void for event in of_kind(recorder, TaskFailed))


def test_a_rank_that_does_not_leave_in_time_is_replaced_and_nobody_is_to_blame(mortal_pool, tmp_path):
    specs = [job("unwanted", "loop rank=1 step=1 times=9"), job("other")]
    recorder = run(
        mortal_pool,
        tmp_path,
        *specs,
        policy=following((1,)),
        watchers=[cancelling("unwanted")],
        patience=IMPATIENT,
    )
    assert statuses(recorder) == {"unwanted": "cancelled", "other": "done"}
    (loss,) = of_kind(recorder, RankLost)
    assert (loss.rank, loss.is_retired) == (1, False)
    assert loss.reason == "it did not leave a task that was stopped"
    assert mortal_pool.deaths[1] == []
    assert all(event.void and not event.lost for event in of_kind(recorder, TaskFailed))


def test_only_the_rank_that_does_not_leave_is_replaced(mortal_pool, tmp_path):
    specs = [job("unwanted", "loop rank=1 step=1 times=9 shared"), job("other")]
    recorder = run(
        mortal_pool,
        tmp_path,
        *specs,
        policy=following((0, 1, 2)),
        watchers=[cancelling("unwanted")],
        patience=IMPATIENT,
    )
    assert statuses(recorder) == {"unwanted": "cancelled", "other": "done"}
    assert [loss.rank for loss in of_kind(recorder, RankLost)] == [1]


def test_a_job_whose_time_is_up_leaves_its_rank(mortal_pool, tmp_path):
    specs = [job("late", "crawl rank=0 step=1 times=9 timed", timeout_s=1.5)]
    recorder = run(mortal_pool, tmp_path, *specs, policy=following((0,)))
    (outcome,) = recorder.outcomes
    assert (outcome.status, outcome.error) == ("failed", "timed out 1.5 s after its arrival")
    assert of_kind(recorder, RankLost) == []


@pytest.mark.parametrize("event", [lambda at_s: StopRequested(at_s, 15), ClosingTime])
def test_a_run_that_stops_ends_running_steps_after_their_grace_and_keeps_the_job(
    mortal_pool, tmp_path, event
):
    name = f"kept-{event(0.0).__class__.__name__}"
    spec = job(name, "crawl rank=0 step=2 times=1")
    watchers = [once_begun(name, event, step=2)]
    recorder = run(mortal_pool, tmp_path, spec, policy=following((0,)), watchers=watchers, grace_s=0.2)
    assert recorder.outcomes == []
    assert len(of_kind(recorder, GraceOver)) == 1
    (kept,) = resume.find(
        tmp_path,
        admitted(spec),
        weights_mark=mortal_pool.models.weights_mark,
        computed_with=mortal_pool.settings.computed_with,
    ).values()
    assert kept.next_index == 4  # encode, prepare and two steps are done


def test_a_rank_that_is_killed_as_the_run_stops_costs_the_job_nothing(mortal_pool, tmp_path):
    spec = job("kept too", "loop rank=0 step=2 times=1")
    recorder = run(
        mortal_pool,
        tmp_path,
        spec,
        policy=following((0,)),
        watchers=[once_begun("kept too", lambda at_s: StopRequested(at_s, 15), step=2)],
        patience=IMPATIENT,
        grace_s=0.0,
    )
    assert recorder.outcomes == []
    assert len(of_kind(recorder, RankLost)) == 1
    assert resume.resume_path(tmp_path, "kept too").exists()


def test_simulated_ranks_leave_a_task_at_once():
    control, recorder = simulated_control(
        [make_job("long", timeout_s=0.55), make_job("short", steps=1, arrival_s=0.6)], num_ranks=1
    )
    control.run()
    assert statuses(recorder) == {"long": "failed", "short": "done"}
    ended_s = {outcome.info.job_id: outcome.ended_s for outcome in recorder.outcomes}
    assert ended_s["long"] == pytest.approx(0.55)


def test_a_simulated_decode_that_is_stopped_writes_no_file():
    # encode, prepare and four steps take 0.1 s each: the decode runs from 0.6 to 0.7 s
    control, recorder = simulated_control([make_job("late", timeout_s=0.65), make_job("next")], num_ranks=1)
    control.decider.policy = following((0,))
    control.run()
    assert statuses(recorder)["next"] == "done"
    assert [event.job_id for event in of_kind(recorder, OutputWritten)] == ["next"]


def test_running_tasks_are_stopped_once_and_only_those_that_run():
    recorder = Recorder()
    control, recorder = simulated_control([make_job("a"), make_job("b")], num_ranks=1)
    stopped = []
    control.backend.stop = lambda dispatches: stopped.extend(each.number for each in dispatches)
    control.clock.at(JobCancelled(0.05, "b"))  # waits: nothing of it runs
    control.clock.at(JobCancelled(0.15, "a"))
    control.clock.at(JobCancelled(0.16, "a"))
    control.run()
    assert len(stopped) == 1
    assert Layout.single(0) in [dispatch.layout for dispatch in recorder.dispatches]
