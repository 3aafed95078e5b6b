"""LoRAs merged into models: the weights of diffusers' `fuse_lora`, and the base model's bits afterwards."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_streaming import all_streamed, all_weights_read
from torch import nn

from gfgen.errors import ModelError
from gfgen.job.spec import JobSpec
from gfgen.models.families.adapter import SAMPLE
from gfgen.models.families.registry import load_adapter, resolve_checkpoint
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.kernels import Quantised
from gfgen.models.geometry.weights import Placement
from gfgen.models.loading.components import load_pipeline, without_progress_bars
from gfgen.models.loading.random_weights import StoredWeights, random_component
from gfgen.models.lora import merging
from gfgen.models.lora.merging import MergedLoras
from gfgen.models.lora.reading import QuantisedRows, original_weights
from gfgen.models.streaming.host_copy import HostCopy
from gfgen.models.streaming.placing import Kept, Placing
from gfgen.models.streaming.shards import Island
from gfgen.models.streaming.stream import stream_of
from gfgen.runtime.ipc.messages import Channel

RANK = 4
CLASSES = {"tiny-wan-moe": "WanPipeline", "tiny-qwen-image": "QwenImagePipeline"}


def loaded(name: str, dtype: torch.dtype = torch.float32) -> Any:
    with without_progress_bars():
        return getattr(diffusers, CLASSES[name]).from_pretrained(str(resolve_checkpoint(name)), dtype=dtype)


@pytest.fixture(scope="module", params=CLASSES)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def files(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRAs of all linear layers of the blocks; the second one in the format of other trainers."""
    folder = tmp_path_factory.mktemp(model)
    transformer = loaded(model).transformer
    found = []
    for idx in range(2):
        torch.manual_seed(idx)
        tensors: dict[str, torch.Tensor] = {}
        for name, layer in transformer.named_modules():
            if isinstance(layer, nn.Linear) and "blocks." in name:
                tensors[f"transformer.{name}.lora_A.weight"] = 0.1 * torch.randn(RANK, layer.in_features)
                tensors[f"transformer.{name}.lora_B.weight"] = 0.1 * torch.randn(layer.out_features, RANK)
        found.append(folder / f"{idx}.safetensors")
        save_file(tensors, found[-1])
    return found


def asked(*loras: tuple[Path, float], target: str | None = None) -> JobSpec:
    used = [
        {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "scale": scale, "target": target}
        for path, scale in loras
    ]
    return JobSpec(id="job", prompt="a fox", lora=used, lora_files=[str(path) for path, _ in loras])


def fused_by_diffusers(pipeline: Any, files: list[Path], scales: list[float]) -> dict[str, torch.Tensor]:
    names = [path.stem for path in files]
    for path in files:
        pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=path.stem)
    pipeline.set_adapters(names, scales)
    pipeline.fuse_lora(components=["transformer"], adapter_names=names)
    return {
        name.replace(".base_layer.", "."): value
        for name, value in pipeline.transformer.named_parameters()
        if ".lora_" not in name
    }


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_weights_equal_those_that_diffusers_fuses_and_the_base_model_comes_back(
    model: str, files: list[Path]
) -> None:
    pipeline = loaded(model)
    before = {name: value.clone() for name, value in original_weights(pipeline.transformer).items()}
    changed: list[nn.Module] = []
    merged = MergedLoras(pipeline, changed=changed.append)
    for chosen, scales in (([0], [1.0]), ([0, 1], [0.7, -0.3]), ([1], [1.0])):
        paths = [files[idx] for idx in chosen]
        merged.merge(asked(*zip(paths, scales, strict=True)))
        expected = fused_by_diffusers(loaded(model), paths, scales)
        assert not differing(original_weights(pipeline.transformer), expected)
    assert differing(original_weights(pipeline.transformer), before)
    merged.merge(JobSpec(id="job", prompt="a fox"))
    assert not differing(original_weights(pipeline.transformer), before)
    assert len(changed) in (4, 8)  # once for each model and change
    merged.merge(asked())
    assert len(changed) in (4, 8)


