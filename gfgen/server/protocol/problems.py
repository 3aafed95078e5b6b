"""Errors of the HTTP interface, all in OpenAI's shape.

400  invalid request                                      413  request too large
401  key missing or wrong                                 422  the model or machine cannot do it
403  request from another site                            429  too many open jobs or streams (Retry-After)
404  no such job, batch, model or path                    500  internal error
409  not possible in the job's state                      503  loading, stopping, overloaded (Retry-After)
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from gfgen.errors import OutputError, Problem
from gfgen.job.shared import VARIATION_FIELDS
from gfgen.server.protocol import schemas

logger = logging.getLogger(__name__)

MAX_SHOWN = 5
"""Problems reported per request."""

_QUOTED = re.compile(r"""(['"`])~?/(?:[^'"`/\n]+/)*([^'"`/\n]+)/?\1""")
_PLAIN = re.compile(r"""(?<![\w./~:])~?/(?:[^\s/'"`,;:()\[\]<>]+/)*([^\s/'"`,;:()\[\]<>]+)/?""")
M = TypeVar("M", bound=BaseModel)

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
    """An error response."""

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
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        body = schemas.ErrorBody(message=self.message, type=kind, param=self.param, code=self.code)
        return schemas.Error(error=body).response(status=self.status, headers=self.headers)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for a route's error statuses; app.py adds 401 and 403 to all routes."""
    return {status: {"model": schemas.Error} for status in statuses}


def install(app: FastAPI) -> None:
    """Answer every error of this app in OpenAI's shape."""

    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error.errors(), (), is_body=False).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {404: "there is no such path", 405: "this path does not accept that method"}
        message, headers = what.get(error.status_code, str(error.detail)), dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_methods(app, request.url.path)) or headers.get("Allow", "")
        return ApiError(error.status_code, message, headers=headers).response()

    async def full(_: Request, error: Exception) -> Response:
        return ApiError(507, str(error)).response()

    async def unexpected(_: Request, error: Exception) -> Response:
        return ApiError(500, "internal error; see the server log").response()

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(OutputError, full)
    app.add_exception_handler(Exception, unexpected)


def _methods(app: FastAPI, path: str) -> list[str]:
    """The methods of a path, from the OpenAPI document: starlette's Allow header names only one route."""
    for template, operations in app.openapi()["paths"].items():
        pattern, _, _ = compile_path(template)
        if pattern.match(path):
            return sorted(name.upper() for name in operations)
    return []


def checked(model: type[M], values: Mapping[str, Any]) -> M:
    """Validate values; raises ApiError with all problems and the name of the first invalid field."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise _of_validation(error.errors(include_url=False), model.model_fields, is_body=True) from None


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


def _of_validation(errors: Sequence[Any], fields: Iterable[str], *, is_body: bool) -> ApiError:
    texts, param = [], None
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
        near = difflib.get_close_matches(name[:40], fields, n=1)
        if name in VARIATION_FIELDS:
            return f"{name}: only in job files; send one request for each"
        shown = name if name.isprintable() and len(name) <= 80 else repr(name[:40])
        hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(fields)}"
        return f"{shown}: not a field; {hint}"
    if kind == "missing":
        return f"{name}: missing"
    if kind == "job_field":
        return str(Problem(None, name, error["ctx"]["shown"], error["ctx"]["accepted"]))
    message = str(error["msg"])
    return f"{name}: {message[:1].lower()}{message[1:]}" if name else message


def without_folders(text: str, *, known: Collection[str] = ()) -> str:
    """The text with each absolute path shortened to its last part: clients do not see the server's folders.

    An unquoted path ends at a space, except for those in `known`.
    """
    for path in sorted(known, key=len, reverse=True):
        last = path.rpartition("/")[2]
        text = last.join(re.split(rf"{re.escape(path)}(?![\w.-])", text))
    text = _QUOTED.sub(r"\1\2\1", text)
    return _PLAIN.sub(r"\1", text)
