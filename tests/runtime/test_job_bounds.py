"""What one job may ask for, and jobs of which a single step takes too long."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gfgen.errors import InputError
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.runtime.core.admission import AdmittedJob, admit
from gfgen.runtime.core.devices import CPU, CUDA, Devices
from gfgen.runtime.predict import job_bounds
from gfgen.runtime.predict.job_bounds import JobBounds, StepTimes, beyond
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.session.admission import Admission, find_weightless, with_time
from gfgen.session.ranks import Ranks

MINUTE_S = 60.0
LONG = JobSpec(id="long", prompt="a fox", frames=4000, line=3)
SHORT = JobSpec(id="short", prompt="a fox", line=4)


def admitted(*specs: JobSpec) -> Sequence[AdmittedJob]:
    jobs, problems = admit(specs, default_model="shapes", find_model=find_weightless)
    assert not problems
    return jobs


def profile_of(job: AdmittedJob, seconds: float) -> Profile:
    """Of a machine on which a step of this job takes so long on one rank."""
    row = ProfileRow("shapes", job.shape, Stage.DENOISE, (1, 1, 1), seconds, flops=job.flops[Stage.DENOISE])
    return Profile("a machine", "2026-11-21", "made up", 1, (row,))


def measured(seconds: float, *, num_ranks: int = 1) -> StepTimes:
    """Where a step of a short job takes so long."""
    (short,) = admitted(SHORT)
    return StepTimes(profile_of(short, seconds), kind=CPU, num_ranks=num_ranks)


def unmeasured(monkeypatch: pytest.MonkeyPatch, *, kind: str = CPU, num_ranks: int = 4) -> StepTimes:
    monkeypatch.setattr(job_bounds.os, "sched_getaffinity", lambda _: {0, 1})
    return StepTimes(None, kind=kind, num_ranks=num_ranks)


def test_a_step_of_hours_is_told_in_words_that_name_the_option() -> None:
    ((job, problem),) = beyond(admitted(LONG, SHORT), JobBounds(step_s=10 * MINUTE_S), measured(2.0))
    assert job.job_id == "long"
    assert str(problem) == (
        "line 3: one step of 4,001 frames in 128x128 is predicted to take 2 h 28 min here, "
        "more than --max-step-time 10 min 00 s; ask for fewer frames or a smaller size"
    )


def test_the_ranks_that_make_a_step_quickest_count() -> None:
    (job,) = admitted(LONG)
    alone, together = measured(2.0), measured(2.0, num_ranks=4)
    assert together.least_s(job) == pytest.approx(alone.least_s(job) / 3.6)


@pytest.mark.parametrize(("kind", "num_ranks"), [(CPU, 1), (CPU, 4), (CUDA, 1)])
def test_without_a_measurement_nothing_is_refused_that_could_work(
    monkeypatch: pytest.MonkeyPatch, kind: str, num_ranks: int
) -> None:
    """4,000 frames of the built-in model would take a core half an hour if it were as fast as is guessed."""
    times = unmeasured(monkeypatch, kind=kind, num_ranks=num_ranks)
    assert list(beyond(admitted(LONG), JobBounds(step_s=10 * MINUTE_S), times)) == []


def test_without_a_measurement_what_no_machine_could_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = admitted(replace(SHORT, width=8192, height=8192, frames=1))
    ((_, problem),) = beyond(huge, JobBounds(step_s=10 * MINUTE_S), unmeasured(monkeypatch))
    assert str(problem) == (
        "line 4: one step of 8192x8192 takes at least 39 min 54 s here, "
        "more than --max-step-time 10 min 00 s; ask for a smaller size"
    )
    assert not list(beyond(huge, JobBounds(step_s=10 * MINUTE_S), unmeasured(monkeypatch, kind=CUDA)))


def test_each_number_beyond_its_bound_is_named_with_the_option_that_raises_it() -> None:
    large = admitted(replace(LONG, width=256, height=128, frames=33, steps=21))
    bounds = JobBounds(pixels=128 * 128, frames=17, steps=20)
    assert [str(problem) for _, problem in beyond(large, bounds, None)] == [
        "line 3: size = 256x128: more than --max-pixels 16,384 allows",
        "line 3: frames = 33: more than --max-frames 17 allows",
        "line 3: steps = 21: more than --max-steps 20 allows",
    ]
    assert list(beyond(admitted(SHORT), bounds, None)) == []
    assert list(beyond(large, JobBounds(), None)) == []


def admission(bounds: JobBounds, times: StepTimes | None = None) -> Admission:
    return replace(Ranks(Devices(CPU, 1)).admission("shapes"), bounds=bounds, step_times=times)


def test_bounds_hold_for_new_jobs_and_not_for_those_that_were_accepted_before() -> None:
    of_start = admission(JobBounds(step_s=MINUTE_S), measured(2.0))
    model = of_start.models.find("shapes")
    of_loaded = of_start.of_loaded(frozenset({model.checkpoint}))
    within = pickle.loads(pickle.dumps(of_loaded))  # for the HTTP process
    jobs, problems = within([LONG, SHORT])
    assert [job.job_id for job in jobs] == ["short"]
    assert ["--max-step-time" in str(problem) for problem in problems] == [True]
    assert len(within.again([LONG, SHORT])[0]) == 2


def test_a_job_that_is_done_is_not_refused() -> None:
    within, jobs = admission(JobBounds(frames=100)), admitted(LONG, SHORT)
    kept, problems = within.fit(jobs, done=lambda found: {job.job_id for job in found})
    assert (list(kept), list(problems)) == (list(jobs), [])
    kept, problems = within.fit(jobs)
    assert ([job.job_id for job in kept], len(problems)) == (["short"], 1)


def until(minutes: float, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr("gfgen.session.admission.time.time", lambda: 1e9)
    return 1e9 + minutes * MINUTE_S


def test_jobs_without_time_for_a_step_are_left_for_another_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = admitted(LONG, SHORT)
    kept, num_left = with_time(jobs, lambda: measured(2.0), closes_at=until(90, monkeypatch))
    assert ([job.job_id for job in kept], num_left) == (["short"], 1)
    assert caplog.messages == [
        "left for another run: line 3: one step of 4,001 frames in 128x128 is predicted to take "
        "2 h 28 min here, more than the 1 h 30 min that --until leaves; "
        "ask for fewer frames or a smaller size"
    ]
    kept, num_left = with_time(jobs, lambda: measured(2.0), closes_at=until(180, monkeypatch))
    assert (len(kept), num_left) == (2, 0)


def test_a_run_in_which_no_job_has_time_for_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as caught:
        with_time(admitted(LONG), lambda: measured(2.0), closes_at=until(1, monkeypatch))
    text = str(caught.value)
    assert text.startswith(
        "--until leaves no time for a step of any job; nothing was started\n  line 3: one step"
    )


def test_a_step_that_cannot_end_before_the_deadline_of_its_job_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    until(0, monkeypatch)
    due = [replace(LONG, deadline_s=MINUTE_S), replace(LONG, id="calm", deadline_s=1e5)]
    kept, _ = with_time(admitted(*due), lambda: measured(2.0), closes_at=None)
    assert len(kept) == 2
    assert caplog.messages == [
        "line 3: one step of 4,001 frames in 128x128 is predicted to take 2 h 28 min here; "
        "it ends after its deadline: long runs and counts as late"
    ]


def test_who_asks_for_no_times_needs_no_profile() -> None:
    kept, num_left = with_time(admitted(SHORT), lambda: pytest.fail("looked"), closes_at=None)
    assert (len(kept), num_left) == (1, 0)
