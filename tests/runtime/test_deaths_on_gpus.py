"""Faults on real GPUs: a process killed in a step of all of them, memory that runs out, a kernel that hangs.

pytest tests/runtime/test_deaths_on_gpus.py            # needs two ranks, better four (gpu_ranks.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from builders import Recorder, revived
from gpu_ranks import NUM_GPUS, NUM_RANKS, RANKS_PER_GPU, needs_two_ranks
from test_deaths import lost
from test_elastic import following
from test_workers import PICTURE, pixels, run

from gfgen.job.spec import JobSpec
from gfgen.runtime.core.devices import choose_devices
from gfgen.runtime.core.events import RankLost, TaskFailed
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.processes.child import Patience
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.starting import wait_ready

ALL = tuple(range(NUM_RANKS))
HASTY = Patience(task_s=10.0, task_factor=1.0, leaving_s=3.0).with_shared_gpus(RANKS_PER_GPU)
LEFT_BYTES = 8 << 30
"""Far more than the tiny models need, far less than the device has."""

pytestmark = [pytest.mark.gpu, needs_two_ranks]


@pytest.fixture(scope="module")
def gpus(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Ranks on GPUs that fail where a prompt tells them to."""
    settings = RankSettings(
        num_ranks=NUM_RANKS,
        device="cuda",
        num_gpus=NUM_GPUS,
        memory_limit=choose_devices("cuda", NUM_RANKS, ranks_per_gpu=RANKS_PER_GPU).rank_limit,
    )
    checkpoints = [tiny_models["tiny-qwen-image"]]
    with WorkerPool(settings, checkpoints, worker_main="faulty_worker:gpu_main") as pool:
        wait_ready(pool)
        yield pool


@pytest.fixture
def pool(gpus: WorkerPool) -> WorkerPool:
    return revived(gpus)


def job(job_id: str, order: str = "") -> JobSpec:
    return JobSpec(id=job_id, prompt=f"a fox | {order}", **PICTURE)


def statuses(recorder: Recorder) -> Mapping[str, str]:
    return {outcome.info.job_id: outcome.status for outcome in recorder.outcomes}


def steps_run(recorder: Recorder, job_id: str) -> Mapping[int, int]:
    """How often each step was dispatched."""
    tasks = [d.task for d in recorder.dispatches if d.task.job_id == job_id]
    return Counter(task.step for task in tasks if task.step is not None)


def test_a_process_killed_in_a_step_of_all_gpus_costs_that_step_only(pool: WorkerPool, tmp_path: Path):
    specs = [job("killed", f"die rank={ALL[-1]} step=2 times=1"), job("other")]
    # Without lookahead: a process takes a while to leave its GPU, and the next step may be queued by then.
    recorder = run(pool, tmp_path, *specs, policy=following(ALL), lookahead_s=0.0)
    assert lost(recorder) == [(ALL[-1], "killed by signal 9")]
    assert statuses(recorder) == {"killed": "done", "other": "done"}
    assert steps_run(recorder, "killed") == {0: 1, 1: 1, 2: 2, 3: 1}
    again = run(pool, tmp_path / "again", specs[0], policy=following(ALL))
    assert statuses(again) == {"killed": "done"}
    assert (pixels(tmp_path / "killed.png") == pixels(tmp_path / "again" / "killed.png")).all()


def test_a_job_that_changes_ranks_at_every_step_gives_the_same_picture(pool: WorkerPool, tmp_path: Path):
    """Its state goes from GPU to GPU, or between ranks that share one."""
    run(pool, tmp_path / "still", job("moved"), policy=following((0,)))
    run(pool, tmp_path / "moving", job("moved"), policy=following(*[(rank,) for rank in reversed(ALL)]))
    shown = [pixels(tmp_path / folder / "moved.png") for folder in ("still", "moving")]
    assert (shown[0] == shown[1]).all()


@pytest.mark.parametrize("ranks", [(0,), ALL], ids=["alone", "all"])
def test_memory_that_runs_out_costs_that_task_and_leaves_nothing_taken(
    pool: WorkerPool, tmp_path: Path, ranks: tuple[int, ...]
):
    specs = [job(f"large-{len(ranks)}", "short rank=0 step=1 times=1"), job("neighbour")]
    recorder = run(pool, tmp_path, *specs, policy=following(ranks, ranks, ALL))
    assert not [event for event in recorder.events if isinstance(event, RankLost)]
    failures = [event for event in recorder.events if isinstance(event, TaskFailed)]
    assert len({event.dispatch for event in failures if not event.void}) == 1
    assert any("out of memory" in event.reason for event in failures)
    assert set(statuses(recorder).values()) == {"done"}
    assert recorder.memory[0].reserved_bytes < LEFT_BYTES


def test_a_task_that_never_fits_fails_its_job_alone(pool: WorkerPool, tmp_path: Path):
    orders = " ".join(f"short rank={rank} step=1 times=9" for rank in ALL)
    recorder = run(pool, tmp_path, job("too-large", orders), job("neighbour"), policy="srtf")
    assert not [event for event in recorder.events if isinstance(event, RankLost)]
    assert statuses(recorder) == {"too-large": "failed", "neighbour": "done"}
    # A rank gives back what it has kept before its next step.
    after = run(pool, tmp_path / "after", job("after"), policy=following(*[(rank,) for rank in ALL]))
    assert max(use.reserved_bytes for use in after.memory.values()) < LEFT_BYTES


@pytest.mark.parametrize("ranks", [(1,), ALL], ids=["alone", "all"])
def test_a_kernel_that_hangs_costs_its_process_and_no_job(
    pool: WorkerPool, tmp_path: Path, ranks: tuple[int, ...]
):
    spec = job(f"hung-{len(ranks)}", "loop rank=1 step=1 times=1")
    recorder = run(pool, tmp_path, spec, job("neighbour"), policy=following(ranks), patience=HASTY)
    assert [event.rank for event in recorder.events if isinstance(event, RankLost)] == [1]
    assert set(statuses(recorder).values()) == {"done"}
