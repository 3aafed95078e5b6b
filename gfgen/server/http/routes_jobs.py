"""/v1/jobs and /v1/videos: the same jobs, in our words and in OpenAI's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from starlette.responses import Response, StreamingResponse

from gfgen.server.http.bodies import Body, documented, read_body, request_key
from gfgen.server.http.streams import job_stream
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import RequestedJob, plain_job, video_job
from gfgen.server.jobs.service import JobService
from gfgen.server.jobs.store import StoredJob
from gfgen.server.protocol import schemas
from gfgen.server.protocol.problems import ApiError, checked, responses

router = APIRouter()

JobId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,120}$")]
Limit = Annotated[int, Query(ge=1, le=100, description="Jobs of the page.")]
Order = Annotated[Literal["asc", "desc"], Query(description="By the time of their acceptance.")]
After = Annotated[str | None, Query(max_length=120, description="The last id of the page before.")]
Variant = Annotated[
    Literal["video", "image", "thumbnail", "spritesheet"] | None,
    Query(description="The file itself, or a small picture of it; there are no sprite sheets."),
]

_CREATE = responses(400, 404, 408, 413, 422, 429, 503, 507)


def service_of(request: Request) -> JobService:
    service: JobService = request.app.state.service
    return service


# Creating -------------------------------------------------------------------------------------------


@router.post(
    "/v1/videos",
    tags=["videos"],
    response_model=schemas.Job,
    responses=_CREATE,
    openapi_extra=documented(schemas.VideoRequest, picture="input_reference"),
    summary="Make a video",
)
async def create_video(request: Request) -> Response:
    """Accepts a job and answers at once. `input_reference` is a picture to begin with."""
    service = service_of(request)
    body = await read_body(request, service=service)
    return _job(service, (await _take(request, service, _video(service, body), body))[0])


@router.post(
    "/v1/videos/sync",
    tags=["videos"],
    response_class=Response,
    responses={
        **_CREATE,
        **responses(409, 500, 504),
        200: {"content": {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}},
    },
    openapi_extra=documented(schemas.VideoRequest, picture="input_reference"),
    summary="Make a video and wait for it",
)
async def create_video_and_wait(request: Request) -> Response:
    """Waits for the file. A client that disconnects cancels the job, unless it sent an Idempotency-Key."""
    service = service_of(request)
    body = await read_body(request, service=service)
    ids = await _take(request, service, _video(service, body), body)
    await results(request, service, ids)
    return _file(service, _ended_well(service, ids[0]))


@router.post(
    "/v1/jobs",
    tags=["jobs"],
    response_model=schemas.Job,
    responses=_CREATE,
    openapi_extra=documented(schemas.JobRequest, picture="image"),
    summary="Make a picture or a video",
)
async def create_job(request: Request) -> Response:
    """Accepts one job, in the words of the job file, and answers at once."""
    service = service_of(request)
    body = await read_body(request, service=service, picture_name="image")
    requested = plain_job(checked(schemas.JobRequest, body.values), models=service.check_ready().models)
    return _job(service, (await _take(request, service, requested, body))[0])


# Looking --------------------------------------------------------------------------------------------


@router.get(
    "/v1/videos",
    tags=["videos"],
    response_model=schemas.JobList,
    responses=responses(400),
    summary="List videos",
)
async def list_videos(
    request: Request, limit: Limit = 20, order: Order = "desc", after: After = None
) -> Response:
    return _list(service_of(request), limit=limit, order=order, after=after, kind="video")


@router.get(
    "/v1/jobs",
    tags=["jobs"],
    response_model=schemas.JobList,
    responses=responses(400),
    summary="List jobs",
)
async def list_jobs(
    request: Request,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
    batch_id: Annotated[str | None, Query(max_length=120)] = None,
    ended: Annotated[bool | None, Query(description="Only jobs that have ended, or have not.")] = None,
) -> Response:
    service = service_of(request)
    return _list(service, limit=limit, order=order, after=after, batch_id=batch_id, has_ended=ended)


@router.get(
    "/v1/videos/{job_id}",
    tags=["videos"],
    response_model=schemas.Job,
    responses=responses(400, 404),
    summary="Tell how a video stands",
)
async def get_video(request: Request, job_id: JobId) -> Response:
    return _job(service_of(request), job_id, kind="video")


@router.get(
    "/v1/jobs/{job_id}",
    tags=["jobs"],
    response_model=schemas.Job,
    responses=responses(400, 404),
    summary="Tell how a job stands",
)
async def get_job(request: Request, job_id: JobId) -> Response:
    return _job(service_of(request), job_id)


@router.get(
    "/v1/jobs/{job_id}/events",
    tags=["jobs"],
    response_class=StreamingResponse,
    responses={
        **responses(400, 404, 429, 503),
        200: {"content": {"text/event-stream": {}}},
    },
    summary="Follow a job",
)
async def follow_job(
    request: Request,
    job_id: JobId,
    last_event_id: Annotated[str | None, Header(max_length=64)] = None,
) -> Response:
    """Server-sent events whose data is a `JobEvent`, from the job's beginning, or behind Last-Event-ID."""
    service = service_of(request)
    _known(service, job_id)
    return job_stream(service, job_id, last_event_id)


