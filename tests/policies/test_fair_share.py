"""Owners of jobs get equal shares of the ranks, whatever the policy."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from builders import STEP_S, make_job, simulate

from gfgen.policies.catalog import BUILT_IN
from gfgen.policies.fair_share import Shares

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
