"""Give up steps of jobs that allow it (`"reuse": "if-late"`), only for a deadline and as few as needed."""

from __future__ import annotations

import math

from gfgen.graph import Task
from gfgen.layout import Layout
from gfgen.policies.speed import MARGIN
from gfgen.snapshot import JobView, Snapshot


def chosen_task(snapshot: Snapshot, job: JobView, layout: Layout, *, wait_s: float = 0.0) -> Task:
    """The job's next task on this layout: its step without the transformer, if that can save its deadline.

    It computes the step if it then ends in time, with MARGIN while there are other jobs. Without the margin
    jobs give up steps too late and miss in spite of it (benchmarks/results/2026-11-25-if-late.md).

    wait_s: how much later the job ends because others go before it.
    """
    task = job.next_task
    if not job.may_reuse or job.due_s == math.inf:
        return task
    costs, left_s = snapshot.costs, job.due_s - snapshot.now_s
    margin = MARGIN if len(snapshot.open) + len(snapshot.busy) > 1 else 1.0
    if margin * costs.remaining_s(task, layout) <= left_s - wait_s:
        return task
    least_s = costs.remaining_s(task, layout, num_given_up=job.num_reusable)
    return task.as_reused if least_s <= left_s else task