def test_a_model_that_leaves_its_device_takes_no_loras_with_it(model: str, files: list[Path]) -> None:
    pipeline = loaded(model)
    fd = Placement().new_copy()
    kept = Kept(pipeline, HostCopy(fd, torch.device("cpu")), torch.device("cpu"))
    os.close(fd)
    changed: list[nn.Module] = []
    merged, found = MergedLoras(pipeline, changed=changed.append), []
    for loras in ([], [(files[0], 1.0)], [(files[1], 1.0)], []):
        merged.merge(asked(*loras))
        found.append({name: x.clone() for name, x in original_weights(pipeline.transformer).items()})
        changed.clear()
        merged.take_out()
        assert bool(changed) == bool(loras), "what was kept of texts is not that of the model without them"
        kept.leave()
        kept.come_back()
        assert not differing(original_weights(pipeline.transformer), found[0])
    expected = fused_by_diffusers(loaded(model), files[1:], [1.0])
    assert not differing(found[2], expected)
    assert not differing(found[3], found[0])


@pytest.mark.parametrize("is_shared", [False, True])
def test_streamed_blocks_get_their_loras_after_each_read_with_the_same_bits(
    model: str, files: list[Path], is_shared: bool
) -> None:
    checkpoint = resolve_checkpoint(model)
    kind = getattr(diffusers, CLASSES[model])
    seen = []
    streamed = all_streamed(checkpoint, num_buffers=1)
    island = Island([Channel.pair(), Channel.pair()], 1) if is_shared else None
    streamed = replace(streamed, shared=streamed.streamed)
    for placement in (Placement(), streamed):
        placing = Placing(placement, device=torch.device("cpu"), island=island)
        pipeline = load_pipeline(kind, checkpoint, device="cpu", dtype=torch.float32, placing=placing)
        placing.finish()
        if placement.streamed:
            chain = stream_of(pipeline.transformer)
            own = [block for block in chain._blocks if block.own is not None]
            kept = [block.own.clone() for block in own]
            assert bool(own) == is_shared
        merged = MergedLoras(pipeline)
        found = [all_weights_read(pipeline.transformer)]
        for loras in ([(files[0], 1.0)], [(files[0], 0.7), (files[1], -0.3)], []):
            merged.merge(asked(*loras))
            found.append(all_weights_read(pipeline.transformer))
            found.append(all_weights_read(pipeline.transformer))  # read again, and changed again
        assert not placement.streamed or not merged._models["transformer"]._base, (
            "streamed ones need no copies"
        )
        assert all(map(torch.equal, found[0], found[-1]))
        assert not all(map(torch.equal, found[0], found[1]))
        seen.append([each for weights in found for each in weights])
    assert all(map(torch.equal, *seen))
    assert [block.is_read for block in own] == [False] * len(own), "and again from where they are"
    assert all(torch.equal(block.own, before) for block, before in zip(own, kept, strict=True))
    del pipeline, placing, merged, chain, own
    gc.collect()
    for end in itertools.chain(*island.boards) if island else ():
        end.close()


def test_a_file_that_changed_after_admission_is_refused_and_leaves_nothing_behind(
    model: str, files: list[Path], tmp_path: Path
) -> None:
    pipeline, path = loaded(model), tmp_path / "mine.safetensors"
    before = {name: value.clone() for name, value in original_weights(pipeline.transformer).items()}
    merged, contents = MergedLoras(pipeline), [file.read_bytes() for file in files]
    path.write_bytes(contents[0])
    job = asked((path, 1.0))
    for content, reason in (
        (contents[1], "has changed since the job was read"),
        (b"nothing", "has changed since the job was read"),
        (None, r"cannot be read \(No such file"),
    ):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ModelError, match=reason):
            merged.merge(job)
        merged.merge(JobSpec(id="job", prompt="a fox"))
        assert not differing(original_weights(pipeline.transformer), before)
        path.touch()
    path.write_bytes(contents[0])
    merged.merge(job)
    expected = fused_by_diffusers(loaded(model), [files[0]], [1.0])
    assert not differing(original_weights(pipeline.transformer), expected)


def test_fused_blocks_get_the_weights_of_their_layers(model: str, files: list[Path]) -> None:
    plain, fused = loaded(model, torch.bfloat16), loaded(model, torch.bfloat16)
    fuse(fused.transformer)
    assert not differing(original_weights(fused.transformer), dict(plain.transformer.named_parameters()))
    addresses = [weight.data_ptr() for weight in fused.transformer.parameters()]
    wanted = asked((files[0], 0.5))
    for pipeline in (plain, fused):
        MergedLoras(pipeline).merge(wanted)
    assert not differing(original_weights(fused.transformer), dict(plain.transformer.named_parameters()))
    assert addresses == [weight.data_ptr() for weight in fused.transformer.parameters()]


