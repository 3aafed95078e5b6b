"""UNets of Stable Diffusion: records of their forwards, and their memory format on GPUs."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from gpu_worker_imitation import ImitationRecorder
from safetensors.torch import save_file
from small_checkpoints import save_checkpoint
from small_pipelines import small_pipeline
from test_compiled import StubCompiler
from test_lora import asked, kohya_lora, small_sdxl
from torch.fx.experimental.proxy_tensor import make_fx

from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import compiled, recording
from gfgen.models.fast.compiled import _Norm, channels_last
from gfgen.models.fast.evaluation import evaluate, evaluate_call
from gfgen.models.fast.kernels import using
from gfgen.models.fast.recording import Graphs
from gfgen.models.lora.merging import MergedLoras
from gfgen.models.stepping.adapter import PipelineAdapter

CPU = torch.device("cpu")
NAMES = ("LatentConsistencyModelPipeline", "StableDiffusionPipeline", "StableDiffusionXLPipeline")
RESIDUALS = {
    "mid_block_additional_residual": torch.ones(2, 32, 4, 4),
    "down_block_additional_residuals": [
        torch.ones(2, 16, 8, 8),
        torch.ones(2, 16, 8, 8),
        torch.ones(2, 16, 4, 4),
        torch.ones(2, 32, 4, 4),
    ],
}
"""As a ControlNet makes them."""


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def inputs_of(unet: Any, *, seed: int = 0, side: int = 8) -> dict[str, Any]:
    """Both branches of a step; everything depends on the seed."""
    random = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {
        "sample": torch.randn(2, unet.config.in_channels, side, side, generator=random),
        "timestep": torch.tensor(900.0 - seed),
        "encoder_hidden_states": torch.randn(2, 7, unet.config.cross_attention_dim, generator=random),
        "cross_attention_kwargs": None,
    }
    if unet.config.time_cond_proj_dim:
        found["timestep_cond"] = torch.randn(2, unet.config.time_cond_proj_dim, generator=random)
    if unet.config.addition_embed_type:
        found["added_cond_kwargs"] = {
            "text_embeds": torch.randn(2, 32, generator=random),
            "time_ids": torch.randint(64, 1024, (2, 6), generator=random).float(),
        }
    return found


def through(graphs: Graphs, unet: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The result of a call as pipelines make it."""
    bound = inspect.signature(unet.forward).bind(**inputs, return_dict=False)
    result: torch.Tensor = evaluate_call(unet, bound, by=graphs)[0]
    return result


def recorded(unet: Any, *given: dict[str, Any]) -> tuple[Graphs, ImitationRecorder]:
    graphs = Graphs(recorder := ImitationRecorder(), CPU)
    for inputs in given:
        with graphs.recording(None):
            through(graphs, unet, inputs)
    return graphs, recorder


@pytest.mark.parametrize("name", NAMES)
def test_a_record_reads_the_timestep_the_texts_and_the_sizes_of_each_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gfgen.models.fast.recording.WORTH_RECORDING", 0.0)
    unet = small_pipeline(name).unet
    graphs, recorder = recorded(unet, inputs_of(unet), inputs_of(unet, side=12))
    for seed in range(1, 4):
        for side in (8, 12):
            inputs = inputs_of(unet, seed=seed, side=side)
            assert torch.equal(through(graphs, unet, inputs), evaluate(unet, inputs))
    assert (recorder.num_records, recorder.num_replays) == (2, 6)
    ints = inputs_of(unet) | {"timestep": torch.tensor(7)}
    assert torch.equal(through(graphs, unet, ints), evaluate(unet, ints))
    assert recorder.num_replays == 6  # DDIM's timesteps are integers, of another record


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_reads_no_value_on_the_host(name: str) -> None:
    unet = small_pipeline(name).unet
    make_fx(lambda given: evaluate(unet, given))(inputs_of(unet))


