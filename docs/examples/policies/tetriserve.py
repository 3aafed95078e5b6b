"""Ranks go first to jobs that would be lost if they waited, and each gets as few as meet its deadline.

Source: TetriServe (arXiv 2510.01565), and the variant of GF-DiT's authors that plans at every event instead
of in rounds of a fixed length. With one width for each job, the paper's knapsack is a sort by width.
"""

from gfgen.graph import STEPS
from gfgen.layout import Layout
from gfgen.snapshot import Decision, JobView, Snapshot


def policy(snapshot: Snapshot) -> list[Decision]:
    free, decisions = list(snapshot.free_ranks), []
    by_deadline = sorted(snapshot.open.values(), key=lambda job: (job.precedence, job.due_s, job.arrival_s))
    for job in by_deadline:  # texts and decodes, which are short
        if free and job.next_task.stage not in STEPS:
            decisions.append(Decision(job.next_task, job.layout([free.pop(0)])))
    planned = _planned(snapshot)
    for job in by_deadline:
        degree = planned.get(job.job_id, 0)
        if not degree or not free:
            continue
        own = job.last_layout.ranks if job.last_layout else ()
        ranks = sorted(free, key=lambda rank: (rank not in own, rank))[:degree]
        free = [rank for rank in free if rank not in ranks]
        if len(ranks) == degree:  # otherwise they are held until running steps end
            decisions.append(Decision(job.next_task, job.step_layout(ranks)))
    return decisions


def _planned(snapshot: Snapshot) -> dict[str, int]:
    """The ranks of each job that runs a step next, or runs one."""
    jobs = [*snapshot.open.values(), *snapshot.busy.values()]
    jobs = [job for job in jobs if job.next_task.stage in STEPS]
    jobs.sort(key=lambda job: (job.precedence, job.due_s, job.arrival_s))
    least = {job.job_id: _least_degree(snapshot, job) for job in jobs}
    urgent = [job for job in jobs if least[job.job_id] and _is_lost_later(snapshot, job)]
    urgent.sort(key=lambda job: (job.precedence, least[job.job_id]))
    planned: dict[str, int] = {}
    left = len(snapshot.ranks)
    for job in urgent:
        if least[job.job_id] <= left:
            planned[job.job_id] = least[job.job_id]
            left -= planned[job.job_id]
    for job in jobs:  # lost ones, too, may use what is left
        if left and job.job_id not in planned:
            degree = least[job.job_id]
            planned[job.job_id] = degree if 0 < degree <= left else 1
            left -= planned[job.job_id]
    for job in jobs:  # what nobody needs makes the most urgent jobs faster
        degree = planned.get(job.job_id, 0)
        while degree and 2 * degree <= _most(snapshot, job) and degree <= left:
            if _rest_s(snapshot, job, 2 * degree) >= _rest_s(snapshot, job, degree):
                break
            left -= degree
            degree = planned[job.job_id] = 2 * degree
    return planned


def _least_degree(snapshot: Snapshot, job: JobView) -> int:
    """The fewest ranks, a power of two, that meet its deadline; 0 if none do."""
    degree = 1
    while degree <= _most(snapshot, job):
        if snapshot.now_s + _rest_s(snapshot, job, degree) <= job.due_s:
            return degree
        degree *= 2
    return 0


def _is_lost_later(snapshot: Snapshot, job: JobView) -> bool:
    """Whether it misses its deadline if it waits as long as a step takes."""
    most = 1 << (_most(snapshot, job).bit_length() - 1)
    step_s = snapshot.costs.task_s(job.next_task, job.step_layout(range(most)))
    return snapshot.now_s + step_s + _rest_s(snapshot, job, most) > job.due_s


def _most(snapshot: Snapshot, job: JobView) -> int:
    return min(job.step_degree, snapshot.max_degree, len(snapshot.ranks))


def _rest_s(snapshot: Snapshot, job: JobView, degree: int) -> float:
    layout: Layout = job.step_layout(range(degree))
    return snapshot.costs.remaining_s(job.next_task, layout)
