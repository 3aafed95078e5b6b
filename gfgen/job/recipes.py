"""Recipes: fields of distilled LoRAs by name and family of models (recipes.json, or gfgen.toml).

Source: the model cards of Wan2.2-Lightning, Qwen-Image-Lightning, SDXL-Lightning and LCM-LoRA on the hub.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gfgen.errors import JobError, Problem
from gfgen.job.spec import JobSpec

Recipes = Mapping[str, Any]  # by name and family: fields of a job, and `"lora": true` for a recipe of a LoRA


@functools.cache
def recipes() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("recipes.json").read_text())  # type: ignore[no-any-return]


def is_for(key: str, family: str) -> bool:
    """Whether a recipe's family of models contains this one: "wan" has "wan-moe-t2v"."""
    return family == key or family.startswith(f"{key}-")


def with_recipe(spec: JobSpec, *, family: str) -> JobSpec:
    """The job with its recipe's values in empty fields. Raises: JobError where it does not fit."""
    if spec.recipe is None:
        return spec
    fields = next((dict(fields) for key, fields in spec.recipe.items() if is_for(key, family)), None)
    if fields is None:
        known = ", ".join(spec.recipe)
        raise JobError(Problem.of("recipe", None, f"has no values for {family}, but for {known}"))
    if fields.pop("lora", False) and not spec.lora:
        raise JobError(Problem.of("recipe", None, "is for a LoRA; name its file in the field lora"))
    if "sigmas" in fields and spec.sigmas is None:
        fields["steps"] = num_steps = len(fields["sigmas"])
        if spec.steps not in (None, num_steps):
            accepted = f"the recipe has noise levels for {num_steps} steps; leave it out, or give sigmas"
            raise JobError(Problem.of("steps", spec.steps, accepted))
    return replace(spec, **{name: x for name, x in fields.items() if getattr(spec, name) is None})
