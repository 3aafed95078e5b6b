"""Checkpoints of pipelines without an adapter of their own."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from gfc_fake import FakeCluster
from gpu_worker_imitation import ImitationRecorder
from small_checkpoints import save_checkpoint
from small_pipelines import small_pipeline

from gfgen.errors import JobError, ModelError
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families import solver
from gfgen.models.families.adapter import SOUND, SOUND_RATE, UNCHECKED, Fields
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import recording
from gfgen.models.geometry.call import signature_of
from gfgen.models.geometry.model import load_geometry
from gfgen.models.geometry.pipeline import TOKEN_SIDES, PipelineGeometry
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.models.parallel.plans import PLANS
from gfgen.models.stepping import adapter as stepping_adapter
from gfgen.models.stepping.check import moved
from gfgen.models.stepping.program import NotSteppableError
from gfgen.runtime.core.admission import ResolvedModel, admit
from gfgen.runtime.core.devices import Devices
from gfgen.runtime.ipc.slab import SlabPlan
from gfgen.runtime.worker.jobs import require_finite, sum_of
from gfgen.session.memory import HostMemory

JOB = JobSpec(
    id="a",
    prompt="a red cat",
    negative_prompt="blurry",
    width=64,
    height=64,
    frames=9,
    steps=4,
    guidance_scale=3.0,
    seed=3,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("LTXPipeline", tmp_path_factory.mktemp("ltx"))


def run(checkpoint: Path, spec: JobSpec) -> torch.Tensor:
    """Frames of a job whose tasks alternate between two adapters."""
    adapters = [load_adapter(checkpoint) for _ in range(2)]
    spec = adapters[0].geometry.resolve(spec)
    prompt = moved(adapters[0].encode(spec))
    condition, latents = map(moved, adapters[1].prepare(spec, prompt))
    for step in range(spec.steps or 0):
        latents = moved(adapters[step % 2].denoise(spec, prompt, condition, latents, step=step))
    assert UNCHECKED in prompt.scalars
    assert UNCHECKED not in latents.scalars
    return adapters[1].decode(spec, latents).tensors["frames"]


def own_call(checkpoint: Path, *, most: int = 255, **others: object) -> np.ndarray:
    pipeline = diffusers.LTXPipeline.from_pretrained(checkpoint)
    made = pipeline(
        prompt=JOB.prompt,
        negative_prompt=JOB.negative_prompt,
        width=64,
        height=64,
        num_frames=9,
        num_inference_steps=4,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
        **others,
    )
    return (made.frames[0] * most).round().astype(np.uint8 if most == 255 else np.uint16)


def test_pictures_that_only_the_vae_makes_nan_are_told(checkpoint: Path) -> None:
    adapter = load_adapter(checkpoint)
    spec = adapter.geometry.resolve(dataclasses.replace(JOB, steps=1))
    adapter.pipeline.vae.decoder.conv_out.conv.bias.data.fill_(torch.nan)
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    latents = adapter.denoise(spec, prompt, condition, latents, step=0)
    require_finite({"latents": latents}, sum_of({"latents": latents}))
    made = {"frames": adapter.decode(spec, latents)}
    with pytest.raises(ModelError, match="NaN or infinity in the frames"):
        require_finite(made, sum_of(made))


def test_frames_are_those_of_the_pipelines_own_call(checkpoint: Path) -> None:
    assert np.array_equal(run(checkpoint, JOB).numpy(), own_call(checkpoint))


def test_frames_of_16_bits_are_the_rounded_floats_of_the_pipelines_own_call(checkpoint: Path) -> None:
    made = run(checkpoint, dataclasses.replace(JOB, format="png16")).numpy()
    assert np.array_equal(made.view("<u2"), own_call(checkpoint, most=65_535))


def test_16_bits_are_refused_where_the_call_gives_pictures_of_8(checkpoint: Path) -> None:
    geometry, spec = load_geometry(checkpoint), dataclasses.replace(JOB, format="png16")
    assert isinstance(geometry, PipelineGeometry)
    named = {name: each for name, each in geometry.signature.arguments.items() if name != "output_type"}
    signature = dataclasses.replace(geometry.signature, arguments=named)
    with pytest.raises(JobError, match=r"format = png16: this model gives pictures of 8 bits; use png"):
        dataclasses.replace(geometry, signature=signature).resolve(spec)
    sizes = [geometry.trajectory(geometry.resolve(each)).frames_bytes for each in (JOB, spec)]
    assert sizes[1] == 2 * sizes[0]


def test_a_jobs_args_reach_the_call(checkpoint: Path) -> None:
    spec = dataclasses.replace(JOB, args={"max_sequence_length": 8})
    assert np.array_equal(run(checkpoint, spec).numpy(), own_call(checkpoint, max_sequence_length=8))


def test_a_jobs_scheduler_options_change_its_result(checkpoint: Path) -> None:
    spec = dataclasses.replace(JOB, scheduler={"shift": 3.0})
    assert not np.array_equal(run(checkpoint, spec).numpy(), own_call(checkpoint))


@pytest.mark.filterwarnings("ignore:The configuration file of this scheduler")
@pytest.mark.parametrize("options", [{"class": "DDIMScheduler", "clip_sample": True}, {"steps_offset": 0}])
def test_scheduler_options_that_a_constructor_replaces_act_as_in_an_assigned_one(
    options: dict[str, object], tmp_path: Path
) -> None:
    folder = save_checkpoint("StableDiffusionPipeline", tmp_path)
    spec = JobSpec(
        id="a", prompt="a red cat", width=64, height=64, guidance_scale=1, seed=3, steps=4, scheduler=options
    )
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipeline.scheduler = solver.scheduler_like(pipeline.scheduler, options)
    made = pipeline(
        "a red cat", width=64, height=64, guidance_scale=1, num_inference_steps=4, output_type="np",
        generator=torch.Generator().manual_seed(3),
    ).images  # fmt: skip
    assert np.array_equal(run(folder, spec).numpy(), (made * 255).round().astype(np.uint8))


def test_noise_levels_end_in_the_zero_that_a_scheduler_expects_in_its_list(tmp_path: Path) -> None:
    folder = save_checkpoint("StableDiffusionXLPipeline", tmp_path)
    levels = [14.0, 6.0, 2.0, 0.5]
    spec = JobSpec(
        id="a", prompt="a red cat", width=64, height=64, guidance_scale=1, seed=3, steps=4, sigmas=levels,
        scheduler={"class": "EulerDiscreteScheduler"},
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(folder)
    pipeline.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    made = pipeline(
        "a red cat", width=64, height=64, guidance_scale=1, sigmas=[*levels, 0.0], output_type="np",
        generator=torch.Generator().manual_seed(3),
    ).images  # fmt: skip
    assert np.array_equal(run(folder, spec).numpy(), (made * 255).round().astype(np.uint8))


def test_a_pipeline_that_cannot_be_cut_runs_as_one_task(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise NotSteppableError("pipeline.py:1: has no loop over timesteps")

    monkeypatch.setattr(stepping_adapter, "Stepper", refuse)
    assert np.array_equal(run(checkpoint, JOB).numpy(), own_call(checkpoint))


def test_frames_have_the_size_that_the_pipeline_makes(checkpoint: Path) -> None:
    assert run(checkpoint, dataclasses.replace(JOB, frames=11)).shape == (9, 64, 64, 3)


def test_geometry_takes_defaults_from_the_call(checkpoint: Path) -> None:
    geometry = load_geometry(checkpoint)
    resolved = geometry.resolve(JobSpec(id="a", prompt="a cat", seed=1))
    assert (resolved.width, resolved.height, resolved.frames, resolved.steps) == (704, 512, 161, 50)
    assert geometry.kind == "video"
    assert geometry.resolve(resolved) == resolved
    assert geometry.flops(resolved, Stage.DENOISE) > 0


def test_an_unknown_argument_is_refused(checkpoint: Path) -> None:
    with pytest.raises(JobError, match="max_sequence_length"):
        load_geometry(checkpoint).resolve(dataclasses.replace(JOB, args={"max_sequence_lenght": 8}))


def test_unknown_sizes_take_addresses_but_count_no_memory(checkpoint: Path) -> None:
    model = ResolvedModel("ltx", checkpoint, load_geometry(checkpoint))
    (job,), _ = admit([JOB], default_model="ltx", find_model=lambda name: model)
    assert SlabPlan.of(job.trajectory).size_bytes > 1 << 30
    assert HostMemory(devices=Devices("cpu", 1)).job_bytes(job) < 2 << 20
    assert job.has_nominal_flops


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "FluxNinePipeline"}, r"'FluxNinePipeline' is not in diffusers 0\.42"),
        (
            {"transformer": ["my_code", "MyTransformer"]},
            r"brings code of its own: transformer \(transformer/my_code\.py\); .*--trust-remote-code",
        ),
        ({"scheduler": ["my_code", "MyScheduler"]}, r"own: scheduler \(scheduler/my_code\.py\)"),
        ({"_class_name": ["my_code", "MyPipeline"]}, r"own: pipeline \(my_code\.py\)"),
        ({"_class_name": "StableAudioPipeline"}, "makes neither pictures nor videos"),
        ({"_class_name": "MarigoldNormalsPipeline"}, "makes neither pictures nor videos"),
        ({"transformer": ["diffusers", "FluxMultiControlNetModel"]}, "transformer is several networks"),
    ],
)
def test_one_line_says_what_cannot_run(
    checkpoint: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    index = json.loads((checkpoint / "model_index.json").read_text())
    for entry in checkpoint.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "model_index.json").write_text(json.dumps({**index, **change}))
    with pytest.raises(ModelError, match=message):
        load_geometry(tmp_path)


def test_several_pictures_and_sound_are_outputs_and_a_black_one_is_told(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = load_adapter(checkpoint)
    spec = adapter.geometry.resolve(JOB)
    pictures = np.zeros((1, 9, 64, 64, 3), np.float32)
    sound = torch.tensor([[[0.5, -2.0, 0.25], [0.0, 1.0, 0.0]]])
    made = SimpleNamespace(frames=pictures, audio=sound, nsfw_content_detected=[False, True])
    call = SimpleNamespace(decode=lambda latents: made)
    monkeypatch.setattr(adapter, "_calls", lambda *which: call)
    found = adapter.decode(spec, Fields())
    assert found.tensors[SOUND].tolist() == [[0.5, -1.0, 0.25], [0.0, 1.0, 0.0]]
    assert "job a: the model's safety checker made a picture black" in caplog.text
    assert found.scalars[SOUND_RATE] == stepping_adapter.DEFAULT_SOUND_RATE
    assert found.tensors["frames"].shape == (9, 64, 64, 3)


def test_jobs_with_other_numbers_or_files_have_other_shapes(checkpoint: Path) -> None:
    geometry = load_geometry(checkpoint)
    jobs = [
        JOB,
        dataclasses.replace(JOB, args={"decode_timestep": 0.05}),
        dataclasses.replace(JOB, files={"image": "a.png"}),
    ]
    assert len({geometry.shape_key(geometry.resolve(job) if not job.files else job) for job in jobs}) == 3
    assert geometry.trajectory(geometry.resolve(JOB)).frames_shape is None


def test_a_class_that_makes_pictures_has_no_frames_per_second(tmp_path: Path) -> None:
    geometry = load_geometry(save_checkpoint("PixArtSigmaPipeline", tmp_path))
    assert geometry.kind == "image"
    resolved = geometry.resolve(JobSpec(id="a", prompt="a cat", seed=1))
    assert (resolved.frames, resolved.fps) == (1, None)
    assert geometry.resolve(resolved) == resolved
    with pytest.raises(JobError, match="makes single pictures"):
        geometry.resolve(JobSpec(id="a", prompt="a cat", seed=1, fps=8))


def test_sound_is_that_of_the_pipelines_own_call() -> None:
    pipeline = small_pipeline("LTX2Pipeline")
    defaults = {"width": 128, "height": 128, "frames": 9, "steps": 2, "fps": 8}
    geometry = PipelineGeometry(signature_of("LTX2Pipeline"), defaults, None)
    adapter = stepping_adapter.PipelineAdapter(geometry, pipeline, device="cpu")
    job = JobSpec(id="a", prompt="a red cat", seed=3, args={"max_sequence_length": 16})
    spec = geometry.resolve(job)
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    for step in range(2):
        latents = adapter.denoise(spec, prompt, condition, latents, step=step)
    # The small VAE enlarges less than LTX2Pipeline expects.
    found = adapter.decode(dataclasses.replace(spec, width=64, height=64, frames=1), latents)
    made = pipeline(
        "a red cat",
        width=128,
        height=128,
        num_frames=9,
        frame_rate=8,
        num_inference_steps=2,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(3),
    )
    assert torch.equal(found.tensors[SOUND], made.audio[0].float().clamp(-1, 1))
    assert found.scalars[SOUND_RATE] == pipeline.vocoder.config.output_sampling_rate


# --- several ranks


@pytest.mark.parametrize(
    "layout",
    [
        Layout((0, 1), cfg=2),
        Layout((0, 1), ulysses=2),
        Layout((0, 1, 2), ring=3),
        Layout((0, 1, 2, 3), cfg=2, ulysses=2),
    ],
    ids=str,
)
def test_ranks_that_share_steps_give_the_result_of_one_rank(checkpoint: Path, layout: Layout) -> None:
    check_ranks(checkpoint, layout, is_shared=True)


def check_ranks(checkpoint: Path, layout: Layout, *, is_shared: bool) -> None:
    """Steps on the ranks of a layout give one rank's result; with `is_shared` they do a part of its work."""
    adapters = [load_adapter(checkpoint) for _ in layout.ranks]
    spec = adapters[0].geometry.resolve(JOB)
    prompt = adapters[0].encode(spec)
    condition, first = adapters[0].prepare(spec, prompt)

    def denoise(rank: int, parallel: Parallel | None) -> Fields:
        torch.set_num_threads(1)  # counts for the calling thread, and rounding depends on it
        latents = first
        for step in range(spec.steps or 0):
            latents = adapters[rank].denoise(spec, prompt, condition, latents, step=step, parallel=parallel)
        return latents

    def shared(parallel: Parallel) -> Fields:
        return denoise(parallel.cfg.slot * parallel.sequence.size + parallel.sequence.slot, parallel)

    sizes: list[int] = []
    (block, *_) = adapters[0].pipeline.transformer.transformer_blocks
    block.register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    torch.manual_seed(spec.seed or 0)  # threads have PyTorch's generator in common, and each step seeds it
    alone = denoise(0, None)
    whole = sizes[-1]
    runs = [FakeCluster().run(layout, lambda group: shared(parallel_from(group))) for _ in range(2)]
    assert (sizes[-1] < whole) == is_shared
    for result in runs[0] + runs[1]:
        assert result.scalars == alone.scalars
        for name, wanted in alone.tensors.items():
            assert torch.equal(result.tensors[name], runs[0][0].tensors[name])
            if wanted.is_floating_point():
                assert (result.tensors[name] - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_ranks_that_cannot_share_tokens_evaluate_the_whole_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(transformer: torch.nn.Module) -> None:
        raise ModelError("no module 'rope'")

    monkeypatch.setattr(stepping_adapter.hooks, "install", refuse)
    check_ranks(checkpoint, Layout((0, 1), ulysses=2), is_shared=False)


def test_a_class_whose_tokens_are_shared_has_a_plan() -> None:
    for name in TOKEN_SIDES:
        assert name in PLANS or getattr(getattr(diffusers, name), "_cp_plan", None) is not None


def test_geometry_says_how_ranks_can_share_a_step(checkpoint: Path, tmp_path: Path) -> None:
    geometry = load_geometry(checkpoint)
    job = geometry.resolve(JOB)
    assert (geometry.num_heads, geometry.num_tokens(job)) == (2, 4)
    assert geometry.num_tokens(dataclasses.replace(job, width=16)) == 1
    guided = [geometry.uses_cfg(dataclasses.replace(job, guidance_scale=scale)) for scale in (None, 3.0, 1.0)]
    assert guided == [True, True, False]
    only_guidance = load_geometry(save_checkpoint("PixArtSigmaPipeline", tmp_path))
    assert (only_guidance.num_heads, only_guidance.num_tokens(job), only_guidance.uses_cfg(job)) == (
        1,
        1,
        True,
    )


def test_an_embedded_guidance_scale_is_one_branch() -> None:
    geometry = PipelineGeometry(signature_of("FluxPipeline"), {}, None, shares_guidance=True)
    job = JobSpec(id="a", prompt="a cat", seed=1, width=64, height=64, guidance_scale=3.5)
    assert not geometry.uses_cfg(job)
    true_cfg = dataclasses.replace(job, true_cfg_scale=4.0)
    assert not geometry.uses_cfg(true_cfg)
    assert geometry.uses_cfg(dataclasses.replace(true_cfg, negative_prompt="dark"))


@pytest.mark.parametrize(
    "name",
    [
        "FluxPipeline",
        "Flux2KleinPipeline",
        "LatentConsistencyModelPipeline",
        "LTXPipeline",
        "StableDiffusion3Pipeline",
        "StableDiffusionPipeline",
        "StableDiffusionXLPipeline",
    ],
)
def test_calls_of_transformers_go_through_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "WORTH_RECORDING", 0.0)
    adapter = load_adapter(save_checkpoint(name, tmp_path))
    frames = JOB.frames if adapter.geometry.kind == "video" else None
    spec = adapter.geometry.resolve(dataclasses.replace(JOB, negative_prompt=None, frames=frames))
    prompt = adapter.encode(spec)
    condition, first = adapter.prepare(spec, prompt)

    def denoise() -> Fields:
        latents = first
        for step in range(spec.steps or 0):
            latents = adapter.denoise(spec, prompt, condition, latents, step=step)
        return latents

    wanted = denoise()
    graphs = recording.Graphs(recorder := ImitationRecorder(), torch.device("cpu"))
    adapter.evaluate_by(graphs)
    with graphs.recording(None):
        adapter.denoise(spec, prompt, condition, first, step=0)
    found = denoise()
    assert recorder.num_records == 1
    assert recorder.num_replays >= (spec.steps or 0)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in wanted.tensors.items())
