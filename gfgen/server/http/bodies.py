"""Reading what a request brings: JSON, forms with a picture, job files, and its Idempotency-Key.

A picture may be as large as a request may be, the rest of a request is small. JSON cannot be parsed in parts,
and nothing else runs in this process meanwhile; so a large body's picture is cut out of it first.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.datastructures import UploadFile

from gfgen.server.jobs.job_requests import data_url_content
from gfgen.server.jobs.service import JobService
from gfgen.server.jobs.store import RequestKey
from gfgen.server.protocol.problems import ApiError

MAX_FIELDS = 64
MAX_KEY_CHARS = 255
MAX_LINES = 1_000_000
"""Of a job file, blank ones included."""
_BRIEF_BYTES = 1 << 16
"""What is read in less time than it takes to hand it to another thread and back."""
_DATA_URL_START = b'"data:image'
T = TypeVar("T")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_NUMERIC = ("deadline", "timeout", "seconds")
"""Fields that are a number or a text: in a form all are texts."""
_PICTURE_URL = ("input_reference[image_url]", "input_reference[image_url][url]")


@dataclass(frozen=True, slots=True)
class Body:
    """The fields of a request but for its picture, the picture's bytes, and a hash of all of it."""

    values: Mapping[str, Any]
    picture: bytes | None
    fingerprint: str


async def read_body(request: Request, *, service: JobService, picture_name: str = "input_reference") -> Body:
    """A request's fields, from JSON or from a form; raises ApiError for anything else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded":  # what curl -d says, whatever it sends
        raise ApiError(400, "send JSON with -H 'Content-Type: application/json', or a form with -F")
    if kind == "multipart/form-data":
        return await _from_form(request, service, picture_name)
    if kind not in ("application/json", ""):
        raise ApiError(400, f"{kind[:80]}: send application/json or multipart/form-data")
    content = await _content(request, service.limits.body_bytes)
    address, json_bytes = _address(request), service.limits.json_bytes
    return await _beside(
        content, lambda: _from_json(content, address, picture_name=picture_name, json_bytes=json_bytes)
    )


async def read_json(request: Request, *, most_bytes: int) -> dict[str, Any]:
    """The object that a request's body is."""
    content = await _content(request, most_bytes)
    return await _beside(content, lambda: _object(content))


async def _beside(content: bytes, work: Callable[[], T]) -> T:
    """What the work gives that there is with a body, done in another thread unless it is brief."""
    return work() if len(content) <= _BRIEF_BYTES else await asyncio.to_thread(work)


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, 'the body is no JSON object; send one like {"prompt": "a red circle falls"}')
    if len(value) > MAX_FIELDS:
        raise ApiError(400, f"{len(value):,} fields; no request has more than {MAX_FIELDS}")
    return value


async def read_job_file(request: Request, *, service: JobService) -> tuple[bytes, str]:
    """A job file, as the body or as the file of a form, and its hash.

    Raises: ApiError also when it has more jobs than may be open.
    """
    content, fingerprint = await _job_file(request, service)
    service.check_fits(await _beside(content, lambda: _num_jobs(content)))
    return content, fingerprint


async def _job_file(request: Request, service: JobService) -> tuple[bytes, str]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        body = await _from_form(request, service, "file")
        if body.picture is None:
            raise ApiError(400, "file: missing", param="file")
        return body.picture, body.fingerprint
    content = await _content(request, service.limits.body_bytes)
    address = _address(request)
    return content, await _beside(content, lambda: _fingerprint(address, {}, content))


def _num_jobs(content: bytes) -> int:
    """Lines of a job file that are neither blank nor comments; raises ApiError for lines without end."""
    if content.count(b"\n") > MAX_LINES:
        raise ApiError(413, f"a job file has at most {MAX_LINES:,} lines")
    lines = map(bytes.strip, io.BytesIO(content.removeprefix(b"\xef\xbb\xbf")))
    return sum(bool(line) and not line.startswith(b"#") for line in lines)


def request_key(request: Request, fingerprint: str) -> RequestKey | None:
    """The request's Idempotency-Key, if it has one."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise ApiError(
            400, f"1 to {MAX_KEY_CHARS} printable characters are accepted", param="Idempotency-Key"
        )
    return RequestKey(f"{request.url.path} {key}", fingerprint)


def documented(model: type[BaseModel], *, picture: str | None = None, is_json: bool = True) -> dict[str, Any]:
    """For a route's documentation: what its body is, where the route reads it by itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    content: dict[str, Any] = {"application/json": {"schema": schema}} if is_json else {}
    if picture is not None:
        properties = {name: _without_null(value) for name, value in schema["properties"].items()}
        properties[picture] = {"type": "string", "format": "binary"}
        content["multipart/form-data"] = {"schema": {**schema, "properties": properties}}
    key = {
        "name": "Idempotency-Key",
        "in": "header",
        "required": False,
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[!-~]+$"},
        "description": "A request that comes again with its key makes nothing new.",
    }
    return {"requestBody": {"required": True, "content": content}, "parameters": [key]}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A form leaves out what JSON may say as null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    return schema if not kinds else rest | (kinds[0] if len(kinds) == 1 else {"anyOf": kinds})


