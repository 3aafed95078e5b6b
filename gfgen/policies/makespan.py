"""The whole batch done as early as possible."""

from __future__ import annotations

import heapq
from operator import attrgetter

from gfgen.policies.allotment import allot, shared_out
from gfgen.policies.groups import GroupSize
from gfgen.snapshot import Decision, Snapshot

NUM_CONSIDERED = 16
"""Jobs at the head of the queue that can matter now: twice as many as there can be ranks."""
_length = attrgetter("remaining_s", "job_id")


def makespan(snapshot: Snapshot, *, degree: GroupSize = 1) -> list[Decision]:
    """The longest job first, on few ranks while many wait and on many when few are left.

    For batches without deadlines, where only the end of the last job matters. Few ranks a job waste
    the least; short jobs fill what long ones leave; at the tail those that are left share all ranks.
    """
    if not snapshot.open or not snapshot.free_ranks:
        return []
    jobs = (*snapshot.open.values(), *snapshot.busy.values())
    urgent = min(job.precedence for job in jobs)
    first = [job for job in jobs if job.precedence == urgent]
    others = sorted((job for job in jobs if job.precedence != urgent), key=attrgetter("precedence"))
    queue = [*heapq.nlargest(NUM_CONSIDERED, first, key=_length), *others]
    base = shared_out(snapshot, degree=degree)
    return allot(snapshot, queue, wanted=lambda _: base)
