"""Seeded schedules of faults on fake workers (fault_schedules.py), and those that found a bug."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from fault_plan import Fault, FaultKind, FaultPoint
from fault_schedules import (
    Fleet,
    Schedule,
    ScheduleResult,
    make_job,
    make_schedule,
    run_schedule,
)

from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, FramesLost, LoadFailed, RankLost, StopRequested, TaskFailed
from gfgen.runtime.ipc.messages import (
    Abandoned,
    EdgesRestarted,
    FramesStored,
    RankTimes,
    TaskFault,
    TaskReport,
)
from gfgen.runtime.processes.child import Lost, Phase
from gfgen.runtime.processes.recovery import Cause
from gfgen.runtime.processes.workers import JobMemory, ProcessBackend

NUM_SCHEDULES = 60
PER_TEST = 20
NUMBER = 10**9
"""Of a dispatch that no worker is given."""
REPORT = TaskReport(NUMBER, RankTimes(0, 0.0, 1.0), do_frames_follow=True)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def assert_as_promised(result: ScheduleResult) -> None:
    assert not result.problems, f"seed {result.seed}:\n" + "\n".join(result.problems)


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, PER_TEST))
def test_random_faults_lose_and_double_nothing(fleet: Fleet, first: int) -> None:
    for seed in range(first, first + PER_TEST):
        assert_as_promised(run_schedule(make_schedule(seed), fleet))


def test_faults_in_shared_steps_lose_and_double_nothing() -> None:
    with Fleet() as own:  # processes of the last schedules may count faults of the next test
        for seed in range(300, 330):
            assert_as_promised(run_schedule(replace(make_schedule(seed), read_s=1.0), own))


def test_a_seed_always_makes_the_same_schedule() -> None:
    assert make_schedule(7) == make_schedule(7)
    assert make_schedule(7) != make_schedule(8)


def schedule_of(*faults: Fault, num_ranks: int = 1, lookahead_s: float = 0.0, **options: str) -> Schedule:
    """Two jobs of four steps, and these faults."""
    jobs = [make_job(Random(5), f"job-{idx}") for idx in range(2)]
    jobs = [replace(job, trajectory=replace(job.trajectory, num_steps=4)) for job in jobs]
    policy = options.get("policy", "fcfs")
    return Schedule(
        seed=0, num_ranks=num_ranks, jobs=tuple(jobs), policy=policy, lookahead_s=lookahead_s, faults=faults
    )


def test_a_worker_that_stops_while_it_loads_is_replaced(fleet: Fleet) -> None:
    faults = [
        Fault(FaultKind.KILL, FaultPoint.BEFORE, rank=0, after=3),
        Fault(FaultKind.STOP, FaultPoint.LOADING, rank=0),
    ]
    result = run_schedule(schedule_of(*faults), fleet)
    assert_as_promised(result)
    # A process of the schedule before may still count one of its own faults.
    assert (result.faults[FaultKind.KILL], result.faults[FaultKind.STOP]) == (1, 1)
    assert result.num_done == 2
    assert result.num_deaths in (1, 2), "the others may be done before the successor is found out"


def test_a_task_that_never_reports_fails_its_job_and_no_other(fleet: Fleet) -> None:
    mute = Fault(FaultKind.MUTE, FaultPoint.PUBLISHED, job_id="job-1", index=3, times=100)
    result = run_schedule(schedule_of(mute), fleet)
    assert_as_promised(result)
    assert (result.num_done, result.num_failed) == (1, 1)


def test_a_writer_that_stops_is_replaced(fleet: Fleet) -> None:
    result = run_schedule(schedule_of(Fault(FaultKind.STOP, FaultPoint.WRITING, job_id="job-0")), fleet)
    assert_as_promised(result)
    assert result.num_done == 2


@pytest.mark.parametrize("point", [FaultPoint.WRITING, FaultPoint.WRITTEN])
def test_a_writer_that_dies_with_the_last_file_of_a_run_is_replaced(fleet: Fleet, point: FaultPoint) -> None:
    schedule = schedule_of(Fault(FaultKind.KILL, point, job_id="job-1"))
    result = run_schedule(schedule, fleet)
    assert_as_promised(result)
    assert (result.faults, result.num_done) == ({FaultKind.KILL: 1}, 2)


def test_a_run_whose_ranks_have_all_died_too_often_ends_and_the_next_one_goes_on(fleet: Fleet) -> None:
    faults = [Fault(FaultKind.KILL, FaultPoint.BEFORE, rank=0, after=2) for _ in range(3)]
    result = run_schedule(schedule_of(*faults), fleet)
    assert_as_promised(result)
    assert result.num_done == 2


@pytest.mark.parametrize("kind", [FaultKind.STOP, FaultKind.KILL])
def test_a_worker_that_no_signal_ends_is_left_behind_and_the_others_go_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: FaultKind
) -> None:
    """As a process that hangs in a driver: it stays alive, and its channel open or not."""
    pool = fleet.pool(2)
    stuck = pool.workers[0]
    stuck.ends_within_s = 0.3
    kill = stuck.process.kill
    monkeypatch.setattr(stuck.process, "kill", lambda: None)
    monkeypatch.setattr(stuck.process, "is_alive", lambda: True)
    result = run_schedule(schedule_of(Fault(kind, FaultPoint.BEFORE, rank=0, after=3), num_ranks=2), fleet)
    kill()
    assert_as_promised(result)
    assert (result.num_deaths, result.num_done) == (1, 2)
    assert (stuck.phase, pool.workers[0]) == (Phase.STUCK, stuck)
    assert stuck.process not in multiprocessing.active_children(), "our exit would wait for it"
    assert "has not ended 0.3 s later: a driver or a disk holds it" in caplog.text
    assert "it stays away" in caplog.text


def test_a_rank_that_was_silent_before_a_run_began_is_not_taken_for_hung(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Nobody asked it for a sign of life while other ranks loaded their models."""
    pool = fleet.pool(1)
    pool.clock.now_s += 1000.0
    with contextlib.closing(ProcessBackend(pool, JobMemory([], tmp_path), clock=Clock())) as backend:
        backend._look_for_hung_processes()
    assert pool.workers[0].verdict is None


