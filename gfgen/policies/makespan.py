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
    """The longest job first, on few ranks while many wait and on many when few are left.

    For batches without deadlines, where only the end of the last job matters. Few ranks a job waste
    the least; short jobs fill what long ones leave; at the tail those that are left share all ranks.
    What has begun goes on before the next job begins.
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
