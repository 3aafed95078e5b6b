"""Turns the fields of a request into a pydantic model, or into an error that names the wrong fields."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gfgen.errors import Problem, nearest
from gfgen.job.shared import VARIATION_FIELDS
from gfgen.server.protocol.problems import MAX_SHOWN, ApiError
from gfgen.server.protocol.schemas import OpenRequest

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=OpenRequest)
NESTED = ("extra_body", "extra_args", "extra_params")
"""Objects in which clients of vLLM-Omni and SGLang put more fields; in forms they are JSON."""


def checked(model: type[M], values: Mapping[str, Any]) -> M:
    """Validate values; raises ApiError with all problems and the name of the first invalid field.

    A null says as much as leaving the field out.
    """
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False), model.model_fields, is_body=True) from None


def opened(model: type[R], values: Mapping[str, Any], *, is_strict: bool) -> tuple[R, list[str]]:
    """As `checked`, and warnings about the unknown fields that are ignored; `is_strict` refuses these."""
    given, warnings = _flat(values)
    if is_strict and warnings:
        raise ApiError(400, "; ".join(warnings))
    if not is_strict:
        known = (*model.model_fields, *VARIATION_FIELDS)
        unknown = [name for name, value in given.items() if name not in known and value is not None]
        warnings += [_not_a_field(name, model.model_fields, then=", ignored") for name in unknown]
        given = {name: value for name, value in given.items() if name in known}
    return checked(model, given), warnings


def _flat(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values with those of nested objects, which do not replace others."""
    flat = {name: value for name, value in values.items() if name not in NESTED}
    warnings = []
    for name in NESTED:
        value = values.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        if isinstance(value, Mapping):
            flat = {**value, **flat}
        elif value is not None:
            warnings.append(f"{name}: not a JSON object, ignored")
    return flat, warnings


def invalid(errors: Sequence[Any], fields: Iterable[str], *, is_body: bool) -> ApiError:
    texts, param = [], None
    told = {error["loc"][:1] for error in errors if error["type"] == "job_field"}
    errors = [each for each in errors if each["type"] != "literal_error" or each["loc"][:1] not in told]
    for error in errors[:MAX_SHOWN]:
        place = [
            str(part) for part in error["loc"] if is_body or part not in ("query", "path", "body", "header")
        ]
        name = place[0] if place else None
        param = param or name
        texts.append(_text(error, name, list(fields)))
    return ApiError(400, "; ".join(texts) or "the request is not valid", param=param)


def _text(error: Any, name: str | None, fields: Sequence[str]) -> str:
    kind = error["type"]
    if kind == "extra_forbidden" and name is not None:
        if name in VARIATION_FIELDS:
            return f"{name}: only in job files; send one request for each"
        return _not_a_field(name, fields, otherwise=f"; the fields are {', '.join(fields)}")
    if kind == "missing":
        return f"{name}: missing"
    if kind == "job_field":
        return str(Problem(None, name, error["ctx"]["shown"], error["ctx"]["accepted"]))
    message = str(error["msg"])
    return f"{name}: {message[:1].lower()}{message[1:]}" if name else message


def _not_a_field(name: str, fields: Iterable[str], *, then: str = "", otherwise: str = "") -> str:
    near = nearest(name, fields)
    shown = name if name.isprintable() and len(name) <= 80 else repr(name[:40])
    return f"{shown}: not a field{then}" + (f"; did you mean {near}?" if near else otherwise)
