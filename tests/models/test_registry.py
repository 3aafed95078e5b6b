"""Names to directories; broken directories; the built-in models."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from gfgen.errors import ModelError
from gfgen.models.families import registry
from gfgen.models.families.registry import (
    DEFAULT_MODEL,
    MODELS,
    find_configs,
    load_adapter,
    resolve_checkpoint,
)
from gfgen.models.geometry.checkpoint import model_name
from gfgen.models.geometry.model import load_geometry
from gfgen.models.geometry.weights import ComponentFiles
from gfgen.models.loading import components
from gfgen.system.lifeline import PACKAGE_ROOT


@pytest.fixture
def broken_copy(tiny_models: Mapping[str, Path], tmp_path: Path) -> Path:
    """A copy of a working model, for a test to break."""
    return Path(shutil.copytree(tiny_models["tiny-wan"], tmp_path / "model"))


def test_every_known_model_has_a_line() -> None:
    names = list(MODELS)
    assert len(set(names)) == len(names) == 9
    assert all(summary and "\n" not in summary for summary in MODELS.values())


@pytest.mark.parametrize(
    ("name", "nearest"), [("tiny-wann", "tiny-wan"), ("Qwen-Image", "qwen-image"), ("wan2.2-5b", "wan2.2")]
)
def test_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=f"did you mean '{nearest}"):
        resolve_checkpoint(name)


@pytest.mark.parametrize("name", ["./tiny-wann", "tiny-wann/", "/nowhere/tiny-wann", "~/tiny-wann", "a/b/c"])
def test_of_a_path_it_is_said_that_nothing_is_there(name: str) -> None:
    for resolve in (resolve_checkpoint, find_configs):
        with pytest.raises(ModelError, match=f"^model {name}: there is no such directory; a directory, "):
            resolve(name)


def test_a_file_in_place_of_a_directory_is_told(tmp_path: Path) -> None:
    for name, reason in {"model.zip": "is a file; a directory, ", "model.ckpt": "is a pickle, "}.items():
        (tmp_path / name).touch()
        with pytest.raises(ModelError, match=rf"{name}:? {reason}"):
            resolve_checkpoint(str(tmp_path / name))


def test_no_name_is_not_the_current_folder() -> None:
    for resolve in (resolve_checkpoint, find_configs):
        with pytest.raises(ModelError, match=r"^a model's name is empty; accepted: a directory, "):
            resolve("")


def test_a_hub_id_with_a_slip_suggests_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_snapshot", lambda hub_id: None)
    for name in ("Wan-AI/Wan2.2-TI2V-5B", "Wan-AI/Wan2.2-TI2V-5B-Difusers"):
        with pytest.raises(ModelError, match=r"did you mean 'Wan-AI/Wan2.2-TI2V-5B-Diffusers'\? run 'hf"):
            find_configs(name)


def test_the_default_model_comes_with_gfgen_and_is_named_first() -> None:
    assert next(iter(MODELS)) == DEFAULT_MODEL
    for resolve in (resolve_checkpoint, find_configs):
        assert resolve(DEFAULT_MODEL) == Path(registry.__file__).parents[1] / "weights" / DEFAULT_MODEL


def test_a_folder_of_the_built_in_models_name_does_not_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shapes").mkdir()
    monkeypatch.chdir(tmp_path)
    for resolve in (registry.resolve_checkpoint, registry.find_configs):
        assert resolve("shapes") == registry.WEIGHTS / "shapes"
    assert registry.resolve_checkpoint("./shapes") == tmp_path / "shapes"


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("name", ["no-such-org/no-such-model", "qwen-image"])
def test_missing_download_says_what_to_do(name: str, tmp_path: Path) -> None:
    """In a child process: the hub's library reads its environment when it is imported."""
    code = (
        "from gfgen.errors import ModelError\n"
        "from gfgen.models.families.registry import resolve_checkpoint\n"
        f"try: resolve_checkpoint({name!r})\n"
        "except ModelError as error: print(error)"
    )
    env = {
        "PATH": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(PACKAGE_ROOT),
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    (line,) = done.stdout.splitlines()
    assert f"hf download {registry.HUB_IDS.get(name, name)}" in line
    assert "give a directory" in line


@pytest.fixture
def hub_cache(
    tiny_models: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[str]]:
    """A model's snapshot in the hub's cache, links into blobs; and whom the hub, which is out of reach, was
    asked for."""
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / ("0123456789" * 4)
    for file in filter(Path.is_file, tiny_models["tiny-wan"].rglob("*")):
        link = snapshot / file.relative_to(tiny_models["tiny-wan"])
        blob = repository / "blobs" / hashlib.sha256(str(link).encode()).hexdigest()
        for path in (link, blob):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    asked: list[str] = []

    def refuse(_: object, repo_id: str, **options: object) -> None:
        asked.append(repo_id)
        raise ConnectionError("out of reach")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    return snapshot, asked


def test_what_is_whole_in_the_hubs_cache_asks_nobody(hub_cache: tuple[Path, list[str]]) -> None:
    snapshot, asked = hub_cache
    assert resolve_checkpoint("org/tiny") == snapshot
    assert asked == []
    assert model_name(snapshot) == "org/tiny"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("vae/diffusion_pytorch_model.safetensors", "vae: no weight files"),
        ("tokenizer/tokenizer.json", "tokenizer: no vocabulary"),
        ("scheduler/scheduler_config.json", "scheduler_config.json: no such file"),
        ("model_index.json", "not in the hub's cache"),
    ],
)
def test_what_is_not_whole_in_the_hubs_cache_is_asked_of_the_hub(
    hub_cache: tuple[Path, list[str]], path: str, message: str
) -> None:
    snapshot, asked = hub_cache
    blob = (snapshot / path).resolve()
    (snapshot / path).unlink()
    blob.rename(f"{blob}.incomplete")
    with pytest.raises(ModelError, match=message) as refusal:
        resolve_checkpoint("org/tiny")
    assert asked == ["org/tiny"]
    assert "failed (out of reach); run 'hf download org/tiny'" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_in_the_hubs_cache_has_configs_to_plan_with(hub_cache: tuple[Path, list[str]]) -> None:
    snapshot, asked = hub_cache
    assert find_configs("org/tiny") == snapshot
    with pytest.raises(ModelError, match=r"org/other: .* run 'hf download org/other', or give its directory"):
        find_configs("org/other")
    assert asked == []


