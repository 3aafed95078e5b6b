"""Pipelines with random weights, from config files alone."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, QwenImagePipeline, WanPipeline
from small_checkpoints import save_checkpoint

from gfgen.errors import ModelError
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import find_configs, load_adapter
from gfgen.models.geometry.model import CONFIGS, SHIPPED
from gfgen.models.loading.components import load_pipeline
from gfgen.models.loading.random_weights import random_pipeline

COMPONENTS = {WanPipeline: ("transformer", "vae", "text_encoder"), QwenImagePipeline: ("transformer", "vae")}


def configs_of(model: Path, folder: Path, **transformer: object) -> Path:
    """A copy of a model's directory without its weights, its transformer's config changed."""
    copy = folder / model.name
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors*"))
    path = copy / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | transformer))
    return copy


@pytest.mark.parametrize(
    ("kind", "name", "dtypes"),
    [
        (WanPipeline, "tiny-wan", {"vae": "float32"}),
        (WanPipeline, "tiny-wan", {"vae": "bfloat16"}),
        (QwenImagePipeline, "tiny-qwen-image", {}),
    ],
)
def test_parameters_and_buffers_have_the_dtypes_of_a_loaded_pipeline(
    tiny_models: Mapping[str, Path], kind, name, dtypes
):
    options = {"device": "cpu", "dtype": torch.bfloat16, "dtypes": dtypes}
    loaded = load_pipeline(kind, tiny_models[name], **options)
    made = random_pipeline(kind, tiny_models[name], **options)
    for part in COMPONENTS[kind]:
        for entries in ("named_parameters", "named_buffers"):
            expected = {
                key: (value.dtype, value.shape) for key, value in getattr(getattr(loaded, part), entries)()
            }
            found = {
                key: (value.dtype, value.shape) for key, value in getattr(getattr(made, part), entries)()
            }
            assert found == expected


def test_buffers_are_those_of_a_loaded_pipeline(tiny_models: Mapping[str, Path]):
    options = {"device": "cpu", "dtype": torch.float32}
    loaded = load_pipeline(WanPipeline, tiny_models["tiny-wan"], **options).transformer
    made = random_pipeline(WanPipeline, tiny_models["tiny-wan"], **options).transformer
    for name, value in loaded.named_buffers():
        assert torch.equal(dict(made.named_buffers())[name], value), name


def test_weights_are_the_same_each_time_and_differ_from_each_other(tiny_models: Mapping[str, Path]):
    torch.manual_seed(1)
    first = random_pipeline(
        WanPipeline, tiny_models["tiny-wan"], device="cpu", dtype=torch.float32
    ).transformer
    torch.manual_seed(2)
    again = random_pipeline(
        WanPipeline, tiny_models["tiny-wan"], device="cpu", dtype=torch.float32
    ).transformer
    for name, value in first.named_parameters():
        assert torch.equal(again.get_parameter(name), value), name
    assert not torch.equal(first.blocks[0].attn1.to_q.weight, first.blocks[1].attn1.to_q.weight)
    assert not torch.equal(first.blocks[0].attn1.to_q.weight, first.blocks[0].attn1.to_k.weight)


@pytest.mark.parametrize(
    ("name", "num_layers", "dtype"),
    [("tiny-wan", 30, "float32"), ("tiny-wan", 30, "bfloat16"), ("tiny-qwen-image", 60, "bfloat16")],
)
def test_activations_stay_finite_in_models_as_deep_as_the_full_size_ones(
    tiny_models: Mapping[str, Path], tmp_path: Path, name, num_layers, dtype
):
    folder = configs_of(tiny_models[name], tmp_path, num_layers=num_layers)
    adapter = load_adapter(folder, dtype=dtype, has_random_weights=True)
    spec = adapter.geometry.resolve(JobSpec(id="deep", prompt="a fox", width=64, height=64, steps=3, seed=1))
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    for step in range(3):
        latents = adapter.denoise(spec, prompt, condition, latents, step=step)
        assert latents.tensors["sample"].abs().max() < 30
    assert adapter.decode(spec, latents).tensors["frames"].float().std() > 1


def test_a_pipeline_may_have_two_tokenizers(tmp_path: Path):
    save_checkpoint("FluxPipeline", tmp_path / "flux")
    made = random_pipeline(FluxPipeline, tmp_path / "flux", device="cpu", dtype=torch.float32)

    assert made.tokenizer("fox").input_ids
    assert made.tokenizer_2("fox").input_ids


def test_short_names_stand_for_the_configs_that_come_with_gfgen():
    for name in SHIPPED:
        assert find_configs(name) == CONFIGS / name


def test_a_model_whose_configs_do_not_come_with_gfgen_is_refused():
    with pytest.raises(ModelError, match="its config files are not here"):
        find_configs("some/model")


def test_configs_that_no_class_takes_are_refused_by_name(tiny_models: Mapping[str, Path], tmp_path: Path):
    folder = configs_of(tiny_models["tiny-wan"], tmp_path, num_layers="many")
    with pytest.raises(ModelError, match="cannot be made as WanPipeline"):
        load_adapter(folder, has_random_weights=True)


@pytest.mark.parametrize("name", ["tiny-wan-moe", "tiny-qwen-image"])
def test_an_adapter_that_is_dropped_leaves_nothing_of_its_model(name: str, tiny_models: Mapping[str, Path]):
    """Ranks that hold other models next need its memory."""
    adapter: Any = load_adapter(tiny_models[name], dtype="bfloat16", has_random_weights=True)
    pipeline = adapter._pipeline
    kept = [weakref.ref(part) for part in (pipeline.transformer, pipeline.vae, pipeline.text_encoder)]
    del adapter, pipeline
    gc.collect()
    assert [part() for part in kept] == [None, None, None]
