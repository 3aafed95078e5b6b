"""A rank's lane of the live timeline: what it is doing, in stretches of work of one job. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.server.jobs.job_record import layout_view
from gfgen.server.protocol import schemas

GAP_S = 0.25
"""Work of one job on a rank is one stretch when no more than this lies between its tasks."""
USE_S = 60
"""Seconds over which a rank's utilisation is taken."""


@dataclass(slots=True, eq=False)
class RunningDispatch:
    """A task that ranks were given, until it has ended."""

    dispatch: Dispatch
    predicted_end_s: float
    """As it was predicted last, in seconds of the run."""


@dataclass(slots=True, eq=False)
class LaneBar:
    """A bar of the timeline while it may still grow."""

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
        """A new one, of which this is the first task."""
        task, key = dispatch.task, f"{dispatch.number}-{rank}"
        return cls(key, rank, task.job_id, task.stage, dispatch.layout, task.step, task.step, at)

    def is_of(self, dispatch: Dispatch) -> bool:
        """Whether a task goes on with what this shows."""
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
    """What a rank is doing and has done, as the front knows it."""

    rank: int
    status: schemas.RankStatus = "starting"
    num_restarts: int = 0
    dispatches: list[RunningDispatch] = field(default_factory=list)
    begun_at: float = 0.0
    """When the first of its flights began."""
    busy_by_second: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    bar: LaneBar | None = None

    def utilisation(self, now: float, *, since: float) -> float:
        """Share of the last minute in which it computed; what runs counts up to now."""
        span_s = min(float(USE_S), max(now - since, 1e-3))
        busy_s = sum(s for second, s in self.busy_by_second.items() if second > now - USE_S)
        if self.dispatches:
            busy_s += max(0.0, now - max(self.begun_at, now - span_s))
        return min(1.0, busy_s / span_s)

    def note_use(self, busy_s: float, ended_at: float) -> None:
        """It has computed for so long."""
        self.busy_by_second[int(ended_at)] += busy_s
        while len(self.busy_by_second) > 2 * USE_S:
            del self.busy_by_second[next(iter(self.busy_by_second))]

    def begin(self, at: float) -> LaneBar:
        """The first of its flights begins: the stretch that grows by it, or another one."""
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
