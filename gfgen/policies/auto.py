"""Choose the policy that serves the current jobs best, by simulating ahead."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping

from gfgen.graph import Stage, Task
from gfgen.policies.edf import edf
from gfgen.policies.fcfs import fcfs
from gfgen.policies.makespan import makespan
from gfgen.policies.speed import power_of_two
from gfgen.policies.srtf import srtf
from gfgen.policies.triage import triage
from gfgen.snapshot import Choice, Decision, JobView, Outlook, Policy, Snapshot

SAME_END = 1.02
"""Files whose ends differ by less are equally long: the mean latency decides."""
SAME_LATE = 0.5
"""A smaller number of late jobs is none: earlier looks add fractions."""
MEMORY = 0.7
"""Weight of earlier looks ahead, in the number of late jobs."""
NUM_SPREADS = 2.0
"""The present policy is left for a gain of more than twice the spread of the predictions."""
THRIFT = 1.04
"""A degree saves rank time if another one takes more than this factor of it. Two GPUs share the branches of
guidance with a loss of one or two percent, which is within the variation of measurements."""
DEGREES = (2, 1, 4, 8)
"""The first wins a tie: pairs share a step with guidance almost without loss."""


def auto(snapshot: Snapshot) -> list[Decision]:
    """Simulates several policies ahead when jobs arrive or end, and follows the best one.

    For any workload. It compares the number of late jobs, then the end of the last job unless more jobs may
    come, then the mean latency. It chooses between `triage` with different group sizes, `srtf` on all ranks,
    `edf`, and for files `makespan` and `fcfs`. The log and the journal record each change.
    """
    return triage(snapshot, degree=1)


def choose_auto(snapshot: Snapshot, last: Choice | None = None) -> Choice | None:
    """The candidate with the best outlook; None if there is no choice."""
    present = None if last is None else last.policy
    candidates = _candidates(snapshot, present)
    if snapshot.foresee is None or len(candidates) < 2:
        return None
    ahead = {name: snapshot.foresee(policy) for name, (policy, _) in candidates.items()}
    late = _smoothed(ahead, last)
    wasteful = {name for name, (_, is_wasteful) in candidates.items() if is_wasteful}
    best = _best(snapshot, ahead, late, wasteful)
    if present in ahead and not (
        (present in wasteful and best not in wasteful and late[best] <= late[present])
        or _is_clear(snapshot, ahead[best], ahead[present], late[present] - late[best])
    ):
        best = present
    found = ahead[best]
    reason = f"{found.num_late} of {found.num_jobs} late, mean latency {found.mean_latency_s:.1f} s ahead"
    return Choice(best, reason, late)


def _candidates(snapshot: Snapshot, present: str | None) -> dict[str, tuple[Policy, bool]]:
    """The candidates by name, and whether they waste ranks; the first wins a tie.

    Triage with groups of each degree that saves work for some job compared with twice the degree, and with
    all ranks; the shortest job first on all ranks, with the shortest steps and thus the shortest waits for a
    boundary; `edf` with deadlines; and without, the orders that end some files sooner: they look at no
    deadline, so any error of a prediction would make jobs late. The present degree always stays a candidate:
    a change of a few percent in the costs learnt for one degree could otherwise drop it without evidence.
    While as many jobs wait as there are ranks, a degree that takes more rank time than one rank is a waste;
    with deadlines only on ranks that share cores, whose gain by sharing is in doubt.
    """
    kinds, most = _kinds(snapshot), power_of_two(min(snapshot.max_degree, len(snapshot.ranks)))
    has_deadlines = any(job.deadline_s < math.inf for job in _jobs(snapshot))
    is_full = len(snapshot.open) + len(snapshot.busy) >= 2 * len(snapshot.ranks)
    is_to_save = is_full and (snapshot.shares_cores or not has_deadlines)

    def is_wasteful(degree: int) -> bool:
        return is_to_save and _rank_s(snapshot, kinds, degree) > THRIFT * _rank_s(snapshot, kinds, 1)

    found: dict[str, tuple[Policy, bool]] = {}
    for n in (n for n in DEGREES if n <= most):
        name = f"triage,degree={n}"
        if n == most or name == present or _saves_work(snapshot, kinds, n):
            found[name] = functools.partial(triage, degree=n), is_wasteful(n)
    if most > 1:
        found[f"srtf,degree={most}"] = functools.partial(srtf, degree=most), is_wasteful(most)
    if has_deadlines:
        found["edf"] = edf, False
    elif not snapshot.expects_more:
        found |= {"makespan": (makespan, False), "fcfs": (fcfs, False)}
    return found


_Kinds = Mapping[tuple[str, str], tuple[JobView, int]]
"""An example of each model and shape, and the steps left of all such jobs."""


def _jobs(snapshot: Snapshot) -> Iterable[JobView]:
    return itertools.chain(snapshot.open.values(), snapshot.busy.values(), snapshot.recent)


def _kinds(snapshot: Snapshot) -> _Kinds:
    """A hundred thousand jobs have a few kinds."""
    found: dict[tuple[str, str], tuple[JobView, int]] = {}
    for job in _jobs(snapshot):
        if (num_left := job.num_tasks - 1 - max(2, job.next_task.index)) > 0:
            kind = job.model, job.shape
            example, number = found.get(kind, (job, 0))
            found[kind] = example, number + num_left
    return found


def _rank_s(snapshot: Snapshot, kinds: _Kinds, degree: int) -> float:
    """Rank time of all steps that are left, on `degree` ranks each."""
    return sum(number * _step_rank_s(snapshot, job, degree) for job, number in kinds.values())


def _saves_work(snapshot: Snapshot, kinds: _Kinds, degree: int) -> bool:
    """Whether some job takes notably less rank time on `degree` ranks than on twice as many."""
    return any(
        _step_rank_s(snapshot, job, degree) * THRIFT < _step_rank_s(snapshot, job, 2 * degree)
        for job, _ in kinds.values()
        if job.step_degree >= 2 * degree
    )


def _step_rank_s(snapshot: Snapshot, job: JobView, degree: int) -> float:
    layout = job.step_layout(tuple(range(min(degree, power_of_two(job.step_degree)))))
    return layout.degree * snapshot.costs.task_s(Task(job.job_id, 2, Stage.DENOISE, 0), layout)


def _smoothed(ahead: Mapping[str, Outlook], last: Choice | None) -> dict[str, float]:
    """The late jobs of each outlook, plus the decayed ones of earlier looks.

    One look covers few jobs and varies by chance.
    """
    before = {} if last is None else last.losses
    return {
        name: each.num_late + MEMORY * before.get(name, each.num_late if before else 0.0)
        for name, each in ahead.items()
    }


def _best(
    snapshot: Snapshot, ahead: Mapping[str, Outlook], late: Mapping[str, float], wasteful: Collection[str]
) -> str:
    """The fewest late jobs; then no waste; then, unless more jobs may come, the soonest end; then the least
    mean latency."""
    fewest = min(late.values())
    left = [name for name in ahead if late[name] < fewest + SAME_LATE]
    left = [name for name in left if name not in wasteful] or left
    if not snapshot.expects_more:
        soonest_s = min(ahead[name].makespan_s for name in left)
        left = [name for name in left if ahead[name].makespan_s <= SAME_END * soonest_s]
    return min(left, key=lambda name: ahead[name].mean_latency_s)


def _is_clear(snapshot: Snapshot, best: Outlook, present: Outlook, num_fewer: float) -> bool:
    """Whether the best policy is better than the present one by more than predictions may be off."""
    if num_fewer > NUM_SPREADS * max(best.late_spread, present.late_spread, SAME_LATE):
        return True
    factor = 1 + NUM_SPREADS * best.spread
    if num_fewer < 0:
        return False
    is_sooner = not snapshot.expects_more and present.makespan_s > factor * SAME_END * best.makespan_s
    return is_sooner or present.mean_latency_s > factor * best.mean_latency_s
