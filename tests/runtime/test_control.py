import itertools
from dataclasses import replace

import pytest
from builders import STEP_S, make_job, simulate, simulated_control

from gfgen.errors import InterruptedRunError, PolicyFault, StalledError, WorkerError
from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.state import MIN_FILES
from gfgen.runtime.core.events import (
    ClosingTime,
    JobCancelled,
    OutputFailed,
    OutputWritten,
    PolicyChanged,
    RankLost,
    StopRequested,
    TaskDone,
    TaskFailed,
    Wakeup,
)
from gfgen.runtime.core.observer import Observer
from gfgen.runtime.simulate.simulation import SimulatedBackend
from gfgen.snapshot import Decision


def test_every_job_runs_every_task_once_and_in_order():
    jobs = [make_job(name, steps=steps) for name, steps in (("a", 3), ("b", 5), ("c", 1))]
    recorder = simulate(jobs, num_ranks=2)
    for job in jobs:
        indices = [d.task.index for d in recorder.dispatches if d.task.job_id == job.job_id]
        assert indices == list(range(job.trajectory.num_tasks))
    assert sorted(recorder.end_order) == ["a", "b", "c"]


@pytest.mark.parametrize("policy", ["legacy", "fcfs", "srtf", "edf"])
@pytest.mark.parametrize("lookahead_s", [0.0, 0.02])
def test_all_policies_finish_all_jobs_with_and_without_lookahead(policy, lookahead_s):
    jobs = [make_job(f"job-{i}", steps=1 + i % 4, arrival_s=0.2 * i, deadline_s=2.0 + i) for i in range(12)]
    recorder = simulate(jobs, policy=policy, num_ranks=3, lookahead_s=lookahead_s)
    assert sorted(recorder.end_order) == sorted(job.job_id for job in jobs)


def test_the_same_run_gives_the_same_decisions():
    jobs = [make_job(f"job-{i}", steps=1 + i % 5, arrival_s=0.05 * i) for i in range(20)]
    first, second = (simulate(jobs, num_ranks=3, lookahead_s=0.02) for _ in range(2))
    assert first.dispatches == second.dispatches
    assert first.events == second.events


def test_a_job_waits_for_its_arrival():
    recorder = simulate([make_job("late", arrival_s=5.0)])
    assert recorder.dispatches[0].submitted_s == 5.0


def test_lookahead_leaves_no_gap_between_the_steps_of_a_job():
    recorder = simulate([make_job("a", steps=20)], num_ranks=1, lookahead_s=0.02)
    queued = [d for d in recorder.dispatches[5:] if d.predicted_start_s > d.submitted_s]
    assert len(queued) == len(recorder.dispatches[5:])


def test_never_more_than_one_task_is_queued_behind_a_running_one():
    jobs = [make_job(f"job-{i}", steps=5) for i in range(6)]
    control, _ = simulated_control(jobs, num_ranks=2, lookahead_s=0.05)
    depths = []
    submit = control.backend.submit

    def counted(dispatch):
        submit(dispatch)
        depths.append(max(len(rank.flights) for rank in control.state.ranks.records))

    control.backend.submit = counted
    control.run()
    assert max(depths) == 2


def test_a_policy_that_starts_nothing_is_named_with_the_jobs_that_wait():
    control, _ = simulated_control([make_job("a"), make_job("b")])
    control.decider.policy = NamedPolicy("lazy", lambda snapshot: [])
    with pytest.raises(StalledError, match=r"policy lazy .* 2 jobs wait: a, b"):
        control.run()


