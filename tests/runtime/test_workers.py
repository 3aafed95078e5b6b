"""Runs on real worker processes, with the tiny models."""

import contextlib
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from builders import Recorder, patient
from PIL import Image

from gfgen.errors import WorkerError
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families.registry import resolve_checkpoint
from gfgen.models.geometry.model import load_geometry
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import ResolvedModel, admit
from gfgen.runtime.core.events import Clock, RankReady, TaskFailed
from gfgen.runtime.files.outputs import read_metadata
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes.launcher import Launcher
from gfgen.runtime.processes.pool import WorkerPool, most_writers
from gfgen.runtime.processes.starting import wait_ready
from gfgen.runtime.processes.workers import JobMemory, ProcessBackend
from gfgen.runtime.worker.jobs import fetch
from gfgen.snapshot import Decision

PICTURE = {"model": "tiny-qwen-image", "width": 64, "height": 64, "steps": 4, "seed": 11}
VIDEO = {"model": "tiny-wan", "width": 64, "height": 64, "frames": 5, "steps": 4, "seed": 12}


def find_model(name):
    checkpoint = resolve_checkpoint(name)
    return ResolvedModel(name, checkpoint, load_geometry(checkpoint))


def admitted(*specs):
    jobs, problems = admit(specs, default_model="tiny-wan", find_model=find_model)
    assert not problems
    return jobs


def run(
    pool,
    folder,
    *specs,
    policy="srtf",
    lookahead_s=0.005,
    patience=None,
    residency=None,
    islands=None,
    warm_ups=None,
    watchers=(),
    grace_s=30.0,
    read_s=None,
):
    """Run jobs on the pool; the recorder knows what happened."""
    jobs, clock, costs, recorder = admitted(*specs), Clock(), CostModel(), Recorder()
    state = State(
        jobs,
        RunStart(
            num_ranks=pool.num_ranks,
            lookahead_s=lookahead_s,
            last_number=pool.last_number,
            resident=residency.resident if residency else None,
            islands=islands,
            grace_s=grace_s,
            reads_s={job.spec.model: read_s for job in jobs} if read_s else {},
        ),
        clock=clock,
        costs=costs,
    )
    backend = ObservedBackend(pool, JobMemory(jobs, folder), clock=clock, warm_ups=warm_ups)
    chosen = policy if isinstance(policy, NamedPolicy) else load_policy(policy)
    control = Control(
        jobs,
        state=state,
        backend=backend,
        policy=chosen,
        observers=[recorder],
        steering=Steering(residency=residency),
    )
    control.observers += tuple(watcher(clock) for watcher in watchers)
    with patient(pool, patience), contextlib.closing(backend):
        control.run()
    recorder.latents = backend.latents
    return recorder


