"""Models that ranks cannot load: whose fault it is, and what becomes of the ranks."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from builders import make_job

from gfgen.errors import WorkerError
from gfgen.models.geometry.weight_files import weights_mark
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import Clock, Event, LoadFailed, RankLoaded, RankLost, RankReady
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes import starting
from gfgen.runtime.processes.child import Patience, Phase
from gfgen.runtime.processes.pool import MAX_DEATHS, MAX_SPARED, HeldModels, WorkerPool
from gfgen.runtime.processes.starting import wait_ready
from gfgen.runtime.processes.workers import JobMemory, ProcessBackend
from gfgen.session.warming import warm_ups

PATIENCE_S = 60.0


def held(*checkpoints: str) -> HeldModels:
    found = HeldModels([])
    found.change(map(Path, checkpoints))
    return found


def is_to_blame(models: HeldModels, rank: int, *, loading: str | None = "qwen", num_ranks: int = 2) -> bool:
    return models.lost(rank, f"rank {rank}: no", loading=loading, ranks=range(num_ranks))


def test_it_is_the_models_fault_when_no_rank_can_load_it_and_one_has_tried_again():
    models = held("qwen", "wan")
    assert not is_to_blame(models, 0)
    assert not is_to_blame(models, 0)
    assert not models.unloadable
    assert not is_to_blame(models, 1)
    assert not is_to_blame(models, 1)
    assert (models.unloadable, models.checkpoints) == ({"qwen": "rank 1: no"}, ("wan",))


def test_it_is_the_ranks_fault_when_another_rank_can_load_the_model():
    models = held("qwen")
    for _ in range(3):
        is_to_blame(models, 0)
    is_to_blame(models, 1, num_ranks=3)
    models.succeeded(0)
    assert is_to_blame(models, 1)
    assert not is_to_blame(models, 1, loading="another"), "that was given up"
    assert not models.unloadable


def test_ranks_are_to_blame_while_another_one_holds_all_models():
    models = held("qwen")
    assert not is_to_blame(models, 0)
    models.succeeded(1)
    assert is_to_blame(models, 0, num_ranks=3)
    is_to_blame(models, 1, loading=None)
    assert not is_to_blame(models, 0, num_ranks=3)


def test_a_rank_is_not_spared_for_ever_while_another_one_is_long_in_loading():
    models = held("qwen")
    assert [is_to_blame(models, 0) for _ in range(MAX_SPARED + 2)] == [False] * MAX_SPARED + [True] * 2
    assert not is_to_blame(models, 1, num_ranks=3)


def test_a_rank_that_has_tried_a_model_again_waits_for_those_that_have_not():
    models = held("qwen", "wan")
    is_to_blame(models, 0)
    assert not models.awaits_others(0, loading=[1])
    is_to_blame(models, 0)
    assert models.awaits_others(0, loading=[1])
    assert not models.awaits_others(0, loading=[0]), "nobody else will try"
    is_to_blame(models, 1, num_ranks=3)
    assert not models.awaits_others(0, loading=[1])
    assert models.awaits_others(0, loading=[1, 2])
    models.succeeded(2)
    assert not models.awaits_others(0, loading=[1])


def two_ranks(*checkpoints: Path, are_all_needed: bool = False) -> WorkerPool:
    """Whose workers load a model as its name says."""
    settings = RankSettings(num_ranks=2, are_all_needed=are_all_needed)
    return WorkerPool(settings, checkpoints, worker_main="loading_worker:main", num_writers=0)


def test_a_pool_knows_weights_as_they_were_before_it_loaded_them(tmp_path: Path) -> None:
    weights = [tmp_path / name / "transformer" / "model.safetensors" for name in ("good", "later")]
    for file in weights:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"as they were")
    before = {file: weights_mark(file.parents[1]) for file in weights}
    with two_ranks(tmp_path / "good") as pool:
        weights[0].write_bytes(b"tuned since")
        pool.set_models(tmp_path / name for name in ("good", "later"))
        weights[1].write_bytes(b"tuned since")
        assert {file: pool.models.weights_mark(file.parents[1]) for file in weights} == before


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ProcessBackend]:
    """Over two ranks that hold a model, and that a run has begun on."""
    with two_ranks(tmp_path / "good") as pool:
        wait_ready(pool)
        backend = ProcessBackend(pool, JobMemory([], tmp_path), clock=Clock())
        yield backend
        backend.close()


def events_until(backend: ProcessBackend, kind: type[Event], number: int = 1) -> list[Event]:
    found: list[Event] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while sum(isinstance(event, kind) for event in found) < number:
        assert time.monotonic() < deadline_s, found
        found += backend.wait(until=None)
    return found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "FileNotFoundError: broken is broken"),
        ("deadly", "it cannot load its models: killed by signal 9"),
    ],
)
def test_a_model_that_no_rank_can_load_is_told_and_costs_no_rank(
    backend: ProcessBackend, tmp_path: Path, name: str, reason: str
) -> None:
    events_until(backend, RankReady, 2)
    models = {"good": tmp_path / "good", "bad": tmp_path / name}
    backend.load(models, load_s=1.0)
    found = events_until(backend, LoadFailed)
    (failure,) = (event for event in found if isinstance(event, LoadFailed))
    assert failure.models == ("bad",)
    assert failure.reason.startswith(("rank 0: ", "rank 1: "))
    assert reason in failure.reason
    while not all(worker.has_started for worker in backend._pool.workers):
        found += events_until(backend, RankReady)
    backend.load({"good": tmp_path / "good", "other": tmp_path / "other"}, load_s=1.0)
    found += events_until(backend, RankLoaded, 2)
    assert not any(event.is_retired for event in found if isinstance(event, RankLost))


def test_a_rank_that_cannot_load_a_model_is_kept_while_another_one_is_long_at_its_task(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    events_until(backend, RankReady, 2)
    busy = backend._pool.workers[1].process.pid
    assert busy is not None
    os.kill(busy, signal.SIGSTOP)
    backend.load({"good": tmp_path / "good", "bad": tmp_path / "broken"}, load_s=1.0)
    found = events_until(backend, RankLost, 2)
    for _ in range(4):  # nothing happens
        found += backend.wait(until=None)
    os.kill(busy, signal.SIGCONT)
    found += events_until(backend, LoadFailed)
    while not all(worker.has_joined for worker in backend._pool.workers):
        found += events_until(backend, RankReady)
    assert [event.rank for event in found if isinstance(event, RankLost)] == [0, 0, 1]
    assert not any(event.is_retired for event in found if isinstance(event, RankLost))


def test_ranks_that_have_loaded_prepare_what_their_jobs_will_run_between_tasks(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    """Tasks of all models that they hold then."""

    def job_of(model: str, shape: str) -> AdmittedJob:
        job = make_job(f"{model} {shape}", shape=shape)
        spec = replace(job.spec, model=model)
        return replace(job, info=replace(job.info, spec=spec), checkpoint=tmp_path / model)

    backend.add([job_of("good", "small"), job_of("other", "small"), job_of("gone", "small")])
    backend._warm_ups = partial(warm_ups, degrees=(1,))
    events_until(backend, RankReady, 2)
    backend.load({"good": tmp_path / "good", "other": tmp_path / "other"}, load_s=1.0)
    events_until(backend, RankLoaded, 2)
    await_warm(tmp_path, {f"warm {number} on {rank} with 2 models" for number in range(4) for rank in (0, 1)})


def await_warm(folder: Path, names: set[str]) -> None:
    """Wait until ranks have prepared exactly this (loading_worker.py)."""
    deadline_s = time.monotonic() + PATIENCE_S
    while {path.name for path in folder.glob("warm*")} != names:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_rank_in_the_place_of_a_dead_one_prepares_what_its_jobs_will_run(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    events_until(backend, RankReady, 2)
    job = make_job("a")
    backend.add([replace(job, checkpoint=tmp_path / "good")])
    backend._warm_ups = partial(warm_ups, degrees=(1,))
    backend._pool.workers[1].kill()
    (ready,) = (event for event in events_until(backend, RankReady) if isinstance(event, RankReady))
    assert (ready.rank, ready.incarnation) == (1, 2)
    await_warm(tmp_path, {f"warm {number} on 1 with 1 models" for number in (0, 1)})


def test_a_shape_that_comes_later_is_prepared_once(backend: ProcessBackend, tmp_path: Path) -> None:
    events_until(backend, RankReady, 2)
    chosen: list[str] = []
    backend._warm_ups = lambda jobs: chosen.extend(job.job_id for job in jobs) or ()
    for name in ("a", "b"):
        backend.add([replace(make_job(name), checkpoint=tmp_path / "good")])
    backend.add([replace(make_job("c", shape="large"), checkpoint=tmp_path / "good")])
    assert chosen == ["a", "c"]


def test_one_rank_that_cannot_load_is_replaced_and_the_model_is_kept(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    """Another rank holds it."""
    events_until(backend, RankReady, 2)
    backend.load({"other": tmp_path / "other"}, load_s=1.0)
    events_until(backend, RankLoaded, 2)
    victim = backend._pool.workers[1]
    victim.loading = str(tmp_path / "other")  # as if it had just begun to
    victim.kill()
    found = events_until(backend, RankReady)
    assert not any(isinstance(event, LoadFailed) for event in found)
    assert str(tmp_path / "other") in backend._pool.models.checkpoints


def test_a_rank_that_becomes_ready_with_the_models_of_before_has_not_loaded_those_of_now(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    """Or others would be blamed for what no rank can load."""
    events_until(backend, RankReady, 2)
    backend._pool.workers[1].kill()
    events_until(backend, RankLost)
    backend.load({"bad": tmp_path / "broken"}, load_s=1.0)
    deadline_s = time.monotonic() + PATIENCE_S
    while not backend._pool.workers[1].has_started:
        assert time.monotonic() < deadline_s
        backend.wait(until=None)
    models = backend._pool.models
    assert not is_to_blame(models, 0, loading=models.checkpoints[0])


@pytest.mark.parametrize("name", ["broken", "deadly"])
def test_a_model_that_no_rank_can_load_at_the_start_fails_its_own_jobs(tmp_path: Path, name: str) -> None:
    with two_ranks(tmp_path / name, tmp_path / "good") as pool:
        wait_ready(pool)
        assert pool.models.checkpoints == (str(tmp_path / "good"),)
        job, other = make_job("a"), make_job("b")
        jobs = [replace(job, checkpoint=tmp_path / "good"), replace(other, checkpoint=tmp_path / name)]
        backend = ProcessBackend(pool, JobMemory(jobs, tmp_path), clock=Clock())
        found = events_until(backend, LoadFailed)
        backend.close()
    assert sum(isinstance(event, RankReady) for event in found) == 2
    (failure,) = (event for event in found if isinstance(event, LoadFailed))
    assert failure.models == (other.spec.model or "",)
    assert all(worker.has_arenas for worker in pool.workers)


def test_ranks_that_cannot_load_their_only_model_end_the_run_with_the_reason(tmp_path: Path) -> None:
    with (
        two_ranks(tmp_path / "broken") as pool,
        pytest.raises(WorkerError, match="cannot load its models: FileNotFoundError: broken is broken"),
    ):
        wait_ready(pool)


def test_a_rank_that_fails_at_the_start_is_started_again(tmp_path: Path) -> None:
    """Though another one holds the only model."""
    with two_ranks(tmp_path / "shaky", are_all_needed=True) as pool:
        wait_ready(pool)
        assert [worker.incarnation for worker in pool.workers] == [1, 2]
        assert all(worker.phase is Phase.SERVING and worker.has_arenas for worker in pool.workers)
        assert not pool.retired


def test_a_rank_that_never_starts_stays_away_and_the_run_goes_on_with_the_others(tmp_path: Path) -> None:
    with two_ranks(tmp_path / "picky") as pool:
        wait_ready(pool)
        assert pool.retired == {1}
        assert pool.workers[1].incarnation <= MAX_SPARED + MAX_DEATHS
        clock = Clock()
        backend = ProcessBackend(pool, JobMemory([], tmp_path), clock=clock)
        state = State([], RunStart(num_ranks=2), clock=clock, costs=CostModel())
        found = events_until(backend, RankReady)
        for event in found:
            state.apply(event)
        backend.close()
    assert [(event.rank, event.is_retired) for event in found if isinstance(event, RankLost)] == [(1, True)]
    assert [view.rank for view in state.snapshot().ranks] == [0]


def test_a_rank_that_never_starts_ends_what_needs_all_ranks_with_the_reason(tmp_path: Path) -> None:
    with (
        two_ranks(tmp_path / "picky", are_all_needed=True) as pool,
        pytest.raises(WorkerError, match="rank 1: it cannot load its models: FileNotFoundError: picky does"),
    ):
        wait_ready(pool)


def test_a_rank_that_hangs_at_the_start_stays_away_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    """However short the patience: as long as no rank is ready, it ends with an error."""
    with two_ranks(tmp_path / "sleepy") as pool:
        pool.patience = Patience(starting_s=0.01)
        while not pool.retired:
            with contextlib.suppress(WorkerError):
                wait_ready(pool)
        assert pool.retired == {1}
        assert [worker.rank for worker in pool.living if worker.has_arenas] == [0]
        assert not pool.workers[1].process.is_alive()


def test_ranks_that_share_a_gpu_are_given_as_many_times_as_long(tmp_path: Path) -> None:
    settings, main = RankSettings(num_ranks=2, num_gpus=1), "loading_worker:main"
    with WorkerPool(settings, [tmp_path / "good"], worker_main=main, num_writers=0) as pool:
        assert pool.patience == Patience().with_shared_gpus(2)
        assert {worker.ends_within_s for worker in pool.workers} == {2 * Patience().killed_s}
        backend = ProcessBackend(pool, JobMemory([], tmp_path), clock=Clock())
        assert pool.patience.silence_s == 2 * Patience().silence_s
        backend.close()


def test_a_rank_that_hangs_at_the_start_ends_what_needs_all_ranks(tmp_path: Path) -> None:
    with two_ranks(tmp_path / "sleepy", are_all_needed=True) as pool:
        pool.patience = Patience(starting_s=0.01)
        with pytest.raises(WorkerError, match=r"rank 1: the models are not loaded after 0.01 s"):
            wait_ready(pool)


def test_a_long_start_says_how_far_the_ranks_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it lasts: here until the line that is waited for is there."""
    monkeypatch.setattr(starting, "LOG_EVERY_S", 0.01)
    log = logging.getLogger("gfgen.runtime.processes.starting")
    caplog.set_level(logging.INFO, logger=log.name)

    def leave(record: logging.LogRecord) -> bool:
        if record.getMessage().endswith(": 1 of 2 ranks ready, 1 loading sleepy"):
            raise StopIteration
        return True

    log.addFilter(leave)
    try:
        with two_ranks(tmp_path / "sleepy") as pool, pytest.raises(StopIteration):
            wait_ready(pool)
    finally:
        log.removeFilter(leave)


