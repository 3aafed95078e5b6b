"""Closing time, in virtual time: what begins before it, and how a run ends by itself."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from builders import STEP_S, make_job, simulate, simulated_control

from gfgen.errors import InputError, InterruptedRunError, OutputError, StalledError
from gfgen.job.shared import closing_at
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.control import closing
from gfgen.runtime.core.events import ClosingTime, SpaceLeft, StopRequested
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.files.resume import resume_path

NOW = datetime(2026, 11, 20, 22, 0, 0).timestamp()
TWO_JOBS_S = 1.75 + closing.CAUTION * 1.75
"""The end of the second of two jobs of seven tasks of 0.25 s, as predicted at the end of the first."""


def begun(recorder):
    return {dispatch.task.job_id for dispatch in recorder.dispatches}


def test_no_job_begins_that_would_not_end_in_time():
    # One rank: a job of 4 steps takes 0.7 s, so a second one ends at 1.4 s and a third would at 2.1 s.
    jobs = [make_job(f"job-{i}") for i in range(5)]
    recorder = simulate(jobs, policy="fcfs", num_ranks=1, closes_s=1.6)
    assert recorder.end_order == ["job-0", "job-1"]
    assert begun(recorder) == {"job-0", "job-1"}


@pytest.mark.parametrize(
    ("closes_s", "ended"), [(TWO_JOBS_S, ["a", "b"]), (math.nextafter(TWO_JOBS_S, 0), ["a"])]
)
def test_a_job_may_begin_that_is_predicted_to_end_exactly_at_closing_time(closes_s, ended):
    jobs = [make_job("a"), make_job("b")]
    recorder = simulate(jobs, policy="fcfs", num_ranks=1, task_s=lambda _: 0.25, closes_s=closes_s)
    assert recorder.end_order == ended


def test_a_shorter_job_may_still_begin_when_a_longer_one_may_not():
    jobs = [make_job("first"), make_job("long", steps=50), make_job("short", steps=1)]
    recorder = simulate(jobs, policy="fcfs", num_ranks=1, closes_s=1.6)
    assert recorder.end_order == ["first", "short"]


def test_what_has_begun_goes_on_when_jobs_like_it_are_held_back():
    jobs = [make_job("begun", steps=8), make_job("like it", steps=8), make_job("short", steps=1)]
    control, recorder = simulated_control(jobs, policy="fcfs", num_ranks=1, closes_s=1.6)
    control.run()
    assert recorder.end_order == ["begun", "short"]
    assert set(control.state.jobs.open.ids) == {"like it"}


def test_what_runs_at_closing_time_ends_its_task_and_is_left():
    control, recorder = simulated_control([make_job("a", steps=50)], num_ranks=1, closes_s=1.05)
    summary = control.run()
    assert (summary.num_done, summary.num_failed, summary.num_unfinished) == (0, 0, 1)
    assert recorder.dispatches[-1].submitted_s <= 1.05
    assert control.clock.now_s == pytest.approx(1.1)


def test_before_anything_is_measured_a_job_begins_on_every_rank():
    jobs = [make_job(f"job-{i}", steps=500) for i in range(6)]
    recorder = simulate(jobs, policy="fcfs", num_ranks=3, closes_s=2.0)
    assert len(begun(recorder)) == 3


def test_a_run_ends_early_when_nothing_that_is_left_fits():
    control, recorder = simulated_control(
        [make_job("a"), make_job("b", steps=90)], num_ranks=1, policy="fcfs", closes_s=5.0
    )
    summary = control.run()
    assert (summary.num_done, summary.num_unfinished) == (1, 1)
    assert control.clock.now_s == pytest.approx(7 * STEP_S)
    assert isinstance(recorder.events[-1], ClosingTime)


def test_a_run_waits_for_a_job_that_is_to_arrive_before_closing_time():
    jobs = [make_job("a"), make_job("b", steps=90), make_job("late", arrival_s=3.0)]
    recorder = simulate(jobs, num_ranks=1, policy="fcfs", closes_s=5.0)
    assert recorder.end_order == ["a", "late"]


def test_steps_on_several_ranks_are_predicted_as_such():
    """Ten steps take 1 s on a rank and 0.25 s on four, which the closing time is chosen to tell apart."""

    def task_s(dispatch):
        return STEP_S / dispatch.layout.degree

    jobs = [make_job(f"job-{i}", steps=10) for i in range(2)]
    recorder = simulate(jobs, policy="legacy", num_ranks=4, task_s=task_s, closes_s=1.4)
    assert recorder.end_order == ["job-0", "job-1"]


def test_all_jobs_done_before_closing_time_is_an_ordinary_end():
    recorder = simulate([make_job("a")], closes_s=100.0)
    assert recorder.end_order == ["a"]
    assert not any(isinstance(event, ClosingTime) for event in recorder.events)


def test_the_first_signal_after_closing_time_does_not_break_the_run_off():
    control, _ = simulated_control([make_job("a", steps=50)], num_ranks=1, closes_s=1.01)
    control.clock.at(StopRequested(1.05, 2))
    control.run()
    assert control.state.closing.stop_signal == 2


def test_a_second_signal_still_does():
    control, _ = simulated_control([make_job("a", steps=50)], num_ranks=1, closes_s=1.01)
    for time_s in (1.05, 1.06):
        control.clock.at(StopRequested(time_s, 2))
    with pytest.raises(InterruptedRunError):
        control.run()


def test_a_policy_that_starts_nothing_is_named_long_before_closing_time():
    control, _ = simulated_control([make_job("a")], closes_s=1e6)
    control.decider.policy = NamedPolicy("lazy", lambda snapshot: [])
    with pytest.raises(StalledError, match="policy lazy"):
        control.run()
    assert control.clock.now_s == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("06:00", datetime(2026, 11, 21, 6)),
        ("23:30", datetime(2026, 11, 20, 23, 30)),
        ("22:00", datetime(2026, 11, 21, 22)),
        ("6:5", datetime(2026, 11, 21, 6, 5)),
        ("22:00:01", datetime(2026, 11, 20, 22, 0, 1)),
        ("8h", datetime(2026, 11, 21, 6)),
        ("1h30m", datetime(2026, 11, 20, 23, 30)),
        ("2026-11-22T06:00", datetime(2026, 11, 22, 6)),
        ("2026-11-22 06:00", datetime(2026, 11, 22, 6)),
        ("2026-11-22", datetime(2026, 11, 23)),
        ("10 minutes", datetime(2026, 11, 20, 22, 10)),
        ("6:00 am", datetime(2026, 11, 21, 6)),
        ("06:00 Europe/Berlin", datetime(2026, 11, 21, 6, tzinfo=ZoneInfo("Europe/Berlin"))),
        ("2026-11-22 06:00 CET", datetime(2026, 11, 22, 6, tzinfo=ZoneInfo("CET"))),
    ],
)
def test_times_of_day_dates_and_durations_are_understood(text, expected):
    assert closing_at(text, now=NOW) == expected.timestamp()


def test_a_date_with_a_zone_is_that_moment():
    assert closing_at("2026-11-22T06:00+01:00", now=NOW) == 1795323600.0


@pytest.mark.parametrize("text", ["", "soon", "25:00", "6", "2026-13-01T06:00", "0s", "-1h"])
def test_what_is_no_time_is_refused_with_what_would_be(text):
    with pytest.raises(InputError, match=r'"06:00", a time like .* or a duration like "8h" is accepted'):
        closing_at(text, now=NOW)


def test_a_time_that_has_passed_is_refused():
    with pytest.raises(InputError, match="'2026-11-20T21:59': has passed"):
        closing_at("2026-11-20T21:59", now=NOW)


@pytest.mark.parametrize(
    "text", ["9999-12-31T23:59", "9999-12-31T23:59-12:00", "9001-01-01T00:00Z", "0001-01-01T00:00"]
)
def test_a_year_that_is_none_in_some_zone_is_refused(text):
    with pytest.raises(InputError, match=f"--by '{text}': a year from 1971 to 9000 is accepted"):
        closing_at(text, now=NOW, option="--by")


def test_an_unknown_zone_is_refused_with_known_ones():
    with pytest.raises(
        InputError, match=r"instead of MEZ, a zone such as Europe/Berlin, CET, UTC .* is accepted"
    ):
        closing_at("06:00 MEZ", now=NOW)


# Room on the disk -------------------------------------------------------------------------------


class Disk:
    """Free bytes; what jobs have written is gone from them."""

    def __init__(self, free_bytes: float) -> None:
        self.free_bytes = free_bytes

    def __call__(self) -> int:
        return int(self.free_bytes)


def on_disk(jobs: Any, disk: Callable[[], int], **options: Any) -> Any:
    control, recorder = simulated_control(jobs, **options)
    control._steering = replace(control._steering, free_bytes=disk)
    return control, recorder


SIZE = make_job("any").file_bytes


def test_a_run_with_room_for_all_files_notes_nothing():
    control, recorder = on_disk([make_job("a"), make_job("b")], Disk(2 * SIZE))
    assert control.run().num_done == 2
    assert not [event for event in recorder.events if isinstance(event, SpaceLeft)]


def test_no_job_begins_whose_file_would_not_fit_and_what_runs_ends():
    disk = Disk(2.5 * SIZE)

    class Writing(Observer):
        def ended(self, outcome: JobOutcome) -> None:
            disk.free_bytes -= SIZE

    jobs = [make_job(f"job-{idx}", steps=30) for idx in range(5)]
    control, recorder = on_disk(jobs, disk, policy="fcfs,degree=1", num_ranks=4)
    control.observers = (*control.observers, Writing())
    with pytest.raises(
        OutputError, match=r"has .* left for the files of 3 jobs, .* is missing; make room, then run"
    ):
        control.run()
    assert recorder.end_order == ["job-0", "job-1"]
    assert begun(recorder) == {"job-0", "job-1"}
    control.state.check()


def test_files_that_are_smaller_than_estimated_leave_room_for_others():
    disk = Disk(1.5 * SIZE)
    control, recorder = on_disk([make_job(name, steps=3) for name in "abc"], disk, policy="fcfs", num_ranks=1)
    assert control.run().num_done == 3, "the disk is looked at again before the run gives up"
    assert recorder.end_order == ["a", "b", "c"]


def test_a_smaller_file_may_still_fit():
    large, small = make_job("large"), make_job("small", steps=6)
    small = replace(small, info=replace(small.info, file="small.jpg"))
    control, recorder = on_disk([large, small], Disk(SIZE - 1), policy="fcfs")
    with pytest.raises(OutputError, match="the files of 1 job"):
        control.run()
    assert recorder.end_order == ["small"]


def test_a_run_that_goes_on_waits_for_room(caplog):
    disk = Disk(SIZE - 1)
    control, recorder = on_disk([make_job("a")], disk, intake=lambda clock: NoMore())
    control.begin()
    while control.clock.now_s < 60:
        control.turn()
    assert not recorder.dispatches
    (told,) = [record.getMessage() for record in caplog.records if "jobs wait" in record.getMessage()]
    assert "is missing; make room" in told
    disk.free_bytes = SIZE
    while not recorder.outcomes:
        control.turn()
    assert recorder.end_order == ["a"]


def test_with_room_for_no_file_only_a_stopped_job_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(closing, "free_bytes", lambda folder: SIZE - 1)
    jobs = [make_job("fox"), make_job("owl")]
    with pytest.raises(OutputError, match=r"the files of 2 jobs, .* is missing; make room, then run"):
        closing.check_room(jobs, tmp_path)
    resume_path(tmp_path, "owl").parent.mkdir()
    resume_path(tmp_path, "owl").touch()
    closing.check_room(jobs, tmp_path)


class NoMore:
    def take(self) -> tuple[()]:
        return ()


@pytest.fixture
def berlin(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("berlin")
def test_six_o_clock_is_six_o_clock_in_the_night_when_clocks_change():
    evening = datetime(2026, 10, 24, 22).timestamp()
    assert closing_at("06:00", now=evening) - evening == 9 * 3600
