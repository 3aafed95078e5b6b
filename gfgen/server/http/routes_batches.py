"""/v1/batches and POST /v1/jobs: job files over HTTP, and single jobs with the same fields.

Also /v1/files, and batches of OpenAI's requests: a file of requests in, files of results and errors out.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from gfgen.errors import JobFileError, Problem, listed
from gfgen.job.shared import VARIATION_FIELDS, value_of
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import OutcomeStatus
from gfgen.runtime.files.manifest import SCHEMA_VERSION, ManifestLine
from gfgen.server.http.bodies import (
    IDEMPOTENCY_KEY,
    JOB_FILE_KINDS,
    Body,
    content_kind,
    documented,
    json_body,
    read_body,
    read_file,
    read_job_file,
    request_key,
    sends,
)
from gfgen.server.http.routes_images import base64_of, chat_completion, images
from gfgen.server.http.routes_jobs import After, JobId, Limit, Service
from gfgen.server.http.routes_jobs import jobs as jobs_router
from gfgen.server.jobs import job_requests
from gfgen.server.jobs.files import no_file
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import picture_schemas, schemas, server_schemas
from gfgen.server.protocol.link import Admit
from gfgen.server.protocol.problems import ApiError, bad, checked
from gfgen.server.shown.served_job import ServedJob
from gfgen.server.store import BatchRow, Ended, RequestKey, Store, StoredJob

router = APIRouter(prefix="/v1/batches", tags=["batches"])
files = APIRouter(prefix="/v1/files", tags=["batches"])
ROUTERS = (router, files)

_TEXT = {"schema": {"type": "string", "description": "A job file."}}
_JOB_FILES = dict.fromkeys(JOB_FILE_KINDS, _TEXT)
_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": {"type": "string", "format": "binary"}},
}
_BODY = json_body(server_schemas.BatchRequest) | {"parameters": [IDEMPOTENCY_KEY]}
_BODY["requestBody"]["content"] |= {**_JOB_FILES, "multipart/form-data": {"schema": _FORM}}
_JOB_BODY = documented(schemas.JobRequest, "image")
_JOB_BODY["requestBody"]["content"] |= _JOB_FILES


@jobs_router.post("", openapi_extra=_JOB_BODY, summary="Make a picture or a video")
async def create_job(request: Request, service: Service) -> schemas.Job | server_schemas.Batch:
    """Accepts one job with the fields of the job file and answers at once. Fields for several jobs (`vary`,
    `seeds`, `num_images`), a JSON array and a job file make a batch, as POST /v1/batches does."""
    kind = content_kind(request)
    is_array = kind != "multipart/form-data" and (await request.body()).lstrip()[:1] == b"["
    if is_array or kind in JOB_FILE_KINDS:
        return await _accept(request, service, await read_job_file(request, service=service))
    body = await read_body(request, service=service, picture_name="image", takes_uploads=True)
    values, uploads = await asyncio.to_thread(
        job_requests.taken_uploads, body.values, body.uploads, service.uploads.content
    )
    if any(values.get(name) for name in VARIATION_FIELDS):
        if body.file is not None or uploads:
            raise ApiError(400, "a job with files is one job; send one request for each")
        line = json.dumps({name: value_of(name, value) for name, value in values.items()})
        return await _accept(request, service, Body({}, [line.encode()]))
    values = {name: value for name, value in values.items() if name not in VARIATION_FIELDS}
    asked = checked(schemas.JobRequest, values)
    requested = job_requests.plain_job(asked, uploads=uploads, models=service.ready_models())
    (job_id,) = await service.take(
        [replace(requested, picture=body.file)], key=await request_key(request, body)
    )
    record = service.job(job_id)
    assert record is not None
    return record.job()


@router.post("", openapi_extra=_BODY, summary="Run a job file")
async def create_batch(
    request: Request,
    service: Service,
    skip_invalid: Annotated[
        bool, Query(description="Accept the valid jobs of a file with mistakes; `skipped` lists the others.")
    ] = False,
) -> server_schemas.Batch:
    """Accepts all jobs of a file or none, with the messages of `gfgen run`. The file is JSON lines, a JSON
    array, CSV or, as text/plain, one prompt per line. With `skip_invalid` the server accepts the jobs that
    the models and this machine can run. `image` and `output` name files of the client: `image`
    is refused, and the server chooses the output's name. JSON with `input_file_id` makes a batch of
    OpenAI's requests in an uploaded file."""
    service.check_ready()
    file = await read_job_file(request, service=service)
    if (values := uploaded_batch(file.file or b"", most_bytes=service.limits.json_bytes)) is not None:
        key = await request_key(request, file)
        batch_id = await create_of_upload(service, values, batch_id=job_requests.new_id("batch"), key=key)
        return _answer(service, batch_id)
    return await _accept(request, service, file, skip_invalid=skip_invalid)


