"""Owners get equal shares of the ranks, and jobs start where their patches are, whatever the policy."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from builders import STEP_S, Recorder, make_job, simulate
from test_policies import placed, snapshot, view

from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.policies import fair_share
from gfgen.policies.catalog import BUILT_IN
from gfgen.policies.fair_share import PATIENCE_S, Shares, shared, with_held_patches
from gfgen.policies.srtf import srtf
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import TaskDone
from gfgen.snapshot import Decision, RunningTask

POLICIES = [*sorted(BUILT_IN), "fcfs,degree=4", "triage,degree=4"]


def jobs_of(owner, number, **fields):
    return [make_job(f"{owner}-{index}", owner=owner, **fields) for index in range(number)]


def rank_seconds(recorder, *, until_s):
    """By owner, of the tasks that had ended by then."""
    done = {event.dispatch: event for event in recorder.events if hasattr(event, "times")}
    served = Counter()
    for dispatch in recorder.dispatches:
        event = done[dispatch.number]
        if event.time_s <= until_s:
            served[dispatch.task.job_id.partition("-")[0]] += event.rank_s
    return served


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_ranks", "lookahead_s"), [(1, 0.01), (4, 0.0)])
def test_an_owner_with_urgent_short_jobs_leaves_the_others_their_share(policy, num_ranks, lookahead_s):
    greedy = jobs_of("greedy", 30, steps=2, priority=9, deadline_s=5.0)
    modest = jobs_of("modest", 2 * num_ranks, steps=10, arrival_s=1.0)
    options = {"policy": policy, "num_ranks": num_ranks, "lookahead_s": lookahead_s}
    recorder = simulate([*greedy, *modest], **options)
    alone_s = rank_seconds(recorder, until_s=1.0)["greedy"]
    served = rank_seconds(recorder, until_s=3.0)
    assert served["modest"] == pytest.approx(served["greedy"] - alone_s, abs=3 * num_ranks * STEP_S)
    assert len(recorder.outcomes) == len(greedy) + len(modest)


@pytest.mark.parametrize("policy", POLICIES)
def test_three_owners_on_four_ranks_get_a_third_of_what_one_would_get(policy):
    def served(owners):
        jobs = [job for owner in owners for job in jobs_of(owner, 24 // len(owners), steps=10)]
        return rank_seconds(simulate(jobs, policy=policy, num_ranks=4), until_s=6.0)

    third = served(["alone"])["alone"] / 3
    assert served(["a", "b", "c"]) == {owner: pytest.approx(third, abs=1.0) for owner in "abc"}


def test_ranks_that_an_owner_does_not_need_go_to_the_others():
    recorder = simulate([*jobs_of("one", 1, steps=50), *jobs_of("many", 40)], policy="srtf", num_ranks=4)
    served = rank_seconds(recorder, until_s=5.0)
    assert served["one"] == pytest.approx(5.0, abs=2 * STEP_S)
    assert served["many"] == pytest.approx(15.0, abs=5 * STEP_S)


def test_an_owner_without_jobs_saves_nothing_up():
    shares = Shares()
    shares.arrive("busy")
    shares.serve("busy", 100.0)
    shares.arrive("late")
    assert shares.served_s == {"busy": 100.0, "late": 100.0}
    shares.serve("late", 5.0)
    for owner in ("busy", "late"):
        shares.leave(owner)
    shares.check()
    shares.arrive("late")
    assert len(set(itertools.chain(shares.served_s.values()))) == 1


def test_after_a_task_that_is_too_wide_for_a_share_a_narrow_one_may_start():
    """Of two owners on four ranks one holds a rank. What is not legal is passed on: the state refuses it."""
    jobs = [replace(view(name), owner=name[0]) for name in ("a-wide", "a-narrow", "b-other")]
    held = RunningTask(Task("a-held", 2, Stage.DENOISE, 0), Layout.single(3), 1.0, owner="a")
    picture = replace(snapshot(*jobs, free=(0, 1, 2), num_ranks=4, max_degree=4), running=(held,))
    picture = replace(picture, served_s={"a": 0.0, "b": 0.0})

    def policy(seen):
        free = seen.free_ranks
        if "b-other" in seen.open:
            return [Decision(jobs[2].next_task, Layout.single(free[0]))]
        wide = [Decision(jobs[0].next_task, Layout(free[:2], ulysses=2))] if len(free) > 1 else []
        gone = Decision(Task("a-gone", 2, Stage.DENOISE, 0), Layout.single(free[0]))
        narrow = [Decision(jobs[1].next_task, Layout.single(free[-1]))] if "a-narrow" in seen.open else []
        return [gone, *wide, *narrow]

    decided = placed(shared(policy, picture))
    assert (decided.pop("b-other"), decided.pop("a-narrow"), decided.keys()) == ((0,), (2,), {"a-gone"})


# Patches that ranks hold --------------------------------------------------------------------------

NUM_JOBS, NUM_LORAS = 300, 20


def jobs_with_loras(*, spread_s: float = 0.0) -> list[AdmittedJob]:
    rng = Random(0)
    return [
        make_job(
            f"job-{idx}",
            lora=[{"sha256": f"{rng.randrange(NUM_LORAS)}", "scale": 1.0}],
            lora_files=["style.safetensors"],
            arrival_s=idx * spread_s,
        )
        for idx in range(NUM_JOBS)
    ]


def share_of_switches(recorder: Recorder) -> float:
    busy_s = sum(event.rank_s for event in recorder.events if isinstance(event, TaskDone))
    return sum(each.switch_s * each.layout.degree for each in recorder.dispatches) / busy_s


@pytest.mark.parametrize("policy", [*sorted(set(BUILT_IN) - {"legacy"}), "triage,degree=4"])
def test_many_jobs_over_many_loras_spend_little_time_switching(policy: str) -> None:
    recorder = simulate(jobs_with_loras(), policy=policy, num_ranks=4)
    assert len(recorder.outcomes) == NUM_JOBS
    assert share_of_switches(recorder) < 0.05


def test_without_the_preference_they_switch_for_nearly_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "NOTABLE", float("inf"))
    recorder = simulate(jobs_with_loras(), policy="srtf", num_ranks=4)
    assert share_of_switches(recorder) > 0.05


def test_a_job_is_overtaken_only_by_jobs_that_arrived_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "PATIENCE_S", 1.0)
    recorder = simulate(jobs_with_loras(spread_s=0.05), policy="fcfs", num_ranks=2)
    started = [each.task.job_id for each in recorder.dispatches if each.task.index == 0]
    arrivals_s = [0.05 * int(job_id.removeprefix("job-")) for job_id in started]
    latest_s = 0.0
    for arrival_s in arrivals_s:
        assert arrival_s > latest_s - 1.0 - 1e-9
        latest_s = max(latest_s, arrival_s)


def holding(patches, *jobs, free=(0,)):
    picture = snapshot(*jobs, free=free)
    ranks = [replace(rank, patches={"m": each}) for rank, each in zip(picture.ranks, patches, strict=True)]
    return replace(picture, ranks=tuple(ranks))


def with_patches(job_id, patches, *, switch_s=1.0, **fields):
    fresh = {"next_task": Task(job_id, 0, Stage.ENCODE)}
    return replace(view(job_id, **fields), patches=patches, switch_s=switch_s, **fresh)


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, "held"),
        ({"arrival_s": PATIENCE_S}, "held"),
        ({"arrival_s": PATIENCE_S + 1}, "new"),
        ({"remaining_s": 9.0}, "held"),
        ({"deadline_s": 90.0}, "new"),
        ({"priority": 1}, "held"),
    ],
)
def test_an_equal_job_whose_patches_a_rank_holds_goes_first(fields, first):
    new, held = with_patches("new", "a"), with_patches("held", "b", **fields)
    picture = holding(["b", "c"], new, held)
    assert set(placed(with_held_patches(picture, srtf(picture)))) == {first}


@pytest.mark.parametrize(("switch_s", "first"), [(0.05, "held"), (0.04, "new")])
def test_a_switch_that_takes_little_of_a_job_does_not_matter(switch_s, first):
    new, held = (
        with_patches(name, patches, switch_s=switch_s) for name, patches in (("new", "a"), ("held", "b"))
    )
    picture = holding(["b", "c"], new, held)
    assert set(placed(with_held_patches(picture, srtf(picture)))) == {first}


def test_several_ranks_get_a_job_each_whose_patches_they_hold():
    jobs = [with_patches(f"{patches}-{n}", patches) for n in range(3) for patches in "ab"]
    picture = holding(["b", "a"], *jobs, free=(0, 1))
    decided = with_held_patches(picture, srtf(picture))
    assert {ranks: job_id[0] for job_id, ranks in placed(decided).items()} == {(0,): "b", (1,): "a"}
