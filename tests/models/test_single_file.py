"""Checkpoints in one file, in the layout in which they are published."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gfgen.errors import ModelError
from gfgen.job.images import lora_sha256
from gfgen.job.spec import JobSpec
from gfgen.models.families import registry
from gfgen.models.families.precision import Precision
from gfgen.models.families.registry import check_name, find_configs, load_adapter, resolve_checkpoint
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.weights import count_parts, footprint
from gfgen.models.loading.random_weights import StoredWeights

PUBLISHED = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    (".to_out.0.", ".o."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    ("proj_out", "head.head"),
    ("norm2", "norm_other"),
    ("norm3", "norm2"),
    ("norm_other", "norm3"),
)
"""Names of diffusers' Wan transformer, and those of the original checkpoints."""


def published(name: str) -> str:
    for own, original in PUBLISHED:
        name = name.replace(own, original)
    table = "head.modulation" if name == "scale_shift_table" else "modulation"
    return name.replace("scale_shift_table", table)


@pytest.fixture(scope="module")
def base() -> Path:
    return resolve_checkpoint("tiny-wan")


@pytest.fixture(scope="module")
def weights(base: Path) -> dict[str, torch.Tensor]:
    return load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def file(weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "wan.safetensors"
    save_file({f"model.diffusion_model.{published(name)}": each for name, each in weights.items()}, path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Links go to a folder of the test; tiny models stay where they are."""
    monkeypatch.setattr(registry, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(registry, "tiny_dir", lambda: base.parent)
    return tmp_path


def test_a_transformer_in_the_published_layout_loads_as_by_diffusers(
    file: Path, base: Path, weights: dict[str, torch.Tensor]
) -> None:
    checkpoint = resolve_checkpoint(f"tiny-wan:{file}")
    adapter: Any = load_adapter(checkpoint)
    ours = adapter._pipeline.transformer.state_dict()
    theirs = diffusers.WanTransformer3DModel.from_single_file(
        str(file), config=str(base), subfolder="transformer", local_files_only=True
    ).state_dict()
    assert ours.keys() == theirs.keys() == weights.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in weights)
    assert all(torch.equal(ours[name], weights[name]) for name in weights)
    alone = dict(StoredWeights(checkpoint).read("transformer", weights, device=torch.device("cpu")))
    assert all(torch.equal(alone[name], weights[name]) for name in weights)
    assert count_parts(checkpoint) == count_parts(base)
    assert footprint(checkpoint) == footprint(base)


@pytest.fixture
def gguf_file(weights: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """Matrices in 8 bits, all else in fp32."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "wan.gguf"
    writer = gguf.GGUFWriter(path, "wan")
    for name, each in weights.items():
        value, dtype = each.float().numpy(), gguf.GGMLQuantizationType.F32
        if each.ndim == 2 and each.shape[1] % 32 == 0 and "blocks." in name:
            dtype = gguf.GGMLQuantizationType.Q8_0
            value = gguf.quants.quantize(value, dtype)
        writer.add_tensor(published(name), value, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("kind", "has_lora"), [("file", False), ("gguf_file", False), ("gguf_file", True)])
def test_frames_are_those_of_diffusers(
    kind: str,
    has_lora: bool,
    device: str,
    base: Path,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    file: Path = request.getfixturevalue(kind)
    adapter: Any = load_adapter(resolve_checkpoint(f"tiny-wan:{file}"), device=device)
    asked = JobSpec(id="x", prompt="a red fox", seed=5, steps=3, width=64, height=64, frames=5)
    if has_lora:
        tensors = {}
        for name, each in weights.items():
            if each.ndim == 2 and "blocks." in name:
                layer = f"transformer.{name.removesuffix('.weight')}"
                tensors[f"{layer}.lora_A.weight"] = torch.full((2, each.shape[1]), 0.1)
                tensors[f"{layer}.lora_B.weight"] = torch.full((each.shape[0], 2), 0.1)
        save_file(tensors, tmp_path / "lora.safetensors")
        sha256 = lora_sha256(tmp_path / "lora.safetensors")
        files: Any = {
            "lora": [{"sha256": sha256, "scale": 1.0}],
            "lora_files": [str(tmp_path / "lora.safetensors")],
        }
        asked = replace(asked, **files)
    spec = adapter.geometry.resolve(asked)
    with torch.no_grad():
        prompt = adapter.encode(spec)
        condition, latents = adapter.prepare(spec, prompt)
        for step in range(3):
            latents = adapter.denoise(spec, prompt, condition, latents, step=step)
        frames = adapter.decode(spec, latents).tensors["frames"].cpu().numpy()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options = {"quantization_config": diffusers.GGUFQuantizationConfig(compute_dtype=dtype)}
    transformer = diffusers.WanTransformer3DModel.from_single_file(
        str(file),
        config=str(base),
        subfolder="transformer",
        local_files_only=True,
        dtype=dtype,
        **(options if kind == "gguf_file" else {}),
    )
    vae = diffusers.AutoencoderKLWan.from_pretrained(base, subfolder="vae")
    pipeline = diffusers.WanPipeline.from_pretrained(
        base, transformer=transformer, vae=vae, dtype=dtype, local_files_only=True
    ).to(device)
    if has_lora:
        pipeline.load_lora_weights(str(tmp_path), weight_name="lora.safetensors")
    theirs = pipeline(
        prompt="a red fox",
        width=64,
        height=64,
        num_frames=5,
        num_inference_steps=3,
        guidance_scale=spec.guidance_scale,
        negative_prompt=spec.negative_prompt,
        generator=torch.Generator("cpu").manual_seed(5),
    ).frames[0]
    far = np.abs(frames.astype(int) - (theirs * 255).round().astype(int))
    assert far.max() == 0 if device == "cpu" else far.mean() < 2


def test_a_file_in_a_folder_in_diffusers_format_takes_the_rest_from_there(
    file: Path, base: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(base, tmp_path / "model", ignore=shutil.ignore_patterns("diffusion_*"))
    shutil.copytree(base / "vae", folder / "vae", dirs_exist_ok=True)
    shutil.copy(file, folder)
    checkpoint = resolve_checkpoint(str(folder / file.name))
    assert read_checkpoint(checkpoint, with_weights=True).pipeline_class == "WanPipeline"
    assert resolve_checkpoint(str(folder / file.name)) == checkpoint


def test_a_folder_of_links_that_cannot_be_named_is_one_line(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(ModelError, match=r"its folder of links .*: Permission denied"):
        resolve_checkpoint(f"tiny-wan:{file}")
    assert not list((cache / "single-files").iterdir())


def test_a_file_whose_precision_is_named_has_it(file: Path) -> None:
    name = f"tiny-wan:{file}"
    checkpoint = resolve_checkpoint(name)
    assert Precision((f"{name}=fp8",)).of(checkpoint)["precision"] == "fp8"
    assert Precision(("tiny-wan=fp8",)).of(checkpoint)["precision"] == "auto"


def written(path: Path, content: bytes | dict[str, torch.Tensor]) -> Path:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        save_file(content, path)
    return path


REFUSED = {
    "no checkpoint": (b"hello", r"its header is broken"),
    "a LoRA": ({"blocks.0.lora_A.weight": torch.ones(1)}, r"is a LoRA; give it with --lora"),
    "a VAE": ({"first_stage_model.decoder": torch.ones(1)}, r"no weights of a transformer or UNet"),
    "int8": (
        {"blocks.0": torch.ones(1, dtype=torch.int8)},
        r"weights of type I8 are not supported; bf16, fp",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_files_are_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    content, reason = REFUSED[kind]
    path = written(tmp_path / "model.safetensors", content)
    with pytest.raises(ModelError, match=reason) as caught:
        resolve_checkpoint(f"tiny-wan:{path}")
    assert "\n" not in str(caught.value)


def test_a_file_without_a_config_and_a_missing_file_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model_index\.json in its folder; name the model .* MODEL:wan"):
        resolve_checkpoint(str(file))
    with pytest.raises(ModelError, match=r"there is no such file"):
        resolve_checkpoint(f"tiny-wan:{tmp_path / 'gone.safetensors'}")
    with pytest.raises(ModelError, match=r"has two experts; 'high' or 'low' in the name of the file"):
        resolve_checkpoint(f"tiny-wan-moe:{file}")


def test_files_of_experts_take_the_place_that_their_names_say(tmp_path: Path) -> None:
    base = resolve_checkpoint("tiny-wan-moe")
    made = {}
    for seed, noise in enumerate(("high", "low")):
        torch.manual_seed(seed)
        shapes = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
        made[noise] = {name: torch.randn_like(each) for name, each in shapes.items()}
        tensors = {published(name): each for name, each in made[noise].items()}
        save_file(tensors, tmp_path / f"wan2.2_{noise}_noise.safetensors")
    high, low = (tmp_path / f"wan2.2_{noise}_noise.safetensors" for noise in ("high", "low"))
    for files in (f"{high}:{low}", f"{low}:{high}"):
        pipeline = load_adapter(resolve_checkpoint(f"tiny-wan-moe:{files}"))._pipeline  # type: ignore[attr-defined]
        for noise, model in (("high", pipeline.transformer), ("low", pipeline.transformer_2)):
            found = model.state_dict()
            assert all(torch.equal(found[name], each) for name, each in made[noise].items())
    (tmp_path / "low_noise_model").mkdir()
    low = low.rename(tmp_path / "low_noise_model" / "wan.safetensors")
    alone = load_adapter(resolve_checkpoint(f"tiny-wan-moe:{low}"))._pipeline  # type: ignore[attr-defined]
    (own,) = (base / "transformer").glob("*.safetensors")
    found = alone.transformer_2.state_dict()
    assert all(torch.equal(found[name], each) for name, each in made["low"].items())
    found = alone.transformer.state_dict()
    assert all(torch.equal(found[name], each) for name, each in load_file(own).items())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("models/sd.ckpt", "is a pickle, which can run code"),
        ("tiny-wan:flux.pth", "is a pickle, which can run code"),
        ("./engines/unet.engine", "is compiled for another runtime"),
        ("sdxl/unet.plan", "is compiled for another runtime"),
        ("tiny-wan:model.onnx", "is compiled for another runtime"),
    ],
)
def test_files_that_are_no_weights_say_what_they_are(name: str, reason: str) -> None:
    for resolve in (resolve_checkpoint, check_name, find_configs):
        with pytest.raises(ModelError, match=reason):
            resolve(name)


def test_gguf_needs_its_package_and_the_right_content(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ModelError, match=r"is no GGUF file"):
        resolve_checkpoint(f"tiny-wan:{written(tmp_path / 'a.gguf', b'hello')}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'gfgen\[gguf\]'"):
        resolve_checkpoint(f"tiny-wan:{written(tmp_path / 'b.gguf', b'GGUF and more')}")


def test_loading_names_a_file_that_lacks_weights(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    some = {published(name): each for name, each in weights.items() if "blocks.1." not in name}
    path = written(tmp_path / "half.safetensors", some)
    with pytest.raises(ModelError, match=r"half\.safetensors: lacks weights that .*config\.json asks"):
        load_adapter(resolve_checkpoint(f"tiny-wan:{path}"))


def test_weights_of_other_sizes_are_one_line(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    other = {published(name): each.repeat(2, *(1,) * (each.ndim - 1)) for name, each in weights.items()}
    path = written(tmp_path / "large.safetensors", other)
    with pytest.raises(ModelError, match=r"large\.safetensors: cannot be read as Wan") as caught:
        load_adapter(resolve_checkpoint(f"tiny-wan:{path}"))
    assert "\n" not in str(caught.value)


def test_a_qwen_image_in_gguf_predicts_as_in_diffusers(tmp_path: Path, monkeypatch: Any) -> None:
    gguf = pytest.importorskip("gguf")
    base = resolve_checkpoint("tiny-qwen-image")
    path, kinds = tmp_path / "qwen.gguf", gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "qwen_image")
    for name, each in load_file(base / "transformer" / "diffusion_pytorch_model.safetensors").items():
        kind = kinds.Q8_0 if each.ndim == 2 and each.shape[1] % 32 == 0 else kinds.F32
        writer.add_tensor(name, gguf.quants.quantize(each.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    adapter: Any = load_adapter(resolve_checkpoint(f"tiny-qwen-image:{path}"))
    spec = adapter.geometry.resolve(JobSpec(id="x", prompt="a red fox", seed=5, steps=3, width=64, height=64))
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    for step in range(3):
        latents = adapter.denoise(spec, prompt, condition, latents, step=step)
    frames = adapter.decode(spec, latents).tensors["frames"].numpy()
    transformer = diffusers.QwenImageTransformer2DModel.from_single_file(
        str(path),
        config=str(base),
        subfolder="transformer",
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        dtype=torch.float32,
        local_files_only=True,
    )
    pipeline = diffusers.QwenImagePipeline.from_pretrained(
        base, transformer=transformer, local_files_only=True
    )
    theirs = pipeline(
        prompt="a red fox",
        width=64,
        height=64,
        num_inference_steps=3,
        true_cfg_scale=spec.true_cfg_scale,
        negative_prompt=spec.negative_prompt,
        generator=torch.Generator("cpu").manual_seed(5),
        output_type="np",
    ).images
    assert np.array_equal(frames, (theirs * 255).round().astype(np.uint8))
