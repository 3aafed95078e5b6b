"""Errors of the HTTP interface, all in OpenAI's shape.

400  invalid request                                      413  request too large
401  key missing or wrong                                 422  the model or machine cannot do it
403  request from another site                            429  too many open jobs or streams (Retry-After)
404  no such job, batch, model or path                    500  internal error
409  not possible in the job's state                      503  loading, stopping, overloaded (Retry-After)
                                                          507  the disk is full (Retry-After)
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.responses import Response

from gfgen.errors import Problem
from gfgen.job.fields import meant_by, parse_fields, plain_name
from gfgen.job.images import NoImages
from gfgen.job.shared import VARIATION_FIELDS
from gfgen.server.protocol import server_schemas
from gfgen.server.protocol.schemas import OpenRequest, RequestModel
from gfgen.system.wording import first_of

NO_PATHS = NoImages(
    "paths are not accepted over HTTP; send the job with its picture to /v1/videos or /v1/jobs"
)

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


def bad(field: str, text: str) -> ApiError:
    return ApiError(400, f"{field}: {text}", param=field)


def responses(*statuses: int, **sent: Any) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for a route's error statuses; front.py adds 401 and 403 to all routes.

    `sent` has the schemas of what it sends with 200, if that is no JSON, by content type.
    """
    found: dict[int | str, dict[str, Any]] = {status: {"model": server_schemas.Error} for status in statuses}
    return found | ({200: {"content": sent}} if sent else {})


def refused(problems: Sequence[Problem], *, status: int) -> ApiError:
    return ApiError(status, "; ".join(first_of(problems, "problem")), param=problems[0].field)


def renamed(problems: Iterable[Problem], names: Mapping[str, str]) -> list[Problem]:
    """Problems of a job, with the names that its fields have in the request."""
    return [replace(each, field=names.get(each.field or "", each.field)) for each in problems]


def without_folders(text: str) -> str:
    """The text with each absolute path shortened to its last part: clients do not see the server's folders.

    An unquoted path ends at a space.
    """
    text = _QUOTED.sub(r"\1\2\1", text)
    return _PLAIN.sub(r"\1", text)


M = TypeVar("M", bound=RequestModel)
R = TypeVar("R", bound=OpenRequest)
NESTED = ("extra_body", "extra_args", "extra_params")
"""Objects in which clients of vLLM-Omni and SGLang put more fields; in forms they are JSON."""


def checked(model: type[M], values: Mapping[str, Any]) -> M:
    """Validate values; raises ApiError with all problems and the name of the first invalid field.

    A null says as much as leaving the field out.
    """
    given = {name: value for name, value in values.items() if value is not None}
    known, job = _known(model), model.job_of(given)
    problems = [Problem(None, name, None, "missing") for name in model.required if name not in job]
    _, of_job = parse_fields({"prompt": "an example", **job}, images=NO_PATHS)
    problems += renamed(of_job, model.names)
    try:
        own = {name: given[name] for name in model.model_fields if name in given}
        found = model.model_validate(own, context=job)
    except ValidationError as error:
        problems += map(_problem, error.errors(include_url=False))
    problems += [_not_a_field(name, model) for name in given if name not in known]
    if problems:
        raise refused(problems, status=400)
    return found


def _known(model: type[RequestModel]) -> Collection[str]:
    return list(dict.fromkeys([*model.names.values(), *model.model_fields]))


def opened(model: type[R], values: Mapping[str, Any], *, is_strict: bool) -> tuple[R, list[str]]:
    """As `checked`, and warnings about the unknown fields that are ignored; `is_strict` refuses these."""
    given, warnings = _flat(values)
    if is_strict and warnings:
        raise ApiError(400, "; ".join(warnings))
    if not is_strict:
        known = {*_known(model), *VARIATION_FIELDS}
        unknown = [name for name, value in given.items() if name not in known and value is not None]
        warnings += [str(_not_a_field(name, model, then=", ignored")) for name in unknown]
        given = {name: value for name, value in given.items() if name not in unknown}
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


def invalid(errors: Sequence[Any]) -> ApiError:
    """An ApiError for what FastAPI refuses; a place begins with "query", "path" or such."""
    return refused([_problem({**error, "loc": error["loc"][1:]}) for error in errors], status=400)


def _problem(error: Any) -> Problem:
    """That of an error of pydantic."""
    name = str(error["loc"][0]) if error["loc"] else None
    message = "missing" if error["type"] == "missing" else str(error["msg"])
    return Problem(None, name, None, f"{message[:1].lower()}{message[1:]}" if name else message)


def _not_a_field(name: str, model: type[RequestModel], *, then: str = "") -> Problem:
    if name in VARIATION_FIELDS and not then:
        return Problem(None, name, None, "only in job files; send one request for each")
    known, words = _known(model), {**model.names, **model.other_names}
    near = meant_by(name, [*words, *known])
    near = words.get(near or "", near)
    hint = f"did you mean {near}?" if near else "" if then else f"the fields are {', '.join(known)}"
    return Problem(None, plain_name(name), None, f"not a field{then}" + (f"; {hint}" if hint else ""))
