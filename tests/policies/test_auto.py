"""What auto chooses, from outlooks that are given, and in simulations ahead."""

import functools
import math
from dataclasses import replace

import pytest
from builders import Recorder, make_job, simulated_control
from test_policies import decoding, view
from test_triage import WorkCosts, four_ranks

from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.policies.auto import auto, choose_auto
from gfgen.policies.catalog import load_policy
from gfgen.policies.triage import triage
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.simulate.choosers import ImmediateChooser
from gfgen.runtime.simulate.simulation import simulate
from gfgen.snapshot import Choice, Outlook

FILE = ("triage 2", "triage 1", "triage 4", "srtf 4", "makespan", "fcfs")
DUE = ("triage 2", "triage 4", "srtf 4", "lenient 1")

LENIENT = "triage,degree=1,lenient=true"


class LossyCosts(WorkCosts):
    """Twice the ranks save a third of a step."""

    def task_s(self, task, layout):
        return super().task_s(task, Layout.single(0)) * 0.67 ** math.log2(layout.degree)


def foreseeing(outlooks, *, deadline_s=50, num_jobs=2, costs=LossyCosts, expects_more=False):
    """A snapshot whose looks ahead find these outlooks, by the policy's name and degree."""

    def foresee(policy):
        if isinstance(policy, functools.partial):
            name = "lenient" if policy.keywords.get("lenient") else policy.func.__name__
            return outlooks[f"{name} {policy.keywords['degree']}"]
        return outlooks[policy.__name__]

    jobs = [view(f"job-{n}", deadline_s=deadline_s) for n in range(num_jobs)]
    return replace(four_ranks(*jobs), foresee=foresee, costs=costs(*jobs), expects_more=expects_more)


def outlook(*, late=0, lost=0, latency_s=5.0, end_s=60.0, spread=0.05):
    return Outlook(30, late, lost, latency_s, end_s, spread=spread)


def test_auto_has_one_rank_per_job_until_it_has_chosen():
    picture = four_ranks(view("a", deadline_s=50), view("b", deadline_s=60))
    assert auto(picture) == triage(picture, degree=1)
    assert choose_auto(picture) is None


def test_late_jobs_come_before_all_else():
    ahead = dict.fromkeys(DUE, outlook(late=8)) | {"srtf 4": outlook(late=3, end_s=90.0, latency_s=9.0)}
    assert choose_auto(foreseeing(ahead)).policy == "srtf,degree=4"


@pytest.mark.parametrize(
    ("expects_more", "end_s", "chosen"),
    [(False, 61.0, "triage,degree=1"), (False, 62.0, "triage,degree=2"), (True, 62.0, "triage,degree=1")],
)
def test_the_end_of_a_file_comes_before_the_mean_latency(expects_more, end_s, chosen):
    ahead = dict.fromkeys(FILE, outlook()) | {"triage 1": outlook(end_s=end_s, latency_s=4.0)}
    assert choose_auto(foreseeing(ahead, deadline_s=math.inf, expects_more=expects_more)).policy == chosen


@pytest.mark.parametrize(("end_s", "chosen"), [(58.5, "makespan"), (59.5, "triage,degree=2")])
def test_orders_for_the_end_are_candidates_for_files_without_deadlines(end_s, chosen):
    ahead = dict.fromkeys(FILE, outlook()) | {"makespan": outlook(end_s=end_s, latency_s=9.0)}
    assert choose_auto(foreseeing(ahead, deadline_s=math.inf)).policy == chosen


@pytest.mark.parametrize(("late", "chosen"), [(4, LENIENT), (5, LENIENT), (7, "triage,degree=2")])
def test_a_job_that_is_too_late_for_a_patient_client_counts_twice(late, chosen):
    ahead = dict.fromkeys(DUE, outlook(late=4, lost=3)) | {"lenient 1": outlook(late=late)}
    assert choose_auto(foreseeing(ahead)).policy == chosen


@pytest.mark.parametrize(("late", "chosen"), [(2, "triage,degree=2"), (3, "srtf,degree=4")])
def test_the_present_policy_is_left_for_more_than_two_late_jobs(late, chosen):
    ahead = dict.fromkeys(DUE, outlook(late=late)) | {"srtf 4": outlook()}
    assert choose_auto(foreseeing(ahead), Choice("triage,degree=2", "")).policy == chosen


def test_one_rank_has_two_candidates_with_deadlines():
    picture = replace(foreseeing({"triage 1": outlook(late=4), "lenient 1": outlook()}), max_degree=1)
    assert choose_auto(picture).policy == LENIENT


@pytest.mark.parametrize(("spread", "chosen"), [(0.1, "triage,degree=2"), (0.02, "triage,degree=1")])
def test_a_gain_in_latency_counts_as_far_as_predictions_are_sure(spread, chosen):
    ahead = dict.fromkeys(FILE, outlook(spread=spread))
    ahead["triage 1"] = outlook(spread=spread, latency_s=4.5)
    picture = foreseeing(ahead, deadline_s=math.inf)
    assert choose_auto(picture, Choice("triage,degree=2", "")).policy == chosen


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_auto_takes_pairs_where_all_do_alike(num_ranks):
    picture = foreseeing(dict.fromkeys((*DUE, "srtf 2"), outlook(late=4)))
    picture = replace(picture, ranks=picture.ranks[:num_ranks])
    assert choose_auto(picture).policy == "triage,degree=2"


