"""Triage: those who can be saved first, as many of them as possible."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from gfgen.policies.allotment import allot, shared_out
from gfgen.policies.groups import Degree
from gfgen.policies.speed import is_past_rescue, rest_s, widest
from gfgen.snapshot import Decision, JobView, Snapshot

NUM_CONSIDERED = 64
"""Jobs among which the choice is made, the next deadlines first: what is due later can wait, and a
decision stays cheap with a thousand open jobs."""
ROOM = 2.0
"""Short jobs overtake long ones as long as those would be in time even if everything took twice as long:
others will come, and a long job without room keeps everyone from the ranks when its time has come."""
MARGIN = 1.25
"""A job runs on few ranks if that leaves a fifth of the time to its deadline unused: every boundary at
which it has to wait for others costs part of a step, and what is left at the end cannot be made up."""

NUM_OTHERS = 16
"""Of the other jobs so many: twice as many as there can be ranks."""

_precedence = attrgetter("precedence")
_due = attrgetter("precedence", "deadline_s", "arrival_s")
_short = attrgetter("precedence", "remaining_s", "arrival_s")


def triage(snapshot: Snapshot, *, degree: Degree = 2) -> list[Decision]:
    """As many deadlines as possible are met; jobs that cannot meet theirs come last, shortest first.

    For jobs with deadlines, under any load. Jobs get groups of `degree` ranks, more where a deadline
    needs it or ranks would idle. Jobs without a deadline follow those that have one and can meet it.
    All this among jobs of one priority: those of a higher one go before.
    """
    if not snapshot.open or not snapshot.free_ranks:
        return []
    base = shared_out(snapshot, degree=degree)
    saved, others = _sorted_out(snapshot, base)
    saved_ids = {job.job_id for job in saved}

    def wanted(job: JobView) -> int:
        return _degree_in_time(snapshot, job, base) if job.job_id in saved_ids else base

    queue = sorted([*saved, *others], key=_precedence)
    return allot(snapshot, queue, wanted=wanted)


def _sorted_out(snapshot: Snapshot, degree: int) -> tuple[list[JobView], list[JobView]]:
    """The jobs that are to meet their deadlines, in their order, and the first of the others in theirs."""
    hopeful = _first(snapshot, _due, NUM_CONSIDERED, lambda job: not _is_lost(snapshot, job))
    saved, given_up = _most_in_time(snapshot, hopeful, degree)
    known = {job.job_id for job in hopeful}
    others = _first(snapshot, _standing, NUM_OTHERS, lambda job: job.job_id not in known)
    return _shortest_first(snapshot, saved, degree), sorted([*given_up, *others], key=_standing)


def _first(
    snapshot: Snapshot, key: Callable[[JobView], Any], number: int, is_meant: Callable[[JobView], bool]
) -> list[JobView]:
    """The first open jobs that are meant, and all busy ones that are, in order."""
    found = list(itertools.islice(filter(is_meant, snapshot.in_order(key)), number))
    return sorted([*found, *filter(is_meant, snapshot.busy.values())], key=key)


def _is_lost(snapshot: Snapshot, job: JobView) -> bool:
    """No deadline can be met: there is none, or it is too late for it."""
    return job.deadline_s == math.inf or is_past_rescue(snapshot, job)


def _standing(job: JobView) -> tuple[float, ...]:
    """Of jobs that meet no deadline: those that have none before those that miss one; short ones first."""
    return (job.precedence, job.deadline_s < math.inf, job.remaining_s, job.arrival_s)


def _most_in_time(
    snapshot: Snapshot, by_deadline: Sequence[JobView], degree: int
) -> tuple[list[JobView], list[JobView]]:
    """The most jobs that can meet their deadlines one after the other, and those given up for them.

    All ranks count as one fast machine. Whenever a job would be late, the one with the most work so
    far is given up, which makes the most room for the others; but none of higher priority than others.

    Source: Moore 1968, "An n job, one machine sequencing algorithm for minimizing the number of late jobs".
    """
    end_s = snapshot.now_s
    taken: list[tuple[int, float, str]] = []
    given_up = []
    by_id = {job.job_id: job for job in by_deadline}
    for job in by_deadline:
        if snapshot.now_s + rest_s(snapshot, job, widest(snapshot, job)) > job.deadline_s:
            given_up.append(job)
            continue
        work_s = _machine_s(snapshot, job, degree)
        heapq.heappush(taken, (-job.precedence, -work_s, job.job_id))
        end_s += work_s
        if end_s > job.deadline_s:
            _, minus_work_s, job_id = heapq.heappop(taken)
            end_s += minus_work_s
            given_up.append(by_id[job_id])
    kept = {job_id for _, _, job_id in taken}
    return [job for job in by_deadline if job.job_id in kept], given_up


def _shortest_first(snapshot: Snapshot, by_deadline: list[JobView], degree: int) -> list[JobView]:
    """The same jobs, by what is left of them, if all deadlines are met so too: then nobody waits long."""
    by_work = sorted(by_deadline, key=_short)
    return by_work if _all_in_time(snapshot, by_work, degree) else by_deadline


def _all_in_time(snapshot: Snapshot, jobs: Iterable[JobView], degree: int) -> bool:
    """Whether all of them would be done in time if everything took ROOM times as long as predicted."""
    work_s = 0.0
    for job in jobs:
        work_s += _machine_s(snapshot, job, degree)
        if snapshot.now_s + ROOM * work_s > job.deadline_s:
            return False
    return True


def _machine_s(snapshot: Snapshot, job: JobView, degree: int) -> float:
    """How long the job would keep all ranks busy, run at a degree."""
    degree = min(degree, widest(snapshot, job))
    return rest_s(snapshot, job, degree) * degree / len(snapshot.ranks)


def _degree_in_time(snapshot: Snapshot, job: JobView, degree: int) -> int:
    """The fewest ranks, from `degree` on, with which the job is predicted to meet its deadline with ease."""
    most = widest(snapshot, job)
    while degree < most and snapshot.now_s + MARGIN * rest_s(snapshot, job, degree) > job.deadline_s:
        degree *= 2
    return min(degree, most)
