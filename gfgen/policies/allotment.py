"""Assign ranks to a queue of jobs, for `triage` and `makespan`.

The first jobs of the queue divide all ranks. If a job cannot have its ranks now, free ranks are held for it
until its next boundary; meanwhile they may run a task of a later job that is predicted to end in time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.policies.fcfs import GroupSize
from gfgen.policies.speed import power_of_two, step_s, widest, worth_preparing
from gfgen.snapshot import Decision, JobView, Snapshot

WAIT_SHARE = 0.25
"""The longest wait for ranks, as a share of a step: free ranks idle meanwhile."""
NUM_FOR_GAPS = 8
"""Jobs whose tasks are tried on held ranks."""
OVERRUN_S = 0.01
"""A task on a held rank may end this much after the rank is wanted."""


def allot(
    snapshot: Snapshot,
    queue: Iterable[JobView],
    *,
    wanted: Callable[[JobView], int],
    chosen: Callable[[JobView, Layout], Task] = lambda job, _: job.next_task,
) -> list[Decision]:
    """Start jobs of the queue until no free rank is left; `chosen`: a job's task on a layout."""
    ranks = _RankClaims(snapshot, chosen)
    decisions, num_tried = list[Decision](), 0
    for job in queue:
        if job.job_id in snapshot.busy:
            ranks.hold_for_busy(job, wanted(job))
        elif ranks.unheld:
            decisions += ranks.start(job, wanted(job))
        else:
            num_tried += 1
            decisions += ranks.fill_gap(job)
        if not ranks.free or num_tried == NUM_FOR_GAPS:  # before the next job, whose place takes long to find
            break
    return decisions


def shared_out(snapshot: Snapshot, *, degree: int) -> int:
    """`degree`, or more if there are fewer jobs than groups of that size, so that no rank idles."""
    num_jobs = len(snapshot.open) + len(snapshot.busy)
    most = min(snapshot.max_degree, len(snapshot.ranks))
    degree = power_of_two(min(degree, most))
    while degree * 2 <= most and degree * 2 * num_jobs <= len(snapshot.ranks):
        degree *= 2
    return degree


