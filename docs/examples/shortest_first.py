"""A policy of one page: on each free rank, the job with the fewest tasks left.

gfgen run jobs/batch.jsonl --policy docs/examples/shortest_first.py
"""

from gfgen.layout import Layout
from gfgen.snapshot import Decision, Snapshot


def policy(snapshot: Snapshot, *, patience: int = 1000) -> list[Decision]:
    """Jobs with more than `patience` tasks left wait until nothing shorter is open."""
    by_length = sorted(
        snapshot.open.values(),
        key=lambda job: (job.precedence, job.remaining_tasks > patience, job.remaining_tasks, job.arrival_s),
    )
    pairs = zip(by_length, snapshot.free_ranks, strict=False)
    return [Decision(job.next_task, Layout.single(rank)) for job, rank in pairs]
