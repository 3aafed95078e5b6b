"""What makes a decision illegal."""

from __future__ import annotations

from gfgen.errors import PolicyFault
from gfgen.graph import STEPS, Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.control.job_record import JobRecord
from gfgen.runtime.control.jobs import Jobs
from gfgen.runtime.control.ranks import Ranks, share_island
from gfgen.runtime.control.residency import ModelTurns
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.snapshot import Decision


def check_types(decision: object) -> None:
    """Refuse a value that is not a decision: a policy may be the user's own, and untyped."""
    if not isinstance(decision, Decision):
        raise _wrong_type("value", decision, "a Decision(task, layout)")
    task, layout = decision.task, decision.layout
    if not isinstance(task, Task) or not isinstance(task.job_id, str):
        raise _wrong_type("task", task, "the job's next_task")
    if not isinstance(layout, Layout):
        raise _wrong_type("layout", layout, "a Layout", job=f"job {task.job_id}: ")
    numbers = (*layout.ranks, *layout.degrees)
    if not isinstance(layout.ranks, tuple) or set(map(type, numbers)) != {int}:
        raise PolicyFault(
            f"job {task.job_id}: {layout} is made of other things than a tuple of whole numbers"
        )


def _wrong_type(what: str, value: object, accepted: str, *, job: str = "") -> PolicyFault:
    return PolicyFault(f"{job}it decided a {what} of type {type(value).__name__}; {accepted} is accepted")


def legal_job(
    decision: Decision, *, jobs: Jobs, ranks: Ranks, models: ModelTurns, now_s: float, max_degree: int
) -> JobRecord:
    """The job of a decision, which is judged at the moment of this turn's snapshot.

    Raises: PolicyFault for a task that its job cannot run now, and for ranks that cannot take it.
    """
    check_types(decision)
    task, layout = decision.task, decision.layout
    record = jobs.records.get(task.job_id)
    if record is None or not record.arrived or record.trouble.doom:
        raise PolicyFault(f"there is no open job {task.job_id}")
    if models.is_limited and record.model not in models.resident:
        raise PolicyFault(f"job {task.job_id}: ranks do not hold {record.model} now")
    own = record.next_task if record.progress.next_index < record.num_tasks else None
    if own is None or (task != own and not _is_reused(task, own, record)):
        raise PolicyFault(f"job {task.job_id}: {task} (number {task.index}) is not its next task")
    flights = record.flights
    if flights and not (len(flights) == 1 and flights[0].is_ending(now_s)):
        raise PolicyFault(f"job {task.job_id}: {task} is not open, its input does not exist yet")
    if len(layout.ranks) > max_degree:
        raise PolicyFault(f"job {task.job_id}: {layout} has more than {max_degree} ranks")
    if len(layout.ranks) > 1:
        check_degrees(record.job, task, layout)
    if not share_island(layout.ranks, ranks.islands):
        raise PolicyFault(f"job {task.job_id}: the ranks of {layout} do not reach each other")
    for rank in layout.ranks:
        if not ranks.records[rank].can_take(now_s):
            raise PolicyFault(f"job {task.job_id}: rank {rank} is not free")
    return record


def _is_reused(task: Task, own: Task, record: JobRecord) -> bool:
    """Whether a task is the job's own next one without its transformer, and that is allowed."""
    return record.job.trajectory.may_reuse(own.index) and task == own.as_reused


def check_degrees(job: AdmittedJob, task: Task, layout: Layout) -> None:
    """Refuse degrees that the task cannot use."""
    if task.stage is Stage.DECODE:
        _check_decode(job, task, layout)
        return
    if layout.degree > 1 and task.stage not in STEPS:
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
