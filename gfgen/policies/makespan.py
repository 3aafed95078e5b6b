"""The whole batch done as early as possible."""

from __future__ import annotations

import heapq
import itertools

from gfgen.policies.allotment import allot, shared_out
from gfgen.policies.groups import GroupSize
from gfgen.snapshot import Decision, JobView, Snapshot

NUM_CONSIDERED = 16
"""Jobs at the head of the queue that can matter now: twice as many as there can be ranks."""


def makespan(snapshot: Snapshot, *, degree: GroupSize = 1) -> list[Decision]:
    """The longest job goes first, on few ranks while many jobs wait and on more when few are left.

    For batches without deadlines in which only the end of the last job matters. Jobs on few ranks waste
    the least time, short jobs fill the gaps, and the last jobs share all ranks. A job that has started
    continues before another one starts.
    """
    if not snapshot.open or not snapshot.free_ranks:
        return []
    waiting = itertools.islice(snapshot.in_order(_order), NUM_CONSIDERED)
    queue = heapq.nsmallest(NUM_CONSIDERED, [*waiting, *snapshot.busy.values()], key=_order)
    base = shared_out(snapshot, degree=degree)
    return allot(snapshot, queue, wanted=lambda _: base)


def _order(job: JobView) -> tuple[int, bool, float, float]:
    """Without regard to what has begun the longest is another one at every step: all would end together."""
    return job.precedence, job.last_layout is None, -job.remaining_s, job.arrival_s
