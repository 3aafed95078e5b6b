"""What the built-in policies share: fixed groups of ranks, and which one a job lives on."""

from __future__ import annotations

from typing import Annotated

from gfgen.layout import MAX_RANKS
from gfgen.snapshot import JobView

Degree = Annotated[int, range(1, MAX_RANKS + 1)]
"""Option of a policy: how many ranks run a task together. The range is what `--policy` accepts."""
DegreeOrAll = Annotated[int, range(MAX_RANKS + 1)]
"""The same, where 0 means all ranks."""

Group = tuple[int, ...]


def home_group(job: JobView, groups: list[Group]) -> Group | None:
    """The group that a job ran on last; None before its first task.

    Also None when its ranks are not in one of `groups` (any more): one of them died.
    """
    if job.last_layout is None:
        return None
    ranks = job.last_layout.ranks
    return next((group for group in groups if set(ranks) <= set(group)), None)
