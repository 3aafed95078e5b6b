"""Reads request bodies (JSON, forms, job files) and Idempotency-Key.

A picture may be large, the other fields are small.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.datastructures import UploadFile

from gfgen.job.fields import REPEATED
from gfgen.server.http.guard import Access
from gfgen.server.jobs.job_requests import MAX_FIELDS, MAX_UPLOADS, Upload, data_url_content, json_object
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol.problems import ApiError, bad, checked
from gfgen.server.protocol.schemas import RequestModel
from gfgen.server.store import RequestKey

MAX_KEY_CHARS = 255
_BRIEF_BYTES = 1 << 16
"""Smaller bodies are parsed faster than a thread switch takes."""
_DATA_URL_START = b"data:image"
T = TypeVar("T")
M = TypeVar("M", bound=RequestModel)
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
class Body:
    """The fields of a request, and its picture or job file."""

    values: Mapping[str, Any]
    file: bytes | None
    filename: str = ""
    uploads: Mapping[str, list[Upload]] = field(default_factory=dict)
    """Files for arguments of the pipeline, by argument."""

    @property
    def suffix(self) -> str:
        """That of the file's name, which says what kind of job file it is (job/inputs.py)."""
        return PurePath(self.filename).suffix or ".jsonl"

    def fingerprint(self, address: Sequence[str]) -> str:
        uploads = {name: [one.digest for one in files] for name, files in self.uploads.items()}
        values = {**self.values, "uploads": uploads} if uploads else self.values
        text = json.dumps([*address, values], sort_keys=True)
        digest = hashlib.sha256(text.encode("utf-8", "backslashreplace") + b"\0")
        digest.update(self.file or b"")
        return digest.hexdigest()


async def read_body(
    request: Request,
    *,
    service: JobService,
    picture_name: str = "input_reference",
    takes_uploads: bool = False,
) -> Body:
    """Read JSON or a form; raises ApiError for any other content type.

    With `takes_uploads`, a form may have files for arguments.
    """
    kind = content_kind(request)
    if kind == "multipart/form-data":
        return await _from_form(request, service, picture_name, takes_uploads=takes_uploads)
    if kind not in ("application/json", "application/x-www-form-urlencoded", ""):
        raise ApiError(400, f"{kind[:80]}: send application/json or a form")
    content = await request.body()
    json_bytes = service.limits.json_bytes
    if kind == "application/x-www-form-urlencoded" and content[:1] != b"{":  # curl -d sends JSON as this too
        if content.count(b"&") >= MAX_FIELDS or not content.isascii():
            raise ApiError(400, f"the body is not a URL-encoded form with at most {MAX_FIELDS} fields")
        return await _from_form(request, service, picture_name)
    return await _parse(
        content, lambda: _from_json(content, picture_name=picture_name, json_bytes=json_bytes)
    )


def content_kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_model(request: Request, model: type[M], *, service: JobService) -> M:
    content = await request.body()
    if len(content) > service.limits.json_bytes:
        raise _too_large(service.limits.json_bytes)
    return checked(model, await _parse(content, lambda: json_object(content)))


async def _parse(content: bytes, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in another thread if the body is large."""
    return work() if len(content) <= _BRIEF_BYTES else await asyncio.to_thread(work)


async def read_job_file(request: Request, *, service: JobService) -> Body:
    kind = content_kind(request)
    if kind == "multipart/form-data":
        return await read_file(request, service=service)
    return Body({}, await request.body(), f"jobs{JOB_FILE_KINDS.get(kind, '')}")


async def read_file(request: Request, *, service: JobService) -> Body:
    """A form with one file."""
    if content_kind(request) != "multipart/form-data":
        raise ApiError(400, "send a form with a file")
    body = await _from_form(request, service, "file")
    if body.file is None:
        raise bad("file", "missing")
    return body


async def request_key(request: Request, body: Body) -> RequestKey | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise ApiError(
            400, f"1 to {MAX_KEY_CHARS} printable characters are accepted", param="Idempotency-Key"
        )
    owner = Access.of(request.scope).owner
    address = [request.url.path, str(request.url.query)]
    fingerprint = await _parse(body.file or b"", lambda: body.fingerprint(address))
    return RequestKey(" ".join(filter(None, (owner, request.url.path, key))), fingerprint)


def documented(model: type[BaseModel], *, picture: str | None = None) -> dict[str, Any]:
    """OpenAPI description of a body that the route reads itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)  # app.py adds them to the components
    content: dict[str, Any] = {"application/json": {"schema": schema}}
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
    file: bytes | None = None
    filename = ""
    async with request.form(
        max_files=1 + MAX_UPLOADS, max_fields=MAX_FIELDS, max_part_size=service.limits.json_bytes
    ) as form:
        for name, value in form.multi_items():
            if not isinstance(value, UploadFile):
                if name in values:
                    raise bad(name[:80], REPEATED)
                if value:  # an empty one says as much as leaving it out
                    values[name] = value
            elif takes_uploads and (match := _UPLOAD.fullmatch(name)):
                upload = Upload.of(value.filename, await value.read(), is_item=bool(match["item"]))
                uploads.setdefault(match["name"], []).append(upload)
            elif name.removesuffix("[]") != file_name:
                raise ApiError(
                    400, f"{name[:80]!r}: not a file of this form; send {file_name}", param=file_name
                )
            elif file is not None:
                raise ApiError(400, "more than one file; one is accepted", param=file_name)
            else:
                file, filename = await value.read(), value.filename or ""
    if urls := [values.pop(name) for name in _PICTURE_URL if name in values]:
        file = await asyncio.to_thread(data_url_content, urls[-1])
    _check_size(values, service.limits.json_bytes)
    return Body(values, file, filename, uploads)


def _from_json(content: bytes, *, picture_name: str, json_bytes: int) -> Body:
    if len(content) > json_bytes and _DATA_URL_START not in content:
        raise _too_large(json_bytes)
    values = json_object(content)
    url = _picture_url(values, picture_name)
    _check_size(values, json_bytes)
    return Body(values, None if url is None else data_url_content(url, param=picture_name))


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
        raise bad(name, "send a file in a form, or a data:image/...;base64 URL")
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
