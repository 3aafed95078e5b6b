"""Workers of GPU ranks, on a CPU: tasks that end after their launch, and what comes between.

The device is imitated (tests/gpu_worker_imitation.py); on real ones see tests/cli/test_run_on_gpus.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_deaths
import test_elastic
import torch
from builders import Recorder
from gpu_worker_imitation import LAUNCH_BYTES
from test_workers import PICTURE, admitted, pixels, run

from gfgen.errors import ModelError
from gfgen.gfc.arena import ArenaPlan
from gfgen.graph import Stage, Task
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families.adapter import Fields
from gfgen.models.parallel import cudnn_attention, parallel
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.core.events import FramesLost, ModelsChanged, RankLoaded, TaskDone, TaskFailed
from gfgen.runtime.ipc.messages import (
    Arenas,
    ModelsSet,
    Pong,
    RunTask,
    SendState,
    SetModels,
    Transfer,
)
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.runtime.processes.child import Patience, Phase, RankProcess
from gfgen.runtime.processes.pool import HeldModels, WorkerPool
from gfgen.runtime.processes.starting import warm_up
from gfgen.runtime.worker import gpu
from gfgen.runtime.worker import jobs as worker_jobs
from gfgen.runtime.worker.dispatches import Dispatches, InputVoidError
from gfgen.runtime.worker.forwards import Forwards
from gfgen.runtime.worker.gpu import GpuDevice, pad_as_others
from gfgen.runtime.worker.jobs import RankJob, RankTask
from gfgen.runtime.worker.loop import Worker
from gfgen.session.warming import warm_ups

PLAN = ArenaPlan(data_bytes=1 << 20, post_bytes=1 << 12)


@pytest.mark.parametrize(("num_gpus", "gpus"), [(0, [0, 1, 2]), (3, [0, 1, 2]), (2, [0, 1, 0]), (1, [0] * 3)])
def test_ranks_take_turns_at_the_gpus_that_there_are(num_gpus: int, gpus: list[int]):
    ranks = RankSettings(num_ranks=3, num_gpus=num_gpus)
    assert [WorkerSettings(rank, (), ranks).gpu for rank in range(3)] == gpus


def test_every_rank_brings_its_arena_and_is_given_those_of_the_others(gpu_pool):
    for rank in range(3):
        ranks, fds = gpu_pool._arenas.known_to(rank, among=range(3))
        assert ranks == (0, 1, 2)
        assert len(set(fds)) == 4


@pytest.mark.parametrize("lookahead_s", [0.0, 1.0])
def test_a_picture_is_the_same_on_one_rank_on_several_and_on_changing_ones(gpu_pool, tmp_path, lookahead_s):
    spec = JobSpec(id="picture", prompt="a fox", **PICTURE | {"seed": 3})
    shown = []
    for name, layouts in (
        ("alone", ((0,),)),
        ("together", ((0, 1),)),
        ("moving", ((2,), (0, 1), (1, 2, 0), (1,))),
    ):
        folder = tmp_path / name
        recorder = run(
            gpu_pool, folder, spec, policy=test_elastic.following(*layouts), lookahead_s=lookahead_s
        )
        assert test_deaths.statuses(recorder) == {"picture": "done"}
        shown.append(pixels(folder / "picture.png").astype(int))
    assert max(np.abs(other - shown[0]).max() for other in shown) <= 1


def test_ranks_that_were_warmed_up_run_their_steps_as_records(gpu_pool, tmp_path):
    """On a CPU launches take as long as all, so that every forward of the warm-up is recorded."""
    spec = JobSpec(id="warm", prompt="a fox", **PICTURE | {"seed": 4})
    layouts = ((2,), (0, 1), (1, 2, 0), (1,))
    run(gpu_pool, tmp_path / "cold", spec, policy=test_elastic.following(*layouts))
    items = warm_ups(admitted(spec), (1, 2, 3))
    assert {answer.reason for _, answer in warm_up(gpu_pool, items)} == {None}
    run(gpu_pool, tmp_path / "warm", spec, policy=test_elastic.following(*layouts))
    shown = [pixels(tmp_path / folder / "warm.png") for folder in ("cold", "warm")]
    assert np.array_equal(*shown)


def test_warm_up_that_fails_is_told_and_costs_nothing_else(gpu_pool, tmp_path):
    spec = JobSpec(id="odd", prompt="a fox", **PICTURE)
    item, *_ = warm_ups(admitted(spec), (1,))
    broken = replace(item, spec=replace(spec, model="tiny-qwen-image", width=1))
    ((_, answer),) = warm_up(gpu_pool, [broken])
    assert answer.reason
    recorder = run(gpu_pool, tmp_path, spec, policy=test_elastic.following((0,)))
    assert test_deaths.statuses(recorder) == {"odd": "done"}


def test_a_rank_that_dies_while_it_is_warmed_up_comes_back_for_the_run(gpu_pool, tmp_path, caplog):
    picture = PICTURE | {"seed": 5, "height": 96}  # of a size that was not warmed up before
    spec = JobSpec(id="deadly-warm-up", prompt="die rank=1 step=0 times=1", **picture)
    incarnations = [worker.incarnation for worker in gpu_pool.workers]
    ((_, answer),) = warm_up(gpu_pool, warm_ups(admitted(spec), (1,))[:1])
    assert answer.reason is None
    assert [
        new - old
        for new, old in zip([worker.incarnation for worker in gpu_pool.workers], incarnations, strict=True)
    ] == [0, 1, 0]
    assert "rank 1: " in caplog.text
    recorder = run(gpu_pool, tmp_path, spec, policy=test_elastic.following((0, 1, 2)))
    assert test_deaths.statuses(recorder) == {"deadly-warm-up": "done"}


@pytest.mark.parametrize("ranks", [(0,), (2, 0, 1)], ids=str)
def test_frames_that_go_through_the_buffer_in_pieces_are_whole(gpu_pool, pool, tmp_path, ranks):
    """From one rank, or from several, each with a band of rows."""
    video = JobSpec(
        id="video", prompt="a fox", model="tiny-wan", width=128, height=128, frames=9, steps=2, seed=1
    )
    for each, folder in ((gpu_pool, "gpu"), (pool, "cpu")):
        recorder = run(each, tmp_path / folder, video, policy=test_elastic.following(ranks))
        assert recorder.ranks_of("video")[-1] == ranks
    files = [(tmp_path / folder / "video.mp4").read_bytes() for folder in ("gpu", "cpu")]
    assert files[0] == files[1]


@pytest.mark.parametrize("lookahead_s", [0.0, 1.0])
def test_a_rank_that_dies_alone_costs_its_step(gpu_pool, tmp_path, lookahead_s):
    name = f"gpu-alone-{lookahead_s}"
    spec = test_deaths.job(name, "die rank=0 step=2 times=1")
    recorder = run(gpu_pool, tmp_path, spec, policy=test_elastic.following((0,)), lookahead_s=lookahead_s)
    assert test_deaths.lost(recorder) == [(0, "killed by signal 9")]
    assert test_deaths.statuses(recorder) == {name: "done"}


@pytest.mark.parametrize("lookahead_s", [0.0, 1.0])
def test_a_death_in_a_group_is_left_by_the_others_who_go_on_with_its_successor(
    gpu_pool, tmp_path, lookahead_s
):
    name = f"gpu-group-{lookahead_s}"
    spec = test_deaths.job(name, "die rank=1 step=1 times=1", steps=6)
    recorder = run(
        gpu_pool, tmp_path, spec, policy=test_elastic.following((0, 1, 2), (1, 2)), lookahead_s=lookahead_s
    )
    assert test_deaths.lost(recorder) == [(1, "killed by signal 9")]
    assert test_deaths.statuses(recorder) == {name: "done"}
    assert gpu_pool.workers[1].has_arenas


def test_a_failure_on_one_rank_of_a_group_costs_one_attempt(gpu_pool, tmp_path):
    spec = test_deaths.job("gpu-fails", "fail rank=1 step=1 times=1")
    recorder = run(gpu_pool, tmp_path, spec, policy=test_elastic.following((0, 1)))
    assert test_deaths.statuses(recorder) == {"gpu-fails": "done"}


@pytest.mark.parametrize("ranks", [(0,), (1, 0)], ids=str)
def test_latents_with_nan_fail_their_job_at_the_step_that_made_them(gpu_pool, tmp_path, ranks):
    """The step after it may be on its way already."""
    spec = test_deaths.job(f"gpu-nan-{len(ranks)}", "nan rank=0 step=2 times=9")
    recorder = run(gpu_pool, tmp_path, spec, policy=test_elastic.following(ranks), lookahead_s=1.0)
    (outcome,) = recorder.outcomes
    assert outcome.error.startswith("denoise 3 of 4: NaN or infinity in the latents; ")


def test_a_task_that_runs_out_of_memory_once_is_tried_again(gpu_pool, tmp_path):
    spec = test_deaths.job("gpu-short", "short rank=0 step=1 times=1")
    recorder = run(gpu_pool, tmp_path, spec, policy=test_elastic.following((0,)))
    assert test_deaths.statuses(recorder) == {"gpu-short": "done"}
    assert recorder.memory[0].device_peaks.keys() == {"tiny-qwen-image"}
    assert recorder.memory[0].arena_bytes > PLAN.data_bytes


def test_ranks_tell_what_tasks_of_each_kind_took_where_one_rank_ran_them_and_nothing_was_replayed(
    gpu_pool, tmp_path
):
    spec = replace(test_deaths.job("gpu-peaks", ""), width=96)
    recorder = run(gpu_pool, tmp_path, spec, policy=test_elastic.following((0,), (0, 1)))
    assert test_deaths.statuses(recorder) == {"gpu-peaks": "done"}
    found = {name: size for use in recorder.memory.values() for name, size in use.task_peaks.items()}
    mine = {name.split()[-1]: size for name, size in found.items() if " 96x64" in name}
    assert mine.keys() == {"encode", "prepare", "decode"}
    assert set(mine.values()) == {LAUNCH_BYTES}


def order(name: str, what: str) -> None:
    """Tell the next worker that does such a thing to go wrong in it."""
    (Path(os.environ["GFGEN_TEST_FAULTS"]) / name).write_text(what)


@pytest.mark.parametrize("what", ["fail", "die"])
def test_frames_that_do_not_reach_the_writer_are_decoded_again(gpu_pool, tmp_path, what):
    order("frames", what)
    picture = JobSpec(id="picture", prompt="a fox", **PICTURE)
    recorder = run(gpu_pool, tmp_path, picture, policy=test_elastic.following((0,)))
    (event,) = [event for event in recorder.events if isinstance(event, FramesLost)]
    assert (event.job_id, event.lost) == ("picture", what == "die")
    assert test_deaths.statuses(recorder) == {"picture": "done"}
    decodes = [d for d in recorder.dispatches if d.task.stage is Stage.DECODE]
    assert len(decodes) == 2


@pytest.fixture
def swapping_pool(gpu_pool: WorkerPool, tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """The same ranks, which hold all models again afterwards."""
    yield gpu_pool
    gpu_pool.set_models(tiny_models[name] for name in ("tiny-qwen-image", "tiny-wan"))


def swapped_run(pool: WorkerPool, folder: Path, *specs: JobSpec, policy: NamedPolicy) -> Recorder:
    """A run with room for one model at a time; ranks get ready what they load."""
    jobs = admitted(*specs)
    residency = Residency(
        jobs,
        weights={job.checkpoint: 10 for job in jobs},
        work_bytes=lambda _: 0,
        room_bytes=19,
    )
    pool.set_models(residency.checkpoints)
    choose = partial(warm_ups, degrees=(1, 2))
    return run(pool, folder, *specs, policy=policy, residency=residency, warm_ups=choose)


VIDEO = JobSpec(id="video", prompt="a fox", model="tiny-wan", width=64, height=64, frames=5, steps=3, seed=1)


def test_models_that_do_not_fit_together_are_swapped_and_change_nothing(swapping_pool, tmp_path, caplog):
    picture = JobSpec(id="picture", prompt="a fox", **PICTURE | {"seed": 3})
    layouts = test_elastic.following((0, 1), (2,))
    run(swapping_pool, tmp_path / "all", picture, VIDEO, policy=layouts)
    recorder = swapped_run(swapping_pool, tmp_path / "turns", picture, VIDEO, policy=layouts)
    (change,) = [event for event in recorder.events if isinstance(event, ModelsChanged)]
    assert list(change.models) == ["tiny-wan"]
    loaded = [event.rank for event in recorder.events if isinstance(event, RankLoaded)]
    assert sorted(loaded[-3:]) == [0, 1, 2]
    assert "warming up" not in caplog.text  # nothing went wrong in it
    for name in ("picture.png", "video.mp4"):
        files = [(tmp_path / folder / name).read_bytes() for folder in ("all", "turns")]
        assert files[0] == files[1]


def test_a_rank_that_dies_after_a_change_comes_back_with_the_models_of_now(swapping_pool, tmp_path):
    first = JobSpec(id="first", prompt="a fox", model="tiny-wan", width=64, height=64, frames=5, steps=2)
    second = test_deaths.job("gpu-swapped", "die rank=0 step=2 times=1")
    recorder = swapped_run(swapping_pool, tmp_path, first, second, policy=test_elastic.following((0,)))
    assert test_deaths.lost(recorder) == [(0, "killed by signal 9")]
    assert test_deaths.statuses(recorder) == {"first": "done", "gpu-swapped": "done"}


def test_a_rank_that_cannot_load_is_replaced_and_says_why(swapping_pool, tmp_path):
    picture = JobSpec(id="picture", prompt="a fox", **PICTURE | {"steps": 2})

    def decide(snapshot):
        """The next model that some rank is to load is not loaded."""
        view = snapshot.open.get("picture")
        if view is not None and view.next_task.stage is Stage.DECODE:
            order("load", "fail")
        return test_elastic.following((0,)).decide(snapshot)

    policy = NamedPolicy("breaking", decide)
    recorder = swapped_run(swapping_pool, tmp_path, picture, VIDEO, policy=policy)
    ((_, reason),) = test_deaths.lost(recorder)
    assert reason.startswith("it cannot load its models: RuntimeError: as told by a file")
    assert test_deaths.statuses(recorder) == {"picture": "done", "video": "done"}


@pytest.mark.parametrize(("message", "phase"), [(ModelsSet(2.0), Phase.SERVING), (Pong(), Phase.PREPARING)])
def test_what_a_rank_says_while_others_start_is_no_surprise(message, phase):
    """Between two runs nobody else reads it."""
    pool: Any = WorkerPool.__new__(WorkerPool)
    pool.models, pool.needed = HeldModels([]), None
    channel: Any = SimpleNamespace(receive=lambda: (message, []))
    process: Any = None
    worker = RankProcess(name="rank 0", process=process, channel=channel, rank=0, phase=Phase.PREPARING)
    worker.requests.append(SetModels(()))
    assert (worker, message) in list(pool._hear(worker))
    assert worker.phase is phase


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_failures_among_overlapping_groups_lose_nothing(gpu_pool, tmp_path, seed):
    test_elastic.test_failures_among_overlapping_groups_lose_nothing(gpu_pool, tmp_path, seed)


def test_a_rank_leaves_a_task_when_nothing_of_it_is_under_way_on_any_stream(monkeypatch):
    """An exchange beside attention may be, where the attention raised."""
    waited: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            waited.append(self.name)

    device: Any = GpuDevice.__new__(GpuDevice)
    device._device = torch.device("cuda", 0)
    main, arrivals, departures = map(Stream, ("main", "arrivals", "departures"))
    device._streams = SimpleNamespace(main=main, arrivals=arrivals, departures=departures)
    monkeypatch.setattr(parallel, "_exchange_stream", lambda device: Stream("lane"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    device.drain()
    assert sorted(waited) == ["arrivals", "lane", "main"]
    waited.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: departures)
    device.drain()
    assert waited == ["departures"]


def test_a_dispatch_given_up_after_its_input_was_asked_for_is_left_when_none_arrives_any_more():
    waited: list[str] = []
    device: Any = GpuDevice.__new__(GpuDevice)
    device._streams = SimpleNamespace(arrivals=SimpleNamespace(synchronize=lambda: waited.append("arrivals")))
    device.forwards, device._is_short = None, False
    device._dispatches = dispatches = Dispatches(lambda numbers: None)
    dispatches.note_to_send(7)
    dispatches.abandon(frozenset({8}))
    with pytest.raises(InputVoidError):
        device._get_ready(SimpleNamespace(number=8), None, may_block=True)
    assert waited == ["arrivals"]


def test_kinds_of_tasks_differ_where_their_kernels_may():
    """Kernels are loaded when they are first launched, which must not be behind a barrier."""
    adapter: Any = SimpleNamespace(
        text_shape=lambda spec, prompt, layout: prompt.tensors["prompt_embeds"].shape
    )
    forwards = Forwards({"c": adapter}, None, rank=1, unentered=None)  # type: ignore[arg-type]

    def message(layout: Layout, *transfers: Transfer) -> RunTask:
        return RunTask(1, "a", 9, 0, layout, (), transfers)

    def kinds(layout: Layout, step: int, text_tokens: int = 7, **fields: Any) -> frozenset[object]:
        prompt = Fields({"prompt_embeds": torch.empty(1, text_tokens, 4)})
        job: Any = SimpleNamespace(
            start=SimpleNamespace(
                checkpoint="c",
                spec=JobSpec(id="a", prompt="a fox", **fields),
                shape="",
                trajectory=SimpleNamespace(artifacts=()),
            ),
            artifacts={"prompt": prompt},
        )
        work = RankTask(message(layout), job, Task("a", 2 + step, Stage.DENOISE, step))
        return gpu.task_kinds(work, 1, forwards.kind_of(work))

    layouts = Layout((0, 1), ulysses=2), Layout((1, 0), ulysses=2), Layout((0, 1), cfg=2), Layout.single(1)
    found = [kinds(layout, step) for layout in layouts for step in (0, 1, 2)]
    assert len(set(found)) == len(found)
    assert kinds(layouts[-1], 7) == found[-1]
    assert kinds(layouts[-1], 7, text_tokens=8) != found[-1]
    with_lora = kinds(layouts[-1], 7, lora=[{"sha256": "b", "scale": 1.0}], lora_files=["b"])
    assert with_lora > found[-1]
    assert len(with_lora - found[-1]) == 2, "that there are LoRAs, and this one, whose use is a switch"
    job: Any = SimpleNamespace(start=SimpleNamespace(shape="", trajectory=SimpleNamespace(artifacts=())))
    near, far = (
        gpu.arrival_kind(
            RankTask(
                message(layouts[-1], Transfer(0, 1, "sample", 4, 0, stop, 64)),
                job,
                Task("a", 9, Stage.DENOISE, 7),
            )
        )
        for stop in (8, 9)
    )
    assert near != far


def test_a_rank_tells_how_long_its_device_idled_before_a_task(gpu_pool, tmp_path):
    spec = JobSpec(id="idle", prompt="a fox", **PICTURE)
    recorder = run(gpu_pool, tmp_path, spec, policy=test_elastic.following((0,)))
    done = [event for event in recorder.events if isinstance(event, TaskDone)]
    idle_s = [event.times[0].idle_s for event in done[1:]]
    assert all(each is not None and each > 0 for each in idle_s)
    assert sum(idle_s) < done[-1].ended_s - done[0].ended_s


def test_latents_go_to_other_ranks_behind_the_event_that_tells_that_they_are_there(monkeypatch):
    """They are enqueued as soon as the task is that makes them; no thread waits for its end."""
    done: list[str] = []
    device: Any = GpuDevice.__new__(GpuDevice)
    device.endpoint = SimpleNamespace(require=lambda peer, *, dispatch: done.append(f"looked at {peer}"))
    dispatches = Dispatches(lambda numbers: None)
    departures = SimpleNamespace(
        wait_event=lambda event: done.append(f"behind {event}"),
        synchronize=lambda: done.append(f"{dispatches._enqueued} waited for"),
    )
    device._streams = SimpleNamespace(departures=departures)
    monkeypatch.setattr(worker_jobs, "send_state", lambda *_, dispatch: done.append(f"{dispatch} enqueued"))
    worker = Worker(None, 0, device, dispatches)  # type: ignore[arg-type]
    job = RankJob(start=None, slab=None)  # type: ignore[arg-type]
    shipment = job.latents_of(6)
    job.keep({"latents": Fields()}, dispatch=6, is_there="the end of 6")
    dispatches.note_to_send(7)
    worker._send(SendState(7, "a", 6, (Transfer(0, 1, "latents", 0, 0, 1, 4),)), shipment)
    assert done == ["behind the end of 6", "7 enqueued", "{7} waited for", "looked at 1"]


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_a_rank_pads_texts_as_the_others_do_or_ends(monkeypatch, own, others):
    forgone = threading.Event()
    monkeypatch.setattr(cudnn_attention, "_FORGONE", forgone)
    message = Arenas(0, 0, (1, 1), (0, 1), counts_tokens=others)
    if others and not own:
        with pytest.raises(ModelError, match="works on the other ranks, and not on this one"):
            pad_as_others(message, can_pad=own)
    else:
        pad_as_others(message, can_pad=own)
    assert forgone.is_set() is not others


def test_a_new_process_takes_tasks_when_all_others_have_mapped_its_arena(gpu_pool, tmp_path):
    """Rank 0 maps it late, behind what its device is at, and would count what had come before that anew."""
    order("mapping by 0", "late")
    spec = test_deaths.job("late", "die rank=1 step=0 times=1", steps=4)
    patience = Patience(task_s=8.0, task_factor=1.0)
    recorder = run(gpu_pool, tmp_path, spec, policy=test_elastic.following((1,), (0,)), patience=patience)
    assert test_deaths.statuses(recorder) == {"late": "done"}
    failed = {event.dispatch for event in recorder.events if isinstance(event, TaskFailed)}
    assert [d.task.step for d in recorder.dispatches if d.number in failed] == [0]


def test_the_first_step_elsewhere_waits_for_the_constants_that_come_by_the_slab(gpu_pool, tmp_path):
    """Latents come from the device that prepares them, and may be there before the rest is published."""
    spec = JobSpec(id="first", prompt="a fox", **PICTURE | {"seed": 6})
    shown = []
    for name, layouts in (("alone", ((0,),)), ("moving", ((0,), (0,), (1,)))):
        recorder = run(
            gpu_pool, tmp_path / name, spec, policy=test_elastic.following(*layouts), lookahead_s=1.0
        )
        assert test_deaths.statuses(recorder) == {"first": "done"}
        shown.append(pixels(tmp_path / name / "first.png"))
    assert np.array_equal(*shown)