@pytest.mark.parametrize(("launching_s", "is_worth"), [((9.0, 0.5, 1.0), True), ((9.0, 0.1, 0.5), False)])
def test_all_blocks_of_a_unet_decide_whether_forwards_are_recorded(
    launching_s: tuple[float, ...], is_worth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block is bound by its launches and the other one is not; the first one loads what they launch."""
    changes = {
        "block_out_channels": (16, 32, 32),
        "down_block_types": ("DownBlock2D", *["CrossAttnDownBlock2D"] * 2),
        "up_block_types": (*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"),
        "attention_head_dim": 4,
    }
    config = small_pipeline("StableDiffusionPipeline").unet.config
    unet = diffusers.UNet2DConditionModel.from_config({**config, **changes})
    now_s = 0.0

    class Device(ImitationRecorder):
        def synchronize(self) -> None:
            nonlocal now_s
            now_s = math.ceil(now_s)

    def slow(forward: Any, takes_s: float) -> Any:
        def call(*inputs: Any, **options: Any) -> Any:
            nonlocal now_s
            now_s += takes_s
            return forward(*inputs, **options)

        return call

    for block, takes_s in zip(unet.down_blocks, launching_s, strict=True):
        monkeypatch.setattr(block, "forward", slow(block.forward, takes_s))
    monkeypatch.setattr(recording, "time", SimpleNamespace(monotonic=lambda: now_s))
    graphs = Graphs(Device(), CPU)
    with graphs.rehearsing(None):
        through(graphs, unet, inputs_of(unet))
    assert len(graphs._records) == is_worth


def test_the_attention_blocks_of_a_unet_are_compiled_once() -> None:
    unet = small_pipeline("StableDiffusionXLPipeline").unet
    wanted = evaluate(unet, inputs := inputs_of(unet))
    compiled.prepare(unet, backend=(stub := StubCompiler()))
    with using("compiled"):
        assert torch.allclose(evaluate(unet, inputs), wanted, rtol=0, atol=2e-6)
        num_compiled = stub.num_compiled
        evaluate(unet, inputs_of(unet, seed=1))
    assert 0 < num_compiled == stub.num_compiled
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "more",
    [
        {"timestep": 7.0},
        {"timestep": 7},
        {"cross_attention_kwargs": {"scale": 1.0}},
        RESIDUALS,
        {"down_intrablock_additional_residuals": [torch.ones(2, 16, 4, 4), torch.ones(2, 32, 4, 4)]},
    ],
    ids=["float", "int", "attention", "ControlNet", "adapter"],
)
def test_a_call_that_a_record_could_not_repeat_is_evaluated(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = small_pipeline("StableDiffusionPipeline").unet
    graphs, recorder = recorded(unet)
    given = {name: list(x) if isinstance(x, list) else x for name, x in more.items()}
    wanted = unet(**{**inputs_of(unet), **given}, return_dict=False)[0]
    with graphs.recording(None):
        assert torch.equal(through(graphs, unet, {**inputs_of(unet), **more}), wanted)
    assert recorder.num_records == 0


def test_a_record_follows_the_loras_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of convolutions whose weights have their channels last, as on GPUs."""
    monkeypatch.setattr("gfgen.models.fast.recording.WORTH_RECORDING", 0.0)
    pipeline = small_sdxl()
    save_file(kohya_lora(pipeline, {"unet": "unet"}), path := tmp_path / "style.safetensors")
    unet = pipeline.unet.to(memory_format=torch.channels_last)
    graphs, recorder = recorded(unet, inputs := inputs_of(unet))
    merged, results = MergedLoras(pipeline), []
    for loras in ([], [(path, 0.7)], []):
        merged.merge(asked(*loras))
        results.append(through(graphs, unet, inputs))
        assert torch.equal(results[-1], evaluate(unet, inputs))
    assert recorder.num_replays == len(results)
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_change_results_by_rounding(dtype: torch.dtype) -> None:
    pipeline = small_pipeline("StableDiffusionXLPipeline").to(dtype)
    given = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.dim() else x, inputs_of(pipeline.unet)
    )
    wanted = evaluate(pipeline.unet, given), pipeline.vae.decode(given["sample"]).sample
    channels_last(pipeline)
    assert pipeline.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    found = evaluate(pipeline.unet, given), pipeline.vae.decode(given["sample"]).sample
    rounding = 1e-5 if dtype is torch.float32 else 0.05
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= rounding * other.abs().max()