def test_what_auto_has_seen_before_counts():
    losses = dict.fromkeys(("triage,degree=2", LENIENT, "triage,degree=4"), 9.0)
    before = Choice("triage,degree=2", "", losses | {"srtf,degree=4": 0.0})
    assert choose_auto(foreseeing(dict.fromkeys(DUE, outlook(late=4))), before).policy == "srtf,degree=4"


def test_where_what_auto_has_chosen_is_no_choice_any_more_the_best_is_taken():
    ahead = dict.fromkeys(DUE, outlook(late=7)) | {"srtf 4": outlook(late=4)}
    assert choose_auto(foreseeing(ahead), Choice("triage,degree=8", "")).policy == "srtf,degree=4"


@pytest.mark.parametrize(("num_jobs", "chosen"), [(8, "triage,degree=1"), (7, "srtf,degree=4")])
def test_ranks_are_not_wasted_while_jobs_wait_for_all_of_them(num_jobs, chosen):
    ahead = dict.fromkeys(FILE, outlook()) | {
        "srtf 4": outlook(latency_s=3.0),
        "triage 1": outlook(latency_s=4.9),
    }
    picture = foreseeing(ahead, deadline_s=math.inf, num_jobs=num_jobs, expects_more=True)
    assert choose_auto(picture).policy == chosen
    assert choose_auto(picture, Choice("srtf,degree=4", "")).policy == chosen


def test_jobs_at_their_decode_have_no_steps_in_which_ranks_are_wasted():
    """Four decodes of a shape whose steps lose by sharing wait beside four jobs whose steps do not."""

    class Costs(WorkCosts):
        def task_s(self, task, layout):
            return super().task_s(task, layout) * (layout.degree if task.job_id.startswith("end") else 1)

    jobs = [view(f"job-{n}") for n in range(4)]
    jobs += [replace(decoding(f"end-{n}", remaining_s=100.0), shape="lossy") for n in range(4)]
    ahead = dict.fromkeys(FILE, outlook()) | {"srtf 4": outlook(latency_s=3.0)}
    picture = foreseeing(ahead, deadline_s=math.inf, expects_more=True)
    picture = replace(picture, open={job.job_id: job for job in jobs}, costs=Costs(*jobs))
    assert choose_auto(picture).policy == "srtf,degree=4"


# Ranks that share cores ------------------------------------------------------------------------


def shared_profile(alone_s, pair_s, *, spread_s=0.0):
    """What runs on a machine whose ranks share cores have left: times of a step on one rank and on two."""
    steps = {(1, 1, 1): alone_s, (2, 1, 1): pair_s, (1, 2, 1): pair_s}
    rows = [
        ProfileRow("fake", "small+cfg", stage, degrees, s, spread_s, loaded_s=s, flops=1e9)
        for stage in Stage
        for degrees, s in (steps.items() if stage is Stage.DENOISE else [((1, 1, 1), 0.01)])
    ]
    return Profile("a CPU", "2026-11-28", "runs", 2, tuple(rows))


def shared_steps(dispatches):
    steps = [each for each in dispatches if each.task.stage is Stage.DENOISE]
    return sum(each.layout.degree > 1 for each in steps) / len(steps)


@pytest.mark.parametrize(
    ("alone_s", "pair_s"), [(0.185, 0.096), (0.2, 0.1), (0.2, 0.07), (0.1, 0.11), (0.096, 0.05), (3.0, 1.4)]
)
@pytest.mark.parametrize("fields", [{}, {"deadline_s": 5000.0}])
def test_ranks_that_share_cores_share_no_steps_while_jobs_wait(alone_s, pair_s, fields):
    jobs = [make_job(f"job-{n}", steps=6, uses_cfg=True, shape="small+cfg", **fields) for n in range(60)]
    found = shared_steps(recorded(jobs, shared_profile(alone_s, pair_s)))
    assert found <= 0.05


def recorded(jobs, profile):
    recorder = Recorder()
    simulate(jobs, policy=load_policy("auto"), num_ranks=2, profile=profile, observers=[recorder])
    return recorder.dispatches


def test_without_a_profile_they_share_none_either():
    jobs = [make_job(f"job-{n}", steps=6, uses_cfg=True, shape="small+cfg") for n in range(60)]
    control, recorder = simulated_control(
        jobs, policy="auto", max_degree=2, chooser=ImmediateChooser(choose_auto), shares_cores=True
    )
    control.run()
    assert shared_steps(recorder.dispatches) <= 0.05


def test_they_share_steps_that_a_deadline_needs():
    jobs = [
        make_job(f"job-{n}", steps=6, uses_cfg=True, shape="small+cfg", deadline_s=0.9 if n == 0 else None)
        for n in range(20)
    ]
    dispatches = recorded(jobs, shared_profile(0.2, 0.1))
    assert any(each.layout.degree == 2 for each in dispatches if each.task.job_id == "job-0")
    assert shared_steps([each for each in dispatches if each.task.job_id != "job-0"]) <= 0.05
