"""How long the rest of a job would take on more or fewer ranks."""

from __future__ import annotations

from gfgen.graph import Stage
from gfgen.layout import MAX_RANKS
from gfgen.snapshot import JobView, Snapshot

_SOME = tuple(range(MAX_RANKS))
"""Any ranks: predictions depend on degrees alone."""


def rest_s(snapshot: Snapshot, job: JobView, degree: int) -> float:
    """Predicted seconds from the job's next task to its end, with its steps on `degree` ranks."""
    if degree == 1:
        return job.remaining_s
    return snapshot.costs.remaining_s(job.next_task, job.step_layout(_SOME[:degree]))


def step_s(snapshot: Snapshot, job: JobView, degree: int) -> float:
    """Predicted seconds of the job's next task, a step, on `degree` ranks."""
    return snapshot.costs.task_s(job.next_task, job.step_layout(_SOME[:degree]))


def widest(snapshot: Snapshot, job: JobView) -> int:
    """The most ranks that a step of the job, or its decode if none is left, can have here, as a power of two.

    Halves of a power of two are equal again, so that groups of these sizes fit into each other.
    """
    most = min(snapshot.max_degree, len(snapshot.ranks))
    if job.next_task.stage is Stage.DECODE:
        return power_of_two(job.decode_layout(_SOME[:most]).degree)
    return power_of_two(min(job.step_degree, most))


def is_past_rescue(snapshot: Snapshot, job: JobView) -> bool:
    """Even with every rank to itself, and no loss by sharing, it could not meet its deadline.

    A quick look, which errs on the side of hope: no cost is asked for.
    """
    if snapshot.now_s + job.remaining_s <= job.deadline_s:
        return False
    return snapshot.now_s + job.remaining_s / widest(snapshot, job) > job.deadline_s


def power_of_two(number: int) -> int:
    """The largest power of two that is not above a number of at least 1."""
    return 1 << (number.bit_length() - 1)
