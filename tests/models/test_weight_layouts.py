"""The layouts in which people have weights: each loads to the values of a short dequantisation here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_single_file import published
from torch import Tensor
from transformers import T5Config, T5EncoderModel

from gfgen.errors import ModelError
from gfgen.models.geometry import single_file
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.weight_files import check_weights, weight_files
from gfgen.models.geometry.weights import component_files, count_parts, device_bytes, footprint
from gfgen.models.loading.components import load_component
from gfgen.models.loading.random_weights import StoredWeights
from gfgen.models.lora.accounting import by_headers

torch.set_num_threads(1)
E4M3 = torch.float8_e4m3fn
Tensors = Mapping[str, Tensor]


def small_flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def small_qwen() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=4, out_channels=1, num_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def small_wan() -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32, freq_dim=32,
        ffn_dim=32, num_layers=1,
    )  # fmt: skip


@dataclass
class Model:
    """A checkpoint that has only a transformer, and random weights that are not in it yet."""

    kind: Any
    pipeline: str
    config: Mapping[str, Any]
    shapes: Mapping[str, torch.Size]
    published: Callable[[str], str] = str
    prefix: str = ""

    def weights(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}

    def base(self, folder: Path) -> Path:
        (folder / "transformer").mkdir(parents=True)
        index = {"_class_name": self.pipeline, "transformer": ["diffusers", self.kind.__name__]}
        (folder / "model_index.json").write_text(json.dumps(index))
        (folder / "transformer" / "config.json").write_text(json.dumps(dict(self.config)))
        return folder


def _model(made: Any, pipeline: str, *of_files: Any) -> Model:
    shapes = {name: x.shape for name, x in made.state_dict().items()}
    return Model(type(made), pipeline, made.config, shapes, *of_files)


MODELS = (
    _model(small_wan(), "WanPipeline", published, "model.diffusion_model."),
    _model(small_qwen(), "QwenImagePipeline", str, "model.diffusion_model."),
    _model(small_flux(), "FluxPipeline"),
)


@dataclass
class Stored:
    """Tensors as files have them, by diffusers' names, and what they stand for, in fp32."""

    tensors: dict[str, Tensor]
    values: dict[str, Tensor]
    beside: dict[str, Tensor] = field(default_factory=dict)


def stored_as(dtype: torch.dtype, weights: Tensors) -> Stored:
    tensors = {name: x.to(dtype) for name, x in weights.items()}
    return Stored(tensors, {name: x.float() for name, x in tensors.items()})


def stored_scaled(weights: Tensors, *, end: str, is_by_row: bool) -> Stored:
    """Matrices in fp8 with a scale, everything else in bf16."""
    stored = stored_as(torch.bfloat16, weights)
    for name, x in weights.items():
        if x.ndim == 2 and name.endswith(".weight"):
            largest = x.abs().amax(dim=1, keepdim=True) if is_by_row else x.abs().amax()
            scale = (largest / 448).float()
            stored.tensors[name] = (x / scale).to(E4M3)
            stored.values[name] = stored.tensors[name].float() * scale
            stored.beside[name.removesuffix(".weight") + end] = scale
    return stored


def comfy_older(weights: Tensors) -> Stored:
    stored = stored_scaled(weights, end=".scale_weight", is_by_row=False)
    stored.beside |= {name.replace("scale_weight", "scale_input"): x + 1 for name, x in stored.beside.items()}
    stored.beside["scaled_fp8"] = torch.zeros(2, dtype=E4M3)
    return stored


def comfy_newer(weights: Tensors) -> Stored:
    stored = stored_scaled(weights, end=".weight_scale", is_by_row=False)
    said = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    stored.beside |= {
        name.replace("weight_scale", "comfy_quant"): said.clone() for name in list(stored.beside)
    }
    return stored


FORMS: Mapping[str, Callable[[Tensors], Stored]] = {
    "bf16": lambda weights: stored_as(torch.bfloat16, weights),
    "fp16": lambda weights: stored_as(torch.float16, weights),
    "e4m3": lambda weights: stored_as(E4M3, weights),
    "e5m2": lambda weights: stored_as(torch.float8_e5m2, weights),
    "scaled_fp8": comfy_older,
    "comfy_quant": comfy_newer,
    "scales by row": lambda weights: stored_scaled(weights, end=".weight_scale", is_by_row=True),
}


