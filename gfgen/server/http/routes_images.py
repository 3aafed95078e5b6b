"""/v1/images/generations, as OpenAI's clients call it."""

from __future__ import annotations

import asyncio
import base64

from fastapi import APIRouter, Request
from starlette.responses import Response

from gfgen.server.http.bodies import documented, read_body, request_key
from gfgen.server.http.routes_jobs import Service, log_ignored, results
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import image_jobs
from gfgen.server.jobs.service import JobService
from gfgen.server.jobs.store import StoredJob
from gfgen.server.protocol import schemas
from gfgen.server.protocol.problems import ApiError, responses
from gfgen.server.protocol.validation import opened

router = APIRouter(prefix="/v1/images", tags=["images"])


@router.post(
    "/generations",
    response_model=schemas.Images,
    responses=responses(400, 404, 408, 409, 413, 422, 429, 500, 503, 504, 507),
    openapi_extra=documented(schemas.ImageRequest),
    summary="Make pictures and wait for them",
)
async def create_images(request: Request, service: Service) -> Response:
    """Waits for the pictures. A client that disconnects cancels them, unless it sent an Idempotency-Key."""
    body = await read_body(request, service=service)
    is_strict = service.api.strict
    asked_for, warnings = opened(schemas.ImageRequest, body.values, is_strict=is_strict)
    if body.picture is not None:
        raise ApiError(400, "input_reference: pictures are made from text here", param="input_reference")
    models, ignored = service.ready_models(), None if is_strict else warnings
    requested = image_jobs(asked_for, models=models, ignored=ignored)
    ids = await service.take(requested, key=request_key(request, body.fingerprint))
    log_ignored(ids, warnings)
    await results(request, service, ids)
    pictures = [_done(service, job_id) for job_id in ids]
    data = [await _image(request, service, stored, asked_for) for stored in pictures]
    answer = schemas.Images(
        created=int(pictures[0].facts.created_at),
        data=data,
        output_format=asked_for.output_format,
        size=pictures[0].facts.size,
        warnings=warnings or None,
    )
    return await asyncio.to_thread(answer.response)


def _done(service: JobService, job_id: str) -> StoredJob:
    """The job, which has ended; ApiError when it has not ended well."""
    stored = service.store.job(job_id)
    if stored is None or stored.ending is None:
        raise ApiError(409, f"{job_id} was removed meanwhile", code="job_removed")
    if stored.ending.status == "cancelled":
        raise ApiError(409, f"{job_id} was cancelled", code="cancelled")
    if stored.ending.status == "failed":
        raise ApiError(
            500, f"{job_id} has failed: {stored.ending.error_message}", code=stored.ending.error_code
        )
    return stored


async def _image(
    request: Request, service: JobService, stored: StoredJob, asked_for: schemas.ImageRequest
) -> schemas.Image:
    job_id, kind = stored.facts.id, asked_for.output_format
    if asked_for.response_format == "url":
        query = [f"format={kind}"] if kind != "png" else []
        if signature := request.app.state.keys.signature(job_id):
            query.append(f"signature={signature}")
        base = (service.api.public_url or str(request.base_url)).rstrip("/")
        url = f"{base}/v1/jobs/{job_id}/content" + ("?" + "&".join(query) if query else "")
        return schemas.Image(url=url, id=job_id, seed=stored.facts.seed)
    content = await files.picture_as(service.folder.result(stored.facts), kind)
    text = (await asyncio.to_thread(base64.b64encode, content)).decode()
    return schemas.Image(b64_json=text, id=job_id, seed=stored.facts.seed)
