"""Bounds on every schedule of a workload, from the task times of a simulation.

The bounds solve relaxed problems: the ranks are one machine with their total speed, which changes between
jobs at any time and for free; every task has a mixture of the times and work of its layouts, whatever ranks
other tasks use; moves, and waits for the writers, take no time. Every schedule of the workload is also a
schedule of the relaxed problem, so its bounds hold for all policies. Each function proves its bound.

*Work* is rank-seconds; a job's *least* time is that of its tasks one after the other, each on its fastest
layout. Times are seconds since the start of the run.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gfgen.errors import PolicyFault
from gfgen.graph import Task
from gfgen.layout import Layout
from gfgen.runtime.control.legality import check_degrees
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.simulate.backend import SimulatedTimes

_ROUNDING_S = 1e-9
"""More than the rounding error of sums."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Best values of a `Score`, each by itself; one schedule may not reach all."""

    jobs_per_min: float
    mean_s: float
    """Latency, if no job fails."""
    attainment: float
    attainment_client: float
    makespan_s: float
    """If no job fails."""


@dataclass(frozen=True, slots=True)
class JobDemand:
    """The demand of a job in any schedule."""

    arrival_s: float
    due_s: float
    """Infinity without a deadline."""
    gives_up_s: float
    """When it times out, or infinity."""
    head_s: float
    """Least time from its arrival to its first task; uses no rank."""
    tail_s: float
    """Time from its last task to its file."""
    least_s: float
    work: float
    """With the cheapest layouts."""
    cheapest_s: float
    """Time with the cheapest layouts."""
    savings: tuple[tuple[float, float], ...]
    """Ways to be faster: (extra work per saved second, saved seconds), the cheapest first."""

    @property
    def release_s(self) -> float:
        """When ranks can begin."""
        return self.arrival_s + self.head_s

    @property
    def latency_s(self) -> float:
        """Without any wait."""
        return self.head_s + self.least_s + self.tail_s

    def work_within(self, span_s: float) -> float:
        """The least work to finish within this time; infinite below its least time.

        Each task uses a mixture of layouts (a point of the lower hull of their seconds and work). Taking the
        cheapest savings first is optimal for this relaxed choice.
        """
        if span_s < self.least_s - _ROUNDING_S:
            return math.inf
        work, over_s = self.work, self.cheapest_s - span_s
        for price, seconds in self.savings:
            if over_s <= 0:
                break
            work += price * min(over_s, seconds)
            over_s -= seconds
        return work


def bound_of(jobs: Sequence[AdmittedJob], times: SimulatedTimes, *, num_ranks: int, slack_s: float) -> Bound:
    """The bounds for a workload of at least one job; `slack_s` is the client's slack."""
    demands = demands_of(jobs, times, num_ranks=num_ranks)
    return Bound(
        jobs_per_min=60 * most_jobs_per_s(demands, num_ranks=num_ranks),
        mean_s=least_mean_s(demands, num_ranks=num_ranks),
        attainment=most_in_time(demands, num_ranks=num_ranks),
        attainment_client=most_in_time(demands, num_ranks=num_ranks, slack_s=slack_s),
        makespan_s=least_makespan_s(demands, num_ranks=num_ranks),
    )


# Demands of jobs --------------------------------------------------------------------------

Way = tuple[float, float]
"""(work, seconds) of a task on some layout."""


def demands_of(
    jobs: Sequence[AdmittedJob], times: SimulatedTimes, *, num_ranks: int
) -> tuple[JobDemand, ...]:
    return tuple(_demand(job, times, num_ranks) for job in jobs)


def _demand(job: AdmittedJob, times: SimulatedTimes, num_ranks: int) -> JobDemand:
    spec, trajectory = job.spec, job.trajectory
    tasks = [trajectory.task(index) for index in range(trajectory.num_tasks)]
    hulls = [_hull(_ways(job, task, times, num_ranks)) for task in tasks]
    savings = [saving for hull in hulls for saving in _savings(hull)]
    return JobDemand(
        arrival_s=spec.arrival_s,
        due_s=math.inf if spec.deadline_s is None else spec.arrival_s + spec.deadline_s,
        gives_up_s=math.inf if spec.timeout_s is None else spec.arrival_s + spec.timeout_s,
        head_s=times.dispatch_s,
        tail_s=times.write_s(_dispatch(tasks[-1], Layout.single(0))),
        least_s=sum(hull[-1][1] for hull in hulls),
        work=sum(hull[0][0] for hull in hulls),
        cheapest_s=sum(hull[0][1] for hull in hulls),
        savings=tuple(sorted(savings)),
    )