def write_folder(folder: Path, stored: Stored, *, num_shards: int = 1, variant: str = "") -> None:
    """The layout of `save_pretrained`; a scale may be in another shard than its weight."""
    stem, tensors = "diffusion_pytorch_model", stored.tensors | stored.beside
    dot = f".{variant}" if variant else ""
    if num_shards == 1:
        save_file(tensors, folder / f"{stem}{dot}.safetensors")
        return
    weight_map = {}
    for number, part in enumerate(split(tensors, num_shards), start=1):
        name = f"{stem}{dot}-{number:05}-of-{num_shards:05}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = folder / f"{stem}.safetensors.index{dot}.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def split(tensors: Tensors, num_shards: int) -> list[dict[str, Tensor]]:
    return [{name: tensors[name] for name in sorted(tensors)[idx::num_shards]} for idx in range(num_shards)]


def write_published(file: Path, model: Model, stored: Stored, *, num_shards: int = 1) -> Path:
    """The file to name as a model: with original names, in shards perhaps."""
    tensors = {
        f"{model.prefix}{_published(name, model)}": x for name, x in (stored.tensors | stored.beside).items()
    }
    if num_shards == 1:
        save_file(tensors, file)
        return file
    for number, part in enumerate(split(tensors, num_shards), start=1):
        path = file.with_name(f"{file.stem}-{number:05}-of-{num_shards:05}.safetensors")
        save_file(part, path)
    return path


def _published(name: str, model: Model) -> str:
    """Published names of weights are those of modules with another end."""
    start, dot, end = name.rpartition(".")
    return model.published(f"{start}.weight").removesuffix("weight") + end if dot else model.published(name)


def check_equal(checkpoint: Path, stored: Stored, dtype: torch.dtype) -> Any:
    """The loaded component, whose every tensor is the fp32 value rounded once to its dtype."""
    model = load_component(checkpoint, "transformer", dtype=dtype)
    found = model.state_dict()
    assert found.keys() == stored.values.keys()
    kept = set(model._keep_in_fp32_modules or ())
    for name, value in stored.values.items():
        assert found[name].dtype == (torch.float32 if kept & set(name.split(".")) else dtype), name
        assert torch.equal(found[name], value.to(found[name].dtype)), name
    alone = dict(StoredWeights(checkpoint).read("transformer", found, device=torch.device("cpu")))
    assert all(torch.equal(alone[name], found[name]) for name in found)
    return model


def check_memory(checkpoint: Path, model: Model) -> None:
    number = sum(shape.numel() for shape in model.shapes.values())
    assert {name: part.total for name, part in count_parts(checkpoint).items()} == {"transformer": number}
    assert footprint(checkpoint).on(1) == 4 * number
    assert device_bytes(checkpoint) == {"transformer": 2 * number}


TEN = range(10)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_ten_folders_of_each_form_load_to_their_values(form: str, num_shards: int, tmp_path: Path) -> None:
    for seed in TEN:
        model, dtype = MODELS[seed % 3], (torch.float32, torch.bfloat16)[seed % 2]
        stored = FORMS[form](model.weights(seed))
        checkpoint = model.base(tmp_path / str(seed))
        variant = form if form in ("bf16", "fp16") else ""
        write_folder(checkpoint / "transformer", stored, num_shards=num_shards, variant=variant)
        read_checkpoint(checkpoint, with_weights=True)
        check_memory(checkpoint, model)
        ours = check_equal(checkpoint, stored, dtype)
        if not stored.beside:  # diffusers leaves out scales
            options = {"variant": variant} if variant else {}
            folder = str(checkpoint / "transformer")
            theirs = model.kind.from_pretrained(folder, dtype=dtype, **options).state_dict()
            assert all(torch.equal(x, theirs[name]) for name, x in ours.state_dict().items())


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_ten_published_files_of_each_form_load_to_their_values(
    form: str, num_shards: int, tmp_path: Path
) -> None:
    for seed in TEN:
        model, dtype = MODELS[seed % 3], (torch.float32, torch.bfloat16)[seed % 2]
        stored = FORMS[form](model.weights(seed))
        base = model.base(tmp_path / str(seed))
        file = write_published(tmp_path / f"{seed}.safetensors", model, stored, num_shards=num_shards)
        checkpoint = single_file.assemble(file, base, tmp_path / "links")
        read_checkpoint(checkpoint, with_weights=True)
        check_memory(checkpoint, model)
        ours = check_equal(checkpoint, stored, dtype)
        if (
            not stored.beside and num_shards == 1 and model.kind is not MODELS[1].kind
        ):  # which leaves the prefix
            theirs = model.kind.from_single_file(
                str(file), config=str(base), subfolder="transformer", local_files_only=True
            ).state_dict()
            assert all(torch.equal(x, theirs[name].to(x.dtype)) for name, x in ours.state_dict().items())


