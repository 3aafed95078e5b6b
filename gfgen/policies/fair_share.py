"""Equal shares of the ranks for owners of jobs: which owner is next. The policy decides among its jobs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

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
            job = self._open[owner].get(getattr(getattr(decision, "task", None), "job_id", ""))
            if job is None or not isinstance(decision, Decision):
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
