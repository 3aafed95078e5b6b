"""LoRAs of GGUF models: the bits of diffusers' pipeline with the same LoRAs loaded and not fused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from gfc_fake import FakeCluster
from gpu_worker_imitation import ImitationRecorder
from safetensors.torch import load_file, save_file
from small_checkpoints import save_checkpoint
from test_compiled import StubCompiler
from test_lora import asked
from test_single_file import published
from torch import Tensor, nn

from gfgen.errors import ModelError
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families import guidance
from gfgen.models.families.adapter import SAMPLE
from gfgen.models.families.registry import load_adapter, resolve_checkpoint
from gfgen.models.fast import compiled, recording
from gfgen.models.fast.kernels import using
from gfgen.models.fast.recording import NotWorthRecordingError
from gfgen.models.geometry import single_file
from gfgen.models.geometry.weights import Placement, count_parts
from gfgen.models.lora.accounting import LoraFit, LoraFits, by_headers
from gfgen.models.lora.merging import MergedLoras
from gfgen.models.lora.reading import answer
from gfgen.models.parallel.parallel import parallel_from
from gfgen.runtime.core.devices import CPU, CUDA, Devices
from gfgen.session.loras import Loras, PatchNeed
from gfgen.session.memory import GpuMemory, HostMemory

gguf = pytest.importorskip("gguf")
torch.set_num_threads(1)
KINDS = gguf.GGMLQuantizationType
WAN, QWEN, FLUX = "WanPipeline", "QwenImagePipeline", "FluxPipeline"
TINY = {WAN: "tiny-wan-moe", QWEN: "tiny-qwen-image"}
SMALL: dict[str, Any] = {"width": 64, "height": 64, "steps": 3, "seed": 5}
FIELDS: Mapping[str, dict[str, Any]] = {
    WAN: {"frames": 5, "guidance_scale": 2.0, "guidance_scale_2": 3.0},
    QWEN: {"true_cfg_scale": 2.0},
    FLUX: {"guidance_scale": 3.0},
}


def write_gguf(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Matrices of blocks in 8 bits, all else in fp32."""
    writer = gguf.GGUFWriter(path, "any")
    for name, each in tensors.items():
        is_matrix = each.ndim == 2 and each.shape[1] % 32 == 0 and "blocks." in name
        kind = KINDS.Q8_0 if is_matrix else KINDS.F32
        writer.add_tensor(name, gguf.quants.quantize(each.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Case:
    """A model of which all transformers come from GGUF files, and two LoRAs of it."""

    def __init__(self, pipeline: str, folder: Path) -> None:
        self.pipeline = pipeline
        is_tiny = pipeline in TINY
        self.base = resolve_checkpoint(TINY[pipeline]) if is_tiny else save_checkpoint(pipeline, folder / "m")
        self.checkpoint, self.files = self.base, dict[str, Path]()
        for name, noise in (("transformer", "high"), ("transformer_2", "low")):
            for stored in (self.base / name).glob("*.safetensors"):
                tensors = load_file(stored)
                if pipeline == WAN:
                    tensors = {published(key): x for key, x in tensors.items()}
                file = self.files[name] = write_gguf(folder / f"{noise}.gguf", tensors)
                self.checkpoint = single_file.assemble(file, self.checkpoint, folder / "links")
        layers = dict(self.theirs(self.base).transformer.named_modules())
        self.loras = [self.lora(folder / f"{seed}.safetensors", seed, layers) for seed in range(3)]

    def lora(self, path: Path, seed: int, layers: Mapping[str, nn.Module]) -> Path:
        """Of all linear layers of the blocks."""
        torch.manual_seed(seed)
        tensors: dict[str, Tensor] = {}
        for name, layer in layers.items():
            if isinstance(layer, nn.Linear) and "blocks." in name:
                tensors[f"transformer.{name}.lora_A.weight"] = 0.3 * torch.randn(4 + seed, layer.in_features)
                tensors[f"transformer.{name}.lora_B.weight"] = 0.3 * torch.randn(layer.out_features, 4 + seed)
        save_file(tensors, path)
        return path

    def theirs(self, checkpoint: Path | None = None, dtype: torch.dtype = torch.float32) -> Any:
        """diffusers' pipeline, with the GGUF files unless told otherwise."""
        options: dict[str, Any] = {"local_files_only": True, "dtype": dtype}
        parts = {}
        for name, file in self.files.items() if checkpoint is None else ():
            kind = getattr(
                diffusers, json.loads((self.base / name / "config.json").read_text())["_class_name"]
            )
            config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
            given = {"config": str(self.base), "subfolder": name, "quantization_config": config}
            parts[name] = kind.from_single_file(str(file), **given, **options)
        found = getattr(diffusers, self.pipeline).from_pretrained(self.base, **parts, **options)
        found.set_progress_bar_config(disable=True)
        return found

    def job(self, *loras: tuple[int, float], target: str | None = None) -> JobSpec:
        spec = asked(*((self.loras[idx], scale) for idx, scale in loras), target=target)
        return replace(spec, **SMALL, **FIELDS[self.pipeline])

    def call(self, pipeline: Any, **changed: Any) -> Tensor:
        """The latents of diffusers' own call, with these arguments changed."""
        fields = {name: value for name, value in FIELDS[self.pipeline].items() if name != "frames"}
        if self.pipeline == WAN:
            fields["num_frames"] = 5
        if self.pipeline != FLUX:
            fields["negative_prompt"] = " " if self.pipeline == QWEN else ""
        given = {"prompt": "a fox", "width": 64, "height": 64, "num_inference_steps": 3, **fields}
        noise = torch.Generator().manual_seed(5)
        made = pipeline(**given | changed, output_type="latent", generator=noise)
        found: Tensor = made.frames if self.pipeline == WAN else made.images
        return found


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=[WAN, QWEN, FLUX])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("gguf"))


