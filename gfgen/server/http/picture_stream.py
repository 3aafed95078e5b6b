"""Pictures as a stream of events, with previews while they are made: `stream: true` of OpenAI's image API."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal

from gfgen.server.http.streams import QUIET_S, event_bytes
from gfgen.server.jobs import files
from gfgen.server.jobs.previews import FIRST_STEP
from gfgen.server.jobs.served_job import ServedJob
from gfgen.server.jobs.service import JobService
from gfgen.server.jobs.store import StoredJob
from gfgen.server.protocol import picture_schemas
from gfgen.server.protocol.problems import ApiError

EventKind = Literal["image_generation", "image_edit"]
WAIT_S = 0.25
_leaving: set[asyncio.Task[list[str]]] = set()
"""Cancellations for clients that have left; the event loop itself keeps no reference to a task."""


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
                    event: bytes | None = await _completed(service, job_id, streamed)
                else:
                    event = await _partial(service, record, streamed, shown[job_id])
                if event is not None:
                    yield event
                    said_at = time.monotonic()
            if time.monotonic() - said_at > QUIET_S:
                yield b": still here\n\n"
                said_at = time.monotonic()
            if first := next(filter(None, map(service.mirror.records.get, shown)), None):
                await first.updates.wait(WAIT_S)
    except ApiError as error:
        yield event_bytes(b"error", error.body().model_dump_json().encode())
    finally:
        if shown and not streamed.is_kept and service.mirror.status != "draining":
            leaving = asyncio.get_running_loop().create_task(service.cancel(list(shown)))
            _leaving.add(leaving)
            leaving.add_done_callback(_leaving.discard)


@dataclass(slots=True)
class _Shown:
    num_due: int = 0
    num_sent: int = 0


async def _partial(service: JobService, record: ServedJob, streamed: Streamed, shown: _Shown) -> bytes | None:
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
    return event_bytes(image.type.encode(), image.model_dump_json().encode())


async def _completed(service: JobService, job_id: str, streamed: Streamed) -> bytes:
    stored = done_job(service, job_id)
    kind = streamed.asked_for.output_format
    image = picture_schemas.CompletedImage(
        type=f"{streamed.of}.completed",  # type: ignore[arg-type]
        b64_json=await base64_of(service, stored, kind),
        created_at=int(service.now()),
        id=job_id,
        seed=stored.facts.seed,
        output_format=kind,
        size=service.served(stored).job().size,
        warnings=list(streamed.warnings) or None,
    )
    return event_bytes(image.type.encode(), image.model_dump_json().encode())


def done_job(service: JobService, job_id: str) -> StoredJob:
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


async def image_content(service: JobService, stored: StoredJob, kind: str = "png") -> picture_schemas.Image:
    text = await base64_of(service, stored, kind)
    return picture_schemas.Image(b64_json=text, id=stored.facts.id, seed=stored.facts.seed)


async def base64_of(service: JobService, stored: StoredJob, kind: str) -> str:
    content = await files.picture_as(service.folder.result(stored.facts), kind)
    return (await asyncio.to_thread(base64.b64encode, content)).decode()
