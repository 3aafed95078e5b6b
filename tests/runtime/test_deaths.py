"""Workers that die, stop or hang, and a run that goes on."""

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from builders import make_job
from test_elastic import following
from test_workers import PICTURE, pixels, run

from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.core.events import Clock, FramesLost, RankLost, RankReady, StopRequested, TaskFailed
from gfgen.runtime.processes.child import Patience
from gfgen.runtime.processes.starting import wait_ready
from gfgen.runtime.processes.workers import JobMemory, ProcessBackend
from gfgen.snapshot import Decision
from gfgen.system.signals import FOR_THE_RUN

HASTY = Patience(ping_s=0.2, silence_s=2.0, task_s=3.0, task_factor=1.0, leaving_s=2.0)


def job(job_id, order="", **fields):
    return JobSpec(id=job_id, prompt=f"a fox | {order}", **PICTURE | fields)


def lost(recorder):
    return [(event.rank, event.reason) for event in recorder.events if isinstance(event, RankLost)]


def statuses(recorder):
    return {outcome.info.job_id: outcome.status for outcome in recorder.outcomes}


@pytest.mark.parametrize("lookahead_s", [0.0, 1.0])
def test_a_worker_that_dies_alone_costs_its_step(mortal_pool, tmp_path, lookahead_s):
    name = f"alone-{lookahead_s}"
    recorder = run(
        mortal_pool,
        tmp_path,
        job(name, "die rank=0 step=2 times=1"),
        policy=following((0,)),
        lookahead_s=lookahead_s,
    )
    assert lost(recorder) == [(0, "killed by signal 9")]
    assert statuses(recorder) == {name: "done"}
    steps = [d.task.step for d in recorder.dispatches if d.task.step is not None]
    assert steps.count(2) == 2
    assert steps.count(0) == steps.count(1) == 1


def test_a_job_that_lost_its_worker_gives_the_same_picture(mortal_pool, tmp_path):
    calm = run(mortal_pool, tmp_path / "calm", job("calm", seed=5), policy=following((1,)))
    assert statuses(calm) == {"calm": "done"}
    troubled = job("troubled", "die rank=1 step=1 times=1", seed=5)
    run(mortal_pool, tmp_path / "troubled", troubled, policy=following((1,)))
    # The prompts differ, so this compares a job with itself on a pool where it died.
    again = run(mortal_pool, tmp_path / "again", troubled, policy=following((1,)))
    assert not lost(again)
    pictures = [pixels(tmp_path / folder / "troubled.png") for folder in ("troubled", "again")]
    assert np.array_equal(*pictures)


def test_a_death_in_a_group_stops_that_group_and_no_other(mortal_pool, tmp_path):
    grouped = job("grouped", "die rank=1 step=1 times=1")
    alone = job("single", steps=20)

    def decide(snapshot):
        layouts = {"grouped": (0, 1), "single": (2,)}
        for view in snapshot.open.values():
            layout = view.layout(layouts[view.job_id])
            if set(layout.ranks) <= set(snapshot.free_ranks):
                yield Decision(view.next_task, layout)

    recorder = run(mortal_pool, tmp_path, grouped, alone, policy=NamedPolicy("apart", decide))
    assert lost(recorder) == [(1, "killed by signal 9")]
    assert statuses(recorder) == {"grouped": "done", "single": "done"}
    failed = {e.dispatch for e in recorder.events if isinstance(e, TaskFailed)}
    assert {d.task.job_id for d in recorder.dispatches if d.number in failed} == {"grouped"}


@pytest.mark.parametrize("order", ["stop", "loop"])
def test_a_worker_that_hangs_is_killed_and_replaced(mortal_pool, tmp_path, order, caplog):
    caplog.set_level("INFO")
    spec = job(f"hung-{order}", f"{order} rank=2 step=1 times=1")
    recorder = run(mortal_pool, tmp_path, spec, policy=following((2, 0)), patience=HASTY)
    ((rank, reason),) = lost(recorder)
    assert rank == 2
    assert reason.startswith("no sign of life" if order == "stop" else "it hangs in a task")
    assert statuses(recorder) == {spec.id: "done"}
    assert [e.incarnation for e in recorder.events if isinstance(e, RankReady) and e.rank == 2][-1] > 1
    assert "rank 2 works again after " in caplog.text


def test_a_job_under_which_three_workers_die_fails_and_the_others_finish(mortal_pool, tmp_path):
    deadly = job("deadly", " ".join(f"die rank={rank} step=1 times=1" for rank in range(3)))

    def decide(snapshot):
        """Ranks in turn, so that each of them dies under the job once."""
        free = list(snapshot.free_ranks)
        for view in snapshot.open.values():
            deaths = len(list(Path(os.environ["GFGEN_TEST_FAULTS"]).glob("deadly.die.*")))
            wanted = deaths % 3 if view.job_id == "deadly" else free[-1] if free else None
            if wanted in free:
                free.remove(wanted)
                yield Decision(view.next_task, Layout.single(wanted))

    recorder = run(mortal_pool, tmp_path, deadly, job("other"), policy=NamedPolicy("turns", decide))
    assert statuses(recorder) == {"deadly": "failed", "other": "done"}
    assert sorted(rank for rank, _ in lost(recorder)) == [0, 1, 2]
    errors = {o.info.job_id: o.error for o in recorder.outcomes}
    assert errors["deadly"] == "3 workers died under it: rank 2: killed by signal 9"


