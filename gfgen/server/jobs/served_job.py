"""A job in the front's memory, and its representation in responses."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gfgen.graph import Stage, Trajectory
from gfgen.layout import Layout
from gfgen.server.jobs.store import Ending, JobFacts
from gfgen.server.protocol import schemas
from gfgen.snapshot import JobView

MAX_EVENTS = 600
"""Events kept per job, for readers that connect late or reconnect."""
SHOWN_PROMPT_CHARS = 300
"""Length to which the live state shortens prompts."""
_NUM_OTHER_TASKS = 3
"""Encode, prepare and decode."""


class Notifier:
    """Wakes all waiting coroutines."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiters)

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, timeout_s: float) -> bool:
        """False if the timeout came first."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True


@dataclass(frozen=True, slots=True)
class EncodedEvent:
    """An event of a job, ready to send."""

    number: int
    kind: str
    body: bytes


@dataclass(slots=True, eq=False)
class ServedJob:
    """An open or recently ended job. Only mirror.py changes it."""

    facts: JobFacts
    trajectory: Trajectory
    status: schemas.JobStatus = "queued"
    next_index: int = 0
    stage: Stage | None = None
    is_writing: bool = False
    layout: Layout | None = None
    started_at: float | None = None
    position: int | None = None
    predicted_start_at: float | None = None
    predicted_end_at: float | None = None
    ending: Ending | None = None
    view: JobView | None = None
    """For predictions; None until the run has reported the job's progress."""
    expires_at: float | None = None
    version: int = 0
    """Version of the live state at the last change."""
    updates: Notifier = field(default_factory=Notifier)
    events: deque[EncodedEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    num_events: int = 0
    _answer: bytes | None = None

    @property
    def has_ended(self) -> bool:
        return self.ending is not None

    @property
    def step(self) -> int:
        """Number of finished denoising steps."""
        return max(0, min(self.next_index - 2, self.facts.steps))

    @property
    def progress(self) -> int:
        """Percent of finished tasks; writing the file counts as one."""
        if self.status == "completed":
            return 100
        return 100 * self.next_index // (self.facts.num_tasks + 1)

    @property
    def will_meet_deadline(self) -> bool | None:
        if self.ending is not None:
            return self.ending.met_deadline
        if self.facts.deadline_at is None or self.predicted_end_at is None:
            return None
        return self.predicted_end_at <= self.facts.deadline_at

    def answer(self) -> bytes:
        """The job as JSON, cached until the next change."""
        if self._answer is None:
            self._answer = self.job().model_dump_json().encode()
        return self._answer

    def changed(self) -> None:
        self._answer = None

    def job(self, *, shown_chars: int | None = None) -> schemas.Job:
        ending = self.ending
        return job_of(
            self.facts,
            ending,
            expires_at=self.expires_at,
            shown_chars=shown_chars,
            **{} if ending is not None else self._open_values(),
        )

    def event(self, kind: Any, at: float, **values: Any) -> None:
        """Append an event and wake the readers."""
        event = schemas.JobEvent(
            type=kind,
            at=round(at, 4),
            job_id=self.facts.id,
            status=self.status,
            progress=self.progress,
            predicted_completion_at=None if self.has_ended else rounded(self.predicted_end_at),
            will_meet_deadline=self.will_meet_deadline,
            **values,
        )
        self.num_events += 1
        self.events.append(
            EncodedEvent(self.num_events, kind, event.model_dump_json(exclude_none=True).encode())
        )
        self.updates.notify()

    def events_after(self, number: int) -> list[EncodedEvent]:
        return [event for event in self.events if event.number > number]

    def _open_values(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "progress": self.progress,
            "step": self.step,
            "stage": self.stage_name,
            "layout": layout_view(self.layout),
            "position": self.position,
            "started_at": rounded(self.started_at),
            "predicted_start_at": rounded(self.predicted_start_at) if self.status == "queued" else None,
            "predicted_completion_at": rounded(self.predicted_end_at),
            "will_meet_deadline": self.will_meet_deadline,
        }

    @property
    def stage_name(self) -> schemas.StageName | None:
        if self.is_writing:
            return "write"
        return None if self.stage is None else self.stage.value


def job_of(
    facts: JobFacts,
    ending: Ending | None,
    *,
    expires_at: float | None,
    shown_chars: int | None,
    **values: Any,
) -> schemas.Job:
    """The public form of a job; `values` are the variable fields of an open one."""
    if ending is not None:
        is_done = ending.status == "completed"
        values = {
            "status": ending.status,
            "progress": 100 if is_done else 100 * ending.step // (facts.steps + _NUM_OTHER_TASKS + 1),
            "step": ending.step,
            "started_at": rounded(ending.started_at),
            "completed_at": int(ending.completed_at),
            "expires_at": None if expires_at is None else int(expires_at),
            "will_meet_deadline": ending.met_deadline,
            "error": _error(ending),
            "content_url": f"/v1/jobs/{facts.id}/content" if is_done else None,
            "thumbnail_url": f"/v1/jobs/{facts.id}/content?variant=thumbnail" if is_done else None,
        }
    return schemas.Job(
        id=facts.id,
        object=facts.kind,
        model=facts.model,
        prompt=facts.prompt if shown_chars is None else facts.prompt[:shown_chars],
        size=facts.size,
        seconds=facts.seconds,
        created_at=int(facts.created_at),
        frames=facts.frames,
        fps=facts.fps,
        steps=facts.steps,
        seed=facts.seed,
        priority=facts.priority,
        tag=facts.tag,
        batch_id=facts.batch_id,
        custom_id=facts.custom_id,
        deadline_at=rounded(facts.deadline_at),
        **values,
    )


def layout_view(layout: Layout | None) -> schemas.LayoutView | None:
    if layout is None:
        return None
    return schemas.LayoutView(
        ranks=list(layout.ranks), cfg=layout.cfg, ulysses=layout.ulysses, ring=layout.ring
    )


def rounded(moment: float | None) -> float | None:
    """A Unix time rounded to milliseconds, which keeps JSON short."""
    return None if moment is None else round(moment, 3)


def _error(ending: Ending) -> schemas.JobFailure | None:
    if ending.error_code is None:
        return None
    return schemas.JobFailure(code=ending.error_code, message=ending.error_message or "")
