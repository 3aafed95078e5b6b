"""Pools of real workers that all tests of this folder share: starting one takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gfgen.runtime.pool import WorkerPool


@pytest.fixture(scope="session")
def pool(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Four CPU ranks that know the tiny Wan and Qwen-Image models."""
    checkpoints = [tiny_models["tiny-wan"], tiny_models["tiny-qwen-image"]]
    with WorkerPool(num_ranks=4, checkpoints=checkpoints) as pool:
        yield pool


@pytest.fixture(scope="session")
def faulty_pool(
    tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerPool]:
    """Three CPU ranks that fail where a prompt tells them to (tests/faulty_worker.py)."""
    os.environ["GFGEN_TEST_FAULTS"] = str(tmp_path_factory.mktemp("faults"))
    checkpoints = [tiny_models["tiny-qwen-image"]]
    with WorkerPool(num_ranks=3, checkpoints=checkpoints, worker_main="faulty_worker:main") as pool:
        yield pool
    del os.environ["GFGEN_TEST_FAULTS"]


@pytest.fixture
def mortal_pool(faulty_pool: WorkerPool) -> Iterator[WorkerPool]:
    """The same pool, whose ranks have not died yet as far as it remembers."""
    for deaths in faulty_pool._deaths.values():
        deaths.clear()
    yield faulty_pool
    for rank in list(faulty_pool.retired):
        faulty_pool.retired.discard(rank)
        faulty_pool.replace_worker(rank, now_s=1e9)
        faulty_pool.introduce(rank)
