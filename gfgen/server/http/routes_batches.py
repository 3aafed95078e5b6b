"""/v1/batches: job files over HTTP."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from gfgen.errors import JobFileError, Problem, listed
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.server.http.bodies import IDEMPOTENCY_KEY, read_job_file, request_key
from gfgen.server.http.routes_files import create_of_upload, upload_fields, uploaded_batch
from gfgen.server.http.routes_jobs import After, JobId, Limit, Service
from gfgen.server.jobs.job_requests import RequestedJob, admitted_of_file, batch_jobs, new_id
from gfgen.server.jobs.manifests import manifest
from gfgen.server.jobs.service import JobService
from gfgen.server.jobs.store import BatchRow
from gfgen.server.protocol import schemas
from gfgen.server.protocol.link import Admit
from gfgen.server.protocol.problems import ApiError, responses

router = APIRouter(prefix="/v1/batches", tags=["batches"])
ROUTERS = (router,)

_BODY: dict[str, Any] = {
    "parameters": [IDEMPOTENCY_KEY],
    "requestBody": {
        "required": True,
        "content": {
            "application/jsonl": {"schema": {"type": "string", "description": "A job file."}},
            "application/json": {"schema": schemas.BatchRequest.model_json_schema()},
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


@router.post(
    "",
    response_model=schemas.Batch,
    responses=responses(400, 404, 408, 413, 422, 429, 503, 507),
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
    """Accepts all jobs of a file or none, with the messages of `gfgen run`. With `skip_invalid` it accepts
    the jobs that the models and this machine can run. `image` and `output` name files of the client: `image`
    is refused, and the server chooses the output's name. JSON with `input_file_id` makes a batch of
    OpenAI's requests in an uploaded file."""
    models = service.ready_models()
    content, fingerprint = await read_job_file(request, service=service)
    batch_id, key = new_id("batch"), request_key(request, fingerprint)
    if (values := uploaded_batch(content, most_bytes=service.limits.json_bytes)) is not None:
        batch_id = await create_of_upload(service, values, batch_id=batch_id, key=key)
        return _answer(service, service.batch(batch_id), batch_id)
    skipped: list[Problem] = []
    try:
        requested, problems = await asyncio.to_thread(
            batch_jobs, content, batch_id=batch_id, skip_invalid=skip_invalid, models=models
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
    response_model=schemas.BatchList,
)
async def list_batches(service: Service, limit: Limit = 20, after: After = None) -> Response:
    if after is not None and service.batch(after) is None:
        raise ApiError(400, f"after: there is no batch {after!r}", param="after")
    rows = service.store.batches(limit=limit + 1, after=after, owner=service.owner)
    data = [_batch(service, row) for row in rows[:limit]]
    return schemas.BatchList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(rows) > limit,
    ).response()


@router.get(
    "/{batch_id}",
    response_model=schemas.Batch,
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
    response_model=schemas.Batch,
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


def _batch(service: JobService, row: BatchRow, *, skipped: list[str] | None = None) -> schemas.Batch:
    is_over = row.completed_at is not None
    records = [] if is_over else [r for r in service.mirror.records.values() if r.facts.batch_id == row.id]
    made_of = service.uploads.batch(row.id)
    num_refused = 0 if made_of is None else len(made_of.failures)
    ends = [r.predicted_end_at for r in records]
    known_ends = [end for end in ends if end is not None]
    return schemas.Batch(
        id=row.id,
        status=("cancelled" if row.is_cancelled else "completed") if is_over else "in_progress",
        created_at=int(row.created_at),
        completed_at=None if row.completed_at is None else int(row.completed_at),
        request_counts=schemas.RequestCounts(
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