def test_ranks_that_die_before_they_load_anything_end_the_run_with_the_reason(tmp_path: Path) -> None:
    """After as many deaths each as a run allows."""
    with (
        WorkerPool(
            RankSettings(num_ranks=2), [tmp_path / "good"], worker_main="loading_worker:die", num_writers=0
        ) as pool,
        pytest.raises(WorkerError, match=r"rank [01]: exit code 3"),
    ):
        wait_ready(pool)
    assert pool.retired == {0, 1}
    assert [worker.incarnation for worker in pool.workers] == [MAX_DEATHS] * 2


def kill_as_it_is_forked(
    fds: Sequence[int], *, fork: Callable[[Sequence[int]], tuple[int, int]]
) -> tuple[int, int]:
    """A child that is gone before it is told what it is to run."""
    from_server, to_child = fork(fds)
    os.kill(forkserver.read_signed(from_server), signal.SIGKILL)
    assert forkserver.read_signed(from_server) == -signal.SIGKILL
    return from_server, to_child


def test_a_worker_that_cannot_be_forked_at_all_ends_the_run(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = partial(kill_as_it_is_forked, fork=forkserver.connect_to_new_process)
    monkeypatch.setattr(forkserver, "connect_to_new_process", killed)
    backend._pool.workers[1].kill()
    with pytest.raises(WorkerError, match=r"rank 1 cannot be started: .*Broken pipe; run again to go on"):
        events_until(backend, RankReady, 3)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), EOFError("unexpected EOF")])
def test_limits_that_keep_a_worker_from_starting_are_named(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(fds: Any) -> Any:
        raise error

    monkeypatch.setattr(forkserver, "connect_to_new_process", refuse)
    backend._pool.workers[1].kill()
    with pytest.raises(WorkerError, match=r"rank 1 cannot be started: .*; perhaps raise ulimit -n"):
        events_until(backend, RankReady, 3)
