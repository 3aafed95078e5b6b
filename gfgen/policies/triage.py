"""Triage: save as many deadlines as possible; other jobs go first if they make none late."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from gfgen.graph import Task
from gfgen.layout import Layout
from gfgen.policies.allotment import allot, shared_out
from gfgen.policies.giving_up import chosen_task
from gfgen.policies.groups import GroupSize
from gfgen.policies.speed import MARGIN, is_past_rescue, rest_s, widest
from gfgen.snapshot import Decision, JobView, Snapshot

NUM_CONSIDERED = 256
"""Jobs with the next deadlines among which the saved ones are chosen; later ones count as without a deadline.
A decision with a thousand open jobs then takes 0.7 ms. With 600 jobs at once on four ranks, due within a
tenth of the time, 64 misses up to 14 more deadlines in a hundred, and 512 meets no more."""
ROOM = 2.0
"""Short jobs overtake long ones if those would be in time even if everything took twice as long: more jobs
will arrive, and a long job without slack later keeps all others from the ranks."""

_ROUNDING_S = 1e-9

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
    hopeful = _hopeful(snapshot, snapshot.in_order(_due))[:NUM_CONSIDERED]
    for job in _hopeful(snapshot, sorted(snapshot.busy.values(), key=_due)):
        insort(hopeful, job, key=_due)
    others: list[JobView] = []
    if len(hopeful) < len(snapshot.open) + len(snapshot.busy):
        known = {job.job_id for job in hopeful}
        waiting = (job for job in snapshot.in_order(_short) if job.job_id not in known)
        others += itertools.islice(waiting, NUM_FIRST)
        for job in snapshot.busy.values():
            if job.job_id not in known:
                insort(others, job, key=_short)
    waits_s: dict[str, float] = {}
    saved, rest = _most_in_time(snapshot.now_s, _with_rests(snapshot, hopeful, base), waits_s)
    rest += _with_rests(snapshot, others, base)
    rest.sort(key=_precedence_of)
    not_saved = {job.job_id for job, _, _ in rest}

    def wanted(job: JobView) -> int:
        return base if job.job_id in not_saved else _degree_in_time(snapshot, job, base)

    def chosen(job: JobView, layout: Layout) -> Task:
        return chosen_task(snapshot, job, layout, wait_s=waits_s.get(job.job_id, 0.0))

    return allot(snapshot, _queue(snapshot.now_s, saved, rest), wanted=wanted, chosen=chosen)


_Case = tuple[JobView, float, float]
"""A job; the rank time of its rest at the given degree, divided by the number of ranks; and the least
duration of its rest: on as many ranks as it can use, with as many steps given up as it may."""


def _precedence_of(case: _Case) -> int:
    return case[0].precedence


def _with_rests(snapshot: Snapshot, jobs: Iterable[JobView], degree: int) -> list[_Case]:
    """The jobs with their rests; equal jobs are looked up once."""
    alike: dict[tuple[str, str, int, float, int], tuple[float, float]] = {}
    found: list[_Case] = []
    num_ranks = len(snapshot.ranks)
    for job in jobs:
        remaining_s = job.remaining_s
        if job.max_sequence_degree == 1 == job.max_decode_degree and not job.uses_cfg:
            found.append((job, remaining_s / num_ranks, remaining_s - job.saving_s))
            continue
        key = (job.shape, job.model, job.next_task.index, remaining_s, job.num_reusable)
        rest = alike.get(key)
        if rest is None:
            most = widest(snapshot, job)
            used = min(degree, most)
            work_s, least_s = rest_s(snapshot, job, used) * used / num_ranks, remaining_s - job.saving_s
            if most > 1:
                least_s = rest_s(snapshot, job, most, num_given_up=job.num_reusable)
            rest = alike[key] = (work_s, least_s)
        found.append((job, *rest))
    return found


# Choosing the jobs to save -----------------------------------------------------------------------


def _hopeful(snapshot: Snapshot, by_deadline: Sequence[JobView]) -> list[JobView]:
    """Those of the jobs with a deadline that may meet it: NUM_CONSIDERED or a few more.

    Of each priority the jobs without a deadline come last and are skipped together.
    """
    now_s, start = snapshot.now_s, 0
    found: list[JobView] = []
    while start < len(by_deadline) and len(found) < NUM_CONSIDERED:
        precedence = by_deadline[start].precedence
        end = bisect_left(by_deadline, (precedence, math.inf), start, key=_precedence_and_deadline)
        for begin in range(start, end, NUM_CONSIDERED):
            found += [
                job
                for job in by_deadline[begin : min(end, begin + NUM_CONSIDERED)]
                if now_s + job.remaining_s <= job.deadline_s or not is_past_rescue(snapshot, job)
            ]
            if len(found) >= NUM_CONSIDERED:
                break
        start = bisect_right(by_deadline, precedence, end, key=_precedence)
    return found


def _most_in_time(
    now_s: float, by_deadline: list[_Case], waits_s: dict[str, float]
) -> tuple[list[_Case], list[_Case]]:
    """The largest set of jobs that meet their deadlines one after another, and the jobs given up for them.

    All ranks count as one fast machine. Whenever a job would be late, it gives up as many of its steps as it
    takes, if it may; `waits_s` gets the time that it would be late. Otherwise the job with the most work so
    far, among those of the lowest priority, is given up, which makes the most room for the others.

    Source: Moore 1968, "An n job, one machine sequencing algorithm for minimizing the number of late jobs".
    """
    in_time, end_s = 0, now_s
    for job, work_s, least_s in by_deadline:
        due_s = job.deadline_s
        if now_s + least_s > due_s or end_s + work_s > due_s:
            break
        in_time += 1
        end_s += work_s
    else:
        return by_deadline, []
    taken = [(-job.precedence, -work_s, job.job_id) for job, work_s, _ in by_deadline[:in_time]]
    heapq.heapify(taken)
    given_up = []
    by_id = {case[0].job_id: case for case in by_deadline}
    for case in by_deadline[in_time:]:
        job, work_s, least_s = case
        if now_s + least_s > job.deadline_s:
            given_up.append(case)
            continue
        late_s = end_s + work_s - job.deadline_s
        if 0 < late_s <= job.saving_s * work_s / max(job.remaining_s, 1e-9):
            work_s -= late_s
            waits_s[job.job_id] = late_s
        heapq.heappush(taken, (-job.precedence, -work_s, job.job_id))
        end_s += work_s
        if end_s > job.deadline_s + _ROUNDING_S:
            _, minus_work_s, job_id = heapq.heappop(taken)
            end_s += minus_work_s
            given_up.append(by_id[job_id])
    kept = {job_id for _, _, job_id in taken}
    return [case for case in by_deadline if case[0].job_id in kept], given_up


def _degree_in_time(snapshot: Snapshot, job: JobView, degree: int) -> int:
    """The fewest ranks, at least `degree`, that are predicted to meet the deadline with MARGIN."""
    most = widest(snapshot, job)
    while degree < most and snapshot.now_s + MARGIN * rest_s(snapshot, job, degree) > job.deadline_s:
        degree *= 2
    return min(degree, most)


# Order of the jobs ------------------------------------------------------------------------------


def _queue(now_s: float, saved: list[_Case], rest: list[_Case]) -> Iterator[JobView]:
    """All jobs, higher priorities first, computed lazily; both lists are in the order of priorities."""
    before_s = 0.0
    while saved or rest:
        precedence = min(_precedence_of(cases[0]) for cases in (saved, rest) if cases)
        num_saved = bisect_right(saved, precedence, key=_precedence_of)
        num_rest = bisect_right(rest, precedence, key=_precedence_of)
        due, others = saved[:num_saved], rest[:num_rest]
        yield from _shortest_first(now_s, due, others, before_s=before_s)
        before_s += math.fsum([work_s for _, work_s, _ in (*due, *others)])
        saved, rest = saved[num_saved:], rest[num_rest:]


def _shortest_first(
    now_s: float, saved: list[_Case], others: list[_Case], *, before_s: float
) -> Iterator[JobView]:
    """The shortest first, as long as the saved jobs, given by deadline, keep enough room.

    All have the same priority. before_s: the work that goes before all of them.

    A job may overtake the saved jobs that are due earlier, or all of them if it is not saved itself. No job
    is due before the first one, so the first one always fits.
    """
    cases = [*saved, *others]
    work_s = {job.job_id: work_s for job, work_s, _ in cases}
    waiting = sorted([job for job, _, _ in cases], key=_arrival)
    waiting.sort(key=_remaining)  # two sorts by floats take a third of the time of one by pairs
    room = _Room(now_s, saved, before_s=before_s)
    for _ in range(NUM_FIRST):
        if not room.left:
            break
        place = 0
        if not room.is_enough_for(work_s[waiting[0].job_id]):
            room_s = room.by_job()
            fits = (work_s[job.job_id] <= room_s.get(job.job_id, room.least_s) for job in waiting)
            place = next(place for place, does_fit in enumerate(fits) if does_fit)
        job = waiting.pop(place)
        yield job
        room.take(job.job_id, work_s[job.job_id])
    yield from (job for job, _, _ in saved if job.job_id in room.left)
    yield from (job for job in waiting if job.job_id not in room.left)


class _Room:
    """How much other work may go before each of the saved jobs of one priority.

    As much as would leave it in time even if everything took ROOM times as long as predicted.
    """

    def __init__(self, now_s: float, saved: list[_Case], *, before_s: float) -> None:
        self._due: list[str] = []
        self._room_s: list[float] = []
        """By saved job."""
        self.least_s, end_s = math.inf, before_s
        """Room before all of them; a lower bound while jobs are `_taken`."""
        for job, work_s, _ in saved:
            end_s += work_s
            room_s = (job.deadline_s - now_s) / ROOM - end_s
            self._due.append(job.job_id)
            self._room_s.append(room_s)
            if room_s < self.least_s:
                self.least_s = room_s
        self.left = set(self._due)
        """Saved jobs that have not been taken."""
        self._taken: list[tuple[str, float]] = []
        """Jobs whose work is not yet subtracted from the room of each saved job. While the next jobs fit into
        `least_s`, which is the usual case, nothing needs that."""

    def is_enough_for(self, work_s: float) -> bool:
        """Whether this work may go before all saved jobs."""
        if work_s > self.least_s and self._taken:
            self._subtract()
        return work_s <= self.least_s

    def by_job(self) -> dict[str, float]:
        """By saved job: the room for it before the saved jobs that are due earlier."""
        least_s = itertools.accumulate(self._room_s, min, initial=math.inf)
        return dict(zip(self._due, least_s, strict=False))

    def take(self, job_id: str, work_s: float) -> None:
        """A job goes next."""
        self.left.discard(job_id)
        self._taken.append((job_id, work_s))
        self.least_s -= work_s

    def _subtract(self) -> None:
        """Subtract each taken job's work from the room of the saved jobs that it overtook."""
        due, room_s = self._due, self._room_s
        for job_id, work_s in self._taken:
            num_delayed = len(due)
            if job_id in due:
                num_delayed = due.index(job_id)
                del due[num_delayed], room_s[num_delayed]
            room_s[:num_delayed] = [each_s - work_s for each_s in room_s[:num_delayed]]
        self._taken.clear()
        self.least_s = min(room_s, default=math.inf)
