"""First come, first served: on fixed groups of ranks, or on all of them (`legacy`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from gfgen.layout import MAX_RANKS
from gfgen.snapshot import Decision, JobView, Snapshot

Degree = Annotated[int, range(1, MAX_RANKS + 1)]
"""Option of a policy: how many ranks run a task together. `--policy` accepts this range."""
GroupSize = Annotated[int, (1, 2, 4, 8)]
"""For policies that halve and double groups."""
DegreeOrAll = Annotated[int, range(MAX_RANKS + 1)]
"""0 means all ranks."""

RankGroup = tuple[int, ...]


def home_group(job: JobView, by_rank: Mapping[int, RankGroup]) -> RankGroup | None:
    """The group that a job ran on last; None before its first task, or if a rank of the group died."""
    if job.last_layout is None:
        return None
    ranks = job.last_layout.ranks
    home = by_rank.get(ranks[0])
    if len(ranks) > 1 and any(by_rank.get(rank) is not home for rank in ranks):
        return None
    return home


def fcfs(snapshot: Snapshot, *, degree: Degree = 1) -> list[Decision]:
    """Jobs run in order of arrival, each to its end on one group of `degree` ranks.

    For batches of equal jobs, or if the order matters more than latency. The next job goes to the first
    group that is free.
    """
    groups = snapshot.groups(degree)
    free = set(snapshot.free_ranks)
    idle = [group for group in groups if free.issuperset(group)]
    by_rank = {rank: group for group in groups for rank in group}
    if idle and snapshot.busy:
        running = {home_group(job, by_rank) for job in snapshot.busy.values()}
        idle = [group for group in idle if group not in running]
    if not idle:
        return []
    owners, waiting = _owners_and_waiting(snapshot, by_rank, num_wanted=len(idle))
    queue = iter(waiting)
    turns = [(group, owners.get(group) or next(queue, None)) for group in idle]
    return [Decision(job.next_task, job.layout(group)) for group, job in turns if job]


def _begun_then_turn(job: JobView) -> tuple[bool, int, float, float]:
    """Among started jobs with equal arrivals the shortest comes first: they would take turns otherwise."""
    has_begun = job.last_layout is not None
    return not has_begun, job.precedence, job.arrival_s, job.remaining_s if has_begun else 0.0


def _owners_and_waiting(
    snapshot: Snapshot, by_rank: dict[int, RankGroup], *, num_wanted: int
) -> tuple[dict[RankGroup, JobView], list[JobView]]:
    """By group the first job that started there, and the next jobs that wait or were on other groups."""
    owners: dict[RankGroup, JobView] = {}
    homeless, fresh = [], []
    for job in snapshot.in_order(_begun_then_turn):
        if job.last_layout is None:
            fresh.append(job)
            if len(fresh) == num_wanted:
                break
        elif (home := home_group(job, by_rank)) is not None:
            owners.setdefault(home, job)
        else:
            homeless.append(job)
    if not homeless:
        return owners, fresh
    return owners, sorted([*homeless, *fresh], key=lambda job: (job.precedence, job.arrival_s))


def legacy(snapshot: Snapshot, *, degree: DegreeOrAll = 0) -> list[Decision]:
    """One job at a time on all ranks, first come first served, the same ranks for every stage.

    The baseline of comparisons: a pipeline with a fixed process group. With `degree=1` each rank is a
    replica of its own, with `degree=2` each pair of ranks, and so on. 0 means all ranks.
    """
    return fcfs(snapshot, degree=degree or len(snapshot.ranks))
