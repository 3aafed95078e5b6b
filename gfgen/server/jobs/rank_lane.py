"""One rank's lane of the live timeline, as bars of uninterrupted work for one job. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.server.jobs.served_job import layout_view
from gfgen.server.protocol import schemas

GAP_S = 0.25
"""Largest pause between two tasks within one bar."""
USE_S = 60
"""Window of a rank's utilisation, in seconds."""


@dataclass(slots=True, eq=False)
class RunningDispatch:
    """A dispatched task, until it has ended."""

    dispatch: Dispatch
    predicted_end_s: float
    """Latest prediction, in seconds of the run."""


@dataclass(slots=True, eq=False)
class LaneBar:
    """A bar of the timeline, which may still grow."""

    key: str
    rank: int
    job_id: str
    stage: Stage
    layout: Layout
    first_step: int | None
    last_step: int | None
    started_at: float
    ended_at: float | None = None
    version: int = 0

    @classmethod
    def of(cls, dispatch: Dispatch, *, rank: int, at: float) -> LaneBar:
        """A new bar that starts with this task."""
        task, key = dispatch.task, f"{dispatch.number}-{rank}"
        return cls(key, rank, task.job_id, task.stage, dispatch.layout, task.step, task.step, at)

    def is_of(self, dispatch: Dispatch) -> bool:
        """Whether the task extends this bar."""
        task = dispatch.task
        return (self.job_id, self.stage, self.layout) == (task.job_id, task.stage, dispatch.layout)

    def shown(self) -> schemas.TimelineBar:
        view = layout_view(self.layout)
        assert view is not None
        return schemas.TimelineBar(
            key=self.key,
            rank=self.rank,
            job_id=self.job_id,
            stage=self.stage.value,
            layout=view,
            first_step=self.first_step,
            last_step=self.last_step,
            started_at=round(self.started_at, 4),
            ended_at=None if self.ended_at is None else round(self.ended_at, 4),
        )


@dataclass(slots=True, eq=False)
class RankLane:
    """What a rank is doing and has done."""

    rank: int
    status: schemas.RankStatus = "starting"
    num_restarts: int = 0
    dispatches: list[RunningDispatch] = field(default_factory=list)
    begun_at: float = 0.0
    """Start of the first of its dispatches."""
    busy_by_second: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    bar: LaneBar | None = None

    def utilisation(self, now: float, *, since: float) -> float:
        """Busy share of the last minute; a running task counts up to now."""
        span_s = min(float(USE_S), max(now - since, 1e-3))
        busy_s = sum(s for second, s in self.busy_by_second.items() if second > now - USE_S)
        if self.dispatches:
            busy_s += max(0.0, now - max(self.begun_at, now - span_s))
        return min(1.0, busy_s / span_s)

    def note_use(self, busy_s: float, ended_at: float) -> None:
        self.busy_by_second[int(ended_at)] += busy_s
        while len(self.busy_by_second) > 2 * USE_S:
            del self.busy_by_second[next(iter(self.busy_by_second))]

    def begin(self, at: float) -> LaneBar:
        """The first of its dispatches starts; returns the bar that it extends, or a new one."""
        dispatch, bar = self.dispatches[0].dispatch, self.bar
        self.begun_at = at
        if self.status in ("idle", "busy"):
            self.status = "busy"
        if bar is not None and bar.is_of(dispatch) and at - (bar.ended_at or at) <= GAP_S:
            bar.ended_at = None
        else:
            if bar is not None and bar.ended_at is None:
                bar.ended_at = at
            bar = LaneBar.of(dispatch, rank=self.rank, at=at)
        bar.last_step = dispatch.task.step
        return bar
