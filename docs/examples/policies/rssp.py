"""Each class of jobs has a fixed number of ranks for its steps; tasks run as they become ready.

Source: RSSP in the repository of GF-DiT's authors (benchmarks/diffusion/policies): 4 ranks for short and
medium jobs, 1 for long ones. Classes are the tags S, M and L; other jobs count as medium.
"""

from gfgen.graph import STEPS
from gfgen.snapshot import Decision, Snapshot


def policy(snapshot: Snapshot, *, short: int = 4, medium: int = 4, long: int = 1) -> list[Decision]:
    """Takes the numbers of ranks of the three classes."""
    degrees = {"S": short, "M": medium, "L": long}
    free, decisions = set(snapshot.free_ranks), []
    for job in sorted(snapshot.open.values(), key=lambda job: job.precedence):  # else as they became ready
        degree = degrees.get(job.tag or "", medium) if job.next_task.stage in STEPS else 1
        groups = snapshot.groups(min(degree, job.max_degree))
        own = job.last_layout.ranks[:1] if job.last_layout else ()
        groups.sort(key=lambda group: (not free.issuperset(group), not set(own) <= set(group)))
        group = groups[0]
        if free.issuperset(group):
            layout = job.layout(group)
            decisions.append(Decision(job.next_task, layout))
        free.difference_update(group)  # a job that cannot start yet holds its ranks
        if not free:
            break
    return decisions
