"""Choose the policy that serves the current jobs best, by simulating ahead."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from gfgen.graph import Stage, Task
from gfgen.policies.speed import power_of_two
from gfgen.policies.srtf import srtf
from gfgen.policies.triage import triage
from gfgen.snapshot import Choice, Decision, Outlook, Policy, Snapshot

LATENCY_WEIGHT = 0.03
"""A third more mean latency counts as much as one missed deadline in a hundred."""
MEMORY = 0.7
"""Weight of earlier looks ahead."""
NOTABLE = 3.0
"""Another policy must have this many fewer late jobs than the present one, summed over looks ahead:
changing back and forth costs more than either policy."""
NOTABLE_WAIT = 0.3
"""The same if no job has a deadline: latency alone rarely adds up to NOTABLE. In 186 simulated workloads on
2 to 8 ranks the mean latency fell in 10, by 11% at most, and rose in one, by 0.8%; with 0.15 it rose by up to
18%."""
FIRST_JOBS = 40
"""A first look over this many jobs needs no notable evidence, since a batch is known as a whole. In simulated
batches of 60 and 150 jobs of Qwen-Image on four H200 the makespan is 3% shorter for it."""
THRIFT = 1.04
"""A degree is a candidate if the next larger one takes more than this factor of its work. Two GPUs share the
branches of guidance with a loss of one or two percent, which is within the variation of measurements."""
DEGREES = (2, 1, 4, 8)
"""The first wins a tie: pairs share a step with guidance almost without loss."""


def auto(snapshot: Snapshot) -> list[Decision]:
    """Simulates several policies ahead when jobs arrive or end, and follows the best one.

    For any workload, above all for changing loads and deadlines. It chooses between `triage` with
    different group sizes and `srtf` on all ranks: by deadlines met, then by mean latency. The log and the
    journal record each change.
    """
    return triage(snapshot)


def choose_auto(snapshot: Snapshot, last: Choice | None = None) -> Choice | None:
    """The candidate with the best outlook; None if there is no choice."""
    foresee = snapshot.foresee
    candidates = _candidates(snapshot, None if last is None else last.policy)
    if foresee is None or len(candidates) < 2:
        return None
    outlooks = {name: foresee(policy) for name, policy in candidates.items()}
    losses = _smoothed(_losses(outlooks), last)
    best = min(losses, key=losses.__getitem__)
    present = next(iter(losses))
    if last is not None:
        present = last.policy if last.policy in losses else best
    elif outlooks[best].num_jobs >= FIRST_JOBS:
        present = best
    if losses[best] > losses[present] - (NOTABLE if _has_deadlines(snapshot) else NOTABLE_WAIT):
        best = present
    found = outlooks[best]
    reason = f"{found.num_late} of {found.num_jobs} late, mean latency {found.mean_latency_s:.1f} s ahead"
    return Choice(best, reason, losses)


def _candidates(snapshot: Snapshot, present: str | None) -> dict[str, Policy]:
    """The candidates by name; the first wins a tie.

    Triage with groups of each degree that saves work for some job compared with twice the degree, and with
    all ranks; and the shortest job first on all ranks, with the shortest steps and thus the shortest waits
    for a boundary. The present degree always stays a candidate: a change of a few percent in the costs learnt
    for one degree could otherwise drop it without notable evidence.
    """
    most = power_of_two(min(snapshot.max_degree, len(snapshot.ranks)))
    degrees = [n for n in DEGREES if n < most and (_triage_on(n) == present or _saves_work(snapshot, n))]
    found: dict[str, Policy] = {
        _triage_on(n): functools.partial(triage, degree=n)
        for n in sorted((*degrees, most), key=DEGREES.index)
    }
    if most > 1:
        found[f"srtf,degree={most}"] = functools.partial(srtf, degree=most)
    return found


def _triage_on(degree: int) -> str:
    return f"triage,degree={degree}"


def _has_deadlines(snapshot: Snapshot) -> bool:
    jobs = (*snapshot.open.values(), *snapshot.busy.values(), *snapshot.recent)
    return any(job.deadline_s < math.inf for job in jobs)


def _saves_work(snapshot: Snapshot, degree: int) -> bool:
    """Whether some job takes notably less rank time on `degree` ranks than on twice as many."""
    kinds = set()  # a hundred thousand jobs have a few kinds
    for job in (*snapshot.open.values(), *snapshot.busy.values(), *snapshot.recent):
        kind = (job.model, job.shape)
        if kind in kinds or job.next_task.index >= job.num_tasks - 1:
            continue
        kinds.add(kind)
        if job.step_degree < 2 * degree:
            continue
        step = Task(job.job_id, 2, Stage.DENOISE, 0)
        narrow, wide = (job.step_layout(tuple(range(n))) for n in (degree, 2 * degree))
        costs = snapshot.costs
        if costs.task_s(step, narrow) * THRIFT < 2 * costs.task_s(step, wide):
            return True
    return False


def _losses(outlooks: Mapping[str, Outlook]) -> dict[str, float]:
    """The late jobs of each outlook, plus a small term for mean latency above the best one."""
    quickest_s = min(outlook.mean_latency_s for outlook in outlooks.values())
    return {
        policy: outlook.num_late
        + outlook.num_jobs
        * LATENCY_WEIGHT
        * (outlook.mean_latency_s / quickest_s - 1 if quickest_s > 0 else 0.0)
        for policy, outlook in outlooks.items()
    }


def _smoothed(losses: Mapping[str, float], last: Choice | None) -> dict[str, float]:
    """Add the decayed losses of earlier looks, because one look covers few jobs and varies by chance."""
    if last is None:
        return dict(losses)
    return {policy: loss + MEMORY * last.losses.get(policy, loss) for policy, loss in losses.items()}