@pytest.mark.parametrize("times", range(5))
def test_a_failure_after_publishing_leaves_the_input_for_another_try(fleet: Fleet, times: int) -> None:
    """The queued task ran to its end meanwhile, and once overwrote what the failed one needed again."""
    late = [
        Fault(FaultKind.DELAY, FaultPoint.PUBLISHED, rank=1, after=3 + times),
        Fault(FaultKind.RAISE, FaultPoint.PUBLISHED, rank=1, after=3 + times),
    ]
    result = run_schedule(schedule_of(*late, num_ranks=2, lookahead_s=10.0, policy="legacy"), fleet)
    assert_as_promised(result)
    assert result.num_done == 2


def decode_with_frames(backend: ProcessBackend, *ranks: int) -> None:
    """A decode on these ranks; rank 0 has reported, and its frames are on their way."""
    layout = Layout(ranks, ulysses=len(ranks))
    dispatch = Dispatch(NUMBER, Task("a", 9, Stage.DECODE), layout, 0.0, 0.0, 1.0)
    backend._writes.new_frames(make_job(Random(5), "a"), NUMBER)
    backend._attempts.begin(dispatch, deadline_s=math.inf)
    assert len(list(backend._events_of(backend._pool.workers[0], REPORT))) == (ranks == (0,))


def test_a_second_report_of_a_decode_makes_no_event_and_lets_no_file_wait(
    fleet: Fleet, tmp_path: Path
) -> None:
    for ranks in ((0,), (0, 1)):  # all have reported, or one is still at it
        pool = fleet.pool(2)
        backend = ProcessBackend(pool, JobMemory([], tmp_path), clock=Clock())
        decode_with_frames(backend, *ranks)
        for message in (FramesStored(NUMBER), REPORT):
            assert list(backend._events_of(pool.workers[0], message)) == []
        assert backend._writes.storing(0) == set()
        backend.close()


def test_a_rank_that_dies_between_its_report_and_its_frames_costs_the_decode(
    fleet: Fleet, tmp_path: Path
) -> None:
    for ranks in ((0,), (0, 1)):  # all have reported, or one is still at it
        pool = fleet.pool(2)
        backend = ProcessBackend(pool, JobMemory([], tmp_path), clock=Clock())
        decode_with_frames(backend, *ranks)
        found = list(backend._worker_lost(pool.workers[0], Lost("killed"), 2.0))
        if ranks == (0,):
            assert found[1:] == [FramesLost(2.0, "a", "rank 0: killed", lost=True)]
        else:
            assert backend._attempts[NUMBER].cause == Cause("rank 0: killed", lost=True)
        backend.close()


@pytest.mark.parametrize("is_stopping", [True, False])
def test_a_run_that_stops_ends_with_its_last_rank_as_if_it_had_one(
    fleet: Fleet, tmp_path: Path, is_stopping: bool
) -> None:
    """A run without ranks ends with an error and keeps nothing."""
    pool, clock = fleet.pool(1), Clock()
    backend = ProcessBackend(pool, JobMemory([], tmp_path), clock=clock)
    if is_stopping:
        clock.at(StopRequested(0.0, 15))
    backend.wait(0.0)
    assert pool.is_stopping is is_stopping
    (worker,) = pool.workers
    worker.phase = Phase.ENDED
    (event,) = backend._events_of(worker, Lost("killed", is_retired=True))
    worker.phase = Phase.SERVING
    assert isinstance(event, RankLost)
    assert event.is_retired is not is_stopping
    backend.close()


def test_a_load_that_fails_while_a_dispatch_is_given_up_does_not_end_that(
    fleet: Fleet, tmp_path: Path
) -> None:
    pool = fleet.pool(2)
    backend = ProcessBackend(pool, JobMemory([], tmp_path), clock=Clock())
    decode_with_frames(backend, 0, 1)
    assert list(backend._events_of(pool.workers[0], TaskFault(NUMBER, "boom"))) == []
    pool.meeting.held_back.add(1)  # by its death
    backend._names["/bad"].add("bad")
    pool.models.unloadable["/bad"] = "rank 1: killed while it was loading"
    found = list(backend._worker_lost(pool.workers[1], Lost("killed"), 2.0))
    del pool.models.unloadable["/bad"]
    assert [type(event) for event in found] == [RankLost, LoadFailed]
    waiting_for = backend._recovery.waiting_for
    assert (waiting_for, pool.meeting.held_back) == ({0}, {1}), "rank 0 is still inside"
    numbers = frozenset({NUMBER})
    for answer in (Abandoned(numbers), EdgesRestarted(numbers)):
        assert pool.meeting.held_back == {1}
        found += backend._events_of(pool.workers[0], answer)
    (failure,) = found[2:]
    assert isinstance(failure, TaskFailed)
    assert (failure.dispatch, failure.reason, failure.lost) == (NUMBER, "boom", False)
    assert pool.meeting.held_back == set()
    backend.close()