async def _content(request: Request, most_bytes: int) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > most_bytes:
            raise ApiError(413, f"a request has at most {most_bytes:,} bytes")
        pieces.append(piece)
    return b"".join(pieces)


async def _from_form(request: Request, service: JobService, file_name: str) -> Body:
    """The fields of a form; all texts, and one file."""
    values: dict[str, Any] = {}
    picture: bytes | None = None
    async with request.form(
        max_files=1, max_fields=MAX_FIELDS, max_part_size=service.limits.json_bytes
    ) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name != file_name:
                    raise ApiError(
                        400, f"{name[:80]!r}: not a file of this form; {file_name} is", param=file_name
                    )
                picture = await value.read()
            elif name in values:
                raise ApiError(400, f"{name}: given more than once", param=name)
            elif value != "":
                values[name] = float(value) if name in _NUMERIC and _NUMBER.fullmatch(value) else value
    for name in _PICTURE_URL:
        if name in values:
            picture = await asyncio.to_thread(data_url_content, values.pop(name))
    if sum(len(value) for value in values.values() if isinstance(value, str)) > service.limits.json_bytes:
        raise _too_large(service.limits.json_bytes)
    address, content = _address(request), picture or b""
    return Body(values, picture, await _beside(content, lambda: _fingerprint(address, values, content)))


def _from_json(content: bytes, address: list[str], *, picture_name: str, json_bytes: int) -> Body:
    start, stop, token = 0, 0, None
    if len(content) > json_bytes:
        start, stop = _longest_picture(content, json_bytes)
        token = secrets.token_hex()
        values = _object(b'%s"%s"%s' % (content[:start], token.encode(), content[stop:]))
    else:
        values = _object(content)
    url = _picture_url(values, picture_name)
    if token is not None:
        if url != token:  # the long text is something else's
            raise _too_large(json_bytes)
        url = _text(content[start:stop])
    picture = None if url is None else data_url_content(url)
    return Body(values, picture, _fingerprint(address, values, picture or b""))


def _longest_picture(content: bytes, json_bytes: int) -> tuple[int, int]:
    """Where in JSON its longest picture is, with its quotes: a text that begins as a data: URL.

    Quotes inside a text are escaped, and a text with such quotes is no data: URL.

    Raises: ApiError when the rest is too large; no more than that is looked through piece by piece.
    """
    longest = 0, 0
    start = content.find(_DATA_URL_START)
    while start >= 0 and start - (longest[1] - longest[0]) <= json_bytes:
        end = content.find(b'"', start + 1) + 1
        if not end:
            break
        is_whole = content[start - 1 : start] != b"\\" and content[end - 2 : end - 1] != b"\\"
        if is_whole and end - start > longest[1] - longest[0]:
            longest = start, end
        start = content.find(_DATA_URL_START, end)
    if len(content) - (longest[1] - longest[0]) > json_bytes:
        raise _too_large(json_bytes)
    return longest


def _text(quoted: bytes) -> str:
    """A text of JSON; escapes are rare in URLs, and what has none is read much faster."""
    try:
        return str(json.loads(quoted)) if b"\\" in quoted else quoted[1:-1].decode()
    except ValueError:
        raise ApiError(400, "the body is not JSON in UTF-8") from None


def _too_large(json_bytes: int) -> ApiError:
    return ApiError(413, f"a request has at most {json_bytes:,} bytes beside its picture")


def _picture_url(values: dict[str, Any], name: str) -> str | None:
    """The picture inside a JSON body, as a data: URL, where OpenAI's clients put it."""
    given = values.pop(name, None)
    if given is None:
        return None
    if isinstance(given, Mapping) and isinstance(given.get("image_url"), str) and len(given) == 1:
        given = given["image_url"]
    if not isinstance(given, str):
        raise ApiError(
            400, f"{name}: a file of a form, or a data:image/...;base64 URL is accepted", param=name
        )
    return given


def _address(request: Request) -> list[str]:
    return [request.url.path, str(request.url.query)]


def _fingerprint(address: list[str], values: Mapping[str, Any], content: bytes) -> str:
    text = json.dumps([*address, values], sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace") + b"\0")
    digest.update(content)
    return digest.hexdigest()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
