"""Errors of the HTTP interface, all in OpenAI's shape.

400  invalid request                                      413  request too large
401  key missing or wrong                                 422  the model or machine cannot do it
403  request from another site                            429  too many open jobs or streams (Retry-After)
404  no such job, batch, model or path                    500  internal error
409  not possible in the job's state                      503  loading, stopping, overloaded (Retry-After)
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from gfgen.errors import Problem, nearest
from gfgen.job.shared import VARIATION_FIELDS
from gfgen.server.protocol import server_schemas
from gfgen.server.protocol.schemas import OpenRequest

MAX_SHOWN = 5

_QUOTED = re.compile(r"""(['"`])~?/(?:[^'"`/\n]+/)*([^'"`/\n]+)/?\1""")
_PLAIN = re.compile(r"""(?<![\w./~:])~?/(?:[^\s/'"`,;:()\[\]<>]+/)*([^\s/'"`,;:()\[\]<>]+)/?""")

_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
    416: "range_not_satisfiable",
    422: "cannot_be_done",
    429: "queue_full",
    500: "internal_error",
    503: "not_ready",
    507: "disk_full",
}


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, round(retry_after_s)))

    def response(self) -> Response:
        return self.body().response(status=self.status, headers=self.headers)

    def body(self) -> server_schemas.Error:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        body = server_schemas.ErrorBody(message=self.message, type=kind, param=self.param, code=self.code)
        return server_schemas.Error(error=body)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for a route's error statuses; app.py adds 401 and 403 to all routes."""
    return {status: {"model": server_schemas.Error} for status in statuses}


def refused(problems: Sequence[Problem], names: Mapping[str, str], *, status: int) -> ApiError:
    """An ApiError for problems of a job; `names` maps job file fields to the request's fields."""
    texts = [str(_renamed(problem, names)) for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        texts.append(f"and {len(problems) - MAX_SHOWN} more problems")
    first = problems[0].field
    param = None if first is None else names.get(first, first)
    return ApiError(status, "; ".join(texts), param=param)


def _renamed(problem: Problem, names: Mapping[str, str]) -> Problem:
    field = problem.field
    return Problem(None, None if field is None else names.get(field, field), problem.value, problem.accepted)


def without_folders(text: str) -> str:
    """The text with each absolute path shortened to its last part: clients do not see the server's folders.

    An unquoted path ends at a space.
    """
    text = _QUOTED.sub(r"\1\2\1", text)
    return _PLAIN.sub(r"\1", text)


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
