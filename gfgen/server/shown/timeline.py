"""What each rank does, and the timeline of bars: uninterrupted work of one rank for one job. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import RankState, RunView
from gfgen.server.protocol import server_schemas
from gfgen.server.shown.served_job import layout_view
from gfgen.server.store import JobFacts
from gfgen.snapshot import RunningTask

TIMELINE_S = 120.0
MAX_BARS = 600
GAP_S = 0.25
USE_S = 60


class Timeline(RunView):
    """The ranks of a run, and their bars. Events have seconds of the run, the rest has Unix time."""

    def __init__(self, *, started_at: float, facts_of: Callable[[str], JobFacts | None]) -> None:
        super().__init__()
        self._started_at, self._facts_of = started_at, facts_of
        self._begun_at: dict[int, float] = {}
        """By rank: when its task started."""
        self._busy_s: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        """By rank: busy time in each second."""
        self._bars: dict[str, server_schemas.TimelineBar] = {}
        """Oldest first. A bar is replaced when it changes, so an identical object is an unchanged bar."""
        self._last_bar: dict[int, str] = {}
        """By rank."""
        self._owners: dict[str, str | None] = {}
        """By bar."""

    def at(self, time_s: float) -> float:
        return self._started_at + time_s

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
                    self._note_use(rank, times[rank].busy_s, at)
                if rank in begun:
                    self._end(rank, at)

    def renew_ends(self, ends: Sequence[tuple[int, float]]) -> None:
        for number, end_s in ends:
            if number in self.running:
                self.running[number] = replace(self.running[number], predicted_end_s=end_s)

    def _note_use(self, rank: int, busy_s: float, ended_at: float) -> None:
        use = self._busy_s[rank]
        use[int(ended_at)] += busy_s
        while len(use) > 2 * USE_S:
            del use[next(iter(use))]

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
        self._owners[key] = self._owner_of(task.job_id)
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
            oldest = next(iter(self._bars))
            del self._bars[oldest], self._owners[oldest]

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

    def running_tasks(self) -> list[RunningTask]:
        return [RunningTask(d.task, d.layout, self.at(d.predicted_end_s)) for d in self.running.values()]

    def rank_views(self, now: float, owner: str | None, *, since: float) -> Iterator[server_schemas.Rank]:
        """The ranks, with their tasks for one owner or for all; utilisation counts from `since`."""
        since = max(since, self._started_at)
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
        return [bar for bar in bars if owner in (None, self._owners[bar.key])]
