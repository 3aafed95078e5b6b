"""What a rank on a GPU runs before anyone waits for it: rehearsals of steps, records of forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_worker_imitation import ImitationRecorder
from small_checkpoints import save_checkpoint

from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout, Limits
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import recording
from gfgen.models.fast.evaluation import evaluate
from gfgen.models.fast.recording import Graphs
from gfgen.models.parallel.parallel import Parallel, RehearsalGroup
from gfgen.runtime.ipc.messages import RunTask, WarmUp
from gfgen.runtime.worker import forwards as worker_forwards
from gfgen.runtime.worker.forwards import Forwards
from gfgen.runtime.worker.jobs import RankTask
from gfgen.session.warming import warm_ups

torch.set_num_threads(1)

RANK = 1
ALONE, PAIR, HALVES = Layout((1,)), Layout((0, 1), ulysses=2), Layout((1, 0), cfg=2)
JOB = {"prompt": "a fox", "width": 80, "height": 64, "steps": 20, "seed": 1}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def adapters(tiny_models: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    names = ("tiny-qwen-image", "tiny-wan-moe")
    found: dict[str, Any] = {name: load_adapter(tiny_models[name]) for name in names}
    yield found
    for adapter in found.values():
        adapter.evaluate_by(evaluate)


def unentered(layout: Layout) -> Parallel | None:
    if layout.degree == 1:
        return None
    slot, shards = layout.slot_of(RANK), layout.sequence_degree
    sequence = RehearsalGroup(shards, slot % shards, None)
    return Parallel(
        cfg=RehearsalGroup(layout.cfg, slot // shards, None),
        sequence=sequence,
        ulysses=sequence,
        ring=RehearsalGroup(1, 0, None),
    )


def forwards_of(adapters: dict[str, Any], *, may_record: bool = True) -> tuple[Forwards, Graphs]:
    of = Graphs(ImitationRecorder(), torch.device("cpu"), may_record=may_record)
    return Forwards(adapters, of, rank=RANK, unentered=unentered), of


def rank_job(adapters: dict[str, Any], model: str, **changes: Any) -> Any:
    """A job as a rank knows it after its second task."""
    adapter = adapters[model]
    spec = adapter.geometry.resolve(JobSpec(id="job", **{**JOB, **changes}))
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    start = SimpleNamespace(
        spec=spec,
        checkpoint=model,
        shape=adapter.geometry.shape_key(spec),
        trajectory=adapter.geometry.trajectory(spec),
    )
    artifacts = {"prompt": prompt, "condition": condition, "latents": latents}
    return SimpleNamespace(start=start, artifacts=artifacts)


def warm_up(job: Any, *degrees: tuple[int, int, int]) -> WarmUp:
    return WarmUp(1, job.start.spec, job.start.checkpoint, degrees)


def step(job: Any, layout: Layout = ALONE, number: int = 0) -> RankTask:
    """A step as a rank runs it."""
    message = RunTask(1, "job", number + 2, 1, layout, ())
    return RankTask(message, job, job.start.trajectory.task(number + 2))


def test_in_every_slot_ranks_that_reach_this_one_are_around_it() -> None:
    forwards = Forwards({}, None, rank=1, unentered=None, near=(0,))  # type: ignore[arg-type]
    message = WarmUp(0, None, "", in_own_slot=False)  # type: ignore[arg-type]
    pairs = [layout.ranks for layout in forwards._layouts(message, [(1, 2, 1)])]
    assert pairs == [(0, 1), (1, 0)]
    wide = [layout.ranks for layout in forwards._layouts(message, [(1, 2, 1, 2)])]
    assert wide == [(0, 1, 2, 3), (2, 3, 1, 0), (2, 3, 0, 1), (1, 0, 2, 3)]


def test_warm_up_rehearses_and_records_every_slot_of_its_layouts(adapters: dict[str, Any]) -> None:
    """A CPU's forwards are launch-bound, so that each of them is recorded."""
    job = rank_job(adapters, "tiny-qwen-image")
    forwards, of = forwards_of(adapters)
    list(forwards.warm_up(warm_up(job, (1, 1, 1), (2, 1, 1))))
    assert len(of._records) == 2  # the prompt and the negative prompt: halves have the same forwards
    list(forwards.warm_up(warm_up(job, (1, 3, 1))))
    # 20 tokens on 3 ranks are 7, 7 and 6; of 7 and 6 of the prompts', slots 0 and 1 differ in the first.
    assert len(of._records) == 7
    list(forwards.warm_up(warm_up(job, (1, 1, 1), (1, 3, 1))))
    assert len(of._records) == 7