async def _accept(
    request: Request, service: JobService, file: Body, *, skip_invalid: bool = False
) -> server_schemas.Batch:
    models, batch_id = service.ready_models(), job_requests.new_id("batch")
    key = await request_key(request, file)
    skipped: list[Problem] = []
    try:
        requested, problems = await asyncio.to_thread(
            job_requests.batch_jobs,
            file.file or b"",
            suffix=file.suffix,
            max_jobs=service.limits.open_jobs,
            batch_id=batch_id,
            skip_invalid=skip_invalid,
            models=models,
        )

        def admitted_lines(admit: Admit) -> list[tuple[job_requests.RequestedJob, AdmittedJob]]:
            jobs, refused = job_requests.admitted_of_file(requested, admit)
            skipped.extend(sorted((*problems, *refused), key=lambda problem: problem.line or 0))
            if skipped and not (skip_invalid and jobs):
                raise JobFileError("the job file", tuple(skipped))
            return jobs

        taken_id = await service.take_batch(len(requested), admitted_lines, batch_id=batch_id, key=key)
    except JobFileError as error:
        raise ApiError(400, str(error), code="invalid_job_file", param=error.problems[0].field) from None
    lines = listed(skipped, limit=len(skipped)) if taken_id == batch_id else None
    return _answer(service, taken_id, skipped=lines)


@router.get("", summary="List batches")
async def list_batches(service: Service, limit: Limit = 20, after: After = None) -> server_schemas.BatchList:
    if after is not None and service.batch(after) is None:
        raise ApiError(400, f"after: there is no batch {after!r}", param="after")
    rows = service.store.batches(limit=limit + 1, after=after, owner=service.owner)
    return server_schemas.BatchList.of([_batch(service, row) for row in rows], limit)


@router.get("/{batch_id}", summary="Get a batch")
async def get_batch(service: Service, batch_id: JobId) -> server_schemas.Batch:
    return _answer(service, batch_id)


@router.get("/{batch_id}/manifest", **sends("application/jsonl"), summary="Get the manifest")
async def get_manifest(service: Service, batch_id: JobId) -> Response:
    """One line per ended job, as `gfgen run` writes it: `id` is that of the job file, `job` the server's id,
    `file` the path of the result."""
    _found(service, batch_id)
    content = await asyncio.to_thread(manifest, service.store, batch_id)
    return Response(content, media_type="application/jsonl")


@router.post("/{batch_id}/cancel", summary="Cancel the open jobs of a batch")
async def cancel_batch(service: Service, batch_id: JobId) -> server_schemas.Batch:
    _found(service, batch_id)
    service.check_ready()
    open_ids = [r.facts.id for r in service.mirror.records.values() if r.facts.batch_id == batch_id]
    await service.cancel(open_ids, batch_id=batch_id)
    return _answer(service, batch_id)


def _found(service: JobService, batch_id: str) -> BatchRow:
    if (row := service.batch(batch_id)) is None:
        raise ApiError(404, f"there is no batch {batch_id}", param="batch_id", code="batch_not_found")
    return row


def _answer(service: JobService, batch_id: str, *, skipped: list[str] | None = None) -> server_schemas.Batch:
    return _batch(service, _found(service, batch_id), skipped=skipped)


def _batch(service: JobService, row: BatchRow, *, skipped: list[str] | None = None) -> server_schemas.Batch:
    is_over = row.completed_at is not None
    records = [] if is_over else [r for r in service.mirror.records.values() if r.facts.batch_id == row.id]
    made_of = service.uploads.batch(row.id)
    num_refused = 0 if made_of is None else len(made_of.failures)
    num_failed = row.failed + num_refused
    ends = [r.predicted_end_at for r in records]
    known_ends = [end for end in ends if end is not None]
    return server_schemas.Batch(
        id=row.id,
        status=("cancelled" if row.is_cancelled else "completed") if is_over else "in_progress",
        created_at=int(row.created_at),
        completed_at=None if row.completed_at is None else int(row.completed_at),
        request_counts=server_schemas.RequestCounts(
            total=row.total + num_refused,
            completed=row.completed,
            failed=num_failed,
            cancelled=row.cancelled,
        ),
        predicted_completion_at=max(known_ends) if ends and len(known_ends) == len(ends) else None,
        num_late=row.missed + sum(r.will_meet_deadline is False for r in records),
        manifest_url=f"/v1/batches/{row.id}/manifest",
        skipped=skipped,
        **({} if made_of is None else made_of.request.model_dump()),
        output_file_id=f"{_OUTPUT}{row.id}" if is_over and made_of and row.completed else None,
        error_file_id=f"{_ERRORS}{row.id}" if is_over and made_of and num_failed + row.cancelled else None,
    )


