"""What changes the decisions of a policy: equal shares for owners of jobs, and patches that ranks hold.

The policy decides among the jobs of one owner, and this module which owner is next.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.policies.speed import LostJobs
from gfgen.snapshot import Decision, JobView, Policy, Snapshot


def shared(policy: Policy, snapshot: Snapshot) -> Iterator[Decision]:
    """The decisions of a policy, which sees the jobs of one of several owners at a time.

    The owner with the fewest busy ranks is first, among equals the one that has had the least of them so
    far. Each gets its share of the ranks, if it has work for them; then the rest is given out in the same
    order. A task that needs more ranks than a share may start if its owner has none.
    """
    return _Sharing(policy, snapshot).decisions()


class _Sharing:
    def __init__(self, policy: Policy, snapshot: Snapshot) -> None:
        self._policy, self._snapshot = policy, snapshot
        self._free = set(snapshot.free_ranks)
        self._num_held: Counter[str | None] = Counter()
        for running in snapshot.running:
            self._num_held[running.owner] += len(set(running.layout.ranks) - self._free)
        self._open: dict[str | None, dict[str, JobView]] = defaultdict(dict)
        for job_id, job in snapshot.open.items():
            self._open[job.owner][job_id] = job

    def decisions(self) -> Iterator[Decision]:
        share = max(1, len(self._snapshot.ranks) // len(self._snapshot.served_s))
        for most in (share, len(self._snapshot.ranks)):
            for owner in sorted(self._open, key=self._turn):
                if self._free and self._open[owner] and self._num_held[owner] < most:
                    yield from self._of_owner(owner, most=most)

    def _turn(self, owner: str | None) -> tuple[int, float, str]:
        return self._num_held[owner], self._snapshot.served_s.get(owner, 0.0), owner or ""

    def _of_owner(self, owner: str | None, *, most: int) -> Iterator[Decision]:
        for decision in self._policy(self._seen_by(owner)):
            job = self._open[owner].get(decision.task.job_id)
            if job is None:
                yield decision  # not legal, which the state finds
                continue
            ranks = decision.layout.ranks
            if self._num_held[owner] and self._num_held[owner] + len(ranks) > most:
                continue
            del self._open[owner][job.job_id]
            self._free.difference_update(ranks)
            self._num_held[owner] += len(ranks)
            yield decision

    def _seen_by(self, owner: str | None) -> Snapshot:
        snapshot, jobs = self._snapshot, self._open[owner].copy()
        ranks = tuple(
            [
                replace(rank, can_take=False) if rank.can_take and rank.rank not in self._free else rank
                for rank in snapshot.ranks
            ]
        )
        busy = {job_id: job for job_id, job in snapshot.busy.items() if job.owner == owner}
        return replace(snapshot, open=jobs, busy=busy, ranks=ranks, orders=_OrdersOfSome(snapshot, jobs))


class _OrdersOfSome:
    def __init__(self, snapshot: Snapshot, jobs: Mapping[str, JobView]) -> None:
        self._snapshot, self._jobs = snapshot, jobs

    def sorted(self, views: Mapping[str, JobView], key: Callable[[JobView], Any]) -> list[JobView] | None:
        if views is not self._jobs:
            return None
        return [job for job in self._snapshot.in_order(key) if job.job_id in views]


class Shares:
    """Rank seconds of the owners with jobs. A new one begins with the least: nothing is saved up."""

    def __init__(self) -> None:
        self._num_jobs: Counter[str | None] = Counter()
        self.served_s: dict[str | None, float] = {}
        """By owner, for comparison with each other."""
        self._least_s = 0.0

    def arrive(self, owner: str | None) -> None:
        self._num_jobs[owner] += 1
        self.served_s.setdefault(owner, self._least_s)

    def serve(self, owner: str | None, rank_s: float) -> None:
        if owner in self.served_s:
            self.served_s[owner] += rank_s
            self._least_s = min(self.served_s.values())

    def leave(self, owner: str | None) -> None:
        self._num_jobs[owner] -= 1
        if not self._num_jobs[owner]:
            del self._num_jobs[owner], self.served_s[owner]

    def check(self) -> None:
        assert self._num_jobs.keys() == self.served_s.keys(), "owners without jobs have shares"
        assert min(self._num_jobs.values(), default=1) > 0, f"jobs of owners: {self._num_jobs}"


NOTABLE = 0.005
"""A switch that takes a smaller share of the job does not matter."""
PATIENCE_S = 60.0
"""A job may be overtaken by those that arrived at most this much later."""

_Kind = tuple[object, ...]


def with_held_patches(snapshot: Snapshot, decided: list[Decision]) -> list[Decision]:
    """The decisions; jobs that would begin with a switch may be replaced by equal ones without one.

    A rank that runs a job with other patches than the last one merges these first. The order of equal jobs
    does not matter to any policy, and PATIENCE_S bounds how far a job falls behind.
    """
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
        is_step = job.next_task.stage in (Stage.DENOISE, Stage.REFINE)
        if held == {job.patches} or (job.next_task.index > 0 and not is_step):
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