def test_an_index_and_any_shard_name_the_same_model(tmp_path: Path) -> None:
    model = MODELS[0]
    base = model.base(tmp_path / "base")
    write_folder(tmp_path, stored_as(torch.bfloat16, model.weights(0)), num_shards=2)
    names = sorted(path.name for path in tmp_path.glob("diffusion*"))
    assert len(names) == 3
    assert all(single_file.is_single_file(name) for name in names)
    made = {single_file.assemble(tmp_path / name, base, tmp_path / "links") for name in names}
    files = {component_files(each)["transformer"].files for each in made}
    assert {tuple(path.resolve().name for path in each) for each in files} == {tuple(names[:2])}
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelError, match=r"diffusion_pytorch_model-00002-of-00002\.safetensors.* missing"):
        single_file.assemble(tmp_path / names[0], base, tmp_path / "links")


def test_plain_files_come_before_variants_and_bf16_before_fp16(tmp_path: Path) -> None:
    folder = MODELS[0].base(tmp_path / "model") / "transformer"
    for variant in ("fp16", "bf16", ""):
        write_folder(folder, stored_as(torch.float16, {"w": torch.ones(1)}), variant=variant)
        (file,) = weight_files(folder, "diffusers")
        assert file.name == f"diffusion_pytorch_model{f'.{variant}' if variant else ''}.safetensors"


