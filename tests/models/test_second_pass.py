"""A job with `upscale` makes what its two passes make one after the other, by hand."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import geometry_of, simulated_control
from gfc_fake import FakeCluster
from PIL import Image
from small_checkpoints import save_checkpoint

from gfgen.cluster.driver import WholeJobCosts, as_whole
from gfgen.errors import JobError, ModelError
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec, spec_hash
from gfgen.layout import ALONE, Layout
from gfgen.models.families.adapter import Fields
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.model import CONFIGS, load_geometry, weightless_geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.qwen import QwenGeometry
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.models.stepping.adapter import load_any
from gfgen.models.stepping.check import moved
from gfgen.models.stepping.outlined import outlined_pipeline, tried
from gfgen.policies.auto import _rank_s
from gfgen.policies.fcfs import fcfs
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel, admit
from gfgen.runtime.core.events import JobArrived, RankReady
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.simulate.rollout import task_at, with_foresight

JOB = JobSpec(id="a", prompt="a red cat", width=64, height=64, steps=4, guidance_scale=3.0, seed=3)
LARGE: dict[str, Any] = {"upscale": 1.5, "upscale_strength": 0.6, "upscale_steps": 5}
PIPELINES = {
    "StableDiffusionXLPipeline": {"negative_prompt": "blurry", "scheduler": {"class": "euler a"}},
    "FluxPipeline": {},
}


@pytest.fixture(scope="module", params=PIPELINES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp("texts") / request.param)


def for_pictures(checkpoint: Path) -> Path:
    """The same weights as a model that makes pictures from pictures."""
    folder = checkpoint.with_name("pictures")
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    index = json.loads((folder / "model_index.json").read_text())
    index["_class_name"] = index["_class_name"].removesuffix("Pipeline") + "Img2ImgPipeline"
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def run(adapters: Sequence[Any], spec: JobSpec) -> torch.Tensor:
    """Frames of a job whose tasks alternate between adapters, as plain data between them."""
    spec = adapters[0].geometry.resolve(spec)
    prompt = moved(adapters[0].encode(spec))
    condition, latents = map(moved, adapters[-1].prepare(spec, prompt))
    for step in range(adapters[0].geometry.trajectory(spec).num_steps):
        taker = adapters[step % len(adapters)]
        latents = moved(taker.denoise(spec, prompt, condition, latents, step=step))
    frames: torch.Tensor = adapters[-1].decode(spec, latents).tensors["frames"]
    return frames


def test_a_job_with_two_passes_makes_the_picture_of_two_jobs(checkpoint: Path, tmp_path: Path) -> None:
    adapters = [load_adapter(checkpoint) for _ in range(2)]
    job = replace(JOB, **PIPELINES[checkpoint.name])
    first = run(adapters[:1], job)
    both = run(adapters, replace(job, **LARGE))
    assert torch.equal(run(adapters, job), first), "the second pass leaves nothing behind"
    Image.fromarray(first[0].numpy()).resize((96, 96), Image.Resampling.LANCZOS).save(tmp_path / "large.png")
    other = load_adapter(for_pictures(checkpoint))
    side = 96 if checkpoint.name == "FluxPipeline" else None
    again = replace(job, width=side, height=side, steps=5, args={"strength": 0.6})
    by_hand = run([other], replace(again, image=str(tmp_path / "large.png")))
    assert both.shape == (1, 96, 96, 3)
    assert torch.equal(both, by_hand)


def test_a_first_picture_that_is_nan_is_told(checkpoint: Path) -> None:
    adapter = load_adapter(checkpoint)
    adapter.pipeline.vae.decoder.conv_out.bias.data.fill_(torch.nan)
    with pytest.raises(ModelError, match="NaN or infinity in the first pass's picture"):
        run([adapter], replace(JOB, **PIPELINES[checkpoint.name] | LARGE))


def test_a_check_tries_both_passes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = load_geometry(checkpoint)
    assert isinstance(geometry, PipelineGeometry)
    adapter = load_any(checkpoint, geometry, device="cpu", dtype=torch.float32, load=outlined_pipeline)
    large = LARGE | {"upscale_steps": 20}
    job = geometry.resolve(replace(JOB, **PIPELINES[checkpoint.name] | large))
    sizes: list[tuple[int, ...]] = []
    decode = adapter.decode

    def decoded(spec: JobSpec, latents: Fields) -> Fields:
        made = decode(spec, latents)
        sizes.append(tuple(made.tensors["frames"].shape))
        return made

    monkeypatch.setattr(adapter, "decode", decoded)
    asked = JobSpec(**json.loads(json.dumps(asdict(job))))
    assert tried(adapter, asked, rest_s=60.0)[0] is None
    assert sizes == [(1, 96, 96, 3)]


@pytest.mark.parametrize("checkpoint", ["FluxPipeline"], indirect=True)
def test_ranks_share_the_steps_of_a_second_pass(checkpoint: Path) -> None:
    layout = Layout((0, 1), ulysses=2)
    adapters: list[Any] = [load_adapter(checkpoint) for _ in layout.ranks]
    spec = adapters[0].geometry.resolve(replace(JOB, **LARGE))
    prompt = adapters[0].encode(spec)
    condition, latents = adapters[0].prepare(spec, prompt)
    for step in range(5):
        latents = adapters[0].denoise(spec, prompt, condition, latents, step=step)

    def refined(adapter: Any, parallel: Parallel | None) -> Fields:
        torch.set_num_threads(1)
        made: Fields = latents
        for step in range(5, 8):
            made = adapter.denoise(spec, prompt, condition, made, step=step, parallel=parallel)
        return made

    def shared(parallel: Parallel) -> Fields:
        return refined(adapters[parallel.sequence.slot], parallel)

    sizes: list[int] = []
    block = adapters[0].pipeline.transformer.transformer_blocks[0]
    block.register_forward_hook(lambda module, args, output: sizes.append(output[1].numel()))
    alone = refined(adapters[0], None)
    whole = sizes[-1]
    for result in FakeCluster().run(layout, lambda group: shared(parallel_from(group))):
        assert torch.allclose(result.tensors["sample"], alone.tensors["sample"], rtol=1e-4, atol=1e-5)
    assert sizes[-1] < whole


def admitted(name: str = "StableDiffusionXLPipeline", **fields: Any) -> AdmittedJob:
    model = ResolvedModel("m", Path("m"), geometry_of(name, unet={}))
    (job,), _ = admit([replace(JOB, **fields)], default_model="m", find_model=lambda name: model)
    return job


def test_a_second_pass_has_steps_of_its_own_and_one_that_begins_it() -> None:
    job = admitted(**LARGE)
    stages = [job.trajectory.task(index).stage for index in range(job.info.num_tasks)]
    before = [Stage.ENCODE, Stage.PREPARE, *[Stage.DENOISE] * 4]
    assert stages == [*before, *[Stage.REFINE] * 4, Stage.DECODE]
    assert job.trajectory.name_of(job.trajectory.task(6)) == "refine 5 of 8"
    assert (job.spec.made_size, job.spec.size_text) == ((96, 96), "96x96")
    assert job.flops[Stage.REFINE] / job.flops[Stage.DENOISE] == 1.5**2
    assert job.info.difference((1, 96, 96)) is None
    assert job.shape not in (admitted().shape, admitted(**LARGE | {"upscale": 2.0}).shape)


def test_defaults_of_a_second_pass_are_those_of_the_first() -> None:
    run = admitted(upscale=2.0, steps=10).spec
    assert (run.enlarged, run.upscale_strength, run.upscale_steps) == ((128, 128), 0.4, 10)
    assert geometry_of("StableDiffusionXLPipeline", unet={}).resolve(run) == run


def test_a_hash_names_the_second_pass_and_is_the_old_one_without() -> None:
    assert len({spec_hash(replace(JOB, upscale=factor)) for factor in (None, 1.5, 2.0)}) == 3


def test_predictions_count_the_steps_of_both_passes() -> None:
    job, costs = admitted(**LARGE), CostModel()
    kind = costs.class_of(job)
    seconds = {Stage.ENCODE: 1.0, Stage.PREPARE: 2.0, Stage.DENOISE: 4.0, Stage.DECODE: 8.0}
    for stage, duration_s in seconds.items():
        costs.observe(kind, stage, ALONE, duration_s)
    assert costs.task_s(kind, Stage.REFINE, ALONE) == pytest.approx(4 * 1.5**2, rel=0.01)
    costs.observe(kind, Stage.REFINE, ALONE, 10.0)

    def left_s(index: int) -> float:
        return costs.remaining_s(kind, job.trajectory.task(index), job.info.num_tasks, ALONE)

    assert [left_s(index) for index in (0, 2, 5, 6, 9, 10)] == [67.0, 64.0, 52.0, 48.0, 18.0, 8.0]


def test_steps_of_a_second_pass_take_as_long_as_their_reads_which_jobs_do_not_share() -> None:
    job, costs = admitted(**LARGE), CostModel()
    costs.reads_s = {"m": 1000.0}
    alone, shared = costs.class_of(job), costs.class_of(job, num_sharers=2)
    whole_s, _ = alone.reads_s
    assert whole_s >= 1000.0
    for stage, seconds in ((Stage.DENOISE, whole_s / 2), (Stage.REFINE, whole_s)):
        assert costs.task_s(alone, stage, ALONE) == pytest.approx(whole_s)
        assert costs.task_s(shared, stage, ALONE) == pytest.approx(seconds)


def test_the_work_of_a_whole_job_on_a_node_is_that_of_both_passes() -> None:
    job = admitted(**LARGE)
    whole = WholeJobCosts().class_of(job)
    assert whole.flops[Stage.DENOISE] == 4 * job.flops[Stage.DENOISE] + 4 * job.flops[Stage.REFINE]


def test_a_look_ahead_counts_the_steps_of_both_passes() -> None:
    jobs = [admitted(**LARGE), replace_id(admitted(), "b")]
    control, _ = simulated_control(jobs, num_ranks=1, max_degree=1)
    control.record(RankReady(0.0, 0, 1, 0.0))
    for job in jobs:
        control.record(JobArrived(0.0, job.job_id))
    snapshot = control.state.snapshot_of_traffic()
    ahead = with_foresight(snapshot)
    for job in jobs:
        view = snapshot.open[job.job_id]
        left_s = ahead.costs.remaining_s(view.next_task, Layout.single(0))
        assert left_s == pytest.approx(view.remaining_s, rel=1e-6)
    together_s = sum(snapshot.open[job.job_id].remaining_s for job in jobs)
    assert ahead.foresee is not None
    assert ahead.foresee(fcfs).makespan_s == pytest.approx(together_s, rel=1e-3)


def test_looks_ahead_and_rank_times_price_each_pass_by_its_own_steps() -> None:
    job = admitted(**LARGE)
    control, _ = simulated_control([job], num_ranks=1, max_degree=1)
    control.record(RankReady(0.0, 0, 1, 0.0))
    control.record(JobArrived(0.0, job.job_id))
    snapshot = control.state.snapshot_of_traffic()
    (view,), one = snapshot.open.values(), Layout.single(0)
    ahead = with_foresight(snapshot).costs
    tasks = [job.trajectory.task(index) for index in range(job.info.num_tasks)]
    assert [task_at(view, index) for index in range(len(tasks))] == tasks
    first_s, second_s = (snapshot.costs.task_s(tasks[index], one) for index in (2, 6))
    assert second_s > 2 * first_s
    assert (ahead.task_s(tasks[2], one), ahead.task_s(tasks[6], one)) == pytest.approx((first_s, second_s))
    for index, task in enumerate(tasks):
        left_s = snapshot.costs.remaining_s(task, one)
        assert ahead.remaining_s(task, one) == pytest.approx(left_s)
        steps_s = max(0, min(4, 6 - index)) * first_s + max(0, min(4, 10 - index)) * second_s
        assert _rank_s(snapshot, [replace(view, next_task=task)])[1] == pytest.approx(steps_s)


def test_to_a_driver_of_nodes_a_job_with_two_passes_is_one_task() -> None:
    job = as_whole(admitted(**LARGE))
    control, _ = simulated_control([job], num_ranks=1, max_degree=1)
    control.record(RankReady(0.0, 0, 1, 0.0))
    control.record(JobArrived(0.0, job.job_id))
    (view,) = control.state.snapshot_of_traffic().open.values()
    assert (view.num_tasks, view.num_refined) == (1, 0)


def replace_id(job: AdmittedJob, job_id: str) -> AdmittedJob:
    spec = replace(job.spec, id=job_id)
    trajectory = replace(job.trajectory, job_id=job_id)
    return replace(job, info=replace(job.info, spec=spec, asked=spec), trajectory=trajectory)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        (
            "LTXPipeline",
            {},
            "upscale = 2: needs image to image, which LTXPipeline does not have",
        ),
        ("Lumina2Pipeline", {}, "upscale = 2: needs image to image, which Lumina2Pipeline does not have"),
        ("StableDiffusionXLImg2ImgPipeline", {"width": None, "height": None}, "takes its size from"),
        ("StableDiffusionXLInpaintPipeline", {}, "needs image to image"),
        ("StableDiffusionXLPipeline", {"sigmas": [1.0, 0.5]}, "sigmas sets the steps of the first pass only"),
        ("StableDiffusionXLPipeline", {"args": {"num_images_per_prompt": 2}}, "takes one picture"),
        ("StableDiffusionXLPipeline", {"upscale_steps": 2}, "of 2 steps makes no step; raise one of them"),
        ("StableDiffusionXLPipeline", {"width": 4096, "height": 6000}, "to 8192x8192 pixels are accepted"),
        ("StableDiffusionXLPipeline", {"upscale": None, "upscale_steps": 2}, "belongs to upscale"),
        (
            "StableDiffusionControlNetPipeline",
            {"image": "x.png"},
            r"files.control_image: missing; .* \(in the second pass, StableDiffusionControlNetImg",
        ),
    ],
)
def test_one_line_says_why_there_is_no_second_pass(name: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        geometry_of(name, transformer={}).resolve(replace(JOB, **{"upscale": 2.0, **fields}))


def test_families_with_code_of_their_own_have_none() -> None:
    for name in ("tiny-qwen-image", "tiny-wan"):
        geometry = weightless_geometry(CONFIGS / name)
        field = {} if isinstance(geometry, QwenGeometry) else {"frames": 5}
        with pytest.raises(JobError, match=r"upscale = 2: this model makes no pictures from pictures"):
            geometry.resolve(replace(JOB, guidance_scale=None, upscale=2.0, **field))
