"""When the open jobs are predicted to end: for progress displays, not for policies."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from gfgen.snapshot import JobView, RunningTask, Snapshot


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted ends, in seconds since the start of the run."""

    ends_s: dict[str, float]
    late: frozenset[str]
    """Jobs that are predicted to miss their deadline."""
    starts_s: dict[str, float] = field(default_factory=dict)
    """When the jobs that are not running get a rank, in the order in which they do."""

    @property
    def end_s(self) -> float | None:
        """When the last of them ends; None when no job is open."""
        return max(self.ends_s.values(), default=None)


def forecast(snapshot: Snapshot, *, policy: str) -> Forecast:
    """What `predict` says of a snapshot's jobs."""
    return predict(
        {**snapshot.open, **snapshot.busy},
        running=snapshot.running,
        ranks=[view.rank for view in snapshot.ranks],
        now_s=snapshot.now_s,
        policy=policy,
    )


def predict(
    views: Mapping[str, JobView],
    *,
    running: Iterable[RunningTask],
    ranks: Iterable[int],
    now_s: float,
    policy: str,
) -> Forecast:
    """Let running jobs go on where they are, and the others follow in the policy's order.

    A rough list schedule, one rank a job, without preemption: right for the batch as a whole,
    and for the next jobs; it is renewed all the time.
    """
    ends_s: dict[str, float] = {}
    starts_s: dict[str, float] = {}
    free_at = dict.fromkeys(ranks, now_s)
    for task in running:
        job_id, its_ranks = task.task.job_id, task.layout.ranks
        view = views.get(job_id)
        rest_s = 0.0 if view is None else view.remaining_s / len(its_ranks)
        ends_s[job_id] = max(now_s, task.predicted_end_s) + rest_s
        free_at |= dict.fromkeys(its_ranks, ends_s[job_id])
    queue = sorted((view for job_id, view in views.items() if job_id not in ends_s), key=_order(policy))
    free = list(free_at.values()) or [now_s]
    heapq.heapify(free)
    for view in queue:
        starts_s[view.job_id] = free[0]
        ends_s[view.job_id] = free[0] + view.remaining_s
        heapq.heapreplace(free, ends_s[view.job_id])
    late = (job_id for job_id, view in views.items() if view.deadline_s < ends_s[job_id])
    return Forecast(ends_s, frozenset(late), starts_s)


def _order(policy: str) -> Callable[[JobView], Any]:
    """Roughly that of the policy; ties as it breaks them, so that what has begun keeps its place."""
    name = policy.partition(",")[0]
    if name == "srtf":
        return attrgetter("precedence", "remaining_s", "arrival_s")
    if name == "makespan":
        return lambda view: (view.precedence, view.last_layout is None, -view.remaining_s, view.arrival_s)
    if name == "edf":
        return attrgetter("precedence", "deadline_s", "arrival_s", "remaining_s")
    if name in ("triage", "auto"):
        return attrgetter("precedence", "deadline_s", "remaining_s", "arrival_s")
    return lambda view: (view.precedence, view.arrival_s, view.last_layout is None)
