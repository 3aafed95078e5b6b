"""Jobs that join a run which is going on, in virtual time."""

import pytest
from builders import STEP_S, make_job, simulated_control

from gfgen.runtime.core.events import StopRequested, Wakeup


class Intake:
    """Gives each job once its time has come."""

    def __init__(self, clock, jobs_at):
        self._clock = clock
        self._jobs_at = jobs_at
        for time_s in jobs_at:
            clock.at(Wakeup(time_s))

    def take(self):
        due = [time_s for time_s in self._jobs_at if time_s <= self._clock.now_s]
        return [job for time_s in due for job in self._jobs_at.pop(time_s)]


def run(jobs, jobs_at, *, stop_s, **options):
    control, recorder = simulated_control(jobs, intake=lambda clock: Intake(clock, jobs_at), **options)
    control.clock.at(StopRequested(stop_s, 15))
    return control.run(), recorder, control


def test_a_job_that_comes_during_the_run_is_run():
    summary, recorder, _ = run([make_job("a")], {0.35: [make_job("b")]}, stop_s=10.0)
    assert sorted(recorder.end_order) == ["a", "b"]
    assert (summary.num_done, summary.num_unfinished) == (2, 0)


def test_a_run_without_jobs_waits_for_some():
    _, recorder, control = run([], {5.0: [make_job("a")], 8.0: [make_job("b")]}, stop_s=20.0)
    assert recorder.end_order == ["a", "b"]
    assert control.clock.now_s == 20.0


def test_times_of_a_job_count_from_when_it_came():
    late = make_job("b", arrival_s=2.0, deadline_s=1.0)
    _, recorder, _ = run([], {5.0: [late]}, stop_s=20.0)
    assert recorder.dispatches[0].submitted_s == 7.0
    (outcome,) = recorder.outcomes
    assert (outcome.arrival_s, outcome.deadline_s) == (7.0, 8.0)
    assert outcome.met_deadline is True


def test_nothing_is_taken_once_the_run_is_stopping():
    control, recorder = simulated_control(
        [make_job("a", steps=50)], intake=lambda clock: Intake(clock, {1.04: [make_job("b")]})
    )
    control.clock.at(StopRequested(1.02, 15))
    summary = control.run()
    assert {d.task.job_id for d in recorder.dispatches} == {"a"}
    assert summary.num_unfinished == 1


def test_a_watching_run_does_not_close_early():
    summary, recorder, control = run(
        [make_job("a"), make_job("long", steps=90)],
        {3.0: [make_job("short", steps=1)]},
        stop_s=100.0,
        num_ranks=1,
        policy="fcfs",
        closes_s=5.0,
    )
    assert recorder.end_order == ["a", "short"]
    assert control.clock.now_s == pytest.approx(5.0)
    assert summary.num_unfinished == 1


def test_a_job_that_has_ended_may_come_again():
    _, recorder, _ = run([make_job("a")], {5.0: [make_job("a", steps=2)]}, stop_s=20.0, num_ranks=1)
    assert recorder.end_order == ["a", "a"]
    assert recorder.outcomes[1].ended_s == pytest.approx(5.0 + 5 * STEP_S)
