"""Models that do not fit together take turns: whose it is, and when, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import STEP_S, Recorder, make_job
from journal_reader import read_runs
from replay import replay

from gfgen.graph import Stage
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.residency import COPY_BYTES_PER_S, LOAD_BYTES_PER_S, Residency
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import (
    Clock,
    LoadFailed,
    ModelsChanged,
    RankLoaded,
    RankLost,
    RankReady,
    StopRequested,
)
from gfgen.runtime.files.journal import Journal, journal_header
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.simulate.simulation import SimulatedBackend, SimulatedTimes
from gfgen.snapshot import Decision

GB = 10**9
WEIGHTS = {Path("wan"): 24 * GB, Path("qwen"): 58 * GB, Path("moe"): 69 * GB}
LOAD_S = {str(path): size / LOAD_BYTES_PER_S for path, size in WEIGHTS.items()}


def job_of(model: str, job_id: str, **fields: Any) -> AdmittedJob:
    job = make_job(job_id, **fields)
    spec = replace(job.spec, model=model)
    return replace(job, info=replace(job.info, spec=spec, asked=spec), checkpoint=Path(model))


def residency_of(jobs: Sequence[AdmittedJob], *, room: int, work: int = 0) -> Residency:
    return Residency(jobs, weights=WEIGHTS, work_bytes=lambda _: work, room_bytes=room)


def controlled(
    jobs: Sequence[AdmittedJob],
    *,
    room: int = 60 * GB,
    policy: str = "srtf",
    num_ranks: int = 2,
    lookahead_s: float = 0.0,
    step_s: float = STEP_S,
    path: Path | None = None,
    closes_s: float | None = None,
    backend: type[SimulatedBackend] = SimulatedBackend,
) -> tuple[Control, Recorder]:
    """A control loop over simulated ranks with so much room for models."""
    clock, recorder, residency = Clock(virtual=True), Recorder(), residency_of(jobs, room=room)
    state = State(
        jobs,
        RunStart(
            num_ranks=num_ranks, lookahead_s=lookahead_s, closes_s=closes_s, resident=residency.resident
        ),
        clock=clock,
        costs=CostModel(),
    )
    journal = None
    if path is not None:
        header = journal_header(
            [job.info for job in jobs],
            RunStart(
                num_ranks=num_ranks,
                lookahead_s=lookahead_s,
                started_at=0.0,
                closes_s=closes_s,
                resident=residency.resident,
            ),
            policy=policy,
        )
        journal = Journal(path, header=header)
    control = Control(
        jobs,
        state=state,
        backend=backend(
            clock, num_ranks=num_ranks, times=SimulatedTimes(task_s=lambda _: step_s, write_s=lambda _: 0.01)
        ),
        policy=load_policy(policy),
        observers=[recorder],
        journal=journal,
        steering=Steering(residency=residency),
    )
    return control, recorder


def changes(recorder: Recorder) -> list[tuple[str, ...]]:
    return [tuple(event.models) for event in recorder.events if isinstance(event, ModelsChanged)]


class Spy(SimulatedBackend):
    """Notes what ranks are told to hold."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.told: list[list[str]] = []

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        self.told.append(sorted(models))
        super().load(models, load_s=load_s)


def test_ranks_are_told_to_keep_a_model_whose_jobs_have_all_ended():
    jobs = [job_of("wan", "a"), job_of("qwen", "b", arrival_s=0.1), job_of("moe", "c", arrival_s=900.0)]
    control, recorder = controlled(jobs, room=100 * GB, backend=Spy)
    control.run()
    assert changes(recorder) == [("moe", "wan")]
    assert control.backend.told == [["moe", "wan"]]


def test_models_part_when_a_job_comes_that_is_too_large_beside_both():
    sizes = {"small": 1 * GB, "large": 30 * GB}
    small, large = job_of("wan", "small"), job_of("wan", "large")
    residency = Residency(
        [small],
        weights=WEIGHTS,
        work_bytes=lambda job: sizes[job.job_id],
        room_bytes=90 * GB,
        names={"wan": Path("wan"), "qwen": Path("qwen")},
    )
    assert residency.resident == {"wan", "qwen"}
    residency.note([large])
    event = residency.change(idle_state(["wan"]), now_s=5.0)
    assert event is not None
    assert event.models == ("wan",)


