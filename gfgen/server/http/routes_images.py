"""Pictures: /v1/images and /v1/responses as OpenAI's clients call them, and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from gfgen.server.http.bodies import (
    IDEMPOTENCY_KEY,
    INPUT,
    MESSAGES,
    Body,
    documented,
    read_body,
    request_key,
)
from gfgen.server.http.guard import Access
from gfgen.server.http.routes_jobs import Service, leave, log_ignored, results
from gfgen.server.http.streams import QUIET_S, STREAM, check_streams, event_bytes, event_stream
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import (
    MAX_PICTURES,
    chosen_model,
    image_jobs,
    painted_part,
    picture_content,
    response_values,
)
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import picture_schemas, schemas
from gfgen.server.protocol.problems import ApiError, bad, opened
from gfgen.server.shown.previews import FIRST_STEP
from gfgen.server.shown.served_job import ServedJob
from gfgen.system.wording import counted

router = APIRouter(prefix="/v1")
ROUTERS = (router,)

EVENTS = STREAM["responses"]
"""Pictures or their events."""


@router.post(
    "/images/generations",
    tags=["images"],
    response_model=picture_schemas.Images,
    responses=EVENTS,
    openapi_extra=documented(picture_schemas.ImageRequest),
    summary="Make pictures and wait for them",
)
async def create_images(request: Request, service: Service) -> Response:
    """Waits for the pictures, or with `stream` sends them and previews as events. 60 s after its client
    has disconnected they are cancelled, unless the request has an Idempotency-Key: a retry joins them."""
    body = await read_body(request, service=service)
    if body.file is not None or body.values.get("image") is not None:
        raise bad("image", "pictures begin with one at /v1/images/edits")
    return await _images(request, service, body, of="image_generation")


@router.post(
    "/images/edits",
    tags=["images"],
    response_model=picture_schemas.Images,
    responses=EVENTS,
    openapi_extra=documented(picture_schemas.ImageRequest, "image", "mask"),
    summary="Make pictures from a picture and wait for them",
)
async def edit_images(request: Request, service: Service) -> Response:
    """As /v1/images/generations, with an `image` to begin with, several (`image[]`) for models that combine
    pictures, and a `mask` for models for inpainting: they paint where it is transparent."""
    body = await read_body(request, service=service, picture_name="image", most_pictures=MAX_PICTURES)
    if body.file is None:
        raise bad("image", "missing")
    return await _images(request, service, body, of="image_edit")


async def _images(request: Request, service: JobService, body: Body, *, of: EventKind) -> Response:
    asked_for, warnings = opened(picture_schemas.ImageRequest, body.values, is_strict=service.api.strict)
    if asked_for.stream:
        check_streams(service)
    ids = await take_images(request, service, body, asked_for, warnings)
    if asked_for.stream:
        streamed = Streamed(
            ids, asked_for, warnings, of=of, is_kept=IDEMPOTENCY_KEY["name"] in request.headers
        )
        return event_stream(service, lambda: picture_events(service, streamed))
    pictures = await finished(request, service, ids)
    data = [await _image(request, service, each, asked_for) for each in pictures]
    answer = images(pictures, data, output_format=asked_for.output_format)
    answer.warnings = warnings or None
    return answer.response()


def images(
    pictures: Sequence[ServedJob],
    data: list[picture_schemas.Image],
    *,
    output_format: Literal["png", "jpeg", "webp"],
) -> picture_schemas.Images:
    first = pictures[0].job()
    return picture_schemas.Images(
        created=first.created_at,
        model=first.model,
        data=data,
        output_format=output_format,
        size=first.size,
        **_durations(pictures),
    )


@router.post(
    "/chat/completions",
    tags=["images", "chat"],
    response_model=picture_schemas.ChatCompletion,
    openapi_extra=documented(picture_schemas.ChatRequest),
    summary="Make pictures in a conversation",
)
async def complete_chat(request: Request, service: Service) -> Response:
    """The prompt is the text of the last message of the user, which may also have pictures to begin with.
    Earlier messages have no effect, which `warnings` say."""
    body = await read_body(request, service=service, picture_name=MESSAGES, most_pictures=MAX_PICTURES)
    asked_for, warnings = opened(picture_schemas.ChatRequest, body.values, is_strict=service.api.strict)
    if sum(each.role in ("user", "assistant") for each in asked_for.messages) > 1:
        warnings.append("messages: earlier messages and their pictures have no effect")
    ids = await take_images(request, service, body, asked_for, warnings)
    pictures = await finished(request, service, ids)
    answer = await chat_completion(service, pictures, asked_for)
    answer.warnings = warnings or None
    return answer.response()


async def chat_completion(
    service: JobService, pictures: Sequence[ServedJob], asked_for: picture_schemas.PictureRequest
) -> picture_schemas.ChatCompletion:
    kind = files.PICTURE_FORMATS[asked_for.output_format]
    urls = [f"data:{kind};base64,{await base64_of(service, each, asked_for)}" for each in pictures]
    parts = [picture_schemas.ImagePart(image_url=picture_schemas.ImageUrl(url=url)) for url in urls]
    content = counted(len(parts), "picture") if getattr(asked_for, "modalities", None) else parts
    message = picture_schemas.ChatAnswer(content=content, images=parts)
    return picture_schemas.ChatCompletion(
        id=f"chatcmpl-{pictures[0].facts.id}",
        created=int(pictures[0].facts.created_at),
        model=pictures[0].facts.model,
        metrics=picture_schemas.Durations(**_durations(pictures)),
        choices=[picture_schemas.ChatChoice(message=message)],
        warnings=None,
    )


async def take_images(
    request: Request,
    service: JobService,
    body: Body,
    asked_for: picture_schemas.AskedPictures,
    warnings: list[str],
) -> list[str]:
    models, ignored = service.ready_models(), None if service.api.strict else warnings
    mask = body.mask
    if mask is not None and body.file is not None:
        mask = await asyncio.to_thread(painted_part, mask, body.file)
    requested = image_jobs(asked_for, pictures=body.files, mask=mask, models=models, ignored=ignored)
    ids = await service.take(requested, key=await request_key(request, body))
    log_ignored(ids, warnings)
    records = [record for job_id in ids if (record := service.job(job_id)) is not None]
    warnings += dict.fromkeys(text for record in records for text in record.facts.warnings)
    return ids


async def finished(request: Request, service: JobService, ids: Sequence[str]) -> Sequence[ServedJob]:
    await results(request, service, ids)
    return [done_job(service, job_id) for job_id in ids]


def _durations(pictures: Sequence[ServedJob]) -> dict[str, Any]:
    """The times of the picture that took longest, and the memory of the one that took most."""
    jobs = [each.job() for each in pictures]
    slowest = max(jobs, key=lambda job: job.inference_time_s or 0.0)
    return {
        "inference_time_s": slowest.inference_time_s,
        "stage_durations": slowest.stage_durations,
        "peak_memory_mb": max(job.peak_memory_mb or 0.0 for job in jobs),
    }


async def _image(
    request: Request, service: JobService, record: ServedJob, asked_for: picture_schemas.ImageRequest
) -> picture_schemas.Image:
    job_id, kind = record.facts.id, asked_for.output_format
    image = picture_schemas.Image(id=job_id, seed=record.facts.seed)
    if asked_for.response_format != "url":
        image.b64_json = await base64_of(service, record, asked_for)
    if asked_for.response_format != "b64_json":
        query = [f"format={kind}"] if kind != "png" else []
        if asked_for.output_compression is not None and query:
            query.append(f"quality={asked_for.output_compression}")
        if signature := request.app.state.keys.signature(Access(service.owner), job_id):
            query.append(f"signature={signature}")
        base = (service.api.public_url or str(request.base_url)).rstrip("/")
        image.url = f"{base}/v1/jobs/{job_id}/content" + ("?" + "&".join(query) if query else "")
    return image


EventKind = Literal["image_generation", "image_edit"]
WAIT_S = 0.25
QUIET = b": still here\n\n"


@dataclass(frozen=True, slots=True)
class Streamed:
    ids: Sequence[str]
    asked_for: picture_schemas.ImageRequest
    warnings: Sequence[str]
    of: EventKind
    is_kept: bool
    """The jobs continue when the client disconnects."""


async def picture_events(service: JobService, streamed: Streamed) -> AsyncGenerator[bytes]:
    """Previews and finished pictures as they come; an `error` event ends the stream."""
    try:
        async with aclosing(pictures_of(service, streamed)) as found:
            async for each in found:
                body = b"" if each is None else each.model_dump_json().encode()
                yield QUIET if each is None else event_bytes(each.type.encode(), body)
    except ApiError as error:
        yield event_bytes(b"error", error.body().model_dump_json().encode())


async def pictures_of(
    service: JobService, streamed: Streamed
) -> AsyncGenerator[picture_schemas.PartialImage | picture_schemas.CompletedImage | None]:
    """Previews and finished pictures as they come; None after a while without one. Raises: ApiError"""
    shown = {job_id: _Shown() for job_id in streamed.ids}
    said_at = time.monotonic()
    try:
        while shown:
            if service.mirror.status == "draining":
                raise service.not_ready()
            for job_id in list(shown):
                record = service.mirror.records.get(job_id)
                if record is None:
                    del shown[job_id]
                    yield await _completed(service, done_job(service, job_id), streamed)
                    said_at = time.monotonic()
                elif (partial := await _partial(service, record, streamed, shown[job_id])) is not None:
                    yield partial
                    said_at = time.monotonic()
            if time.monotonic() - said_at > QUIET_S:
                yield None
                said_at = time.monotonic()
            if first := next(filter(None, map(service.mirror.records.get, shown)), None):
                await first.updates.wait(WAIT_S)
    finally:
        if shown and not streamed.is_kept:
            leave(service, list(shown))


@dataclass(slots=True)
class _Shown:
    num_due: int = 0
    num_sent: int = 0


async def _partial(
    service: JobService, record: ServedJob, streamed: Streamed, shown: _Shown
) -> picture_schemas.PartialImage | None:
    """A preview, if the steps have come to the next of the places that divide them equally."""
    most = streamed.asked_for.partial_images or 0
    places = [max(FIRST_STEP, record.facts.steps * (1 + place) // (1 + most)) for place in range(most)]
    num_due = sum(record.step >= place for place in places)
    if num_due == shown.num_due:
        return None
    kind = streamed.asked_for.output_format
    content = await service.previews.picture(record.facts.id, kind=kind, is_small=False)
    shown.num_due = num_due
    if content is None:
        return None
    image = picture_schemas.PartialImage(
        type=f"{streamed.of}.partial_image",  # type: ignore[arg-type]  # pydantic checks it
        b64_json=(await asyncio.to_thread(base64.b64encode, content)).decode(),
        created_at=int(service.now()),
        id=record.facts.id,
        output_format=kind,
        size=record.facts.size,
        partial_image_index=shown.num_sent,
    )
    shown.num_sent += 1
    return image


async def _completed(
    service: JobService, record: ServedJob, streamed: Streamed
) -> picture_schemas.CompletedImage:
    return picture_schemas.CompletedImage(
        type=f"{streamed.of}.completed",  # type: ignore[arg-type]
        model=record.facts.model,
        b64_json=await base64_of(service, record, streamed.asked_for),
        created_at=int(service.now()),
        id=record.facts.id,
        seed=record.facts.seed,
        output_format=streamed.asked_for.output_format,
        size=record.job().size,
        warnings=list(streamed.warnings) or None,
    )


def done_job(service: JobService, job_id: str) -> ServedJob:
    record = service.job(job_id)
    if record is None or record.ending is None:
        raise ApiError(409, f"{job_id} was removed meanwhile", code="job_removed")
    if record.status == "cancelled":
        raise ApiError(409, f"{job_id} was cancelled", code="cancelled")
    if record.status == "failed":
        code = record.ending.error_code
        status = 422 if code == "cannot_be_done" else 500
        raise ApiError(status, f"{job_id} has failed: {record.ending.error_message}", code=code)
    return record


async def base64_of(service: JobService, record: ServedJob, asked_for: picture_schemas.PictureRequest) -> str:
    kind, quality = asked_for.output_format, asked_for.output_compression
    return await files.base64_as(service.folder.result(record.facts), kind, quality)


_CALL = "response.image_generation_call"


@router.post(
    "/responses",
    tags=["responses"],
    response_model=picture_schemas.PictureResponse,
    responses=EVENTS,
    openapi_extra=documented(picture_schemas.ResponseRequest),
    summary="Make pictures with the tool image_generation",
)
async def create_response(request: Request, service: Service) -> Response:
    """The prompt is the text of the user's last message in `input`, which may also have pictures to begin
    with, or else the last one before it counts. Responses are not kept: there is no GET."""
    body = await read_body(request, service=service, picture_name=INPUT, most_pictures=MAX_PICTURES)
    values = response_values(body.values)
    asked_for, warnings = opened(picture_schemas.ImageRequest, values, is_strict=service.api.strict)
    if asked_for.stream:
        check_streams(service)
    body = await _with_earlier(service, body, asked_for.job.get("model"), warnings)
    ids = await take_images(request, service, body, asked_for, warnings)
    is_kept = IDEMPOTENCY_KEY["name"] in request.headers
    streamed = Streamed(ids, asked_for, warnings, of="image_generation", is_kept=is_kept)
    first = service.job(ids[0])
    assert first is not None
    answer = picture_schemas.PictureResponse(
        id=f"resp_{ids[0]}",
        created_at=int(first.facts.created_at),
        model=first.facts.model,
        output=[],
        tools=body.values["tools"],
        warnings=warnings or None,
    )
    if asked_for.stream:
        return event_stream(service, lambda: response_events(service, streamed, answer))
    pictures = await finished(request, service, ids)
    answer.output = [_done(await _completed(service, each, streamed)) for each in pictures]
    answer.status = "completed"
    return answer.response()


async def _with_earlier(service: JobService, body: Body, name: str | None, warnings: list[str]) -> Body:
    """With the last picture of the conversation to begin with, if the user's last message has none."""
    said, models = body.values[INPUT], service.ready_models()
    action = next((tool["action"] for tool in body.values["tools"] if tool.get("action")), "auto")
    model = chosen_model(name, models, kind="image", takes=lambda each: each.takes_image != "no")
    is_used = body.earlier is not None and action != "generate" and model.takes_image != "no"
    if is_used:
        read = service.uploads.content
        picture = await asyncio.to_thread(picture_content, body.earlier, read, param=INPUT)
        body = replace(body, files=[picture])
    if action == "edit" and not body.files:
        raise bad(INPUT, "has no picture to edit; give an input_image, or leave action out")
    if isinstance(said, list) and len(said) > 1:
        warnings.append("input: earlier messages have no effect" + ", but their last picture" * is_used)
    return body


