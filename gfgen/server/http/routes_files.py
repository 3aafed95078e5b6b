"""/v1/files, and batches of OpenAI's requests: a file of requests in, files of results and errors out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from gfgen.runtime.core.admission import AdmittedJob
from gfgen.server.http.bodies import read_file
from gfgen.server.http.routes_images import chat_completion, image_content, images
from gfgen.server.http.routes_jobs import JobId, Service
from gfgen.server.jobs.files import no_file
from gfgen.server.jobs.job_requests import RequestedJob, admitted, batch_lines, line_failure
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import picture_schemas, schemas, server_schemas
from gfgen.server.protocol.link import Admit
from gfgen.server.protocol.problems import ApiError, bad, checked, responses
from gfgen.server.store import BatchRow, RequestKey, StoredJob

router = APIRouter(prefix="/v1/files", tags=["batches"])
ROUTERS = (router,)

_OUTPUT, _ERRORS = "file-output_", "file-errors_"
"""Prefixes of the ids of results; the rest is the batch's id."""
_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}},
}


@router.post(
    "",
    response_model=server_schemas.UploadedFile,
    responses=responses(400, 413, 507),
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
    summary="Upload a file of requests",
)
async def create_file(request: Request, service: Service) -> Response:
    """A file for POST /v1/batches: JSON lines of `custom_id`, `method`, `url` and `body`."""
    body = await read_file(request, service=service)
    if body.values.get("purpose", "batch") != "batch":
        raise bad("purpose", "batch is accepted")
    name, content = body.filename or "requests.jsonl", body.file or b""
    added = await asyncio.to_thread(service.uploads.add, content, filename=name, now=service.now())
    return added.response()


@router.get("", response_model=server_schemas.UploadedFiles, summary="List uploaded files")
async def list_files(service: Service) -> Response:
    return server_schemas.UploadedFiles(data=await asyncio.to_thread(service.uploads.all)).response()


@router.get(
    "/{file_id}",
    response_model=server_schemas.UploadedFile,
    responses=responses(400, 404),
    summary="Get a file",
)
async def get_file(service: Service, file_id: JobId) -> Response:
    if (batch_id := _batch_of(file_id)) is not None:
        row, _ = _ended_batch(service, batch_id, file_id)
        at = int(row.completed_at or 0)
        return server_schemas.UploadedFile(
            id=file_id, bytes=0, created_at=at, filename=f"{file_id}.jsonl", purpose="batch_output"
        ).response()
    return (await asyncio.to_thread(service.uploads.find, file_id)).response()


@router.get(
    "/{file_id}/content",
    response_class=Response,
    responses={
        **responses(400, 404),
        200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}},
    },
    summary="Get the content of a file",
)
async def get_file_content(service: Service, file_id: JobId) -> Response:
    """An uploaded file, or the results or errors of a batch whose jobs have all ended."""
    kind = "application/jsonl"
    if (batch_id := _batch_of(file_id)) is None:
        return Response(await asyncio.to_thread(service.uploads.content, file_id), media_type=kind)
    _, made_of = _ended_batch(service, batch_id, file_id)
    results = _results(service, batch_id, made_of, of_errors=file_id.startswith(_ERRORS))
    return StreamingResponse(results, media_type=kind)


@router.delete(
    "/{file_id}",
    response_model=server_schemas.FileDeleted,
    responses=responses(400, 404),
    summary="Delete an uploaded file",
)
async def delete_file(service: Service, file_id: JobId) -> Response:
    await asyncio.to_thread(service.uploads.remove, file_id)
    return server_schemas.FileDeleted(id=file_id).response()


def uploaded_batch(content: bytes, *, most_bytes: int) -> dict[str, Any] | None:
    """The fields of a request that names an uploaded file; None if the content is a job file."""
    if len(content) > most_bytes or b"input_file_id" not in content:
        return None
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and "input_file_id" in values else None


