"""/v1/jobs and /v1/videos: the same jobs in gfgen's terms and in OpenAI's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.responses import Response, StreamingResponse

from gfgen.errors import OutputError
from gfgen.job.fields import FIELDS
from gfgen.job.recipes import recipes
from gfgen.server.http.bodies import Body, documented, json_body, read_body, read_model, request_key, sends
from gfgen.server.http.guard import Access
from gfgen.server.http.streams import STREAM, job_stream
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import video_job
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import schemas
from gfgen.server.protocol.problems import ApiError, opened
from gfgen.server.shown.served_job import ServedJob
from gfgen.server.store import JobFacts

logger = logging.getLogger(__name__)

jobs = APIRouter(prefix="/v1/jobs", tags=["jobs"])
videos = APIRouter(prefix="/v1/videos", tags=["videos"])
ROUTERS = (jobs, videos)


async def _service_of(request: Request) -> JobService:
    service: JobService = request.app.state.service
    return service.seen_by(Access.of(request.scope).owner)


Service = Annotated[JobService, Depends(_service_of)]
JobId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,120}$")]
Limit = Annotated[int, Query(ge=1, le=100, description="Jobs per page.")]
Order = Annotated[Literal["asc", "desc"], Query(description="By time of acceptance.")]
After = Annotated[str | None, Query(max_length=120, description="The last id of the previous page.")]
Variant = Annotated[
    Literal["video", "image", "thumbnail", "spritesheet"] | None,
    Query(description="The file itself or its thumbnail; sprite sheets are not supported."),
]


async def _record_of(request: Request, service: Service, job_id: JobId) -> ServedJob:
    only_videos = request.scope["route"].path.startswith(videos.prefix)
    return _known(service, job_id, only_videos=only_videos)


def _is_video(facts: JobFacts) -> bool:
    """Whether /v1/videos has this job: also a single frame, if it was requested there."""
    return facts.kind == "video" or facts.id.startswith("video_")


Record = Annotated[ServedJob, Depends(_record_of)]
"""The job of a path."""
_VIDEO = documented(schemas.VideoRequest, "input_reference")


@videos.post("", openapi_extra=_VIDEO, summary="Make a video")
async def create_video(request: Request, service: Service) -> schemas.Video:
    """Accepts a job and answers at once. `input_reference` is the first picture of the video."""
    body = await read_body(request, service=service)
    (job_id,), warnings = await _take_video(request, service, body)
    return schemas.Video.of(_known(service, job_id).job(), warnings=warnings)


@videos.post("/sync", **sends("video/mp4"), openapi_extra=_VIDEO, summary="Make a video and wait for it")
async def create_video_and_wait(request: Request, service: Service) -> Response:
    """Waits for the file. 60 s after its client has disconnected the job is cancelled, unless the request has
    an Idempotency-Key: a retry joins it."""
    body = await read_body(request, service=service)
    ids, _ = await _take_video(request, service, body)
    await results(request, service, ids)
    return _file(service, _completed(service, _known(service, ids[0])))


@videos.get("", summary="List videos")
async def list_videos(
    service: Service, limit: Limit = 20, order: Order = "desc", after: After = None
) -> schemas.VideoList:
    found = _list(service, limit=limit, order=order, after=after, kind="video")
    return schemas.VideoList.of([schemas.Video.of(job) for job in found], limit)


@jobs.get("", summary="List jobs")
async def list_jobs(
    service: Service,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
    batch_id: Annotated[str | None, Query(max_length=120)] = None,
    ended: Annotated[bool | None, Query(description="Only jobs that have ended, or only open ones.")] = None,
    favourite: Annotated[bool | None, Query(description="true: only favourites.")] = None,
) -> schemas.JobList:
    which = {"batch_id": batch_id, "has_ended": ended, "is_favourite": favourite}
    return schemas.JobList.of(_list(service, limit=limit, order=order, after=after, **which), limit)


@jobs.get("/archive", **sends("application/zip"), summary="Get the files of several jobs")
async def get_archive(service: Service, ids: Annotated[str, Query(max_length=3_100)]) -> Response:
    """A ZIP file with the results of about 100 jobs, whose ids have commas between them."""
    found = [_completed(service, _known(service, each)) for each in dict.fromkeys(ids.split(","))]
    paths = [service.folder.result(each.facts) for each in found]
    headers = {"Content-Disposition": 'attachment; filename="gfgen.zip"'}
    return StreamingResponse(files.zipped(paths), media_type="application/zip", headers=headers)


@videos.get("/{job_id}", summary="Get a video")
async def get_video(record: Record) -> schemas.Video:
    return schemas.Video.of(record.job())


@jobs.get("/{job_id}", summary="Get a job")
async def get_job(record: Record) -> schemas.Job:
    return record.job()


@jobs.get("/{job_id}/line", summary="Get a job as a line of a job file")
async def get_line(service: Service, record: Record) -> dict[str, Any]:
    """What POST /v1/jobs takes for the same job, without deadline and timeout. `image` and `files` stand for
    the files of a job that had some: give them again."""
    spec = service.store.spec(record.facts.id)
    spec |= {"image": "image.png"} if "image_sha256" in spec else {}
    spec |= [("recipe", name) for name in recipes() if FIELDS["recipe"].parse(name) == spec.get("recipe")]
    return {name: spec[name] for name in (*schemas.JobRequest.names, "image", "files") if name in spec}


@jobs.put("/{job_id}/favourite", summary="Mark a favourite")
async def set_favourite(service: Service, record: Record, value: bool = True) -> schemas.Job:
    """The retention limits spare the record and the file of a favourite; `value=false` takes that back."""
    job_id = record.facts.id
    if not await service.store.change(job_id, is_open=False, favourite=value):
        raise ApiError(409, f"{job_id} is not done yet", code="not_done")
    service.mirror.set_favourite(record.facts, is_favourite=value)
    return _known(service, job_id).job()


@jobs.get("/{job_id}/events", **STREAM, summary="Follow a job")
async def follow_job(
    service: Service, record: Record, last_event_id: Annotated[str | None, Header(max_length=64)] = None
) -> Response:
    """Server-sent events with a `JobEvent` each, from the first one or after Last-Event-ID."""
    return job_stream(service, record.facts.id, last_event_id)


_FILE = sends("video/mp4", "image/png", "image/jpeg", "image/webp")
_FILE["responses"][206] = {"description": "The part that the Range header requests."}
_FILE["responses"][304] = {"description": "Not modified."}
_PREVIEW = sends("image/webp")
_PREVIEW["responses"][204] = {"description": "There is none now."}


@videos.get("/{job_id}/content", **_FILE)
async def get_video_content(service: Service, record: Record, variant: Variant = None) -> Response:
    """The finished video or its thumbnail."""
    return await _content(service, _completed(service, record), variant)


@jobs.get("/{job_id}/content", **_FILE)
async def get_job_content(
    service: Service,
    record: Record,
    variant: Variant = None,
    format: Annotated[
        Literal["png", "jpeg", "webp"] | None, Query(description="Format of a picture.")
    ] = None,
    quality: Annotated[int | None, Query(ge=0, le=100, description="Of a JPEG or WebP file. [95]")] = None,
) -> Response:
    """The finished picture or video, or its thumbnail."""
    record = _completed(service, record)
    if format in (None, "png") or variant == "thumbnail" or record.facts.kind == "video":
        return await _content(service, record, variant)
    content = await files.picture_as(service.folder.result(record.facts), str(format), quality)
    return Response(content, media_type=files.PICTURE_FORMATS[str(format)])


@jobs.get("/{job_id}/preview", **_PREVIEW, summary="Get a rough preview of a running job")
async def get_preview(service: Service, record: Record) -> Response:
    """The job after its last step, at most 320 pixels a side; of a video, the frame in the middle.
    Models of the Wan, Qwen-Image, Flux.1 and SD3 pipelines have previews."""
    content = await service.previews.picture(record.facts.id)
    if content is None:
        return Response(status_code=204)
    return Response(content, media_type="image/webp", headers={"Cache-Control": "no-store"})


@jobs.post("/{job_id}", openapi_extra=json_body(schemas.JobChange), summary="Change the priority of a job")
async def change_job(request: Request, service: Service, record: Record) -> schemas.Job:
    """Policies that use priorities apply it from the next step on."""
    change = await read_model(request, schemas.JobChange, service=service)
    await service.set_priority(record.facts.id, int(change.job["priority"]))
    return record.job()


@videos.post("/{job_id}/cancel", summary="Cancel a video")
async def cancel_video(service: Service, record: Record) -> schemas.Video:
    """Cancels the job if it is open; a job that has ended keeps its status, record and file."""
    return schemas.Video.of(await _cancel(service, record.facts.id))


@jobs.post("/{job_id}/cancel", summary="Cancel a job")
async def cancel_job(service: Service, record: Record) -> schemas.Job:
    """Cancels the job if it is open; a job that has ended keeps its status, record and file."""
    return await _cancel(service, record.facts.id)


async def _cancel(service: JobService, job_id: str) -> schemas.Job:
    await service.cancel([job_id])
    record = _known(service, job_id)
    if not record.has_ended:  # a server that is loading or stopping knows it from the store alone
        raise service.not_ready()
    return record.job()


@videos.delete("/{job_id}", summary="Cancel or remove a video", name="delete_video")
@jobs.delete("/{job_id}", summary="Cancel or remove a job")
async def delete_job(
    service: Service,
    record: Record,
    purge: Annotated[bool, Query(description="Remove the job even if it was cancelled.")] = False,
) -> schemas.Deleted:
    """Cancels an open job, which stays as cancelled; removes a completed or failed one with its file. A
    cancelled job stays, so that a repeated request removes nothing; `purge` removes it too."""
    was_open = not record.has_ended
    job = await _cancel(service, record.facts.id)
    is_removed = not was_open and (purge or job.status != "cancelled")
    if is_removed:
        await service.remove([record.facts])
    kind: Any = "video.deleted" if _is_video(record.facts) else "image.deleted"
    return schemas.Deleted(id=job.id, object=kind, deleted=is_removed, status=job.status)


async def results(request: Request, service: JobService, ids: Sequence[str]) -> None:
    waiting = asyncio.ensure_future(service.wait(ids))
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
            return
        if "idempotency-key" not in request.headers:  # with a key it may come back for them
            leave(service, ids)
        raise ApiError(499, "the client has disconnected")
    except TimeoutError:
        limit_s = service.limits.waiting_s
        raise ApiError(
            504, f"not done after {limit_s:g} s; the job continues: GET /v1/jobs/{ids[0]}"
        ) from None
    finally:
        waiting.cancel()
        leaving.cancel()


_leaving: set[asyncio.Task[None]] = set()
"""The event loop itself keeps no reference to a task."""


def leave(service: JobService, ids: Sequence[str]) -> None:
    """Cancel in `left_s` what is then open of these jobs: their client has disconnected."""

    async def cancel_later() -> None:
        await asyncio.sleep(service.limits.left_s)
        if service.mirror.status != "draining":  # then a later server continues them
            with suppress(OutputError):  # the store has logged it, and the jobs go on
                await service.cancel(ids)

    leaving = asyncio.get_running_loop().create_task(cancel_later())
    _leaving.add(leaving)
    leaving.add_done_callback(_leaving.discard)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _take_video(request: Request, service: JobService, body: Body) -> tuple[list[str], list[str]]:
    models, is_strict = service.ready_models(), service.api.strict
    asked_for, warnings = opened(schemas.VideoRequest, body.values, is_strict=is_strict)
    requested = video_job(asked_for, models=models, ignored=None if is_strict else warnings)
    requested = replace(requested, picture=body.file)
    ids = await service.take([requested], key=await request_key(request, body))
    log_ignored(ids, warnings)
    return ids, warnings


def log_ignored(ids: Sequence[str], warnings: Sequence[str]) -> None:
    if warnings:
        logger.info("%s: %s", ", ".join(ids), "; ".join(warnings))


def _known(service: JobService, job_id: str, *, only_videos: bool = False) -> ServedJob:
    record = service.job(job_id)
    if record is None or (only_videos and not _is_video(record.facts)):
        raise ApiError(404, f"there is no job {job_id}", param="job_id", code="job_not_found")
    return record


def _completed(service: JobService, record: ServedJob) -> ServedJob:
    job_id = record.facts.id
    if not record.has_ended and (stored := service.store.job(job_id)) is not None:
        record = service.served(stored)
    if record.ending is None:
        raise ApiError(409, f"{job_id} is not done yet", code="not_done")
    if record.status != "completed":
        reason = f": {record.ending.error_message}" if record.status == "failed" else ""
        raise ApiError(409, f"{job_id} was {record.status}{reason}"[:500], code=record.ending.error_code)
    return record


def _list(
    service: JobService, *, limit: int, order: str, after: str | None, **which: Any
) -> list[schemas.Job]:
    """One more than the limit, if there are more."""
    if after is not None and service.job(after) is None:
        raise ApiError(400, f"after: there is no job {after!r}", param="after")
    which["owner"] = service.owner
    stored = service.store.jobs(limit=limit + 1, is_ascending=order == "asc", after=after, **which)
    return [service.served(one).job() for one in stored]


def _file(service: JobService, record: ServedJob) -> Response:
    response = files.StoredFile(service.folder.result(record.facts))
    response.headers["X-Job-Id"] = record.facts.id
    return response


async def _content(service: JobService, record: ServedJob, variant: str | None) -> Response:
    kind = record.facts.kind
    if variant == "spritesheet" or variant not in (None, "thumbnail", kind):
        raise ApiError(400, f"variant = {variant!r}: {kind} or thumbnail is accepted", param="variant")
    if variant != "thumbnail":
        return _file(service, record)
    return files.StoredFile(await service.folder.thumbnail(record.facts))
