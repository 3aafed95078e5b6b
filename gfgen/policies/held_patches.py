"""Run jobs on ranks that hold their patches of weights, under any built-in policy.

A rank that runs a job with other patches than the last one merges these first. So where a policy starts a
job, or continues it on other ranks, an equal one may go in its place whose patches the ranks hold already.
The order of equal jobs does not matter to any policy, and PATIENCE_S bounds how far a job falls behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.policies.speed import LostJobs
from gfgen.snapshot import Decision, JobView, Snapshot

NOTABLE = 0.005
"""A switch that takes a smaller share of the job does not matter."""
PATIENCE_S = 60.0
"""A job may be overtaken by those that arrived at most this much later."""

_Kind = tuple[object, ...]


def with_held_patches(snapshot: Snapshot, decided: list[Decision]) -> list[Decision]:
    """The decisions; jobs that would begin with a switch may be replaced by equal ones without one."""
    if not any(view.patches for view in snapshot.ranks):
        return decided
    swaps = _Swaps(snapshot, {decision.task.job_id for decision in decided})
    return [swaps.better(decision) for decision in decided]


@dataclass(slots=True)
class _Swaps:
    snapshot: Snapshot
    taken: set[str]
    _waiting: dict[_Kind, list[JobView]] | None = field(default=None, init=False)
    """Open jobs by kind, patches and whether they have begun; those to be preferred last."""
    _lost: LostJobs = field(init=False)

    def __post_init__(self) -> None:
        self._lost = LostJobs(self.snapshot)

    def better(self, decision: Decision) -> Decision:
        job = self.snapshot.open.get(decision.task.job_id)
        if job is None or job.switch_s < NOTABLE * job.remaining_s:
            return decision
        held = self._held(job.model, decision.layout)
        if held == {job.patches} or (job.next_task.index > 0 and job.next_task.stage is not Stage.DENOISE):
            return decision
        for patches in self._preferred(job, held):
            if patches == job.patches:
                return decision
            if (other := self._waiting_with(patches, job, decision.layout)) is not None:
                self.taken.add(other.job_id)
                self.taken.discard(job.job_id)
                return Decision(other.next_task, other.layout(decision.layout.ranks))
        return decision

    def _preferred(self, job: JobView, held: set[str]) -> Iterator[str]:
        """The patches that all these ranks hold, or those of started jobs if steps share ranks."""
        if len(held) == 1:
            yield from held
        if job.next_task.index == 0:
            views = (*self.snapshot.open.values(), *self.snapshot.busy.values())
            begun = [view for view in views if view.next_task.index > 0 and view.model == job.model]
            if any(view.last_layout is not None and view.last_layout.degree > 1 for view in begun):
                yield from dict.fromkeys(view.patches for view in begun)

    def _waiting_with(self, patches: str, job: JobView, layout: Layout) -> JobView | None:
        """An equal job with these patches that may go first."""
        for has_begun in (True, False):
            if has_begun != (job.next_task.index > 0) and layout.degree > 1:
                continue
            waiting = self._by_kind().get((*self._kind(job), patches, has_begun), [])
            while waiting and waiting[-1].job_id in self.taken:
                waiting.pop()
            if waiting and waiting[-1].arrival_s <= job.arrival_s + PATIENCE_S:
                return waiting.pop()
        return None

    def _held(self, model: str, layout: Layout) -> set[str]:
        ranks = set(layout.ranks)
        return {view.patches.get(model, "") for view in self.snapshot.ranks if view.rank in ranks}

    def _by_kind(self) -> dict[_Kind, list[JobView]]:
        if self._waiting is None:
            self._waiting = {}
            for job in sorted(self.snapshot.open.values(), key=lambda job: (-job.arrival_s, job.remaining_s)):
                has_begun = job.next_task.index > 0
                self._waiting.setdefault((*self._kind(job), job.patches, has_begun), []).append(job)
        return self._waiting

    def _kind(self, job: JobView) -> _Kind:
        """What is equal to every policy but for its arrival; all that will be late is of one kind."""
        due_s = None if job.deadline_s == math.inf else job.deadline_s
        if due_s is not None and job in self._lost:
            due_s = -math.inf
        return job.model, job.shape, job.num_tasks, job.precedence, job.owner, due_s