class Shelf(SimulatedBackend):
    """Notes what is kept of jobs."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = {}

    def save(self, job_id, *, next_index, producer, given_up):
        self.kept[job_id] = next_index


def test_jobs_that_were_begun_are_kept_when_the_policy_lets_them_lie():
    control, _ = simulated_control([make_job("a"), make_job("b")], num_ranks=1, backend=Shelf)
    fcfs = load_policy("fcfs")
    control.decider.policy = NamedPolicy(
        "tired", lambda snapshot: fcfs.decide(snapshot) if control.clock.now_s < 3.5 * STEP_S else []
    )
    with pytest.raises(StalledError):
        control.run()
    assert control.backend.kept == {"a": 4}


def test_jobs_that_ran_on_the_last_ranks_are_kept_from_their_last_task_that_ended():
    control, _ = simulated_control([make_job("a")], num_ranks=2, lookahead_s=0.02, backend=Shelf)
    for rank in (0, 1):
        control.clock.at(RankLost(3.5 * STEP_S, rank, 1, "it broke", is_retired=True))
    with pytest.raises(WorkerError, match=r"no rank is left \(it broke\)"):
        control.run()
    assert control.backend.kept == {"a": 3}


class Later:
    """Brings one more job when it is asked for the third time, and then asks the run to stop in a while."""

    def __init__(self, clock, job):
        self.clock, self.turns = clock, iter([[], [], [job]])

    def take(self):
        jobs = next(self.turns, [])
        self.clock.at(StopRequested(20.0, 2) if jobs else Wakeup(self.clock.now_s + 1.0))
        return jobs


def test_a_policy_may_wait_for_more_jobs_where_some_may_come(caplog, monkeypatch):
    control, recorder = simulated_control([make_job("a")], intake=lambda clock: Later(clock, make_job("b")))
    monkeypatch.setattr(control.clock, "brings_more", lambda **_: False)
    fcfs = load_policy("fcfs")
    control.decider.policy = NamedPolicy(
        "pairs",
        lambda snapshot: fcfs.decide(snapshot) if len(snapshot.open) > 1 or recorder.end_order else [],
    )
    control.run()
    assert sorted(recorder.end_order) == ["a", "b"]
    assert caplog.text.count("policy pairs starts nothing although all ranks are free") == 1


def test_jobs_that_would_time_out_one_day_are_no_reason_to_wait():
    control, _ = simulated_control([make_job("a", timeout_s=3600.0), make_job("b", arrival_s=5.0)])
    control.decider.policy = NamedPolicy("lazy", lambda snapshot: [])
    with pytest.raises(StalledError, match=r"2 jobs wait: a, b"):
        control.run()
    assert control.clock.now_s == 5.0, "an arrival may change what a policy does"


def test_a_policy_that_raises_is_replaced_after_three_faults(caplog):
    def broken(snapshot):
        raise ZeroDivisionError("division by zero")

    control, recorder = simulated_control([make_job("a")])
    control.decider.policy = NamedPolicy("mine.py", broken)
    control.run()
    assert recorder.end_order == ["a"]
    assert [e.policy for e in recorder.events if isinstance(e, PolicyChanged)] == ["fcfs"]
    assert "mine.py failed 3 times; going on with fcfs" in caplog.text


def test_a_policy_that_decides_the_impossible_is_replaced(caplog):
    def greedy(snapshot):
        layout = next(iter(snapshot.ranks)).rank
        return [Decision(job.next_task, Layout.single(layout)) for job in snapshot.open.values()]

    control, recorder = simulated_control([make_job("a"), make_job("b"), make_job("c")])
    control.decider.policy = NamedPolicy("greedy", greedy)
    control.run()
    assert sorted(recorder.end_order) == ["a", "b", "c"]
    assert "rank 0 is not free" in caplog.text


def always(value):
    return NamedPolicy("mine.py", lambda snapshot: value)


def endless(snapshot):
    while True:
        yield "nothing"


def leave(snapshot):
    raise SystemExit(0)


def babble(snapshot):
    raise ValueError("first line\nsecond line\n" + "and so on " * 100)


class Mute(Exception):
    def __str__(self):
        raise TypeError


def mute(snapshot):
    raise Mute


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (always(None), "'NoneType' object is not iterable"),
        (always(7), "'int' object is not iterable"),
        (always("abc"), "it decided a value of type str; a Decision"),
        (always([None]), "it decided a value of type NoneType; a Decision"),
        (always([Decision("task", Layout.single(0))]), "it decided a Decision(str, Layout)"),
        (NamedPolicy("mine.py", endless), "it decided a value of type str"),
        (NamedPolicy("mine.py", leave), "SystemExit: 0"),
        (NamedPolicy("mine.py", babble), "ValueError: first line second line and so on"),
        (NamedPolicy("mine.py", mute), "Mute: its message cannot be shown"),
    ],
)
def test_whatever_a_policy_returns_or_raises_is_a_named_fault_and_the_run_goes_on(policy, reason, caplog):
    control, recorder = simulated_control([make_job("a")])
    control.decider.policy = policy
    control.run()
    assert recorder.end_order == ["a"]
    faults = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
    assert faults[0].startswith("policy mine.py: ")
    assert all(len(text) < 400 and "\n" not in text for text in faults)


def test_ctrl_c_in_a_policy_ends_the_run():
    def interrupted(snapshot):
        raise KeyboardInterrupt

    control, _ = simulated_control([make_job("a")])
    control.decider.policy = NamedPolicy("mine.py", interrupted)
    with pytest.raises(KeyboardInterrupt):
        control.run()


def first_is_legal(snapshot):
    """One decision that is right, and five for the same rank."""
    job = next(iter(snapshot.open.values()))
    return [Decision(job.next_task, Layout.single(snapshot.free_ranks[0]))] * 6


def test_a_call_of_a_policy_counts_one_fault_however_much_is_wrong(caplog):
    control, _ = simulated_control([make_job("a"), make_job("b"), make_job("c")], num_ranks=8)
    control.decider.policy = NamedPolicy("mine.py", first_is_legal)
    control.begin()
    for event in control.backend.wait(until=0.0):
        control.record(event)
    assert len(control.dispatch(control.state.choice())) == 1
    assert control.decider.num_faults == 1
    control.run()
    messages = [record.getMessage() for record in caplog.records]
    assert sum("policy mine.py: " in message for message in messages) == 3
    assert not any(message.startswith("policy fcfs") for message in messages)


def test_the_rest_of_a_batch_with_an_illegal_decision_is_dropped():
    def confused(snapshot):
        jobs = list(snapshot.open.values())
        return [Decision(jobs[0].next_task, Layout.single(99)), *well_meant(jobs[1:])]

    def well_meant(jobs):
        return [Decision(job.next_task, Layout.single(rank)) for rank, job in enumerate(jobs)]

    control, recorder = simulated_control([make_job("a"), make_job("b")])
    control.decider.policy = NamedPolicy("mine.py", confused)
    control.run()
    assert [d.task.job_id for d in recorder.dispatches[:2]] == ["a", "b"]  # what fcfs decides
    assert sorted(recorder.end_order) == ["a", "b"]


def test_fcfs_is_not_replaced_by_itself():
    control, _ = simulated_control([make_job("a")], policy="fcfs")
    control.decider.policy = NamedPolicy("fcfs", lambda snapshot: "x")
    with pytest.raises(PolicyFault, match="policy fcfs failed 3 times"):
        control.run()


@pytest.mark.parametrize(("policy", "is_noted"), [("srtf,degree=8", True), ("srtf,degree=2", False)])
def test_more_ranks_than_there_are_is_noted_once(policy, is_noted, caplog):
    simulate([make_job("a")], policy=policy, num_ranks=2)
    assert caplog.text.count("a task has 2 ranks here at most, whatever the degree") == is_noted


def test_a_job_that_takes_longer_than_its_timeout_fails_and_the_others_go_on():
    jobs = [make_job("slow", steps=50, timeout_s=1.0, arrival_s=0.5), make_job("other", steps=30)]
    recorder = simulate(jobs, num_ranks=2)
    slow, other = recorder.outcomes
    assert (slow.info.job_id, slow.status) == ("slow", "failed")
    assert slow.error == "timed out 1 s after its arrival"
    assert slow.ended_s == pytest.approx(1.5, abs=STEP_S)
    assert other.status == "done"


def test_a_cancelled_job_ends_within_a_step_and_the_others_go_on():
    control, recorder = simulated_control([make_job("a", steps=50), make_job("b", steps=30)], num_ranks=2)
    control.clock.at(JobCancelled(1.05, "a"))
    summary = control.run()
    first, second = recorder.outcomes
    assert (first.info.job_id, first.status, second.status) == ("a", "cancelled", "done")
    assert first.ended_s == pytest.approx(1.05, abs=STEP_S)
    assert (summary.num_cancelled, summary.num_done, summary.num_failed) == (1, 1, 0)
    assert summary.lines()[0].startswith("jobs       1 done, 1 cancelled in")


def test_a_job_that_ends_within_its_timeout_is_done():
    (outcome,) = simulate([make_job("a", timeout_s=60.0)]).outcomes
    assert outcome.status == "done"


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


class Keeping(SimulatedBackend):
    """Notes when it is told to keep which job's state."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = []

    def save(self, job_id, *, next_index, producer, given_up):
        self.kept.append((job_id, next_index, self._clock.now_s))


