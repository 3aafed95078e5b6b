"""Ranks that stream the blocks of their models from one copy in main memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from builders import revived
from test_deaths import lost, statuses
from test_elastic import following
from test_workers import PICTURE, VIDEO, pixels, run

from gfgen.job.spec import JobSpec
from gfgen.models.geometry.weights import Placement, count_parts
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.starting import wait_ready

NAMES = ("tiny-wan-moe", "tiny-qwen-image")
WANDER = [(0,), (0, 1), (1,), (1, 0)]


@pytest.fixture(scope="module")
def started(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Two CPU ranks that stream all blocks through one buffer, and fail where a prompt tells them to."""
    checkpoints = [tiny_models[name] for name in NAMES]
    placements = {}
    for path in checkpoints:
        parts = {name: part for name, part in count_parts(path).items() if name != "vae"}
        placements[str(path)] = Placement({name: frozenset(parts[name].blocks) for name in parts}, 1)
    settings = RankSettings(num_ranks=2, placements=placements)
    with WorkerPool(settings, checkpoints, worker_main="faulty_worker:main") as pool:
        wait_ready(pool)
        yield pool


@pytest.fixture
def streaming_pool(started: WorkerPool) -> WorkerPool:
    return revived(started)


@pytest.mark.parametrize("fields", [PICTURE, VIDEO | {"model": "tiny-wan-moe"}], ids=["picture", "video"])
def test_steps_on_changing_ranks_give_the_files_of_resident_weights(
    pool: WorkerPool, streaming_pool: WorkerPool, tmp_path: Path, fields: dict[str, object]
) -> None:
    spec = JobSpec(id="job", prompt="a boat", negative_prompt="blurry", **fields)  # type: ignore[arg-type]
    latents = []
    for name, ranks in (("resident", pool), ("streamed", streaming_pool)):
        recorder = run(ranks, tmp_path / name, spec, policy=following(*WANDER))
        assert statuses(recorder) == {"job": "done"}
        latents.append(recorder.latents["job"])
    assert latents[0].keys() == latents[1].keys()
    assert all(latents[0][name].equal(latents[1][name]) for name in latents[0])


@pytest.mark.parametrize("step", [1, 2])
def test_a_rank_that_dies_in_a_step_finds_the_copy_again(
    pool: WorkerPool, streaming_pool: WorkerPool, tmp_path: Path, step: int
) -> None:
    fields = PICTURE | {"prompt": f"a fox | die rank=1 step={step} times=1"}
    spec = JobSpec(id=f"dies-{step}", **fields)  # type: ignore[arg-type]
    recorder = run(streaming_pool, tmp_path / "streamed", spec, policy=following(*WANDER))
    assert lost(recorder) == [(1, "killed by signal 9")]
    assert statuses(recorder) == {spec.id: "done"}
    run(pool, tmp_path / "resident", spec, policy=following(*WANDER))
    assert np.array_equal(*(pixels(tmp_path / name / f"{spec.id}.png") for name in ("resident", "streamed")))


def test_all_ranks_map_the_same_copy_and_main_memory_has_it_once(
    streaming_pool: WorkerPool, tiny_models: Mapping[str, Path]
) -> None:
    files = []
    for worker in streaming_pool.living:
        maps = Path(f"/proc/{worker.process.pid}/maps").read_text().splitlines()
        files.append({line.split()[4] for line in maps if "gfgen-weights" in line})
    assert len(files[0]) == len(NAMES)
    assert files[0] == files[1]


def four_ranks(path: Path, placements: Mapping[str, Placement], main: str | None) -> Iterator[WorkerPool]:
    with WorkerPool(RankSettings(num_ranks=4, placements=placements), [path], worker_main=main) as pool:
        wait_ready(pool)
        yield pool


@pytest.fixture(scope="module")
def sharing_ranks(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Four CPU ranks that keep all blocks for each other."""
    path = tiny_models["tiny-qwen-image"]
    parts = {name: part for name, part in count_parts(path).items() if name != "vae"}
    keys = {name: frozenset(parts[name].blocks) for name in parts}
    yield from four_ranks(path, {str(path): Placement(keys, 1, shared=keys)}, "faulty_worker:main")


@pytest.fixture(scope="module")
def whole_ranks(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    yield from four_ranks(tiny_models["tiny-qwen-image"], {}, None)


GROWING = [(0,), (1, 0), (0, 1, 2), (3, 2, 1, 0), (3,), (2, 1, 3)]


def test_steps_on_ranks_that_keep_blocks_for_each_other_give_the_files_of_resident_weights(
    whole_ranks: WorkerPool, sharing_ranks: WorkerPool, tmp_path: Path
) -> None:
    fields = PICTURE | {"steps": 6, "negative_prompt": "blurry"}
    spec = JobSpec(id="job", prompt="a boat", **fields)  # type: ignore[arg-type]
    latents = []
    for name, ranks in (("resident", whole_ranks), ("shared", sharing_ranks)):
        recorder = run(revived(ranks), tmp_path / name, spec, policy=following(*GROWING))
        assert statuses(recorder) == {"job": "done"}
        latents.append(recorder.latents["job"])
    assert all(latents[0][name].equal(latents[1][name]) for name in latents[0])


@pytest.mark.parametrize("step", [1, 3])
def test_when_a_rank_dies_others_read_its_blocks_elsewhere_and_a_step_is_lost(
    whole_ranks: WorkerPool, sharing_ranks: WorkerPool, tmp_path: Path, step: int
) -> None:
    fields = PICTURE | {"steps": 6, "prompt": f"a fox | die rank=1 step={step} times=1"}
    spec = JobSpec(id=f"shared-{step}", **fields)  # type: ignore[arg-type]
    for name, ranks, deaths in (
        ("resident", whole_ranks, []),
        ("shared", sharing_ranks, [(1, "killed by signal 9")]),
    ):
        recorder = run(revived(ranks), tmp_path / name, spec, policy=following((1, 0), (1, 2)))
        assert statuses(recorder) == {spec.id: "done"}
        assert lost(recorder) == deaths
    assert np.array_equal(*(pixels(tmp_path / name / f"{spec.id}.png") for name in ("resident", "shared")))
