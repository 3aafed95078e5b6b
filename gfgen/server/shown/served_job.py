"""A job in the front's memory, and its representation in responses."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gfgen.graph import Stage, Task, Trajectory
from gfgen.layout import Layout
from gfgen.server.protocol import server_schemas
from gfgen.server.protocol.schemas import Job, JobFailure, JobStatus, LayoutView
from gfgen.server.shown.previews import FIRST_STEP
from gfgen.server.store import SHOWN, Ending, JobFacts
from gfgen.snapshot import JobView

MAX_EVENTS = 600
"""Events kept per job, for readers that connect late or reconnect."""
_SAME = ("model", "prompt", "steps", "seed", "priority", "tag", "batch_id", "custom_id", "owner", "favourite")
"""Facts that a response has under the same name."""
SHOWN_PROMPT_CHARS = 300


class Notifier:
    """Wakes all waiting coroutines."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.num_waiters = 0

    def notify(self) -> None:
        self._event.set()
        self._event.clear()

    async def wait(self, timeout_s: float) -> bool:
        """False if the timeout came first."""
        self.num_waiters += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await self._event.wait()
        except TimeoutError:
            return False
        finally:
            self.num_waiters -= 1


@dataclass(frozen=True, slots=True)
class EncodedEvent:
    number: int
    kind: str
    body: bytes


@dataclass(slots=True, eq=False)
class ServedJob:
    """An accepted job. The mirror changes it while it is open; `end` makes it final."""

    facts: JobFacts
    status: JobStatus = "queued"
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
    rank_s: float = 0.0
    """Seconds of ranks so far, since this front started."""
    has_previews: bool = False
    updates: Notifier = field(default_factory=Notifier)
    ends: Notifier = field(default_factory=Notifier)
    """For those who wait for nothing else."""
    events: deque[EncodedEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    num_events: int = 0
    _job: Job | None = None
    _shown: Job | None = None

    @property
    def has_ended(self) -> bool:
        return self.ending is not None

    @property
    def step(self) -> int:
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

    @property
    def content_url(self) -> str | None:
        return f"/v1/jobs/{self.facts.id}/content" if self.status == "completed" else None

    def task(self, index: int) -> Task:
        return Trajectory(self.facts.id, self.facts.steps, num_refined=self.facts.num_refined).task(index)

    def shown(self) -> Job:
        """The job in the live state: with a short prompt, and the same object until the next change."""
        if self._shown is None:
            job = self.job()
            self._shown = job.model_copy(update={"prompt": job.prompt[:SHOWN_PROMPT_CHARS]})
        return self._shown

    def changed(self) -> None:
        self._job = self._shown = None

    def end(self, ending: Ending, *, expires_at: float | None) -> None:
        self.ending, self.status, self.expires_at = ending, ending.status, expires_at
        self.started_at = ending.started_at
        self.next_index = max(self.next_index, ending.step + 2 if ending.step else 0)
        self.stage = self.layout = self.view = None
        self.position = self.predicted_start_at = self.predicted_end_at = None
        self.is_writing = False
        self.changed()

    def job(self) -> Job:
        """The job as in responses, the same object until the next change."""
        if self._job is None:
            self._job = self._make_job()
        return self._job

    def _make_job(self) -> Job:
        facts, ending, url = self.facts, self.ending, self.content_url
        made = {} if ending is None else ending.manifest or {}
        took_s = None
        if ending is not None and ending.status == "completed" and ending.started_at is not None:
            took_s = round(ending.completed_at - ending.started_at, 3)
        timings = made.get("timings") or {"rank_s": self.rank_s}
        shown: dict[str, Any] = {name: made.get(name) for name in SHOWN}
        has_preview = self.has_previews and self.status == "in_progress" and self.step >= FIRST_STEP
        return Job(
            id=facts.id,
            object=facts.kind,
            **{name: getattr(facts, name) for name in _SAME},
            status=self.status,
            progress=self.progress,
            **self._size(),
            created_at=int(facts.created_at),
            completed_at=None if ending is None else int(ending.completed_at),
            expires_at=None if self.expires_at is None else int(self.expires_at),
            error=_failure(ending),
            warnings=list(facts.warnings) or None,
            step=self.step,
            stage="write" if self.is_writing else None if self.stage is None else self.stage.value,
            layout=None if self.layout is None else layout_view(self.layout),
            position=self.position,
            started_at=rounded(self.started_at),
            predicted_start_at=rounded(self.predicted_start_at) if self.status == "queued" else None,
            predicted_completion_at=rounded(self.predicted_end_at),
            deadline_at=rounded(facts.deadline_at),
            will_meet_deadline=self.will_meet_deadline,
            inference_time_s=took_s,
            stage_durations=timings.get("stages_s"),
            rank_s=round(timings.get("rank_s") or 0.0, 3),
            **shown,
            content_url=url,
            thumbnail_url=None if url is None else f"{url}?variant=thumbnail",
            preview_url=f"/v1/jobs/{facts.id}/preview" if has_preview else None,
        )

    def _size(self) -> dict[str, Any]:
        facts = self.facts
        size: dict[str, Any] = {"size": facts.size, "frames": facts.frames, "fps": facts.fps}
        if self.status == "completed" and self.ending is not None and self.ending.manifest is not None:
            shape = self.ending.manifest["shape"]
            size["size"] = "{width}x{height}".format_map(shape)
            size["frames"] = None if facts.frames is None else shape["frames"]
        if (frames := size["frames"]) is not None:
            seconds = f"{frames / (facts.fps or 1):.3f}"  # clients read it as "5.063" or "4"
            size["seconds"] = seconds.rstrip("0").rstrip(".")
        return size

    def event(self, kind: Any, at: float, **values: Any) -> None:
        event = server_schemas.JobEvent(
            type=kind,
            at=round(at, 4),
            job_id=self.facts.id,
            status=self.status,
            progress=self.progress,
            predicted_completion_at=rounded(self.predicted_end_at),
            will_meet_deadline=self.will_meet_deadline,
            **values,
        )
        self.num_events += 1
        self.events.append(
            EncodedEvent(self.num_events, kind, event.model_dump_json(exclude_none=True).encode())
        )
        self.updates.notify()
        if self.has_ended or kind == "stopping":
            self.ends.notify()

    def end_event(self) -> None:
        """Append the last event of a job that has ended."""
        assert self.ending is not None
        at, error = self.ending.completed_at, _failure(self.ending)
        self.event(self.status, at, error=error, content_url=self.content_url)


def layout_view(layout: Layout) -> LayoutView:
    return LayoutView(
        ranks=list(layout.ranks),
        cfg=layout.cfg,
        ulysses=layout.ulysses,
        ring=layout.ring,
        torus=layout.torus,
    )


def rounded(moment: float | None) -> float | None:
    """A Unix time rounded to milliseconds, which keeps JSON short."""
    return None if moment is None else round(moment, 3)


def _failure(ending: Ending | None) -> JobFailure | None:
    if ending is None or ending.error_code is None:
        return None
    return JobFailure(code=ending.error_code, message=ending.error_message or "")
