"""Server-sent events: the events of one job, and the live state."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse

from gfgen.server.http.bodies import sends
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol.problems import ApiError
from gfgen.server.protocol.server_schemas import Change, LiveState, Rank
from gfgen.server.shown.mirror import RunMirror
from gfgen.server.shown.served_job import Notifier, ServedJob

FEED_S = 0.2
"""Smallest interval between two changes of the live state."""
MAX_CHANGES = 50
"""Changes a slow reader may be behind; beyond it the reader gets the whole state again."""
QUIET_S = 15.0
"""Interval of comments that keep proxies from closing a quiet stream."""
RETRY_MS = 2000
STREAM = sends("text/event-stream")
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class StateFeed:
    """Changes of the live state as one owner sees it, encoded once for all of its readers."""

    def __init__(self, mirror: RunMirror, owner: str | None = None) -> None:
        self._mirror = mirror
        self._owner = owner
        self._changes: deque[tuple[int, bytes]] = deque(maxlen=MAX_CHANGES)
        self._seen: LiveState | None = None
        """The state to which the next change refers; None while there are no readers."""
        self.number = 0
        self.num_readers = 0
        self.updates = Notifier()

    def tick(self) -> None:
        """Encode the changes since the last call, if there are readers."""
        if self.num_readers == 0 or self._seen is None:
            self._changes.clear()
            self._seen = None
            return
        state = self._mirror.state(self._owner)
        change = change_between(self._seen, state)
        if change is None:
            return
        self._seen = state
        self.number += 1
        body = change.model_dump_json(include=change.model_fields_set).encode()
        self._changes.append((self.number, event_bytes(b"change", body)))
        self.updates.notify()

    def after(self, number: int) -> list[tuple[int, bytes]] | None:
        """The changes after this number; None if some of them are no longer kept."""
        if self.number > number and (not self._changes or self._changes[0][0] > number + 1):
            return None
        return [frame for frame in self._changes if frame[0] > number]

    def whole(self) -> bytes:
        """The current state as an event; later changes build on it."""
        state = self._mirror.state(self._owner)
        self._seen = self._seen or state
        return event_bytes(b"state", state.model_dump_json().encode())


class StateFeeds:
    def __init__(self, mirror: RunMirror) -> None:
        self._mirror = mirror
        self._feeds: dict[str | None, StateFeed] = {}

    def of(self, owner: str | None) -> StateFeed:
        return self._feeds.setdefault(owner, StateFeed(self._mirror, owner))

    def tick(self) -> None:
        for feed in self._feeds.values():
            feed.tick()

    def notify(self) -> None:
        for feed in self._feeds.values():
            feed.updates.notify()


def change_between(before: LiveState, after: LiveState) -> Change | None:
    """What differs, or None. A job or bar has changed if it is another object; time alone changes nothing."""
    values: dict[str, Any] = {}
    if (before.status, before.reason) != (after.status, after.reason):
        values |= {"status": after.status, "reason": after.reason}
    for name in ("policy", "models"):
        if getattr(before, name) != getattr(after, name):
            values[name] = getattr(after, name)
    if list(map(_without_use, before.ranks)) != list(map(_without_use, after.ranks)):
        values["ranks"] = after.ranks
    bars = {bar.key: bar for bar in before.timeline}
    if news := [bar for bar in after.timeline if bars.get(bar.key) is not bar]:
        values["timeline"] = news
    jobs, order = {job.id: job for job in before.open}, [job.id for job in after.open]
    changed = [job for job in after.open if jobs.get(job.id) is not job]
    if changed or order != list(jobs) or before.num_open != after.num_open:
        values |= {"open": changed, "order": order, "num_open": after.num_open}
    old, new = ({job.id for job in state.finished} for state in (before, after))
    if old != new:
        values["finished"] = [job for job in after.finished if job.id not in old]
        values["removed"] = [job.id for job in before.finished if job.id not in new]
    return Change(server_time=after.server_time, **values) if values else None


def _without_use(rank: Rank) -> Any:
    """What counts as a change of a rank: its utilisation changes all the time."""
    return rank.rank, rank.status, rank.task, rank.restarts


def job_stream(service: JobService, job_id: str, last_event_id: str | None) -> StreamingResponse:
    """The events of a job, from the first or after `last_event_id`; only the last one if it ended long ago.

    Raises: ApiError if there are too many streams, or if the server is still loading.
    """
    record = service.mirror.find(job_id)
    seen = _seen(last_event_id, service.store.epoch)
    if record is None:
        record, seen = service.job(job_id), 0
        if record is None or not record.has_ended:  # removed meanwhile, or the server is still loading
            raise service.not_ready()
        record.end_event()
    return event_stream(service, lambda: _job_events(service, record, seen))


async def state_events(service: JobService, feed: StateFeed) -> AsyncGenerator[bytes]:
    feed.num_readers += 1
    try:
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
    finally:
        feed.num_readers -= 1


async def _job_events(service: JobService, record: ServedJob, seen: int) -> AsyncGenerator[bytes]:
    yield b"retry: %d\n\n" % RETRY_MS
    epoch = service.store.epoch
    while True:
        news = [event for event in record.events if event.number > seen]
        for event in news:
            seen = event.number
            yield event_bytes(event.kind.encode(), event.body, b"%d-%d" % (epoch, seen))
            if event.kind == "stopping":  # a step that ends now would follow it
                return
        if news:
            continue  # there may be more events by now
        if record.has_ended or service.mirror.status == "draining":
            return
        if not await record.updates.wait(QUIET_S):
            yield b": still here\n\n"


def check_streams(service: JobService) -> None:
    if service.mirror.num_streams >= service.limits.streams:
        raise ApiError(
            429,
            f"all {service.limits.streams} event streams are in use",
            code="too_many_streams",
            retry_after_s=5,
        )


def event_stream(service: JobService, events: Callable[[], AsyncGenerator[bytes]]) -> StreamingResponse:
    check_streams(service)

    async def counted() -> AsyncGenerator[bytes]:
        service.mirror.num_streams += 1
        try:
            async with aclosing(events()) as each:
                async for event in each:
                    yield event
        finally:
            service.mirror.num_streams -= 1

    return StreamingResponse(counted(), media_type="text/event-stream", headers=_HEADERS)


def event_bytes(kind: bytes, body: bytes, number: bytes | None = None) -> bytes:
    head = b"" if number is None else b"id: %s\n" % number
    return head + b"event: %s\ndata: %s\n\n" % (kind, body)


def _seen(last_event_id: str | None, epoch: int) -> int:
    first, _, second = (last_event_id or "").partition("-")
    if first == str(epoch) and second.isascii() and second.isdigit() and len(second) < 12:
        return int(second)
    return 0