@pytest.mark.parametrize("form", ["fp16", "scales by row"])
def test_text_encoders_load_from_the_same_forms(form: str, tmp_path: Path) -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=40)
    T5EncoderModel(config).save_pretrained(tmp_path / "text_encoder")
    index = {"_class_name": "FluxPipeline", "text_encoder": ["transformers", "T5EncoderModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    file = tmp_path / "text_encoder" / "model.safetensors"
    shapes = T5EncoderModel(config).state_dict()
    stored = FORMS[form]({name: torch.randn(x.shape) for name, x in shapes.items() if "embed" not in name})
    file.unlink()
    name = "model.fp16.safetensors" if form == "fp16" else "model.safetensors"
    save_file(stored.tensors | stored.beside, file.with_name(name), metadata={"format": "pt"})
    found = load_component(tmp_path, "text_encoder", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(found[name], x.bfloat16()) for name, x in stored.values.items())


# GGUF -------------------------------------------------------------------------------------------


def write_gguf(
    path: Path, model: Model, weights: Tensors, form: str, *, is_wide: bool = True
) -> dict[str, Any]:
    """Matrices of blocks in few bits, other tensors in bf16 if `is_wide` is not set. Returns the values."""
    gguf = pytest.importorskip("gguf")
    kinds, values = gguf.GGMLQuantizationType, {}
    writer = gguf.GGUFWriter(path, "any")
    for name, each in weights.items():
        is_matrix = each.ndim == 2 and each.shape[1] % 32 == 0 and "blocks." in name
        kind = kinds[form] if is_matrix else kinds.F32 if is_wide else kinds.BF16
        content = gguf.quants.quantize(each.numpy(), kind)
        writer.add_tensor(model.published(name), content, raw_dtype=kind)
        values[name] = torch.from_numpy(np.array(gguf.quants.dequantize(content, kind))).view(each.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def plain(model: Any) -> dict[str, Tensor]:
    """The weights of a model, quantised ones as the numbers that they stand for."""
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    return {name: dequantize_gguf_tensor(x.data if not hasattr(x, "quant_type") else x).float()
            for name, x in model.named_parameters()}  # fmt: skip


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q5_1"])
def test_ten_gguf_files_load_to_their_values(form: str, tmp_path: Path) -> None:
    for seed in TEN:
        model = MODELS[seed % 2]
        base, file = model.base(tmp_path / str(seed)), tmp_path / f"{seed}.gguf"
        values = write_gguf(file, model, model.weights(seed), form, is_wide=seed < 5)
        checkpoint = single_file.assemble(file, base, tmp_path / "links")
        ours = load_component(checkpoint, "transformer", dtype=torch.float32)
        found = plain(ours)
        assert found.keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(found[name], value, rtol=2e-3, atol=2e-3)  # diffusers': in fp16
        assert ours.is_quantized
        assert footprint(checkpoint).on(1) == file.stat().st_size
        if seed < 5:
            theirs = model.kind.from_single_file(
                str(file),
                config=str(base),
                subfolder="transformer",
                quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
                dtype=torch.float32,
                local_files_only=True,
            )
            assert all(torch.equal(x, found[name]) for name, x in plain(theirs).items())


def test_a_truncated_gguf_file_is_one_line(tmp_path: Path) -> None:
    model = MODELS[1]
    base, whole = model.base(tmp_path / "base"), tmp_path / "whole.gguf"
    write_gguf(whole, model, model.weights(0), "Q8_0")
    content = whole.read_bytes()
    for number, share in enumerate(np.linspace(0.001, 0.999, 10)):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ModelError, match=rf"{number}\.gguf: is truncated or damaged") as caught:
            single_file.assemble(file, base, tmp_path / "links")
        assert "\n" not in str(caught.value)


# What is refused ----------------------------------------------------------------------------------

ONE = torch.ones(4, 4)
SCALED = {"a.weight": ONE.to(E4M3), "a.weight_scale": torch.tensor(0.5)}
DAMAGED: Mapping[str, tuple[Mapping[str, Tensor], str]] = {
    "nf4": ({"a.weight": ONE.byte(), "a.weight.absmax": torch.ones(1)}, r"quantised with bitsandbytes"),
    "int8 of bitsandbytes": ({"a.weight": ONE.to(torch.int8), "a.SCB": torch.ones(4)}, r"bitsandbytes"),
    "nunchaku": ({"a.qweight": ONE.to(torch.int8), "a.wscales": ONE}, r"for nunchaku \(SVDQuant\)"),
    "whole numbers": ({"a.weight": ONE.to(torch.int8)}, r"a.weight has the type I8; bf16, fp16, fp32, fp8"),
    "AWQ": ({"a.qweight": ONE.int(), "a.qzeros": ONE.int()}, r"weights in 4 bits \(AWQ or GPTQ\)"),
    "nvfp4": ({"a.weight": ONE.byte(), "a.weight_scale_2": torch.ones(())}, r"weights in nvfp4"),
    "blocks": ({"a.weight": ONE.to(E4M3), "a.weight_scale_inv": ONE}, r"a scale for each block"),
    "int8": ({"a.weight": ONE.to(torch.int8), "a.weight_scale": torch.ones(())}, r"the type I8"),
    "mxfp8": (
        {**SCALED, "a.weight_scale": torch.ones(4, 1, dtype=torch.uint8)},
        r"a\.weight_scale has .* U8",
    ),
    "shape": ({**SCALED, "a.weight_scale": torch.ones(3)}, r"the shape \[3\]; one number, or one for each"),
    "NaN": ({**SCALED, "a.weight_scale": torch.tensor(torch.nan)}, r"a\.weight_scale is not a number"),
    "infinity": ({**SCALED, "a.weight_scale": torch.tensor([1, 2, 3, -torch.inf]).bfloat16()}, r"not a numb"),
    "NaN in fp16": ({**SCALED, "a.weight_scale": torch.tensor([torch.nan]).half()}, r"is not a number"),
    "a scale left out": ({**SCALED, "b.weight": ONE.to(E4M3)}, r"b\.weight is in fp8 and lacks its scale"),
    "only a marker": ({"b.weight": ONE.to(E4M3), "scaled_fp8": torch.zeros(2).to(E4M3)}, r"lacks its scale"),
    "only input's": (
        {"b.weight": ONE.to(E4M3), "b.input_scale": torch.ones(())},
        r"b\.weight .* lacks its sc",
    ),
    "no weight": ({"a.weight_scale": torch.ones(())}, r"has a\.weight_scale, but no a\.weight"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_cannot_be_read_is_one_line_in_folders_and_files(kind: str, tmp_path: Path) -> None:
    tensors, reason = DAMAGED[kind]
    base = MODELS[0].base(tmp_path / "model")
    file = tmp_path / "any.safetensors"
    save_file(dict(tensors), file)
    save_file(dict(tensors), base / "transformer" / "diffusion_pytorch_model.safetensors")
    for read in (
        lambda: read_checkpoint(base, with_weights=True),
        lambda: single_file.assemble(file, base, tmp_path / "links"),
    ):
        with pytest.raises(ModelError, match=reason) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert ".safetensors" in str(caught.value)


def test_a_scale_of_too_few_bytes_is_one_line(tmp_path: Path) -> None:
    save_file(SCALED, file := tmp_path / "a.safetensors")
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F16"'))
    with pytest.raises(ModelError, match=r"a\.weight_scale is not whole"):
        check_weights([file])


def test_a_name_that_promises_scales_is_believed(tmp_path: Path) -> None:
    file = tmp_path / "wan_fp8_e4m3fn_scaled.safetensors"
    save_file({"a.weight": ONE.to(E4M3)}, file)
    with pytest.raises(ModelError, match=r"a\.weight is in fp8 and lacks its scale"):
        check_weights([file])


def test_a_truncated_variant_or_shard_is_one_line(tmp_path: Path) -> None:
    model = MODELS[0]
    for form, num_shards in (("fp16", 1), ("fp16", 3), ("scales by row", 1), ("scaled_fp8", 3)):
        checkpoint = model.base(tmp_path / f"{form}{num_shards}")
        stored, variant = FORMS[form](model.weights(0)), "fp16" if form == "fp16" else ""
        write_folder(checkpoint / "transformer", stored, num_shards=num_shards, variant=variant)
        file = weight_files(checkpoint / "transformer", "diffusers")[-1]
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(ModelError, match=r"it is truncated or damaged") as caught:
            read_checkpoint(checkpoint, with_weights=True)
        assert "\n" not in str(caught.value)


# Quantised by diffusers' own config ------------------------------------------------------------------


def quantised(tmp_path: Path, method: str) -> Path:
    model = MODELS[1]
    config = {**model.config, "quantization_config": {"quant_method": method}}
    changed = Model(model.kind, model.pipeline, config, model.shapes)
    checkpoint = changed.base(tmp_path / method)
    save_file(
        {"a.weight": ONE.byte(), "a.weight.absmax": torch.ones(1)},
        checkpoint / "transformer" / "diffusion_pytorch_model.safetensors",
    )
    return checkpoint


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_a_quantised_component_needs_the_package_that_it_names(
    package: str, tmp_path: Path, monkeypatch: Any
) -> None:
    checkpoint = quantised(tmp_path, package)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=rf"transformer/config\.json: is quantised.*pip install {package}"):
        read_checkpoint(checkpoint, with_weights=True)
    read_checkpoint(checkpoint, with_weights=False)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: SimpleNamespace() if name == package else None
    )
    read_checkpoint(checkpoint, with_weights=True)
    (file,) = component_files(checkpoint)["transformer"].files
    assert footprint(checkpoint).on(2) == 2 * file.stat().st_size
    lora = tmp_path / "lora.safetensors"
    save_file({"transformer.a.lora_A.weight": torch.ones(1, 1)}, lora)
    fit = by_headers(checkpoint, lora)
    assert fit is not None
    assert f"cannot be merged into a {package} model" in (fit.error or "")


def test_weights_of_torchao_load_as_by_diffusers(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    model = MODELS[1]
    checkpoint = model.base(tmp_path / "model")
    folder = checkpoint / "transformer"
    write_folder(folder, stored_as(torch.float32, model.weights(0)))
    config = diffusers.TorchAoConfig(Int8WeightOnlyConfig())
    made = model.kind.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    made.save_pretrained(folder)
    read_checkpoint(checkpoint, with_weights=True)
    ours = load_component(checkpoint, "transformer", dtype=torch.bfloat16)
    theirs = dict(model.kind.from_pretrained(folder, dtype=torch.bfloat16).named_parameters())
    for name, x in ours.named_parameters():
        both = [each.dequantize() if hasattr(each, "qdata") else each for each in (x, theirs[name])]
        assert torch.equal(*both), name


def test_other_quantisers_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"quantised with nunchaku_lite, which is not read; bitsandbytes and"
    ):
        read_checkpoint(quantised(tmp_path, "nunchaku_lite"), with_weights=True)
