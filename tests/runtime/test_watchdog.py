"""Who is taken for hung, and when."""

from __future__ import annotations

import time
from typing import Any

import pytest
from builders import make_job

from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.ipc.messages import Pong
from gfgen.runtime.processes.child import AwakeClock, Patience, Phase, RankProcess

PATIENCE = Patience(silence_s=10.0, task_s=300.0, task_factor=20.0)


def dispatch(*, predicted_s: float = 1.0) -> Dispatch:
    task = make_job("a").trajectory.task(3)
    return Dispatch(1, task, Layout((0, 1), ulysses=2), 0.0, 0.0, predicted_s)


def worker_in(phase: Phase) -> RankProcess:
    """A worker that has entered this phase, and was last heard, just now."""
    nothing: Any = None
    return RankProcess(name="rank 0", process=nothing, channel=nothing, rank=0, phase=phase)


def why_hung(worker: RankProcess, after_s: float) -> str | None:
    worker.clock.now_s += after_s
    return worker.why_hung(PATIENCE)


@pytest.mark.parametrize("phase", [Phase.INTRODUCING, Phase.SERVING])
def test_silence_is_noticed(phase: Phase) -> None:
    worker = worker_in(phase)
    assert why_hung(worker, 9.0) is None
    assert why_hung(worker, 2.0) == "no sign of life for 11 s"
    worker.hear(Pong())
    assert why_hung(worker, 0.0) is None


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.PREPARING])
def test_a_worker_that_loads_may_be_silent_as_long_as_its_start_may_take(phase: Phase) -> None:
    worker = worker_in(phase)
    assert why_hung(worker, PATIENCE.starting_s - 1.0) is None
    assert "ready" in (why_hung(worker, 2.0) or "")


def test_time_in_which_the_control_plane_was_stopped_counts_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, now_s = AwakeClock(), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for passed_s in (0.25, 1000.0, 0.25):
        now_s += passed_s
        clock.look()
    assert clock.now_s < PATIENCE.ping_s


@pytest.mark.parametrize(
    ("predicted_s", "wait_s"),
    [(0.1, 30.0), (10.0, 30.0), (60.0, 180.0), (1e9, 3600.0), (float("inf"), 3600.0)],
)
def test_a_wait_inside_a_task_may_take_the_longer_the_longer_the_task(
    predicted_s: float, wait_s: float
) -> None:
    assert Patience().to_wait_s(dispatch(predicted_s=predicted_s)) == wait_s


def test_ranks_give_up_a_wait_before_the_task_is_given_up() -> None:
    for predicted_s in (0.01, 10.0, 100.0, 10_000.0):
        running = dispatch(predicted_s=predicted_s)
        assert Patience().to_wait_s(running) < Patience().for_task_s(running) + predicted_s


def test_ranks_that_share_gpus_are_given_as_many_times_as_long() -> None:
    shared = PATIENCE.with_shared_gpus(4)
    assert (shared.silence_s, shared.task_s, shared.task_factor) == (40.0, 1200.0, 80.0)
    assert (shared.starting_s, shared.warm_up_s, shared.killed_s) == (7200.0, 2400.0, 40.0)
    unchanged = ("ping_s", "write_s")
    assert [getattr(shared, name) for name in unchanged] == [getattr(PATIENCE, name) for name in unchanged]
    assert shared.to_wait_s(dispatch(predicted_s=0.1)) == 120.0
    assert shared.to_leave_s([dispatch(predicted_s=1.0)]) == 60.0 + 12.0
    assert PATIENCE.with_shared_gpus(1) == PATIENCE