def test_what_cannot_be_a_hub_id_is_one_line(hub_cache: tuple[Path, list[str]]) -> None:
    for find in (resolve_checkpoint, find_configs):
        with pytest.raises(ModelError, match=r"model models/wan--tuned: .*or give (a|its) directory"):
            find("models/wan--tuned")


def test_what_is_whole_in_the_hubs_cache_and_not_supported_is_told_as_that(
    hub_cache: tuple[Path, list[str]],
) -> None:
    snapshot, _ = hub_cache
    _change(snapshot / "transformer" / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelError, match=r"cache, but not to be used \(.*: is quantised with gptq"):
        resolve_checkpoint("org/tiny")


def test_a_repository_in_another_format_is_refused_before_it_is_downloaded(
    hub_cache: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(_: object, repo_id: str, **options: object) -> object:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename="high_noise_model/config.json")])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", describe)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("downloads"))
    with pytest.raises(ModelError, match=r"not in diffusers' format; is there a org/wan-Diffusers\?"):
        resolve_checkpoint("org/wan")


def test_a_folder_of_the_hubs_cache_says_what_to_give(hub_cache: tuple[Path, list[str]]) -> None:
    snapshot, _ = hub_cache
    with pytest.raises(ModelError, match=rf"is a folder of the hub's cache; give its hub id, or {snapshot}"):
        load_geometry(snapshot.parents[1])


def test_of_several_snapshots_the_newest_is_named(hub_cache: tuple[Path, list[str]]) -> None:
    snapshot, _ = hub_cache
    older = snapshot.with_name("f" * 40)
    older.mkdir()
    os.utime(older, (0, 0))
    with pytest.raises(ModelError, match=f"or {snapshot}"):
        load_geometry(snapshot.parents[1])


def test_a_snapshot_is_called_by_its_hub_id_and_others_by_their_folder() -> None:
    cache = Path("hub/models--Wan-AI--Wan2.2-TI2V-5B-Diffusers/snapshots/b8fff7315c768468")
    assert model_name(cache) == "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    assert model_name(Path("models/wan")) == "wan"