@pytest.mark.parametrize("model", ["tiny-wan-moe"], scope="module")
def test_a_target_is_one_expert(model: str, files: list[Path]) -> None:
    pipeline = loaded(model)
    before = {name: value.clone() for name, value in pipeline.transformer.named_parameters()}
    second = {name: value.clone() for name, value in pipeline.transformer_2.named_parameters()}
    MergedLoras(pipeline).merge(asked((files[0], 1.0), target="transformer_2"))
    assert not differing(dict(pipeline.transformer.named_parameters()), before)
    assert differing(dict(pipeline.transformer_2.named_parameters()), second)


def test_layers_that_the_model_lacks_are_named(model: str, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    layer = "transformer.single_transformer_blocks.3.attn.to_q"
    factors = {f"{layer}.lora_A.weight": torch.ones(RANK, 8), f"{layer}.lora_B.weight": torch.ones(8, RANK)}
    save_file(factors, path)
    with pytest.raises(ModelError, match=r"made for another model, which has .*single_transformer_blocks\.3"):
        MergedLoras(loaded(model)).merge(asked((path, 1.0)))


def test_factors_of_other_sizes_are_refused(model: str, files: list[Path], tmp_path: Path) -> None:
    name = next(name for name, each in loaded(model).transformer.named_modules() if name.endswith("to_q"))
    path = tmp_path / "narrow.safetensors"
    layer = f"transformer.{name}"
    save_file(
        {f"{layer}.lora_A.weight": torch.ones(RANK, 3), f"{layer}.lora_B.weight": torch.ones(3, RANK)}, path
    )
    with pytest.raises(ModelError, match="made for another model, with other sizes of"):
        MergedLoras(loaded(model)).merge(asked((path, 1.0)))


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_jobs_with_other_loras_take_turns_and_get_the_latents_of_the_pipelines_own_call(
    model: str, files: list[Path]
) -> None:
    is_video = model == "tiny-wan-moe"
    scales = {"guidance_scale": 1.0, "guidance_scale_2": 1.0} if is_video else {"true_cfg_scale": 1.0}
    fields: dict[str, Any] = {"width": 64, "height": 64, "steps": 3, "seed": 5, **scales}
    fields |= {"frames": 5} if is_video else {}
    with_lora = replace(asked((files[0], 0.6)), **fields)
    without = JobSpec(id="plain", prompt="a fox", **fields)
    adapter = load_adapter(resolve_checkpoint(model))
    jobs = [adapter.geometry.resolve(job) for job in (with_lora, without)]
    states = []
    for job in jobs:
        prompt = adapter.encode(job)
        states.append((prompt, *adapter.prepare(job, prompt)))
    for step in range(3):
        for idx, job in enumerate(jobs):
            prompt, condition, latents = states[idx]
            states[idx] = (prompt, condition, adapter.denoise(job, prompt, condition, latents, step=step))
    own = loaded(model)
    own.set_progress_bar_config(disable=True)
    call = {"prompt": "a fox", "width": 64, "height": 64, "num_inference_steps": 3, "output_type": "latent"}
    call |= {"num_frames": 5, **scales} if is_video else scales
    for state, loras in ((states[1], []), (states[0], [files[0]])):
        for path in loras:
            fuse_by_diffusers(own, path, 0.6, is_video=is_video)
        made = own(**call, generator=torch.Generator().manual_seed(5))
        wanted = made.frames if is_video else made.images
        assert torch.equal(state[2].tensors[SAMPLE].reshape(wanted.shape), wanted)


def small_sdxl() -> Any:
    """Two text encoders, whose loader is that of transformers."""
    torch.manual_seed(0)
    encoder = transformers.CLIPTextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        attention_head_dim=2,
        cross_attention_dim=64,
    )
    return diffusers.StableDiffusionXLPipeline(
        unet=unet,
        vae=diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4),
        text_encoder=transformers.CLIPTextModel(encoder),
        text_encoder_2=transformers.CLIPTextModelWithProjection(encoder),
        tokenizer=None,
        tokenizer_2=None,
        scheduler=diffusers.EulerDiscreteScheduler(),
    )


