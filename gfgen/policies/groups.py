"""What the built-in policies share: fixed groups of ranks, and which one a job lives on."""

from __future__ import annotations

from gfgen.layout import Layout
from gfgen.snapshot import JobView

Group = tuple[int, ...]


def group_layout(ranks: Group) -> Layout:
    """The layout that a group of ranks runs a task under."""
    return Layout(ranks=ranks, ulysses=len(ranks))


def home_group(job: JobView, groups: list[Group]) -> Group | None:
    """The group that a job ran on last; None before its first task.

    Also None when that group is not one of `groups` (any more): one of its ranks died.
    """
    if job.last_layout is None:
        return None
    ranks = job.last_layout.ranks
    return ranks if ranks in groups else None
