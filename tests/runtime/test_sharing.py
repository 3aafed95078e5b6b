"""Steps that share the reads of blocks on one rank, as the control plane forms them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import make_job, simulate, simulated_control

from gfgen.graph import Stage
from gfgen.layout import ALONE, Layout
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.control.sharing import MAX_JOBS
from gfgen.runtime.control.state import State
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.snapshot import Decision

READ_S, COMPUTE_S, OTHER_S = 1.0, 0.2, 0.1
STREAMED: dict[str, Any] = {"reads_s": {"fake": READ_S}, "lookahead_s": 0.005}


def task_s(dispatch: Dispatch, *, compute_s: float = COMPUTE_S) -> float:
    """An equal part of a step, which computes while it reads."""
    number = dispatch.num_sharers
    return max(READ_S, number * compute_s) / number if dispatch.task.stage is Stage.DENOISE else OTHER_S


def run(jobs: Sequence[AdmittedJob], **options: Any) -> list[Dispatch]:
    return simulate(
        jobs, **{"task_s": task_s, "num_ranks": 1, "policy": "fcfs", **STREAMED, **options}
    ).dispatches


def steps_of(dispatches: Sequence[Dispatch]) -> list[str]:
    """The shared steps, in their order: a0 is the first one of job a."""
    shared: dict[int, str] = {}
    for each in dispatches:
        if each.task.stage is Stage.DENOISE:
            first = each.number if each.sharers is None else each.sharers[0]
            shared[first] = f"{shared.get(first, '')} {each.task.job_id}{each.task.step}".strip()
    return list(shared.values())


def test_jobs_that_wait_share_the_reads_of_the_text_encoder() -> None:
    dispatches = run([make_job(name, steps=2) for name in "abc"])
    encodes = [each for each in dispatches if each.task.stage is Stage.ENCODE]
    assert [each.task.job_id for each in encodes] == ["a", "b", "c"]
    assert {each.sharers for each in encodes} == {range(encodes[0].number, encodes[0].number + 3)}


@pytest.mark.parametrize("policy", ["fcfs", "srtf", "edf", "makespan", "auto"])
def test_jobs_that_wait_share_the_steps_of_the_one_that_runs(policy: str) -> None:
    dispatches = run([make_job(name, steps=2) for name in "abc"], policy=policy)
    assert steps_of(dispatches) == ["a0 b0 c0", "a1 b1 c1"]
    assert {each.layout for each in dispatches} == {Layout.single(0)}


def test_jobs_of_any_shape_and_length_join_and_leave_at_each_step() -> None:
    jobs = [
        make_job("a", steps=3, uses_cfg=True),
        make_job("b", steps=1, shape="large"),
        make_job("c", steps=3, arrival_s=1.5),
    ]
    assert steps_of(run(jobs)) == ["b0 a0", "a1 c0", "a2 c1", "c2"]


def test_without_blocks_that_are_read_each_step_is_alone() -> None:
    jobs = [make_job(name, steps=2) for name in "ab"]
    assert steps_of(run(jobs, reads_s={})) == ["a0", "a1", "b0", "b1"]
    assert steps_of(run(jobs, reads_s={"other": 1.0})) == ["a0", "a1", "b0", "b1"]


def test_jobs_with_other_weights_do_not_join() -> None:
    lora = {"lora": ({"sha256": "5" * 64, "scale": 1.0},), "lora_files": ("a.safetensors",)}
    jobs = [make_job("a", steps=1), make_job("b", steps=1, **lora), make_job("c", steps=1)]
    other = jobs[2].info
    spec = replace(other.spec, model="other")
    jobs[2] = replace(jobs[2], info=replace(other, spec=spec))
    reads_s = {"fake": READ_S, "other": READ_S}
    assert sorted(steps_of(run(jobs, reads_s=reads_s))) == ["a0", "b0", "c0"]


def test_a_step_has_no_more_jobs_than_the_limit() -> None:
    shared = steps_of(run([make_job(f"{idx}-", steps=2) for idx in range(MAX_JOBS + 3)]))
    assert [len(each.split()) for each in shared] == [MAX_JOBS] * 2 + [3] * 2


def test_ranks_get_as_many_jobs_each() -> None:
    dispatches = run([make_job(name, steps=2) for name in "abcdef"], num_ranks=2)
    sizes = [len(each.split()) for each in steps_of(dispatches)]
    assert sizes[:3] == [3] * 3
    assert sum(sizes) == 6 * 2
    assert {each.layout.degree for each in dispatches} == {1}


def test_steps_that_computing_bounds_are_alone_once_that_is_known() -> None:
    jobs = [make_job(name, steps=4) for name in "ab"]
    shared = steps_of(run(jobs, task_s=lambda x: task_s(x, compute_s=1.5 * READ_S)))
    assert shared[0] == "a0 b0"
    assert shared[1:] == ["a1", "a2", "a3", "b1", "b2", "b3"]


def test_jobs_of_lower_priority_do_not_slow_an_urgent_one_down() -> None:
    jobs = [make_job(name, steps=9) for name in "bcd"]
    jobs.append(make_job("a", steps=3, priority=10, arrival_s=1.5))
    assert [each for each in steps_of(run(jobs, policy="edf")) if "a" in each] == ["a0", "a1", "a2"]


def test_a_job_with_a_deadline_runs_alone_if_others_would_make_it_late() -> None:
    """Its steps take 1 s alone, and as long with four others, which compute 0.2 s each; with six 1.4 s."""
    others = [make_job(name, steps=3) for name in "bcdefg"]

    def of_urgent(deadline_s: float) -> list[str]:
        late = [make_job("a", steps=3, deadline_s=deadline_s, arrival_s=2.0)]
        return [each for each in steps_of(run([*others, *late], policy="edf")) if "a" in each]

    assert of_urgent(60.0)[0].split()[0] == "a0"
    assert len(of_urgent(60.0)[0].split()) == 7
    assert of_urgent(5.2) == ["a0", "a1", "a2"]


def test_more_urgent_jobs_join_first_and_no_job_waits_for_a_less_urgent_one_to_come_to_its_steps() -> None:
    jobs = [make_job(f"{idx}-", steps=2) for idx in range(MAX_JOBS)]
    jobs += [make_job("urgent", steps=2, priority=1), make_job("second", steps=2, priority=1)]
    dispatches = run(jobs)
    is_step = [each.task.stage is Stage.DENOISE for each in dispatches]
    first = dispatches[is_step.index(True)]
    begun = [each.task.job_id for each in dispatches if each.number < first.number]
    assert set(begun) == {"urgent", "second"}
    assert steps_of(dispatches)[:2] == ["urgent0 second0", "urgent1 second1"]


def test_equal_parts_of_the_time_are_what_predictions_learn() -> None:
    control, _ = simulated_control(
        [make_job(name, steps=6) for name in "abcd"], num_ranks=1, policy="fcfs", task_s=task_s, **STREAMED
    )
    control.run()
    costs, job = control.state._costs, make_job("a", steps=6)
    found = {number: costs.class_of(job, num_sharers=number) for number in (1, 4)}
    assert costs.has_seen(found[4], Stage.DENOISE, ALONE)
    assert costs.estimate(found[4], Stage.DENOISE, ALONE).seconds == pytest.approx(READ_S / 4)
    task = job.trajectory.task(2)
    rest_s = costs.remaining_s(found[4], task, job.trajectory.num_tasks)
    assert rest_s == pytest.approx(6 * READ_S / 4 + OTHER_S, rel=0.02)


def test_a_mistake_of_a_policy_stays_one(caplog: pytest.LogCaptureFixture) -> None:
    jobs = [make_job("a"), make_job("b")]
    control, _ = simulated_control(jobs, num_ranks=1, policy="srtf", task_s=task_s, **STREAMED)
    decide, task = control.decider.policy.decide, make_job("x").trajectory.task(2)
    wrong: list[Any] = [object(), Decision("a", None), Decision(task, 7)]  # type: ignore

    def decided(snapshot: Any) -> Any:
        return [wrong.pop()] if wrong else decide(snapshot)

    control.decider.policy = NamedPolicy("mine.py", decided)
    control.run()
    assert "going on with fcfs" in caplog.text


class Step:
    """A state whose jobs a, b and c have come to their first step, on one rank that may share it."""

    def __init__(self, **fields: Any) -> None:
        self.clock = Clock(virtual=True)
        self.jobs = {name: make_job(name, steps=2, **fields) for name in "abc"}
        start = RunStart(num_ranks=1, reads_s={"fake": READ_S})
        self.state = State(list(self.jobs.values()), start, clock=self.clock, costs=CostModel())
        self.state.apply(events.RankReady(0.0, 0, 1, 0.0))
        for name in self.jobs:
            self.state.apply(events.JobArrived(0.0, name))
        for name in self.jobs:
            for index in (0, 1):
                self.end(self.begin(name, index))

    @property
    def open(self) -> list[str]:
        return sorted(self.state.snapshot().open)

    def begin(self, name: str, index: int) -> list[Dispatch]:
        snapshot = self.state.snapshot()
        decision = Decision(self.jobs[name].trajectory.task(index), Layout.single(0))
        if index >= 2:
            (decision,) = self.state.sharing.arranged([decision], snapshot, holds_back=self.state.holds_back)
        return self.state.begin(decision)

    def end(self, dispatches: Sequence[Dispatch]) -> None:
        for each in dispatches:
            self.clock.advance(end_s := self.clock.now_s + task_s(each))
            times = (events.RankTimes(0, end_s - task_s(each), end_s),)
            self.state.apply(events.TaskDone(end_s, each.number, times))

    def fail(self, dispatch: Dispatch, **why: bool) -> None:
        self.state.apply(events.TaskFailed(self.clock.now_s, dispatch.number, "NaN", **why))


def names_of(dispatches: Sequence[Dispatch]) -> list[str]:
    return [each.task.job_id for each in dispatches]


def test_the_dispatches_of_a_shared_step_have_consecutive_numbers_and_nothing_is_queued_behind_them() -> None:
    step = Step()
    dispatches = step.begin("a", 2)
    assert names_of(dispatches) == ["a", "b", "c"]
    assert {each.sharers for each in dispatches} == {range(dispatches[0].number, dispatches[-1].number + 1)}
    assert step.state.choice() is None
    step.end(dispatches)
    assert step.open == ["a", "b", "c"]
    assert names_of(step.begin("c", 3)) == ["c", "a", "b"]


def test_a_job_that_is_late_in_any_case_runs_with_others() -> None:
    assert names_of(Step(deadline_s=0.1).begin("a", 2)) == ["a", "b", "c"]


def test_a_cancelled_companion_ends_with_the_step_and_the_others_go_on() -> None:
    step = Step()
    dispatches = step.begin("a", 2)
    assert not list(step.state.apply(events.JobCancelled(step.clock.now_s, "b")))
    assert step.state.flights.take_unwanted() == []
    step.end(dispatches)
    assert list(step.state.jobs.records) == ["a", "c"]
    assert names_of(step.begin("a", 3)) == ["a", "c"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_job_that_failed_goes_on_alone_and_the_others_share_on(failing: int) -> None:
    step = Step()
    dispatches = step.begin("a", 2)
    failed = dispatches[failing]
    step.fail(failed)
    step.end([each for each in dispatches if each is not failed])
    name, others = failed.task.job_id, [each for each in "abc" if each != failed.task.job_id]
    assert names_of(step.begin(others[0], 3)) == others
    for number in list(step.state.flights):
        step.end([step.state.flights[number].dispatch])
    assert names_of(step.begin(name, 2)) == [name]


def test_the_jobs_of_a_rank_that_dies_go_back_to_that_step_and_the_one_that_led_goes_on_alone() -> None:
    step = Step()
    dispatches = step.begin("a", 2)
    step.state.apply(events.RankLost(step.clock.now_s, 0, 1, "killed"))
    for place, each in enumerate(dispatches):
        step.fail(each, lost=place == 0, void=place > 0)
    step.state.apply(events.RankReady(step.clock.now_s, 0, 2, 0.0))
    assert step.open == ["a", "b", "c"]
    assert names_of(step.begin("b", 2)) == ["b", "c"]


@pytest.mark.parametrize(("deadline_s", "is_late"), [(3.0, False), (3.5, True), (4.0, False)])
def test_two_jobs_share_steps_unless_one_would_then_miss_a_deadline_that_it_meets(
    deadline_s: float, is_late: bool
) -> None:
    """Its three steps take 3 s alone, and 3.6 s with another job; the decode takes 0.125 s."""
    job, costs = make_job("a", steps=3, deadline_s=deadline_s), CostModel()
    start = RunStart(num_ranks=1, reads_s={"fake": READ_S})
    state = State([job], start, clock=Clock(virtual=True), costs=costs)
    state.apply(events.RankReady(0.0, 0, 1, 0.0))
    state.apply(events.JobArrived(0.0, "a"))
    for number, step_s in ((1, 1.0), (2, 0.6)):
        costs.observe(costs.class_of(job, num_sharers=number), Stage.DENOISE, ALONE, step_s)
        costs.observe(costs.class_of(job, num_sharers=number), Stage.DECODE, ALONE, 0.125)
    record = state.jobs.records["a"]
    record.progress.next_index = 2
    assert state.sharing._is_late(record, 2, now_s=0.0) is is_late
    assert not state.sharing._is_late(record, 1, now_s=0.0)