def stopping_control(*signals_s):
    """Two jobs, one with steps that take a hundred times as long; begun."""
    control, recorder = simulated_control(
        [make_job("long"), make_job("short", steps=90)],
        num_ranks=2,
        task_s=lambda dispatch: 10.0 if dispatch.task.job_id == "long" else 0.1,
        backend=Keeping,
    )
    for at_s in signals_s:
        control.clock.at(StopRequested(at_s, 2))
    return control, recorder


def test_a_stopped_job_is_kept_when_its_own_step_has_ended():
    control, _ = stopping_control(5.05)
    control.run()
    short, long = control.backend.kept
    assert short == ("short", 51, pytest.approx(5.1))
    assert long == ("long", 1, pytest.approx(10.0))


def test_a_second_signal_loses_the_job_alone_whose_step_it_broke_off():
    control, _ = stopping_control(5.05, 6.0)
    with pytest.raises(InterruptedRunError):
        control.run()
    assert [job_id for job_id, _, _ in control.backend.kept] == ["short"]


def test_two_signals_at_once_lose_no_job_that_is_between_two_steps():
    control, _ = simulated_control(
        [make_job("a"), make_job("b")], num_ranks=1, task_s=lambda _: 1.0, backend=Keeping
    )

    def in_turn(snapshot):
        views = sorted(snapshot.open.values(), key=lambda view: view.next_task.index)
        return [Decision(views[0].next_task, Layout.single(0))] if snapshot.free_ranks and views else []

    control.decider.policy = NamedPolicy("in turn", in_turn)
    for _ in range(2):
        control.clock.at(StopRequested(6.5, 2))
    with pytest.raises(InterruptedRunError):
        control.run()
    assert [job_id for job_id, _, _ in control.backend.kept] == ["b"]