def test_a_rank_that_dies_too_often_is_retired_and_the_rest_go_on(mortal_pool, tmp_path):
    now_s = time.monotonic()
    mortal_pool.deaths[0] += [now_s - 10_000.0, now_s, now_s]
    cursed = job("cursed", "die rank=0 step=1 times=1")

    def lowest(snapshot):
        first = snapshot.ranks[0].rank
        for view in snapshot.open.values():
            if first in snapshot.free_ranks:
                yield Decision(view.next_task, Layout.single(first))

    recorder = run(mortal_pool, tmp_path, cursed, policy=NamedPolicy("lowest", lowest))
    (event,) = [event for event in recorder.events if isinstance(event, RankLost)]
    assert (event.rank, event.is_retired) == (0, True)
    assert statuses(recorder) == {"cursed": "done"}
    assert recorder.ranks_of("cursed")[-1] == (1,)


def test_a_writer_that_dies_is_replaced_and_the_file_is_there(mortal_pool, tmp_path):
    for writer in mortal_pool.writers:
        os.kill(writer.process.pid, signal.SIGKILL)
    recorder = run(mortal_pool, tmp_path, job("written"))
    assert statuses(recorder) == {"written": "done"}
    assert os.listdir(tmp_path) == ["written.png"]


@pytest.fixture
def without_writer(mortal_pool, monkeypatch):
    """The pool, whose writer is gone; none can start in its place until `monkeypatch` undoes it."""
    monkeypatch.setattr(mortal_pool._launcher, "_writer_main", "faulty_worker:missing")
    for writer in mortal_pool.writers:
        writer.kill()
    return mortal_pool


def test_a_writer_that_cannot_start_is_tried_again_after_a_pause_and_fails_no_job(
    without_writer, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("gfgen.runtime.processes.pool.WRITER_PAUSE_S", 0.1)
    with contextlib.closing(
        ProcessBackend(without_writer, JobMemory([], tmp_path), clock=Clock())
    ) as backend:
        deadline = time.monotonic() + 60
        while caplog.text.count("a new one is started after a pause") < 3 and time.monotonic() < deadline:
            backend.wait(None)
    assert caplog.text.count("a new one is started\n") == 1, "for the one that had started"
    monkeypatch.undo()
    recorder = run(without_writer, tmp_path, job("late"))
    assert statuses(recorder) == {"late": "done"}


def test_a_run_that_stops_does_not_wait_for_a_writer_that_cannot_start(without_writer, tmp_path):
    with contextlib.closing(
        ProcessBackend(without_writer, JobMemory([], tmp_path), clock=Clock())
    ) as backend:
        backend._writes.new_frames(make_job("decoded"), 1)
        backend._writes.decoded("decoded")
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(backend, StopRequested)
        lost = wait_for(backend, FramesLost)
    assert lost.job_id == "decoded"
    assert "writer 0 cannot start: exit code 1" in lost.reason


def test_killing_random_workers_at_random_moments_loses_nothing(mortal_pool, tmp_path):
    specs = [job(f"random-{i}", f"die rank={i % 3} step={i % 4} times=1") for i in range(3)]
    recorder = run(mortal_pool, tmp_path, *specs, policy=following((0, 1, 2), (2, 0), (1,)), lookahead_s=0.05)
    assert set(statuses(recorder).values()) == {"done"}


def test_nobody_takes_the_place_of_a_rank_that_dies_while_the_run_stops(mortal_pool, tmp_path):
    with contextlib.closing(ProcessBackend(mortal_pool, JobMemory([], tmp_path), clock=Clock())) as backend:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(backend, StopRequested)
        incarnation = mortal_pool.workers[1].incarnation
        mortal_pool.workers[1].kill()
        assert wait_for(backend, RankLost).is_retired
        assert mortal_pool.workers[1].incarnation == incarnation
        assert [worker.rank for worker in mortal_pool.living] == [0, 2]
    wait_ready(mortal_pool)  # as before another run
    assert [worker.has_started for worker in mortal_pool.living] == [True] * 3
    assert mortal_pool.workers[1].incarnation == incarnation + 1


def wait_for(backend, kind):
    """The next event of this kind."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for event in backend.wait(None):
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__}")


def test_ranks_and_writers_get_no_signal_that_is_for_the_run(pool):
    for child in pool.children:
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{child.process.pid}/status").read_text().splitlines()
        )
        for number in FOR_THE_RUN:
            deaf = int(status["SigIgn"], 16) | int(status["SigBlk"], 16)
            assert deaf >> (number - 1) & 1, (child.name, number)
