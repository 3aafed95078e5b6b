"""The predicted rest of a job on more or fewer ranks, and with steps given up for its deadline."""

from __future__ import annotations

import math

from gfgen.graph import Stage, Task
from gfgen.layout import MAX_RANKS, Layout
from gfgen.snapshot import JobView, Snapshot

MARGIN = 1.25
"""Leaves a fifth of the time to the deadline, because each wait at a boundary costs part of a step."""
MAX_KEPT = 1000
"""Lost jobs that are remembered, beyond twice the open ones: some have ended."""
_SOME = tuple(range(MAX_RANKS))
"""Predictions depend on degrees alone, so any ranks will do."""


def rest_s(snapshot: Snapshot, job: JobView, degree: int, *, num_given_up: int = 0) -> float:
    """Predicted seconds to the job's end on `degree` ranks, with steps given up as far as it may."""
    if degree == 1 and not num_given_up:
        return job.remaining_s
    layout = job.step_layout(_SOME[:degree])
    if not num_given_up:
        return snapshot.costs.remaining_s(job.next_task, layout)
    return snapshot.costs.remaining_s(job.next_task, layout, num_given_up=num_given_up)


def step_s(snapshot: Snapshot, job: JobView, degree: int) -> float:
    """Predicted seconds of the job's next task, a step, on `degree` ranks."""
    return snapshot.costs.task_s(job.next_task, job.step_layout(_SOME[:degree]))


def worth_preparing(snapshot: Snapshot, job: JobView, degree: int) -> int:
    """`degree`, or fewer ranks if the rest on so many saves less time than their first step costs."""
    is_step = job.next_task.stage is not Stage.DECODE
    if is_step:  # fewer where more do not pay
        degree = power_of_two(job.step_layout(_SOME[:degree]).degree)
    while degree > 1:
        layout = (job.step_layout if is_step else job.decode_layout)(_SOME[:degree])
        price_s = snapshot.costs.first_use_s(job.next_task, layout)
        if not price_s or rest_s(snapshot, job, degree) < rest_s(snapshot, job, degree // 2):
            break
        degree //= 2
    return degree


def widest(snapshot: Snapshot, job: JobView) -> int:
    """The most ranks, a power of two so that groups fit into each other, for a step or the last decode."""
    if job.next_task.stage is Stage.DECODE:
        most = min(snapshot.max_degree, len(snapshot.ranks))
        return power_of_two(job.decode_layout(_SOME[:most]).degree)
    most = power_of_two(min(job.step_degree, snapshot.max_degree, len(snapshot.ranks)))
    return power_of_two(job.step_layout(_SOME[:most]).degree)


class LostJobs:
    """Jobs that would miss their deadline even with all ranks and all steps given up that may be.

    A lost job stays so and is remembered: finding that out again would take policies most of their time.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        key = (LostJobs, len(snapshot.ranks), snapshot.max_degree)
        self.known: dict[str, JobView] = snapshot.kept.setdefault(key, {})
        """Those found so far, by id; a job with another view is to be looked at again."""
        if len(self.known) > MAX_KEPT + 2 * len(snapshot.open):
            self.known.clear()

    def __contains__(self, job: JobView) -> bool:
        snapshot, due_s = self._snapshot, job.due_s
        if self.known.get(job.job_id) is job:
            return True
        if snapshot.now_s + job.remaining_s <= due_s:
            return False
        if snapshot.now_s + (job.remaining_s - job.saving_s) / widest(snapshot, job) <= due_s:
            return False
        self.known[job.job_id] = job
        return True


def chosen_task(snapshot: Snapshot, job: JobView, layout: Layout, *, wait_s: float = 0.0) -> Task:
    """The job's next task on this layout: its step without the transformer, if that can save its deadline.

    It computes the step if it then ends in time, with MARGIN while there are other jobs. Without the margin
    jobs give up steps too late and miss in spite of it (benchmarks/results/policies.md).

    wait_s: how much later the job ends because others go before it.
    """
    task = job.next_task
    if not job.may_approximate or job.due_s == math.inf:
        return task
    costs, left_s = snapshot.costs, job.due_s - snapshot.now_s
    margin = MARGIN if len(snapshot.open) + len(snapshot.busy) > 1 else 1.0
    if margin * costs.remaining_s(task, layout) <= left_s - wait_s:
        return task
    least_s = costs.remaining_s(task, layout, num_given_up=job.num_approximable)
    return task.as_approximate if least_s <= left_s else task


def power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1)
