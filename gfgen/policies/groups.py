"""What the built-in policies share: fixed groups of ranks, and which one a job lives on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from gfgen.layout import MAX_RANKS
from gfgen.snapshot import JobView

Degree = Annotated[int, range(1, MAX_RANKS + 1)]
"""Option of a policy: how many ranks run a task together. The range is what `--policy` accepts."""
GroupSize = Annotated[int, (1, 2, 4, 8)]
"""The same for policies that halve and double groups."""
DegreeOrAll = Annotated[int, range(MAX_RANKS + 1)]
"""The same, where 0 means all ranks."""

RankGroup = tuple[int, ...]


def groups_by_rank(groups: Iterable[RankGroup]) -> dict[int, RankGroup]:
    """The group that each rank is in; ranks that are in none are missing."""
    return {rank: group for group in groups for rank in group}


def home_group(job: JobView, by_rank: Mapping[int, RankGroup]) -> RankGroup | None:
    """The group that a job ran on last; None before its first task.

    Also None when its ranks are not in one of the groups (any more): one of them died.
    """
    if job.last_layout is None:
        return None
    ranks = job.last_layout.ranks
    home = by_rank.get(ranks[0])
    if len(ranks) > 1 and any(by_rank.get(rank) is not home for rank in ranks):
        return None
    return home
