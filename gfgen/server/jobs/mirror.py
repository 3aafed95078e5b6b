"""The front's copy of the run's state. All responses come from it, so no request waits for the run.

run_bridge.py sends what happens in the run, and `RunMirror.apply` follows. Changes are numbered; a stream
asks for those after the last number it has seen.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.policies.catalog import BUILT_IN
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.predict.forecast import predict
from gfgen.server.jobs.rank_lane import LaneBar, RankLane, RunningDispatch
from gfgen.server.jobs.served_job import SHOWN_PROMPT_CHARS, ServedJob, layout_view, rounded
from gfgen.server.jobs.store import Ending
from gfgen.server.protocol import schemas
from gfgen.server.protocol.link import LoopTimings, PredictedEnds, ProgressUpdate, RunInfo
from gfgen.snapshot import JobView, RunningTask

TIMELINE_S = 120.0
MAX_BARS = 600
MAX_SHOWN_OPEN, MAX_SHOWN_FINISHED = 200, 48
MAX_RECENT = 128
"""Ended jobs whose events stay in memory."""
NOTABLE_S, NOTABLE = 0.5, 0.05
"""A prediction counts as changed if it moves by more than the larger of these: seconds, and a share of the
remaining time."""


class MirrorObserver:
    """Callbacks for metrics; each does nothing by default."""

    def dispatched(self, dispatch: Dispatch, model: str) -> None:
        """A task was submitted to ranks."""

    def task_done(self, dispatch: Dispatch, model: str, busy_s: float) -> None:
        """A task ended on all of its ranks."""

    def used(self, rank: int, busy_s: float) -> None:
        """A rank was busy for this long."""

    def rank_lost(self, rank: int) -> None:
        """A worker process died."""

    def ended(self, record: ServedJob) -> None:
        """A job ended."""


class RunMirror:
    """Ranks, jobs, timeline and policy; `now` returns Unix time."""

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.time,
        version: str = "",
        max_open: int = 0,
        observer: MirrorObserver | None = None,
    ) -> None:
        self.now = now
        self.began_at = now()
        self.status: schemas.ServerStatus = "loading"
        self.reason: str | None = "the models are loading"
        self.run_info: RunInfo | None = None
        self.records: dict[str, ServedJob] = {}
        """Open jobs in the order of acceptance."""
        self.recent: OrderedDict[str, ServedJob] = OrderedDict()
        self.finished: deque[schemas.Job] = deque(maxlen=MAX_SHOWN_FINISHED)
        """Most recent first."""
        self.ranks: list[RankLane] = []
        self.deciding: str | None = None
        self.policy_reason: str | None = None
        self.asked_policy: str | None = None
        self.version = 1
        self._observer = observer or MirrorObserver()
        self.num_streams = 0
        self.longest_turn_s = 0.0
        """Of the control loop, since this front started."""
        self.num_turns = 0
        self._gfgen_version = version
        self._max_open = max_open
        self._running: dict[int, RunningDispatch] = {}
        self._bars: deque[LaneBar] = deque(maxlen=MAX_BARS)
        self._changed: dict[str, int] = defaultdict(int)
        """Version of the last change of each part of the state."""
        self._finished_at: deque[tuple[int, schemas.Job]] = deque(maxlen=MAX_SHOWN_FINISHED)
        self._removed: deque[tuple[int, str]] = deque(maxlen=1000)
        self._is_forecast_due = True

    # Notes from the run -----------------------------------------------------------------------------

    def apply(self, note: Any) -> None:
        """Apply one note; job outcomes do not come here (service.py)."""
        match note:
            case Dispatch():
                self._dispatched(note)
            case events.TaskDone() | events.TaskFailed():
                self._landed(note)
            case ProgressUpdate():
                for row in note.rows:
                    self._update_progress(*row)
            case PredictedEnds():
                self._renew_ends(note)
            case LoopTimings():
                self.longest_turn_s = max(self.longest_turn_s, note.longest_s)
                self.num_turns += note.num_turns
            case events.RankReady():
                self._rank_ready(note)
            case events.RankLost():
                rank = self._rank(note.rank)
                rank.status = "retired" if note.is_retired else "lost"
                self._observer.rank_lost(note.rank)
                self._touch("ranks")
            case events.ModelsChanged():
                for rank in self.ranks:
                    rank.status = rank.status if rank.status in ("lost", "retired") else "loading"
                self._touch("ranks")
            case events.RankLoaded():
                rank = self._rank(note.rank)
                rank.status = "busy" if rank.dispatches else "idle"
                self._touch("ranks")
            case events.FramesLost():
                self._frames_lost(note.job_id)
            case events.PolicyChanged():
                self.deciding, self.policy_reason = note.policy, note.reason
                self._touch("policy")
            case events.StopRequested() | events.ClosingTime():
                self.drain()
            case RunInfo():
                self._serve(note)

    def _serve(self, run_info: RunInfo) -> None:
        self.run_info = run_info
        self.asked_policy = self.asked_policy or run_info.policy
        self.deciding = run_info.policy
        self.ranks = [RankLane(rank) for rank in range(run_info.num_ranks)]
        self._running.clear()
        self._bars.clear()
        self.status, self.reason = "ready", None
        self._touch("status", "ranks", "policy", "models")

    def drain(self) -> None:
        """The run is stopping; open jobs resume at the next start."""
        self.status, self.reason = "draining", "the server is stopping; open jobs continue after its restart"
        self._touch("status")
        for record in self.records.values():
            record.event("stopping", self.now())

    def policy_asked(self, policy: str) -> None:
        """Another policy was requested; the run reports which one decides."""
        self.asked_policy = self.deciding = policy
        self.policy_reason = None
        self._touch("policy")

    def at(self, time_s: float) -> float:
        """Convert seconds of the run to Unix time."""
        assert self.run_info is not None
        return self.run_info.started_at + time_s

    def _rank(self, rank: int) -> RankLane:
        return self.ranks[rank]

    def _rank_ready(self, event: events.RankReady) -> None:
        rank = self._rank(event.rank)
        rank.status = "busy" if rank.dispatches else "idle"
        rank.num_restarts = event.incarnation - 1
        self._touch("ranks")

    # Tasks ------------------------------------------------------------------------------------------

    def _dispatched(self, dispatch: Dispatch) -> None:
        running = RunningDispatch(dispatch, dispatch.predicted_end_s)
        self._running[dispatch.number] = running
        at = self.at(dispatch.submitted_s)
        for number in dispatch.layout.ranks:
            rank = self._rank(number)
            rank.dispatches.append(running)
            if len(rank.dispatches) == 1:
                self._begin(rank, at)
        record = self.records.get(dispatch.task.job_id)
        if record is not None:
            self._job_dispatched(record, dispatch, at)
            self._observer.dispatched(dispatch, record.facts.model)
        self._touch("ranks", "timeline")

    def _begin(self, rank: RankLane, at: float) -> None:
        bar = rank.begin(at)
        if bar is not rank.bar:
            rank.bar = bar
            self._bars.append(bar)
        bar.version = self.version + 1

    def _job_dispatched(self, record: ServedJob, dispatch: Dispatch, at: float) -> None:
        task, layout = dispatch.task, dispatch.layout
        is_first = record.started_at is None
        has_moved = record.layout != layout
        is_new_stage = record.stage is not task.stage
        record.status, record.stage = "in_progress", task.stage
        record.layout, record.position, record.predicted_start_at = layout, None, None
        if is_first:
            record.started_at = at
            record.event("started", at, stage=task.stage.value, layout=layout_view(layout))
        elif has_moved:
            record.event("layout", at, stage=task.stage.value, layout=layout_view(layout))
        if is_new_stage and not is_first:
            record.event("stage", at, stage=task.stage.value)
        if record.view is not None and task.index + 1 == record.facts.num_tasks:
            record.view = replace(
                record.view, remaining_s=0.0
            )  # the run reports no progress for the last task
        self._job_changed(record)
        self._is_forecast_due = True

    def _renew_ends(self, note: PredictedEnds) -> None:
        """Update the predicted ends of running tasks."""
        for number, end_s in note.ends:
            if number in self._running:
                self._running[number].predicted_end_s = end_s
        self._touch("ranks")

    def _landed(self, event: events.TaskDone | events.TaskFailed) -> None:
        running = self._running.pop(event.dispatch, None)
        if running is None:
            return
        times = {each.rank: each for each in event.times} if isinstance(event, events.TaskDone) else {}
        for number in running.dispatch.layout.ranks:
            rank, at = self._rank(number), self.at(event.time_s)
            if number in times:
                at, busy_s = self.at(times[number].ended_s), times[number].busy_s
                self._observer.used(number, busy_s)
                rank.note_use(busy_s, at)
            self._leave(rank, running, at)
        if isinstance(event, events.TaskDone):
            self._task_done(running.dispatch, event)
        self._touch("ranks", "timeline")

    def _leave(self, rank: RankLane, running: RunningDispatch, at: float) -> None:
        """A rank is free of a task; the next one that it was given begins."""
        was_first = rank.dispatches[:1] == [running]
        if running in rank.dispatches:
            rank.dispatches.remove(running)
        if was_first and rank.bar is not None:
            rank.bar.ended_at, rank.bar.version = at, self.version + 1
        if not rank.dispatches:
            rank.status = "idle" if rank.status == "busy" else rank.status
        elif was_first:
            self._begin(rank, at)

    def _task_done(self, dispatch: Dispatch, event: events.TaskDone) -> None:
        task, record = dispatch.task, self.records.get(dispatch.task.job_id)
        if record is None:
            return
        self._observer.task_done(dispatch, record.facts.model, event.busy_s)
        record.next_index = task.index + 1
        if task.stage is Stage.DENOISE:
            record.event("step", self.at(event.ended_s), step=record.step, steps=record.facts.steps)
        if record.next_index == record.facts.num_tasks:
            record.is_writing = True
            record.event("stage", self.at(event.ended_s), stage="write")
        self._job_changed(record)

    def _frames_lost(self, job_id: str) -> None:
        """The frames are lost, so the decode runs again."""
        record = self.records.get(job_id)
        if record is not None:
            record.is_writing, record.next_index = False, record.facts.num_tasks - 1
            self._job_changed(record)

    def _update_progress(
        self, job_id: str, next_index: int, remaining_s: float, layout: Layout | None
    ) -> None:
        """Update a job's next task and remaining work, the input of predictions."""
        record = self.records.get(job_id)
        if record is None:
            return
        if next_index > 0 and record.started_at is None:  # it started before this front
            record.status, record.next_index, record.layout = "in_progress", next_index, layout
            record.stage = record.trajectory.task(next_index - 1).stage
            record.position = None
            self._job_changed(record)
        facts = record.facts
        record.view = JobView(
            job_id=job_id,
            tag=facts.tag,
            model=facts.model,
            arrival_s=facts.arrives_at,
            deadline_s=math.inf if facts.deadline_at is None else facts.deadline_at,
            precedence=-facts.priority,
            next_task=record.trajectory.task(next_index),
            num_tasks=facts.num_tasks,
            remaining_s=remaining_s,
            last_layout=layout,
        )
        self._is_forecast_due = True

    # Jobs -------------------------------------------------------------------------------------------

    def add(self, records: Iterable[ServedJob]) -> None:
        """Add accepted jobs."""
        num_queued = sum(record.status == "queued" for record in self.records.values())
        for position, record in enumerate(records, start=num_queued + 1):
            self.records[record.facts.id] = record
            record.position = position
            record.event("queued", self.now(), position=position)
            self._job_changed(record)
        self._is_forecast_due = True

    def end(self, job_id: str, ending: Ending, *, expires_at: float | None) -> ServedJob | None:
        """A job has ended; the store already has this ending."""
        record = self.records.pop(job_id, None)
        if record is None:
            return None
        record.ending, record.status, record.expires_at = ending, ending.status, expires_at
        record.position = record.view = record.predicted_start_at = None
        record.changed()
        done = record.status == "completed"
        record.event(
            ending.status,
            ending.completed_at,
            error=record.job().error,
            content_url=f"/v1/jobs/{job_id}/content" if done else None,
        )
        self.recent[job_id] = record
        while len(self.recent) > MAX_RECENT:
            self.recent.popitem(last=False)
        self.show_finished(record.job(shown_chars=SHOWN_PROMPT_CHARS))
        self._observer.ended(record)
        self._is_forecast_due = True
        return record

    def show_finished(self, job: schemas.Job) -> None:
        """Put the job at the head of the finished list."""
        self._touch("open", "finished")
        self.finished.appendleft(job)
        self._finished_at.appendleft((self.version, job))

    def remove(self, job_ids: Sequence[str]) -> None:
        """Ended jobs were removed."""
        gone = set(job_ids)
        self._touch("finished")
        self._removed.extend((self.version, job_id) for job_id in job_ids)
        stored = [entry for entry in self._finished_at if entry[1].id not in gone]
        self._finished_at = deque(stored, maxlen=MAX_SHOWN_FINISHED)
        self.finished = deque((job for _, job in stored), maxlen=MAX_SHOWN_FINISHED)
        for job_id in job_ids:
            self.recent.pop(job_id, None)

    def _job_changed(self, record: ServedJob) -> None:
        self.version += 1
        record.version = self.version
        record.changed()
        self._changed["open"] = self.version

    def forecast(self) -> None:
        """Update the predicted ends of open jobs if anything has happened since the last call."""
        if self.run_info is None or not (self._is_forecast_due or self._running):
            return
        self._is_forecast_due = False
        views = {job_id: r.view for job_id, r in self.records.items() if r.view is not None}
        now, shift_s = self.now(), self.run_info.started_at
        running = [
            RunningTask(f.dispatch.task, f.dispatch.layout, shift_s + f.predicted_end_s)
            for f in self._running.values()
        ]
        ranks = [rank.rank for rank in self.ranks if rank.status in ("idle", "busy")]
        policy = self.deciding or ""
        predicted = predict(views, running=running, ranks=ranks, now_s=now, policy=policy)
        queued = [job_id for job_id in predicted.starts_s if self.records[job_id].status == "queued"]
        for place, job_id in enumerate(queued, start=1):
            self._set_position(self.records[job_id], place, predicted.starts_s[job_id], now)
        for job_id in views:
            record, ends_at = self.records[job_id], predicted.ends_s[job_id]
            if _is_notable(record.predicted_end_at, ends_at, now):
                record.predicted_end_at = ends_at
                self._job_changed(record)

    def _set_position(self, record: ServedJob, place: int, starts_at: float, now: float) -> None:
        is_new = record.position != place or record.predicted_start_at is None
        if is_new or _is_notable(record.predicted_start_at, starts_at, now):
            record.position, record.predicted_start_at = place, starts_at
            self._job_changed(record)
        if is_new and record.updates.has_waiters:
            record.event("queued", now, position=place, predicted_start_at=rounded(starts_at))

    # Responses -------------------------------------------------------------------------------------

    def shown_open(self) -> list[ServedJob]:
        """Started jobs in the order of their start, then the queue."""
        started = [r for r in self.records.values() if r.status == "in_progress"]
        queued = [r for r in self.records.values() if r.status == "queued"]
        started.sort(key=lambda r: r.started_at or 0.0)
        queued.sort(key=lambda r: r.position or 10**9)
        return [*started, *queued][:MAX_SHOWN_OPEN]

    def state(self) -> schemas.LiveState:
        """The whole state."""
        now = self.now()
        return schemas.LiveState(
            server_time=round(now, 3),
            started_at=round(self.began_at, 3),
            version=self._gfgen_version,
            status=self.status,
            reason=self.reason,
            device="" if self.run_info is None else self.run_info.device,
            policy=self.policy(),
            models=self.models(),
            ranks=self.shown_ranks(now),
            timeline=[s.shown() for s in self._recent_bars(now)],
            open=[r.job(shown_chars=SHOWN_PROMPT_CHARS) for r in self.shown_open()],
            num_open=len(self.records),
            max_open=self._max_open,
            finished=list(self.finished),
            streams=self.num_streams,
        )

    def change(self, since: int) -> schemas.Change | None:
        """The changes after version `since`; None if there are none."""
        if self.version <= since:
            return None
        now, changed = self.now(), self._changed
        values: dict[str, Any] = {}
        if changed["status"] > since:
            values |= {"status": self.status, "reason": self.reason}
        if changed["policy"] > since:
            values["policy"] = self.policy()
        if changed["models"] > since:
            values["models"] = self.models()
        if changed["ranks"] > since:
            values["ranks"] = self.shown_ranks(now)
        if changed["timeline"] > since:
            values["timeline"] = [s.shown() for s in self._recent_bars(now) if s.version > since]
        if changed["open"] > since:
            shown = self.shown_open()
            new = [r.job(shown_chars=SHOWN_PROMPT_CHARS) for r in shown if r.version > since]
            values |= {"open": new, "order": [r.facts.id for r in shown], "num_open": len(self.records)}
        if changed["finished"] > since:
            values["finished"] = [job for version, job in self._finished_at if version > since]
            values["removed"] = [job_id for version, job_id in self._removed if version > since]
        return schemas.Change(server_time=round(now, 3), **values)

    def policy(self) -> schemas.PolicyState:
        return schemas.PolicyState(
            policy=self.asked_policy or "",
            deciding=self.deciding or self.asked_policy or "",
            reason=self.policy_reason,
            available=list(BUILT_IN),
        )

    def models(self) -> list[schemas.ServedModel]:
        return [] if self.run_info is None else list(self.run_info.models)

    def shown_ranks(self, now: float) -> list[schemas.Rank]:
        since = self.began_at if self.run_info is None else max(self.began_at, self.run_info.started_at)
        return [
            schemas.Rank(
                rank=rank.rank,
                status=rank.status,
                task=self._rank_task(rank),
                utilisation=round(rank.utilisation(now, since=since), 3),
                restarts=rank.num_restarts,
            )
            for rank in self.ranks
        ]

    def _rank_task(self, rank: RankLane) -> schemas.RankTask | None:
        if not rank.dispatches:
            return None
        running = rank.dispatches[0]
        dispatch = running.dispatch
        record = self.records.get(dispatch.task.job_id) or self.recent.get(dispatch.task.job_id)
        view = layout_view(dispatch.layout)
        assert view is not None
        return schemas.RankTask(
            job_id=dispatch.task.job_id,
            stage=dispatch.task.stage.value,
            step=dispatch.task.step,
            steps=0 if record is None else record.facts.steps,
            layout=view,
            started_at=round(rank.begun_at, 4),
            predicted_end_at=round(self.at(running.predicted_end_s), 4),
        )

    def _recent_bars(self, now: float) -> Iterator[LaneBar]:
        return (s for s in self._bars if s.ended_at is None or s.ended_at > now - TIMELINE_S)

    def _touch(self, *parts: str) -> None:
        self.version += 1
        for part in parts:
            self._changed[part] = self.version


def _is_notable(before: float | None, after: float, now: float) -> bool:
    if before is None:
        return True
    return abs(after - before) > max(NOTABLE_S, NOTABLE * max(0.0, after - now))
