"""What makes a decision illegal by itself, whatever the state of the cluster. Pure."""

from __future__ import annotations

from gfgen.errors import PolicyFault
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.snapshot import Decision


def check_types(decision: object) -> None:
    """Refuse what is no decision at all: a policy may be the user's own, and untyped."""
    if not isinstance(decision, Decision):
        raise PolicyFault(
            f"it decided a value of type {type(decision).__name__}; a Decision(task, layout) is accepted"
        )
    task, layout = decision.task, decision.layout
    if not isinstance(task, Task) or not isinstance(task.job_id, str):
        raise PolicyFault(f"it decided a task of type {type(task).__name__}; the job's next_task is accepted")
    if not isinstance(layout, Layout):
        raise PolicyFault(
            f"job {task.job_id}: it decided a layout of type {type(layout).__name__}; a Layout is accepted"
        )
    numbers = (*layout.ranks, *layout.degrees)
    if not isinstance(layout.ranks, tuple) or set(map(type, numbers)) != {int}:
        raise PolicyFault(
            f"job {task.job_id}: {layout} is made of other things than a tuple of whole numbers"
        )


def check_degrees(job: AdmittedJob, task: Task, layout: Layout) -> None:
    """Refuse degrees that the task cannot use."""
    if task.stage is Stage.DECODE:
        _check_decode(job, task, layout)
        return
    if layout.degree > 1 and task.stage is not Stage.DENOISE:
        raise PolicyFault(f"job {task.job_id}: {task} runs on one rank, not on {layout}")
    if layout.cfg > 1 and not job.uses_cfg:
        raise PolicyFault(f"job {task.job_id} has one guidance branch, {layout} has ranks for two")
    if layout.ulysses > job.max_ulysses_degree:
        raise PolicyFault(
            f"job {task.job_id} has {job.max_ulysses_degree} attention heads, too few for {layout}"
        )
    if layout.sequence_degree > job.max_sequence_degree:
        raise PolicyFault(
            f"job {task.job_id} can be split into {job.max_sequence_degree} parts at most, not {layout}"
        )


def _check_decode(job: AdmittedJob, task: Task, layout: Layout) -> None:
    if layout != Layout.bands(layout.ranks):
        raise PolicyFault(f"job {task.job_id}: ranks share a {task} in bands of rows, not as {layout}")
    if layout.degree > job.max_decode_degree:
        raise PolicyFault(
            f"job {task.job_id}: a {task} has {job.max_decode_degree} bands of rows at most, not {layout}"
        )
