"""What one rank knows of its dispatches, and which of its threads waits for what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gfgen.runtime.worker.dispatches import AFTER_ALL, Dispatches, InputVoidError

WAIT_S = 10.0
SHORT_S = 0.05


@pytest.fixture
def left() -> list[frozenset[int]]:
    """The sets of dispatches that the rank says it has left."""
    return []


@pytest.fixture
def dispatches(left: list[frozenset[int]]) -> Dispatches:
    return Dispatches(left.append)


def of(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


@contextmanager
def waiting(wait: Callable[[], object]) -> Iterator[threading.Thread]:
    """A thread that waits when this is entered, and does not any more when it is left."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(SHORT_S)
    assert thread.is_alive(), "it does not wait"
    yield thread
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it still waits"


def test_a_dispatch_that_was_given_up_is_not_entered(dispatches: Dispatches) -> None:
    assert dispatches.abandon(of(3)) is None
    assert not dispatches.enter(3)
    assert dispatches.enter(4)


def test_abandoned_dispatches_are_left_when_the_last_thread_is_out(
    dispatches: Dispatches, left: list[frozenset[int]]
) -> None:
    """The main thread runs a dispatch, the sender sends for it."""
    for number in (3, 3, 4, 9):
        assert dispatches.enter(number)
    assert dispatches.abandon(of(3, 4, 5)) == 4  # exchanges are aborted through it
    for number in (3, 4):
        dispatches.leave(number)
    assert left == []
    dispatches.leave(3)
    assert left == [of(3, 4, 5)]
    dispatches.leave(9)
    assert left == [of(3, 4, 5)]


def test_dispatches_that_no_thread_is_inside_of_are_left_at_once(
    dispatches: Dispatches, left: list[frozenset[int]]
) -> None:
    dispatches.enter(9)
    assert dispatches.abandon(of(3)) is None
    assert left == [of(3)]


def test_overlapping_sets_are_left_each_for_itself(
    dispatches: Dispatches, left: list[frozenset[int]]
) -> None:
    dispatches.enter(3)
    dispatches.abandon(of(3))
    dispatches.abandon(of(3, 4))
    dispatches.leave(3)
    assert left == [of(3), of(3, 4)]


def test_nothing_starts_behind_a_failure_before_that_is_given_up(dispatches: Dispatches) -> None:
    dispatches.note_failure(3)
    with waiting(dispatches.await_no_failure):
        dispatches.abandon(of(3))


def test_the_failure_of_a_dispatch_that_was_given_up_before_holds_nothing_up(dispatches: Dispatches) -> None:
    dispatches.abandon(of(3))
    dispatches.note_failure(3)
    dispatches.await_no_failure()


def test_when_the_control_plane_is_gone_nothing_is_entered_or_waited_for(dispatches: Dispatches) -> None:
    dispatches.enter(3)
    dispatches.enter(5)
    dispatches.note_failure(3)
    dispatches.note_to_send(4)
    with waiting(dispatches.await_no_failure):
        assert dispatches.end() == 5
    assert not dispatches.enter(6)
    with pytest.raises(InputVoidError):
        dispatches.await_clear(AFTER_ALL, may_block=True)


def test_without_a_thread_inside_nothing_is_aborted_at_the_end(dispatches: Dispatches) -> None:
    assert dispatches.end() is None


def test_state_is_sent_when_the_arenas_that_came_before_are_mapped(dispatches: Dispatches) -> None:
    """Later ones are mapped behind tasks that may need what is sent."""
    dispatches.note_arena()
    dispatches.note_to_send(7)
    dispatches.note_arena()
    with waiting(lambda: dispatches.await_arenas(7)):
        dispatches.note_mapped()


def test_whoever_waits_for_an_arena_leaves_when_its_dispatch_is_given_up(dispatches: Dispatches) -> None:
    raised = []

    def wait() -> None:
        try:
            dispatches.await_arenas(7)
        except InputVoidError as error:
            raised.append(error)

    dispatches.note_arena()
    dispatches.note_to_send(7)
    with waiting(wait):
        dispatches.abandon(of(7))
    assert raised


@pytest.mark.parametrize(
    ("is_enqueued", "may_block", "waits"),
    [(False, False, True), (True, False, False), (True, True, True)],
    ids=["not enqueued", "enqueued", "enqueued, and the launch may block"],
)
def test_a_step_is_entered_when_the_host_has_nothing_left_to_send(
    dispatches: Dispatches, is_enqueued: bool, may_block: bool, waits: bool
) -> None:
    """A launch that blocks the context waits for all that goes out to have arrived."""
    for number in (7, 9):
        dispatches.note_to_send(number)
    if is_enqueued:
        dispatches.note_enqueued(7)
    if not waits:
        dispatches.await_clear(8, may_block=may_block)
        return
    with waiting(lambda: dispatches.await_clear(8, may_block=may_block)):
        dispatches.note_sent(7)


def test_a_launch_that_may_block_waits_for_the_end_of_those_before(dispatches: Dispatches) -> None:
    dispatches.note_launched()
    dispatches.await_clear(8, may_block=False)
    with waiting(lambda: dispatches.await_clear(8, may_block=True)):
        dispatches.note_settled()


@pytest.mark.parametrize(("unsent", "waits"), [(8, False), (7, True)])
def test_state_that_is_sent_for_the_task_itself_is_not_waited_for(
    dispatches: Dispatches, unsent: int, waits: bool
) -> None:
    """It may wait for what arrives for the task."""
    dispatches.note_to_send(unsent)
    if not waits:
        dispatches.await_clear(8, may_block=True, but_own=True)
        return
    with waiting(lambda: dispatches.await_clear(8, may_block=True, but_own=True)):
        dispatches.note_sent(unsent)


def test_a_rank_is_quiet_when_all_that_it_launched_has_ended(dispatches: Dispatches) -> None:
    dispatches.note_launched()
    with waiting(lambda: dispatches.await_clear(8, may_block=True, but_own=True)):
        dispatches.note_settled()
