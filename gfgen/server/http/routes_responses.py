"""POST /v1/responses with the tool `image_generation`, as OpenAI's clients call it, whole and as events."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from gfgen.server.http import routes_images
from gfgen.server.http.bodies import IDEMPOTENCY_KEY, INPUT, documented, read_body
from gfgen.server.http.routes_jobs import Service, leave, results
from gfgen.server.http.streams import check_streams, event_bytes, event_stream
from gfgen.server.jobs.job_requests import MAX_PICTURES, response_values
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import picture_schemas, schemas
from gfgen.server.protocol.picture_schemas import CompletedImage, ImageCall, PictureResponse
from gfgen.server.protocol.problems import ApiError, opened

router = APIRouter(prefix="/v1", tags=["responses"])
ROUTERS = (router,)
_CALL = "response.image_generation_call"


@router.post(
    "/responses",
    response_model=PictureResponse,
    responses=routes_images.EVENTS,
    openapi_extra=documented(picture_schemas.ResponseRequest),
    summary="Make pictures with the tool image_generation",
)
async def create_response(request: Request, service: Service) -> Response:
    """The prompt is the text of the user's last message in `input`, which may also have pictures to begin
    with. Earlier messages have no effect, and responses are not kept: there is no GET."""
    body = await read_body(request, service=service, picture_name=INPUT, most_pictures=MAX_PICTURES)
    values = response_values(body.values)
    asked_for, warnings = opened(picture_schemas.ImageRequest, values, is_strict=service.api.strict)
    if asked_for.stream:
        check_streams(service)
    ids = await routes_images.take_images(request, service, body, asked_for, warnings)
    is_kept = IDEMPOTENCY_KEY["name"] in request.headers
    streamed = routes_images.Streamed(ids, asked_for, warnings, of="image_generation", is_kept=is_kept)
    first = service.job(ids[0])
    assert first is not None
    answer = PictureResponse(
        id=f"resp_{ids[0]}",
        created_at=int(first.facts.created_at),
        model=first.facts.model,
        output=[],
        tools=body.values["tools"],
        warnings=warnings or None,
    )
    if asked_for.stream:
        return event_stream(service, lambda: response_events(service, streamed, answer))
    await results(request, service, ids)
    answer.output = [_done(await routes_images.completed(service, job_id, streamed)) for job_id in ids]
    answer.status = "completed"
    return answer.response()


def _done(image: CompletedImage) -> ImageCall:
    values = image.model_dump(include={"size", "output_format"})
    return ImageCall(id=f"ig_{image.id}", status="completed", result=image.b64_json, **values)


async def response_events(
    service: JobService, streamed: routes_images.Streamed, answer: PictureResponse
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
            ImageCall(id=f"ig_{job_id}", result=None, output_format=kind) for job_id in streamed.ids
        ]
        for place, call in enumerate(answer.output):
            yield event("response.output_item.added", output_index=place, item=call.model_dump())
            yield event(f"{_CALL}.in_progress", **of(place))
            yield event(f"{_CALL}.generating", **of(place))
        is_followed = True
        async with aclosing(routes_images.pictures_of(service, streamed)) as images:
            async for image in images:
                place = 0 if image is None else streamed.ids.index(image.id)
                if image is None:
                    yield routes_images.QUIET
                elif isinstance(image, CompletedImage):
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
