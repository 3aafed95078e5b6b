"""/v1/batches and POST /v1/jobs: job files over HTTP, and single jobs with the same fields."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

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
    read_body,
    read_job_file,
    request_key,
)
from gfgen.server.http.routes_files import create_of_upload, upload_fields, uploaded_batch
from gfgen.server.http.routes_jobs import After, JobId, Limit, Service
from gfgen.server.http.routes_jobs import jobs as jobs_router
from gfgen.server.jobs.job_requests import (
    RequestedJob,
    admitted_of_file,
    batch_jobs,
    new_id,
    plain_job,
    taken_uploads,
)
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import schemas, server_schemas
from gfgen.server.protocol.link import Admit
from gfgen.server.protocol.problems import ApiError, checked, responses
from gfgen.server.store import BatchRow, Ended, Store, StoredJob

router = APIRouter(prefix="/v1/batches", tags=["batches"])
ROUTERS = (router,)

_TEXT = {"schema": {"type": "string", "description": "A job file."}}
_JOB_FILES = dict.fromkeys(JOB_FILE_KINDS, _TEXT)
_CREATE = responses(400, 404, 413, 422, 429, 503, 507)
_BODY: dict[str, Any] = {
    "parameters": [IDEMPOTENCY_KEY],
    "requestBody": {
        "required": True,
        "content": {
            **_JOB_FILES,
            "application/json": {"schema": server_schemas.BatchRequest.model_json_schema()},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            },
        },
    },
}


_JOB_BODY = documented(schemas.JobRequest, picture="image")
_JOB_BODY["requestBody"]["content"] |= _JOB_FILES


@jobs_router.post(
    "",
    response_model=schemas.Job | server_schemas.Batch,
    responses=_CREATE,
    openapi_extra=_JOB_BODY,
    summary="Make a picture or a video",
)
async def create_job(request: Request, service: Service) -> Response:
    """Accepts one job with the fields of the job file and answers at once. Fields for several jobs (`vary`,
    `seeds`, `num_images`), a JSON array and a job file make a batch, as POST /v1/batches does."""
    kind = content_kind(request)
    is_array = kind != "multipart/form-data" and (await request.body()).lstrip()[:1] == b"["
    if is_array or kind in JOB_FILE_KINDS:
        return await _accept(request, service, await read_job_file(request, service=service))
    body = await read_body(request, service=service, picture_name="image", takes_uploads=True)
    values, uploads = taken_uploads(body.values, body.uploads)
    if any(values.get(name) for name in VARIATION_FIELDS):
        if body.file is not None or uploads:
            raise ApiError(400, "a job with files is one job; send one request for each")
        line = json.dumps({name: value_of(name, value) for name, value in values.items()})
        return await _accept(request, service, Body({}, line.encode()))
    values = {name: value for name, value in values.items() if name not in VARIATION_FIELDS}
    asked = checked(schemas.JobRequest, values)
    requested = plain_job(asked, uploads=uploads, models=service.ready_models())
    (job_id,) = await service.take(
        [replace(requested, picture=body.file)], key=await request_key(request, body)
    )
    record = service.job(job_id)
    assert record is not None
    return record.job().response()


@router.post(
    "",
    response_model=server_schemas.Batch,
    responses=_CREATE,
    openapi_extra=_BODY,
    summary="Run a job file",
)
async def create_batch(
    request: Request,
    service: Service,
    skip_invalid: Annotated[
        bool,
        Query(description="Accept the valid jobs of a file with mistakes; `skipped` lists the others."),
    ] = False,
) -> Response:
    """Accepts all jobs of a file or none, with the messages of `gfgen run`. The file is JSON lines, a JSON
    array, CSV or, as text/plain, one prompt per line. With `skip_invalid` the server accepts the jobs that
    the models and this machine can run. `image` and `output` name files of the client: `image`
    is refused, and the server chooses the output's name. JSON with `input_file_id` makes a batch of
    OpenAI's requests in an uploaded file."""
    service.check_ready()
    file = await read_job_file(request, service=service)
    if (values := uploaded_batch(file.file or b"", most_bytes=service.limits.json_bytes)) is not None:
        key = await request_key(request, file)
        batch_id = await create_of_upload(service, values, batch_id=new_id("batch"), key=key)
        return _answer(service, service.batch(batch_id), batch_id)
    return await _accept(request, service, file, skip_invalid=skip_invalid)


