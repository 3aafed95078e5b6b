"""Triage: save as many deadlines as possible; other jobs go first if they make none late."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

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
_precedence = attrgetter("precedence")
_precedence_and_deadline = attrgetter("precedence", "deadline_s")
_arrival = attrgetter("arrival_s")
_remaining = attrgetter("remaining_s")


def triage(snapshot: Snapshot, *, degree: GroupSize = 2) -> list[Decision]:
    """Meets as many deadlines as possible; among the other jobs the shortest goes first.

    For jobs with deadlines, under any load. Jobs get groups of `degree` ranks, and more if a deadline needs
    it or ranks would idle. Jobs without a deadline, and jobs that cannot meet theirs, go first if that makes
    no other job late, and last otherwise. Jobs of a higher priority always go before the others.
    """
    if not snapshot.open or not snapshot.free_ranks:
        return []
    base = shared_out(snapshot, degree=degree)
    hopeful = list(itertools.islice(_hopeful(snapshot, snapshot.in_order(_due)), NUM_CONSIDERED))
    for job in _hopeful(snapshot, sorted(snapshot.busy.values(), key=_due)):
        insort(hopeful, job, key=_due)
    known = {job.job_id for job in hopeful}
    others: list[JobView] = []
    if len(known) < len(snapshot.open) + len(snapshot.busy):
        waiting = (job for job in snapshot.in_order(_short) if job.job_id not in known)
        others += itertools.islice(waiting, NUM_FIRST)
        for job in snapshot.busy.values():
            if job.job_id not in known:
                insort(others, job, key=_short)
    rests = _rests(snapshot, hopeful, base)
    saved, given_up = _most_in_time(snapshot.now_s, hopeful, rests)
    saved_ids = {job.job_id for job in saved}
    rests += _rests(snapshot, others, base)
    work_s = {job.job_id: rest[0] for job, rest in zip((*hopeful, *others), rests, strict=True)}

    def wanted(job: JobView) -> int:
        return _degree_in_time(snapshot, job, base) if job.job_id in saved_ids else base

    return allot(snapshot, _queue(snapshot.now_s, saved, [*given_up, *others], work_s), wanted=wanted)


_Rest = tuple[float, float]
"""The rest of a job: rank time at the given degree divided by the number of ranks, and the duration on as
many ranks as the job can use."""


def _rests(snapshot: Snapshot, jobs: Iterable[JobView], degree: int) -> list[_Rest]:
    """By job; equal jobs are looked up once."""
    alike: dict[tuple[str, str, int, float], _Rest] = {}
    found = []
    num_ranks = len(snapshot.ranks)
    for job in jobs:
        key = (job.shape, job.model, job.next_task.index, job.remaining_s)
        rest = alike.get(key)
        if rest is None:
            if (most := widest(snapshot, job)) == 1:
                rest = (job.remaining_s / num_ranks, job.remaining_s)
            else:
                used = min(degree, most)
                rest = (rest_s(snapshot, job, used) * used / num_ranks, rest_s(snapshot, job, most))
            alike[key] = rest
        found.append(rest)
    return found


# Choosing the jobs to save -----------------------------------------------------------------------


def _hopeful(snapshot: Snapshot, by_deadline: Sequence[JobView]) -> Iterator[JobView]:
    """Those of the jobs with a deadline that may meet it.

    Of each priority the jobs without a deadline come last and are skipped together.
    """
    now_s, start = snapshot.now_s, 0
    while start < len(by_deadline):
        precedence = by_deadline[start].precedence
        end = bisect_left(by_deadline, (precedence, math.inf), start, key=_precedence_and_deadline)
        for job in by_deadline[start:end]:
            if now_s + job.remaining_s <= job.deadline_s or not is_past_rescue(snapshot, job):
                yield job
        start = bisect_right(by_deadline, precedence, end, key=_precedence)


def _most_in_time(
    now_s: float, by_deadline: Sequence[JobView], rests: Sequence[_Rest]
) -> tuple[Sequence[JobView], list[JobView]]:
    """The largest set of jobs that meet their deadlines one after another, and the jobs given up for them.

    All ranks count as one fast machine. Whenever a job would be late, the job with the most work so
    far, among those of the lowest priority, is given up, which makes the most room for the others.

    Source: Moore 1968, "An n job, one machine sequencing algorithm for minimizing the number of late jobs".
    """
    in_time, end_s = 0, now_s
    for job, (work_s, least_s) in zip(by_deadline, rests, strict=True):
        if now_s + least_s > job.deadline_s or end_s + work_s > job.deadline_s:
            break
        in_time, end_s = in_time + 1, end_s + work_s
    else:
        return by_deadline, []
    first = zip(by_deadline[:in_time], rests, strict=False)
    taken = [(-job.precedence, -work_s, job.job_id) for job, (work_s, _) in first]
    heapq.heapify(taken)
    given_up = []
    by_id = {job.job_id: job for job in by_deadline}
    for job, (work_s, least_s) in zip(by_deadline[in_time:], rests[in_time:], strict=True):
        if now_s + least_s > job.deadline_s:
            given_up.append(job)
            continue
        heapq.heappush(taken, (-job.precedence, -work_s, job.job_id))
        end_s += work_s
        if end_s > job.deadline_s:
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
    now_s: float, saved: Sequence[JobView], others: Sequence[JobView], work_s: Mapping[str, float]
) -> Iterator[JobView]:
    """All jobs, higher priorities first, computed lazily."""
    before_s = 0.0
    for precedence in sorted({job.precedence for job in (*saved, *others)}):
        due = [job for job in saved if job.precedence == precedence]
        rest = [job for job in others if job.precedence == precedence]
        yield from _shortest_first(now_s, due, rest, work_s, before_s=before_s)
        before_s += math.fsum([work_s[job.job_id] for job in (*due, *rest)])


def _shortest_first(
    now_s: float,
    saved: Sequence[JobView],
    others: Sequence[JobView],
    work_s: Mapping[str, float],
    *,
    before_s: float,
) -> Iterator[JobView]:
    """The shortest first, as long as the saved jobs, given by deadline, keep enough room.

    All have the same priority. before_s: the work that goes before all of them.

    A saved job has room for as much other work before it as would leave it in time even if everything took
    ROOM times as long as predicted. A job may overtake the saved jobs that are due earlier, or all of them
    if it is not saved itself. No job is due before the first one, so the first one always fits.
    """
    waiting = sorted([*saved, *others], key=_arrival)
    waiting.sort(key=_remaining)  # two sorts by floats take a third of the time of one by pairs
    due = [job.job_id for job in saved]
    left = set(due)
    ends_s = itertools.accumulate([work_s[job_id] for job_id in due], initial=before_s)
    next(ends_s)
    room_s = [(job.deadline_s - now_s) / ROOM - end_s for job, end_s in zip(saved, ends_s, strict=True)]
    for _ in range(NUM_FIRST):
        if not due:
            break
        place, least_s = 0, min(room_s)
        if work_s[waiting[0].job_id] > least_s:
            room_of = dict(zip(due, itertools.accumulate(room_s, min, initial=math.inf), strict=False))
            fits = (work_s[job.job_id] <= room_of.get(job.job_id, least_s) for job in waiting)
            place = next(place for place, does_fit in enumerate(fits) if does_fit)
        job = waiting.pop(place)
        yield job
        num_delayed = len(due)
        if job.job_id in left:
            left.remove(job.job_id)
            num_delayed = due.index(job.job_id)
            del due[num_delayed], room_s[num_delayed]
        gone_s = work_s[job.job_id]
        room_s[:num_delayed] = [each_s - gone_s for each_s in room_s[:num_delayed]]
    yield from (job for job in saved if job.job_id in left)
    yield from (job for job in waiting if job.job_id not in left)
