"""Reads request bodies (JSON, forms, job files) and Idempotency-Key.

A picture may be large, the other fields are small.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.datastructures import UploadFile

from gfgen.server.http.guard import Access
from gfgen.server.jobs.job_requests import MAX_UPLOADS, Upload, data_url_content
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol.problems import ApiError, checked
from gfgen.server.store import RequestKey

MAX_FIELDS = 64
MAX_KEY_CHARS = 255
_BRIEF_BYTES = 1 << 16
"""Smaller bodies are parsed faster than a thread switch takes."""
_DATA_URL_START = b"data:image"
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[!-~]+$"},
    "description": "A repeated request with the same key creates nothing new.",
}
MESSAGES = "messages"
"""Name of the field that holds a conversation, whose parts may have a picture."""
_UPLOAD = re.compile(r"files\[(?P<name>[A-Za-z_][A-Za-z0-9_]{0,99})\](?P<item>\[\])?")
_CHARSET = re.compile(r"charset\s*=\s*\"?([^\";\s]*)", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_NUMERIC = ("deadline", "timeout", "seconds")
"""Fields that accept a number or a string; forms have only strings."""
_PICTURE_URL = ("input_reference[image_url]", "input_reference[image_url][url]")


JOB_FILE_KINDS = {
    "application/jsonl": ".jsonl",
    "application/x-ndjson": ".jsonl",
    "text/csv": ".csv",
    "text/tab-separated-values": ".tsv",
    "text/plain": ".txt",
}
"""Content types of job files, with the ending of a file's name that stands for the same (job/inputs.py)."""


@dataclass(frozen=True, slots=True)
class JobFile:
    content: bytes
    fingerprint: str
    suffix: str = ".jsonl"


@dataclass(frozen=True, slots=True)
class Body:
    """The fields of a request, its picture, and a hash of both."""

    values: Mapping[str, Any]
    picture: bytes | None
    fingerprint: str
    filename: str | None = None
    uploads: Mapping[str, list[Upload]] = field(default_factory=dict)
    """Files for arguments of the pipeline, by argument."""
    jobs: bytes | None = None


async def read_body(
    request: Request,
    *,
    service: JobService,
    picture_name: str = "input_reference",
    takes_uploads: bool = False,
) -> Body:
    """Read JSON or a form; raises ApiError for any other content type.

    With `takes_uploads`, the request may have files for arguments, or be an array of jobs.
    """
    kind = content_kind(request)
    if kind == "multipart/form-data":
        return await _from_form(request, service, picture_name, takes_uploads=takes_uploads)
    if kind not in ("application/json", "application/x-www-form-urlencoded", ""):
        raise ApiError(400, f"{kind[:80]}: send application/json or a form")
    content = await request.body()
    address, json_bytes = _address(request), service.limits.json_bytes
    if takes_uploads and content.lstrip()[:1] == b"[":
        return Body({}, None, _fingerprint(address, {}, content), jobs=content)
    if kind == "application/x-www-form-urlencoded" and content[:1] != b"{":  # curl -d sends JSON as this too
        if content.count(b"&") >= MAX_FIELDS or not content.isascii():
            raise ApiError(400, f"the body is not a URL-encoded form with at most {MAX_FIELDS} fields")
        return await _from_form(request, service, picture_name)
    return await _parse(
        content, lambda: _from_json(content, address, picture_name=picture_name, json_bytes=json_bytes)
    )


def content_kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_model(request: Request, model: type[M], *, service: JobService) -> M:
    content = await request.body()
    if len(content) > service.limits.json_bytes:
        raise _too_large(service.limits.json_bytes)
    return checked(model, await _parse(content, lambda: _object(content)))


async def _parse(content: bytes, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in another thread if the body is large."""
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
        raise ApiError(400, 'the body is not a JSON object; send one like {"prompt": "a red circle falls"}')
    if len(value) > MAX_FIELDS:
        raise ApiError(400, f"{len(value):,} fields; at most {MAX_FIELDS} are accepted")
    return value


async def read_job_file(request: Request, *, service: JobService) -> JobFile:
    kind = content_kind(request)
    if kind == "multipart/form-data":
        body = await read_file(request, service=service)
        suffix = PurePath(body.filename or "").suffix or ".jsonl"
        return JobFile(body.picture or b"", body.fingerprint, suffix)
    content, address = await request.body(), _address(request)
    fingerprint = await _parse(content, lambda: _fingerprint(address, {}, content))
    return JobFile(content, fingerprint, JOB_FILE_KINDS.get(kind, ".jsonl"))


async def read_file(request: Request, *, service: JobService) -> Body:
    if content_kind(request) != "multipart/form-data":
        raise ApiError(400, "send a form with a file")
    body = await _from_form(request, service, "file")
    if body.picture is None:
        raise ApiError(400, "file: missing", param="file")
    return body


def request_key(request: Request, fingerprint: str) -> RequestKey | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise ApiError(
            400, f"1 to {MAX_KEY_CHARS} printable characters are accepted", param="Idempotency-Key"
        )
    owner = Access.of(request.scope).owner
    return RequestKey(" ".join(filter(None, (owner, request.url.path, key))), fingerprint)


def documented(model: type[BaseModel], *, picture: str | None = None, is_json: bool = True) -> dict[str, Any]:
    """OpenAPI description of a body that the route reads itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)  # app.py adds them to the components
    content: dict[str, Any] = {"application/json": {"schema": schema}} if is_json else {}
    if picture is not None:
        properties = {name: _without_null(value) for name, value in schema["properties"].items()}
        properties[picture] = {"type": "string", "format": "binary"}
        content["multipart/form-data"] = {"schema": {**schema, "properties": properties}}
    return {"requestBody": {"required": True, "content": content}, "parameters": [IDEMPOTENCY_KEY]}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI description of a small JSON body that `read_model` reads."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a form field: forms have no null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    return schema if not kinds else rest | (kinds[0] if len(kinds) == 1 else {"anyOf": kinds})