NO_DETAILS = "the run's details of this job are lost"
_STATUS: dict[Ended, OutcomeStatus] = {"completed": "done", "failed": "failed", "cancelled": "cancelled"}


def manifest(store: Store, batch_id: str) -> bytes:
    """The manifest as JSON lines, in the order of the job file."""
    lines = [_line(stored, entry) for stored, entry in store.manifest(batch_id)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8", "replace")


def _line(stored: StoredJob, entry: ManifestLine | None) -> ManifestLine:
    """The run's entry, or what is known without it; `file` becomes a URL path."""
    facts = stored.facts
    entry = _without_run(stored) if entry is None else entry
    file = f"/v1/jobs/{facts.id}/content" if entry["status"] == "done" else None
    return {**entry, "id": facts.custom_id, "job": facts.id, "file": file}


def _without_run(stored: StoredJob) -> ManifestLine:
    """The entry of a job without an outcome from the run, which was killed or never started the job."""
    facts, ending = stored.facts, stored.ending
    assert ending is not None
    return {
        "version": SCHEMA_VERSION,
        "status": _STATUS[ending.status],
        "size_bytes": ending.size_bytes,
        **{name: getattr(facts, name) for name in ("prompt", "model", "tag", "priority", "seed", "steps")},
        "shape": None,
        "timings": None,
        "met_deadline": ending.met_deadline,
        "error": ending.error_message,
        "warnings": [NO_DETAILS],
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ending.completed_at)),
    }


_OUTPUT, _ERRORS = "file-output_", "file-errors_"
"""Prefixes of the ids of results; the rest is the batch's id."""
_PURPOSES = get_args(server_schemas.Purpose)
_UPLOAD: dict[str, Any] = {**_FORM, "properties": {**_FORM["properties"], "purpose": {"enum": _PURPOSES}}}


_FILE_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}}


@files.post("", openapi_extra=_FILE_BODY, summary="Upload a file of requests, or a picture")
async def create_file(request: Request, service: Service) -> server_schemas.UploadedFile:
    """A file for POST /v1/batches (JSON lines of `custom_id`, `method`, `url` and `body`), or for the other
    purposes a picture, to which requests refer by its `file_id`."""
    body = await read_file(request, service=service)
    purpose = body.values.get("purpose", "batch")
    if purpose not in _PURPOSES:
        raise bad("purpose", f"{', '.join(_PURPOSES)} are accepted")
    name, content = body.filename or "requests.jsonl", body.file or b""
    add = partial(service.uploads.add, filename=name, now=service.now(), purpose=purpose)
    return await asyncio.to_thread(add, content)


@files.get("", summary="List uploaded files")
async def list_files(service: Service) -> server_schemas.UploadedFiles:
    return server_schemas.UploadedFiles(data=await asyncio.to_thread(service.uploads.all))


@files.get("/{file_id}", summary="Get a file")
async def get_file(service: Service, file_id: JobId) -> server_schemas.UploadedFile:
    if (batch_id := _batch_of(file_id)) is not None:
        row, _ = _ended_batch(service, batch_id, file_id)
        at = int(row.completed_at or 0)
        return server_schemas.UploadedFile(
            id=file_id, bytes=0, created_at=at, filename=f"{file_id}.jsonl", purpose="batch_output"
        )
    return await asyncio.to_thread(service.uploads.find, file_id)


_CONTENT = sends("application/jsonl", "application/octet-stream")


@files.get("/{file_id}/content", **_CONTENT, summary="Get the content of a file")
async def get_file_content(service: Service, file_id: JobId) -> Response:
    """An uploaded file, or the results or errors of a batch whose jobs have all ended."""
    kind = "application/jsonl"
    if (batch_id := _batch_of(file_id)) is None:
        file = await asyncio.to_thread(service.uploads.find, file_id)
        kind = kind if file.purpose == "batch" else "application/octet-stream"
        return Response(await asyncio.to_thread(service.uploads.content, file_id), media_type=kind)
    _, made_of = _ended_batch(service, batch_id, file_id)
    results = _results(service, batch_id, made_of, of_errors=file_id.startswith(_ERRORS))
    return StreamingResponse(results, media_type=kind)


