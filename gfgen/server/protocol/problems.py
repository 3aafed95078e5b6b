"""Errors of the HTTP interface, all in OpenAI's shape.

400  invalid request                                      413  request too large
401  key missing or wrong                                 422  the model or machine cannot do it
403  request from another site                            429  too many open jobs or streams (Retry-After)
404  no such job, batch, model or path                    500  internal error
409  not possible in the job's state                      503  loading, stopping, overloaded (Retry-After)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from gfgen.errors import Problem
from gfgen.server.protocol import server_schemas

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