@pytest.mark.parametrize(
    ("device", "kernels", "is_last"),
    [("cuda", "fused", True), ("cuda", "own", False), ("cpu", "compiled", False)],
)
def test_weights_on_cpus_and_of_diffusers_own_kernels_keep_their_order(
    device: str, kernels: Any, is_last: bool
) -> None:
    pipeline = small_pipeline("StableDiffusionXLPipeline")
    geometry: Any = SimpleNamespace(family="StableDiffusionXLPipeline", signature=None, token_side=None)
    PipelineAdapter(geometry, pipeline, device=device, kernels=kernels)
    for weight in (pipeline.unet.conv_in.weight, pipeline.vae.decoder.conv_in.weight):
        assert weight.is_contiguous(memory_format=torch.channels_last) == is_last


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(2, 320, 128, 128), (1, 128, 256, 250), (2, 2560, 32, 32), (3, 1920, 5, 7)]
)
@pytest.mark.parametrize("activates", [False, True])
def test_group_norms_of_a_gpu_are_those_of_torch(
    shape: tuple[int, ...], activates: bool, dtype: torch.dtype
) -> None:
    """Given in either order; the result has channels last."""
    norm: Any = torch.nn.GroupNorm(32, shape[1], eps=1e-6).cuda()
    norm.weight.normal_()
    norm.bias.normal_()
    x = torch.randn(shape, device="cuda").mul(3).add(2).to(dtype)
    norm.to(dtype)
    wanted = copy.deepcopy(norm).double()(x.double())
    wanted = torch.nn.functional.silu(wanted) if activates else wanted
    norm.__class__ = _Norm
    norm.activates = activates
    rounding = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}[dtype]
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        found = norm(given)
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found.double(), wanted, rtol=rounding, atol=rounding)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", NAMES)
def test_channels_last_change_results_of_a_gpu_by_rounding(name: str) -> None:
    pipeline = small_pipeline(name)
    inputs = inputs_of(pipeline.unet)
    wanted = evaluate(pipeline.unet, inputs), pipeline.vae.decode(inputs["sample"]).sample
    pipeline.to("cuda")
    given = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, inputs)
    channels_last(pipeline)
    found = evaluate(pipeline.unet, given), pipeline.vae.decode(given["sample"]).sample
    for one, other in zip(found, wanted, strict=True):  # convolutions have ten bits (TF32)
        assert (one.cpu() - other).abs().max() <= 0.02 * other.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_those_of_the_pipelines_own_call(name: str, tmp_path: Path) -> None:
    """They become bytes where they were made."""
    adapter: Any = load_adapter(save_checkpoint(name, tmp_path))
    asked = JobSpec(id="a", prompt="a red cat", width=64, height=64, steps=3, guidance_scale=3.0, seed=3)
    spec = adapter.geometry.resolve(asked)
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    for step in range(3):
        latents = adapter.denoise(spec, prompt, condition, latents, step=step)
    call = {"width": 64, "height": 64, "num_inference_steps": 3, "guidance_scale": 3.0, "output_type": "np"}
    pipeline = getattr(diffusers, name).from_pretrained(tmp_path)
    own = pipeline("a red cat", **call, generator=torch.Generator().manual_seed(3)).images
    wanted = (own * 255).round().astype("uint8")
    assert adapter.arguments(spec)["output_type"] == "pt"
    assert (adapter.decode(spec, latents).tensors["frames"].numpy() == wanted).all()
