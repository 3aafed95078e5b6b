"""Finish the whole batch as early as possible."""

from __future__ import annotations

import heapq
import itertools

from gfgen.policies.allotment import allot, shared_out
from gfgen.policies.groups import GroupSize
from gfgen.snapshot import Decision, JobView, Snapshot

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
    waiting = itertools.islice(snapshot.in_order(_order), number)
    queue = heapq.nsmallest(number, [*waiting, *snapshot.busy.values()], key=_order)
    base = shared_out(snapshot, degree=degree)
    return allot(snapshot, queue, wanted=lambda _: base)


def _order(job: JobView) -> tuple[int, bool, float, float]:
    """Started jobs first: otherwise the longest job changes at every step, and all end together."""
    return job.precedence, job.last_layout is None, -job.remaining_s, job.arrival_s