def _ways(job: AdmittedJob, task: Task, times: SimulatedTimes, num_ranks: int) -> Iterator[Way]:
    """Work and time on each legal layout, with the other ranks idle or busy, whichever is less."""
    for layout in _legal_layouts(job, task, num_ranks):
        dispatch = _dispatch(task, layout)
        seconds = times.task_s(dispatch)
        if times.loaded_s is not None:
            seconds = min(seconds, times.loaded_s(dispatch))
        yield layout.degree * seconds, seconds


def _legal_layouts(job: AdmittedJob, task: Task, num_ranks: int) -> Iterator[Layout]:
    for layout in _layouts(num_ranks):
        try:
            check_degrees(job, task, layout)
        except PolicyFault:
            continue
        yield layout


@functools.cache
def _layouts(num_ranks: int) -> tuple[Layout, ...]:
    """One layout for each combination of degrees."""
    numbers = range(1, num_ranks + 1)
    return tuple(
        Layout(tuple(range(cfg * ulysses * ring)), cfg=cfg, ulysses=ulysses, ring=ring)
        for cfg, ulysses, ring in itertools.product((1, 2), numbers, numbers)
        if cfg * ulysses * ring <= num_ranks
    )


def _dispatch(task: Task, layout: Layout) -> Dispatch:
    return Dispatch(0, task, layout, 0.0, 0.0, 0.0)


def _hull(ways: Iterable[Way]) -> Sequence[Way]:
    """The corners of the lower hull, from the cheapest to the fastest; prices rise."""
    corners: list[Way] = []
    for work, seconds in sorted(ways):
        if corners and seconds >= corners[-1][1]:
            continue
        while len(corners) > 1 and _price(corners[-1], (work, seconds)) <= _price(*corners[-2:]):
            corners.pop()
        corners.append((work, seconds))
    return corners


def _price(cheaper: Way, quicker: Way) -> float:
    """Extra work per saved second."""
    return (quicker[0] - cheaper[0]) / (cheaper[1] - quicker[1])


def _savings(hull: Sequence[Way]) -> Iterator[tuple[float, float]]:
    for cheaper, quicker in itertools.pairwise(hull):
        yield _price(cheaper, quicker), cheaper[1] - quicker[1]


# Makespan and throughput ------------------------------------------------------------------


def least_makespan_s(demands: Sequence[JobDemand], *, num_ranks: int) -> float:
    """Least time from the first arrival to the last end, if no job fails.

    No job ends earlier than its latency after its arrival. And after any time, `num_ranks` ranks still have
    to do all work of the jobs that are released from then on, before the last of their files.
    """
    ends_s = max(each.arrival_s + each.latency_s for each in demands)
    work, tail_s = 0.0, math.inf
    for each in sorted(demands, key=lambda each: -each.release_s):
        work, tail_s = work + each.work, min(tail_s, each.tail_s)
        ends_s = max(ends_s, each.release_s + work / num_ranks + tail_s)
    return ends_s - min(each.arrival_s for each in demands)


def most_jobs_per_s(demands: Sequence[JobDemand], *, num_ranks: int) -> float:
    """Most done jobs per second from the first arrival to the last end.

    Either all jobs are done, in the least makespan, or some fail. Then the done ones take at least the time
    of the cheapest ones, and n failed jobs end at their timeouts, so not before the nth timeout.
    """
    num_jobs = len(demands)
    first_s = min(each.arrival_s for each in demands)
    time_outs_s = sorted(each.gives_up_s for each in demands)
    best, work = num_jobs / least_makespan_s(demands, num_ranks=num_ranks), 0.0
    cheapest = sorted(each.work for each in demands)
    for num_done, more in enumerate(cheapest[:-1], start=1):
        work += more
        lasts_s = max(work / num_ranks, time_outs_s[num_jobs - num_done - 1] - first_s)
        best = max(best, num_done / lasts_s)
    return best


# Latency ----------------------------------------------------------------------------------


