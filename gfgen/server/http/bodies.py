"""Reads request bodies (JSON, forms, job files) and Idempotency-Key.

A picture may be large, the other fields are small.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.datastructures import UploadFile
from starlette.responses import Response

from gfgen.job.fields import REPEATED
from gfgen.server.http.guard import Access
from gfgen.server.jobs.job_requests import MAX_FIELDS, MAX_UPLOADS, Upload, json_object, picture_content
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol.problems import ApiError, bad, checked
from gfgen.server.protocol.schemas import RequestModel
from gfgen.server.store import RequestKey

MAX_KEY_CHARS = 255
_BRIEF_BYTES = 1 << 16
"""Smaller bodies are parsed faster than a thread switch takes."""
_PICTURE_STARTS = (b";base64,", b"image_generation_call")
T = TypeVar("T")
M = TypeVar("M", bound=RequestModel)
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[!-~]+$"},
    "description": "A repeated request with the same key creates nothing new.",
}
MESSAGES, INPUT = PARTS = ("messages", "input")
"""Names of fields that hold a conversation, whose parts may have pictures."""
_PICTURE_PARTS = ("image_url", "input_image", "file", "input_file")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_UPLOAD = re.compile(r"files\[(?P<name>[A-Za-z_][A-Za-z0-9_]{0,99})\](?P<item>\[\])?")
_ITEM = re.compile(r"\[\d*\]$")
"""The end of a name in a form whose field has a list."""
_CHARSET = re.compile(r"charset\s*=\s*\"?([^\";\s]*)", re.IGNORECASE)
_REFERENCES = ("", "[image_url]", "[image_url][url]", "[file_id]")


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
    """The fields of a request, and its pictures or job file."""

    values: Mapping[str, Any]
    files: Sequence[bytes] = ()
    filename: str = ""
    uploads: Mapping[str, list[Upload]] = field(default_factory=dict)
    """Files for arguments of the pipeline, by argument."""
    mask: bytes | None = None
    earlier: Any = None
    """The last picture of a conversation before the user's last message, unread, if that has none."""

    @property
    def file(self) -> bytes | None:
        return self.files[0] if self.files else None

    @property
    def suffix(self) -> str:
        """That of the file's name, which says what kind of job file it is (job/inputs.py)."""
        return PurePath(self.filename).suffix or ".jsonl"

    def fingerprint(self, address: Sequence[str]) -> str:
        uploads = {name: [one.digest for one in files] for name, files in self.uploads.items()}
        more = [hashlib.sha256(content).hexdigest() for content in (*self.files[1:], self.mask or b"")]
        has_more = uploads or self.mask is not None or len(self.files) > 1
        values = {**self.values, **({"uploads": uploads, "more": more} if has_more else {})}
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
    most_pictures: int = 1,
) -> Body:
    """Read JSON or a form; raises ApiError for any other content type.

    With `takes_uploads`, a form may have files for arguments; one of several pictures may have a mask.
    """
    kind = content_kind(request)
    if kind == "multipart/form-data":
        return await _from_form(request, service, picture_name, most_pictures, takes_uploads=takes_uploads)
    if kind not in ("application/json", "application/x-www-form-urlencoded", ""):
        raise ApiError(400, f"{kind[:80]}: send application/json or a form")
    content = await request.body()
    json_bytes = service.limits.json_bytes
    if kind == "application/x-www-form-urlencoded" and content[:1] != b"{":  # curl -d sends JSON as this too
        if content.count(b"&") >= MAX_FIELDS or not content.isascii():
            raise ApiError(400, f"the body is not a URL-encoded form with at most {MAX_FIELDS} fields")
        return await _from_form(request, service, picture_name, most_pictures)

    def work() -> Body:
        reading = service.uploads.content
        return _from_json(content, picture_name, most_pictures, json_bytes=json_bytes, read_file=reading)

    return await _parse(content, work)


def content_kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_model(request: Request, model: type[M], *, service: JobService) -> M:
    content = await request.body()
    if len(content) > service.limits.json_bytes:
        raise _too_large(service.limits.json_bytes)
    return checked(model, await _parse(content, lambda: json_object(content)))


async def _parse(content: bytes, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in another thread if the body is large or names a file."""
    is_brief = len(content) <= _BRIEF_BYTES and b"file_id" not in content
    return work() if is_brief else await asyncio.to_thread(work)


async def read_job_file(request: Request, *, service: JobService) -> Body:
    kind = content_kind(request)
    if kind == "multipart/form-data":
        return await read_file(request, service=service)
    return Body({}, [await request.body()], f"jobs{JOB_FILE_KINDS.get(kind, '')}")


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


def documented(model: type[BaseModel], *pictures: str) -> dict[str, Any]:
    """OpenAPI description of a body that the route reads itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)  # front.py adds them to the components
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if pictures:
        files = {name: {"type": "string", "format": "binary"} for name in pictures}
        content["multipart/form-data"] = {"schema": {**schema, "properties": schema["properties"] | files}}
    return {"requestBody": {"required": True, "content": content}, "parameters": [IDEMPOTENCY_KEY]}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI description of a small JSON body that `read_model` reads."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def sends(*kinds: str) -> dict[str, Any]:
    """For the decorator of a route: the content types of what it sends, if that is no JSON."""
    return {"response_class": Response, "responses": {200: {"content": {kind: {} for kind in kinds}}}}