async def create_of_upload(
    service: JobService, values: dict[str, Any], *, batch_id: str, key: RequestKey | None
) -> str:
    """Accept the valid requests of an uploaded file; returns the batch's id.

    Raises: ApiError if no request is valid.
    """
    asked_for = checked(server_schemas.BatchRequest, values)
    content = await asyncio.to_thread(service.uploads.content, asked_for.input_file_id)
    lines, failures = await asyncio.to_thread(
        batch_lines,
        content,
        endpoint=asked_for.endpoint,
        batch_id=batch_id,
        models=service.ready_models(),
        max_lines=service.limits.open_jobs,
        is_strict=service.api.strict,
    )

    def all_admitted(admit: Admit) -> list[tuple[RequestedJob, AdmittedJob]]:
        jobs: list[tuple[RequestedJob, AdmittedJob]] = []
        for line in lines:
            try:
                jobs += admitted(line, admit)
            except ApiError as error:
                number, custom_id = line[0].spec.line or 0, line[0].custom_id
                failures.append(line_failure(error, line=number, custom_id=custom_id))
        if not jobs:
            texts = [f"line {failure.line}: {failure.message}" for failure in failures[:5]]
            raise ApiError(400, "; ".join(texts) or "no requests in the file", param="input_file_id")
        service.uploads.note_batch(batch_id, server_schemas.BatchInput(request=asked_for, failures=failures))
        return jobs

    try:
        taken_id = await service.take_batch(sum(map(len, lines)), all_admitted, batch_id=batch_id, key=key)
    except Exception:  # not CancelledError: the jobs may have been accepted all the same
        service.uploads.forget_batch(batch_id)
        raise
    if taken_id != batch_id:  # created by an earlier request
        service.uploads.forget_batch(batch_id)
    return taken_id


def upload_fields(row: BatchRow, made_of: server_schemas.BatchInput) -> dict[str, Any]:
    has_ended, num_failed = row.completed_at is not None, row.failed + row.cancelled + len(made_of.failures)
    return {
        **made_of.request.model_dump(),
        "output_file_id": f"{_OUTPUT}{row.id}" if has_ended and row.completed else None,
        "error_file_id": f"{_ERRORS}{row.id}" if has_ended and num_failed else None,
    }


def _batch_of(file_id: str) -> str | None:
    for prefix in (_OUTPUT, _ERRORS):
        if file_id.startswith(prefix):
            return file_id.removeprefix(prefix)
    return None


def _ended_batch(
    service: JobService, batch_id: str, file_id: str
) -> tuple[BatchRow, server_schemas.BatchInput]:
    row, made_of = service.batch(batch_id), service.uploads.batch(batch_id)
    if row is None or made_of is None or row.completed_at is None:
        raise no_file(file_id)
    return row, made_of


async def _results(
    service: JobService, batch_id: str, made_of: server_schemas.BatchInput, *, of_errors: bool
) -> AsyncGenerator[bytes]:
    """Lines of results, or of errors; a request with several pictures is one line."""
    requests: dict[str, list[StoredJob]] = {}
    for stored, _ in await asyncio.to_thread(service.store.manifest, batch_id):
        requests.setdefault(stored.facts.custom_id or stored.facts.id, []).append(stored)
    for custom_id, jobs in requests.items():
        line = await _result(service, custom_id, jobs, made_of.request.endpoint)
        if of_errors == (line.error is not None):
            yield (await asyncio.to_thread(line.model_dump_json)).encode() + b"\n"
    for failure in made_of.failures if of_errors else ():
        error = schemas.JobFailure(code=failure.code or "invalid_request", message=failure.message)
        name = f"{batch_id}_line_{failure.line}"
        yield (
            server_schemas.LineResult(id=name, custom_id=failure.custom_id, error=error)
            .model_dump_json()
            .encode()
            + b"\n"
        )


async def _result(
    service: JobService, custom_id: str, jobs: list[StoredJob], endpoint: schemas.BatchEndpoint
) -> server_schemas.LineResult:
    name = f"batch_req_{jobs[0].facts.id}"
    records = [service.served(stored).job() for stored in jobs]
    failed = next((job for job in records if job.status != "completed"), None)
    if failed is not None:
        error = failed.error or schemas.JobFailure(code=failed.status, message=failed.status)
        return server_schemas.LineResult(id=name, custom_id=custom_id, error=error)
    try:
        body: schemas.Video | picture_schemas.ChatCompletion | picture_schemas.Images
        if endpoint == "/v1/videos":
            body = schemas.Video.of(records[0])
        elif endpoint == "/v1/chat/completions":
            body = await chat_completion(service, jobs)
        else:
            body = images(service, jobs, [await image_content(service, stored) for stored in jobs])
    except ApiError as gone:
        error = schemas.JobFailure(code=gone.code or "file_gone", message=gone.message)
        return server_schemas.LineResult(id=name, custom_id=custom_id, error=error)
    return server_schemas.LineResult(
        id=name, custom_id=custom_id, response=server_schemas.LineResponse(request_id=name, body=body)
    )
