"""What is known of each dispatch until it becomes one event."""

from __future__ import annotations

from dataclasses import replace

from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import RankTimes
from gfgen.runtime.ipc.messages import Transfer
from gfgen.runtime.processes.recovery import Attempts, Cause


def begun(*dispatches: tuple[int, tuple[int, ...], int | None]) -> Attempts:
    """Of (number, ranks, producer)."""
    attempts = Attempts()
    for number, ranks, producer in dispatches:
        task, layout = Task("a", number, Stage.DENOISE, number), Layout(ranks, ulysses=len(ranks))
        dispatch = Dispatch(number, task, layout, 0.0, 0.0, 1.0, producer=producer)
        attempts.begin(dispatch, deadline_s=2.0)
    return attempts


def report(attempts: Attempts, number: int, rank: int) -> bool:
    return attempts.report(number, RankTimes(rank, 0.0, 1.0 + rank))


def done(attempts: Attempts, number: int) -> list[int]:
    return [attempt.dispatch.number for attempt in attempts.take_done(number)]


def test_a_dispatch_is_done_once_when_the_last_of_its_ranks_has_reported() -> None:
    attempts = begun((1, (2, 0), None))
    report(attempts, 1, 0)
    assert done(attempts, 1) == []
    report(attempts, 1, 2)
    (attempt,) = attempts.take_done(1)
    assert [times.rank for times in attempt.times] == [2, 0], "by slot"
    assert done(attempts, 1) == []
    assert not attempts


def test_a_second_report_and_one_of_an_earlier_run_change_nothing() -> None:
    attempts = begun((7, (0, 1), None))
    assert report(attempts, 7, 0)
    assert not attempts.report(7, RankTimes(0, 8.0, 9.0))
    assert not report(attempts, 3, 0)
    assert not report(attempts, 7, 5)
    (attempt,) = attempts.values()
    assert (attempt.reports, attempt.unreported) == ({0: RankTimes(0, 0.0, 1.0)}, [1])
    attempt.is_given_up = True
    assert not report(attempts, 7, 1)


def test_a_report_after_the_end_changes_nothing() -> None:
    attempts = begun((7, (0,), None))
    assert report(attempts, 7, 0)
    assert done(attempts, 7) == [7]
    assert not report(attempts, 7, 0)
    assert done(attempts, 7) == []


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
    attempts[7].is_given_up = True
    assert done(attempts, 6) == [6]
    assert attempts.keys() == {7}


def test_a_dead_rank_ran_its_first_dispatch_without_a_report_and_that_one_fails_for_it() -> None:
    attempts = begun((5, (0, 1), None), (6, (0,), None), (7, (0,), 6), (8, (1,), None))
    report(attempts, 5, 0)
    cause = Cause("killed", lost=True)
    assert attempts.lose(0, cause, storing=()) == {6: cause, 7: None}
    assert attempts.lose(0, cause, storing={5}) == {5: cause, 6: cause, 7: None}


def test_a_dispatch_fails_with_a_rank_that_sends_state_for_it_though_its_own_part_is_done() -> None:
    attempts = begun((5, (0, 1), None), (6, (2,), None), (7, (2,), None))
    for number in (5, 6):
        sent = (Transfer(0, 1, "sample", 0, 0, 1, 4),)
        attempts[number].dispatch = replace(attempts[number].dispatch, transfers=sent)
    report(attempts, 5, 0)
    assert attempts.lose(0, Cause("killed", lost=True), storing=()) == {5: None, 6: None}
