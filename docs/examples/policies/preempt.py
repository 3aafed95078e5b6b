"""Short jobs go first on all ranks; while there are any, long jobs pause at their next step.

Source: the step-boundary preemption in the repository of GF-DiT's authors (benchmarks/diffusion/policies),
without its prices of late classes. Classes are the tags S, M and L. The source counts how long a job has
paused, which a snapshot does not say: here its age counts.
"""

from gfgen.graph import STEPS
from gfgen.snapshot import Decision, JobView, Snapshot


def policy(snapshot: Snapshot, *, patience_s: float = 60.0, demote: bool = False) -> list[Decision]:
    """Long jobs that came longer than `patience_s` ago run on one rank in spite of short ones.

    With `demote` all long jobs do.
    """
    late_s = snapshot.now_s - patience_s
    jobs = (*snapshot.open.values(), *snapshot.busy.values())
    has_short = any(job.tag == "S" for job in jobs)

    def may_run(job: JobView) -> bool:
        return job.tag != "L" or not has_short or demote or job.arrival_s < late_s

    ranked = sorted(
        filter(may_run, snapshot.open.values()),
        key=lambda job: (job.precedence, "SML".find(job.tag or "M"), job.due_s, job.arrival_s),
    )
    free, decisions = list(snapshot.free_ranks), []
    for job in ranked:
        if not free:
            break
        is_held_back = job.tag == "L" and has_short
        most = 1 if is_held_back or job.next_task.stage not in STEPS else job.step_degree
        own = job.last_layout.ranks if job.last_layout else ()
        ranks = sorted(free, key=lambda rank: (rank not in own, rank))
        number = min(most, len(free), snapshot.max_degree)
        layout = job.layout(ranks[: 1 << (number.bit_length() - 1)])
        decisions.append(Decision(job.next_task, layout))
        free = [rank for rank in free if rank not in layout.ranks]
    return decisions
