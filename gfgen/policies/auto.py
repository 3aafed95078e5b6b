"""Choose the policy that serves the current jobs best, by simulating ahead."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from gfgen.graph import Stage, Task
from gfgen.policies.allotment import makespan
from gfgen.policies.fcfs import fcfs
from gfgen.policies.speed import power_of_two
from gfgen.policies.srtf import srtf
from gfgen.policies.triage import triage
from gfgen.snapshot import Choice, Decision, JobView, Outlook, Policy, Snapshot

SAME_END = 1.02
"""Files whose ends differ by less are equally long: the mean latency decides."""
LOST = 1.0
"""A file that is too late even for a patient client counts as so many more late ones. With 2 it is worth
more to serve such clients than other jobs lose under lasting overload (benchmarks/results/policies.md)."""
SAME_LATE = 2.0
"""A smaller number of late jobs is none. All candidates see the same jobs, so more is no accident."""
MEMORY = 0.7
"""Weight of earlier looks ahead, in the number of late jobs."""
NUM_SPREADS = 2.0
"""The present policy is left for a gain in time of more than twice the spread of the predictions."""
THRIFT = 1.04
"""A degree wastes ranks if it takes more than this factor of the rank time of one. Two GPUs share the
branches of guidance with a loss of one or two percent, which is within the variation of measurements."""
DEGREES = (2, 1, 4, 8)
"""The first wins a tie: pairs share a step with guidance almost without loss."""


def auto(snapshot: Snapshot) -> list[Decision]:
    """Simulates several policies ahead when jobs arrive or end, and follows the best one.

    For any workload. It compares the number of late jobs, then the end of the last job unless more jobs may
    come, then the mean latency. It chooses between `triage` with different group sizes, `srtf` on all ranks,
    and for files `makespan` and `fcfs`. The log and the journal record each change.
    """
    return triage(snapshot, degree=1)


def choose_auto(snapshot: Snapshot, last: Choice | None = None) -> Choice | None:
    """The candidate with the best outlook; None if there is no choice."""
    present = None if last is None else last.policy
    candidates = _candidates(snapshot)
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


def _candidates(snapshot: Snapshot) -> dict[str, tuple[Policy, bool]]:
    """The candidates by name, and whether they waste ranks; the first wins a tie.

    Triage with groups of each degree, and with deadlines a lenient one on single ranks; the shortest job
    first on all ranks; and without deadlines the orders that end some files sooner. While as many jobs wait
    as there are ranks, a degree that takes more rank time than one rank is a waste; only ranks that share
    cores need this in files and with deadlines.
    """
    jobs = (*snapshot.open.values(), *snapshot.busy.values(), *snapshot.parked.values(), *snapshot.recent)
    most = power_of_two(min(snapshot.max_degree, len(snapshot.ranks)))
    has_deadlines = any(job.deadline_s < math.inf for job in jobs)
    is_full = len(snapshot.open) + len(snapshot.busy) >= 2 * len(snapshot.ranks)
    wasteful: set[int] = set()
    if is_full and (snapshot.shares_cores or (snapshot.expects_more and not has_deadlines)):
        rank_s = _rank_s(snapshot, jobs)
        wasteful = {n for n in DEGREES if rank_s[n] > THRIFT * rank_s[1]}
    found: dict[str, tuple[Policy, bool]] = {
        f"triage,degree={n}": (functools.partial(triage, degree=n), n in wasteful)
        for n in DEGREES
        if n <= most and not (has_deadlines and n == 1 < most)
    }
    if most > 1:
        found[f"srtf,degree={most}"] = functools.partial(srtf, degree=most), most in wasteful
    if has_deadlines:
        found["triage,degree=1,lenient=true"] = functools.partial(triage, degree=1, lenient=True), False
    elif not snapshot.expects_more:
        found |= {"makespan": (makespan, False), "fcfs": (fcfs, False)}
    return found


def _rank_s(snapshot: Snapshot, jobs: Iterable[JobView]) -> Mapping[int, float]:
    """Rank time of all steps that are left, by degree. A hundred thousand jobs have a few kinds."""
    examples: dict[tuple[str, str, Stage], JobView] = {}
    num_left = Counter[tuple[str, str, Stage]]()
    for job in jobs:
        num_steps = max(0, job.num_tasks - 1 - max(2, job.next_task.index))
        num_refined = min(num_steps, job.num_refined)
        for stage, number in ((Stage.DENOISE, num_steps - num_refined), (Stage.REFINE, num_refined)):
            if number:
                examples[job.model, job.shape, stage] = job
                num_left[job.model, job.shape, stage] += number

    def step_s(job: JobView, stage: Stage, degree: int) -> float:
        layout = job.step_layout(tuple(range(min(degree, power_of_two(job.step_degree)))))
        return layout.degree * snapshot.costs.task_s(Task(job.job_id, 2, stage, 0), layout)

    kinds = [(number, examples[kind], kind[2]) for kind, number in num_left.items()]
    return {n: sum(number * step_s(job, stage, n) for number, job, stage in kinds) for n in DEGREES}


def _smoothed(ahead: Mapping[str, Outlook], last: Choice | None) -> dict[str, float]:
    """The late jobs of each outlook, which sees few, plus the decayed ones of earlier looks."""
    before = {} if last is None else last.losses
    return {
        name: lost + MEMORY * before.get(name, lost if before else 0.0)
        for name, each in ahead.items()
        for lost in [each.num_late + LOST * each.num_lost]
    }


def _best(
    snapshot: Snapshot, ahead: Mapping[str, Outlook], late: Mapping[str, float], wasteful: Collection[str]
) -> str:
    """The fewest late jobs; then no waste, the soonest end (unless more jobs come), the least latency."""
    fewest = min(late.values())
    left = [name for name in ahead if late[name] < fewest + SAME_LATE]
    left = [name for name in left if name not in wasteful] or left
    if not snapshot.expects_more:
        soonest_s = min(ahead[name].makespan_s for name in left)
        left = [name for name in left if ahead[name].makespan_s <= SAME_END * soonest_s]
    return min(left, key=lambda name: ahead[name].mean_latency_s)


def _is_clear(snapshot: Snapshot, best: Outlook, present: Outlook, num_fewer: float) -> bool:
    """Whether the best policy is better than the present one by more than predictions may be off."""
    if num_fewer < 0 or num_fewer > SAME_LATE:
        return num_fewer > 0
    factor = 1 + NUM_SPREADS * best.spread
    is_sooner = not snapshot.expects_more and present.makespan_s > factor * SAME_END * best.makespan_s
    return is_sooner or present.mean_latency_s > factor * best.mean_latency_s
