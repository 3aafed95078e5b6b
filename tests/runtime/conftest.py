"""A pool of real workers that all tests of this folder share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gfgen.runtime.workers import WorkerPool


@pytest.fixture(scope="session")
def pool(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Four CPU ranks that know the tiny Wan and Qwen-Image models."""
    checkpoints = [tiny_models["tiny-wan"], tiny_models["tiny-qwen-image"]]
    with WorkerPool(num_ranks=4, checkpoints=checkpoints) as pool:
        yield pool


@pytest.fixture(scope="session")
def faulty_pool(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Three CPU ranks that fail where a prompt tells them to (tests/faulty_worker.py)."""
    checkpoints = [tiny_models["tiny-qwen-image"]]
    with WorkerPool(num_ranks=3, checkpoints=checkpoints, worker_main="faulty_worker:main") as pool:
        yield pool