def test_missing_directory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_geometry(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("model_index.json", "model_index.json: no such file"),
        ("transformer/config.json", "the component 'transformer' needs it"),
        ("scheduler/scheduler_config.json", "the component 'scheduler' needs it"),
        ("transformer/diffusion_pytorch_model.safetensors", "no weight files"),
        ("vae", "folder 'vae' is missing"),
        ("tokenizer/tokenizer.json", "tokenizer: no vocabulary"),
    ],
)
def test_missing_part_is_named(broken_copy: Path, path: str, message: str) -> None:
    part = broken_copy / path
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    with pytest.raises(ModelError, match=message) as caught:
        load_geometry(broken_copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff", '{"a": 1}'])
def test_corrupt_model_index_is_named(broken_copy: Path, content: str) -> None:
    (broken_copy / "model_index.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match="model_index"):
        load_geometry(broken_copy)


def test_a_pipeline_that_diffusers_lacks_is_refused(broken_copy: Path) -> None:
    _change(broken_copy / "model_index.json", _class_name="FluxNinePipeline")
    with pytest.raises(ModelError, match="'FluxNinePipeline' is not in diffusers"):
        load_geometry(broken_copy)


def test_missing_shard_is_named(broken_copy: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    name = "diffusion_pytorch_model.safetensors.index.json"
    (broken_copy / "transformer" / name).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="00001-of-00002"):
        load_geometry(broken_copy)


@pytest.mark.parametrize("defaults", [{"stepss": 3}, {"steps": "many"}, {"width": True}])
def test_wrong_default_is_named(broken_copy: Path, defaults: dict[str, object]) -> None:
    (broken_copy / "gfgen.json").write_text(json.dumps({"defaults": defaults}))
    with pytest.raises(ModelError, match=next(iter(defaults))):
        load_geometry(broken_copy)


def test_damaged_weights_are_a_model_error(broken_copy: Path) -> None:
    (broken_copy / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(ModelError, match="its header is broken"):
        load_adapter(broken_copy)


def test_half_a_vocabulary_is_refused(broken_copy: Path) -> None:
    (broken_copy / "tokenizer" / "tokenizer.json").rename(broken_copy / "tokenizer" / "vocab.json")
    with pytest.raises(ModelError, match=r"merges\.txt: missing; vocab\.json"):
        load_geometry(broken_copy)


def test_what_the_pipeline_does_not_take_is_not_loaded(
    broken_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(broken_copy / "vae", broken_copy / "safety_checker")
    entry = ["diffusers", "AutoencoderKLWan"]
    _change(broken_copy / "model_index.json", safety_checker=entry, stages=[], sizes=[480, 720])
    loaded = []
    load = components._load_model

    def note(files: ComponentFiles, kind: object, **options: object) -> object:
        loaded.append(files.folder.name)
        return load(files, kind, **options)

    monkeypatch.setattr(components, "_load_model", note)
    load_adapter(broken_copy)
    assert sorted(loaded) == ["text_encoder", "transformer", "vae"]


@pytest.mark.parametrize(
    ("component", "file", "name"),
    [
        ("vae", "diffusion_pytorch_model.safetensors", "decoder.conv_in.bias"),
        ("text_encoder", "model.safetensors", "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"),
    ],
)
def test_weights_that_the_files_lack_are_not_made_up(
    broken_copy: Path, component: str, file: str, name: str
) -> None:
    path = broken_copy / component / file
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=f"{component}: its files lack '{name}', which its config"):
        load_adapter(broken_copy)


def test_weights_that_the_model_lacks_are_named(broken_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = broken_copy / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    some = {name: x.clone() for name, x in tensors.items() if name.startswith("blocks.0.attn1.to_q")}
    more = {name.replace("blocks.0", "blocks.9"): x for name, x in some.items()}
    save_file(tensors | more, path, {"format": "pt"})
    load_adapter(broken_copy)
    (text,) = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert (
        "transformer: its files have 'blocks.9.attn1.to_q.bias', 'blocks.9.attn1.to_q.weight', without effect"
        in text
    )


def test_a_text_encoder_needs_no_head(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_models["tiny-qwen-image"], tmp_path / "model"))
    path = model / "text_encoder/model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, {"format": "pt"})
    load_adapter(model)


@pytest.mark.parametrize("max_shard_size", ["10GB", "100KB"])
def test_weights_in_bin_files_are_the_same_weights(
    tiny_models: Mapping[str, Path], tmp_path: Path, max_shard_size: str
) -> None:
    model = Path(shutil.copytree(tiny_models["tiny-wan"], tmp_path / "model"))
    folder = model / "transformer"
    expected = load_adapter(model)._experts[0]
    shutil.rmtree(folder)
    expected.save_pretrained(folder, safe_serialization=False, max_shard_size=max_shard_size)
    assert not list(folder.glob("*.safetensors"))
    found = load_adapter(model)._experts[0].state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())


def test_unknown_dtype_is_refused(tiny_models: Mapping[str, Path]) -> None:
    with pytest.raises(ModelError, match="int7"):
        load_adapter(tiny_models["tiny-wan"], dtype="int7")


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "vae_dtype", "found"),
    [
        ("tiny-wan", "auto", "float32"),  # as the model cards load it
        ("tiny-wan", "bfloat16", "bfloat16"),
        ("tiny-qwen-image", "auto", "bfloat16"),
        ("tiny-qwen-image", "float32", "float32"),
    ],
)
def test_a_vae_may_have_a_dtype_of_its_own(tiny_models, name, vae_dtype, found):
    adapter = load_adapter(tiny_models[name], dtype="bfloat16", vae_dtype=vae_dtype)
    assert str(adapter._vae.dtype) == f"torch.{found}"
