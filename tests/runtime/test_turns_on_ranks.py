"""Steps of several jobs that share the reads of blocks, on a rank with its worker."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_elastic import following
from test_stopped_tasks import of_kind, statuses
from test_workers import PICTURE, pixels, run

from gfgen.gfc.arena import ArenaPlan
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families.registry import load_adapter
from gfgen.models.streaming.turns import pause
from gfgen.runtime.core.events import RankLost, TaskFailed
from gfgen.runtime.ipc.messages import Abandon, Abandoned, Channel, RunTask, StartJob, TaskFault, TaskReport
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.worker import jobs as worker_jobs
from gfgen.runtime.worker.device import Device, execute
from gfgen.runtime.worker.dispatches import Dispatches
from gfgen.runtime.worker.loop import Worker

torch.set_num_threads(1)
ANSWER_S = 60.0
"""How long an answer may take before the test fails."""


class Rank:
    """The control plane's end of a worker with one model, whose blocks are as if read for each forward."""

    def __init__(self, path: Path, specs: Mapping[str, dict[str, Any]], *, is_streamed: bool) -> None:
        ours, theirs = Channel.pair()
        ours.settimeout(ANSWER_S)
        self.channel, channel = Channel(ours), Channel(theirs)
        self.adapter: Any = load_adapter(path)
        self.computed: list[tuple[int, int]] = []
        """For each block, in order: its number and how many tokens the forward had."""
        transformer = self.adapter._pipeline.transformer
        transformer.gfgen_stream = is_streamed or None
        for idx, block in enumerate(transformer.transformer_blocks):
            block.register_forward_pre_hook(self._hook(idx), with_kwargs=True)
        dispatches = Dispatches(lambda numbers: channel.send(Abandoned(numbers)))
        device = Device(0, {"model": self.adapter}, dispatches, load_model=None)  # type: ignore
        self.worker = Worker(channel, 0, device, dispatches)
        self.number, self.made = 0, dict[str, int]()
        self.slabs: dict[str, tuple[int, Slab]] = {}
        self._ours, self._theirs = ours, theirs
        self._thread = threading.Thread(target=self.worker.serve, daemon=True)
        self._thread.start()
        for name, fields in specs.items():
            spec = self.adapter.geometry.resolve(JobSpec(id=name, prompt=f"a {name} fox", **fields))
            trajectory = self.adapter.geometry.trajectory(spec)
            plan = SlabPlan.of(trajectory)
            fd = Slab.create(plan, name=name)
            self.slabs[name] = fd, Slab(fd, plan)
            shape = self.adapter.geometry.shape_key(spec)
            self.channel.send(StartJob(spec, trajectory, "model", shape), (fd,))

    def _hook(self, idx: int) -> Any:
        def hook(block: object, args: Any, kwargs: Any) -> None:
            pause(block)
            self.computed.append((idx, kwargs["hidden_states"].shape[1]))

        return hook

    def run(self, **tasks: int) -> list[Any]:
        """Run tasks of these jobs as one dispatch of each; the answers."""
        first, last = self.number + 1, self.number + len(tasks)
        self.number = last
        end = last if len(tasks) > 1 else None
        producers = dict(self.made)
        for number, (name, index) in enumerate(tasks.items(), first):
            task = (number, name, index, producers.get(name), Layout.single(0), (1,))
            self.channel.send(RunTask(*task, last_sharer=end))
        answers = [self.answer() for _ in tasks]
        for answer in answers:
            if isinstance(answer, TaskReport):
                self.made[list(tasks)[answer.number - first]] = answer.number
            else:
                self.channel.send(Abandon(frozenset({answer.number})))
                assert self.answer() == Abandoned(frozenset({answer.number}))
        return answers

    def answer(self) -> Any:
        received = self.channel.receive()
        assert received is not None
        return received[0]

    def latents(self, name: str, index: int) -> Mapping[str, torch.Tensor]:
        """What the slab has after a task."""
        assert self.slabs[name][1].producer("latents", index + 1) == self.made[name]
        return worker_jobs.fetch(self.slabs[name][1], "latents", index + 1).tensors

    def close(self) -> None:
        self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join(ANSWER_S)
        self._ours.close()
        for fd, _ in self.slabs.values():
            os.close(fd)


