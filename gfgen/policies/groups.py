"""Fixed groups of ranks, and the group that a job belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from gfgen.layout import MAX_RANKS
from gfgen.snapshot import JobView

Degree = Annotated[int, range(1, MAX_RANKS + 1)]
"""Option of a policy: how many ranks run a task together. `--policy` accepts this range."""
GroupSize = Annotated[int, (1, 2, 4, 8)]
"""For policies that halve and double groups."""
DegreeOrAll = Annotated[int, range(MAX_RANKS + 1)]
"""0 means all ranks."""

RankGroup = tuple[int, ...]


def home_group(job: JobView, by_rank: Mapping[int, RankGroup]) -> RankGroup | None:
    """The group that a job ran on last; None before its first task, or if a rank of the group died."""
    if job.last_layout is None:
        return None
    ranks = job.last_layout.ranks
    home = by_rank.get(ranks[0])
    if len(ranks) > 1 and any(by_rank.get(rank) is not home for rank in ranks):
        return None
    return home
