"""A bound on the makespan of every schedule of a workload, from the task times of a simulation.

It solves a relaxed problem: the ranks are one machine with their total speed, which changes between jobs at
any time and for free; moves, and waits for the writers, take no time. Every schedule of the workload is also
a schedule of the relaxed problem, so the bound holds for all policies.

*Work* is rank-seconds. Times are seconds since the start of the run.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gfgen.errors import PolicyFault
from gfgen.graph import Task
from gfgen.layout import Layout
from gfgen.runtime.control.decider import check_degrees
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.simulate.simulation import SimulatedTimes


@dataclass(frozen=True, slots=True)
class JobDemand:
    """What a job needs in any schedule."""

    arrival_s: float
    head_s: float
    """Least time from its arrival to its first task; uses no rank."""
    least_s: float
    """With all tasks one after the other, each on its fastest layout."""
    work: float
    """With the cheapest layouts."""
    tail_s: float
    """Time from its last task to its file."""


def least_makespan_s(
    jobs: Sequence[AdmittedJob], times: SimulatedTimes, *, num_ranks: int, max_degree: int | None = None
) -> float:
    """Least time from the first arrival to the last end, if no job fails and tasks use `max_degree` ranks.

    No job ends sooner after its arrival than it takes alone. And after any time, `num_ranks` ranks still have
    to do all work of the jobs that can begin from then on, before the last of their files.
    """
    demands = [_demand(job, times, max_degree or num_ranks) for job in jobs]
    ends_s = max(each.arrival_s + each.head_s + each.least_s + each.tail_s for each in demands)
    work, tail_s = 0.0, math.inf
    for each in sorted(demands, key=lambda each: -each.arrival_s - each.head_s):
        work, tail_s = work + each.work, min(tail_s, each.tail_s)
        ends_s = max(ends_s, each.arrival_s + each.head_s + work / num_ranks + tail_s)
    return ends_s - min(each.arrival_s for each in demands)


def _demand(job: AdmittedJob, times: SimulatedTimes, num_ranks: int) -> JobDemand:
    tasks = [job.trajectory.task(index) for index in range(job.trajectory.num_tasks)]
    ways = [list(_ways(job, task, times, num_ranks)) for task in tasks]
    return JobDemand(
        arrival_s=job.spec.arrival_s,
        head_s=times.dispatch_s,
        least_s=sum(min(seconds for _, seconds in each) for each in ways),
        work=sum(min(work for work, _ in each) for each in ways),
        tail_s=times.write_s(_dispatch(tasks[-1], Layout.single(0))),
    )


def _ways(
    job: AdmittedJob, task: Task, times: SimulatedTimes, num_ranks: int
) -> Iterator[tuple[float, float]]:
    """Work and time on each legal layout, with the other ranks idle or busy, whichever is less."""
    for layout in _layouts(num_ranks):
        try:
            check_degrees(job, task, layout)
        except PolicyFault:
            continue
        dispatch = _dispatch(task, layout)
        seconds = times.task_s(dispatch)
        if times.loaded_s is not None:
            seconds = min(seconds, times.loaded_s(dispatch))
        yield layout.degree * seconds, seconds


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