def test_what_closing_time_stops_is_kept_too():
    control, _ = stopping_control()
    control.clock.at(ClosingTime(5.05))
    control.run()
    assert [job_id for job_id, _, _ in control.backend.kept] == ["short", "long"]


class Failing(Keeping):
    """No file of "a" can be written, and each decode of "b" and step of "c" fails."""

    def wait(self, until):
        found = [self._failed(event) for event in super().wait(until)]
        return [each for each in found if not (isinstance(each, OutputWritten) and each.job_id == "b")]

    def _failed(self, event):
        if isinstance(event, OutputWritten) and event.job_id == "a":
            return OutputFailed(event.time_s, "a", "the disk is full")
        task = self.tasks.get(event.dispatch) if isinstance(event, TaskDone) else None
        if task and (task.job_id, task.stage) in (("b", Stage.DECODE), ("c", Stage.DENOISE)):
            return TaskFailed(event.time_s, event.dispatch, "out of memory")
        return event

    def submit(self, dispatch):
        self.tasks = {**getattr(self, "tasks", {}), dispatch.number: dispatch.task}
        super().submit(dispatch)


@pytest.mark.parametrize("may_come", [False, True])
def test_a_job_that_fails_after_its_last_step_is_kept_for_a_later_run_but_not_of_a_server(may_come):
    control, _ = simulated_control(
        [make_job(name) for name in "abc"],
        backend=Failing,
        intake=(lambda clock: Later(clock, make_job("d"))) if may_come else (lambda _: None),
    )
    control.run()
    decode = make_job("a").trajectory.num_tasks - 1
    kept = {job_id: index for job_id, index, _ in control.backend.kept}
    assert kept == ({} if may_come else {"a": decode, "b": decode})


@pytest.mark.parametrize(
    ("first_s", "others_s"),
    [(0.30, (0.27,)), (0.27, (0.267, 0.273)), (0.27, (0.268,)), (0.27, (0.272,))],
    ids=["slow at first", "varying", "slow at first by little", "quick at first"],
)
def test_the_next_step_is_queued_shortly_before_the_end_whatever_predictions_were_off_by(first_s, others_s):
    """Errors do not add up from step to step, and one of some percent does not last."""
    durations_s = itertools.chain([first_s], itertools.cycle(others_s))

    def task_s(dispatch):
        return next(durations_s) if dispatch.task.stage is Stage.DENOISE else 0.05

    recorder = simulate(
        [make_job("a", steps=60)], policy="fcfs", num_ranks=1, lookahead_s=0.005, task_s=task_s
    )
    ends_s = {event.dispatch: event.ended_s for event in recorder.events if isinstance(event, TaskDone)}
    steps = [dispatch for dispatch in recorder.dispatches if dispatch.task.stage is Stage.DENOISE]
    early_s = [ends_s[before.number] - after.submitted_s for before, after in itertools.pairwise(steps)]
    assert all(0.005 < each < 0.018 for each in early_s[20:])


