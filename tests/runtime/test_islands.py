"""Ranks that do not reach each other's memory, as GPUs without peer access: no layout holds both, or layouts
go through main memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from test_deaths import lost, statuses
from test_elastic import following
from test_workers import PICTURE, pixels, run

from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.starting import wait_ready

ISLANDS = ((0, 1), (2,))
PAIRS = ((0, 1), (2, 3))


@pytest.fixture(scope="module")
def island_pool(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Three ranks, of which two reach each other."""
    settings, checkpoints = RankSettings(num_ranks=3, islands=ISLANDS), [tiny_models["tiny-qwen-image"]]
    with WorkerPool(settings, checkpoints, worker_main="faulty_worker:main") as pool:
        wait_ready(pool)
        yield pool


@pytest.mark.parametrize("lookahead_s", [0.0, 1.0])
def test_a_job_that_goes_from_island_to_island_gives_the_same_picture(island_pool, tmp_path, lookahead_s):
    spec = JobSpec(id="picture", prompt="a fox", **PICTURE | {"steps": 6})
    shown = []
    for name, layouts in (("still", ((0,),)), ("moving", ((0, 1), (2,), (1,), (2,), (1, 0)))):
        recorder = run(
            island_pool,
            tmp_path / name,
            spec,
            policy=following(*layouts),
            lookahead_s=lookahead_s,
            islands=ISLANDS,
        )
        assert statuses(recorder) == {"picture": "done"}
        shown.append(pixels(tmp_path / name / "picture.png").astype(int))
    assert np.abs(shown[1] - shown[0]).max() <= 1


def test_a_rank_that_dies_is_made_known_to_its_own_island(island_pool, tmp_path):
    name = "island-dies"
    spec = JobSpec(id=name, prompt="a fox | die rank=1 step=1 times=1", **PICTURE | {"steps": 4})
    recorder = run(island_pool, tmp_path, spec, policy=following((0, 1), (0, 1), (2,)), islands=ISLANDS)
    assert lost(recorder) == [(1, "killed by signal 9")]
    assert statuses(recorder) == {name: "done"}


@pytest.fixture(scope="module")
def paired_pool(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Four ranks in two pairs, with a slow link between these."""
    settings = RankSettings(num_ranks=4, near=PAIRS, link_bytes_per_s=50e6)
    with WorkerPool(settings, [tiny_models["tiny-qwen-image"]], worker_main="faulty_worker:main") as pool:
        wait_ready(pool)
        yield pool


def test_a_layout_gives_the_same_bits_inside_a_pair_and_across_pairs(paired_pool, tmp_path):
    spec = JobSpec(id="picture", prompt="a fox", **PICTURE | {"steps": 2})
    ways = {
        "two": [Layout(ranks, torus=2) for ranks in ((0, 1), (1, 2), (3, 0))],
        "four": [Layout(ranks, ulysses=2, torus=2) for ranks in ((0, 1, 2, 3), (0, 2, 1, 3))],
    }
    for name, layouts in ways.items():
        shown = []
        for number, layout in enumerate(layouts):
            folder = tmp_path / f"{name}-{number}"
            recorder = run(paired_pool, folder, spec, policy=following(layout))
            assert {each.layout for each in recorder.dispatches if each.layout.degree > 1} == {layout}
            shown.append(pixels(folder / "picture.png"))
        assert all(np.array_equal(each, shown[0]) for each in shown), name


def test_a_rank_that_dies_in_an_exchange_across_pairs_costs_the_step(paired_pool, tmp_path):
    spec = JobSpec(id="across", prompt="a fox | die rank=2 step=1 times=1", **PICTURE | {"steps": 4})
    wide = Layout((0, 1, 2, 3), ulysses=2, torus=2)
    recorder = run(paired_pool, tmp_path, spec, policy=following(wide, wide, (0, 1), wide))
    assert lost(recorder) == [(2, "killed by signal 9")]
    assert statuses(recorder) == {"across": "done"}
    assert recorder.dispatches[-2].layout == wide
