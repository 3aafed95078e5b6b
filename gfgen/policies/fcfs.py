"""First come, first served."""

from __future__ import annotations

import heapq
from operator import attrgetter

from gfgen.policies.groups import Degree, Group, home_group
from gfgen.snapshot import Decision, JobView, Snapshot

_turn = attrgetter("precedence", "arrival_s")


def fcfs(snapshot: Snapshot, *, degree: Degree = 1) -> list[Decision]:
    """Jobs run in order of arrival, each to its end on one group of `degree` ranks.

    For batches of equal jobs, and where order matters more than latency. The group that gets
    free first, which is the one with the least estimated work, takes the next job.
    """
    groups = snapshot.groups(degree)
    free = set(snapshot.free_ranks)
    running = {home_group(job, groups) for job in snapshot.busy.values()}
    idle = [group for group in groups if free.issuperset(group) and group not in running]
    if not idle:
        return []
    owners, waiting = _owners_and_waiting(snapshot, groups)
    queue = iter(heapq.nsmallest(len(idle), waiting, key=_turn))
    turns = [(group, owners.get(group) or next(queue, None)) for group in idle]
    return [Decision(job.next_task, job.layout(group)) for group, job in turns if job]


def _owners_and_waiting(
    snapshot: Snapshot, groups: list[Group]
) -> tuple[dict[Group, JobView], list[JobView]]:
    """For each group the job that has begun there (the first to come of several), and the others."""
    waiting = [job for job in snapshot.open.values() if job.last_layout is None]
    owners: dict[Group, JobView] = {}
    for job in snapshot.open.values():
        if job.last_layout is None:
            continue
        home = home_group(job, groups)
        if home is None:
            waiting.append(job)
        else:
            owners[home] = min(owners.get(home, job), job, key=_turn)
    return owners, waiting