JOBS: dict[str, dict[str, Any]] = {
    "red": {"width": 64, "height": 48, "steps": 3, "seed": 1, "negative_prompt": "dark"},
    "blue": {"width": 80, "height": 64, "steps": 4, "seed": 2, "true_cfg_scale": 1.0},
    "grey": {"width": 48, "height": 48, "steps": 2, "seed": 3},
}
TOGETHER = [
    {"red": 2},
    {"red": 3, "blue": 2},
    {"red": 4, "blue": 3, "grey": 2},
    {"blue": 4, "grey": 3},
    {"blue": 5},
]
"""By shared step, tasks by job: jobs join and leave."""


@pytest.fixture
def ranks(tiny_models: Mapping[str, Path]) -> Iterator[Any]:
    made: list[Rank] = []

    def make(*, is_streamed: bool = True) -> Rank:
        made.append(rank := Rank(tiny_models["tiny-qwen-image"], JOBS, is_streamed=is_streamed))
        for name in JOBS:
            for index in (0, 1):
                (report,) = rank.run(**{name: index})
                assert isinstance(report, TaskReport), report
        return rank

    yield make
    for rank in made:
        rank.close()


def test_jobs_join_and_leave_shared_steps_and_get_what_they_get_alone(ranks: Any) -> None:
    alone, shared = ranks(is_streamed=False), ranks()
    for name, fields in JOBS.items():
        for index in range(2, 2 + fields["steps"]):
            alone.run(**{name: index})
    for tasks in TOGETHER:
        shared.computed.clear()
        reports = shared.run(**tasks)
        assert all(isinstance(report, TaskReport) for report in reports), reports
        blocks = [idx for idx, _ in shared.computed]
        assert blocks == sorted(blocks), "one read of a block serves all forwards"
        assert len({report.times.ended_s - report.times.started_s for report in reports}) <= len(reports)
    for name, fields in JOBS.items():
        last = 1 + fields["steps"]
        found, wanted = shared.latents(name, last), alone.latents(name, last)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name


def test_a_shared_step_is_a_first_use_only_if_one_of_its_steps_is(ranks: Any) -> None:
    rank = ranks()
    assert [x.times.is_first_use for x in rank.run(red=2, blue=2)] == [True, True]
    assert [x.times.is_first_use for x in rank.run(red=3, blue=3)] == [False, False]
    assert [x.times.is_first_use for x in rank.run(red=4)] == [False]