def _done(image: picture_schemas.CompletedImage) -> picture_schemas.ImageCall:
    values = image.model_dump(include={"size", "output_format"})
    return picture_schemas.ImageCall(id=f"ig_{image.id}", status="completed", result=image.b64_json, **values)


async def response_events(
    service: JobService, streamed: Streamed, answer: picture_schemas.PictureResponse
) -> AsyncGenerator[bytes]:
    numbers, is_followed = itertools.count(), False

    def event(kind: str, **values: Any) -> bytes:
        body = {"type": kind, "sequence_number": next(numbers), **values}
        return event_bytes(kind.encode(), json.dumps(body).encode())

    def of(place: int) -> Mapping[str, Any]:
        return {"item_id": answer.output[place].id, "output_index": place}

    try:
        yield event("response.created", response=answer.model_dump())
        yield event("response.in_progress", response=answer.model_dump())
        kind = streamed.asked_for.output_format
        answer.output = [
            picture_schemas.ImageCall(id=f"ig_{job_id}", result=None, output_format=kind)
            for job_id in streamed.ids
        ]
        for place, call in enumerate(answer.output):
            yield event("response.output_item.added", output_index=place, item=call.model_dump())
            yield event(f"{_CALL}.in_progress", **of(place))
            yield event(f"{_CALL}.generating", **of(place))
        is_followed = True
        async with aclosing(pictures_of(service, streamed)) as images:
            async for image in images:
                place = 0 if image is None else streamed.ids.index(image.id)
                if image is None:
                    yield QUIET
                elif isinstance(image, picture_schemas.CompletedImage):
                    answer.output[place] = _done(image)
                    yield event(f"{_CALL}.completed", **of(place))
                    item = answer.output[place].model_dump()
                    yield event("response.output_item.done", output_index=place, item=item)
                else:
                    shown = image.model_dump(exclude={"type", "b64_json", "created_at", "id"})
                    partial = {**shown, "partial_image_b64": image.b64_json}
                    yield event(f"{_CALL}.partial_image", **of(place), **partial)
        answer.status = "completed"
    except ApiError as error:
        answer.status = "failed"
        answer.error = schemas.JobFailure(code=error.code or "server_error", message=error.message)
    finally:
        if not is_followed and not streamed.is_kept:  # from then on `pictures_of` does it
            leave(service, streamed.ids)
    yield event(f"response.{answer.status}", response=answer.model_dump())