async def _from_form(
    request: Request, service: JobService, file_name: str, most: int = 1, *, takes_uploads: bool = False
) -> Body:
    """The fields of a form, all strings, its files, and files for arguments if it may have these."""
    charset = _CHARSET.search(request.headers.get("content-type", ""))
    if charset is not None and charset[1].lower() not in ("utf-8", "us-ascii"):
        raise ApiError(400, f"charset = {charset[1][:80]!r}: send the form in UTF-8")
    values: dict[str, Any] = {}
    uploads: dict[str, list[Upload]] = {}
    files: list[bytes] = []
    filename, masks = "", list[bytes]()
    async with request.form(
        max_files=most + MAX_UPLOADS, max_fields=MAX_FIELDS, max_part_size=service.limits.json_bytes
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
            elif name == "mask" and most > 1:
                masks.append(await value.read())
            elif _ITEM.sub("", name) != file_name:
                raise ApiError(
                    400, f"{name[:80]!r}: not a file of this form; send {file_name}", param=file_name
                )
            else:
                files.append(await value.read())
                filename = value.filename or ""
    pictures = {file_name: files, **({"mask": masks} if most > 1 else {})}
    for param, end in itertools.product(pictures, _REFERENCES[file_name in (*PARTS, "file") :]):
        if (given := values.pop(f"{param}{end}", None)) is not None:
            named = {"file_id": given} if end == "[file_id]" else given
            reading = service.uploads.content
            pictures[param].append(await asyncio.to_thread(picture_content, named, reading, param=param))
    _check_number(files, most, file_name)
    _check_number(masks, 1, "mask")
    check_size(values, service.limits.json_bytes)
    return Body(values, files, filename, uploads, masks[0] if masks else None)


def _from_json(
    content: bytes, picture_name: str, most: int, *, json_bytes: int, read_file: Callable[[str], bytes]
) -> Body:
    if len(content) > json_bytes and not any(start in content for start in _PICTURE_STARTS):
        raise _too_large(json_bytes)
    values = json_object(content)
    is_talk = picture_name in PARTS
    given, earlier = _of_parts(values, picture_name) if is_talk else (values.pop(picture_name, None), None)
    if most > 1 and not is_talk and given is not None and values.get("images") is not None:
        raise bad("images", f"give {picture_name} or images, not both")
    given = values.pop("images", None) if given is None and most > 1 else given
    if not isinstance(given, list) or most == 1:
        given = [] if given is None else [given]
    _check_number(given, most, picture_name)
    mask = values.pop("mask", None) if most > 1 else None
    tools = values.get("tools") if picture_name == INPUT else None
    for tool in tools if isinstance(tools, list) else ():
        mask = tool.pop("input_image_mask", mask) if isinstance(tool, dict) else mask
    check_size(values, json_bytes)
    pictures = [picture_content(each, read_file, param=picture_name) for each in given]
    read_mask = None if mask is None else picture_content(mask, read_file, param="mask")
    return Body(values, pictures, mask=read_mask, earlier=earlier)


def _check_number(pictures: Sequence[Any], most: int, name: str) -> None:
    if len(pictures) > most:
        raise ApiError(400, f"{name}: {len(pictures)} files; at most {most} can be given", param=name)


def check_size(values: Mapping[str, Any], json_bytes: int) -> None:
    """Raises: ApiError"""
    if len(json.dumps(values)) > json_bytes:
        raise _too_large(json_bytes)


def _too_large(json_bytes: int) -> ApiError:
    return ApiError(413, f"the request exceeds {json_bytes:,} bytes without its picture")


def _of_parts(values: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Take the pictures out of a conversation: the user's last, and the one before if these are none."""
    given, last, before = values.get(name), list[Any](), None
    earlier: Any = None
    for message in (each for each in (given if isinstance(given, list) else ()) if isinstance(each, dict)):
        if message.get("type") == "image_generation_call":
            result = message.pop("result", None)
            earlier = f"data:image/png;base64,{result}" if isinstance(result, str) else None
        parts, pictures = message.get("content"), []
        if isinstance(parts, list):
            kinds = [part.get("type", "text") if isinstance(part, dict) else part for part in parts]
            pictures = [part for part, kind in zip(parts, kinds, strict=True) if kind in _PICTURE_PARTS]
            message["content"] = [part for part in parts if part not in pictures]
            other = [kind for kind in kinds if kind not in (*_PICTURE_PARTS, *_TEXT_PARTS)]
            if name == INPUT and other:
                raise bad(name, f"{str(other[0])[:80]!r}: not a kind of part; give input_text or input_image")
        if message.get("role") == "user":
            last, before = pictures, earlier
        earlier = pictures[-1] if pictures else earlier
    return last, None if last else before
