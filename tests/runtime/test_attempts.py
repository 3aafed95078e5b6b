"""What is known of each dispatch until it becomes one event, and its frames are stored."""

from __future__ import annotations

from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import RankTimes
from gfgen.runtime.processes.attempts import Attempts


def begun(*dispatches: tuple[int, tuple[int, ...], int | None]) -> Attempts:
    """Of (number, ranks, producer)."""
    attempts = Attempts()
    for number, ranks, producer in dispatches:
        task, layout = Task("a", number, Stage.DENOISE, number), Layout(ranks, ulysses=len(ranks))
        attempts.begin(Dispatch(number, task, layout, 0.0, 0.0, 1.0, producer=producer))
    return attempts


def report(attempts: Attempts, number: int, rank: int, *, do_frames_follow: bool = False) -> None:
    times = RankTimes(rank, 0.0, 1.0 + rank)
    attempts.report(number, times, now_s=5.0, do_frames_follow=do_frames_follow)


def done(attempts: Attempts, number: int, *, given_up: frozenset[int] = frozenset()) -> list[int]:
    return [attempt.dispatch.number for attempt in attempts.take_done(number, given_up=given_up)]


def test_a_dispatch_is_done_once_when_the_last_of_its_ranks_has_reported() -> None:
    attempts = begun((1, (2, 0), None))
    report(attempts, 1, 0)
    assert done(attempts, 1) == []
    report(attempts, 1, 2)
    (attempt,) = attempts.take_done(1, given_up=())
    assert [times.rank for times in attempt.times] == [2, 0], "by slot"
    assert done(attempts, 1) == []
    assert not attempts.dispatches


def test_a_second_report_and_one_of_an_earlier_run_change_nothing() -> None:
    attempts = begun((7, (0, 1), None))
    report(attempts, 7, 0)
    attempts.report(7, RankTimes(0, 8.0, 9.0), now_s=9.0, do_frames_follow=True)
    report(attempts, 3, 0)
    report(attempts, 7, 5)
    (attempt,) = attempts
    assert attempt.reports == {0: RankTimes(0, 0.0, 1.0)}
    assert (attempt.unreported, attempt.storing) == ([1], {})


def test_a_report_after_the_end_changes_nothing_while_frames_are_to_come() -> None:
    attempts = begun((7, (0,), None))
    report(attempts, 7, 0, do_frames_follow=True)
    assert done(attempts, 7) == [7]
    attempts.report(7, RankTimes(0, 8.0, 9.0), now_s=9.0, do_frames_follow=True)
    assert done(attempts, 7) == []
    (attempt,) = attempts
    assert attempt.storing == {0: 5.0}


def test_a_task_that_overtakes_its_producer_is_done_after_it() -> None:
    attempts = begun((6, (0, 1), None), (7, (0,), 6))
    report(attempts, 6, 0)
    report(attempts, 7, 0)
    assert done(attempts, 7) == []
    report(attempts, 6, 1)
    assert done(attempts, 6) == [6, 7]


def test_what_is_given_up_does_not_count_as_done_when_its_producer_ends() -> None:
    """Its ranks reported before those of the producer, and then another failure dragged it along."""
    attempts = begun((6, (0,), None), (7, (0,), 6))
    report(attempts, 6, 0)
    report(attempts, 7, 0)
    assert done(attempts, 6, given_up=frozenset({7})) == [6]
    assert attempts.dispatches.keys() == {7}


def test_a_decode_stays_known_until_its_last_frames_are_stored_and_no_longer() -> None:
    attempts = begun((7, (0, 1), None))
    for rank in (0, 1):
        report(attempts, 7, rank, do_frames_follow=True)
    assert done(attempts, 7) == [7]
    attempt = attempts.stored(7, 0, are_lost=False)
    assert attempt is not None
    assert attempt.storing.keys() == {1}
    assert attempts.stored(7, 0, are_lost=False) is None, "told again"
    assert attempts.stored(7, 1, are_lost=False) is attempt
    assert list(attempts) == []


def test_frames_that_are_lost_end_a_decode_that_was_done() -> None:
    attempts = begun((7, (0, 1), None))
    for rank in (0, 1):
        report(attempts, 7, rank, do_frames_follow=True)
    assert done(attempts, 7) == [7]
    assert attempts.stored(7, 1, are_lost=True) is not None
    assert attempts.stored(7, 0, are_lost=False) is None


def test_nobody_waits_for_the_frames_of_a_job_that_has_ended() -> None:
    attempts = begun((7, (0,), None))
    report(attempts, 7, 0, do_frames_follow=True)
    attempts.forget("a")
    assert len(list(attempts)) == 1, "its decode is still under way"
    assert done(attempts, 7) == [7]
    attempts.forget("a")
    assert attempts.stored(7, 0, are_lost=False) is None