async def _accept(
    request: Request, service: JobService, file: Body, *, skip_invalid: bool = False
) -> Response:
    models, batch_id = service.ready_models(), new_id("batch")
    key = await request_key(request, file)
    skipped: list[Problem] = []
    try:
        requested, problems = await asyncio.to_thread(
            batch_jobs,
            file.file or b"",
            suffix=file.suffix,
            max_jobs=service.limits.open_jobs,
            batch_id=batch_id,
            skip_invalid=skip_invalid,
            models=models,
        )

        def admitted(admit: Admit) -> list[tuple[RequestedJob, AdmittedJob]]:
            jobs, refused = admitted_of_file(requested, admit)
            skipped.extend(sorted((*problems, *refused), key=lambda problem: problem.line or 0))
            if skipped and not (skip_invalid and jobs):
                raise JobFileError("the job file", tuple(skipped))
            return jobs

        taken_id = await service.take_batch(len(requested), admitted, batch_id=batch_id, key=key)
    except JobFileError as error:
        raise ApiError(400, str(error), code="invalid_job_file", param=error.problems[0].field) from None
    lines = listed(skipped, limit=len(skipped)) if taken_id == batch_id else None
    return _answer(service, service.batch(taken_id), taken_id, skipped=lines)


@router.get(
    "",
    responses=responses(400),
    summary="List batches",
    response_model=server_schemas.BatchList,
)
async def list_batches(service: Service, limit: Limit = 20, after: After = None) -> Response:
    if after is not None and service.batch(after) is None:
        raise ApiError(400, f"after: there is no batch {after!r}", param="after")
    rows = service.store.batches(limit=limit + 1, after=after, owner=service.owner)
    return server_schemas.BatchList(**schemas.page([_batch(service, row) for row in rows], limit)).response()


@router.get(
    "/{batch_id}",
    response_model=server_schemas.Batch,
    responses=responses(400, 404),
    summary="Get a batch",
)
async def get_batch(service: Service, batch_id: JobId) -> Response:
    return _answer(service, service.batch(batch_id), batch_id)


@router.get(
    "/{batch_id}/manifest",
    response_class=Response,
    responses={
        **responses(400, 404),
        200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}},
    },
    summary="Get the manifest",
)
async def get_manifest(service: Service, batch_id: JobId) -> Response:
    """One line per ended job, as `gfgen run` writes it: `id` is that of the job file, `job` the server's id,
    `file` the path of the result."""
    if service.batch(batch_id) is None:
        raise _no_batch(batch_id)
    content = await asyncio.to_thread(manifest, service.store, batch_id)
    return Response(content, media_type="application/jsonl")


@router.post(
    "/{batch_id}/cancel",
    response_model=server_schemas.Batch,
    responses=responses(400, 404, 503, 507),
    summary="Cancel the open jobs of a batch",
)
async def cancel_batch(service: Service, batch_id: JobId) -> Response:
    if service.batch(batch_id) is None:
        raise _no_batch(batch_id)
    service.check_ready()
    open_ids = [r.facts.id for r in service.mirror.records.values() if r.facts.batch_id == batch_id]
    if open_ids:
        await service.store.cancel_batch(batch_id)
        await service.cancel(open_ids)
    return _answer(service, service.batch(batch_id), batch_id)


def _answer(
    service: JobService, row: BatchRow | None, batch_id: str, *, skipped: list[str] | None = None
) -> Response:
    if row is None:
        raise _no_batch(batch_id)
    return _batch(service, row, skipped=skipped).response()


def _batch(service: JobService, row: BatchRow, *, skipped: list[str] | None = None) -> server_schemas.Batch:
    is_over = row.completed_at is not None
    records = [] if is_over else [r for r in service.mirror.records.values() if r.facts.batch_id == row.id]
    made_of = service.uploads.batch(row.id)
    num_refused = 0 if made_of is None else len(made_of.failures)
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
            failed=row.failed + num_refused,
            cancelled=row.cancelled,
        ),
        predicted_completion_at=max(known_ends) if ends and len(known_ends) == len(ends) else None,
        num_late=row.missed + sum(r.will_meet_deadline is False for r in records),
        manifest_url=f"/v1/batches/{row.id}/manifest",
        skipped=skipped,
        **({} if made_of is None else upload_fields(row, made_of)),
    )


def _no_batch(batch_id: str) -> ApiError:
    return ApiError(404, f"there is no batch {batch_id}", param="batch_id", code="batch_not_found")


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
