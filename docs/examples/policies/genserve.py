"""Images before videos that can wait: a video pauses for an image if it is in time nevertheless.

Source: GenServe (arXiv 2604.04335): videos with the most slack pause at a step, the others get as many
ranks as their deadline needs, and idle ranks widen them. The paper's dynamic program was not found in
detail, so jobs are taken one after another; its batches of images are not a matter of policies here.
"""

from gfgen.graph import STEPS
from gfgen.snapshot import Decision, JobView, Snapshot


def policy(snapshot: Snapshot) -> list[Decision]:
    jobs = list(snapshot.open.values())
    images = [job for job in jobs if not _is_video(job)]
    wait_s = max((job.remaining_s for job in images), default=0.0)
    urgent = [job for job in jobs if _is_video(job) and _slack_s(snapshot, job) < wait_s]
    patient = [job for job in jobs if _is_video(job) and job not in urgent]
    lost = [job for job in jobs if _slack_s(snapshot, job) < 0]
    free, decisions = list(snapshot.free_ranks), []
    queue = [
        *sorted((job for job in urgent if job not in lost), key=_by_deadline),
        *sorted((job for job in images if job not in lost), key=_by_deadline),
        *sorted(patient, key=lambda job: (job.precedence, _slack_s(snapshot, job))),
        *sorted(lost, key=lambda job: (job.precedence, job.remaining_s)),
    ]
    queue.sort(key=lambda job: job.precedence)
    for place, job in enumerate(queue):
        if not free:
            break
        own = job.last_layout.ranks if job.last_layout else ()
        degree = 1 if job in lost else _degree_in_time(snapshot, job)
        spare = len(free) - (len(queue) - place - 1)  # ranks that no other job would take
        number = min(max(degree, spare), len(free), job.max_degree, snapshot.max_degree)
        ranks = sorted(free, key=lambda rank: (rank not in own, rank))
        layout = job.layout(ranks[: 1 << (number.bit_length() - 1)])
        decisions.append(Decision(job.next_task, layout))
        free = [rank for rank in free if rank not in layout.ranks]
    return decisions


def _is_video(job: JobView) -> bool:
    return job.shape.partition("+")[0].count("x") > 1


def _by_deadline(job: JobView) -> tuple[int, float, float]:
    return job.precedence, job.due_s, job.arrival_s


def _widest(snapshot: Snapshot, job: JobView) -> int:
    most = min(job.step_degree, snapshot.max_degree, len(snapshot.ranks))
    return 1 << (most.bit_length() - 1)


def _slack_s(snapshot: Snapshot, job: JobView) -> float:
    """How long it may wait, if it then has all ranks that it can use."""
    layout = job.step_layout(range(_widest(snapshot, job)))
    return job.due_s - snapshot.now_s - snapshot.costs.remaining_s(job.next_task, layout)


def _degree_in_time(snapshot: Snapshot, job: JobView) -> int:
    """The fewest ranks that meet its deadline."""
    degree = 1
    while job.next_task.stage in STEPS and degree < _widest(snapshot, job):
        layout = job.step_layout(range(degree))
        if snapshot.now_s + snapshot.costs.remaining_s(job.next_task, layout) <= job.due_s:
            break
        degree *= 2
    return degree
