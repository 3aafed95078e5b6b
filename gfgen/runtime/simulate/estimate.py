"""Estimate the outcomes of jobs under a policy by a coarse rollout, many times faster than a simulation."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gfgen.errors import PolicyError
from gfgen.graph import STEPS
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.job_record import timed_out_after
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import Clock, JobArrived, RankReady
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.choosers import ImmediateChooser
from gfgen.runtime.simulate.rollout import rollout_ends
from gfgen.snapshot import Decision, Policy, Snapshot
from gfgen.system.signals import DECISION_LIMIT_S, DecisionTimeout, within


def everything_open(
    jobs: Sequence[AdmittedJob], *, num_ranks: int, profile: Profile, **start: Any
) -> Snapshot:
    """The snapshot from which estimates start: all jobs are open, also later ones. start: of `RunStart`."""
    state = State(
        jobs,
        RunStart(
            num_ranks=num_ranks,
            num_writers=profile.num_writers(num_ranks),
            lookahead_s=LOOKAHEAD_S,
            **start,
        ),
        clock=Clock(virtual=True),
        costs=CostModel(profile),
    )
    for rank in range(num_ranks):
        state.apply(RankReady(0.0, rank, 1, 0.0))
    for job in jobs:
        state.apply(JobArrived(job.spec.arrival_s, job.job_id))
    return state.snapshot_of_traffic()


def decides_first(policy: NamedPolicy, snapshot: Snapshot) -> NamedPolicy:
    """The policy itself, or its first choice if it chooses between policies."""
    if policy.choose is None:
        return policy
    chooser = ImmediateChooser(policy.choose)
    chooser.consider(snapshot)
    choice = chooser.take()
    with contextlib.suppress(PolicyError):  # the chosen policy may not exist
        return policy if choice is None else load_policy(choice.policy)
    return policy


def seldom_asked(text: str) -> NamedPolicy:
    """The policy that `text` names, asked seldom."""
    named = load_policy(text)
    return replace(named, decide=SeldomAsked(named.decide))


class SeldomAsked:
    """Calls a policy only when jobs arrive or end: it takes most of the time of long simulations."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._num_jobs = self._num_ended = 0
        self._settled_s = 0.0
        self._job_on: dict[int, str] = {}
        """By rank, the job that the policy placed there since `_settled_s`."""

    def __call__(self, snapshot: Snapshot) -> Sequence[Decision]:
        num_jobs = len(snapshot.open) + len(snapshot.busy)
        has_arrived = num_jobs > self._num_jobs
        self._num_ended += max(0, self._num_jobs - num_jobs)
        self._num_jobs = num_jobs
        if has_arrived or self._num_ended > len(snapshot.running):
            self._ask_all(snapshot)
        decisions = self._continued(snapshot) or list(self._policy(snapshot))
        if self._num_ended and sum([each.layout.degree for each in decisions]) < len(snapshot.free_ranks):
            self._ask_all(snapshot)
        if snapshot.now_s > self._settled_s:
            for decision in decisions:
                self._job_on |= dict.fromkeys(decision.layout.ranks, decision.task.job_id)
        return decisions

    def _ask_all(self, snapshot: Snapshot) -> None:
        self._settled_s = max([each.predicted_end_s for each in snapshot.running], default=0.0)
        self._job_on.clear()
        self._num_ended = 0

    def _continued(self, snapshot: Snapshot) -> Sequence[Decision] | None:
        """The next step of the job on each free rank; None if the policy must decide."""
        free, found = set(snapshot.free_ranks), {}
        for rank in free:
            job = snapshot.open.get(self._job_on.get(rank, ""))
            if job is None or job.last_layout is None or not free.issuperset(job.last_layout.ranks):
                return None
            if job.next_task.stage not in STEPS or not job.next_task.step or job.may_approximate:
                return None
            found[job.job_id] = Decision(job.next_task, job.last_layout)
        return list(found.values())


def estimate(
    jobs: Sequence[AdmittedJob],
    snapshot: Snapshot,
    policy: NamedPolicy,
    *,
    ended: Callable[[], None] = lambda: None,
) -> Sequence[JobOutcome] | None:
    """The outcomes of a run from `everything_open`, in a tenth of the time that `simulate` takes, or less.

    Tasks take their median time, moves none. None if the policy fails or leaves jobs waiting.
    Raises: DecisionTimeout if the policy does not return.
    """
    in_time = functools.partial(within, DECISION_LIMIT_S, lambda now: list(policy.decide(now)))
    try:
        ends_s = rollout_ends(snapshot, policy.decide if policy.is_built_in else in_time, ended=ended)
    except (KeyboardInterrupt, DecisionTimeout):
        raise
    except BaseException:  # a policy may be the user's own, and call sys.exit()
        return None
    if len(ends_s) < len(jobs):
        return None
    views = snapshot.open
    outcomes = [_outcome(job, ends_s[job.job_id], views[job.job_id].deadline_s) for job in jobs]
    return sorted(outcomes, key=lambda outcome: outcome.ended_s)


def _outcome(job: AdmittedJob, ended_s: float, deadline_s: float) -> JobOutcome:
    arrival_s, timeout_s = job.spec.arrival_s, job.spec.timeout_s
    due_s = None if deadline_s == math.inf else deadline_s
    done = JobOutcome(job.info, "done", arrival_s, None, ended_s, due_s, busy_s=0.0, layouts=())
    if timeout_s is None or ended_s <= arrival_s + timeout_s:
        return done
    return replace(done, status="failed", ended_s=arrival_s + timeout_s, error=timed_out_after(timeout_s))
