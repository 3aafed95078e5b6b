"""Bounds, rounding and defaults that all families share at admission.

A number in a job is accepted, rounded (as the family's pipeline rounds it, or down if the pipeline refuses
it), or a `Problem` that says what would be accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from gfgen.errors import ModelError, Problem
from gfgen.job.fields import MAX_SIDE
from gfgen.job.spec import SCALE_FIELDS, SHAPE_FIELDS, JobSpec

MAX_TOKENS = 1 << 20
"""Tokens of a job: 38 times the largest default (27,280)."""

DEFAULT_KEYS = frozenset({"negative_prompt", *SHAPE_FIELDS, *SCALE_FIELDS})
"""Job fields that may have defaults in a checkpoint's gfgen.json."""

T = TypeVar("T")


def known(value: T | None) -> T:
    """A field that `resolve` has set."""
    assert value is not None, "the job is not resolved"
    return value


def merge_defaults(family: Mapping[str, Any], settings: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """A family's defaults, overridden by those of a checkpoint's gfgen.json."""
    given = settings.get("defaults", {})
    for key, value in given.items():
        if key not in DEFAULT_KEYS:
            raise ModelError(f"{where}: unknown default {key!r}; known are {', '.join(sorted(DEFAULT_KEYS))}")
        if key == "negative_prompt" and isinstance(value, str):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{where}: the default of {key!r} must be a number, not {value!r}")
    return {**family, **given}


def fill_defaults(spec: JobSpec, defaults: Mapping[str, Any]) -> JobSpec:
    """The job with the defaults in its empty fields."""
    missing = {key: value for key, value in defaults.items() if getattr(spec, key) is None}
    return changed(spec, **missing)


def changed(spec: JobSpec, **values: Any) -> JobSpec:
    """The job with these values. Usually it has them already, and copies would dominate admission."""
    if all(getattr(spec, name) == value for name, value in values.items()):
        return spec
    return replace(spec, **values)


def floor_to_multiple(value: int, multiple: int) -> int:
    return value // multiple * multiple


def size_problems(width: int, height: int, *, multiple: tuple[int, int]) -> Iterator[Problem]:
    """A size below `multiple` (width, height), to which sizes are rounded down, or above MAX_SIDE."""
    if width < multiple[0] or height < multiple[1] or max(width, height) > MAX_SIDE:
        smallest, largest = f"{multiple[0]}x{multiple[1]}", f"{MAX_SIDE}x{MAX_SIDE}"
        accepted = (
            f"from {smallest} to {largest} pixels are accepted, rounded down to multiples of {smallest}"
        )
        yield Problem.of("size", f"{width}x{height}", accepted)


def token_problems(num_tokens: int, *, field: str, value: object) -> Iterator[Problem]:
    if num_tokens > MAX_TOKENS:
        accepted = f"is {num_tokens:,} tokens together with the rest; at most {MAX_TOKENS:,} are accepted"
        yield Problem.of(field, value, accepted)


def whole_problems(spec: JobSpec, field: str, *, low: int, high: int) -> Iterator[Problem]:
    """A whole number outside [low, high]; None passes."""
    value = getattr(spec, field)
    if value is not None and not low <= value <= high:
        yield Problem.of(field, value, f"a whole number from {low} to {high} is accepted")


def number_problems(
    spec: JobSpec, field: str, *, low: float, high: float, above: bool = False
) -> Iterator[Problem]:
    """A number outside [low, high], or outside (low, high] if `above`; None passes."""
    value = getattr(spec, field)
    if value is None:
        return
    inside = (low < value if above else low <= value) and value <= high
    if not math.isfinite(value) or not inside:
        start = f"above {low:g}" if above else f"from {low:g}"
        yield Problem.of(field, value, f"a number {start} to {high:g} is accepted")


def useless(spec: JobSpec, field: str, reason: str) -> Iterator[Problem]:
    """A field that this family does not use, if the job gives it."""
    value = getattr(spec, field)
    if value is not None:
        yield Problem.of(field, value, reason)
