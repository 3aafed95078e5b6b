"""Shortest remaining trajectory first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter

from gfgen.policies.fcfs import Degree, RankGroup, home_group
from gfgen.snapshot import Decision, JobView, Snapshot

shortest_first = attrgetter("precedence", "remaining_s", "arrival_s")


def srtf(snapshot: Snapshot, *, degree: Degree = 1) -> list[Decision]:
    """The job with the least work left goes first; each job stays on its group of `degree` ranks.

    For mixed batches in which the mean latency matters: a short job waits for at most one step of a
    long one. A job starts on the least loaded free group, and competes there at every step. An idle group
    takes a job that waits for another group.
    """
    groups = snapshot.groups(degree)
    by_rank = {rank: group for group in groups for rank in group}
    idle = _idle_groups(snapshot, groups, by_rank)
    if not idle:
        return []
    jobs = snapshot.in_order(shortest_first)
    chosen: dict[RankGroup, JobView] = {}
    taken: set[str] = set()
    for may_move in (False, True):
        for group in idle:
            if group not in chosen and (job := _first(jobs, group, by_rank, taken, may_move=may_move)):
                chosen[group] = job
                taken.add(job.job_id)
    return [
        Decision(chosen[group].next_task, chosen[group].layout(group)) for group in idle if group in chosen
    ]


def _first(
    jobs: Sequence[JobView],
    group: RankGroup,
    by_rank: Mapping[int, RankGroup],
    taken: set[str],
    *,
    may_move: bool,
) -> JobView | None:
    """The most urgent job not yet taken; unless jobs may move, one that belongs to this group or none."""
    for job in jobs:
        if job.job_id in taken:
            continue
        if may_move or job.last_layout is None or home_group(job, by_rank) in (group, None):
            return job
    return None


def _idle_groups(
    snapshot: Snapshot, groups: list[RankGroup], by_rank: Mapping[int, RankGroup]
) -> list[RankGroup]:
    """Groups whose ranks can all take a task, the least loaded first."""
    free = set(snapshot.free_ranks)
    idle = [group for group in groups if free.issuperset(group)]
    if len(idle) < 2:
        return idle
    load: dict[RankGroup | None, float] = defaultdict(float)
    for job in (*snapshot.open.values(), *snapshot.busy.values()):
        if job.last_layout:
            load[home_group(job, by_rank)] += job.remaining_s
    return sorted(idle, key=lambda group: (load[group], group))
