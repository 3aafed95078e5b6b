"""`--precision fp8` with files in fp8: values and scales are the file's own, to the bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lora import asked
from test_single_file import published
from test_weight_layouts import (
    E4M3,
    FORMS,
    TEN,
    Model,
    Stored,
    Tensors,
    _model,
    small_wan,
    write_folder,
    write_published,
)
from torch import Tensor, nn

from gfgen.job.spec import JobSpec
from gfgen.models.families.adapter import SAMPLE
from gfgen.models.families.registry import load_adapter, resolve_checkpoint
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.kernels import Quantised
from gfgen.models.fast.linears import in_e4m3, in_int8
from gfgen.models.geometry import single_file
from gfgen.models.geometry.weights import component_files
from gfgen.models.loading.components import load_component, note_scales
from gfgen.models.loading.random_weights import StoredWeights
from gfgen.models.lora.reading import QuantisedRows, original_weights

torch.set_num_threads(1)


def qwen_for_int8() -> Any:
    """Its modulation has a scale for each 64 inputs."""
    return diffusers.QwenImageTransformer2DModel(
        in_channels=4, out_channels=1, num_layers=1, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip


MODELS = (
    _model(small_wan(), "WanPipeline", published, "model.diffusion_model."),
    _model(qwen_for_int8(), "QwenImagePipeline", str, "model.diffusion_model."),
)


def some_in_bf16(weights: Tensors) -> Stored:
    """Of the layers that are joined, one is not in fp8; one matrix has zeros and a scale of zero."""
    stored = FORMS["scales by row"](weights)
    for name in [name for name in stored.tensors if name.endswith(("to_k.weight", "add_v_proj.weight"))]:
        stored.tensors[name] = weights[name].bfloat16()
        stored.values[name] = stored.tensors[name].float()
        del stored.beside[name.removesuffix(".weight") + ".weight_scale"]
    name = next(name for name in stored.tensors if name.endswith("to_q.weight"))
    for values in (stored.tensors[name], stored.values[name]):
        values.zero_()
    stored.beside[name.removesuffix(".weight") + ".weight_scale"].zero_()
    return stored


FILES: Mapping[str, Callable[[Tensors], Stored]] = {
    "e4m3": FORMS["e4m3"],
    "scaled_fp8": FORMS["scaled_fp8"],
    "comfy_quant": FORMS["comfy_quant"],
    "scales by row": FORMS["scales by row"],
    "some in bf16": some_in_bf16,
    "bf16": FORMS["bf16"],
    "e5m2": FORMS["e5m2"],
}


def in_file(stored: Stored, name: str) -> tuple[Tensor, Tensor] | None:
    """A weight's values in e4m3 and the scale of each row, if the file has them."""
    values = stored.tensors[name]
    if values.dtype != E4M3:
        return None
    start = name.removesuffix(".weight")
    scales = [
        stored.beside[key]
        for key in (f"{start}.scale_weight", f"{start}.weight_scale")
        if key in stored.beside
    ]
    scale = scales[0].float().flatten() if scales else torch.ones(1)
    return values, scale.expand(len(values))