class ObservedBackend(ProcessBackend):
    """Keeps the last latents of every job that ends well."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.latents = {}

    def release(self, job_id):
        trajectory = self._memory.jobs[job_id].trajectory
        slab, version = Slab(self._memory.slab(job_id), SlabPlan.of(trajectory)), trajectory.num_tasks - 1
        if slab.producer("latents", version):
            self.latents[job_id] = fetch(slab, "latents", version).tensors
        super().release(job_id)


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


def hop(snapshot):
    """Every step of a job on another rank than the one before."""
    decisions = []
    free = set(snapshot.free_ranks)
    for job in snapshot.open.values():
        last = job.last_layout.ranks[0] if job.last_layout else 1
        target = (last + 1) % len(snapshot.ranks)
        if target in free:
            free.remove(target)
            decisions.append(Decision(job.next_task, Layout.single(target)))
    return decisions


HOP = NamedPolicy("hop", hop)


def test_pictures_and_videos_are_written_under_their_names(pool, tmp_path):
    picture = JobSpec(id="picture", prompt="a red fox", **PICTURE)
    video = JobSpec(id="video", prompt="a lighthouse", fps=8, **VIDEO)
    recorder = run(pool, tmp_path, picture, video)
    assert [o.status for o in recorder.outcomes] == ["done", "done"]
    assert sorted(os.listdir(tmp_path)) == ["picture.png", "video.mp4"]
    assert pixels(tmp_path / "picture.png").shape == (64, 64, 3)
    assert read_metadata(tmp_path / "video.mp4")["prompt"] == "a lighthouse"


@pytest.mark.parametrize("lookahead_s", [0.0, 0.005, 1.0])
def test_a_job_that_moves_at_every_step_gives_the_same_picture(pool, tmp_path, lookahead_s):
    spec = JobSpec(id="picture", prompt="a red fox", **PICTURE)
    still = run(pool, tmp_path / "still", spec, policy="fcfs")
    moving = run(pool, tmp_path / "moving", spec, policy=HOP, lookahead_s=lookahead_s)
    assert len(set(still.ranks_of("picture"))) == 1
    ranks = moving.ranks_of("picture")
    assert all(before != after for before, after in pairwise(ranks))
    assert np.array_equal(*(pixels(tmp_path / folder / "picture.png") for folder in ("still", "moving")))


def test_a_video_that_moves_at_every_step_is_the_same_file(pool, tmp_path):
    spec = JobSpec(id="video", prompt="a lighthouse", **VIDEO)
    for name, policy in (("still", "fcfs"), ("moving", HOP)):
        run(pool, tmp_path / name, spec, policy=policy)
    still, moving = ((tmp_path / name / "video.mp4").read_bytes() for name in ("still", "moving"))
    assert still == moving


def test_a_task_that_raises_fails_its_job_and_the_others_finish(pool, tmp_path):
    image = tmp_path / "gone.png"
    Image.new("RGB", (64, 64)).save(image)
    bad = JobSpec(id="bad", prompt="a boat", image=str(image), **VIDEO)
    good = JobSpec(id="good", prompt="a red fox", **PICTURE)
    bad = replace(bad, image_sha256="as it was when the job file was read")
    image.unlink()
    recorder = run(pool, tmp_path, bad, good, policy="fcfs")
    outcomes = {o.info.job_id: o for o in recorder.outcomes}
    assert (outcomes["bad"].status, outcomes["good"].status) == ("failed", "done")
    assert "cannot be read as a picture (No such file or directory)" in (outcomes["bad"].error or "")
    assert len([e for e in recorder.events if isinstance(e, TaskFailed) and not e.void]) == 2
    assert sorted(os.listdir(tmp_path)) == ["good.png"]


def test_an_ended_job_leaves_no_memory_behind(pool, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    run(pool, tmp_path, JobSpec(id="picture", prompt="a red fox", **PICTURE))
    assert len(os.listdir("/proc/self/fd")) == before


def test_ranks_say_how_long_they_took_to_start_also_when_they_were_ready_before(pool, tmp_path):
    wait_ready(pool)
    recorder = run(pool, tmp_path, JobSpec(id="picture", prompt="a red fox", **PICTURE))
    ready = [event for event in recorder.events if isinstance(event, RankReady)]
    assert [event.startup_s for event in ready] == [worker.startup_s for worker in pool.workers]
    assert all(event.startup_s > 0 for event in ready)


def test_ranks_tell_what_they_have_taken_of_memory(pool, tmp_path):
    recorder = run(pool, tmp_path, JobSpec(id="picture", prompt="a red fox", **PICTURE))
    assert sorted(recorder.memory) == [0, 1, 2, 3]
    # More than torch alone, less than a machine has.
    assert all(1e8 < use.host_bytes < 1e11 for use in recorder.memory.values())


def test_messages_for_a_task_are_small(pool, tmp_path):
    sent = sum(worker.channel.sent_bytes for worker in pool.workers)
    recorder = run(pool, tmp_path, JobSpec(id="picture", prompt="fox " * 500, **PICTURE | {"steps": 30}))
    sent = sum(worker.channel.sent_bytes for worker in pool.workers) - sent
    assert sent / len(recorder.dispatches) < 1024


@pytest.mark.parametrize(
    ("are_on_gpus", "num_cores", "writers"), [(True, 16, 4), (True, 2, 1), (False, 64, 1)]
)
def test_there_are_at_most_as_many_writers_as_cores_can_serve(are_on_gpus, num_cores, writers):
    assert most_writers(are_on_gpus=are_on_gpus, num_cores=num_cores) == writers


def test_the_files_path_may_lie_in_a_folder_with_spaces(pool, tmp_path):
    folder = tmp_path / "my pictures"
    folder.mkdir()
    run(pool, folder, JobSpec(id="picture", prompt="a red fox", **PICTURE))
    assert Path(folder, "picture.png").exists()


def test_a_pool_that_cannot_be_started_leaves_no_process(monkeypatch):
    """They get no SIGTERM, by which Python would end them at its own exit."""
    started, start = [], Launcher._start

    def start_ranks_only(launcher, name, *arguments):
        if name.startswith("writer"):
            raise WorkerError("no more processes")
        started.append(start(launcher, name, *arguments))
        return started[-1]

    monkeypatch.setattr(Launcher, "_start", start_ranks_only)
    with pytest.raises(WorkerError, match="no more processes"):
        WorkerPool(RankSettings(num_ranks=2), [])
    assert len(started) == 2
    assert all(process.exitcode is not None for process, _ in started)
