"""What each rank does, and the timeline of bars: uninterrupted work of one rank for one job. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.server.jobs.served_job import layout_view
from gfgen.server.protocol import schemas, server_schemas
from gfgen.snapshot import RunningTask

TIMELINE_S = 120.0
MAX_BARS = 600
GAP_S = 0.25
USE_S = 60


@dataclass(slots=True, eq=False)
class RankLane:
    rank: int
    node: str | None = None
    """On a cluster."""
    status: schemas.RankStatus = "starting"
    num_restarts: int = 0
    queue: list[int] = field(default_factory=list)
    """Numbers of its dispatches; the first one runs."""
    begun_at: float = 0.0
    busy_by_second: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    bar_key: str = ""

    def utilisation(self, now: float, *, since: float) -> float:
        """Busy share of the last minute; a running task counts up to now."""
        span_s = min(float(USE_S), max(now - since, 1e-3))
        busy_s = sum(s for second, s in self.busy_by_second.items() if second > now - USE_S)
        if self.queue:
            busy_s += max(0.0, now - max(self.begun_at, now - span_s))
        return min(1.0, busy_s / span_s)

    def note_use(self, busy_s: float, ended_at: float) -> None:
        self.busy_by_second[int(ended_at)] += busy_s
        while len(self.busy_by_second) > 2 * USE_S:
            del self.busy_by_second[next(iter(self.busy_by_second))]


class RankLanes:
    """All ranks of a run. Its events have seconds of the run, `started_at` is Unix time of second 0."""

    def __init__(self, num_ranks: int, *, started_at: float) -> None:
        self._lanes = {rank: RankLane(rank) for rank in range(num_ranks)}
        self._started_at = started_at
        self._running: dict[int, Dispatch] = {}
        self._owners: dict[int, str | None] = {}
        self._bars: dict[str, server_schemas.TimelineBar] = {}
        """Oldest first. A bar is replaced when it changes, so an identical object is an unchanged bar."""
        self._owner_of: dict[str, str | None] = {}

    def at(self, time_s: float) -> float:
        return self._started_at + time_s

    @property
    def lanes(self) -> Collection[RankLane]:
        return self._lanes.values()

    def node_of(self, rank: int) -> str | None:
        lane = self._lanes.get(rank)
        return None if lane is None else lane.node

    def node_joined(self, node: str, ranks: range) -> None:
        self._lanes |= {rank: RankLane(rank, node) for rank in ranks}

    def node_gone(self, node: str) -> None:
        self._lanes = {rank: lane for rank, lane in self._lanes.items() if lane.node != node}

    def dispatched(self, dispatch: Dispatch, *, owner: str | None = None) -> None:
        self._running[dispatch.number], self._owners[dispatch.number] = dispatch, owner
        for rank in dispatch.layout.ranks:
            lane = self._lanes[rank]
            lane.queue.append(dispatch.number)
            if len(lane.queue) == 1:
                self._begin(lane, self.at(dispatch.submitted_s))

    def landed(self, event: events.TaskDone | events.TaskFailed) -> Dispatch | None:
        dispatch = self._running.pop(event.dispatch, None)
        if dispatch is None:
            return None
        times = {each.rank: each for each in event.times} if isinstance(event, events.TaskDone) else {}
        for rank in dispatch.layout.ranks:
            lane, at = self._lanes[rank], self.at(event.time_s)
            if rank in times:
                at = self.at(times[rank].ended_s)
                lane.note_use(times[rank].busy_s, at)
            self._leave(lane, dispatch.number, at)
        del self._owners[dispatch.number]
        return dispatch

    def renew_ends(self, ends: Sequence[tuple[int, float]]) -> None:
        for number, end_s in ends:
            if number in self._running:
                self._running[number] = replace(self._running[number], predicted_end_s=end_s)

    def ready(self, event: events.RankReady) -> None:
        self._lanes[event.rank].num_restarts = event.incarnation - 1
        self.loaded(event.rank)

    def loaded(self, rank: int) -> None:
        lane = self._lanes[rank]
        lane.status = "busy" if lane.queue else "idle"

    def lost(self, event: events.RankLost) -> None:
        self._lanes[event.rank].status = "retired" if event.is_retired else "lost"

    def loading(self) -> None:
        for lane in self.lanes:
            lane.status = lane.status if lane.status in ("lost", "retired") else "loading"

    def _begin(self, lane: RankLane, at: float) -> None:
        """The first dispatch of the queue starts: it extends the last bar, or a new bar begins."""
        dispatch = self._running[lane.queue[0]]
        task, layout = dispatch.task, layout_view(dispatch.layout)
        lane.begun_at = at
        if lane.status == "idle":
            lane.status = "busy"
        last = self._bars.get(lane.bar_key)
        if last is not None:
            is_same = (last.job_id, last.stage, last.layout) == (task.job_id, task.stage.value, layout)
            if is_same and at - (last.ended_at or at) <= GAP_S:
                self._set(last, ended_at=None, last_step=task.step)
                return
            if last.ended_at is None:
                self._set(last, ended_at=round(at, 4))
        lane.bar_key = f"{dispatch.number}-{lane.rank}"
        self._owner_of[lane.bar_key] = self._owners[dispatch.number]
        self._bars[lane.bar_key] = server_schemas.TimelineBar(
            key=lane.bar_key,
            rank=lane.rank,
            job_id=task.job_id,
            stage=task.stage.value,
            layout=layout,
            first_step=task.step,
            last_step=task.step,
            started_at=round(at, 4),
            ended_at=None,
        )
        if len(self._bars) > MAX_BARS:
            oldest = next(iter(self._bars))
            del self._bars[oldest], self._owner_of[oldest]

    def _leave(self, lane: RankLane, number: int, at: float) -> None:
        """A rank is free of a dispatch; the next one in its queue starts."""
        was_first = lane.queue[:1] == [number]
        if number in lane.queue:
            lane.queue.remove(number)
        if was_first and (bar := self._bars.get(lane.bar_key)) is not None:
            self._set(bar, ended_at=round(at, 4))
        if not lane.queue:
            lane.status = "idle" if lane.status == "busy" else lane.status
        elif was_first:
            self._begin(lane, at)

    def _set(self, bar: server_schemas.TimelineBar, **values: float | int | None) -> None:
        self._bars[bar.key] = bar.model_copy(update=values)

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def running(self) -> list[RunningTask]:
        return [RunningTask(d.task, d.layout, self.at(d.predicted_end_s)) for d in self._running.values()]

    def ranks(
        self, now: float, owner: str | None = None, *, since: float, num_steps: Callable[[str], int]
    ) -> Iterator[server_schemas.Rank]:
        """The ranks, with their tasks for one owner or for all.

        `since`: utilisation counts from this moment; `num_steps` returns the steps of a job.
        """
        since = max(since, self._started_at)
        for lane in self.lanes:
            yield server_schemas.Rank(
                rank=lane.rank,
                node=lane.node,
                status=lane.status,
                task=self._task(lane, owner, num_steps),
                utilisation=round(lane.utilisation(now, since=since), 3),
                restarts=lane.num_restarts,
            )

    def _task(
        self, lane: RankLane, owner: str | None, num_steps: Callable[[str], int]
    ) -> server_schemas.RankTask | None:
        if not lane.queue or owner not in (None, self._owners[lane.queue[0]]):
            return None
        dispatch = self._running[lane.queue[0]]
        return server_schemas.RankTask(
            job_id=dispatch.task.job_id,
            stage=dispatch.task.stage.value,
            step=dispatch.task.step,
            steps=num_steps(dispatch.task.job_id),
            layout=layout_view(dispatch.layout),
            started_at=round(lane.begun_at, 4),
            predicted_end_at=round(self.at(dispatch.predicted_end_s), 4),
        )

    def bars(self, now: float, owner: str | None = None) -> list[server_schemas.TimelineBar]:
        """The bars of the last two minutes, of one owner or of all, oldest first."""
        since = now - TIMELINE_S
        bars = [bar for bar in self._bars.values() if bar.ended_at is None or bar.ended_at > since]
        return [bar for bar in bars if owner in (None, self._owner_of[bar.key])]
