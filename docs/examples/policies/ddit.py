"""A job starts on the ranks that are free, up to the most that are efficient; starved jobs get more first.

Source: DDiT (arXiv 2506.13497): the optimal degree of parallelism, and the starvation time. The paper's
limit of efficiency was not found; `efficiency` is ours. Decodes run on one rank.
"""

from gfgen.graph import STEPS
from gfgen.snapshot import Decision, JobView, Snapshot


def policy(snapshot: Snapshot, *, efficiency: float = 0.7) -> list[Decision]:
    """A step may be shared by as many ranks as make it faster by `efficiency` times their number."""
    free, decisions = set(snapshot.free_ranks), []
    wide: list[tuple[float, JobView, list[int], int]] = []
    for job in sorted(snapshot.open.values(), key=lambda job: (job.last_layout is None, job.arrival_s)):
        if not free:
            break
        own = job.last_layout.ranks if job.last_layout else ()
        ranks = sorted(free, key=lambda rank: (rank not in own, rank))
        if job.next_task.stage not in STEPS:
            ranks = ranks[:1]
            decisions.append(Decision(job.next_task, job.layout(ranks)))
        else:
            best = _optimal_degree(snapshot, job, efficiency)
            number = min(best, len(ranks), max(1, len(own)) if job.next_task.step else best)
            ranks = ranks[: 1 << (number.bit_length() - 1)]
            wide.append((_starved_s(snapshot, job, best), job, ranks, best))
        free.difference_update(ranks)
    for _, job, ranks, best in sorted(wide, key=lambda each: -each[0]):
        while 2 * len(ranks) <= best and len(ranks) <= len(free):
            more = sorted(free)[: len(ranks)]
            free.difference_update(more)
            ranks = [*ranks, *more]
        decisions.append(Decision(job.next_task, job.step_layout(ranks)))
    return decisions


def _optimal_degree(snapshot: Snapshot, job: JobView, efficiency: float) -> int:
    alone_s = snapshot.costs.task_s(job.next_task, job.step_layout(range(1)))
    degree = 1
    while 2 * degree <= min(job.step_degree, snapshot.max_degree, len(snapshot.ranks)):
        shared_s = snapshot.costs.task_s(job.next_task, job.step_layout(range(2 * degree)))
        if alone_s < efficiency * 2 * degree * shared_s:
            break
        degree *= 2
    return degree


def _starved_s(snapshot: Snapshot, job: JobView, best: int) -> float:
    """How much longer its steps have taken since its arrival than they would have on the optimal degree."""
    step_s = snapshot.costs.task_s(job.next_task, job.step_layout(range(best)))
    return snapshot.now_s - job.arrival_s - (job.next_task.step or 0) * step_s