def test_two_models_that_fit_together_stay_while_a_third_waits():
    jobs = [job_of("wan", "a"), job_of("qwen", "b"), job_of("moe", "c")]
    residency = residency_of(jobs, room=100 * GB)
    assert residency.resident == {"wan", "qwen"}
    assert residency.change(idle_state(["wan", "qwen"], parked=["c"]), now_s=1.0) is None


def test_a_model_that_does_not_fit_beside_its_own_jobs_gives_way_when_nothing_of_it_is_left():
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    residency = residency_of(jobs, room=60 * GB, work=50 * GB)
    state = idle_state([], parked=["b"])
    state.models.wanted = lambda: ["qwen"]
    assert residency.change(state, now_s=1.0) is None, "jobs of it run"
    state.is_at_rest = True
    state.models.parked = {"b": SimpleNamespace(model="qwen", since_s=0.0)}
    event = residency.change(state, now_s=1.0)
    assert event is not None
    assert (event.models, event.reason) == (("qwen",), "nothing is left to do with the others")


def idle_state(at_work: Sequence[str], *, parked: Sequence[str] = ()) -> Any:
    """What a residency asks a state; whoever looks at each job that waits is told so."""

    def look_at_jobs() -> Sequence[str]:
        raise AssertionError("asked for models that jobs wait for")

    turns = SimpleNamespace(
        parked=parked,
        urgent=(),
        resident={"wan", "qwen"},
        wanted=look_at_jobs if parked else list,
    )
    return SimpleNamespace(
        models=turns,
        ranks=SimpleNamespace(records=[]),
        jobs=SimpleNamespace(models_at_work=set(at_work)),
        is_at_rest=False,
    )


# A model that no rank can load --------------------------------------------------------------------


class WithoutQwen(Spy):
    """Ranks that cannot load a model: the last one to say so dies."""

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        super().load(models, load_s=load_s)
        if "qwen" in models:
            self._clock.at(LoadFailed(self._clock.now_s + load_s, ("qwen",), "rank 0: no such file"))


def test_jobs_of_a_model_that_no_rank_can_load_fail_with_the_reason_and_the_batch_goes_on():
    jobs = [job_of(model, f"{model}-{n}") for n in range(2) for model in ("wan", "qwen", "moe")]
    control, recorder = controlled(jobs, room=70 * GB, backend=WithoutQwen)
    summary = control.run()
    assert (summary.num_done, summary.num_failed, summary.num_unfinished) == (4, 2, 0)
    failed = {o.info.job_id: o.error for o in recorder.outcomes if o.status == "failed"}
    assert failed == dict.fromkeys(["qwen-0", "qwen-1"], "model qwen cannot be loaded: rank 0: no such file")
    assert changes(recorder) == [("qwen",), ("moe",)]


def test_a_model_that_could_not_be_loaded_is_tried_again_for_jobs_that_come_long_after():
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    jobs += [job_of("qwen", "soon", arrival_s=300.0), job_of("qwen", "later", arrival_s=900.0)]
    control, recorder = controlled(jobs, backend=WithoutQwen)
    assert control.run().num_failed == 3
    ends = {outcome.info.job_id: outcome.ended_s for outcome in recorder.outcomes}
    assert ends["soon"] == 300.0
    assert ends["later"] > 900.0
    assert changes(recorder) == [("qwen",), ("qwen",)]


def test_nothing_but_a_model_that_cannot_be_loaded_leaves_a_run_that_ends():
    control, _ = controlled([job_of("wan", "a"), job_of("qwen", "b")], backend=WithoutQwen, path=None)
    summary = control.run()
    assert (summary.num_done, summary.num_failed) == (1, 1)
    assert control.state.finished


