"""Jobs that wait out of sight: in which order they come, and that no decision depends on it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import make_job

from gfgen.job.packed import Packed
from gfgen.policies.catalog import BUILT_IN, load_policy
from gfgen.runtime.control import backlog as module
from gfgen.runtime.control.backlog import Backlog
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import JOBS, AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, JobCancelled
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.files.journal import dispatch_summary
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.simulate.simulation import SimulatedBackend, SimulatedTimes


class Recorder(Observer):
    def __init__(self) -> None:
        self.dispatches: list[object] = []
        self.outcomes: list[JobOutcome] = []

    def dispatched(self, dispatch: Dispatch) -> None:
        self.dispatches.append(dispatch_summary(dispatch))

    def ended(self, outcome: JobOutcome) -> None:
        self.outcomes.append(outcome)


def control_of(backlog: Backlog, policy: str, recorder: Recorder) -> Control:
    clock = Clock(virtual=True)
    times = SimulatedTimes(task_s=lambda dispatch: 0.01 + dispatch.task.index / 1000)
    backend = SimulatedBackend(clock, num_ranks=4, times=times)
    near = backlog.take()
    state = State(near, RunStart(num_ranks=4), clock=clock, costs=CostModel())
    steering = Steering(backlog=backlog)
    return Control(
        near,
        state=state,
        backend=backend,
        policy=load_policy(policy),
        observers=[recorder],
        steering=steering,
    )


def varied(number: int, *, has_deadlines: bool) -> list[AdmittedJob]:
    draw = random.Random(3)
    jobs = [make_job(f"j{idx:03}", steps=draw.choice((2, 5, 9))) for idx in range(number)]
    if has_deadlines:
        jobs = [
            replace(
                job, info=replace(job.info, spec=replace(job.spec, deadline_s=draw.choice((0.3, 3.0, 9.0))))
            )
            for job in jobs
        ]
    return jobs


@pytest.mark.parametrize("policy", sorted(BUILT_IN.keys() - {"auto"}))
@pytest.mark.parametrize("has_deadlines", [False, True])
def test_decisions_do_not_depend_on_how_many_jobs_are_in_sight(policy, has_deadlines, monkeypatch):
    monkeypatch.setattr(module, "STEP", 5)
    jobs, found = varied(150, has_deadlines=has_deadlines), list[Recorder]()
    plans_for_all = policy == "triage" and has_deadlines  # it plans which of the jobs in sight are lost
    for ahead in (140 if plans_for_all else 40, 1000):
        found.append(Recorder())
        control_of(Backlog(jobs, ahead=ahead), policy, found[-1]).run()
    few, all_ = found
    assert few.dispatches == all_.dispatches
    assert [outcome.job_id for outcome in few.outcomes] == [outcome.job_id for outcome in all_.outcomes]
    assert len(few.outcomes) == 150


def ids(jobs: Sequence[AdmittedJob]) -> list[str]:
    return [job.job_id for job in jobs]


def test_the_first_of_each_order_come_into_sight(monkeypatch):
    monkeypatch.setattr(module, "STEP", 1)
    jobs = [make_job(f"j{idx}", steps=5) for idx in range(20)]
    jobs[10] = make_job("j10", steps=2)
    jobs[15] = make_job("j15", steps=9)
    jobs[18] = replace(jobs[18], info=replace(jobs[18].info, spec=replace(jobs[18].spec, deadline_s=1.0)))
    backlog = Backlog(jobs, ahead=0)
    assert ids(backlog.take()) == ["j0", "j10", "j15", "j18"]
    assert (len(backlog), backlog.take()) == (16, [])
    backlog.ended(JobOutcome(jobs[0].info, "done"))
    assert ids(backlog.take()) == ["j1"]


def test_jobs_that_arrive_later_or_were_begun_come_at_once_and_done_ones_never():
    jobs = [*varied(30, has_deadlines=False), make_job("later", arrival_s=5.0)]
    backlog = Backlog(jobs, ahead=-module.STEP, without={"j001"}, first={"j020"})
    assert {"later", "j020"} <= set(ids(backlog.take()))
    assert "j001" not in list(backlog)


def test_jobs_that_arrive_later_or_have_a_priority_do_not_hide_what_can_run(monkeypatch):
    monkeypatch.setattr(module, "STEP", 0)
    late = [make_job(f"late-{idx}", arrival_s=3600, priority=5) for idx in range(30)]
    long = [make_job(f"long-{idx}", steps=9, priority=5) for idx in range(30)]
    short = [make_job(f"short-{idx}", steps=2) for idx in range(30)]
    found = Counter(job.job_id.partition("-")[0] for job in Backlog([*late, *long, *short], ahead=10).take())
    assert found["long"] >= 10
    assert found["short"] >= 10


def test_a_cancelled_job_comes_into_sight_to_end():
    jobs, recorder = varied(60, has_deadlines=False), Recorder()
    backlog = Backlog(jobs, ahead=1 - module.STEP)
    control = control_of(backlog, "fcfs", recorder)
    control.begin()
    control.record(JobCancelled(0.0, "j055"))
    assert [(each.job_id, each.status) for each in recorder.outcomes] == [("j055", "cancelled")]
    assert "j055" not in list(backlog)


def test_packed_jobs_are_equal_to_those_that_were_packed():
    jobs = varied(50, has_deadlines=True)
    jobs += [replace(jobs[3], info=replace(jobs[3].info, file="other.png", job_file="a.jsonl"))]
    packed = Packed(JOBS, jobs)
    assert list(packed) == jobs
    assert packed[-1] == jobs[-1]
    assert packed[2:4] == jobs[2:4]
