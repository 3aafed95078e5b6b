"""A static split of the machine: images have the first ranks and videos the others; triage decides on each.

It needs two ranks. Source: the baseline of GenServe (arXiv 2604.04335).
"""

from dataclasses import replace

from gfgen.policies.triage import triage
from gfgen.snapshot import Decision, JobView, Snapshot


def policy(snapshot: Snapshot, *, images: int = 0, degree: int = 1) -> list[Decision]:
    """Takes the number of ranks for images (0: half of them) and `degree` of triage."""
    number = images or (len(snapshot.ranks) + 1) // 2
    parts = (snapshot.ranks[:number], False), (snapshot.ranks[number:], True)
    decisions: list[Decision] = []
    for views, has_videos in parts:
        ranks = {view.rank for view in views}
        sets = snapshot.costs.sets([view.rank for view in views], len(views))
        part = replace(
            snapshot,
            open={name: job for name, job in snapshot.open.items() if _is_video(job) == has_videos},
            busy={name: job for name, job in snapshot.busy.items() if _is_video(job) == has_videos},
            running=tuple(each for each in snapshot.running if ranks.issuperset(each.layout.ranks)),
            ranks=views,
            max_degree=max(map(len, sets), default=1),
            orders=None,
        )
        decisions += triage(part, degree=degree)
    return decisions


def _is_video(job: JobView) -> bool:
    return job.shape.partition("+")[0].count("x") > 1