def test_a_run_in_which_a_model_could_not_be_loaded_decides_the_same_again(tmp_path: Path):
    jobs = [job_of(("wan", "qwen", "moe")[n % 3], f"job-{n}", arrival_s=0.7 * n) for n in range(9)]
    path = tmp_path / "journal.jsonl"
    control, recorder = controlled(jobs, room=70 * GB, path=path, backend=WithoutQwen)
    control.run()
    control.journal.close()
    (journaled,) = read_runs(path)
    outcome = replay(journaled, jobs)
    assert (outcome.difference, outcome.num_dispatches) == (None, len(recorder.dispatches))


# Nothing to do, nothing to pay --------------------------------------------------------------------


def test_turns_of_the_loop_in_which_nothing_is_to_be_changed_look_at_no_jobs():
    residency = residency_of([job_of("wan", "a"), job_of("qwen", "b")], room=60 * GB)
    assert residency.change(idle_state([]), now_s=1.0) is None
    assert residency.change(idle_state([], parked=["a"]), now_s=1.0) is None


# Which models ----------------------------------------------------------------------------------


def test_models_that_fit_together_are_all_resident():
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    assert not residency_of(jobs, room=82 * GB).is_needed
    assert residency_of(jobs, room=82 * GB - 1).is_needed


def test_the_largest_job_needs_room_beside_the_weights():
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    assert not residency_of(jobs, room=90 * GB, work=8 * GB).is_needed
    assert residency_of(jobs, room=90 * GB, work=9 * GB).is_needed


def test_ranks_that_share_their_memory_need_room_for_as_many_jobs_as_they_run_at_once():
    jobs = [job_of("wan", "a"), job_of("wan", "b"), job_of("qwen", "c"), job_of("qwen", "d")]
    sizes = {"a": 6 * GB, "b": 1 * GB, "c": 5 * GB, "d": 2 * GB}

    def is_needed(num_ranks: int, room: int) -> bool:
        return Residency(
            jobs,
            weights=WEIGHTS,
            work_bytes=lambda job: sizes[job.job_id],
            room_bytes=room,
            jobs_at_once=num_ranks,
        ).is_needed

    for num_ranks, work in ((1, 6), (2, 11), (3, 13), (4, 14), (8, 14)):
        assert not is_needed(num_ranks, (82 + work) * GB)
        assert is_needed(num_ranks, (82 + work) * GB - 1)


def test_one_model_stays_although_its_jobs_do_not_all_fit_at_once():
    jobs = [job_of("wan", str(number)) for number in range(4)]
    residency = Residency(jobs, weights=WEIGHTS, work_bytes=lambda _: GB, room_bytes=26 * GB, jobs_at_once=4)
    assert residency.resident == {"wan"}
    assert residency.change(idle_state([]), now_s=5.0) is None


def test_the_first_to_be_resident_is_the_model_of_the_most_urgent_job():
    jobs = [job_of("wan", "late", arrival_s=1.0), job_of("qwen", "a"), job_of("moe", "b", priority=1)]
    assert residency_of(jobs, room=70 * GB).resident == {"moe"}
    assert residency_of(jobs, room=94 * GB).resident == {"moe", "wan"}
    assert residency_of(jobs[:2], room=60 * GB).resident == {"qwen"}


def test_one_model_under_two_names_counts_once():
    jobs = [job_of("qwen", "a"), replace(job_of("./qwen", "b"), checkpoint=Path("qwen"))]
    assert not residency_of(jobs, room=58 * GB).is_needed


def test_a_model_without_jobs_comes_last():
    jobs = [job_of("qwen", "a")]
    found = Residency(
        jobs, weights=WEIGHTS, work_bytes=lambda _: 0, room_bytes=60 * GB, names={"wan": Path("wan")}
    )
    assert found.resident == {"qwen"}
    assert found.checkpoints == [Path("qwen")]
    assert found.is_needed


def test_models_are_known_before_any_job_wants_them():
    """A server has models and no jobs when it starts."""
    names = {name: Path(name) for name in ("wan", "qwen")}
    found = Residency([], weights=WEIGHTS, work_bytes=lambda _: 0, room_bytes=60 * GB, names=names)
    assert (found.resident, found.is_needed) == ({"wan"}, True)