def test_both_experts_are_warmed_up(adapters: dict[str, Any]) -> None:
    job = rank_job(adapters, "tiny-wan-moe", frames=5, boundary_ratio=0.6)
    forwards, of = forwards_of(adapters)
    list(forwards.warm_up(warm_up(job, (1, 1, 1))))
    assert len(of._records) == 2
    forwards.clear()
    assert len(of._records) == 0


def test_first_step_of_a_kind_is_recorded_before_it_runs(adapters: dict[str, Any]) -> None:
    job = rank_job(adapters, "tiny-qwen-image")
    forwards, of = forwards_of(adapters)
    kind = forwards.kind_of(step(job))
    assert forwards.is_to_record(kind, step(job, number=20 - worker_forwards.MIN_REPLAYS))
    assert not forwards.is_to_record(kind, step(job, number=21 - worker_forwards.MIN_REPLAYS))
    forwards.record(kind, step(job, number=1))
    assert len(of._records) == 2
    assert not forwards.is_to_record(kind, step(job, number=2))


def run_steps(forwards: Forwards, job: Any, kind: Any) -> list[int]:
    """Run a whole job; returns the steps before which it was recorded."""
    recorded = []
    for number in range(job.start.trajectory.num_steps):
        work = step(job, number=number)
        if forwards.is_to_record(kind, work):
            forwards.record(kind, work)
            recorded.append(number)
        forwards.begin(kind)
    return recorded


def test_short_jobs_are_recorded_from_the_second_one_on_and_again_when_records_had_to_go(
    adapters: dict[str, Any],
) -> None:
    job = rank_job(adapters, "tiny-qwen-image", steps=2)
    forwards, of = forwards_of(adapters)
    kind = forwards.kind_of(step(job))
    assert [run_steps(forwards, job, kind) for _ in range(3)] == [[], [0], []]
    of.clear()
    assert [run_steps(forwards, job, kind) for _ in range(2)] == [[0], []]
    assert len(of._records) == 2


def test_short_job_beside_another_of_its_kind_is_recorded(adapters: dict[str, Any]) -> None:
    job = rank_job(adapters, "tiny-qwen-image", steps=2)
    forwards, _ = forwards_of(adapters)
    kind = forwards.kind_of(step(job))
    forwards.begin(kind)
    assert not forwards.is_to_record(kind, step(job, number=1))
    assert forwards.is_to_record(kind, step(job))


def test_kinds_are_forgotten_when_many_others_were_used_since(
    adapters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_forwards, "MAX_KINDS", 2)
    job = rank_job(adapters, "tiny-qwen-image", steps=2)
    forwards, _ = forwards_of(adapters)
    kind = forwards.kind_of(step(job))
    others = [kind._replace(texts=(length,)) for length in range(2)]
    for each in (kind, others[0], kind, others[1]):
        for _ in range(4):
            forwards.begin(each)
    assert forwards.is_to_record(kind, step(job))
    assert not forwards.is_to_record(others[0], step(job))


def test_step_whose_forwards_are_not_worth_it_is_not_recorded_with_any_prompt_in_any_slot(
    adapters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "WORTH_RECORDING", 1.1)
    job, other = (rank_job(adapters, "tiny-qwen-image", prompt=text) for text in ("a fox", "a fox " * 9))
    forwards, of = forwards_of(adapters)
    forwards.record(forwards.kind_of(step(job, PAIR)), step(job, PAIR))
    assert len(of._records) == 0
    for each in (job, other):
        for layout in (PAIR, Layout((1, 0), ulysses=2)):
            assert not forwards.is_to_record(forwards.kind_of(step(each, layout)), step(each, layout))
    assert forwards.is_to_record(forwards.kind_of(step(job)), step(job))
    forwards.forget()
    assert forwards.is_to_record(forwards.kind_of(step(job, PAIR)), step(job, PAIR))