class _RankClaims:
    """The ranks that the jobs of the queue have not claimed yet."""

    def __init__(self, snapshot: Snapshot, chosen: Callable[[JobView, Layout], Task]) -> None:
        self._snapshot = snapshot
        self._chosen = chosen
        self._running = {running.task.job_id: running for running in snapshot.running}
        self._living = [view.rank for view in snapshot.ranks]
        self._num_left = len(snapshot.ranks)
        """Ranks, free or not, that no job of the queue has claimed yet."""
        self._decoding: set[int] = set()
        """Ranks that got a decode in this turn, which another job may have after that."""
        self._held_until_s: dict[int, float] = {}
        self._kept: set[int] = set()
        """Ranks whose running job continues there."""
        self._free_at_s = {view.rank: view.free_at_s for view in snapshot.ranks if not view.can_take}
        self.free = list(snapshot.free_ranks)

    @property
    def unheld(self) -> list[int]:
        return [rank for rank in self.free if rank not in self._held_until_s]

    def start(self, job: JobView, wanted: int) -> list[Decision]:
        """Start the job on the free ranks that it wants and hold the others, unless waiting ends sooner."""
        wanted = self._claim(job, wanted)
        near = self._fullest(job, wanted, self._living)
        unheld = self._unheld_of(near)
        if (ready_s := self._better_later(job, wanted, near, unheld)) is not None:
            self._hold(wanted, ready_s, near)
            return []
        ranks = self._choose(job, power_of_two(min(wanted, job.max_degree)), unheld)
        layout = job.layout(ranks)
        end_s = self._snapshot.now_s + self._snapshot.costs.task_s(job.next_task, layout)
        decision = self._take(job, layout, end_s)
        if wanted > layout.degree and job.next_task.stage is not Stage.DECODE:
            self._hold(wanted - layout.degree, end_s, near)
        return [decision]

    def hold_for_busy(self, job: JobView, wanted: int) -> None:
        """Hold its own and free ranks, so that a running job has those it wants from its next boundary."""
        running = self._running.get(job.job_id)
        if running is not None and self._num_left > 0:
            own = running.layout.ranks
            self._kept.update(own)
            num_more = self._claim(job, wanted) - len(own)
            if num_more >= 0:
                sets = self._snapshot.costs.sets(self._living, len(own) + num_more)
                near = next((each for each in sets if not set(own).isdisjoint(each)), ())  # or all died
                self._held_until_s |= {rank: running.predicted_end_s for rank in self.unheld if rank in own}
                self._hold(num_more, running.predicted_end_s, near)

    def fill_gap(self, job: JobView) -> list[Decision]:
        """Run one task on a held rank, if it ends before the rank is wanted."""
        for rank in self.free:
            layout = job.layout((rank,))
            end_s = self._snapshot.now_s + self._snapshot.costs.task_s(job.next_task, layout)
            if end_s <= self._held_until_s[rank] + OVERRUN_S:
                return [self._take(job, layout, end_s)]
        return []

    def _take(self, job: JobView, layout: Layout, end_s: float) -> Decision:
        self.free = [rank for rank in self.free if rank not in layout.ranks]
        self._free_at_s |= dict.fromkeys(layout.ranks, end_s)
        if job.next_task.stage is Stage.DECODE:
            self._decoding.update(layout.ranks)
        return Decision(self._chosen(job, layout), layout)

    def _better_later(
        self, job: JobView, wanted: int, near: Collection[int], unheld: list[int]
    ) -> float | None:
        """When all ranks for a step are free; None if the step should not wait for them, or has waited."""
        num_missing = wanted - len(unheld)
        if num_missing <= 0 or job.next_task.stage not in (Stage.DENOISE, Stage.REFINE):
            return None
        now_s = self._snapshot.now_s
        ends_s = [  # the end of an overdue task cannot be predicted
            free_at_s
            for rank, free_at_s in self._free_at_s.items()
            if rank in near and rank not in self._kept and free_at_s > now_s
        ]
        if len(ends_s) < num_missing:
            return None
        ready_s = sorted(ends_s)[num_missing - 1]
        wide_s = step_s(self._snapshot, job, wanted)
        narrow_s = step_s(self._snapshot, job, power_of_two(len(unheld)))
        idle_s = min(now_s, max(view.free_at_s for view in self._snapshot.ranks if view.rank in unheld))
        is_soon = ready_s - idle_s <= WAIT_SHARE * wide_s and ready_s + wide_s < now_s + narrow_s
        return ready_s if is_soon else None

    def _claim(self, job: JobView, wanted: int) -> int:
        wanted = min(wanted, widest(self._snapshot, job))
        if wanted > self._num_left:
            wanted = min(wanted, max(1, self._num_left + self._num_soon_free(job, wanted)))
        claimed = worth_preparing(self._snapshot, job, power_of_two(wanted))
        self._num_left -= claimed
        return claimed

    def _num_soon_free(self, job: JobView, wanted: int) -> int:
        """Ranks in decodes for which a step of this job would wait."""
        if not self._decoding or job.next_task.stage is Stage.DECODE:
            return 0
        soon_s = self._snapshot.now_s + WAIT_SHARE * step_s(self._snapshot, job, power_of_two(wanted))
        return sum(self._free_at_s[rank] <= soon_s for rank in self._decoding)

    def _hold(self, number: int, until_s: float, near: Collection[int]) -> None:
        """Hold free ranks that can share a task with the job's."""
        for rank in self._unheld_of(near)[:number]:
            self._held_until_s[rank] = until_s

    def _unheld_of(self, near: Collection[int]) -> list[int]:
        return [rank for rank in self.unheld if rank in near]

    def _fullest(self, job: JobView, number: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Of the sets of these ranks the one with the most free ones, up to `number`; then with its state."""
        own = set(job.last_layout.ranks if job.last_layout else ())

        def worth(near: Collection[int]) -> tuple[int, int]:
            unheld = self._unheld_of(near)
            return min(len(unheld), number), len(own.intersection(unheld))

        sets = self._snapshot.costs.sets(ranks, number)
        return sets[0] if len(sets) == 1 else max(sets, key=worth)

    def _choose(self, job: JobView, number: int, unheld: list[int]) -> tuple[int, ...]:
        """Up to `number` of these free ranks, a power of two.

        Ranks with the job's state come first. A new group begins at a multiple of its size if possible, so
        that two groups make a larger one later.
        """
        own = job.last_layout.ranks if job.last_layout else ()
        number = power_of_two(min(number, len(unheld)))
        near = self._fullest(job, number, unheld)
        number = power_of_two(min(number, len(near)))
        if len(own) == number and set(own) <= set(near):
            return own
        if near != tuple(sorted(near)):  # ranks in a row have no numbers in a row
            return near[:number]
        for start in near:
            aligned = range(start, start + number)
            if number > 1 and start % number == 0 and set(aligned) <= set(near):
                return tuple(aligned)
        return tuple(sorted(sorted(near, key=lambda rank: rank not in own)[:number]))


NUM_CONSIDERED = 16
"""Jobs at the head of the queue to consider, or two for each rank if that is more."""


def makespan(snapshot: Snapshot, *, degree: GroupSize = 1) -> list[Decision]:
    """The longest job goes first, on few ranks while many jobs wait and on more when few are left.

    For batches without deadlines in which only the end of the last job matters. Jobs on few ranks waste
    the least time, short jobs fill the gaps, and the last jobs share all ranks. A job that has started
    continues before another one starts.
    """
    if not snapshot.open or not snapshot.free_ranks:
        return []
    number = max(NUM_CONSIDERED, 2 * len(snapshot.ranks))
    waiting = itertools.islice(snapshot.in_order(longest_first), number)
    queue = heapq.nsmallest(number, [*waiting, *snapshot.busy.values()], key=longest_first)
    base = shared_out(snapshot, degree=degree)
    return allot(snapshot, queue, wanted=lambda _: base)


def longest_first(job: JobView) -> tuple[int, bool, float, float]:
    """Started jobs first: otherwise the longest job changes at every step, and all end together."""
    return job.precedence, job.last_layout is None, -job.remaining_s, job.arrival_s
