"""Pictures: /v1/images as OpenAI's clients call it, and /v1/chat/completions as vLLM-Omni's do."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from gfgen.server.http.bodies import MESSAGES, Body, documented, read_body, request_key
from gfgen.server.http.keys import Access
from gfgen.server.http.routes_jobs import Service, log_ignored, results
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import image_jobs
from gfgen.server.jobs.service import JobService
from gfgen.server.jobs.store import StoredJob
from gfgen.server.protocol import schemas
from gfgen.server.protocol.problems import ApiError, responses
from gfgen.server.protocol.validation import opened

router = APIRouter(prefix="/v1", tags=["images"])
ROUTERS = (router,)

_ERRORS = responses(400, 404, 408, 409, 413, 422, 429, 500, 503, 504, 507)


@router.post(
    "/images/generations",
    response_model=schemas.Images,
    responses=_ERRORS,
    openapi_extra=documented(schemas.ImageRequest),
    summary="Make pictures and wait for them",
)
async def create_images(request: Request, service: Service) -> Response:
    """Waits for the pictures. A client that disconnects cancels them, unless it sent an Idempotency-Key."""
    body = await read_body(request, service=service)
    if body.picture is not None:
        raise ApiError(
            400, "input_reference: pictures begin with one at /v1/images/edits", param="input_reference"
        )
    return await _images(request, service, body)


@router.post(
    "/images/edits",
    response_model=schemas.Images,
    responses=_ERRORS,
    openapi_extra=documented(schemas.ImageRequest, picture="image"),
    summary="Make pictures from a picture and wait for them",
)
async def edit_images(request: Request, service: Service) -> Response:
    """As /v1/images/generations, with an `image` to begin with; masks are not supported."""
    body = await read_body(request, service=service, picture_name="image")
    if body.picture is None:
        raise ApiError(400, "image: missing", param="image")
    return await _images(request, service, body)


async def _images(request: Request, service: JobService, body: Body) -> Response:
    asked_for, warnings = opened(schemas.ImageRequest, body.values, is_strict=service.api.strict)
    pictures = await _pictures(request, service, body, asked_for, warnings)
    answer = images(
        service,
        pictures,
        [await _image(request, service, stored, asked_for) for stored in pictures],
        output_format=asked_for.output_format,
    )
    answer.warnings = warnings or None
    return await asyncio.to_thread(answer.response)


def images(
    service: JobService,
    pictures: Sequence[StoredJob],
    data: list[schemas.Image],
    *,
    output_format: Literal["png", "jpeg", "webp"] = "png",
) -> schemas.Images:
    return schemas.Images(
        created=int(pictures[0].facts.created_at),
        data=data,
        output_format=output_format,
        size=service.served(pictures[0]).job().size,
        **_durations(service, pictures),
    )


@router.post(
    "/chat/completions",
    tags=["chat"],
    response_model=schemas.ChatCompletion,
    responses=_ERRORS,
    openapi_extra=documented(schemas.ChatRequest),
    summary="Make pictures in a conversation",
)
async def complete_chat(request: Request, service: Service) -> Response:
    """The prompt is the text of the last message of the user, which may also have a picture to begin with.
    Earlier messages have no effect."""
    body = await read_body(request, service=service, picture_name=MESSAGES)
    asked_for, warnings = opened(schemas.ChatRequest, body.values, is_strict=service.api.strict)
    pictures = await _pictures(request, service, body, asked_for, warnings)
    answer = await chat_completion(service, pictures, asked_for.output_format)
    answer.warnings = warnings or None
    return await asyncio.to_thread(answer.response)


async def chat_completion(
    service: JobService, pictures: Sequence[StoredJob], output_format: str = "png"
) -> schemas.ChatCompletion:
    """The answer of a conversation, without warnings."""
    kind = files.PICTURE_FORMATS[output_format]
    urls = [f"data:{kind};base64,{await _base64(service, stored, output_format)}" for stored in pictures]
    content = [schemas.ImagePart(image_url=schemas.ImageUrl(url=url)) for url in urls]
    return schemas.ChatCompletion(
        id=f"chatcmpl-{pictures[0].facts.id}",
        created=int(pictures[0].facts.created_at),
        model=pictures[0].facts.model,
        metrics=schemas.ChatMetrics(**_durations(service, pictures)),
        choices=[schemas.ChatChoice(message=schemas.ChatAnswer(content=content))],
        warnings=None,
    )


async def _pictures(
    request: Request,
    service: JobService,
    body: Body,
    asked_for: schemas.ImageRequest | schemas.ChatRequest,
    warnings: list[str],
) -> Sequence[StoredJob]:
    """The completed jobs of a request; adds to the warnings."""
    models, ignored = service.ready_models(), None if service.api.strict else warnings
    requested = image_jobs(asked_for, picture=body.picture, models=models, ignored=ignored)
    ids = await service.take(requested, key=request_key(request, body.fingerprint))
    log_ignored(ids, warnings)
    await results(request, service, ids)
    return [_done(service, job_id) for job_id in ids]


def _durations(service: JobService, pictures: Sequence[StoredJob]) -> dict[str, Any]:
    """The times of the picture that took longest, and the memory of the one that took most."""
    jobs = [service.served(stored).job() for stored in pictures]
    slowest = max(jobs, key=lambda job: job.inference_time_s or 0.0)
    return {
        "inference_time_s": slowest.inference_time_s,
        "stage_durations": slowest.stage_durations,
        "peak_memory_mb": max((job.peak_memory_mb or 0.0 for job in jobs), default=0.0) or None,
    }


def _done(service: JobService, job_id: str) -> StoredJob:
    """The ended job; raises ApiError if it has no result."""
    stored = service.stored(job_id)
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
        if signature := request.app.state.keys.signature(Access(service.owner), job_id):
            query.append(f"signature={signature}")
        base = (service.api.public_url or str(request.base_url)).rstrip("/")
        url = f"{base}/v1/jobs/{job_id}/content" + ("?" + "&".join(query) if query else "")
        return schemas.Image(url=url, id=job_id, seed=stored.facts.seed)
    return await image_content(service, stored, kind)


async def image_content(service: JobService, stored: StoredJob, kind: str = "png") -> schemas.Image:
    text = await _base64(service, stored, kind)
    return schemas.Image(b64_json=text, id=stored.facts.id, seed=stored.facts.seed)


async def _base64(service: JobService, stored: StoredJob, kind: str) -> str:
    content = await files.picture_as(service.folder.result(stored.facts), kind)
    return (await asyncio.to_thread(base64.b64encode, content)).decode()