# Whose turn, and when --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["legacy", "fcfs", "srtf", "edf", "triage", "makespan", "auto"])
@pytest.mark.parametrize("lookahead_s", [0.0, 0.05])
def test_a_batch_of_two_models_changes_them_once(policy: str, lookahead_s: float):
    jobs = [job_of(model, f"{model}-{n}", steps=3 + n) for n in range(4) for model in ("wan", "qwen")]
    control, recorder = controlled(jobs, policy=policy, lookahead_s=lookahead_s)
    summary = control.run()
    assert summary.num_done == 8
    assert changes(recorder) == [("qwen",)]
    models = [job_id.split("-")[0] for job_id in recorder.end_order]
    assert models == ["wan"] * 4 + ["qwen"] * 4


def test_a_change_keeps_what_has_room():
    jobs = [job_of(model, model) for model in ("wan", "qwen", "moe")]
    control, recorder = controlled(jobs, room=95 * GB)
    control.run()
    assert changes(recorder) == [("moe", "wan")]


def test_nothing_is_begun_on_a_rank_before_it_has_loaded():
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    control, recorder = controlled(jobs)
    control.run()
    (change,) = [event for event in recorder.events if isinstance(event, ModelsChanged)]
    loaded = [event for event in recorder.events if isinstance(event, RankLoaded)]
    assert [event.rank for event in loaded] == [0, 1]
    assert change.load_s == LOAD_S["qwen"]
    first = next(dispatch for dispatch in recorder.dispatches if dispatch.task.job_id == "b")
    assert first.submitted_s == pytest.approx(change.time_s + change.load_s)


def test_ranks_that_load_are_predicted_free_when_they_have_loaded():
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    control, _ = controlled(jobs, num_ranks=1)
    seen = []

    def look(snapshot: Any) -> list[Decision]:
        seen.append(snapshot)
        return list(load_policy("srtf").decide(snapshot))

    control.decider.policy = NamedPolicy("looking", look)
    change = ModelsChanged(0.0, ("qwen",), 5.0, "as told")
    control.state.apply(RankReady(0.0, 0, 1, 0.0))
    control.state.apply(change)
    (view,) = control.state.snapshot().ranks
    assert (view.free_at_s, view.can_take, view.models) == (5.0, False, frozenset())
    control.state.apply(RankLoaded(4.0, 0, 4.0))
    (view,) = control.state.snapshot().ranks
    assert (view.free_at_s, view.can_take, view.models) == (4.0, True, {"qwen"})


def test_a_rank_that_dies_while_it_loads_comes_back_with_the_new_models():
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    control, _ = controlled(jobs, num_ranks=2)
    state = control.state
    for event in (
        RankReady(0.0, 0, 1, 0.0),
        RankReady(0.0, 1, 1, 0.0),
        ModelsChanged(0.0, ("qwen",), 5.0, "as told"),
        RankLost(1.0, 0, 1, "killed"),
        RankLoaded(5.0, 1, 5.0),
        RankReady(6.0, 0, 2, 5.0),
    ):
        state.apply(event)
    assert not any(rank.is_loading for rank in state.ranks.records)
    assert state.snapshot().free_ranks == (0, 1)


def test_jobs_that_wait_get_their_turn_after_a_hundred_times_the_change():
    long = job_of("wan", "long", steps=100_000)
    control, recorder = controlled([long, job_of("qwen", "short")], num_ranks=1, step_s=10.0)
    control.clock.at(StopRequested(20_000.0, 2))
    control.run()
    first, second = [event for event in recorder.events if isinstance(event, ModelsChanged)]
    longest_s = max(LOAD_S["wan"], LOAD_S["qwen"])
    assert first.models == ("qwen",)
    assert first.time_s == pytest.approx(100 * longest_s, abs=20)
    assert second.models == ("wan",)  # nothing is left of the other one
    assert recorder.end_order == ["short"]
    assert second.time_s - first.time_s < 200