@pytest.mark.parametrize("failing", list(JOBS))
def test_a_job_that_fails_in_a_shared_step_fails_alone(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    alone, shared = ranks(is_streamed=False), ranks()
    for name in JOBS:
        alone.run(**{name: 2})
    denoise = shared.adapter.denoise

    def fails(spec: JobSpec, *args: Any, **options: Any) -> Any:
        if spec.id == failing:
            pause("somewhere")
            raise RuntimeError("out of luck")
        return denoise(spec, *args, **options)

    monkeypatch.setattr(shared.adapter, "denoise", fails)
    answers = shared.run(**dict.fromkeys(JOBS, 2))
    faults = [each for each in answers if isinstance(each, TaskFault)]
    assert [each.reason.partition(" (")[0] for each in faults] == ["RuntimeError: out of luck"]
    assert len([each for each in answers if isinstance(each, TaskReport)]) == 2
    monkeypatch.undo()
    (report,) = shared.run(**{failing: 2})
    assert isinstance(report, TaskReport)
    for name in JOBS:
        assert torch.equal(shared.latents(name, 2)["sample"], alone.latents(name, 2)["sample"])


def test_steps_of_a_model_that_cannot_take_turns_run_one_after_the_other() -> None:
    denoised: list[str] = []

    def denoise(spec: str, *_: Any, step: int, parallel: None) -> str:
        if pause():
            denoised.append(spec)
        return f"{spec} after {step}"

    works: Any = [
        SimpleNamespace(
            job=SimpleNamespace(
                start=SimpleNamespace(checkpoint="model", spec=name),
                artifacts=dict.fromkeys(("prompt", "condition", "latents")),
            ),
            task=SimpleNamespace(stage=Stage.DENOISE, step=step),
        )
        for name, step in [("a", 1), ("b", 4)]
    ]
    adapter: Any = SimpleNamespace(takes_turns=False, denoise=denoise)
    execute({"model": adapter}, works, None)
    assert [each.made for each in works] == [{"latents": "a after 1"}, {"latents": "b after 4"}]
    assert denoised == ["a", "b"]


# With all processes of a run ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def started_pool(tiny_models: Mapping[str, Path]) -> Iterator[WorkerPool]:
    """In place of the pool that other files share: rank 0 goes on taking turns, and would exchange in another
    order than the others."""
    plan = ArenaPlan(data_bytes=1 << 20, post_bytes=1 << 12)
    settings = RankSettings(num_ranks=3, device="cuda", plan=plan)
    with WorkerPool(
        settings, [tiny_models["tiny-qwen-image"]], worker_main="gpu_worker_imitation:main"
    ) as pool:
        yield pool


@pytest.fixture
def streamed() -> Iterator[None]:
    """Inside, the adapters of faulty_worker.py take turns."""
    flag = Path(os.environ["GFGEN_TEST_FAULTS"]) / "streams"
    flag.touch()
    yield
    flag.unlink()


def pictures(order: str = "", *, name: str = "") -> list[JobSpec]:
    """Three unequal ones, the second of which does what the order says."""
    fields = [{"steps": 5}, {"steps": 4, "width": 80}, {"steps": 4, "true_cfg_scale": 1.0}]
    prompts = ["a red fox", f"a grey fox | {order}", "a fox by night"]
    return [
        JobSpec(**{**PICTURE, "id": f"{idx}{name}", "prompt": prompt, "seed": idx, **own})
        for idx, (prompt, own) in enumerate(zip(prompts, fields, strict=True))
    ]


@pytest.mark.parametrize("pool_name", ["mortal_pool", "gpu_pool"])
@pytest.mark.parametrize(
    ("order", "num_failed"), [("", 0), ("nan", 1), ("fail", 1), ("short", 1), ("die", 3)]
)
def test_unequal_pictures_that_share_steps_are_those_of_their_jobs_alone_also_after_a_failure(
    request: pytest.FixtureRequest,
    streamed: None,
    tmp_path: Path,
    pool_name: str,
    order: str,
    num_failed: int,
) -> None:
    pool = request.getfixturevalue(pool_name)
    jobs = pictures(order and f"{order} rank=0 step=1 times=1", name=f"{order}-{pool_name}")
    recorder = run(pool, tmp_path / "together", *jobs, policy=following((0,)), read_s=1000.0)
    assert set(statuses(recorder).values()) == {"done"}
    shared = [each for each in recorder.dispatches if each.sharers is not None]
    assert {len(each.sharers) for each in shared} >= ({3, 2} if order else {3})
    assert len(of_kind(recorder, TaskFailed)) == num_failed
    assert len(of_kind(recorder, RankLost)) == (order == "die")
    alone = run(pool, tmp_path / "alone", *jobs, policy=following((0,)))
    assert all(each.sharers is None for each in alone.dispatches)
    for job in jobs:
        found, wanted = (pixels(tmp_path / name / f"{job.id}.png") for name in ("together", "alone"))
        assert (found == wanted).all(), job.id