async def _from_form(
    request: Request, service: JobService, file_name: str, *, takes_uploads: bool = False
) -> Body:
    """The fields of a form, all strings, its one file, and files for arguments if it may have these."""
    charset = _CHARSET.search(request.headers.get("content-type", ""))
    if charset is not None and charset[1].lower() not in ("utf-8", "us-ascii"):
        raise ApiError(400, f"charset = {charset[1][:80]!r}: send the form in UTF-8")
    values: dict[str, Any] = {}
    uploads: dict[str, list[Upload]] = {}
    picture: bytes | None = None
    filename: str | None = None
    async with request.form(
        max_files=1 + MAX_UPLOADS,
        max_fields=MAX_FIELDS,
        max_part_size=service.limits.json_bytes,
    ) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if takes_uploads and (match := _UPLOAD.fullmatch(name)):
                    of_argument = uploads.setdefault(match["name"], [])
                    of_argument.append(
                        Upload.of(value.filename, await value.read(), is_item=bool(match["item"]))
                    )
                    continue
                if name.removesuffix("[]") != file_name:
                    raise ApiError(
                        400, f"{name[:80]!r}: not a file of this form; send {file_name}", param=file_name
                    )
                if picture is not None:
                    raise ApiError(400, "more than one file; one is accepted", param=file_name)
                picture, filename = await value.read(), value.filename
            else:
                _add_field(values, name, value)
    if any(name in values for name in _PICTURE_URL):
        picture = await asyncio.to_thread(_picture_of_form, values)
    _check_size(values, service.limits.json_bytes)
    address, content = _address(request), picture or b""
    hashed: Mapping[str, Any] = values
    if uploads:
        hashed = {**values, "uploads": {name: [one.digest for one in uploads[name]] for name in uploads}}
    fingerprint = await _parse(content, lambda: _fingerprint(address, hashed, content))
    return Body(values, picture, fingerprint, filename, uploads)


def _add_field(values: dict[str, Any], name: str, value: str) -> None:
    """Add a field of a form; an empty one says as much as leaving it out."""
    if name in values:
        raise ApiError(400, f"{name[:80]}: given more than once", param=name[:80])
    if value != "":
        values[name] = float(value) if name in _NUMERIC and _NUMBER.fullmatch(value) else value


def _picture_of_form(values: dict[str, Any]) -> bytes | None:
    urls = [values.pop(name) for name in _PICTURE_URL if name in values]
    return data_url_content(urls[-1]) if urls else None


def _from_json(content: bytes, address: list[str], *, picture_name: str, json_bytes: int) -> Body:
    if len(content) > json_bytes and _DATA_URL_START not in content:
        raise _too_large(json_bytes)
    values = _object(content)
    url = _picture_url(values, picture_name)
    _check_size(values, json_bytes)
    picture = None if url is None else data_url_content(url, param=picture_name)
    return Body(values, picture, _fingerprint(address, values, picture or b""))


def _check_size(values: Mapping[str, Any], json_bytes: int) -> None:
    if len(json.dumps(values)) > json_bytes:
        raise _too_large(json_bytes)


def _too_large(json_bytes: int) -> ApiError:
    return ApiError(413, f"the request exceeds {json_bytes:,} bytes without its picture")


def _picture_url(values: dict[str, Any], name: str) -> str | None:
    """Take the picture's data: URL out of a JSON body, from where OpenAI's clients put it."""
    if name == MESSAGES:
        return _picture_of_messages(values)
    given = values.pop(name, None)
    if given is None:
        return None
    if isinstance(given, Mapping):
        given = next((given[key] for key in ("image_url", "url") if isinstance(given.get(key), str)), None)
    if not isinstance(given, str):
        raise ApiError(400, f"{name}: send a file in a form, or a data:image/...;base64 URL", param=name)
    return given


def _picture_of_messages(values: Mapping[str, Any]) -> str | None:
    """Take the URL of the only picture out of the messages of a conversation."""
    messages = values.get(MESSAGES)
    urls: list[str] = []
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list):
            pictures = [part for part in parts if isinstance(part, dict) and part.get("type") == "image_url"]
            message["content"] = [part for part in parts if part not in pictures]
            urls += [url for part in pictures if (url := _picture_url(dict(part), "image_url"))]
    if len(urls) > 1:
        raise ApiError(400, f"{len(urls)} pictures; at most one is accepted", param=MESSAGES)
    return urls[0] if urls else None


def _address(request: Request) -> list[str]:
    return [request.url.path, str(request.url.query)]


def _fingerprint(address: list[str], values: Mapping[str, Any], content: bytes) -> str:
    text = json.dumps([*address, values], sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace") + b"\0")
    digest.update(content)
    return digest.hexdigest()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