# Files ----------------------------------------------------------------------------------------------

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FILE = {
    **responses(400, 404, 409, 416, 503, 507),
    200: {"content": dict.fromkeys(("video/mp4", "image/png", "image/jpeg", "image/webp"), _BINARY)},
    206: {"description": "A part, as the Range header asks for."},
    304: {"description": "As it was before."},
}


@router.get("/v1/videos/{job_id}/content", tags=["videos"], response_class=Response, responses=_FILE)
@router.head("/v1/videos/{job_id}/content", include_in_schema=False)
async def get_video_content(request: Request, job_id: JobId, variant: Variant = None) -> Response:
    """The finished video, or a thumbnail of it."""
    service = service_of(request)
    return await _content(service, _ended_well(service, job_id, kind="video"), variant)


@router.get("/v1/jobs/{job_id}/content", tags=["jobs"], response_class=Response, responses=_FILE)
@router.head("/v1/jobs/{job_id}/content", include_in_schema=False)
async def get_job_content(
    request: Request,
    job_id: JobId,
    variant: Variant = None,
    format: Annotated[Literal["png", "jpeg", "webp"] | None, Query(description="Of a picture.")] = None,
) -> Response:
    """The finished picture or video, or a thumbnail of it."""
    service = service_of(request)
    stored = _ended_well(service, job_id)
    if format in (None, "png") or variant == "thumbnail" or stored.facts.kind == "video":
        return await _content(service, stored, variant)
    content = await files.picture_as(service.folder / stored.facts.file, str(format))
    return Response(content, media_type=files.PICTURE_FORMATS[str(format)])


# Cancelling and removing ----------------------------------------------------------------------------


@router.delete(
    "/v1/videos/{job_id}",
    tags=["videos"],
    response_model=schemas.Deleted,
    responses=responses(400, 404, 503, 507),
    summary="Cancel or remove a video",
)
async def delete_video(request: Request, job_id: JobId) -> Response:
    """Cancels what has not ended, which then stays as cancelled; removes what has, with its file."""
    return await _delete(service_of(request), job_id, kind="video")


@router.delete(
    "/v1/jobs/{job_id}",
    tags=["jobs"],
    response_model=schemas.Deleted,
    responses=responses(400, 404, 503, 507),
    summary="Cancel or remove a job",
)
async def delete_job(request: Request, job_id: JobId) -> Response:
    """Cancels what has not ended, which then stays as cancelled; removes what has, with its file."""
    return await _delete(service_of(request), job_id)


# Parts ----------------------------------------------------------------------------------------------


