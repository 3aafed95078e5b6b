"""Server-sent events: the events of one job, and the live state."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from starlette.responses import StreamingResponse

from gfgen.server.jobs.mirror import RunMirror
from gfgen.server.jobs.served_job import Notifier, ServedJob
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol.problems import ApiError

FEED_S = 0.2
"""Smallest interval between two changes of the live state."""
MAX_CHANGES = 50
"""Changes a slow reader may be behind; beyond it the reader gets the whole state again."""
QUIET_S = 15.0
"""Interval of comments that keep proxies from closing a quiet stream."""
RETRY_MS = 2000
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class StateFeed:
    """Changes of the live state, encoded once for all readers."""

    def __init__(self, mirror: RunMirror) -> None:
        self._live = mirror
        self._feed: deque[tuple[int, bytes]] = deque(maxlen=MAX_CHANGES)
        self._seen = 0
        self.number = 0
        """Of the last change."""
        self.updates = Notifier()
        self._whole = (0.0, 0, b"")

    def tick(self) -> None:
        """Encode the changes since the last call, if there are readers."""
        if self._live.num_streams == 0:
            self._feed.clear()
            self._seen = self._live.version
            return
        change = self._live.change(self._seen)
        if change is None:
            return
        self._seen = self._live.version
        self.number += 1
        body = change.model_dump_json(include=change.model_fields_set).encode()
        self._feed.append((self.number, _event(b"change", body)))
        self.updates.notify()

    def after(self, number: int) -> list[tuple[int, bytes]] | None:
        """The changes after this number; None if some of them are no longer kept."""
        if self.number > number and (not self._feed or self._feed[0][0] > number + 1):
            return None
        return [frame for frame in self._feed if frame[0] > number]

    def state(self) -> bytes:
        """The live state as JSON; cached for FEED_S while nothing changes."""
        made_at, version, body = self._whole
        now = self._live.now()
        if version != self._live.version or not made_at <= now < made_at + FEED_S:
            body = self._live.state().model_dump_json().encode()
            self._whole = (now, self._live.version, body)
        return body

    def whole(self) -> bytes:
        """The current state as an event; later changes build on it."""
        return _event(b"state", self._live.state().model_dump_json().encode())


def state_stream(service: JobService, feed: StateFeed) -> StreamingResponse:
    """The live state, then its changes, until the server stops; ApiError if there are too many streams."""
    return _response(service, lambda: _state_events(service, feed))


def job_stream(service: JobService, job_id: str, last_event_id: str | None) -> StreamingResponse:
    """The events of a job, from the first or after `last_event_id`.

    Raises: ApiError if there are too many streams, or if the server is still loading.
    """
    record = service.record(job_id)
    if record is None:
        stored = service.store.job(job_id)
        if stored is not None and stored.ending is None:  # the server is still loading
            raise service.not_ready()
        return _response(service, lambda: _end_of_kept(service, job_id))
    seen = _seen(last_event_id, service.store.epoch)
    return _response(service, lambda: _job_events(service, record, seen))


async def _state_events(service: JobService, feed: StateFeed) -> AsyncIterator[bytes]:
    number = feed.number
    yield b"retry: %d\n\n" % RETRY_MS + feed.whole()
    while True:
        news = feed.after(number)
        if news is None:
            number = feed.number
            yield feed.whole()
        elif news:
            number = news[-1][0]
            yield b"".join(body for _, body in news)
        elif service.mirror.status == "draining":
            return
        elif not await feed.updates.wait(QUIET_S):
            yield b": still here\n\n"


async def _job_events(service: JobService, record: ServedJob, seen: int) -> AsyncIterator[bytes]:
    yield b"retry: %d\n\n" % RETRY_MS
    epoch = service.store.epoch
    while True:
        for event in (news := record.events_after(seen)):
            seen = event.number
            yield _event(event.kind.encode(), event.body, b"%d-%d" % (epoch, seen))
            if event.kind == "stopping":  # a step that ends now would follow it
                return
        if news:
            continue  # there may be more events by now
        if record.has_ended or service.mirror.status == "draining":
            return
        if not await record.updates.wait(QUIET_S):
            yield b": still here\n\n"


async def _end_of_kept(service: JobService, job_id: str) -> AsyncIterator[bytes]:
    """The final event of a job whose events are no longer in memory."""
    answer = service.ended_event(job_id)
    if answer is not None:
        kind, body = answer
        yield _event(kind, body, b"%d-0" % service.store.epoch)


def _response(service: JobService, events: Callable[[], AsyncIterator[bytes]]) -> StreamingResponse:
    if service.mirror.num_streams >= service.limits.streams:
        raise ApiError(
            429,
            f"all {service.limits.streams} event streams are in use",
            code="too_many_streams",
            retry_after_s=5,
        )

    async def counted() -> AsyncIterator[bytes]:
        with _counted(service.mirror):
            async for event in events():
                yield event

    return StreamingResponse(counted(), media_type="text/event-stream", headers=_HEADERS)


@contextmanager
def _counted(mirror: RunMirror) -> Iterator[None]:
    mirror.num_streams += 1
    try:
        yield
    finally:
        mirror.num_streams -= 1


def _event(kind: bytes, body: bytes, number: bytes | None = None) -> bytes:
    head = b"" if number is None else b"id: %s\n" % number
    return head + b"event: %s\ndata: %s\n\n" % (kind, body)


def _seen(last_event_id: str | None, epoch: int) -> int:
    """The number in Last-Event-ID, if it comes from this process; otherwise 0."""
    first, _, second = (last_event_id or "").partition("-")
    if first == str(epoch) and second.isascii() and second.isdigit() and len(second) < 12:
        return int(second)
    return 0
