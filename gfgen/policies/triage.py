"""Triage: save as many deadlines as possible; other jobs go first if they make none late."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from operator import attrgetter, itemgetter

from gfgen.graph import Task
from gfgen.layout import Layout
from gfgen.policies.allotment import allot, shared_out
from gfgen.policies.fcfs import GroupSize
from gfgen.policies.speed import MARGIN, LostJobs, chosen_task, rest_s, widest
from gfgen.snapshot import Decision, JobView, Snapshot

NUM_CONSIDERED = 256
"""Jobs with the next deadlines among which the saved ones are chosen; later ones count as without a deadline.
Of 600 jobs due within a tenth of the time, 64 misses 14 more in a hundred, and 512 none less (0.7 ms)."""
ROOM = 2.0
"""Short jobs overtake long ones if those would be in time even if everything took twice as long: more jobs
will arrive, and a long job without slack later keeps all others from the ranks."""

_ROUNDING_S = 1e-9

NUM_FIRST = 16
"""Jobs at the head of the queue to consider: twice the maximum number of ranks."""
NUM_LATE = 4 * NUM_FIRST
"""Late jobs to consider, and in a lenient queue as many others."""
MAX_KEPT = 4 * NUM_CONSIDERED
"""Jobs, ended ones included, whose cases are kept between decisions."""

next_due = attrgetter("precedence", "deadline_s", "remaining_s", "arrival_s")
"""A started job keeps its place among equal deadlines: they would take turns, and all would end late."""
_short = attrgetter("precedence", "remaining_s", "arrival_s")
_precedence = attrgetter("precedence")
_deadline = attrgetter("deadline_s")
_arrival = attrgetter("arrival_s")
_remaining = attrgetter("remaining_s")


def triage(snapshot: Snapshot, *, degree: GroupSize = 2, lenient: bool = False) -> list[Decision]:
    """Meets as many deadlines as possible; among the other jobs the shortest goes first.

    For jobs with deadlines, under any load. Jobs get groups of `degree` ranks, and more if a deadline needs
    it or ranks would idle. Jobs without a deadline, and jobs that cannot meet theirs, go first if that makes
    no other job late, and last otherwise; but a late job first gets half its time again as a new deadline, as
    far as no other job misses its own for that. `lenient=true` meets as many of these later deadlines as
    possible, and the jobs' own as far as they allow. Jobs of a higher priority always go before the others.
    """
    if not snapshot.open or not snapshot.free_ranks:
        return []
    queue = _Queue(snapshot, shared_out(snapshot, degree=degree), lenient=lenient)
    return allot(snapshot, queue.jobs(), wanted=queue.wanted, chosen=queue.chosen)


_Case = tuple[JobView, float, float]
"""A job; the rank time of its rest at the given degree, divided by the number of ranks; and the least
duration of its rest: on as many ranks as it can use, with as many steps given up as it may."""
_Due = tuple[float, _Case, bool]
"""When a job is due, the job, and whether it may be given up."""


class _Queue:
    """All jobs in the order in which they get ranks, higher priorities first, computed as far as needed."""

    def __init__(self, snapshot: Snapshot, degree: int, *, lenient: bool) -> None:
        self._snapshot, self._degree, self._is_lenient = snapshot, degree, lenient
        key = (triage, degree, len(snapshot.ranks), snapshot.max_degree)
        self._cases: dict[str, _Case] = snapshot.kept.setdefault(key, {})
        if len(self._cases) > MAX_KEPT:
            self._cases.clear()
        self._lost = LostJobs(snapshot)
        self._waits_s: dict[str, float] = {}
        self._not_saved: set[str] = set()
        self._later_s: dict[str, float] = {}
        """New deadlines of jobs that are saved, but late."""

    def jobs(self) -> Iterator[JobView]:
        now_s = end_s = self._snapshot.now_s
        before_s = 0.0
        for hopeful, others in self._by_priority():
            due = self._cases_of(hopeful)
            begin_s = end_s
            saved, given_up, end_s = _most_in_time(now_s, due, self._waits_s, end_s=begin_s)
            rest = [*given_up, *self._cases_of(others)]
            self._with_late(begin_s, saved, rest)
            if self._later_s:
                end_s = begin_s + math.fsum([case[1] for case in saved])
            left_s = [self._later_s.get(job.job_id, job.due_s) - now_s for job, _, _ in saved]
            room = _Room(left_s, saved, rest, before_s)
            self._not_saved.update([job.job_id for job, _, _ in rest])
            yield from self._shortest_first(room, saved, rest)
            before_s += math.fsum([work_s for _, work_s, _ in (*saved, *rest)])

    def _with_late(self, begin_s: float, saved: list[_Case], rest: list[_Case]) -> None:
        """Move late jobs from `rest` to `saved` with a new deadline; if lenient, not behind all in time."""
        now_s, num_optional = self._snapshot.now_s, NUM_LATE if self._is_lenient else 0
        late = (case for case in rest if now_s + case[2] <= case[0].last_due_s < math.inf)
        optional = list(itertools.islice(late, NUM_LATE))
        if not optional:
            return
        optional += saved[:num_optional]
        dues = [(case[0].last_due_s, case, True) for case in optional]
        dues += [(case[0].due_s, case, False) for case in saved[num_optional:]]
        dues.sort(key=itemgetter(0))
        gone = _without_room(begin_s, dues)
        dues = [due for due in dues if due[1][0].job_id not in gone]
        if self._is_lenient:
            _hasten(now_s, begin_s, dues)
        known = {case[0].job_id: due_s for due_s, case, is_optional in dues if is_optional}
        self._later_s |= known
        rest[:] = [case for case in (*saved[:num_optional], *rest) if case[0].job_id not in known]
        saved[:] = [case for _, case, _ in dues]

    def wanted(self, job: JobView) -> int:
        if job.job_id in self._not_saved:
            return self._degree
        return _degree_in_time(self._snapshot, job, self._degree, self._later_s.get(job.job_id, job.due_s))

    def chosen(self, job: JobView, layout: Layout) -> Task:
        """What a job of the queue runs."""
        return chosen_task(self._snapshot, job, layout, wait_s=self._waits_s.get(job.job_id, 0.0))

    def _by_priority(self) -> Iterator[tuple[list[JobView], list[JobView]]]:
        """For each priority the jobs that may meet a deadline, by deadline, and the first of the others."""
        snapshot, num_hopeful, num_others = self._snapshot, NUM_CONSIDERED, NUM_FIRST
        by_deadline, start = snapshot.in_order(next_due), 0
        busy = defaultdict[int, list[JobView]](list)
        for job in snapshot.busy.values():
            busy[job.precedence].append(job)
        while levels := [*busy, *map(_precedence, by_deadline[start : start + 1])]:
            precedence = min(levels)
            end = bisect_right(by_deadline, precedence, start, key=_precedence)
            hopeful = self._hopeful(by_deadline, start, end, most=num_hopeful)
            num_hopeful -= len(hopeful)
            others: list[JobView] = []
            if len(hopeful) < end - start:
                known = {job.job_id for job in hopeful}
                by_length = itertools.islice(snapshot.in_order(_short), start, end)
                waiting = (job for job in by_length if job.job_id not in known)
                others += itertools.islice(waiting, num_others)
                num_others -= len(others)
            for job in busy.pop(precedence, ()):
                if job.due_s < math.inf and job not in self._lost:
                    insort(hopeful, job, key=next_due)
                else:
                    insort(others, job, key=_short)
            yield hopeful, others
            start = end

    def _hopeful(self, by_deadline: Sequence[JobView], start: int, end: int, *, most: int) -> list[JobView]:
        now_s, end = self._snapshot.now_s, bisect_left(by_deadline, math.inf, start, end, key=_deadline)
        lost, known = self._lost, self._lost.known
        hopeful = (
            job
            for job in itertools.islice(by_deadline, start, end)
            if now_s + job.remaining_s <= job.due_s or (known.get(job.job_id) is not job and job not in lost)
        )
        return list(itertools.islice(hopeful, most))

    def _cases_of(self, jobs: Iterable[JobView]) -> list[_Case]:
        known = self._cases.get
        return [
            case if (case := known(job.job_id)) is not None and case[0] is job else self._case(job)
            for job in jobs
        ]

    def _case(self, job: JobView) -> _Case:
        snapshot, most = self._snapshot, widest(self._snapshot, job)
        used = min(self._degree, most)
        work_s = rest_s(snapshot, job, used) * used / len(snapshot.ranks)
        least_s = job.remaining_s - job.saving_s
        if most > 1:
            least_s = rest_s(snapshot, job, most, num_given_up=job.num_approximable)
        case = self._cases[job.job_id] = (job, work_s, least_s)
        return case

    def _shortest_first(self, room: _Room, saved: list[_Case], others: list[_Case]) -> Iterator[JobView]:
        """The shortest first, as long as the saved jobs, given by deadline, keep enough room.

        All have the same priority. A job may overtake the saved jobs that are due earlier, or all of them if
        it is not saved itself. No job is due before the first one, so the first one always fits.
        """
        waiting = sorted([job for job, _, _ in (*saved, *others)], key=_arrival)
        waiting.sort(key=_remaining)  # two sorts by floats take a third of the time of one by pairs
        gone: set[str] = set()
        num_left = len(saved)
        for _ in range(NUM_FIRST):
            if not num_left:
                break
            job = next(job for job in waiting if job.job_id not in gone)
            if not room.is_enough_for(self._work_s(job)):
                job = room.shortest(gone)
            yield job
            gone.add(job.job_id)
            room.take(job.job_id, self._work_s(job))
            num_left -= job.job_id not in self._not_saved
        yield from (job for job, _, _ in saved if job.job_id not in gone)
        yield from (job for job in waiting if job.job_id in self._not_saved and job.job_id not in gone)

    def _work_s(self, job: JobView) -> float:
        return self._cases[job.job_id][1]


def _most_in_time(
    now_s: float, by_deadline: list[_Case], waits_s: dict[str, float], *, end_s: float
) -> tuple[list[_Case], list[_Case], float]:
    """The largest set of jobs that meet their deadlines one after another, the jobs given up for them, and
    when the last one ends.

    All have the same priority, and the first one starts at `end_s`. All ranks count as one fast machine.
    Whenever a job would be late, it gives up as many of its steps as it takes, if it may; `waits_s` gets the
    time that it would be late. Otherwise the job with the most work so far is given up, which makes the most
    room for the others.

    Source: Moore 1968, "An n job, one machine sequencing algorithm for minimizing the number of late jobs".
    """
    in_time = 0
    for job, work_s, least_s in by_deadline:
        due_s = job.due_s
        if now_s + least_s > due_s or end_s + work_s > due_s:
            break
        in_time += 1
        end_s += work_s
    else:
        return by_deadline, [], end_s
    taken = [(-work_s, job.job_id) for job, work_s, _ in by_deadline[:in_time]]
    heapq.heapify(taken)
    given_up = []
    by_id = {case[0].job_id: case for case in by_deadline}
    for case in by_deadline[in_time:]:
        job, work_s, least_s = case
        if now_s + least_s > job.due_s:
            given_up.append(case)
            continue
        late_s = end_s + work_s - job.due_s
        if 0 < late_s <= job.saving_s * work_s / max(job.remaining_s, 1e-9):
            work_s -= late_s
            waits_s[job.job_id] = late_s
        heapq.heappush(taken, (-work_s, job.job_id))
        end_s += work_s
        if end_s > job.due_s + _ROUNDING_S:
            minus_work_s, job_id = heapq.heappop(taken)
            end_s += minus_work_s
            given_up.append(by_id[job_id])
    kept = {job_id for _, job_id in taken}
    return [case for case in by_deadline if case[0].job_id in kept], given_up, end_s


def _without_room(begin_s: float, dues: list[_Due]) -> set[str]:
    """Optional jobs that must go so that no job is late: those with the most work, as in `_most_in_time`."""
    end_s, taken, gone = begin_s, list[tuple[float, str]](), set[str]()
    for due_s, (job, work_s, _), is_optional in dues:
        end_s += work_s
        if is_optional:
            heapq.heappush(taken, (-work_s, job.job_id))
        while taken and end_s > due_s + _ROUNDING_S:
            minus_work_s, job_id = heapq.heappop(taken)
            end_s += minus_work_s
            gone.add(job_id)
    return gone


def _hasten(now_s: float, begin_s: float, dues: list[_Due]) -> None:
    """Move jobs forward to their own deadlines, as far as the others keep theirs with MARGIN."""
    ends_s = itertools.accumulate([MARGIN * case[1] for _, case, _ in dues])
    spare_s = [due_s - begin_s - end_s for (due_s, _, _), end_s in zip(dues, ends_s, strict=True)]
    for place, (_, case, is_optional) in enumerate(dues[:NUM_LATE]):
        own_s, work_s = case[0].due_s, MARGIN * case[1]
        first = bisect_left(dues, own_s, 0, place, key=itemgetter(0))
        end_s = work_s + (dues[first - 1][0] - spare_s[first - 1] if first else begin_s)
        if max(end_s, now_s + case[2]) <= own_s and min(spare_s[first:place], default=math.inf) >= work_s:
            spare_s[first : place + 1] = [own_s - end_s, *[x - work_s for x in spare_s[first:place]]]
            dues[first : place + 1] = [(own_s, case, is_optional), *dues[first:place]]


def _degree_in_time(snapshot: Snapshot, job: JobView, degree: int, due_s: float) -> int:
    """The fewest ranks, at least `degree`, that are predicted to meet the deadline with MARGIN."""
    most = widest(snapshot, job)
    while degree < most and snapshot.now_s + MARGIN * rest_s(snapshot, job, degree) > due_s:
        degree *= 2
    return min(degree, most)


class _Room:
    """How much other work may go before each saved job if all took ROOM times as long as predicted."""

    def __init__(self, left_s: list[float], saved: list[_Case], others: list[_Case], before_s: float) -> None:
        """left_s: until each of the saved jobs is due."""
        ends_s = itertools.accumulate([work_s for _, work_s, _ in saved], initial=before_s)
        next(ends_s)
        self._cases = [*saved, *others]
        self._room_s = [each_s / ROOM - end_s for each_s, end_s in zip(left_s, ends_s, strict=True)]
        """By place; infinite for those that have been taken."""
        self.least_s = min(self._room_s, default=math.inf)
        """Room before all of them; a lower bound while jobs are `_taken`."""
        self._taken: list[tuple[str, float]] = []
        """Jobs whose work is not yet subtracted from the room of each saved job. While the next jobs fit into
        `least_s`, which is the usual case, nothing needs that."""

    def is_enough_for(self, work_s: float) -> bool:
        """Whether this work may go before all saved jobs."""
        if work_s > self.least_s and self._taken:
            self._subtract()
        return work_s <= self.least_s

    def shortest(self, gone: Set[str]) -> JobView:
        """The shortest job that may go before the saved ones due earlier; the first of those always may."""
        least_s, found = math.inf, list[JobView]()
        rooms_s = itertools.chain(self._room_s, itertools.repeat(math.inf))
        for (job, work_s, _), room_s in zip(self._cases, rooms_s, strict=False):
            if work_s <= least_s and job.job_id not in gone:
                found.append(job)
            if room_s < least_s:
                least_s = room_s
                if least_s < self._least_work_s:
                    break
        return min(found, key=_short)

    @functools.cached_property
    def _least_work_s(self) -> float:
        return min([work_s for _, work_s, _ in self._cases])

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {job.job_id: place for place, (job, _, _) in enumerate(self._cases)}

    def take(self, job_id: str, work_s: float) -> None:
        self._taken.append((job_id, work_s))
        self.least_s -= work_s

    def _subtract(self) -> None:
        room_s = self._room_s
        for job_id, work_s in self._taken:
            num_delayed = self._places[job_id]
            room_s[:num_delayed] = [each_s - work_s for each_s in room_s[:num_delayed]]
            room_s[num_delayed : num_delayed + 1] = [math.inf] * (num_delayed < len(room_s))
        self._taken.clear()
        self.least_s = min(room_s, default=math.inf)
