"""What takes how long in a simulated run."""

import statistics
from dataclasses import replace
from unittest.mock import patch

import pytest
from builders import Recorder, make_job

from gfgen.graph import Stage
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.core.events import OutputWritten, TaskDone
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.simulate import simulation
from gfgen.runtime.simulate.simulation import simulate
from gfgen.snapshot import Decision

ONE = (1, 1, 1)
SECONDS = {Stage.ENCODE: 1.0, Stage.PREPARE: 1.0, Stage.DENOISE: 10.0, Stage.DECODE: 5.0}


def profile(*, loaded=1.0, write_s=None, shared_s=6.0, spread_s=0.0, **fields):
    rows = [
        ProfileRow(
            "fake", "small", stage, ONE, seconds, spread_s, loaded_s=loaded and loaded * seconds, flops=1e9
        )
        for stage, seconds in SECONDS.items()
    ]
    rows[-1] = replace(rows[-1], write_s=write_s)
    rows.append(ProfileRow("fake", "small", Stage.DENOISE, (1, 2, 1), shared_s, flops=1e9))
    return Profile("a machine", "2026-11-20", "a test", num_ranks=2, rows=tuple(rows), **fields)


def run(*jobs, policy="fcfs", num_ranks=2, lookahead_s=0.0, **fields):
    recorder = Recorder()
    chosen = policy if isinstance(policy, NamedPolicy) else load_policy(policy)
    with patch.object(simulation, "LOOKAHEAD_S", lookahead_s):
        simulated = simulate(
            jobs,
            policy=chosen,
            num_ranks=num_ranks,
            profile=profile(**fields),
            observers=[recorder],
        )
    return simulated, recorder


def ended(recorder):
    return {outcome.info.job_id: outcome.ended_s for outcome in recorder.outcomes}


def test_a_job_takes_the_sum_of_its_tasks():
    simulated, recorder = run(make_job("a", steps=2))
    assert ended(recorder) == {"a": pytest.approx(27.0)}
    assert not simulated.doubts


def test_ranks_that_work_beside_each_other_slow_each_other_down():
    _, alone = run(make_job("a", steps=2), loaded=1.5)
    assert ended(alone) == {"a": pytest.approx(27.0)}
    _, both = run(make_job("a", steps=2), make_job("b", steps=2), loaded=1.5)
    assert ended(both) == {"a": pytest.approx(1.5 * 27), "b": pytest.approx(1.5 * 27)}


def test_only_the_share_of_the_ranks_that_are_busy_counts():
    _, recorder = run(make_job("a", steps=2), make_job("b", steps=2), num_ranks=3, loaded=1.5)
    assert ended(recorder)["a"] == pytest.approx(1.25 * 27)


def test_files_are_written_one_after_the_other():
    _, recorder = run(make_job("a", steps=2), make_job("b", steps=2), write_s=4.0)
    assert sorted(ended(recorder).values()) == pytest.approx([31.0, 35.0])
    assert [e.write_s for e in recorder.events if isinstance(e, OutputWritten)] == [4.0, 4.0]


def test_gpus_have_a_writer_each():
    _, recorder = run(make_job("a", steps=2), make_job("b", steps=2), write_s=4.0, loaded=None)
    assert sorted(ended(recorder).values()) == pytest.approx([31.0, 31.0])
    assert {e.writer for e in recorder.events if isinstance(e, OutputWritten)} == {0, 1}


def test_policies_leave_time_for_the_file():
    due = []

    def seeing(snapshot):
        due.extend((job.due_s, job.deadline_s) for job in snapshot.open.values())
        return load_policy("fcfs").decide(snapshot)

    run(make_job("a", steps=2, deadline_s=100.0), policy=NamedPolicy("seeing", seeing), write_s=4.0)
    assert set(due) == {(96.0, 100.0)}


def test_a_decision_takes_its_time_unless_it_was_made_ahead():
    _, late = run(make_job("a", steps=2), dispatch_s=0.1)
    assert ended(late)["a"] == pytest.approx(27.5)
    _, ahead = run(make_job("a", steps=2), dispatch_s=0.1, lookahead_s=0.5)
    assert ended(ahead)["a"] == pytest.approx(27.1)


