"""What the built-in policies share: fixed groups of ranks, and which one a job lives on."""

from __future__ import annotations

from gfgen.snapshot import JobView

Group = tuple[int, ...]


def home_group(job: JobView, groups: list[Group]) -> Group | None:
    """The group that a job ran on last; None before its first task.

    Also None when its ranks are not in one of `groups` (any more): one of them died.
    """
    if job.last_layout is None:
        return None
    ranks = job.last_layout.ranks
    return next((group for group in groups if set(ranks) <= set(group)), None)
