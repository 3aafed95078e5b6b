"""Pools of real workers that all tests of this folder share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from builders import revived

from gfgen.gfc.arena import ArenaPlan
from gfgen.models.families.registry import PACKAGED, resolve_checkpoint
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.starting import wait_ready


@pytest.fixture(scope="session")
def pool(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Four CPU ranks that know all built-in models."""
    checkpoints = [*tiny_models.values(), *map(resolve_checkpoint, PACKAGED)]
    with WorkerPool(RankSettings(num_ranks=4), checkpoints) as pool:
        wait_ready(pool)  # as `gfgen run` does: policies see all ranks from the start
        yield pool


@pytest.fixture(scope="session")
def faulty_pool(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Three CPU ranks that fail where a prompt tells them to (tests/faulty_worker.py)."""
    checkpoints = [tiny_models["tiny-qwen-image"]]
    with WorkerPool(RankSettings(num_ranks=3), checkpoints, worker_main="faulty_worker:main") as pool:
        wait_ready(pool)
        yield pool


@pytest.fixture(scope="session")
def bare_pool(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Three CPU ranks that imitate GPUs, and run bare loops too (tests/bare_imitation.py)."""
    settings = RankSettings(
        num_ranks=3, device="cuda", plan=ArenaPlan(data_bytes=1 << 20, post_bytes=1 << 12)
    )
    with WorkerPool(settings, [tiny_models["tiny-wan"]], worker_main="bare_imitation:main") as pool:
        wait_ready(pool)
        yield pool


@pytest.fixture
def mortal_pool(faulty_pool: WorkerPool) -> Iterator[WorkerPool]:
    """The same pool with all its ranks, who have not died yet as far as it remembers."""
    yield revived(faulty_pool)
    for rank in list(faulty_pool.retired):
        faulty_pool.deaths.clear()
        faulty_pool.replace_worker(rank, is_to_blame=False)


@pytest.fixture(scope="session")
def started_pool(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Three CPU ranks that imitate GPUs (tests/gpu_worker_imitation.py)."""
    checkpoints = [tiny_models["tiny-qwen-image"], tiny_models["tiny-wan"]]
    plan = ArenaPlan(data_bytes=1 << 20, post_bytes=1 << 12)
    settings = RankSettings(num_ranks=3, device="cuda", plan=plan)
    with WorkerPool(settings, checkpoints, worker_main="gpu_worker_imitation:main") as pool:
        yield pool


@pytest.fixture
def gpu_pool(started_pool: WorkerPool) -> WorkerPool:
    """All of them ready, and no death remembered."""
    return revived(started_pool)