def started(adapter: Any, spec: JobSpec) -> tuple[Any, ...]:
    """The job as it runs, and the inputs of its first step."""
    spec = adapter.geometry.resolve(spec)
    prompt = adapter.encode(spec)
    return (spec, prompt, *adapter.prepare(spec, prompt))


def latents_of(adapter: Any, spec: JobSpec, parallel: Any = None) -> Tensor:
    state = started(adapter, spec)
    for step in range(3):
        state = (*state[:3], adapter.denoise(*state, step=step, parallel=parallel))
    return sample(state)


def sample(state: tuple[Any, ...]) -> Tensor:
    tensors = state[3].tensors
    found: Tensor = tensors[SAMPLE] if SAMPLE in tensors else tensors["latents"]
    return found


def load_by_diffusers(pipeline: Any, path: Path, name: str, experts: Sequence[str]) -> list[str]:
    """The names of a LoRA's adapters, one for each expert."""
    for expert in experts:
        second = {"load_into_transformer_2": True} if expert == "transformer_2" else {}
        options = {"weight_name": path.name, "adapter_name": f"{name}{expert}", **second}
        pipeline.load_lora_weights(str(path.parent), **options)
    return [f"{name}{expert}" for expert in experts]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_latents_are_those_of_the_pipeline_with_the_loras_loaded(case: Case) -> None:
    adapter, own, seen = load_adapter(case.checkpoint), case.theirs(), list[Tensor]()
    layers = [type(each).__name__ for each in own.transformer.modules() if isinstance(each, nn.Linear)]
    assert layers.count("GGUFLinear") >= 20
    assert {*layers} == {"GGUFLinear", "Linear"}
    names = [load_by_diffusers(own, path, str(idx), list(case.files)) for idx, path in enumerate(case.loras)]
    for loras in ([(0, 1.0)], [(0, 0.7), (1, -0.3)], [(1, 0.5), (2, 1.5), (0, 0.0)]):
        scales = {name: scale for idx, scale in loras for name in names[idx]}
        own.set_adapters(list(scales), list(scales.values()))
        theirs = case.call(own)
        seen.append(latents_of(adapter, case.job(*loras)).reshape(theirs.shape))
        assert torch.equal(seen[-1], theirs), loras
    seen.append(latents_of(adapter, case.job()).reshape(theirs.shape))
    assert torch.equal(seen[-1], case.call(case.theirs()))
    assert not any(torch.equal(*pair) for pair in itertools.combinations(seen, 2))


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("case", [WAN], indirect=True)
@pytest.mark.parametrize("expert", ["transformer", "transformer_2"])
def test_a_file_for_one_expert_changes_that_one(case: Case, expert: str) -> None:
    own = case.theirs()
    load_by_diffusers(own, case.loras[0], "own", [expert])
    theirs = case.call(own)
    ours = latents_of(load_adapter(case.checkpoint), case.job((0, 1.0), target=expert))
    assert torch.equal(ours.reshape(theirs.shape), theirs)


