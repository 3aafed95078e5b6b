"""Models that take turns and come back from main memory, on CPU ranks that imitate GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import test_deaths
import test_elastic
from builders import Recorder, revived
from test_worker_gpu import PLAN, VIDEO, order
from test_workers import PICTURE, admitted, run

from gfgen.job.spec import JobSpec
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.core.events import RankLoaded
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.session.warming import warm_ups

NAMES = ("tiny-qwen-image", "tiny-wan")
PICTURE_JOB = JobSpec(id="picture", prompt="a fox", **PICTURE | {"seed": 3})
LAYOUTS = test_elastic.following((0, 1), (1,), (0,))


@pytest.fixture(scope="module")
def started(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """Two ranks; main memory has room for copies of both models."""
    paths = [tiny_models[name] for name in NAMES]
    settings = RankSettings(
        num_ranks=2, device="cuda", plan=PLAN, has_graphs=True, kept={str(path): 1 << 20 for path in paths}
    )
    with WorkerPool(settings, paths, worker_main="gpu_worker_imitation:main") as pool:
        yield pool


@pytest.fixture
def switching_pool(started: WorkerPool) -> WorkerPool:
    return revived(started)


def switched_run(pool: WorkerPool, folder: Path, *specs: JobSpec) -> tuple[Recorder, Residency]:
    """With room for one model, at first that of the first job."""
    jobs = admitted(*specs)
    sizes = {job.checkpoint: 10 for job in jobs}
    residency = Residency(jobs, weights=sizes, work_bytes=lambda _: 0, room_bytes=19)
    residency.kept = sizes
    pool.set_models(residency.checkpoints)
    choose = partial(warm_ups, degrees=(1, 2))
    recorder = run(pool, folder, *specs, policy=LAYOUTS, residency=residency, warm_ups=choose)
    assert set(test_deaths.statuses(recorder).values()) == {"done"}
    return recorder, residency


def loads(recorder: Recorder) -> list[tuple[int, tuple[str, ...]]]:
    found = [event for event in recorder.events if isinstance(event, RankLoaded)]
    return sorted((event.rank, event.copied) for event in found)


def test_two_models_that_alternate_ten_times_come_back_from_main_memory_and_change_no_bits(
    switching_pool: WorkerPool, tmp_path: Path
) -> None:
    run(switching_pool, tmp_path / "alone", PICTURE_JOB, policy=LAYOUTS)
    run(switching_pool, tmp_path / "alone", VIDEO, policy=LAYOUTS)
    wanted = [(tmp_path / "alone" / name).read_bytes() for name in ("picture.png", "video.mp4")]
    back = []
    for turn in range(5):
        folder = tmp_path / str(turn)
        recorder, _ = switched_run(switching_pool, folder, PICTURE_JOB, VIDEO)
        back.append(loads(recorder))
        assert [(folder / name).read_bytes() for name in ("picture.png", "video.mp4")] == wanted
    once = [(rank, (name,)) for rank in (0, 1) for name in NAMES]
    assert back[1:] == [once] * 4, "at first, ranks hold both models"


@pytest.mark.parametrize("moment", ["leave", "come_back"])
def test_a_rank_that_dies_in_a_switch_loads_from_files_and_the_others_from_main_memory(
    switching_pool: WorkerPool, tmp_path: Path, moment: str
) -> None:
    switched_run(switching_pool, tmp_path / "before", PICTURE_JOB, VIDEO)
    order(moment, "die")
    recorder, _ = switched_run(switching_pool, tmp_path / "after", PICTURE_JOB, VIDEO)
    assert [reason for _, reason in test_deaths.lost(recorder)] == [
        "killed by signal 9" if moment == "leave" else "it cannot load its models: killed by signal 9"
    ]
    assert {name for _, copied in loads(recorder) for name in copied} == {*NAMES}, "the other rank"
    files = [
        [(tmp_path / folder / name).read_bytes() for name in ("picture.png", "video.mp4")]
        for folder in ("before", "after")
    ]
    assert files[0] == files[1]
