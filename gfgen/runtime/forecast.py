"""When the open jobs are predicted to end: for progress displays, not for policies."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from gfgen.snapshot import JobView, Snapshot


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted ends, in seconds since the start of the run."""

    ends_s: dict[str, float]
    late: frozenset[str]
    """Jobs that are predicted to miss their deadline."""

    @property
    def end_s(self) -> float | None:
        """When the last of them ends; None when no job is open."""
        return max(self.ends_s.values(), default=None)


def forecast(snapshot: Snapshot, *, policy: str) -> Forecast:
    """Let running jobs go on where they are, and the others follow in the policy's order.

    A rough list schedule, one rank a job, without preemption: right for the batch as a whole,
    and for the next jobs; it is renewed all the time.
    """
    views = {**snapshot.open, **snapshot.busy}
    ends_s: dict[str, float] = {}
    free_at = {view.rank: snapshot.now_s for view in snapshot.ranks}
    for running in snapshot.running:
        job_id, ranks = running.task.job_id, running.layout.ranks
        view = views.get(job_id)
        rest_s = 0.0 if view is None else view.remaining_s / len(ranks)
        ends_s[job_id] = max(snapshot.now_s, running.predicted_end_s) + rest_s
        free_at |= dict.fromkeys(ranks, ends_s[job_id])
    queue = sorted((view for job_id, view in views.items() if job_id not in ends_s), key=_order(policy))
    free = list(free_at.values()) or [snapshot.now_s]
    heapq.heapify(free)
    for view in queue:
        ends_s[view.job_id] = free[0] + view.remaining_s
        heapq.heapreplace(free, ends_s[view.job_id])
    late = (job_id for job_id, view in views.items() if view.deadline_s < ends_s[job_id])
    return Forecast(ends_s, frozenset(late))


def _order(policy: str) -> Callable[[JobView], float]:
    name = policy.partition(",")[0]
    if name == "srtf":
        return lambda view: view.remaining_s
    if name == "makespan":
        return lambda view: -view.remaining_s
    return lambda view: view.deadline_s if name in ("edf", "triage", "auto") else view.arrival_s