def test_jobs_in_any_order_get_the_bits_that_each_gets_alone(case: Case) -> None:
    jobs = [case.job((0, 0.8)), case.job((1, 0.5), (0, -0.4)), case.job()]
    adapter = load_adapter(case.checkpoint)
    alone = [latents_of(load_adapter(case.checkpoint), job) for job in jobs]
    for order in ((0, 1, 2), (2, 1, 0)):  # in turns, each job follows each other one
        states = {idx: started(adapter, jobs[idx]) for idx in order}
        for step in range(3):
            for idx, state in states.items():
                states[idx] = (*state[:3], adapter.denoise(*state, step=step))
        assert all(torch.equal(sample(states[idx]), alone[idx]) for idx in order), order


def test_two_ranks_differ_from_one_by_rounding_and_any_two_not_at_all(case: Case) -> None:
    adapters, spec = [load_adapter(case.checkpoint) for _ in range(2)], case.job((0, 0.8), (1, 0.3))

    def program(group: Any) -> Tensor:
        with torch.no_grad():
            return latents_of(adapters[group.slot], spec, parallel_from(group))

    alone = latents_of(adapters[0], spec)
    found = [FakeCluster().run(Layout(ranks, ulysses=2), program) for ranks in ((0, 1), (1, 0))]
    assert all(torch.equal(x, found[0][0]) for pair in found for x in pair)
    assert (found[0][0] - alone).abs().max() <= 1e-5 * alone.abs().max()


