"""Pictures: /v1/images as OpenAI's clients call it, and /v1/chat/completions as vLLM-Omni's do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from gfgen.server.http.bodies import IDEMPOTENCY_KEY, MESSAGES, Body, documented, read_body, request_key
from gfgen.server.http.keys import Access
from gfgen.server.http.picture_stream import (
    EventKind,
    Streamed,
    base64_of,
    done_job,
    image_content,
    picture_events,
)
from gfgen.server.http.routes_jobs import Service, log_ignored, results
from gfgen.server.http.streams import check_streams, event_stream
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import image_jobs
from gfgen.server.jobs.service import JobService
from gfgen.server.jobs.store import StoredJob
from gfgen.server.protocol import picture_schemas
from gfgen.server.protocol.problems import ApiError, responses
from gfgen.server.protocol.validation import opened

router = APIRouter(prefix="/v1", tags=["images"])
ROUTERS = (router,)

_ERRORS = responses(400, 404, 409, 413, 422, 429, 500, 503, 504, 507)
_EVENTS: dict[int | str, dict[str, Any]] = {**_ERRORS, 200: {"content": {"text/event-stream": {}}}}


@router.post(
    "/images/generations",
    response_model=picture_schemas.Images,
    responses=_EVENTS,
    openapi_extra=documented(picture_schemas.ImageRequest),
    summary="Make pictures and wait for them",
)
async def create_images(request: Request, service: Service) -> Response:
    """Waits for the pictures, or with `stream` sends them and previews as events. A client that disconnects
    cancels them, unless it sent an Idempotency-Key."""
    body = await read_body(request, service=service)
    if body.picture is not None:
        raise ApiError(
            400, "input_reference: pictures begin with one at /v1/images/edits", param="input_reference"
        )
    return await _images(request, service, body, of="image_generation")


@router.post(
    "/images/edits",
    response_model=picture_schemas.Images,
    responses=_EVENTS,
    openapi_extra=documented(picture_schemas.ImageRequest, picture="image"),
    summary="Make pictures from a picture and wait for them",
)
async def edit_images(request: Request, service: Service) -> Response:
    """As /v1/images/generations, with an `image` to begin with; masks are not supported."""
    body = await read_body(request, service=service, picture_name="image")
    if body.picture is None:
        raise ApiError(400, "image: missing", param="image")
    return await _images(request, service, body, of="image_edit")


async def _images(request: Request, service: JobService, body: Body, *, of: EventKind) -> Response:
    asked_for, warnings = opened(picture_schemas.ImageRequest, body.values, is_strict=service.api.strict)
    if asked_for.stream:
        check_streams(service)
    ids = await _take(request, service, body, asked_for, warnings)
    if asked_for.stream:
        streamed = Streamed(
            ids, asked_for, warnings, of=of, is_kept=IDEMPOTENCY_KEY["name"] in request.headers
        )
        return event_stream(service, lambda: picture_events(service, streamed))
    pictures = await _finished(request, service, ids)
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
    data: list[picture_schemas.Image],
    *,
    output_format: Literal["png", "jpeg", "webp"] = "png",
) -> picture_schemas.Images:
    return picture_schemas.Images(
        created=int(pictures[0].facts.created_at),
        data=data,
        output_format=output_format,
        size=service.served(pictures[0]).job().size,
        **_durations(service, pictures),
    )


@router.post(
    "/chat/completions",
    tags=["chat"],
    response_model=picture_schemas.ChatCompletion,
    responses=_ERRORS,
    openapi_extra=documented(picture_schemas.ChatRequest),
    summary="Make pictures in a conversation",
)
async def complete_chat(request: Request, service: Service) -> Response:
    """The prompt is the text of the last message of the user, which may also have a picture to begin with.
    Earlier messages have no effect."""
    body = await read_body(request, service=service, picture_name=MESSAGES)
    asked_for, warnings = opened(picture_schemas.ChatRequest, body.values, is_strict=service.api.strict)
    ids = await _take(request, service, body, asked_for, warnings)
    pictures = await _finished(request, service, ids)
    answer = await chat_completion(service, pictures, asked_for.output_format)
    answer.warnings = warnings or None
    return await asyncio.to_thread(answer.response)


async def chat_completion(
    service: JobService, pictures: Sequence[StoredJob], output_format: str = "png"
) -> picture_schemas.ChatCompletion:
    kind = files.PICTURE_FORMATS[output_format]
    urls = [f"data:{kind};base64,{await base64_of(service, stored, output_format)}" for stored in pictures]
    content = [picture_schemas.ImagePart(image_url=picture_schemas.ImageUrl(url=url)) for url in urls]
    return picture_schemas.ChatCompletion(
        id=f"chatcmpl-{pictures[0].facts.id}",
        created=int(pictures[0].facts.created_at),
        model=pictures[0].facts.model,
        metrics=picture_schemas.ChatMetrics(**_durations(service, pictures)),
        choices=[picture_schemas.ChatChoice(message=picture_schemas.ChatAnswer(content=content))],
        warnings=None,
    )


async def _take(
    request: Request,
    service: JobService,
    body: Body,
    asked_for: picture_schemas.ImageRequest | picture_schemas.ChatRequest,
    warnings: list[str],
) -> list[str]:
    models, ignored = service.ready_models(), None if service.api.strict else warnings
    requested = image_jobs(asked_for, picture=body.picture, models=models, ignored=ignored)
    ids = await service.take(requested, key=request_key(request, body.fingerprint))
    log_ignored(ids, warnings)
    return ids


async def _finished(request: Request, service: JobService, ids: Sequence[str]) -> Sequence[StoredJob]:
    await results(request, service, ids)
    return [done_job(service, job_id) for job_id in ids]


def _durations(service: JobService, pictures: Sequence[StoredJob]) -> dict[str, Any]:
    """The times of the picture that took longest, and the memory of the one that took most."""
    jobs = [service.served(stored).job() for stored in pictures]
    slowest = max(jobs, key=lambda job: job.inference_time_s or 0.0)
    return {
        "inference_time_s": slowest.inference_time_s,
        "stage_durations": slowest.stage_durations,
        "peak_memory_mb": max(job.peak_memory_mb or 0.0 for job in jobs),
    }


async def _image(
    request: Request, service: JobService, stored: StoredJob, asked_for: picture_schemas.ImageRequest
) -> picture_schemas.Image:
    job_id, kind = stored.facts.id, asked_for.output_format
    if asked_for.response_format == "url":
        query = [f"format={kind}"] if kind != "png" else []
        if signature := request.app.state.keys.signature(Access(service.owner), job_id):
            query.append(f"signature={signature}")
        base = (service.api.public_url or str(request.base_url)).rstrip("/")
        url = f"{base}/v1/jobs/{job_id}/content" + ("?" + "&".join(query) if query else "")
        return picture_schemas.Image(url=url, id=job_id, seed=stored.facts.seed)
    return await image_content(service, stored, kind)