def least_mean_s(demands: Sequence[JobDemand], *, num_ranks: int) -> float:
    """Least mean latency, if no job fails.

    A schedule of all jobs is also one of each part of them, so the sum over all jobs is at least the sum of
    the bounds of parts. A part is a busy period of one machine as fast as all ranks. The larger of two bounds
    counts for each part: no job waits; or that machine always serves the job with the least remaining work,
    which minimizes the mean end (Schrage 1968), and files follow.
    """
    total_s = 0.0
    for part in _busy_periods(demands, num_ranks):
        alone_s = sum(each.latency_s for each in part)
        shared_s = _least_ends_s(part, num_ranks) + sum(each.tail_s - each.arrival_s for each in part)
        total_s += max(alone_s, shared_s)
    return total_s / len(demands)


def _busy_periods(demands: Sequence[JobDemand], num_ranks: int) -> Iterator[Sequence[JobDemand]]:
    """Groups of jobs between the idle times of a machine that never waits with work."""
    part: list[JobDemand] = []
    ends_s = -math.inf
    for each in sorted(demands, key=lambda each: each.release_s):
        if each.release_s >= ends_s and part:
            yield part
            part = []
        part.append(each)
        ends_s = max(ends_s, each.release_s) + each.work / num_ranks
    yield part


def _least_ends_s(demands: Sequence[JobDemand], num_ranks: int) -> float:
    """The sum of the ends when the machine serves the job with the least remaining work first."""
    coming = sorted(((each.release_s, each.work) for each in demands), reverse=True)
    left: list[float] = []
    now_s = total_s = 0.0
    while coming or left:
        if not left:
            now_s = coming[-1][0]
        while coming and coming[-1][0] <= now_s:
            heapq.heappush(left, coming.pop()[1])
        work = heapq.heappop(left)
        next_s = coming[-1][0] if coming else math.inf
        ends_s = now_s + work / num_ranks
        if ends_s <= next_s:
            total_s += ends_s
        else:
            heapq.heappush(left, work - (next_s - now_s) * num_ranks)
        now_s = min(ends_s, next_s)
    return total_s


# Deadlines --------------------------------------------------------------------------------


def most_in_time(demands: Sequence[JobDemand], *, num_ranks: int, slack_s: float = 0.0) -> float:
    """Largest share of the jobs with a deadline that can meet it; 1 if none has one.

    This leaves out jobs that cannot meet their deadline alone. Each other job has a window and needs the
    least work that fits into it. A part of a job counts as its share of the work. Amounts of work are
    feasible if no interval contains more than the ranks can do in it (sufficient on one machine, by earliest
    deadline first). They form a polymatroid, so the greedy choice is optimal: take jobs by increasing work,
    each with as much as the earlier ones leave (Edmonds 1970). Groups of windows that do not overlap count
    whole jobs separately.
    """
    with_deadline = [each for each in demands if each.due_s < math.inf]
    if not with_deadline:
        return 1.0
    windows: list[_Window] = []
    for each in with_deadline:
        ends_s = each.due_s + slack_s - each.tail_s
        work = each.work_within(ends_s - each.release_s)
        if work < math.inf:
            windows.append((each.release_s, ends_s, work))
    num_met = sum(_most_whole(part, num_ranks) for part in _apart(windows))
    return num_met / len(with_deadline)


_Window = tuple[float, float, float]
"""Start, end and work of a job."""


def _apart(windows: Sequence[_Window]) -> Iterator[Sequence[_Window]]:
    """Groups of windows that overlap directly or through others."""
    part: list[_Window] = []
    ends_s = -math.inf
    for window in sorted(windows):
        if window[0] >= ends_s and part:
            yield part
            part = []
        part.append(window)
        ends_s = max(ends_s, window[1])
    if part:
        yield part


def _most_whole(windows: Sequence[_Window], num_ranks: int) -> int:
    """The most jobs: the sum of the parts of jobs, rounded down.

    room_FU [from, until]: the work that ranks can still do in an interval after the work chosen in it.
    F and U index the distinct starts and ends of windows.
    """
    from_F, first = np.unique([window[0] for window in windows], return_inverse=True)
    until_U, last = np.unique([window[1] for window in windows], return_inverse=True)
    room_FU = num_ranks * (until_U[None, :] - from_F[:, None])
    num_met = 0.0
    for idx in np.argsort([window[2] for window in windows], kind="stable"):
        work = windows[idx][2]
        around = room_FU[: first[idx] + 1, last[idx] :]
        amount = min(work, max(0.0, float(around.min())))
        around -= amount
        num_met += amount / work if work > 0 else 1.0
    return math.floor(num_met + _ROUNDING_S)