# What files may have ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [WAN], indirect=True)
def test_a_convolution_gets_the_sum(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = case.theirs().transformer.patch_embedding.weight.shape
    factors = {"lora_A.weight": (2, *shape[1:]), "lora_B.weight": (shape[0], 2, 1, 1, 1)}
    tensors = {f"transformer.patch_embedding.{kind}": torch.randn(size) for kind, size in factors.items()}
    save_file(tensors, path := tmp_path / "conv.safetensors")
    assert fit_of(case.checkpoint, path).changed["transformer.patch_embedding.weight"] == shape.numel()
    spec = replace(asked((path, 0.7)), **SMALL, **FIELDS[WAN])
    adapter: Any = load_adapter(case.checkpoint)
    weight = adapter.patches.pipeline.transformer.patch_embedding.weight
    before = weight.clone()
    latents_of(adapter, spec)
    up, down = (tensors[f"transformer.patch_embedding.lora_{name}.weight"].flatten(1) for name in "BA")
    torch.testing.assert_close(weight, before + 0.7 * (up @ down).view(shape))
    latents_of(adapter, case.job())
    assert torch.equal(weight, before)


@pytest.mark.parametrize("case", [FLUX], indirect=True)
def test_all_kinds_of_changes_act_as_on_plain_weights(case: Case, tmp_path: Path) -> None:
    """Factors with a bias, LoKr, whole differences, fused layers."""
    torch.manual_seed(0)
    layer, tensors = "transformer.transformer_blocks.0", dict[str, Tensor]()
    width = case.theirs().transformer.inner_dim
    for name, kinds in {
        "attn.to_out.0": {"lora_A.weight": (4, width), "lora_B.weight": (width, 4), "lora_B.bias": (width,)},
        "attn.to_qkv": {"lora_A.weight": (4, width), "lora_B.weight": (3 * width, 4), "alpha": ()},
        "attn.add_q_proj": {"lokr_w1": (2, 2), "lokr_w2_a": (width // 2, 3), "lokr_w2_b": (3, width // 2)},
        "attn.add_k_proj": {"diff": (width, width), "diff_b": (width,)},
    }.items():
        tensors |= {f"{layer}.{name}.{kind}": 0.2 * torch.randn(size) for kind, size in kinds.items()}
    save_file(tensors, path := tmp_path / "all.safetensors")
    spec = replace(asked((path, 0.7)), **SMALL, **FIELDS[FLUX])
    adapter: Any = load_adapter(case.checkpoint)
    plain: Any = load_adapter(case.base)
    plain.patches.pipeline.transformer.load_state_dict(numbers(adapter.patches.pipeline.transformer))
    before = numbers(adapter.patches.pipeline.transformer)
    found, wanted, without = latents_of(adapter, spec), latents_of(plain, spec), latents_of(plain, case.job())
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (found - without).abs().max() > 1e-2 * wanted.abs().max()
    latents_of(adapter, case.job())
    assert all(
        torch.equal(x, before[name]) for name, x in numbers(adapter.patches.pipeline.transformer).items()
    )


def numbers(model: Any) -> dict[str, Tensor]:
    """The weights that a GGUF model stands for."""
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    stored = {name: x if hasattr(x, "quant_type") else x.data for name, x in model.named_parameters()}
    return {name: dequantize_gguf_tensor(x).float().clone() for name, x in stored.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", [QWEN], indirect=True)
def test_factors_are_in_the_precision_that_layers_compute_in(
    case: Case, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "half.safetensors"
    save_file({name: x.to(dtype) for name, x in load_file(case.loras[0]).items()}, path)
    spec = replace(asked((path, 0.8)), **SMALL, **FIELDS[QWEN])
    for name in ("float32", "bfloat16"):
        own = case.theirs(dtype=getattr(torch, name))
        own.set_adapters(load_by_diffusers(own, path, "own", ["transformer"]), 0.8)
        theirs = case.call(own)
        ours = latents_of(load_adapter(case.checkpoint, dtype=name), spec)
        assert torch.equal(ours.reshape(theirs.shape), theirs)


def test_streamed_blocks_get_the_same_bits(case: Case) -> None:
    parts = count_parts(case.checkpoint)
    keys = {name: frozenset(part.blocks) for name, part in parts.items() if part.blocks and name != "vae"}
    assert set(case.files) < set(keys)
    streaming, adapter = (
        load_adapter(case.checkpoint, placement=Placement(keys, 2)),
        load_adapter(case.checkpoint),
    )
    for spec in (case.job((0, 1.0)), case.job(), case.job((1, 0.5))):
        assert torch.equal(latents_of(streaming, spec), latents_of(adapter, spec))


@pytest.mark.parametrize("case", [WAN], indirect=True)
def test_an_expert_in_plain_weights_beside_one_in_gguf_gets_the_sum(case: Case, tmp_path: Path) -> None:
    mixed = single_file.assemble(case.files["transformer_2"], case.base, tmp_path)
    adapter: Any = load_adapter(mixed)
    spec = case.job((0, 1.0))
    changed = fit_of(mixed, case.loras[0]).changed
    sizes = {name.partition(".")[0]: number for name, number in changed.items()}
    assert sizes["transformer"] > 0 == sizes["transformer_2"]
    latents_of(adapter, spec)
    merged = load_adapter(case.base)
    latents_of(merged, spec)
    ours, theirs = (dict(each.patches.pipeline.transformer.named_parameters()) for each in (adapter, merged))
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    assert not adapter.patches.pipeline.transformer.runs_beside
    assert adapter.patches.pipeline.transformer_2.runs_beside


# Before a run -------------------------------------------------------------------------------------


def fit_of(checkpoint: Path, path: Path) -> LoraFit:
    assert by_headers(checkpoint, path) is None, "a child process is asked"
    return LoraFit(**answer(checkpoint, path))


def test_memory_is_that_of_the_factors(case: Case) -> None:
    path, size = case.loras[1], sum(x.numel() for x in load_file(case.loras[1]).values())
    fits = LoraFits()
    fits._known[case.checkpoint, "a"] = found = fit_of(case.checkpoint, path)
    assert len(found.changed) == len(load_file(path)) // 2 * len(case.files)
    assert found.num_factors == size * len(case.files)
    for memory, width in (
        (GpuMemory(devices=Devices(CUDA, 2)), 2),
        (HostMemory(devices=Devices(CPU, 2)), 4 * 2),
    ):
        for is_on_host in (False, True):
            memory.patches = Loras(fits, {case.checkpoint: PatchNeed(is_on_host)})
            need = memory.patches.of(case.checkpoint, {("a", None)})
            assert memory.patch_bytes(case.checkpoint, need) == width * found.num_factors
            assert need.copies_bytes(2) == 0


def test_tensors_that_fill_nothing_are_named(case: Case, tmp_path: Path) -> None:
    tensors = load_file(case.loras[0])
    name = min(tensors).replace("lora_A", "lora_Q")
    save_file({**tensors, name: torch.ones(1)}, path := tmp_path / "odd.safetensors")
    with pytest.raises(ModelError, match=rf"1 tensor of it fill nothing: {name}"):
        fit_of(case.checkpoint, path)
    with pytest.raises(ModelError, match=rf"1 tensor of it fill nothing: {name}"):
        latents_of(
            load_adapter(case.checkpoint), replace(asked((path, 1.0)), **SMALL, **FIELDS[case.pipeline])
        )


# What keeps launches ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [QWEN], indirect=True)
def test_forwards_with_changes_beside_layers_are_not_recorded(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "WORTH_RECORDING", 0.0)
    recorder, wanted = ImitationRecorder(), {}
    adapter: Any = load_adapter(case.checkpoint)
    jobs = [case.job(), case.job((0, 1.0))]
    for idx, job in enumerate(jobs):
        wanted[idx] = latents_of(adapter, job)
    graphs = recording.Graphs(recorder, torch.device("cpu"))
    adapter.evaluate_by(graphs)
    for idx in (0, 1, 0):
        state = started(adapter, jobs[idx])
        adapter.denoise(*state, step=0)
        with graphs.recording(None), nullcontext() if idx == 0 else pytest.raises(NotWorthRecordingError):
            adapter.denoise(*state, step=0)
        assert torch.equal(latents_of(adapter, jobs[idx]), wanted[idx])


@pytest.mark.parametrize("case", [FLUX], indirect=True)
def test_blocks_with_changes_beside_layers_are_not_compiled(case: Case) -> None:
    torch._dynamo.reset()
    model = case.theirs().transformer
    compiled.prepare(model, backend=(stub := StubCompiler()))
    merged, inputs = MergedLoras(SimpleNamespace(transformer=model)), flux_inputs(model)
    plain = model(**inputs, return_dict=False)[0]
    with using("compiled"):
        assert (model(**inputs, return_dict=False)[0] - plain).abs().max() < 2e-6 * plain.abs().max()
        num_compiled = stub.num_compiled
        merged.merge(case.job((0, 1.0)))
        changed = model(**inputs, return_dict=False)[0]
    assert 0 < num_compiled == stub.num_compiled
    assert torch.equal(changed, model(**inputs, return_dict=False)[0])
    assert not torch.equal(changed, plain)


def flux_inputs(model: Any) -> dict[str, Any]:
    noise, config = torch.Generator().manual_seed(0), model.config

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=noise)

    return {
        "hidden_states": random(1, 12, config.in_channels),
        "encoder_hidden_states": random(1, 3, config.joint_attention_dim),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]) if config.guidance_embeds else None,
        "img_ids": torch.arange(36.0).view(12, 3) // 3,
        "txt_ids": torch.zeros(3, 3),
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case", [QWEN], indirect=True)
def test_both_branches_on_a_gpu_where_one_forward_of_both_is_faster(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks in 8 bits are not fused, so each branch has its forward; the results are those of diffusers."""
    adapter: Any = load_adapter(case.checkpoint, device="cuda")
    spec = replace(case.job(), width=512, height=512, negative_prompt="blurry, a dog on a beach")
    found = latents_of(adapter, spec)
    own = case.theirs(dtype=torch.bfloat16).to("cuda")
    theirs = case.call(own, width=512, height=512, negative_prompt=spec.negative_prompt)
    far = (found.reshape(theirs.shape).float() - theirs.float()).abs()
    assert far.max() < 0.02 * theirs.abs().max()
    monkeypatch.setattr(guidance, "BATCH_RULES", ())
    assert torch.equal(latents_of(adapter, spec), found)