def test_steps_that_were_warmed_up_are_not_got_ready_again(adapters: dict[str, Any]) -> None:
    job = rank_job(adapters, "tiny-qwen-image")
    forwards, _ = forwards_of(adapters)
    list(forwards.warm_up(warm_up(job, (1, 1, 1), (1, 2, 1))))
    for layout in (ALONE, PAIR, Layout((1, 0), ulysses=2)):
        assert not forwards.is_to_record(forwards.kind_of(step(job, layout)), step(job, layout))
    assert forwards.is_to_record(forwards.kind_of(step(job, HALVES)), step(job, HALVES))


def test_steps_with_a_prompt_of_another_length_are_recorded_before_their_first_one(
    adapters: dict[str, Any],
) -> None:
    """Each length has records of its own."""
    job, other = (rank_job(adapters, "tiny-qwen-image", prompt=text) for text in ("a fox", "a fox " * 9))
    forwards, of = forwards_of(adapters)
    kind, other_kind = forwards.kind_of(step(job)), forwards.kind_of(step(other))
    assert kind != other_kind
    forwards.record(kind, step(job))
    assert forwards.is_to_record(other_kind, step(other))
    forwards.record(other_kind, step(other))
    assert len(of._records) == 3  # the negative prompt is the same
    assert not forwards.is_to_record(other_kind, step(other, number=1))
    adapter = adapters["tiny-qwen-image"]
    found = adapter.denoise(other.start.spec, *other.artifacts.values(), step=0)
    adapter.evaluate_by(evaluate)
    wanted = adapter.denoise(other.start.spec, *other.artifacts.values(), step=0)
    assert all(torch.equal(found.tensors[name], wanted.tensors[name]) for name in wanted.tensors)


def test_both_experts_are_recorded_before_the_first_step(adapters: dict[str, Any]) -> None:
    job = rank_job(adapters, "tiny-wan-moe", frames=5, boundary_ratio=0.6)
    forwards, of = forwards_of(adapters)
    forwards.record(forwards.kind_of(step(job)), step(job))
    assert len(of._records) == 2


@pytest.mark.parametrize("layout", [ALONE, PAIR, HALVES], ids=str)
def test_rehearsal_changes_no_result(adapters: dict[str, Any], layout: Layout) -> None:
    job = rank_job(adapters, "tiny-qwen-image")
    adapter = adapters["tiny-qwen-image"]
    adapter.evaluate_by(evaluate)
    wanted = adapter.denoise(job.start.spec, *job.artifacts.values(), step=0)
    forwards, _ = forwards_of(adapters)
    list(forwards.warm_up(warm_up(job, layout.degrees)))
    forwards.record(forwards.kind_of(step(job, layout)), step(job, layout))
    found = adapter.denoise(job.start.spec, *job.artifacts.values(), step=0)
    assert all(torch.equal(found.tensors[name], wanted.tensors[name]) for name in wanted.tensors)


def num_attempts(forwards: Forwards, job: Any, *, most: int, lose: Callable[[], None]) -> int:
    """How often the first steps of a job are recorded if the records are lost each time."""
    kind = forwards.kind_of(step(job))
    for number in range(most):
        if not forwards.is_to_record(kind, step(job)):
            return number
        forwards.record(kind, step(job))
        lose()
    return most


def test_recording_in_vain_is_tried_once(adapters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImitationRecorder, "has_room", lambda _: False)
    job = rank_job(adapters, "tiny-qwen-image")
    forwards, of = forwards_of(adapters)
    assert num_attempts(forwards, job, most=9, lose=lambda: None) == 1
    assert len(of._records) == 0


def test_steps_whose_records_had_to_go_are_recorded_again_by_the_next_job(adapters: dict[str, Any]) -> None:
    """Where prompts of ever other lengths come, all records are pushed out by others some day."""
    job = rank_job(adapters, "tiny-qwen-image")
    forwards, of = forwards_of(adapters)
    assert num_attempts(forwards, job, most=9, lose=of.clear) == 9
    assert len(of._records) == 0
    kind = forwards.kind_of(step(job))
    assert not forwards.is_to_record(kind, step(job, number=1))  # a job that has begun is not held up


