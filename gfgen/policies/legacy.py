"""Fixed pipelines, the baseline of every comparison."""

from __future__ import annotations

from gfgen.policies.fcfs import fcfs
from gfgen.policies.groups import DegreeOrAll
from gfgen.snapshot import Decision, Snapshot


def legacy(snapshot: Snapshot, *, degree: DegreeOrAll = 0) -> list[Decision]:
    """One job at a time on all ranks, first come first served, the same ranks for every stage.

    The baseline of comparisons: a pipeline with a fixed process group. With `degree=1` each rank is a
    replica of its own, with `degree=2` each pair of ranks, and so on. 0 means all ranks.
    """
    return fcfs(snapshot, degree=degree or len(snapshot.ranks))