@pytest.mark.parametrize("fields", [{"deadline_s": 1e6}, {"priority": 1, "arrival_s": 1.0}])
def test_jobs_with_a_deadline_or_a_raised_priority_get_it_after_ten_times_the_change(fields):
    long = job_of("wan", "long", steps=100_000)
    control, recorder = controlled([long, job_of("qwen", "short", **fields)], num_ranks=1, step_s=10.0)
    control.clock.at(StopRequested(2_000.0, 2))
    control.run()
    (first, _) = [event for event in recorder.events if isinstance(event, ModelsChanged)]
    assert first.time_s == pytest.approx(10 * LOAD_S["qwen"], abs=20)


def test_models_do_not_take_turns_for_a_deadline_that_comes_after_those_of_all_jobs_that_run():
    jobs = [job_of("wan", f"first-{n}", steps=9, deadline_s=1e6) for n in range(4)]
    later = job_of("qwen", "later", deadline_s=2e6)
    control, recorder = controlled([*jobs, later], num_ranks=1, step_s=10.0)
    control.run()
    assert recorder.end_order[-1] == "later"
    assert len([event for event in recorder.events if isinstance(event, ModelsChanged)]) == 1


def test_a_job_without_a_deadline_gets_its_turn_among_those_with_one_that_never_end():
    others = [
        job_of(("wan", "qwen")[n % 2], f"job-{n}", arrival_s=10.0 * n, deadline_s=5000.0) for n in range(1500)
    ]
    control, recorder = controlled(
        [*others, job_of("moe", "patient", arrival_s=200.0)], room=70 * GB, num_ranks=1
    )
    control.run()
    (ended_s,) = [outcome.ended_s for outcome in recorder.outcomes if outcome.info.job_id == "patient"]
    assert ended_s == pytest.approx(200.0 + 100 * LOAD_S["moe"], rel=0.05)


def test_there_are_no_more_changes_than_jobs():
    """Each arrives when the ranks hold the other model, and have nothing to do."""
    jobs = [job_of(("wan", "qwen")[n % 2], f"job-{n}", arrival_s=200.0 * n) for n in range(10)]
    control, recorder = controlled(jobs)
    assert control.run().num_done == 10
    assert len(changes(recorder)) == 9


def test_streamed_weights_are_loaded_too_but_take_no_room():
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    streamed = {Path("qwen"): 30 * GB}
    found = Residency(jobs, weights=WEIGHTS, work_bytes=lambda _: 0, room_bytes=60 * GB, streamed=streamed)
    assert found.resident == {"wan"}
    assert found.load_times == {"qwen": LOAD_S["qwen"] + 30 * GB / LOAD_BYTES_PER_S}
    assert not Residency(
        jobs, weights=WEIGHTS, work_bytes=lambda _: 0, room_bytes=82 * GB, streamed=streamed
    ).is_needed


def test_a_measured_change_makes_the_next_one_predictable():
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    found = residency_of(jobs, room=60 * GB)
    found.applied(RankReady(0.0, 0, 1, startup_s=2.0))  # 24 GB in 2 s
    assert found._load_s({"qwen"}) == pytest.approx(58 / 12)
    found.applied(ModelsChanged(1.0, ("qwen",), 58 / 12, ""))
    found.applied(RankLoaded(11.0, 0, 10.0))
    assert found._load_s({"wan"}) == pytest.approx(24 / 5.8)


def test_a_model_with_a_copy_in_main_memory_comes_back_in_the_time_of_a_copy():
    jobs = [job_of("wan", "a"), job_of("qwen", "b"), job_of("moe", "c")]
    found = residency_of(jobs, room=70 * GB)
    found.kept = {Path("wan"): 24 * GB, Path("qwen"): 58 * GB}
    found.applied(RankReady(0.0, 0, 1, startup_s=24.0))
    found.applied(ModelsChanged(30.0, ("qwen",), 58.0, ""))
    assert found._load_s({"wan"}) == pytest.approx(24e9 / COPY_BYTES_PER_S), "ranks have held it"
    found.applied(RankLoaded(90.0, 0, 58.0))
    assert found.load_times == pytest.approx({"wan": 24e9 / COPY_BYTES_PER_S, "moe": 69.0})
    found.applied(ModelsChanged(100.0, ("wan",), 0.5, ""))
    found.applied(RankLoaded(101.0, 0, 1.0, ("wan",)))
    assert found.load_times == pytest.approx({"qwen": 58 / 24, "moe": 69.0}), "the copy's rate as measured"
    found.applied(RankLoaded(130.0, 1, 48.0))
    assert found.load_times == pytest.approx({"qwen": 58 / 24, "moe": 138.0}), (
        "of a rank that died, the disk's"
    )


