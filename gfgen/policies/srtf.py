"""Shortest remaining trajectory first."""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter

from gfgen.policies.groups import Degree, Group, home_group
from gfgen.snapshot import Decision, JobView, Snapshot

_urgency = attrgetter("precedence", "remaining_s", "arrival_s")


def srtf(snapshot: Snapshot, *, degree: Degree = 1) -> list[Decision]:
    """Jobs with the least work left go first; each stays with its group of `degree` ranks.

    For mixed batches where the mean wait matters: a short job never waits for more than one
    step of a long one. A job is placed once, on the least loaded group that is free when its
    turn comes, and competes there at every step. A group that would idle takes a job that
    waits for another group.
    """
    groups = snapshot.groups(degree)
    idle = _idle_groups(snapshot, groups)
    if not idle:
        return []
    placed = [job for job in snapshot.open.values() if job.last_layout]
    queues: dict[Group | None, list[JobView]] = defaultdict(list)
    queues[None] = [job for job in snapshot.open.values() if not job.last_layout]
    for job in placed:
        queues[home_group(job, groups)].append(job)
    chosen = {group: _take_most_urgent(queues, [group, None]) for group in idle}
    for group, taken in chosen.items():
        chosen[group] = taken or _take_most_urgent(queues, list(queues))
    return [Decision(job.next_task, job.layout(group)) for group, job in chosen.items() if job]


def _take_most_urgent(queues: dict[Group | None, list[JobView]], homes: list[Group | None]) -> JobView | None:
    """The most urgent job that waits at one of these homes; it leaves its queue."""
    firsts = [(home, min(queues[home], key=_urgency)) for home in homes if queues[home]]
    if not firsts:
        return None
    home, job = min(firsts, key=lambda first: _urgency(first[1]))
    queues[home].remove(job)
    return job


def _idle_groups(snapshot: Snapshot, groups: list[Group]) -> list[Group]:
    """Groups whose ranks can all take a task, the one with the least work placed on it first."""
    free = set(snapshot.free_ranks)
    idle = [group for group in groups if free.issuperset(group)]
    if len(idle) < 2:
        return idle
    load: dict[Group | None, float] = defaultdict(float)
    for job in (*snapshot.open.values(), *snapshot.busy.values()):
        if job.last_layout:
            load[home_group(job, groups)] += job.remaining_s
    return sorted(idle, key=lambda group: (load[group], group))
