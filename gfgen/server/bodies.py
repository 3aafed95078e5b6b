"""Reading what a request brings: JSON, forms with a picture, and its Idempotency-Key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.datastructures import UploadFile

from gfgen.server.asking import data_url_content
from gfgen.server.desk import Desk
from gfgen.server.problems import ApiError
from gfgen.server.store import RequestKey

MAX_FIELDS = 64
MAX_KEY_CHARS = 255
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_NUMERIC = ("deadline", "timeout", "seconds")
"""Fields that are a number or a text: in a form all are texts."""
_PICTURE_URL = ("input_reference[image_url]", "input_reference[image_url][url]")


@dataclass(frozen=True, slots=True)
class Body:
    """The fields of a request, the picture that came with it, and a hash of all of it."""

    values: Mapping[str, Any]
    picture: bytes | None
    fingerprint: str


async def read_body(request: Request, *, desk: Desk, picture_name: str = "input_reference") -> Body:
    """A request's fields, from JSON or from a form; raises ApiError for anything else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded":  # what curl -d says, whatever it sends
        raise ApiError(400, "send JSON with -H 'Content-Type: application/json', or a form with -F")
    if kind == "multipart/form-data":
        return await _from_form(request, desk, picture_name)
    if kind not in ("application/json", ""):
        raise ApiError(400, f"{kind[:80]}: send application/json or multipart/form-data")
    values = await read_json(request, most_bytes=desk.bounds.body_bytes)
    fingerprint = _fingerprint(request, values, b"")
    picture = _picture_in(values, picture_name)
    return Body(values, picture, fingerprint)


async def read_json(request: Request, *, most_bytes: int) -> dict[str, Any]:
    """The object that a request's body is."""
    content = await _content(request, most_bytes)
    try:
        value = json.loads(content, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, 'the body is no JSON object; send one like {"prompt": "a red fox"}')
    return value


async def read_job_file(request: Request, *, desk: Desk) -> tuple[bytes, str]:
    """A job file, as the body or as the file of a form, and its hash."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        body = await _from_form(request, desk, "file")
        if body.picture is None:
            raise ApiError(400, "file: missing", param="file")
        return body.picture, body.fingerprint
    content = await _content(request, desk.bounds.body_bytes)
    return content, _fingerprint(request, {}, content)


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


async def _from_form(request: Request, desk: Desk, file_name: str) -> Body:
    """The fields of a form; all texts, and one file."""
    values: dict[str, Any] = {}
    picture: bytes | None = None
    async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=desk.bounds.json_bytes) as form:
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
    fingerprint = _fingerprint(request, values, picture or b"")
    for name in _PICTURE_URL:
        if name in values:
            picture = await asyncio.to_thread(data_url_content, values.pop(name))
    return Body(values, picture, fingerprint)


def _picture_in(values: dict[str, Any], name: str) -> bytes | None:
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
    return data_url_content(given)


def _fingerprint(request: Request, values: Mapping[str, Any], content: bytes) -> str:
    text = json.dumps([request.url.path, str(request.url.query), values], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace") + b"\0" + content).hexdigest()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