def kohya_lora(pipeline: Any, components: dict[str, str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for component, prefix in components.items():
        for name, layer in getattr(pipeline, component).named_modules():
            if not name.endswith(("to_q", "q_proj", "out_proj", "fc1", "conv1")):
                continue  # without one out_proj, diffusers leaves out all attentions of text encoders
            published = name if prefix == "unet" else f"text_model.{name.removeprefix('text_model.')}"
            kind = f"lora_{prefix}_{published.replace('.', '_')}"
            num_out, num_in, *kernel = layer.weight.shape
            tensors[f"{kind}.lora_down.weight"] = torch.randn(RANK, num_in, *kernel)
            tensors[f"{kind}.lora_up.weight"] = torch.randn(num_out, RANK, *(1 for _ in kernel))
            tensors[f"{kind}.alpha"] = torch.tensor(2.0)
    return tensors


def test_a_kohya_lora_changes_text_encoders_and_convolutions_as_diffusers_does(tmp_path: Path) -> None:
    path, components = tmp_path / "style.safetensors", {"unet": "unet", "text_encoder": "te1"}
    components["text_encoder_2"] = "te2"
    theirs, ours, base = small_sdxl(), small_sdxl(), small_sdxl()
    save_file(kohya_lora(ours, components), path)
    theirs.load_lora_weights(str(tmp_path), weight_name=path.name, adapter_name="style")
    theirs.set_adapters(["style"], 0.7)
    theirs.fuse_lora(components=list(components))
    merged = MergedLoras(ours)
    merged.merge(asked((path, 0.7)))
    for component in components:
        expected = {
            name.replace(".base_layer.", "."): value
            for name, value in getattr(theirs, component).named_parameters()
            if ".lora_" not in name
        }
        assert not differing(original_weights(getattr(ours, component)), expected)
        assert differing(expected, original_weights(getattr(base, component)))
    merged.merge(asked())
    for component in components:
        restored, wanted = (original_weights(getattr(each, component)) for each in (ours, base))
        assert not differing(restored, wanted)


@pytest.mark.parametrize("model", ["tiny-qwen-image"], scope="module")
def test_a_dora_is_refused(model: str, files: list[Path], tmp_path: Path) -> None:
    tensors = load_file(files[0])
    for name in [name for name in tensors if name.endswith(".lora_B.weight")]:
        length = torch.ones(tensors[name].shape[0])
        tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = length
    save_file(tensors, path := tmp_path / "dora.safetensors")
    with pytest.raises(ModelError, match="of the kind DoRA"):
        MergedLoras(loaded(model)).merge(asked((path, 1.0)))


def fuse_by_diffusers(pipeline: Any, path: Path, scale: float, *, is_video: bool) -> None:
    """A LoRA in all transformers of a pipeline."""
    for expert in ({}, {"load_into_transformer_2": True})[: 1 + is_video]:
        pipeline.load_lora_weights(
            str(path.parent), weight_name=path.name, adapter_name=f"own{len(expert)}", **expert
        )
    pipeline.set_adapters([f"own{idx}" for idx in range(1 + is_video)], scale)
    pipeline.fuse_lora(components=["transformer", "transformer_2"][: 1 + is_video])


# In 8 bits ----------------------------------------------------------------------------------------

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return str(request.param)


def in_fp8(pipeline: Any, device: str = "cpu") -> Any:
    for transformer in experts_of(pipeline):
        fuse(transformer, fp8_on=torch.device(device))
    return pipeline


def experts_of(pipeline: Any) -> list[Any]:
    return [x for x in (pipeline.transformer, getattr(pipeline, "transformer_2", None)) if x is not None]


def bits_of(pipeline: Any) -> list[dict[str, torch.Tensor]]:
    """Parameters, values and scales, as bytes."""
    return [
        {
            name: each.flatten().view(torch.uint8).to("cpu", copy=True)
            for name, each in transformer.state_dict().items()
        }
        for transformer in experts_of(pipeline)
    ]


@pytest.mark.parametrize("keeps_on_host", [False, True])
def test_in_fp8_a_lora_gives_what_merging_and_then_quantising_gives(
    model: str, files: list[Path], device: str, keeps_on_host: bool
) -> None:
    pipeline = in_fp8(loaded(model, torch.bfloat16), device)
    before, places = bits_of(pipeline), [x.data_ptr() for x in pipeline.transformer.state_dict().values()]
    merged = MergedLoras(pipeline)
    merged.keeps_on_host, merged.stored = keeps_on_host, StoredWeights(resolve_checkpoint(model))
    merged.merge(asked())
    assert not merged._models, "without LoRAs no weights are kept"
    for loras in ([(files[0], 1.0)], [(files[0], 0.7), (files[1], -0.3)]):
        merged.merge(asked(*loras))
        wanted = loaded(model, torch.bfloat16).to(device)
        MergedLoras(wanted).merge(asked(*loras))
        expected = bits_of(in_fp8(wanted, device))
        assert not any(map(differing, bits_of(pipeline), expected))
        assert all(map(differing, before, expected))
    merged.merge(asked())
    assert not any(map(differing, bits_of(pipeline), before))
    assert places == [x.data_ptr() for x in pipeline.transformer.state_dict().values()]


@pytest.mark.parametrize("is_shared", [False, True])
def test_in_fp8_streamed_blocks_get_the_bits_of_resident_ones_and_are_changed_once(
    model: str, files: list[Path], device: str, is_shared: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    if is_shared and device != "cpu":
        pytest.skip("shards on GPUs are in test_shards.py")
    layers = load_file(files[0])
    one_block = {name: x for name, x in layers.items() if "blocks.1." in name}
    bias = next(name for name in layers if "blocks.0." in name and name.endswith(".lora_B.weight"))
    one_block[bias.replace("lora_B.weight", "diff_b")] = torch.ones(len(layers[bias]))
    save_file(one_block, some := tmp_path / "some.safetensors")
    reads, read, factor = Counter[str](), StoredWeights.read, 1.0

    def noted_read(stored: Any, component: str, wanted: Any, **options: Any) -> Any:
        for name, weight in read(stored, component, wanted, **options):
            reads[f"{component}.{name}"] += 1
            yield name, factor * weight

    monkeypatch.setattr(StoredWeights, "read", noted_read)
    checkpoint, seen, place = resolve_checkpoint(model), [], str(torch.empty(0, device=device).device)
    streamed = all_streamed(checkpoint, num_buffers=1)
    streamed = replace(streamed, shared=streamed.streamed)
    island = Island([Channel.pair(), Channel.pair()], 1) if is_shared else None
    both = ((files[0], 0.7), (files[1], -0.3))
    for placement in (Placement(), streamed):
        adapter: Any = load_adapter(
            checkpoint, device=place, dtype="bfloat16", quantised=Quantised(layers=True),
            placement=placement, island=island if placement.streamed else None,
        )  # fmt: skip
        adapter.patches.stored, transformer = StoredWeights(checkpoint), adapter.patches.pipeline.transformer
        found = [all_weights_read(transformer)]
        for loras in ([(files[0], 1.0)], both, [(some, 1.0)], [], [(some, 1.0)], [(files[1], 1.0)], []):
            adapter.patches.merge(asked(*loras))
            reads.clear()
            found += [all_weights_read(transformer), all_weights_read(transformer)]
            assert not reads, "nothing is computed at a read"
        if placement.streamed:
            adapter.patches.merge(asked((files[1], 1.0)))
            assert not reads, "copies keep what they had"
            factor = 2.0
            for loras, error in (([(files[0], 1.0)], ModelError), ([], None), ([(files[0], 1.0)], None)):
                with pytest.raises(error) if error else contextlib.nullcontext():
                    adapter.patches.merge(asked(*loras))
                factor = 1.0
                wanted = found[0] if error or not loras else found[1]
                assert error or all(map(torch.equal, all_weights_read(transformer), wanted))
            chain: Any = stream_of(transformer)
            assert not set(adapter.patches._models["transformer"]._base) & {
                name for name, weight in original_weights(transformer).items() if chain.streams(name, weight)
            }
        assert not all(map(torch.equal, found[0], found[1]))
        assert all(map(torch.equal, found[0], found[-1]))
        seen.append([each.cpu() for weights in found for each in weights])
    assert len(seen[0]) == len(seen[1])
    assert all(map(torch.equal, *seen))
    del adapter, transformer, chain
    gc.collect()
    for end in itertools.chain(*island.boards) if island else ():
        end.close()


def test_in_fp8_every_weight_that_a_lora_can_change_is_found(model: str, files: list[Path]) -> None:
    plain, quantised = loaded(model, torch.bfloat16), in_fp8(loaded(model, torch.bfloat16))
    expected = dict(plain.transformer.named_parameters())
    found = original_weights(quantised.transformer)
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
        name: (x.shape, x.dtype) for name, x in expected.items()
    }
    quantised_names = {name for name, x in found.items() if isinstance(x, QuantisedRows)}
    names = {key.removeprefix("transformer.").rpartition(".lora_")[0] for key in load_file(files[0])}
    assert quantised_names == {f"{name}.weight" for name in names}


def test_in_fp8_files_that_changed_since_loading_are_refused(
    model: str, files: list[Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(resolve_checkpoint(model), tmp_path / model))
    pipeline = in_fp8(loaded(model, torch.bfloat16))
    before, merged = bits_of(pipeline), MergedLoras(pipeline)
    merged.stored = StoredWeights(copy)
    for path in copy.glob("transformer*/*.safetensors"):
        save_file({name: 2 * each for name, each in load_file(path).items()}, path)
    for _ in range(2):
        with pytest.raises(ModelError, match="the files of the model have changed since it was loaded"):
            merged.merge(asked((files[0], 1.0)))
    merged.merge(asked())
    assert not any(map(differing, bits_of(pipeline), before))


def test_weights_that_the_files_lack_now_are_named(model: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(resolve_checkpoint(model), tmp_path / model))
    wanted = {
        name: x for name, x in loaded(model).transformer.named_parameters() if name.endswith("to_k.weight")
    }
    gone = min(wanted)
    for path in (copy / "transformer").glob("*.safetensors"):
        save_file({name: x for name, x in load_file(path).items() if name != gone}, path)
    with pytest.raises(ModelError, match=f"lacks {gone}; the files of the model have changed"):
        list(StoredWeights(copy).read("transformer", wanted, device=torch.device("cpu")))


@pytest.mark.parametrize("way", ["random", "pickled"])
def test_weights_that_no_safetensors_file_has_are_those_of_the_loaded_model(
    model: str, way: str, tmp_path: Path
) -> None:
    checkpoint = resolve_checkpoint(model)
    if way == "random":
        stored = StoredWeights(checkpoint, has_random_weights=True)
        made = random_component(checkpoint, "transformer", device="cpu", dtype=torch.bfloat16)
    else:
        made = loaded(model, torch.bfloat16).transformer
        copy = Path(shutil.copytree(checkpoint, tmp_path / model))
        shutil.rmtree(copy / "transformer")
        made.save_pretrained(copy / "transformer", safe_serialization=False)
        stored = StoredWeights(copy)
    expected = {name: x.data for name, x in made.named_parameters() if name.endswith("to_k.weight")}
    found = dict(stored.read("transformer", expected, device=torch.device("cpu")))
    assert not differing(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(64, 256, 32), (100, 300, 4), (130, 70, 100)])
def test_the_kernel_adds_the_product_with_one_rounding(
    dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from gfgen.models.lora import low_rank

    rows, columns, rank = size
    noise = torch.Generator("cuda").manual_seed(0)
    shapes = ((rows, columns), (rows, rank), (rank, columns))
    base, up, down = (torch.randn(s, generator=noise, device="cuda").to(dtype) for s in shapes)
    made = torch.full_like(base, torch.nan)
    low_rank.add_product(base, up, down, 0.3, out=made)
    exact = base.double() + 0.3 * (up.double() @ down.double())
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype] * float(exact.abs().max())
    assert (made.double() - exact).abs().max() <= tolerance
    low_rank.add_product(base, up, down, 0.3, out=base)
    assert torch.equal(base, made)


@pytest.mark.parametrize("keeps_on_host", [False, True])
def test_a_lora_is_merged_and_taken_out_wherever_the_original_weights_are(keeps_on_host: bool) -> None:
    up, down = torch.randn(4, 2), torch.randn(2, 3)
    layer = torch.nn.Linear(3, 4)
    original = layer.weight.data.clone()
    model = merging._Model(layer, keeps_on_host=keeps_on_host)
    model.set({"weight": [(merging._Change("weight", (up, down), torch.matmul), 0.5)]})
    assert torch.equal(layer.weight.data, original + 0.5 * (up @ down))
    model.set({})
    assert torch.equal(layer.weight.data, original)


def test_copies_in_host_memory_share_blocks_and_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing can be pinned, and usual memory takes its place."""
    monkeypatch.setattr(merging, "_BLOCK_BYTES", 200)
    memory = merging._HostMemory()
    weights = [torch.randn(3, 5).bfloat16(), torch.randn(7), torch.randn(9, 9), torch.randn(2).half()]
    copies = [memory.copy_of(weight, is_pinned=True) for weight in weights]
    assert all(map(torch.equal, copies, weights))
    places = [copy.untyped_storage().data_ptr() for copy in copies]
    assert [place == places[0] for place in places] == [True, True, False, False]
    assert len({copy.data_ptr() for copy in copies}) == len(copies)
