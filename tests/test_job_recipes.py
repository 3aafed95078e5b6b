"""Recipes: values by name for a family of models, in fields for which a job has none."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from gfgen.errors import JobError
from gfgen.job.fields import FIELDS, RECIPE_FIELDS, parse_fields
from gfgen.job.images import NoImages
from gfgen.job.reader import JobSource, read_job_stream, to_mapping
from gfgen.job.recipes import recipes
from gfgen.job.spec import JobSpec, spec_hash
from gfgen.models.geometry.model import shipped_geometry

LORA = {"lora": [{"sha256": "0" * 64, "scale": 1.0}], "lora_files": ["/a.safetensors"]}
MINE = {"wan": {"sigmas": [1.0, 0.5], "guidance_scale": 1, "scheduler": "lcm"}}


def job(**fields: Any) -> JobSpec:
    values, problems = parse_fields({"prompt": "a fox", **fields}, images=NoImages(""))
    assert not problems
    return JobSpec(id="x", seed=1, **values)


def resolved(model: str, **fields: Any) -> JobSpec:
    spec = shipped_geometry(model).resolve(job(**fields))
    assert shipped_geometry(model).resolve(spec) == spec
    return spec


def test_a_recipe_sets_what_the_job_leaves_open() -> None:
    spec = resolved("wan2.2-t2v-a14b", recipe=MINE)
    assert (spec.steps, spec.sigmas, spec.guidance_scale, spec.guidance_scale_2) == (2, [1.0, 0.5], 1, 1)
    assert spec.scheduler == {"class": "FlowMatchLCMScheduler"}


def test_fields_of_the_job_count_above_its_recipe() -> None:
    spec = resolved("wan2.2-t2v-a14b", recipe=MINE, steps=2, guidance_scale=3, scheduler="euler")
    assert (spec.steps, spec.sigmas, spec.guidance_scale) == (2, [1.0, 0.5], 3)
    assert spec.scheduler == {"class": "FlowMatchEulerDiscreteScheduler"}
    assert resolved("wan2.2-t2v-a14b", recipe=MINE, sigmas=[0.9, 0.4, 0.1]).steps == 3


def test_steps_beside_the_noise_levels_of_a_recipe_are_a_problem() -> None:
    with pytest.raises(JobError, match="steps = 6: the recipe has noise levels for 2 steps"):
        resolved("wan2.2-t2v-a14b", recipe=MINE, steps=6)


@pytest.mark.parametrize(
    ("model", "recipe", "problem"),
    [
        ("qwen-image", "lightning-4", "recipe: is for a LoRA; name its file in the field lora"),
        ("qwen-image", MINE, "recipe: has no values for qwen-image, but for wan"),
    ],
)
def test_a_recipe_needs_its_model_and_its_lora(model: str, recipe: Any, problem: str) -> None:
    with pytest.raises(JobError) as refused:
        resolved(model, recipe=recipe)
    assert [str(found) for found in refused.value.problems] == [problem]


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("lightening-4", "did you mean lightning-4?"),
        ({"wan": {"tag": "x"}}, "tag is not one of steps, "),
        ({"wan": {"steps": 0}}, "steps = 0: a whole number from 1 to 1,000"),
        ({"wan": 4}, "the name of a recipe"),
    ],
)
def test_other_recipes_are_problems(recipe: Any, problem: str) -> None:
    _, (found,) = parse_fields({"prompt": "a fox", "recipe": recipe}, images=NoImages(""))
    assert problem in str(found)


@pytest.mark.parametrize("name", recipes())
def test_recipes_of_every_installation_fit_their_models(name: str) -> None:
    for family, fields in FIELDS["recipe"].parse(name).items():  # type: ignore[attr-defined]
        assert fields.keys() <= set(RECIPE_FIELDS)
        models = {
            "wan": ["wan2.2-t2v-a14b", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b"],
            "qwen-image": ["qwen-image"],
        }
        for model in models.get(family, ()):
            image = {"image": "/a.png"} if "i2v-a14b" in model else {}
            spec = JobSpec(id="x", prompt="a fox", seed=1, recipe={family: fields}, **LORA, **image)
            assert shipped_geometry(model).resolve(spec).steps == fields["steps"]


def test_a_users_recipes_have_names_too(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"prompt": "a fox", "recipe": "mine"}\n')
    (spec,) = JobSource(files=(str(path),), own_recipes={"mine": MINE}).read().specs
    assert spec.recipe == job(recipe=MINE).recipe
    (problem,) = JobSource(files=(str(path),)).read().problems
    assert problem.field == "recipe"


def test_what_a_recipe_says_is_part_of_the_job() -> None:
    assert (
        len({spec_hash(job(**each)) for each in ({}, {"recipe": MINE}, {"recipe": {"wan": {"steps": 4}}})})
        == 3
    )
    spec = job(recipe=MINE)
    line = str(to_mapping(spec)).replace("'", '"').encode()
    (again,) = read_job_stream(io.BytesIO(line), source="x", folder=Path()).specs
    assert again.recipe == spec.recipe
