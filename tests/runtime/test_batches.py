"""Jobs that take their steps together (`--batch`), as the control plane sees them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import STEP_S, make_job, simulate, simulated_control

from gfgen.errors import InputError
from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.runtime.control.state import State
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob, check_batch
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, TaskDone
from gfgen.runtime.files.resume import ResumePoint, RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.simulate import planner
from gfgen.snapshot import Decision


def job_of(job_id: str, *, family: str = "wan-ti2v", **fields: Any) -> AdmittedJob:
    job = make_job(job_id, **fields)
    return replace(job, info=replace(job.info, family=family))


def steps_of(dispatches: Sequence[Dispatch]) -> list[str]:
    """The steps, in their order: a0 is the first one of job a. A bar follows the last one of a batch."""
    steps = [each for each in dispatches if each.task.stage is Stage.DENOISE]
    return [f"{x.task.job_id}{x.task.step}" + "|" * (x.number == (x.batch or [0])[-1]) for x in steps]


@pytest.mark.parametrize("policy", ["fcfs", "srtf", "edf", "makespan"])
def test_steps_of_equal_jobs_go_together_on_one_rank(policy: str) -> None:
    jobs = [job_of(name, steps=2) for name in "abc"]
    recorder = simulate(jobs, batch=3, num_ranks=2, policy=policy, lookahead_s=0.005)
    assert steps_of(recorder.dispatches) == ["a0", "b0", "c0|", "a1", "b1", "c1|"]
    steps = [each for each in recorder.dispatches if each.batch is not None]
    assert {each.layout.degree for each in steps} == {1}
    assert sorted(recorder.end_order) == ["a", "b", "c"]


def test_a_batch_has_no_more_jobs_than_asked_and_without_batch_each_is_alone() -> None:
    jobs = [job_of(name, steps=1) for name in "abc"]
    two = steps_of(simulate(jobs, batch=2, num_ranks=1, policy="fcfs").dispatches)
    assert two == ["a0", "b0|", "c0"]
    assert all(each.batch is None for each in simulate(jobs, num_ranks=1).dispatches)


@pytest.mark.parametrize(
    "other", [{"shape": "large"}, {"steps": 3}, {"priority": 1}, {"arrival_s": 5.0}, {"family": "other"}]
)
def test_jobs_that_differ_take_their_steps_alone(other: dict[str, Any]) -> None:
    jobs = [job_of("a", steps=1), job_of("b", **{"steps": 1} | other)]
    assert all(each.batch is None for each in simulate(jobs, batch=2, num_ranks=1).dispatches)


class Batch:
    """A state with jobs a, b, c before their first step, in one batch on one rank; `done` are further."""

    def __init__(self, *, done: Collection[str] = ()) -> None:
        self.clock = Clock(virtual=True)
        jobs = [job_of(name, steps=2) for name in "abc"]
        self.jobs = {job.job_id: job for job in jobs}
        resume = {name: ResumePoint(3, 1, 1, Path()) for name in done}
        start = RunStart(num_ranks=1, batch=3, resume=resume)
        self.costs = CostModel()
        self.state = State(jobs, start, clock=self.clock, costs=self.costs)
        self.state.apply(events.RankReady(0.0, 0, 1, 0.0))
        for job in jobs:
            self.state.apply(events.JobArrived(0.0, job.job_id))
        for job in [job for job in jobs if job.job_id not in done]:
            for index in (0, 1):
                self.end(self.begin(job.job_id, index))

    @property
    def open(self) -> list[str]:
        return list(self.state.snapshot().open)

    def begin(self, job_id: str, index: int) -> list[Dispatch]:
        task = self.jobs[job_id].trajectory.task(index)
        return self.state.begin(Decision(task, Layout((0,))))

    def end(self, dispatches: Sequence[Dispatch]) -> None:
        for each in dispatches:
            self.clock.advance(end_s := self.clock.now_s + STEP_S)
            times = (events.RankTimes(0, end_s - STEP_S, end_s),)
            self.state.apply(events.TaskDone(end_s, each.number, times))
            self.state.check()


def test_policies_see_the_leader_of_a_batch_when_all_are_as_far() -> None:
    batch = Batch()
    assert batch.open == ["a"]
    dispatches = batch.begin("a", 2)
    assert [each.task.job_id for each in dispatches] == ["a", "b", "c"]
    assert {each.batch for each in dispatches} == {range(dispatches[0].number, dispatches[-1].number + 1)}
    batch.end(dispatches[:2])
    assert (batch.open, list(batch.state.snapshot().busy)) == ([], ["c"])
    batch.end(dispatches[2:])
    assert batch.open == ["a"]


def test_a_job_that_is_cancelled_in_a_step_ends_with_it_and_the_others_go_on() -> None:
    batch = Batch()
    dispatches = batch.begin("a", 2)
    assert not list(batch.state.apply(events.JobCancelled(batch.clock.now_s, "a")))
    assert batch.state.flights.take_unwanted() == []
    batch.end(dispatches)
    assert list(batch.state.jobs.records) == ["b", "c"]
    assert [each.task.job_id for each in batch.begin("b", 3)] == ["b", "c"]


def test_a_job_whose_step_failed_goes_on_alone() -> None:
    batch = Batch()
    dispatches = batch.begin("a", 2)
    batch.end(dispatches[:1])
    batch.state.apply(events.TaskFailed(batch.clock.now_s, dispatches[1].number, "NaN"))
    batch.end(dispatches[2:])
    assert sorted(batch.open) == ["a", "b"]
    assert [each.task.job_id for each in batch.begin("b", 2)] == ["b"]


def test_a_step_is_measured_as_one_of_the_batch_in_which_it_ran_though_jobs_left_that_meanwhile() -> None:
    batch = Batch()
    dispatches = batch.begin("a", 2)
    batch.state.apply(events.JobCancelled(batch.clock.now_s, "a"))
    batch.end(dispatches)
    of_size = {size: batch.costs.class_of(batch.jobs["b"], batch=size) for size in (1, 2, 3)}
    step = Stage.DENOISE, (1, 1, 1)
    assert {size: batch.costs.has_seen(each, *step) for size, each in of_size.items()} == {
        1: False,
        2: False,
        3: True,
    }


def test_jobs_that_are_behind_another_one_catch_up_first() -> None:
    batch = Batch(done="a")
    assert batch.open == ["b"]
    dispatches = batch.begin("b", 2)
    assert [each.task.job_id for each in dispatches] == ["b", "c"]
    batch.end(dispatches)
    assert batch.open == ["a"]
    assert [each.task.job_id for each in batch.begin("a", 3)] == ["a", "b", "c"]


def test_steps_of_a_batch_are_predicted_as_they_are_reported_apart_from_steps_of_single_jobs() -> None:
    """A step of each of three jobs takes 0.1 s together with the others, and 0.16 s alone."""

    def task_s(dispatch: Dispatch) -> float:
        return STEP_S if dispatch.task.stage is not Stage.DENOISE or dispatch.batch else 0.16

    jobs = [job_of(name, steps=9) for name in "abcd"]
    for lookahead_s in (0.0, 0.005):
        recorder = simulate(jobs, batch=3, num_ranks=1, policy="fcfs", lookahead_s=lookahead_s, task_s=task_s)
        took_s = {event.dispatch: event.busy_s for event in recorder.events if isinstance(event, TaskDone)}
        later = [each for each in recorder.dispatches if (each.task.step or 0) > 1]
        assert {each.task.job_id for each in later} == set("abcd")
        for each in later:
            assert each.predicted_end_s - each.predicted_start_s == pytest.approx(took_s[each.number])
        ends_s = {each.batch: each.predicted_end_s for each in later if each.batch}
        starts_s = {each.batch: each.submitted_s for each in reversed(later) if each.batch}
        assert all(ends_s[last] == pytest.approx(starts_s[last] + 3 * STEP_S) for last in ends_s)


def test_before_closing_time_only_jobs_of_a_batch_are_predicted_to_take_as_long_as_it() -> None:
    # One rank: the first batch takes 1.4 s, another one would end at 2.8 s, and a single job at 2.1 s.
    two = [job_of(name) for name in ("a", "b", "c", "d")]
    single = job_of("single", priority=-1)
    recorder = simulate([*two, single], batch=2, policy="fcfs", num_ranks=1, closes_s=2.3)
    assert recorder.end_order == ["a", "b", "single"]


@pytest.mark.parametrize("is_coarse", [False, True])
def test_a_plan_predicts_batches_as_runs_measured_them(
    monkeypatch: pytest.MonkeyPatch, *, is_coarse: bool
) -> None:
    """Of four jobs with two steps the other three tasks take 0.3 s each, and a step takes 1.6 s alone."""

    def row(stage: Stage, seconds: float, shape: str = "small") -> ProfileRow:
        return ProfileRow("fake", shape, stage, (1, 1, 1), seconds, flops=1e9)

    rows = [row(stage, 1.6 if stage is Stage.DENOISE else 0.1) for stage in Stage]
    jobs = [job_of(name, steps=2) for name in "abcd"]
    monkeypatch.setattr(planner, "FULL_TASKS", 0 if is_coarse else math.inf)

    def end_s(*more: ProfileRow, batch: int) -> float:
        window = planner.PlanWindow(0.0, batch=batch)
        profile = Profile("a test", "2026-11-26", "made up", 1, (*rows, *more))
        made = planner.RankPlanner(jobs=jobs, profile=profile, window=window)
        plan = made.plan(["srtf", "fcfs"], num_ranks=1, rank_counts=[1])
        assert not plan.best.is_estimated
        assert len({round(each.end_s, 6) for each in plan.by_policy}) == 1
        return plan.best.end_s

    in_batches = row(Stage.DENOISE, 1.0, "small in batches of 2")
    assert end_s(batch=1) == end_s(in_batches, batch=1) == pytest.approx(4 * (0.3 + 2 * 1.6))
    assert end_s(in_batches, batch=2) == pytest.approx(4 * (0.3 + 2 * 1.0))
    assert end_s(batch=2) == pytest.approx(4 * (0.3 + 2 * 1.6)), "what nobody measured counts as single steps"


def test_models_that_compute_one_job_at_a_time_are_refused() -> None:
    check_batch(1, {"sdxl": "pipeline"})
    check_batch(4, {"qwen-image": "qwen-image", "video": "wan-moe-t2v"})
    with pytest.raises(InputError, match="--batch 4: sdxl computes one job at a time"):
        check_batch(4, {"sdxl": "pipeline"})


def test_a_run_with_batches_ends_whatever_is_cancelled() -> None:
    jobs = [job_of(name) for name in "abcdef"]
    control, recorder = simulated_control(jobs, batch=3, num_ranks=2)
    for number, name in enumerate("ade"):
        control.clock.at(events.JobCancelled(STEP_S * (2 * number + 3.5), name))
    control.run()
    assert sorted(recorder.end_order) == list("abcdef")


def test_jobs_of_a_batch_are_decoded_one_by_one() -> None:
    recorder = simulate([job_of(name, steps=1) for name in "ab"], batch=2, num_ranks=2, policy="fcfs")
    decodes = [each for each in recorder.dispatches if each.task.stage is Stage.DECODE]
    assert [(each.task.job_id, each.batch) for each in decodes] == [("a", None), ("b", None)]
