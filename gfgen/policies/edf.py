"""Earliest deadline first."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from gfgen.policies.speed import LostJobs, chosen_task
from gfgen.snapshot import Decision, JobView, Snapshot

by_deadline = attrgetter("precedence", "deadline_s", "arrival_s", "remaining_s")
"""A started job stays ahead of its equals, or all would end late. control/backlog.py sorts so, too."""
_rest = attrgetter("precedence", "remaining_s", "arrival_s", "deadline_s")
_precedence = attrgetter("precedence")


def edf(snapshot: Snapshot, *, rescue: bool = True) -> list[Decision]:
    """The job with the earliest deadline goes first, on as few ranks as are predicted to meet it.

    For jobs with deadlines. It decides at every step: a job that falls behind gets more ranks, and a job
    that is ahead gives them back. Then come jobs without a deadline, by arrival. Jobs that cannot meet
    their deadline on any number of ranks come last, on one rank and the shortest first, because under
    overload they would make all others late. Jobs of a higher priority always go before the others.
    `rescue=false` treats jobs that are too late like all others, as the paper does.
    """
    free = set(snapshot.free_ranks)
    decisions = []
    for job, is_lost in _queue(snapshot, len(free), rescue=rescue):
        ranks = _nearest(snapshot, job, free, 1) if is_lost else _ranks_for(snapshot, job, free)
        if ranks:
            layout = job.layout(ranks)
            free.difference_update(layout.ranks)
            decisions.append(Decision(chosen_task(snapshot, job, layout), layout))
    return decisions


def _queue(snapshot: Snapshot, number: int, *, rescue: bool) -> list[tuple[JobView, bool]]:
    """The next jobs, and whether each is past rescue; those come last within their priority."""
    queue: list[tuple[JobView, bool]] = []
    in_order, start, lost = snapshot.in_order(by_deadline), 0, LostJobs(snapshot)
    known = lost.known if rescue else {}
    while start < len(in_order) and len(queue) < number:
        end = bisect_right(in_order, in_order[start].precedence, start, key=_precedence)
        waiting = itertools.islice(in_order, start, end)
        hopeful = (x for x in waiting if known.get(x.job_id) is not x and not (rescue and x in lost))
        queue += [(job, False) for job in itertools.islice(hopeful, number - len(queue))]
        if known and number > len(queue):
            late = (job for job in snapshot.in_order(_rest)[start:end] if known.get(job.job_id) is job)
            queue += [(job, True) for job in itertools.islice(late, number - len(queue))]
        start = end
    return queue


def _ranks_for(snapshot: Snapshot, job: JobView, free: set[int]) -> tuple[int, ...]:
    choice: tuple[int, ...] = ()
    degree = 1
    while degree <= min(snapshot.max_degree, job.max_degree):
        ranks = _nearest(snapshot, job, free, degree)
        if not ranks:
            break
        choice = ranks
        if job.due_s == math.inf:
            break
        layout = job.layout(ranks)
        end_s = snapshot.now_s + snapshot.costs.remaining_s(job.next_task, layout)
        if end_s + snapshot.costs.move_s(job.job_id, job.last_layout, layout) <= job.due_s:
            break
        degree *= 2
    return choice


def _nearest(snapshot: Snapshot, job: JobView, free: set[int], degree: int) -> tuple[int, ...]:
    """`degree` free ranks that can share a task, the job's own first; () if there are too few."""
    held = job.last_layout.ranks if job.last_layout else ()

    def nearest(ranks: Sequence[int], degree: int) -> list[tuple[int, ...]]:
        sets = snapshot.costs.sets(ranks, degree)
        return sorted(sets, key=lambda each: -len(set(each) & set(held)))

    for near in nearest(sorted(free), degree):
        if len(near) >= degree:
            ranks = list[int]()
            for each in nearest(near, 1):  # in a row
                ranks += [rank for rank in held if rank in each]
                ranks += [rank for rank in each if rank not in ranks]
            return tuple(ranks[:degree])
    return ()
