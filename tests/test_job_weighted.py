"""Prompts with weights: what they mean, and which jobs may have them."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from builders import geometry_of
from hypothesis import given
from hypothesis import strategies as st

from gfgen.errors import JobError
from gfgen.job.fields import parse_fields
from gfgen.job.images import NoImages
from gfgen.job.reader import JobSource, to_mapping
from gfgen.job.spec import JobSpec, spec_hash
from gfgen.job.weighted import weighted
from gfgen.models.geometry.model import shipped_geometry
from gfgen.models.geometry.pipeline import PipelineGeometry


def geometry(name: str, *encoders: str) -> PipelineGeometry:
    found = {
        f"text_encoder{f'_{idx}' if idx > 1 else ''}": ["t", kind] for idx, kind in enumerate(encoders, 1)
    }
    part = "transformer" if "3" in name or "Flux" in name else "unet"
    return geometry_of(name, index=found, **{part: {"patch_size": 2}})


SD = geometry("StableDiffusionPipeline", "CLIPTextModel")
SDXL = geometry("StableDiffusionXLPipeline", "CLIPTextModel", "CLIPTextModelWithProjection")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a red fox", [[("a red fox", 1)]]),
        ("a (red) fox", [[("a", 1), ("red", 1.1), ("fox", 1)]]),
        ("a ((red)) fox", [[("a", 1), ("red", 1.21), ("fox", 1)]]),
        ("a [red] fox", [[("a", 1), ("red", 0.909091), ("fox", 1)]]),
        ("a (red:1.3) fox", [[("a", 1), ("red", 1.3), ("fox", 1)]]),
        ("(red : .5)(blue:2)", [[("red", 0.5), ("blue", 2)]]),
        ("(a (red:1.5) fox)", [[("a", 1.1), ("red", 1.65), ("fox", 1.1)]]),
        ("([a] fox:2)", [[("a", 1.818182), ("fox", 2)]]),
        ("[(a fox)]", [[("a fox", 1)]]),
        (r"a fox \(animal\), \[x\]", [[("a fox (animal), [x]", 1)]]),
        (r"(a \(b:1.2\):1.4)", [[("a (b:1.2)", 1.4)]]),
        ("a fox :) at 5:30", [[("a fox :) at 5:30", 1)]]),
        ("a) fox]", [[("a) fox]", 1)]]),
        ("a (red fox", [[("a", 1), ("red fox", 1.1)]]),
        ("a [red (fox", [[("a", 1), ("red", 0.909091), ("fox", 1)]]),
        ("a fox BREAK a night", [[("a fox", 1)], [("a night", 1)]]),
        ("BREAK (a fox BREAK\na night:1.2) BREAK", [[("a fox", 1.2)], [("a night", 1.2)]]),
        ("BREAKFAST, SAND AND", None),
        ("BREAKFAST, SAND", [[("BREAKFAST, SAND", 1)]]),
        ("a|b, {c|d}", [[("a|b, {c|d}", 1)]]),
        (" () ", [[("", 1)]]),
        ("", [[("", 1)]]),
    ],
)
def test_a_text_means_parts_of_weighted_texts(text: str, parts: Any) -> None:
    if parts is None:
        with pytest.raises(ValueError, match=r"AND \(composable prompts\)"):
            weighted(text)
    else:
        assert weighted(text) == parts


@given(st.text(alphabet="ab ()[]\\:1.,|-\n"))
def test_any_text_has_a_meaning_or_one_reason_why_not(text: str) -> None:
    parts = None
    with contextlib.suppress(ValueError):
        parts = weighted(text)
    if parts is None:
        with pytest.raises(ValueError, match=r"\A[^\n]+ is (not supported|a weight below 0); [^\n]+\Z"):
            weighted(text)
    else:
        letters = [char for char in text if char in "ab"]
        assert [char for part in parts for piece, _ in part for char in piece if char in "ab"] == letters


def job(**fields: Any) -> JobSpec:
    values, problems = parse_fields({"prompt": "a fox", **fields}, images=NoImages(""))
    assert not problems
    return JobSpec(id="x", seed=1, **values)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("a fox AND a cat", "prompt: AND (composable prompts) is not supported"),
        ("a [fox:cat:0.5]", "prompt: [fox:cat:0.5] (prompt editing) is not supported"),
        ("a [fox:10], x", "prompt: [fox:10] (prompt editing) is not supported"),
        ("a [fox|cat]", "prompt: [fox| (prompt editing) is not supported"),
        ("(a" * 9_000, "prompt: more than 50 open brackets: such a text is not supported; close them"),
        ("a (fox:-0.5)", "prompt: :-0.5) is a weight below 0; name it in negative_prompt instead"),
    ],
)
def test_what_is_not_supported_is_named_in_one_line(prompt: str, problem: str) -> None:
    with pytest.raises(JobError) as refused:
        SD.resolve(job(prompt=prompt, prompt_syntax="a1111"))
    (found,) = refused.value.problems
    assert str(found).startswith(problem)
    assert str(found).endswith(', or give "prompt_syntax": "plain"')
    assert "\n" not in str(found)
    assert SD.resolve(job(prompt=prompt)).prompt == prompt


@pytest.mark.parametrize(
    ("found", "has_clip"),
    [
        (SD, True),
        (SDXL, True),
        (geometry("StableDiffusionImg2ImgPipeline", "CLIPTextModel"), True),
        (geometry("StableDiffusionXLInpaintPipeline", "CLIPTextModel", "CLIPTextModelWithProjection"), True),
        (geometry("StableDiffusionPipeline", "XLMRobertaModel"), False),
        (geometry("FluxPipeline", "CLIPTextModel", "T5EncoderModel"), False),
        (geometry("StableDiffusion3Pipeline", *["CLIPTextModelWithProjection"] * 2, "T5EncoderModel"), False),
    ],
)
def test_models_with_clip_encoders_take_weights(found: PipelineGeometry, has_clip: bool) -> None:
    assert found.has_clip == has_clip


def test_auto_acts_where_it_can() -> None:
    flux = geometry("FluxPipeline", "CLIPTextModel", "T5EncoderModel")
    assert SDXL.resolve(job(prompt_syntax="auto")).prompt_syntax == "a1111"
    assert flux.resolve(job(prompt_syntax="auto")).prompt_syntax is None
    assert SDXL.resolve(job(prompt_syntax="plain")).prompt_syntax is None


@pytest.mark.parametrize("name", ["qwen-image", "wan2.2-t2v-a14b"])
def test_other_models_refuse_weights_that_are_asked_for(name: str) -> None:
    with pytest.raises(JobError, match="prompt_syntax = a1111: needs a model with CLIP text encoders"):
        shipped_geometry(name).resolve(job(prompt_syntax="a1111"))
    assert shipped_geometry(name).resolve(job(prompt_syntax="auto")).prompt_syntax is None


def test_a_missing_package_is_a_problem_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "compel" else find(name))
    for syntax in ("a1111", "auto"):
        with pytest.raises(JobError, match=r"needs a package: pip install 'gfgen\[prompts\]'"):
            SD.resolve(job(prompt_syntax=syntax))
    SD.resolve(job(prompt_syntax="plain"))


@pytest.mark.parametrize(
    ("found", "args", "problem"),
    [
        (SD, {"clip_skip": 2}, "args.clip_skip = 2: has no effect with prompt_syntax; leave it out"),
        (
            SDXL,
            {"prompt_2": "a cat"},
            "args.prompt_2 = a cat: has no effect with prompt_syntax; leave it out",
        ),
    ],
)
def test_arguments_that_embeddings_replace_are_problems(
    found: PipelineGeometry, args: dict[str, Any], problem: str
) -> None:
    with pytest.raises(JobError) as refused:
        found.resolve(job(args=args, prompt_syntax="a1111"))
    assert [str(each) for each in refused.value.problems] == [problem]


def test_the_syntax_counts_in_hashes_only_if_it_is_given() -> None:
    assert spec_hash(job(prompt_syntax="plain")) == spec_hash(job()) != spec_hash(job(prompt_syntax="a1111"))
    assert to_mapping(job(prompt_syntax="a1111"))["prompt_syntax"] == "a1111"
    assert "prompt_syntax" not in to_mapping(job(prompt_syntax="plain"))


@pytest.mark.parametrize(
    ("line", "options", "syntax"),
    [
        ('{"prompt": "a fox"}', {}, None),
        ('{"prompt": "a fox"}', {"fallbacks": {"prompt_syntax": "a1111"}}, "a1111"),
        (
            '{"prompt": "a fox", "prompt_syntax": "plain"}',
            {"fallbacks": {"prompt_syntax": "a1111"}},
            None,
        ),
        ('{"prompt": "a fox"}', {"overrides": {"prompt_syntax": "a1111"}}, "a1111"),
    ],
)
def test_a_jobs_own_syntax_counts_above_the_option(
    tmp_path: Path, line: str, options: dict[str, Any], syntax: str | None
) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(line)
    (spec,) = JobSource(files=(str(path),), **options).read().specs
    assert spec.prompt_syntax == syntax


@pytest.mark.parametrize(
    ("options", "syntax", "tells"),
    [
        ({}, "auto", True),
        ({"fallbacks": {"prompt_syntax": "a1111"}}, "a1111", True),
        ({"fallbacks": {"prompt_syntax": "plain"}}, None, False),
        ({"overrides": {"prompt_syntax": "plain"}}, None, False),
        ({"is_plain": True}, None, False),
    ],
)
def test_lines_of_a1111_have_its_syntax_and_the_file_says_so_once(
    tmp_path: Path, options: dict[str, Any], syntax: str | None, tells: bool
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("--prompt (a:1.2) fox --steps 4\n--prompt [a] cat --steps 4\n")
    parsed = JobSource(files=(str(path),), **options).read()
    assert [spec.prompt_syntax for spec in parsed.specs] == [syntax] * 2
    assert ("weights such as (red:1.3) act on models" in parsed.kinds[0][1]) == tells