@files.delete("/{file_id}", summary="Delete an uploaded file")
async def delete_file(service: Service, file_id: JobId) -> server_schemas.FileDeleted:
    await asyncio.to_thread(service.uploads.remove, file_id)
    return server_schemas.FileDeleted(id=file_id)


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
        job_requests.batch_lines,
        content,
        endpoint=asked_for.endpoint,
        batch_id=batch_id,
        models=service.ready_models(),
        max_lines=service.limits.open_jobs,
        is_strict=service.api.strict,
    )

    def all_admitted(admit: Admit) -> list[tuple[job_requests.RequestedJob, AdmittedJob]]:
        jobs: list[tuple[job_requests.RequestedJob, AdmittedJob]] = []
        for line in lines:
            try:
                jobs += job_requests.admitted(line, admit)
            except ApiError as error:
                number, custom_id = line[0].spec.line or 0, line[0].custom_id
                failures.append(job_requests.line_failure(error, line=number, custom_id=custom_id))
        if not jobs:
            texts = [f"line {failure.line}: {failure.message}" for failure in failures[:5]]
            raise ApiError(400, "; ".join(texts) or "no requests in the file", param="input_file_id")
        answers = {job.custom_id or "": dict(job.answer) for job, _ in jobs if job.answer}
        made_of = server_schemas.BatchInput(request=asked_for, failures=failures, answers=answers)
        service.uploads.note_batch(batch_id, made_of)
        return jobs

    try:
        taken_id = await service.take_batch(sum(map(len, lines)), all_admitted, batch_id=batch_id, key=key)
    except Exception:  # not CancelledError: the jobs may have been accepted all the same
        service.uploads.forget_batch(batch_id)
        raise
    if taken_id != batch_id:  # created by an earlier request
        service.uploads.forget_batch(batch_id)
    return taken_id


def _batch_of(file_id: str) -> str | None:
    return file_id.partition("_")[2] if file_id.startswith((_OUTPUT, _ERRORS)) else None


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
    requests: dict[str, list[ServedJob]] = {}
    for stored, _ in await asyncio.to_thread(service.store.manifest, batch_id):
        record = service.served(stored)
        requests.setdefault(record.facts.custom_id or record.facts.id, []).append(record)
    for custom_id, jobs in requests.items():
        asked_for = picture_schemas.ChatRequest.model_construct(**made_of.answers.get(custom_id, {}))
        line = await _result(service, custom_id, jobs, made_of.request.endpoint, asked_for)
        if of_errors == (line.error is not None):
            yield (await asyncio.to_thread(line.model_dump_json)).encode() + b"\n"
    for failure in made_of.failures if of_errors else ():
        error = schemas.JobFailure(code=failure.code or "invalid_request", message=failure.message)
        name = f"{batch_id}_line_{failure.line}"
        refused = server_schemas.LineResult(id=name, custom_id=failure.custom_id, error=error)
        yield refused.model_dump_json().encode() + b"\n"


async def _result(
    service: JobService,
    custom_id: str,
    records: list[ServedJob],
    endpoint: schemas.BatchEndpoint,
    asked_for: picture_schemas.PictureRequest,
) -> server_schemas.LineResult:
    name = f"batch_req_{records[0].facts.id}"
    failed = next((each.job() for each in records if each.status != "completed"), None)
    if failed is not None:
        error = failed.error or schemas.JobFailure(code=failed.status, message=failed.status)
        return server_schemas.LineResult(id=name, custom_id=custom_id, error=error)
    try:
        body: schemas.Video | picture_schemas.ChatCompletion | picture_schemas.Images
        if endpoint == "/v1/videos":
            body = schemas.Video.of(records[0].job())
        elif endpoint == "/v1/chat/completions":
            body = await chat_completion(service, records, asked_for)
        else:
            texts = [await base64_of(service, each, asked_for) for each in records]
            data = [
                picture_schemas.Image(b64_json=text, id=each.facts.id, seed=each.facts.seed)
                for text, each in zip(texts, records, strict=True)
            ]
            body = images(records, data, output_format=asked_for.output_format)
    except ApiError as gone:
        error = schemas.JobFailure(code=gone.code or "file_gone", message=gone.message)
        return server_schemas.LineResult(id=name, custom_id=custom_id, error=error)
    return server_schemas.LineResult(
        id=name, custom_id=custom_id, response=server_schemas.LineResponse(request_id=name, body=body)
    )