def test_steps_are_recorded_again_after_memory_was_short_but_not_for_ever(adapters: dict[str, Any]) -> None:
    job = rank_job(adapters, "tiny-qwen-image")
    forwards, _ = forwards_of(adapters)
    for _ in range(2):
        most = worker_forwards.MAX_SHORTAGES
        assert num_attempts(forwards, job, most=9, lose=forwards.clear) == most
        forwards.forget()


def test_pipelines_that_have_no_records_are_not_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters: dict[str, Any] = {"pixart": load_adapter(save_checkpoint("PixArtSigmaPipeline", tmp_path))}
    job = rank_job(adapters, "pixart", width=64)
    monkeypatch.setattr(adapters["pixart"], "denoise", lambda *_, **__: pytest.fail("a rehearsal"))
    forwards, _ = forwards_of(adapters)
    forwards.record(forwards.kind_of(step(job)), step(job))
    assert not forwards.is_to_record(forwards.kind_of(step(job)), step(job))


def test_nothing_is_recorded_where_that_is_not_wanted(adapters: dict[str, Any]) -> None:
    job = rank_job(adapters, "tiny-qwen-image")
    forwards, of = forwards_of(adapters, may_record=False)
    list(forwards.warm_up(warm_up(job, (1, 1, 1))))
    assert not forwards.is_to_record(forwards.kind_of(step(job, PAIR)), step(job, PAIR))
    assert len(of._records) == 0


METHODS = {
    Stage.ENCODE: "encode",
    Stage.PREPARE: "prepare",
    Stage.DENOISE: "denoise",
    Stage.APPROXIMATE: "approximate",
    Stage.DECODE: "decode",
}
"""Of an adapter, by the tasks that they run."""


def test_every_kind_of_task_is_warmed_up_on_every_number_of_ranks(adapters: dict[str, Any]) -> None:
    """What a job can execute and nobody has prepared loads kernels in the job's time."""
    job = rank_job(adapters, "tiny-qwen-image", reuse="if-late")
    adapter, done = adapters["tiny-qwen-image"], set()

    def noting(stage: Stage) -> Any:
        run = getattr(adapter, METHODS[stage])

        def noted(*args: Any, parallel: Any = None, **options: Any) -> Any:
            done.add((stage, 1 if parallel is None else parallel.sequence.size * parallel.cfg.size))
            return run(*args, **options) if parallel is None else run(*args, parallel=parallel, **options)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for stage in METHODS:
            patch.setattr(adapter, METHODS[stage], noting(stage))
        limits = Limits(uses_cfg=True, max_sequence_degree=4, max_decode_degree=4)
        admitted: Any = SimpleNamespace(
            spec=job.start.spec,
            checkpoint=Path("tiny-qwen-image"),
            shape=job.start.shape,
            limits=limits,
            kind=0,
            flops=dict.fromkeys(Stage, 1.0),
        )
        forwards, _ = forwards_of(adapters)
        for item in warm_ups([admitted], (1, 2, 4)):
            list(forwards.warm_up(item))
    shared = {(Stage.DENOISE, number) for number in (2, 4)} | {(Stage.DECODE, number) for number in (2, 4)}
    assert done >= {(stage, 1) for stage in METHODS} | shared


def test_warm_up_of_a_model_that_is_gone_does_nothing(adapters: dict[str, Any]) -> None:
    job = rank_job(adapters, "tiny-qwen-image")
    forwards, _ = forwards_of({})
    assert list(forwards.warm_up(warm_up(job, (1, 1, 1)))) == []


def test_a_video_is_decoded_in_part(adapters: dict[str, Any]) -> None:
    job = rank_job(adapters, "tiny-wan-moe", frames=17)
    adapter, shapes = adapters["tiny-wan-moe"], []
    forwards, _ = forwards_of(adapters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "decode", lambda _, x, **__: shapes.append(x.tensors["sample"].shape[2]))
        list(forwards.warm_up(WarmUp(1, job.start.spec, job.start.checkpoint, decodes=(1,))))
    assert shapes == [2]