def test_a_job_that_times_out_while_it_waits_for_its_model_fails():
    jobs = [job_of("wan", "long", steps=500), job_of("qwen", "parked", timeout_s=1.0)]
    control, recorder = controlled(jobs)
    control.run()
    assert [(o.info.job_id, o.status) for o in recorder.outcomes] == [("parked", "failed"), ("long", "done")]
    assert changes(recorder) == []


def test_models_are_not_changed_for_what_could_not_begin_before_closing_time():
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    control, recorder = controlled(jobs, closes_s=LOAD_S["qwen"])
    summary = control.run()
    assert (summary.num_done, summary.num_unfinished) == (1, 1)
    assert changes(recorder) == []
    assert control.clock.now_s < 1.0, "nothing can be done until it closes"


@pytest.mark.parametrize("later_s", [0.0, 1e-9])
def test_models_are_not_changed_if_the_change_ends_exactly_at_closing_time(later_s: float):
    """The seven tasks of the first job end at 0.875 s."""
    jobs = [job_of("wan", "a"), job_of("qwen", "b")]
    control, recorder = controlled(jobs, step_s=0.125, closes_s=0.875 + LOAD_S["qwen"] + later_s)
    control.run()
    assert changes(recorder) == [("qwen",)] * (later_s > 0)


def test_a_policy_that_decides_for_a_parked_job_is_told_so():
    control, _ = controlled([job_of("wan", "a"), job_of("qwen", "b")], num_ranks=1)
    parked = control._jobs[1]

    def stubborn(snapshot: Any) -> list[Decision]:
        view = next(iter(snapshot.open.values()))
        return [Decision(parked.trajectory.task(0), view.layout(snapshot.free_ranks))]

    control.decider.policy = NamedPolicy("stubborn", stubborn)
    control.run()
    assert control.decider.given_up == "job b: ranks do not hold qwen now"


@pytest.mark.parametrize("policy", ["srtf", "edf", "auto"])
@pytest.mark.parametrize("lookahead_s", [0.0, 0.2])
def test_a_run_with_changes_decides_the_same_again(tmp_path: Path, policy: str, lookahead_s: float):
    jobs = [
        job_of(("wan", "qwen", "moe")[n % 3], f"job-{n}", steps=2 + n % 4, arrival_s=0.7 * n, deadline_s=50.0)
        for n in range(12)
    ]
    path = tmp_path / "journal.jsonl"
    control, recorder = controlled(jobs, room=85 * GB, policy=policy, lookahead_s=lookahead_s, path=path)
    control.run()
    control.journal.close()
    assert changes(recorder)
    (journaled,) = read_runs(path)
    outcome = replay(journaled, jobs)
    assert outcome.difference is None
    assert outcome.num_dispatches == len(recorder.dispatches)


def test_a_job_that_was_parked_in_the_middle_goes_on_where_it_was():
    jobs = [job_of("wan", "long", steps=300, priority=0), job_of("qwen", "short", deadline_s=1e5)]
    control, recorder = controlled(jobs, num_ranks=1, step_s=10.0)
    control.run()
    assert recorder.end_order == ["short", "long"]
    steps = [d.task.step for d in recorder.dispatches if d.task.job_id == "long"]
    assert [step for step in steps if step is not None] == list(range(300))
    assert {d.task.stage for d in recorder.dispatches} == set(Stage) - {Stage.APPROXIMATE, Stage.REFINE}