def check_bits(model: Any, stored: Stored) -> int:
    """Every weight in fp8 has the file's bits, and the others are upcast; how many are the file's."""
    found, number = original_weights(model), 0
    assert found.keys() == stored.values.keys()
    for name, value in stored.values.items():
        own, upcast = found[name], value.bfloat16()
        if isinstance(own, Tensor):
            assert torch.equal(own, upcast.to(own.dtype) if own.dtype != torch.float32 else value), name
            continue
        of_file = in_file(stored, name) if own.values.dtype == E4M3 else None
        values, scales = of_file or (in_e4m3 if own.values.dtype == E4M3 else in_int8)(upcast)
        assert torch.equal(own.values.view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(own.scales.flatten(), scales.flatten()), name
        number += of_file is not None
    return number


def loaded_in_fp8(checkpoint: Path) -> Any:
    """As `load_pipeline` and the adapters do."""
    model = load_component(checkpoint, "transformer", dtype=torch.bfloat16)
    note_scales(model, component_files(checkpoint)["transformer"])
    fuse(model, fp8_on=torch.device("cpu"))
    return model


@pytest.mark.parametrize("layout", ["folder", "shards", "published", "published shards"])
@pytest.mark.parametrize("form", FILES)
def test_ten_files_of_each_layout_keep_their_bits(form: str, layout: str, tmp_path: Path) -> None:
    for seed in TEN:
        model: Model = MODELS[seed % 2]
        stored, num_shards = FILES[form](model.weights(seed)), 3 if "shards" in layout else 1
        checkpoint = model.base(tmp_path / str(seed))
        if "published" in layout:
            file = write_published(tmp_path / f"{seed}.safetensors", model, stored, num_shards=num_shards)
            checkpoint = single_file.assemble(file, checkpoint, tmp_path / "links")
        else:
            write_folder(checkpoint / "transformer", stored, num_shards=num_shards)
        number = check_bits(loaded_in_fp8(checkpoint), stored)
        assert (number > 5) is (form not in ("bf16", "e5m2"))


# Whole models -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny-wan-moe", "tiny-qwen-image"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built-in model whose transformers are in fp8 with scales by row."""
    folder = tmp_path_factory.mktemp("model") / str(request.param)
    shutil.copytree(resolve_checkpoint(request.param), folder)
    for path in folder.glob("transformer*/*.safetensors"):
        stored = FORMS["scales by row"](load_file(path))
        save_file(stored.tensors | stored.beside, path)
    return folder


def bits(adapter: Any) -> dict[str, Tensor]:
    pipeline = adapter.patches.pipeline
    found = {}
    for name in ("transformer", "transformer_2"):
        for key, x in original_weights(getattr(pipeline, name, None) or nn.Module()).items():
            parts = (x.values, x.scales) if isinstance(x, QuantisedRows) else (x,)
            found |= {
                f"{name}.{key}.{idx}": part.flatten().view(torch.uint8).clone()
                for idx, part in enumerate(parts)
            }
    return found


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def test_a_models_steps_compute_with_the_files_bits_and_loras_leave_them_behind(
    checkpoint: Path, tmp_path: Path
) -> None:
    adapter: Any = load_adapter(checkpoint, dtype="bfloat16", quantised=Quantised(layers=True))
    adapter.patches.stored = StoredWeights(checkpoint)
    model, tensors = adapter.patches.pipeline.transformer, dict[str, Tensor]()
    stored = {}
    for path in (checkpoint / "transformer").glob("*.safetensors"):
        stored |= load_file(path)
    rows = {name: x for name, x in original_weights(model).items() if isinstance(x, QuantisedRows)}
    rows = {name: x for name, x in rows.items() if x.values.dtype == E4M3}
    assert len(rows) > 10
    for name, x in rows.items():
        assert torch.equal(x.values.view(torch.uint8), stored[name].view(torch.uint8))
        assert torch.equal(x.scales, stored[name.replace(".weight", ".weight_scale")].flatten())
        layer = f"transformer.{name.removesuffix('.weight')}"
        tensors[f"{layer}.lora_A.weight"] = torch.randn(4, x.shape[1])
        tensors[f"{layer}.lora_B.weight"] = torch.randn(x.shape[0], 4)
    save_file(tensors, file := tmp_path / "lora.safetensors")
    before = bits(adapter)
    spec = JobSpec(id="x", prompt="a fox", seed=5, steps=2, width=64, height=64)
    plain = latents(adapter, spec)
    changed = latents(adapter, replace(spec, lora=asked((file, 1.0)).lora, lora_files=[str(file)]))
    assert not equal(bits(adapter), before)
    again = latents(adapter, spec)
    assert equal(bits(adapter), before)
    assert torch.equal(plain, again)
    assert not torch.equal(plain, changed)


@torch.no_grad()
def latents(adapter: Any, spec: JobSpec) -> Tensor:
    frames = {"frames": 5} if adapter.geometry.family.startswith("wan") else {}
    spec = adapter.geometry.resolve(replace(spec, **frames))
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    for step in range(2):
        latents = adapter.denoise(spec, prompt, condition, latents, step=step)
    found: Tensor = latents.tensors[SAMPLE]
    return found
