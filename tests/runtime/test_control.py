import pytest
from builders import make_job, simulate, simulated_control

from gfgen.errors import StalledError
from gfgen.layout import Layout
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.events import OutputWritten, PolicyChanged, StopRequested
from gfgen.snapshot import Decision


def test_every_job_runs_every_task_once_and_in_order():
    jobs = [make_job(name, steps=steps) for name, steps in (("a", 3), ("b", 5), ("c", 1))]
    recorder = simulate(jobs, num_ranks=2)
    for job in jobs:
        indices = [d.task.index for d in recorder.dispatches if d.task.job_id == job.job_id]
        assert indices == list(range(job.trajectory.num_tasks))
    assert sorted(recorder.end_order) == ["a", "b", "c"]


@pytest.mark.parametrize("policy", ["legacy", "fcfs", "srtf", "edf"])
@pytest.mark.parametrize("guard_s", [0.0, 0.02])
def test_all_policies_finish_all_jobs_with_and_without_lookahead(policy, guard_s):
    jobs = [make_job(f"job-{i}", steps=1 + i % 4, arrival_s=0.2 * i, deadline_s=2.0 + i) for i in range(12)]
    recorder = simulate(jobs, policy=policy, num_ranks=3, guard_s=guard_s)
    assert sorted(recorder.end_order) == sorted(job.job_id for job in jobs)


def test_the_same_run_gives_the_same_decisions():
    jobs = [make_job(f"job-{i}", steps=1 + i % 5, arrival_s=0.05 * i) for i in range(20)]
    first, second = (simulate(jobs, num_ranks=3, guard_s=0.02) for _ in range(2))
    assert first.dispatches == second.dispatches
    assert first.events == second.events


def test_a_job_waits_for_its_arrival():
    recorder = simulate([make_job("late", arrival_s=5.0)])
    assert recorder.dispatches[0].submitted_s == 5.0


def test_lookahead_leaves_no_gap_between_the_steps_of_a_job():
    recorder = simulate([make_job("a", steps=20)], num_ranks=1, guard_s=0.02)
    queued = [d for d in recorder.dispatches[5:] if d.predicted_start_s > d.submitted_s]
    assert len(queued) == len(recorder.dispatches[5:])


def test_never_more_than_one_task_is_queued_behind_a_running_one():
    jobs = [make_job(f"job-{i}", steps=5) for i in range(6)]
    control, _ = simulated_control(jobs, num_ranks=2, guard_s=0.05)
    depths = []
    submit = control.backend.submit

    def counted(dispatch):
        submit(dispatch)
        depths.append(max(len(rank.flights) for rank in control.state._ranks))

    control.backend.submit = counted
    control.run()
    assert max(depths) == 2


def test_a_policy_that_starts_nothing_is_named_with_the_jobs_that_wait():
    control, _ = simulated_control([make_job("a"), make_job("b")])
    control.policy = NamedPolicy("lazy", lambda snapshot: [])
    with pytest.raises(StalledError, match=r"policy lazy .* 2 jobs wait: a, b"):
        control.run()


def test_a_policy_that_raises_is_replaced_after_three_faults(caplog):
    def broken(snapshot):
        raise ZeroDivisionError("division by zero")

    control, recorder = simulated_control([make_job("a")])
    control.policy = NamedPolicy("mine.py", broken)
    control.run()
    assert recorder.end_order == ["a"]
    assert [e.policy for e in recorder.events if isinstance(e, PolicyChanged)] == ["fcfs"]
    assert "mine.py failed 3 times; going on with fcfs" in caplog.text


def test_a_policy_that_decides_the_impossible_is_replaced(caplog):
    def greedy(snapshot):
        layout = next(iter(snapshot.ranks)).rank
        return [Decision(job.next_task, Layout.single(layout)) for job in snapshot.open.values()]

    control, recorder = simulated_control([make_job("a"), make_job("b"), make_job("c")])
    control.policy = NamedPolicy("greedy", greedy)
    control.run()
    assert sorted(recorder.end_order) == ["a", "b", "c"]
    assert "rank 0 is not free" in caplog.text


def test_a_stop_lets_running_tasks_end_and_starts_nothing_new():
    control, recorder = simulated_control([make_job("a", steps=50)], num_ranks=1)
    control.clock.at(StopRequested(1.05, 2))
    summary = control.run()
    assert summary.num_done == 0
    assert summary.num_unfinished == 1
    assert recorder.dispatches[-1].submitted_s <= 1.05
    assert recorder.events[-1].time_s >= 1.05


def test_a_job_has_ended_only_when_its_file_is_there():
    recorder = simulate([make_job("a")])
    assert isinstance(recorder.events[-1], OutputWritten)
