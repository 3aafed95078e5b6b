"""Start jobs on ranks that hold their LoRAs, under any built-in policy.

A rank that runs a job with other LoRAs than the last one merges these first. So where a policy starts a
job, an equal one may start in its place whose LoRAs the ranks hold already. The order of equal jobs does not
matter to any policy, and PATIENCE_S bounds how far a job falls behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gfgen.layout import Layout
from gfgen.snapshot import Decision, JobView, Snapshot

NOTABLE = 0.005
"""A switch that takes a smaller share of the job does not matter."""
PATIENCE_S = 60.0
"""A job may be overtaken by those that arrived at most this much later."""

_Kind = tuple[object, ...]


def with_held_loras(snapshot: Snapshot, decisions: Iterable[Decision]) -> Sequence[Decision]:
    """The decisions; jobs that would begin with a switch may be replaced by equal ones without one."""
    decided = list(decisions)
    if not any(view.loras for view in snapshot.ranks):
        return decided
    swaps = _Swaps(snapshot, {decision.task.job_id for decision in decided})
    return [swaps.better(decision) for decision in decided]


@dataclass(slots=True)
class _Swaps:
    snapshot: Snapshot
    taken: set[str]
    """Jobs that are started now."""
    _waiting: dict[_Kind, list[JobView]] | None = field(default=None, init=False)
    """Jobs that have not begun, by kind and LoRAs, the last arrivals first."""

    def better(self, decision: Decision) -> Decision:
        job = self.snapshot.open.get(decision.task.job_id)
        if job is None or job.next_task.index > 0 or job.switch_s < NOTABLE * job.remaining_s:
            return decision
        held = self._held(job.model, decision.layout)
        if len(held) != 1 or job.loras in held:
            return decision
        waiting = self._by_kind().get((*_kind(job), *held), [])
        while waiting and waiting[-1].job_id in self.taken:
            waiting.pop()
        if not waiting or waiting[-1].arrival_s > job.arrival_s + PATIENCE_S:
            return decision
        other = waiting.pop()
        self.taken.add(other.job_id)
        self.taken.discard(job.job_id)
        return Decision(other.next_task, other.layout(decision.layout.ranks))

    def _held(self, model: str, layout: Layout) -> set[str]:
        ranks = set(layout.ranks)
        return {view.loras.get(model, "") for view in self.snapshot.ranks if view.rank in ranks}

    def _by_kind(self) -> dict[_Kind, list[JobView]]:
        if self._waiting is None:
            self._waiting = {}
            for job in sorted(self.snapshot.open.values(), key=lambda job: -job.arrival_s):
                if job.next_task.index == 0:
                    self._waiting.setdefault((*_kind(job), job.loras), []).append(job)
        return self._waiting


def _kind(job: JobView) -> _Kind:
    """Jobs of one kind are equal to every policy, apart from their arrival."""
    due_s = None if job.deadline_s == math.inf else job.deadline_s
    return job.model, job.shape, job.num_tasks, job.precedence, job.owner, due_s
