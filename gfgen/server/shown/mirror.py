"""The front's copy of the run's state. All responses come from it, so no request waits for the run.

bridge.py sends what happens in the run, and `RunMirror.apply` follows. Its `Timeline` knows what each
rank does, and bars: uninterrupted work of one rank for one job.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gfgen.graph import STEPS
from gfgen.layout import Layout
from gfgen.policies.catalog import BUILT_IN
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import RankState, RunView
from gfgen.runtime.simulate.forecast import predict
from gfgen.server.protocol import link, schemas, server_schemas
from gfgen.server.shown.prometheus import ServerMetrics
from gfgen.server.shown.served_job import ServedJob, layout_view, rounded
from gfgen.server.store import Ending, JobFacts
from gfgen.snapshot import JobView, RunningTask

MAX_SHOWN_OPEN, MAX_SHOWN_FINISHED = 200, 48
MAX_RECENT = 128
"""Ended jobs whose events stay in memory."""
NOTABLE_S, NOTABLE = 0.5, 0.05
"""A prediction counts as changed if it moves by more than the larger of these: seconds, and a share of the
remaining time."""
TIMELINE_S = 120.0
MAX_BARS = 600
GAP_S = 0.25
USE_S = 60


class RunMirror:
    def __init__(
        self,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        version: str = "",
        max_open: int = 0,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self.now, self._monotonic = now, monotonic
        self.began_at = now()
        self.status: schemas.ServerStatus = "loading"
        self.reason: str | None = "the models are loading"
        self.run_info: link.RunInfo | None = None
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
        self.version = version
        self._max_open = max_open
        self._is_forecast_due = True

    def apply(self, note: Any) -> None:
        """Apply one note; job outcomes do not come here (service.py)."""
        match note:
            case Dispatch():
                self._dispatched(note)
            case events.TaskDone() | events.TaskFailed():
                self._landed(note)
            case link.ProgressUpdate():
                for row in note.rows:
                    self._update_progress(*row)
                self.run.renew_ends(note.ends)
                self.longest_turn_s = max(self.longest_turn_s, note.longest_turn_s)
                self.num_turns += note.num_turns
            case link.NodeRanks():
                self.run.node_joined(note.node, note.ranks)
            case link.NodeGone():
                self.run.node_left(note.node)
            case link.RunInfo():
                self._serve(note)
            case link.RankStates():
                self.run.ranks |= {state.rank: state for state in note.states}
            case Event():
                self._applied(note)

    def _applied(self, event: Event) -> None:
        self.run.applied(event)
        match event:
            case events.RankLost():
                self.metrics.rank_lost(event.rank, self.run.node_of(event.rank))
            case events.FramesLost():
                if (record := self.records.get(event.job_id)) is not None:  # so the decode runs again
                    record.is_writing, record.next_index = False, record.facts.num_tasks - 1
                    record.changed()
            case events.StopRequested() | events.ClosingTime():
                self.drain()

    def _serve(self, run_info: link.RunInfo) -> None:
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
        task, layout, at = dispatch.task, dispatch.layout, self.run.at(dispatch.submitted_s)
        record = self.records.get(task.job_id)
        if record is None:
            return
        self.metrics.dispatched(dispatch, record.facts.model)
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
            record.view = replace(record.view, remaining_s=0.0)  # the run reports nothing of the last task
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
            num_refined=facts.num_refined,
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
            self.finished_of(owner).appendleft(record)
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

    def finished_of(self, owner: str | None) -> deque[ServedJob]:
        return self._finished.setdefault(owner, deque(maxlen=MAX_SHOWN_FINISHED))

    def set_favourite(self, facts: JobFacts, *, is_favourite: bool) -> None:
        ended = (*self.finished_of(None), *self.finished_of(facts.owner))
        for record in filter(None, (self.find(facts.id), *ended)):
            if record.facts.id == facts.id:  # after a restart, the lists have records of their own
                record.facts = replace(record.facts, favourite=is_favourite)
                record.changed()

    def forecast(self) -> None:
        """Update the predicted ends of open jobs if anything has happened since the last call."""
        if self.run_info is None or not (self._is_forecast_due or self.run.running):
            return
        if self.run_info.began_s is not None:  # somebody may have set the clock
            self.run.started_at = self.run_info.began_s + self.now() - self._monotonic()
        self._is_forecast_due = False
        views = {
            job_id: record.view
            for job_id, record in self.records.items()
            if record.view is not None and not record.is_writing
        }
        now, run = self.now(), self.run
        running = [RunningTask(d.task, d.layout, run.at(d.predicted_end_s)) for d in run.running.values()]
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
            version=self.version,
            status=self.status,
            reason=self.reason,
            device="" if self.run_info is None else self.run_info.device,
            policy=self.policy,
            models=self.models(),
            ranks=self.ranks(now, owner),
            timeline=self.run.bars(now, owner),
            open=[record.shown() for record in sorted(opened, key=_place)[:MAX_SHOWN_OPEN]],
            num_open=len(opened),
            max_open=self._max_open,
            finished=[record.shown() for record in self.finished_of(owner)],
            streams=self.num_streams,
        )

    def ranks(self, now: float, owner: str | None = None) -> list[server_schemas.Rank]:
        return list(self.run.rank_views(now, owner, since=self.began_at))

    def models(self) -> list[server_schemas.ServedModel]:
        return [] if self.run_info is None else list(self.run_info.models)


def _place(record: ServedJob) -> tuple[bool, float]:
    """Started jobs come first."""
    is_queued = record.status == "queued"
    return is_queued, record.position or math.inf if is_queued else record.started_at or 0.0


def _is_notable(before: float | None, after: float, now: float) -> bool:
    if before is None:
        return True
    return abs(after - before) > max(NOTABLE_S, NOTABLE * max(0.0, after - now))


class Timeline(RunView):
    """The ranks of a run, and their bars. Events have seconds of the run, the rest has Unix time."""

    def __init__(self, *, started_at: float, facts_of: Callable[[str], JobFacts | None]) -> None:
        super().__init__()
        self.started_at, self._facts_of = started_at, facts_of
        self._begun_at: dict[int, float] = {}
        """By rank: when its task started."""
        self._busy_s: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        """By rank: busy time in each second."""
        self._bars: dict[str, server_schemas.TimelineBar] = {}
        """Oldest first. A bar is replaced when it changes, so an identical object is an unchanged bar."""
        self._last_bar: dict[int, str] = {}
        """By rank."""

    def at(self, time_s: float) -> float:
        return self.started_at + time_s

    def node_of(self, rank: int) -> str | None:
        return self.ranks[rank].node if rank in self.ranks else None

    def dispatched(self, dispatch: Dispatch) -> None:
        super().dispatched(dispatch)
        for rank in dispatch.layout.ranks:
            if self.ranks[rank].queue == [dispatch.number]:
                self._begin(rank, dispatch, self.at(dispatch.submitted_s))

    def applied(self, event: Event) -> None:
        if not isinstance(event, events.TaskDone | events.TaskFailed):
            super().applied(event)
        elif (dispatch := self.running.get(event.dispatch)) is not None:
            ranks = dispatch.layout.ranks
            begun = [rank for rank in ranks if self.ranks[rank].queue[0] == event.dispatch]
            super().applied(event)
            times = {each.rank: each for each in event.times} if isinstance(event, events.TaskDone) else {}
            for rank in ranks:
                at = self.at(times[rank].ended_s if rank in times else event.time_s)
                if rank in times:
                    use = self._busy_s[rank]
                    use[int(at)] += times[rank].busy_s
                    while len(use) > 2 * USE_S:
                        del use[next(iter(use))]
                if rank in begun:
                    self._end(rank, at)

    def renew_ends(self, ends: Sequence[tuple[int, float]]) -> None:
        for number, end_s in ends:
            if number in self.running:
                self.running[number] = replace(self.running[number], predicted_end_s=end_s)

    def _begin(self, rank: int, dispatch: Dispatch, at: float) -> None:
        """The first dispatch of the queue starts: it extends the last bar, or a new bar begins."""
        task, layout = dispatch.task, layout_view(dispatch.layout)
        self._begun_at[rank] = at
        last = self._bars.get(self._last_bar.get(rank, ""))
        if last is not None:
            is_same = (last.job_id, last.stage, last.layout) == (task.job_id, task.stage.value, layout)
            if is_same and at - (last.ended_at or at) <= GAP_S:
                self._set(last, ended_at=None, last_step=task.step)
                return
            if last.ended_at is None:
                self._set(last, ended_at=round(at, 4))
        key = self._last_bar[rank] = f"{dispatch.number}-{rank}"
        self._bars[key] = server_schemas.TimelineBar(
            key=key,
            rank=rank,
            job_id=task.job_id,
            stage=task.stage.value,
            layout=layout,
            first_step=task.step,
            last_step=task.step,
            started_at=round(at, 4),
            ended_at=None,
        )
        if len(self._bars) > MAX_BARS:
            del self._bars[next(iter(self._bars))]

    def _end(self, rank: int, at: float) -> None:
        """A rank's task has ended; the next one in its queue starts."""
        if (bar := self._bars.get(self._last_bar[rank])) is not None:
            self._set(bar, ended_at=round(at, 4))
        if queue := self.ranks[rank].queue:
            self._begin(rank, self.running[queue[0]], at)

    def _set(self, bar: server_schemas.TimelineBar, **values: float | int | None) -> None:
        self._bars[bar.key] = bar.model_copy(update=values)

    def _owner_of(self, job_id: str) -> str | None:
        facts = self._facts_of(job_id)
        return None if facts is None else facts.owner

    def rank_views(self, now: float, owner: str | None, *, since: float) -> Iterator[server_schemas.Rank]:
        """The ranks, with their tasks for one owner or for all; utilisation counts from `since`."""
        since = max(since, self.started_at)
        for rank in self.ranks.values():
            yield server_schemas.Rank(
                rank=rank.rank,
                node=rank.node,
                status=rank.status,
                task=self._task(rank, owner),
                utilisation=round(self._utilisation(rank, now, since=since), 3),
                restarts=rank.num_restarts,
            )

    def _utilisation(self, rank: RankState, now: float, *, since: float) -> float:
        """Busy share of the last minute; a running task counts up to now."""
        span_s = min(float(USE_S), max(now - since, 1e-3))
        busy_s = sum(s for second, s in self._busy_s[rank.rank].items() if second > now - USE_S)
        if rank.queue:
            busy_s += max(0.0, now - max(self._begun_at[rank.rank], now - span_s))
        return min(1.0, busy_s / span_s)

    def _task(self, rank: RankState, owner: str | None) -> server_schemas.RankTask | None:
        dispatch = self.running[rank.queue[0]] if rank.queue else None
        if dispatch is None or owner not in (None, self._owner_of(dispatch.task.job_id)):
            return None
        facts = self._facts_of(dispatch.task.job_id)
        return server_schemas.RankTask(
            job_id=dispatch.task.job_id,
            stage=dispatch.task.stage.value,
            step=dispatch.task.step,
            steps=0 if facts is None else facts.steps,
            layout=layout_view(dispatch.layout),
            started_at=round(self._begun_at[rank.rank], 4),
            predicted_end_at=round(self.at(dispatch.predicted_end_s), 4),
        )

    def bars(self, now: float, owner: str | None = None) -> list[server_schemas.TimelineBar]:
        """The bars of the last two minutes, of one owner or of all, oldest first."""
        since = now - TIMELINE_S
        bars = [bar for bar in self._bars.values() if bar.ended_at is None or bar.ended_at > since]
        return [bar for bar in bars if owner is None or self._owner_of(bar.job_id) == owner]
