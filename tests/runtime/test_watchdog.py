"""Who is taken for hung, and when."""

from __future__ import annotations

import time
from typing import Any

import pytest
from builders import make_job

from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.ipc.messages import Pong
from gfgen.runtime.processes.child import Phase, RankProcess
from gfgen.runtime.processes.watchdog import MAX_PAUSES, Patience, Watchdog

PATIENCE = Patience(silence_s=10.0, task_s=300.0, task_factor=20.0, asleep_s=3.0)


def dispatch(*, submitted_s: float = 0.0, predicted_s: float = 1.0) -> Dispatch:
    task = make_job("a").trajectory.task(3)
    layout = Layout((0, 1), ulysses=2)
    return Dispatch(1, task, layout, submitted_s, submitted_s, submitted_s + predicted_s)


def looked_every(step_s: float, *, until_s: float, watchdog: Watchdog) -> None:
    now_s = watchdog.looked_s
    while now_s < until_s:
        now_s += step_s
        watchdog.look(now_s)


def worker_in(phase: Phase) -> RankProcess:
    """A worker that has entered this phase, and was last heard, at 100 s."""
    nothing: Any = None
    return RankProcess(
        name="rank 0", process=nothing, channel=nothing, rank=0, phase=phase, since_s=100.0, heard_s=100.0
    )


@pytest.mark.parametrize("phase", [Phase.INTRODUCING, Phase.SERVING])
def test_silence_is_noticed(phase: Phase) -> None:
    worker = worker_in(phase)
    assert worker.why_hung(PATIENCE, 109.0) is None
    assert worker.why_hung(PATIENCE, 111.0) == "no sign of life for 11 s"
    worker.hear(Pong())
    assert worker.why_hung(PATIENCE, time.monotonic()) is None


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.WARMING, Phase.LOADING])
def test_a_worker_that_loads_may_be_silent_as_long_as_its_start_may_take(phase: Phase) -> None:
    worker = worker_in(phase)
    assert worker.why_hung(PATIENCE, 99.0 + PATIENCE.starting_s) is None
    assert "ready" in (worker.why_hung(PATIENCE, 101.0 + PATIENCE.starting_s) or "")


def test_time_in_which_the_control_plane_was_stopped_counts_for_no_worker() -> None:
    now_s = time.monotonic()
    silent = worker_in(Phase.SERVING)
    silent.heard_s = now_s - 1002.0
    silent.forgive(1000.0)
    assert silent.why_hung(PATIENCE, now_s) is None
    assert silent.why_hung(PATIENCE, now_s + 9.0) is not None
    heard = worker_in(Phase.SERVING)
    heard.heard_s = now_s
    heard.forgive(1000.0)
    assert heard.why_hung(PATIENCE, now_s + 11.0) is not None, "it was heard after that"
    starting = worker_in(Phase.STARTING)
    starting.forgive(1000.0)
    assert starting.why_hung(PATIENCE, 1099.0 + PATIENCE.starting_s) is None


def test_time_in_which_the_control_plane_was_stopped_counts_for_no_task() -> None:
    watchdog = Watchdog(PATIENCE)
    looked_every(0.25, until_s=2.0, watchdog=watchdog)
    assert watchdog.look(1002.0) == 1000.0
    running = dispatch()
    assert not watchdog.is_overdue(running, 1002.0)
    assert not watchdog.is_overdue(running, 1300.0)
    assert watchdog.is_overdue(running, 1302.0)
    assert watchdog.is_overdue(dispatch(submitted_s=1002.0), 1304.0), "it began when that was over"


def test_a_control_plane_that_is_always_slow_does_not_forgive_for_ever() -> None:
    watchdog = Watchdog(PATIENCE)
    running = dispatch()
    looked_every(4.0, until_s=301.0 + 4.0 * MAX_PAUSES + 8.0, watchdog=watchdog)
    assert len(watchdog.pauses) == MAX_PAUSES
    assert watchdog.is_overdue(running, watchdog.looked_s)


@pytest.mark.parametrize(
    ("predicted_s", "wait_s"),
    [(0.1, 30.0), (10.0, 30.0), (60.0, 180.0), (1e9, 3600.0), (float("inf"), 3600.0)],
)
def test_a_wait_inside_a_task_may_take_the_longer_the_longer_the_task(
    predicted_s: float, wait_s: float
) -> None:
    watchdog = Watchdog(Patience())
    assert watchdog.time_to_wait_s(dispatch(predicted_s=predicted_s)) == wait_s


def test_ranks_give_up_a_wait_before_the_task_is_given_up() -> None:
    watchdog = Watchdog(Patience())
    for predicted_s in (0.01, 10.0, 100.0, 10_000.0):
        running = dispatch(predicted_s=predicted_s)
        assert not watchdog.is_overdue(running, predicted_s + watchdog.time_to_wait_s(running))


def test_ranks_that_share_gpus_are_given_as_many_times_as_long() -> None:
    shared = PATIENCE.with_shared_gpus(4)
    assert (shared.silence_s, shared.task_s, shared.task_factor) == (40.0, 1200.0, 80.0)
    assert (shared.starting_s, shared.warm_up_s, shared.killed_s) == (7200.0, 2400.0, 40.0)
    unchanged = ("ping_s", "asleep_s", "write_s")
    assert [getattr(shared, name) for name in unchanged] == [getattr(PATIENCE, name) for name in unchanged]
    watchdog = Watchdog(shared)
    assert watchdog.time_to_wait_s(dispatch(predicted_s=0.1)) == 120.0
    assert watchdog.time_to_leave_s([dispatch(predicted_s=1.0)]) == 60.0 + 12.0
    assert PATIENCE.with_shared_gpus(1) == PATIENCE