def test_steps_that_move_to_other_ranks_are_queued_shortly_before_the_end_too():
    def by_turns(snapshot):
        for view in snapshot.open.values():
            rank = view.next_task.index % 2
            if rank in snapshot.free_ranks:
                yield Decision(view.next_task, Layout.single(rank))

    control, recorder = simulated_control(
        [make_job("a", steps=40)], num_ranks=2, lookahead_s=0.005, task_s=lambda _: 0.27
    )
    control.decider.policy = NamedPolicy("by turns", by_turns)
    control.run()
    ends_s = {event.dispatch: event.ended_s for event in recorder.events if isinstance(event, TaskDone)}
    early_s = [ends_s[b.number] - a.submitted_s for b, a in itertools.pairwise(recorder.dispatches)]
    assert all(0.005 < each < 0.015 for each in early_s[5:-1])


def writing(write_s):
    """A backend whose files take so long."""
    return lambda *args, times, **options: SimulatedBackend(
        *args, times=replace(times, write_s=lambda _: write_s), **options
    )


def test_a_job_gets_more_ranks_once_files_have_shown_how_long_they_take():
    """Its seven tasks on one rank leave three tenths of a second to its deadline, but a file takes five."""
    first, urgent = make_job("a"), make_job("b", uses_cfg=True, arrival_s=3.0, deadline_s=1.0)
    for write_s, degree in ((0.0, 1), (0.5, 2)):
        control, recorder = simulated_control([first, urgent], policy="edf", backend=writing(write_s))
        control.run()
        (step,) = [d for d in recorder.dispatches if d.task.job_id == "b" and d.task.step == 0]
        assert step.layout.degree == degree


@pytest.mark.parametrize("policy", ["fcfs", "srtf", "edf", "makespan"])
def test_decodes_wait_for_writers_that_are_slow(policy):
    """100 times as slow as all of a job; a few files for each rank are under way, and no more."""
    jobs = [make_job(f"job-{idx}", steps=1) for idx in range(60)]
    control, recorder = simulated_control(jobs, policy=policy, backend=writing(400 * STEP_S))
    under_way, most = set(), []
    control.observers += (watch := Observer(),)
    watch.dispatched = lambda dispatch: (
        under_way.add(dispatch.task.job_id) if dispatch.task.stage is Stage.DECODE else None,
        most.append(len(under_way)),
    )
    watch.ended = lambda outcome: under_way.discard(outcome.info.job_id)
    control.run()
    assert len(recorder.end_order) == 60
    assert max(most) == MIN_FILES


@pytest.mark.parametrize("ratio", [0.05, 0.6, 1.8, 20])
@pytest.mark.parametrize("steps", [5, 12])
def test_after_its_first_step_a_job_of_a_new_class_has_no_first_estimate_left(ratio, steps):
    """However long the server has run: renewals of views are rare then. All tasks take as long, so first
    estimates are `ratio` times too long. That of the decode stays: nothing was measured of it."""
    seen = []

    class Look(Observer):
        refresh_s = 0.0

        def refreshed(self, snapshot):
            for view in [*snapshot.busy.values(), *snapshot.open.values()]:
                if view.shape == "new" and 4 <= view.next_task.index < view.num_tasks:
                    seen.append(view.remaining_s / STEP_S - (view.num_tasks - view.next_task.index))

    usual = [make_job(f"old-{idx}", arrival_s=idx * 5.0) for idx in range(200)]
    new = make_job("new", steps=steps, shape="new", arrival_s=902.0)
    new = replace(new, flops=dict.fromkeys(Stage, ratio * 1e9))
    control, _ = simulated_control([*usual, new], num_ranks=1)
    control.observers = (*control.observers, Look())
    control._refresh_s = 0.0
    control.run()
    assert len(seen) >= steps - 3
    assert all(abs(off - (ratio - 1)) < 0.1 * steps for off in seen[1:]), seen


def test_a_run_without_a_disk_ends_early_if_nothing_that_is_left_fits():
    jobs = [make_job("a"), make_job("b", steps=90)]
    control, recorder = simulated_control(jobs, num_ranks=1, policy="fcfs", closes_s=5.0)
    control.run()
    assert recorder.end_order == ["a"]
    assert control.clock.now_s < 5.0


@pytest.mark.parametrize(("number", "named"), [(2, "0, 1"), (12, "0, 1, .*, 9, and 2 more jobs")])
def test_ten_of_the_jobs_that_wait_are_named(number, named):
    control, _ = simulated_control([make_job(f"{n}") for n in range(number)])
    control.decider.policy = NamedPolicy("lazy", lambda snapshot: [])
    with pytest.raises(StalledError, match=f"{number} jobs wait: {named}$"):
        control.run()