def wandering(snapshot):
    """Each step of a job on the other rank."""
    job = next(iter(snapshot.open.values()), None)
    rank = job.next_task.index % 2 if job else 0
    return [Decision(job.next_task, job.layout([rank]))] if job and rank in snapshot.free_ranks else []


def test_moves_are_no_part_of_a_task():
    policy = NamedPolicy("wandering", wandering)
    _, recorder = run(make_job("a", steps=2), policy=policy, move_s=0.5, move_bytes_per_s=64.0)
    done = [e for e in recorder.events if isinstance(e, TaskDone)]
    assert [e.times[0].moved_s for e in done] == [0.0, 0.0, 1.5, 1.5, 1.5]
    assert [e.ended_s - e.started_s for e in done] == pytest.approx([*list(SECONDS.values())[:3], 10.0, 5.0])
    assert ended(recorder)["a"] == pytest.approx(27 + 3 * 1.5)


def steps_of(recorder):
    done = [e for e in recorder.events if isinstance(e, TaskDone)]
    by_number = {e.dispatch: e.ended_s - e.started_s for e in done}
    dispatches = [d for d in recorder.dispatches if d.task.stage is Stage.DENOISE]
    return {(d.task.job_id, d.task.index): by_number[d.number] for d in dispatches}


def test_tasks_vary_around_their_median_as_widely_as_they_were_measured_to():
    _, recorder = run(make_job("a", steps=2000), spread_s=3.0)
    steps = list(steps_of(recorder).values())
    first, median, third = statistics.quantiles(steps)
    assert median == pytest.approx(10.0, rel=0.01)
    assert third - first == pytest.approx(3.0, rel=0.05)


def test_a_range_of_many_times_the_median_makes_no_task_endless():
    """Encodes of texts that were kept have such a range: most take no time, and few take long."""
    _, recorder = run(make_job("a", steps=2000), spread_s=1000.0)
    assert max(steps_of(recorder).values()) < 100 * 10.0


def test_a_task_takes_as_long_whatever_the_policy():
    jobs = [make_job(f"job-{i}", steps=4) for i in range(4)]
    (_, fcfs), (_, srtf) = (run(*jobs, policy=policy, spread_s=3.0) for policy in ("fcfs", "srtf"))
    assert steps_of(fcfs) == pytest.approx(steps_of(srtf))


def test_what_a_policy_expects_does_not_change_what_is_true():
    """The cost model learns from the run; the durations stay those of the profile."""
    jobs = [make_job(f"job-{i}", steps=4) for i in range(4)]
    _, recorder = run(*jobs, policy="edf", loaded=1.5)
    steps = [e.ended_s - e.started_s for e in recorder.events if isinstance(e, TaskDone)]
    allowed = {value * factor for value in SECONDS.values() for factor in (1.0, 1.5)}
    assert {round(step, 6) for step in steps} <= allowed


def test_shapes_that_the_profile_does_not_have_are_told():
    simulated, _ = run(make_job("a"), make_job("b", shape="large"))
    assert not simulated.doubts  # as many operations as a profiled shape
    simulated, _ = run(replace(make_job("c", shape="large"), flops=dict.fromkeys(Stage, 9e9)))
    assert {doubt.shape for doubt in simulated.doubts} == {"large"}


def test_jobs_of_a_streamed_model_share_steps_in_a_simulation_and_take_as_long_as_the_reads():
    jobs, known = [make_job(name, steps=2) for name in "abcd"], profile(loaded=None)

    def makespan_s(read_s):
        done = simulate(
            jobs,
            policy=load_policy("fcfs"),
            num_ranks=1,
            profile=known,
            reads_s={"fake": read_s} if read_s else {},
        )
        return done.summary.makespan_s

    resident_s = 4 * (1 + 1 + 2 * 10 + 5)
    assert makespan_s(None) == pytest.approx(resident_s)
    assert makespan_s(30.0) == pytest.approx(resident_s, rel=0.05), "four jobs compute for longer than that"
    assert makespan_s(80.0) == pytest.approx(resident_s + 2 * 40, rel=0.05)
