"""Predict when the open jobs end, for progress displays and not for policies."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gfgen.policies import allotment, edf, srtf, triage
from gfgen.snapshot import JobView, RunningTask, Snapshot


@dataclass(frozen=True, slots=True)
class Forecast:
    ends_s: dict[str, float]
    late: frozenset[str]
    """Jobs that are predicted to miss their deadline."""
    starts_s: dict[str, float] = field(default_factory=dict)
    """When the waiting jobs get a rank, in that order."""
    unseen_s: float = 0.0
    """What the jobs take that come after these."""

    @property
    def end_s(self) -> float | None:
        """When the last job ends; None if no job is open."""
        return max(self.ends_s.values()) + self.unseen_s if self.ends_s else None


def forecast(snapshot: Snapshot, *, policy: str) -> Forecast:
    """`predict` for the jobs of a snapshot."""
    found = predict(
        {**snapshot.open, **snapshot.busy},
        running=snapshot.running,
        ranks=[view.rank for view in snapshot.ranks],
        now_s=snapshot.now_s,
        policy=policy,
    )
    return replace(found, unseen_s=snapshot.unseen_s / max(1, len(snapshot.ranks)))


def predict(
    views: Mapping[str, JobView],
    *,
    running: Iterable[RunningTask],
    ranks: Iterable[int],
    now_s: float,
    policy: str,
) -> Forecast:
    """A rough list schedule without preemption: running jobs go on, others follow in the policy's order."""
    ends_s: dict[str, float] = {}
    starts_s: dict[str, float] = {}
    free_at = dict.fromkeys(ranks, now_s)
    at_work = {task.task.job_id: task.layout.ranks for task in running}
    for task in running:
        free_at |= dict.fromkeys(task.layout.ranks, max(now_s, task.predicted_end_s))
    for job_id, its_ranks in at_work.items():
        view = views.get(job_id)
        for rank in its_ranks:
            free_at[rank] += 0.0 if view is None else view.remaining_s / len(its_ranks)
    for job_id, its_ranks in at_work.items():
        ends_s[job_id] = max(free_at[rank] for rank in its_ranks)
    waiting = (view for job_id, view in views.items() if job_id not in ends_s)
    queue = _by_turns(sorted(waiting, key=_ORDERS.get(policy.partition(",")[0], _by_arrival)))
    free = list(free_at.values()) or [now_s]
    heapq.heapify(free)
    for view in queue:
        starts_s[view.job_id] = free[0]
        ends_s[view.job_id] = free[0] + view.remaining_s
        heapq.heapreplace(free, ends_s[view.job_id])
    for job_id, view in views.items():
        ends_s[job_id] += view.write_s
    late = (job_id for job_id, view in views.items() if view.deadline_s < ends_s[job_id])
    return Forecast(ends_s, frozenset(late), starts_s)


def _by_turns(queue: Sequence[JobView]) -> Sequence[JobView]:
    """The first jobs of each owner, then the second ones, and so on: owners share the ranks."""
    num_before: Counter[str | None] = Counter()
    places = []
    for view in queue:
        places.append(num_before[view.owner])
        num_before[view.owner] += 1
    if len(num_before) < 2:
        return queue
    return [view for _, view in sorted(zip(places, queue, strict=True), key=lambda pair: pair[0])]


def _by_arrival(job: JobView) -> tuple[int, float, bool]:
    return job.precedence, job.arrival_s, job.last_layout is None


_ORDERS: Mapping[str, Callable[[JobView], Any]] = {
    "srtf": srtf.shortest_first,
    "makespan": allotment.longest_first,
    "edf": edf.by_deadline,
    "triage": triage.next_due,
    "auto": triage.next_due,
}
"""By policy: roughly its order, with its tie-breaks, so that started jobs keep their place."""
