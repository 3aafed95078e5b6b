"""Triage: save as many deadlines as possible; other jobs go first if they make none late."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from gfgen.policies.allotment import allot, shared_out
from gfgen.policies.groups import GroupSize
from gfgen.policies.speed import is_past_rescue, rest_s, widest
from gfgen.snapshot import Decision, JobView, Snapshot

NUM_CONSIDERED = 256
"""Jobs with the next deadlines among which the saved ones are chosen; later ones count as without a deadline.
A decision with a thousand open jobs then takes 0.7 ms. With 600 jobs at once on four ranks, due within a
tenth of the time, 64 misses up to 14 more deadlines in a hundred, and 512 meets no more."""
ROOM = 2.0
"""Short jobs overtake long ones if those would be in time even if everything took twice as long: more jobs
will arrive, and a long job without slack later keeps all others from the ranks."""
MARGIN = 1.25
"""A job runs on few ranks if that leaves a fifth of the time to its deadline unused, because each wait at a
boundary costs part of a step."""

NUM_FIRST = 16
"""Jobs at the head of the queue to consider: twice the maximum number of ranks."""

_due = attrgetter("precedence", "deadline_s", "remaining_s", "arrival_s")
"""The shortest goes first among jobs with equal deadlines, so a started job keeps its place. They would take
turns otherwise, because a job that reopens comes last among equals, and all would end late."""
_short = attrgetter("precedence", "remaining_s", "arrival_s")


def triage(snapshot: Snapshot, *, degree: GroupSize = 2) -> list[Decision]:
    """Meets as many deadlines as possible; among the other jobs the shortest goes first.

    For jobs with deadlines, under any load. Jobs get groups of `degree` ranks, and more if a deadline needs
    it or ranks would idle. Jobs without a deadline, and jobs that cannot meet theirs, go first if that makes
    no other job late, and last otherwise. Jobs of a higher priority always go before the others.
    """
    if not snapshot.open or not snapshot.free_ranks:
        return []
    base = shared_out(snapshot, degree=degree)
    now_s = snapshot.now_s

    def may_be_in_time(job: JobView) -> bool:
        if now_s + job.remaining_s <= job.deadline_s:
            return job.deadline_s < math.inf
        return not is_past_rescue(snapshot, job)

    hopeful = _first(snapshot, _due, NUM_CONSIDERED, may_be_in_time)
    known = {job.job_id for job in hopeful}
    others = _first(snapshot, _short, NUM_FIRST, lambda job: job.job_id not in known)
    rests = _rests(snapshot, (*hopeful, *others), base)
    saved, given_up = _most_in_time(snapshot, hopeful, rests)
    saved_ids = {job.job_id for job in saved}

    def wanted(job: JobView) -> int:
        return _degree_in_time(snapshot, job, base) if job.job_id in saved_ids else base

    return allot(snapshot, _queue(snapshot, saved, [*given_up, *others], rests), wanted=wanted)


class _Rest(NamedTuple):
    """The rest of a job."""

    work_s: float
    """Rank time at the given degree, divided by the number of ranks."""
    least_s: float
    """Duration on as many ranks as it can use."""


def _rests(snapshot: Snapshot, jobs: Iterable[JobView], degree: int) -> Mapping[str, _Rest]:
    """By job; equal jobs are looked up once."""
    alike: dict[tuple[str, str, int, float], _Rest] = {}
    found = {}
    num_ranks = len(snapshot.ranks)
    for job in jobs:
        most = widest(snapshot, job)
        if most == 1:  # the view says it, no cost is asked for
            found[job.job_id] = _Rest(job.remaining_s / num_ranks, job.remaining_s)
            continue
        key = (job.model, job.shape, job.next_task.index, job.remaining_s)
        rest = alike.get(key)
        if rest is None:
            used = min(degree, most)
            work_s = rest_s(snapshot, job, used) * used / num_ranks
            rest = alike[key] = _Rest(work_s, rest_s(snapshot, job, most))
        found[job.job_id] = rest
    return found


# Choosing the jobs to save -----------------------------------------------------------------------


def _first(
    snapshot: Snapshot, key: Callable[[JobView], Any], number: int, is_meant: Callable[[JobView], bool]
) -> list[JobView]:
    """The first open jobs and all busy jobs that meet the condition, in order."""
    found = list(itertools.islice(filter(is_meant, snapshot.in_order(key)), number))
    for job in filter(is_meant, snapshot.busy.values()):
        insort(found, job, key=key)
    return found


def _most_in_time(
    snapshot: Snapshot, by_deadline: Sequence[JobView], rests: Mapping[str, _Rest]
) -> tuple[list[JobView], list[JobView]]:
    """The largest set of jobs that meet their deadlines one after another, and the jobs given up for them.

    All ranks count as one fast machine. Whenever a job would be late, the job with the most work so
    far, among those of the lowest priority, is given up, which makes the most room for the others.

    Source: Moore 1968, "An n job, one machine sequencing algorithm for minimizing the number of late jobs".
    """
    end_s = now_s = snapshot.now_s
    taken: list[tuple[int, float, str]] = []
    given_up = []
    by_id = {job.job_id: job for job in by_deadline}
    for job in by_deadline:
        work_s, least_s = rests[job.job_id]
        deadline_s = job.deadline_s
        if now_s + least_s > deadline_s:
            given_up.append(job)
            continue
        heapq.heappush(taken, (-job.precedence, -work_s, job.job_id))
        end_s += work_s
        if end_s > deadline_s:
            _, minus_work_s, job_id = heapq.heappop(taken)
            end_s += minus_work_s
            given_up.append(by_id[job_id])
    kept = {job_id for _, _, job_id in taken}
    return [job for job in by_deadline if job.job_id in kept], given_up


def _degree_in_time(snapshot: Snapshot, job: JobView, degree: int) -> int:
    """The fewest ranks, at least `degree`, that are predicted to meet the deadline with MARGIN."""
    most = widest(snapshot, job)
    while degree < most and snapshot.now_s + MARGIN * rest_s(snapshot, job, degree) > job.deadline_s:
        degree *= 2
    return min(degree, most)


# Order of the jobs ------------------------------------------------------------------------------


def _queue(
    snapshot: Snapshot, saved: Sequence[JobView], others: Sequence[JobView], rests: Mapping[str, _Rest]
) -> Iterator[JobView]:
    """All jobs, higher priorities first, computed lazily."""
    before_s = 0.0
    for precedence in sorted({job.precedence for job in (*saved, *others)}):
        due = [job for job in saved if job.precedence == precedence]
        rest = [job for job in others if job.precedence == precedence]
        work_s = {job.job_id: rests[job.job_id].work_s for job in (*due, *rest)}
        yield from _shortest_first(snapshot, due, rest, work_s, before_s=before_s)
        before_s += math.fsum(work_s.values())


def _shortest_first(
    snapshot: Snapshot,
    saved: Iterable[JobView],
    others: Iterable[JobView],
    work_s: Mapping[str, float],
    *,
    before_s: float,
) -> Iterator[JobView]:
    """The shortest first, as long as the saved jobs, given by deadline, keep enough room.

    before_s: the work that goes before all of them.
    """
    due = {job.job_id: job for job in saved}
    waiting = {job.job_id: job for job in sorted([*due.values(), *others], key=_short)}
    for _ in range(NUM_FIRST):
        if not due:
            break
        room_s, least_s = _room_before(snapshot, due.values(), work_s, before_s=before_s)
        job_id = next(each for each in waiting if work_s[each] <= room_s.get(each, least_s))
        yield waiting.pop(job_id)
        due.pop(job_id, None)
        before_s += work_s[job_id]
    yield from due.values()
    yield from (job for job_id, job in waiting.items() if job_id not in due)


def _room_before(
    snapshot: Snapshot, saved: Iterable[JobView], work_s: Mapping[str, float], *, before_s: float
) -> tuple[Mapping[str, float], float]:
    """How much work may go before the jobs due earlier than each saved job, and before all saved jobs.

    With that work, they would be in time even if everything took ROOM times as long as predicted. No job is
    due before the first one, so it always fits.
    """
    room_s, least_s, now_s = {}, math.inf, snapshot.now_s
    for job in saved:
        room_s[job.job_id] = least_s
        before_s += work_s[job.job_id]
        here_s = (job.deadline_s - now_s) / ROOM - before_s
        if here_s < least_s:
            least_s = here_s
    return room_s, least_s
