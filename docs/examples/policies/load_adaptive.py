"""A job that finds few others gets all ranks for its steps, any other one rank; first come, first served.

Source: the load-adaptive policy in the repository of GF-DiT's authors (benchmarks/diffusion/policies). It
also counts two minutes after two close arrivals as high load, which all jobs here would be under.
"""

from gfgen.graph import STEPS
from gfgen.snapshot import Decision, JobView, Snapshot


def policy(snapshot: Snapshot, *, backlog: int = 2) -> list[Decision]:
    """From `backlog` unfinished jobs on the load counts as high."""
    free, decisions = set(snapshot.free_ranks), []
    for job in sorted(snapshot.open.values(), key=lambda job: (job.precedence, job.arrival_s)):
        groups = snapshot.groups(_degree(snapshot, job, backlog))
        own = job.last_layout.ranks[:1] if job.last_layout else ()
        groups.sort(key=lambda group: (not free.issuperset(group), not set(own) <= set(group)))
        if free.issuperset(groups[0]):
            decisions.append(Decision(job.next_task, job.layout(groups[0])))
        free.difference_update(groups[0])  # a job that cannot start yet holds its ranks
        if not free:
            break
    return decisions


def _degree(snapshot: Snapshot, job: JobView, backlog: int) -> int:
    """Chosen at the first step; later steps keep it."""
    if job.next_task.stage not in STEPS:
        return 1
    if job.next_task.step and job.last_layout is not None:
        return job.last_layout.degree
    is_high = len(snapshot.open) + len(snapshot.busy) >= backlog
    return 1 if is_high else min(job.step_degree, len(snapshot.ranks))
