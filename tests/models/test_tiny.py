"""The built-in models: small, the same each time, complete or absent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from diffusers import QwenImagePipeline
from transformers import Qwen2Tokenizer

from gfgen.errors import ModelError
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.model import load_geometry
from gfgen.models.geometry.qwen import TYPICAL_TEXT_TOKENS
from gfgen.models.loading import random_weights as tiny

MIB = 2**20


def test_making_one_again_gives_the_same_bytes(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    (again,) = tiny.make_tiny(tmp_path, ["tiny-wan"])
    assert _digest(again) == _digest(tiny_models["tiny-wan"])
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-wan"]


def test_a_failed_making_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path, directory: Path) -> None:
        (directory / "half").write_text("written")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny, "write_tiny", fail)
    with pytest.raises(ModelError, match="No space left"):
        tiny.make_tiny(tmp_path, ["tiny-wan"])
    assert not list(tmp_path.iterdir())


def test_making_what_another_process_has_just_made_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_while_another_is_first(_: Path, directory: Path) -> None:
        (directory / "ours").write_text("complete")
        (tmp_path / "tiny-wan").mkdir()
        (tmp_path / "tiny-wan" / "theirs").write_text("complete")

    monkeypatch.setattr(tiny, "write_tiny", make_while_another_is_first)
    (path,) = tiny.make_tiny(tmp_path, ["tiny-wan"])
    assert (path / "theirs").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny-wan"]


def test_they_are_small_and_of_the_four_families(tiny_models: Mapping[str, Path]) -> None:
    geometries = {name: load_geometry(path) for name, path in tiny_models.items()}
    assert {name: geometry.family for name, geometry in geometries.items()} == {
        "tiny-wan": "wan-ti2v",
        "tiny-wan-moe": "wan-moe-t2v",
        "tiny-wan-moe-i2v": "wan-moe-i2v",
        "tiny-qwen-image": "qwen-image",
    }
    for path in tiny_models.values():
        assert sum(file.stat().st_size for file in path.glob("*/*.safetensors")) < 16 * MIB


def test_templates_prefix_has_the_34_tokens_that_the_pipeline_cuts_off(
    tiny_models: Mapping[str, Path],
) -> None:
    pipeline = QwenImagePipeline(
        scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=None
    )
    tokenizer = Qwen2Tokenizer.from_pretrained(str(tiny_models["tiny-qwen-image"] / "tokenizer"))
    prefix, _ = pipeline.prompt_template_encode.split("{}")
    alone = tokenizer(prefix).input_ids
    assert len(alone) == pipeline.prompt_template_encode_start_idx == 34
    for prompt in ("a red fox", "x", " ", "", "Ob \u00e9t\u00e9 \u6d77!"):
        assert tokenizer(pipeline.prompt_template_encode.format(prompt)).input_ids[:34] == alone


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-wan-moe-i2v", "tiny-qwen-image"])
def test_estimated_flops_are_those_that_torch_counts(
    tiny_models: Mapping[str, Path], name: str, picture: Path
) -> None:
    """Within 5%: the tiny models' small layers weigh more than the real ones'."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    geometry, adapter = load_geometry(tiny_models[name]), load_adapter(tiny_models[name])
    prompt, negative_prompt = (word * (TYPICAL_TEXT_TOKENS - 5) for word in (" the", " a"))
    asked = JobSpec(
        id="j",
        prompt=prompt,
        negative_prompt=negative_prompt,  # another one: what is made of a text is made once
        seed=1,
        width=192,
        height=128,
        image=None if geometry.kind == "image" else str(picture),
    )
    spec = geometry.resolve(asked if geometry.kind == "image" else _short(asked))
    with sdpa_kernel(SDPBackend.MATH):
        text = adapter.encode(spec)
        with FlopCounterMode(display=False) as prepared:
            condition, latents = adapter.prepare(spec, text)
        with FlopCounterMode(display=False) as denoised:
            latents = adapter.denoise(spec, text, condition, latents, step=0)
        with FlopCounterMode(display=False) as decoded:
            adapter.decode(spec, latents)
    counted = {Stage.PREPARE: prepared, Stage.DENOISE: denoised, Stage.DECODE: decoded}
    for stage, counter in counted.items():
        assert geometry.flops(spec, stage) == pytest.approx(counter.get_total_flops(), rel=0.05), stage


def _short(spec: JobSpec) -> JobSpec:
    from dataclasses import replace

    return replace(spec, frames=5)


def _digest(directory: Path) -> dict[str, str]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
