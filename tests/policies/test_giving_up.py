"""Jobs that give up steps for their deadline."""

from dataclasses import replace

import pytest
from builders import make_job, simulate

from gfgen.graph import Stage
from gfgen.runtime.files.journal import dispatch_summary
from gfgen.runtime.files.manifest import manifest_entry

APPROXIMABLE = (3, 5, 7, 9)


def late_job(name, *, steps=12, **fields):
    job = make_job(name, steps=steps, reuse="if-late", **fields)
    return replace(job, trajectory=replace(job.trajectory, approximable=APPROXIMABLE))


def seconds_of(dispatch):
    return 0.01 if dispatch.task.stage is Stage.APPROXIMATE else 1.0


def given_up(*jobs, policy, **options):
    """By job: steps that ran without the transformer, and whether it was in time; and the run."""
    recorder = simulate(jobs, policy=policy, num_ranks=1, task_s=seconds_of, **options)
    found = {each.info.job_id: (each.num_approximate, each.met_deadline) for each in recorder.outcomes}
    return found, recorder


@pytest.mark.parametrize("policy", ["edf", "triage", "auto"])
@pytest.mark.parametrize(
    ("deadline_s", "found"),
    [(30.0, (0, True)), (13.2, (2, True)), (10.9, (0, False)), (5.0, (0, False))],
    ids=["in time", "in time without some", "late even without all", "late in any case"],
)
def test_a_job_gives_up_as_few_steps_as_its_deadline_takes(policy, deadline_s, found):
    """Fifteen tasks of a second each; costs are known from a first job."""
    first = make_job("first", steps=12)
    job = late_job("a", arrival_s=20.0, deadline_s=deadline_s)
    outcomes, _ = given_up(first, job, policy=policy)
    assert outcomes["a"] == found


@pytest.mark.parametrize("policy", ["edf", "triage", "auto"])
def test_a_job_that_has_become_hopeless_gives_up_no_more_steps(policy):
    """Its steps take ten times as long from the sixth on."""

    def slower(dispatch):
        is_slow = dispatch.task.job_id == "a" and (dispatch.task.step or 0) >= 5
        return seconds_of(dispatch) * (10 if is_slow else 1)

    first, job = make_job("first", steps=12), late_job("a", arrival_s=20.0, deadline_s=13.2)
    recorder = simulate([first, job], policy=policy, num_ranks=1, task_s=slower)
    given_up = [each.task.step for each in recorder.dispatches if each.task.stage is Stage.APPROXIMATE]
    assert given_up == [3, 5]


@pytest.mark.parametrize("policy", ["edf", "triage"])
def test_a_job_gives_up_steps_early_while_others_may_delay_it(policy):
    """Alone, it has two of its fifteen seconds to spare."""
    first, job = make_job("first", steps=12), late_job("a", arrival_s=20.0, deadline_s=17.0)
    other = make_job("other", steps=12, arrival_s=20.0)
    assert given_up(first, job, policy=policy)[0]["a"] == (0, True)
    outcomes, recorder = given_up(first, job, other, policy=policy)
    num_approximate, is_in_time = outcomes["a"]
    assert num_approximate > 0
    assert is_in_time
    own = next(each for each in recorder.outcomes if each.info.job_id == "a")
    assert own.why_approximate == "from step 4 on, when other jobs were likely to make it late"


def test_other_policies_compute_all_steps():
    outcomes, _ = given_up(make_job("first", steps=12), late_job("a", deadline_s=14.0), policy="fcfs")
    assert outcomes["a"] == (0, False)


def test_dispatches_and_manifest_name_the_choice():
    job = late_job("a", arrival_s=20.0, deadline_s=13.2)
    _, recorder = given_up(make_job("first", steps=12), job, policy="edf")
    chosen = [each.task.step for each in recorder.dispatches if each.task.stage is Stage.APPROXIMATE]
    assert chosen == [3, 5]
    journaled = [dispatch_summary(each) for each in recorder.dispatches]
    assert [each[5:] for each in journaled if each[1] == "a"][5:8] == [["reuse"], [], ["reuse"]]
    entry = manifest_entry(recorder.outcomes[-1], written_at=0.0)
    assert (entry["reuse"], entry["steps_reused"]) == ("if-late", 2)
    assert "from step 4 on, when it was predicted to end" in entry["why_reused"]


def test_options_are_counted_from_the_next_task_on():
    trajectory = late_job("a").trajectory
    assert [trajectory.num_approximable_from(index) for index in (0, 5, 6, 11, 12)] == [4, 4, 3, 1, 0]
    steps, found = [trajectory.task(index) for index in (4, 5, 14)], trajectory.task(5).as_approximate
    assert [trajectory.variant(step) for step in steps] == [None, found, None]
