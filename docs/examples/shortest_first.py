"""A policy of one page: on each free rank, the job with the least work left.

gfgen run jobs/batch.jsonl --policy docs/examples/shortest_first.py
"""

from gfgen.layout import Layout
from gfgen.snapshot import Decision, Snapshot


def policy(snapshot: Snapshot, *, patience_s: float = 3600.0) -> list[Decision]:
    """A job that came longer than `patience_s` ago goes before those that came later."""
    late_s = snapshot.now_s - patience_s
    in_order = sorted(
        snapshot.open.values(),
        key=lambda job: (job.precedence, job.arrival_s > late_s, job.remaining_s, job.arrival_s),
    )
    pairs = zip(in_order, snapshot.free_ranks, strict=False)
    return [Decision(job.next_task, Layout.single(rank)) for job, rank in pairs]
