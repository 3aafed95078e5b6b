"""Seeded schedules of faults on fake workers (gfgen/bench/faults.py), and those that found a bug."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from gfgen.bench.fault_plan import Fault, Kind, Point
from gfgen.bench.faults import Fleet, Result, Schedule, make_job, make_schedule, run_schedule

NUM_SCHEDULES = 200
PER_TEST = 20


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def assert_as_promised(result: Result) -> None:
    assert not result.problems, f"seed {result.seed}:\n" + "\n".join(result.problems)


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, PER_TEST))
def test_random_faults_lose_and_double_nothing(fleet: Fleet, first: int) -> None:
    for seed in range(first, first + PER_TEST):
        assert_as_promised(run_schedule(make_schedule(seed), fleet))


def test_a_seed_always_makes_the_same_schedule() -> None:
    assert make_schedule(7) == make_schedule(7)
    assert make_schedule(7) != make_schedule(8)


def schedule_of(*faults: Fault, num_ranks: int = 1, guard_s: float = 0.0, **options: str) -> Schedule:
    """Two jobs of four steps, and these faults."""
    jobs = [make_job(Random(5), f"job-{idx}") for idx in range(2)]
    jobs = [replace(job, trajectory=replace(job.trajectory, num_steps=4)) for job in jobs]
    policy = options.get("policy", "fcfs")
    return Schedule(
        seed=0, num_ranks=num_ranks, jobs=tuple(jobs), policy=policy, guard_s=guard_s, faults=faults
    )


def test_a_worker_that_stops_while_it_loads_is_replaced(fleet: Fleet) -> None:
    faults = [Fault(Kind.KILL, Point.BEFORE, rank=0, after=3), Fault(Kind.STOP, Point.LOADING, rank=0)]
    result = run_schedule(schedule_of(*faults), fleet)
    assert_as_promised(result)
    assert result.faults == {Kind.KILL: 1, Kind.STOP: 1}
    assert result.num_done == 2
    assert result.num_deaths in (1, 2), "the others may be done before the successor is found out"


def test_a_task_that_never_reports_fails_its_job_and_no_other(fleet: Fleet) -> None:
    mute = Fault(Kind.MUTE, Point.PUBLISHED, job_id="job-1", index=3, times=100)
    result = run_schedule(schedule_of(mute), fleet)
    assert_as_promised(result)
    assert (result.num_done, result.num_failed) == (1, 1)


def test_a_writer_that_stops_is_replaced(fleet: Fleet) -> None:
    result = run_schedule(schedule_of(Fault(Kind.STOP, Point.WRITING, job_id="job-0")), fleet)
    assert_as_promised(result)
    assert result.num_done == 2


def test_a_run_whose_ranks_have_all_died_too_often_ends_and_the_next_one_goes_on(fleet: Fleet) -> None:
    faults = [Fault(Kind.KILL, Point.BEFORE, rank=0, after=2) for _ in range(3)]
    result = run_schedule(schedule_of(*faults), fleet)
    assert_as_promised(result)
    assert result.num_done == 2


@pytest.mark.parametrize("times", range(5))
def test_a_failure_after_publishing_leaves_the_input_for_another_try(fleet: Fleet, times: int) -> None:
    """The queued task ran to its end meanwhile, and once overwrote what the failed one needed again."""
    late = [
        Fault(Kind.DELAY, Point.PUBLISHED, rank=1, after=3 + times),
        Fault(Kind.RAISE, Point.PUBLISHED, rank=1, after=3 + times),
    ]
    result = run_schedule(schedule_of(*late, num_ranks=2, guard_s=10.0, policy="legacy"), fleet)
    assert_as_promised(result)
    assert result.num_done == 2