async def results(request: Request, service: JobService, ids: Sequence[str]) -> None:
    """Until these jobs have ended; when the client goes away first, nobody wants them any more."""
    waiting = asyncio.ensure_future(service.wait(ids))
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
            return
        if "idempotency-key" not in request.headers:  # with one it may come back for them
            await service.cancel(ids)
        raise ApiError(499, "the client has gone away")
    except TimeoutError:
        raise ApiError(
            504, f"not done after {service.limits.waiting_s:g} s; the job goes on: GET /v1/jobs/{ids[0]}"
        ) from None
    finally:
        waiting.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _video(service: JobService, body: Body) -> RequestedJob:
    return video_job(checked(schemas.VideoRequest, body.values), models=service.check_ready().models)


async def _take(request: Request, service: JobService, requested: RequestedJob, body: Body) -> list[str]:
    from dataclasses import replace

    if body.picture is not None:
        requested = replace(requested, picture=body.picture)
    return await service.take([requested], key=request_key(request, body.fingerprint))


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _job(service: JobService, job_id: str, *, kind: str | None = None) -> Response:
    record = service.job(job_id)
    if record is None or kind not in (None, record.facts.kind):
        raise _no_job(job_id)
    return _json(record.answer())


def _no_job(job_id: str) -> ApiError:
    return ApiError(404, f"there is no job {job_id}", param="job_id", code="job_not_found")


def _known(service: JobService, job_id: str, *, kind: str | None = None) -> StoredJob:
    stored = service.store.job(job_id)
    if stored is None or kind not in (None, stored.facts.kind):
        raise _no_job(job_id)
    return stored


def _ended_well(service: JobService, job_id: str, *, kind: str | None = None) -> StoredJob:
    stored = _known(service, job_id, kind=kind)
    if stored.ending is None:
        raise ApiError(409, f"{job_id} is not done yet", code="not_done")
    if stored.ending.status != "completed":
        reason = f": {stored.ending.error_message}" if stored.ending.status == "failed" else ""
        raise ApiError(
            409, f"{job_id} was {stored.ending.status}{reason}"[:500], code=stored.ending.error_code
        )
    return stored


def _list(
    service: JobService, *, limit: int, order: str, after: str | None, **which: str | bool | None
) -> Response:
    if after is not None and service.store.job(after) is None:
        raise ApiError(400, f"after: there is no job {after!r}", param="after")
    stored = service.store.jobs(limit=limit + 1, is_ascending=order == "asc", after=after, **which)  # type: ignore[arg-type]
    jobs = [service.served(one).job() for one in stored[:limit]]
    answer = schemas.JobList(
        data=jobs,
        first_id=jobs[0].id if jobs else None,
        last_id=jobs[-1].id if jobs else None,
        has_more=len(stored) > limit,
    )
    return _json(answer.model_dump_json().encode())


def _file(service: JobService, stored: StoredJob) -> Response:
    response = files.StoredFile(service.folder / stored.facts.file)
    response.headers["X-Job-Id"] = stored.facts.id
    return response


async def _content(service: JobService, stored: StoredJob, variant: str | None) -> Response:
    if variant == "spritesheet" or variant not in (None, "thumbnail", stored.facts.kind):
        accepted = f"{stored.facts.kind} or thumbnail"
        raise ApiError(400, f"variant = {variant!r}: {accepted} is accepted", param="variant")
    if variant != "thumbnail":
        return _file(service, stored)
    return files.StoredFile(await service.thumbnail(stored))


async def _delete(service: JobService, job_id: str, *, kind: str | None = None) -> Response:
    _known(service, job_id, kind=kind)
    cancelled = await service.cancel([job_id])
    stored = _known(service, job_id)
    if stored.ending is None:  # a server that is loading or stopping knows it from the store alone
        raise service.not_ready()
    if not cancelled:
        await service.remove([stored])
    answer = schemas.Deleted(
        id=job_id,
        object="video.deleted" if stored.facts.kind == "video" else "image.deleted",
        deleted=not cancelled,
        status=stored.ending.status,
    )
    return _json(answer.model_dump_json().encode())
