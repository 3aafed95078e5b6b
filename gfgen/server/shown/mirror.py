"""The front's copy of the run's state. All responses come from it, so no request waits for the run.

run_bridge.py sends what happens in the run, and `RunMirror.apply` follows.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from gfgen.graph import STEPS
from gfgen.layout import Layout
from gfgen.policies.catalog import BUILT_IN
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.simulate.forecast import predict
from gfgen.server.protocol import schemas, server_schemas
from gfgen.server.protocol.link import (
    LoopTimings,
    NodeGone,
    NodeRanks,
    PredictedEnds,
    ProgressUpdate,
    RankStates,
    RunInfo,
)
from gfgen.server.shown.prometheus import ServerMetrics
from gfgen.server.shown.served_job import ServedJob, layout_view, rounded
from gfgen.server.shown.timeline import Timeline
from gfgen.server.store import Ending, JobFacts
from gfgen.snapshot import JobView

MAX_SHOWN_OPEN, MAX_SHOWN_FINISHED = 200, 48
MAX_RECENT = 128
"""Ended jobs whose events stay in memory."""
NOTABLE_S, NOTABLE = 0.5, 0.05
"""A prediction counts as changed if it moves by more than the larger of these: seconds, and a share of the
remaining time."""


class RunMirror:
    def __init__(
        self,
        *,
        now: Callable[[], float] = time.time,
        version: str = "",
        max_open: int = 0,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self.now = now
        self.began_at = now()
        self.status: schemas.ServerStatus = "loading"
        self.reason: str | None = "the models are loading"
        self.run_info: RunInfo | None = None
        self.records: dict[str, ServedJob] = {}
        """Open jobs in the order of acceptance."""
        self.recent: OrderedDict[str, ServedJob] = OrderedDict()
        self._finished: dict[str | None, deque[ServedJob]] = {}
        """The last jobs of each owner, and of all as None; most recent first."""
        self.run = Timeline(started_at=self.began_at, facts_of=self._facts_of)
        self.num_streams = 0
        self.longest_turn_s = 0.0
        """Of the control loop, since this front started."""
        self.num_turns = 0
        self.metrics = metrics or ServerMetrics()
        self.metrics.mirror = self
        self._version = version
        self._max_open = max_open
        self._is_forecast_due = True

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
                self.run.renew_ends(note.ends)
            case LoopTimings():
                self.longest_turn_s = max(self.longest_turn_s, note.longest_s)
                self.num_turns += note.num_turns
            case NodeRanks():
                self.run.node_joined(note.node, note.ranks)
            case NodeGone():
                self.run.node_left(note.node)
            case RunInfo():
                self._serve(note)
            case RankStates():
                self.run.ranks |= {state.rank: state for state in note.states}
            case events.Event():
                self._applied(note)

    def _applied(self, event: events.Event) -> None:
        self.run.applied(event)
        match event:
            case events.RankLost():
                self.metrics.rank_lost(event.rank, self.run.node_of(event.rank))
            case events.FramesLost():
                self._frames_lost(event.job_id)
            case events.StopRequested() | events.ClosingTime():
                self.drain()

    def _serve(self, run_info: RunInfo) -> None:
        self.run_info = run_info
        self.run = Timeline(started_at=run_info.started_at, facts_of=self._facts_of)
        self.run.began((), num_ranks=run_info.num_ranks, policy=run_info.policy)
        self.status, self.reason = "ready", None

    def drain(self) -> None:
        """The run is stopping; open jobs resume at the next start."""
        self.status, self.reason = "draining", "the server is stopping; open jobs continue after its restart"
        for record in self.records.values():
            record.event("stopping", self.now())

    def policy_asked(self, policy: str) -> None:
        self.run.policy, self.run.policy_change = policy, None

    @property
    def policy(self) -> server_schemas.PolicyState:
        run = self.run
        return server_schemas.PolicyState(
            policy=run.policy,
            deciding=run.deciding,
            reason=None if run.policy_change is None else run.policy_change.reason,
            available=list(BUILT_IN),
        )

    def _dispatched(self, dispatch: Dispatch) -> None:
        self.run.dispatched(dispatch)
        record = self.records.get(dispatch.task.job_id)
        if record is not None:
            self._job_dispatched(record, dispatch)
            self.metrics.dispatched(dispatch, record.facts.model)

    def _job_dispatched(self, record: ServedJob, dispatch: Dispatch) -> None:
        task, layout, at = dispatch.task, dispatch.layout, self.run.at(dispatch.submitted_s)
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
        record.changed()
        self._is_forecast_due = True

    def _landed(self, event: events.TaskDone | events.TaskFailed) -> None:
        dispatch = self.run.running.get(event.dispatch)
        self.run.applied(event)
        if dispatch is None or not isinstance(event, events.TaskDone):
            return
        for each in event.times:
            self.metrics.used(each, self.run.node_of(each.rank))
        task, record = dispatch.task, self.find(dispatch.task.job_id)
        if record is None:
            return
        record.rank_s += event.rank_s
        self.metrics.served(record.facts.owner, event.rank_s)
        if record.has_ended:
            return
        self.metrics.task_done(dispatch, record.facts.model, event.busy_s)
        record.next_index, at = task.index + 1, self.run.at(event.ended_s)
        if task.stage in STEPS:
            record.event("step", at, step=record.step, steps=record.facts.steps)
        if record.next_index == record.facts.num_tasks:
            record.is_writing = True
            record.event("stage", at, stage="write")
        record.changed()

    def _frames_lost(self, job_id: str) -> None:
        """The frames are lost, so the decode runs again."""
        record = self.records.get(job_id)
        if record is not None:
            record.is_writing, record.next_index = False, record.facts.num_tasks - 1
            record.changed()

    def _update_progress(
        self, job_id: str, next_index: int, remaining_s: float, write_s: float, layout: Layout | None
    ) -> None:
        record = self.records.get(job_id)
        if record is None:
            return
        if next_index > 0 and record.started_at is None:  # it started before this front
            record.status, record.next_index, record.layout = "in_progress", next_index, layout
            record.stage = record.task(next_index - 1).stage
            record.position = None
            record.changed()
        facts = record.facts
        record.view = JobView(
            job_id=job_id,
            tag=facts.tag,
            model=facts.model,
            arrival_s=facts.arrives_at,
            deadline_s=math.inf if facts.deadline_at is None else facts.deadline_at,
            precedence=-facts.priority,
            next_task=record.task(next_index),
            num_tasks=facts.num_tasks,
            remaining_s=remaining_s,
            last_layout=layout,
            owner=facts.owner,
            write_s=write_s,
        )
        self._is_forecast_due = True

    def find(self, job_id: str) -> ServedJob | None:
        """The job while it is open and shortly after its end."""
        return self.records.get(job_id) or self.recent.get(job_id)

    def _facts_of(self, job_id: str) -> JobFacts | None:
        record = self.find(job_id)
        return None if record is None else record.facts

    def add(self, records: Iterable[ServedJob]) -> None:
        num_queued = sum(record.status == "queued" for record in self.records.values())
        for position, record in enumerate(records, start=num_queued + 1):
            self.records[record.facts.id] = record
            record.position = position
            record.event("queued", self.now(), position=position)
            record.changed()
        self._is_forecast_due = True

    def end(self, job_id: str, ending: Ending, *, expires_at: float | None) -> ServedJob | None:
        record = self.records.pop(job_id, None)
        if record is None:
            return None
        record.end(ending, expires_at=expires_at)
        record.end_event()
        self.recent[job_id] = record
        while len(self.recent) > MAX_RECENT:
            self.recent.popitem(last=False)
        for owner in {None, record.facts.owner}:
            self._finished_of(owner).appendleft(record)
        self.metrics.ended(record)
        self._is_forecast_due = True
        return record

    def remove(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self.recent.pop(job_id, None)
        gone = set(job_ids)
        for owner, jobs in self._finished.items():
            left = (record for record in jobs if record.facts.id not in gone)
            self._finished[owner] = deque(left, MAX_SHOWN_FINISHED)

    def show_finished(self, owner: str | None, jobs: Iterable[ServedJob]) -> None:
        self._finished_of(owner).extend(jobs)

    def _finished_of(self, owner: str | None) -> deque[ServedJob]:
        return self._finished.setdefault(owner, deque(maxlen=MAX_SHOWN_FINISHED))

    def forecast(self) -> None:
        """Update the predicted ends of open jobs if anything has happened since the last call."""
        if self.run_info is None or not (self._is_forecast_due or self.run.running):
            return
        self._is_forecast_due = False
        views = {
            job_id: record.view
            for job_id, record in self.records.items()
            if record.view is not None and not record.is_writing
        }
        now, running = self.now(), self.run.running_tasks()
        ranks = [rank.rank for rank in self.run.ranks.values() if rank.phase == "ready"]
        predicted = predict(views, running=running, ranks=ranks, now_s=now, policy=self.run.deciding)
        queued = [job_id for job_id in predicted.starts_s if self.records[job_id].status == "queued"]
        for place, job_id in enumerate(queued, start=1):
            self._set_position(self.records[job_id], place, predicted.starts_s[job_id], now)
        for job_id in views:
            record, ends_at = self.records[job_id], predicted.ends_s[job_id]
            if _is_notable(record.predicted_end_at, ends_at, now):
                record.predicted_end_at = ends_at
                record.changed()

    def _set_position(self, record: ServedJob, place: int, starts_at: float, now: float) -> None:
        is_new = record.position != place or record.predicted_start_at is None
        if is_new or _is_notable(record.predicted_start_at, starts_at, now):
            record.position, record.predicted_start_at = place, starts_at
            record.changed()
        if is_new and record.updates.num_waiters:
            record.event("queued", now, position=place, predicted_start_at=rounded(starts_at))

    def state(self, owner: str | None = None) -> server_schemas.LiveState:
        """The whole state, with the jobs of one owner or of all.

        Jobs and bars that have not changed are the same objects as before.
        """
        now = self.now()
        opened = [r for r in self.records.values() if owner in (None, r.facts.owner)]
        return server_schemas.LiveState(
            server_time=round(now, 3),
            started_at=round(self.began_at, 3),
            version=self._version,
            status=self.status,
            reason=self.reason,
            device="" if self.run_info is None else self.run_info.device,
            policy=self.policy,
            models=self.models(),
            ranks=self.ranks(now, owner),
            timeline=self.run.bars(now, owner),
            open=[record.shown() for record in _shown_open(opened)],
            num_open=len(opened),
            max_open=self._max_open,
            finished=[record.shown() for record in self._finished_of(owner)],
            streams=self.num_streams,
        )

    def ranks(self, now: float, owner: str | None = None) -> list[server_schemas.Rank]:
        return list(self.run.rank_views(now, owner, since=self.began_at))

    def models(self) -> list[server_schemas.ServedModel]:
        return [] if self.run_info is None else list(self.run_info.models)


def _shown_open(records: Sequence[ServedJob]) -> list[ServedJob]:
    started = [r for r in records if r.status == "in_progress"]
    queued = [r for r in records if r.status == "queued"]
    started.sort(key=lambda r: r.started_at or 0.0)
    queued.sort(key=lambda r: r.position or 10**9)
    return [*started, *queued][:MAX_SHOWN_OPEN]


def _is_notable(before: float | None, after: float, now: float) -> bool:
    if before is None:
        return True
    return abs(after - before) > max(NOTABLE_S, NOTABLE * max(0.0, after - now))
