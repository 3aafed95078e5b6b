"""What a person wants to know before a night: which policy, done when, what is late, on how many ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gfgen.errors import PolicyError, RunError
from gfgen.policies.catalog import load_policy
from gfgen.runtime.admission import AdmittedJob
from gfgen.runtime.cost import Doubt
from gfgen.runtime.observer import JobOutcome
from gfgen.runtime.profile import Profile
from gfgen.runtime.residency import Residency
from gfgen.runtime.simulation import simulate
from gfgen.runtime.wording import counted

logger = logging.getLogger(__name__)

SAME_END = 1.01
"""Batches whose ends differ by less are equally long: what comes sooner on average decides."""


@dataclass(frozen=True, slots=True)
class Late:
    """A job that is done, and later than it is due."""

    job_id: str
    due_s: float
    """Its deadline, or the end that was asked for where that comes first."""
    ended_s: float

    @property
    def late_s(self) -> float:
        """How late."""
        return self.ended_s - self.due_s


@dataclass(frozen=True, slots=True)
class Failed:
    """A job that is never done: its time-out comes first, say."""

    job_id: str
    ended_s: float
    error: str


@dataclass(frozen=True, slots=True)
class Option:
    """One policy on so many ranks, in seconds since the start."""

    policy: str
    num_ranks: int
    end_s: float
    mean_latency_s: float
    late: tuple[Late, ...]
    """The latest first."""
    failed: tuple[Failed, ...]
    """The first to fail first."""
    ends_s: tuple[float, ...]
    """Of the jobs that are done, in order."""
    num_deadlines: int
    num_deadlines_missed: int
    doubts: Sequence[Doubt] = ()

    @property
    def meets_all(self) -> bool:
        return not self.num_missed

    @property
    def num_missed(self) -> int:
        """Jobs that are late or fail."""
        return len(self.late) + len(self.failed)


@dataclass(frozen=True, slots=True)
class Plan:
    """All that was looked at."""

    started_at: float
    by_s: float | None
    """When everything is to be done, in seconds since the start."""
    num_jobs: int
    by_policy: tuple[Option, ...]
    """Every policy on the ranks that are there, the best first."""
    by_ranks: tuple[Option, ...]
    """The best on each number of ranks, the smallest number first."""
    refused: tuple[str, ...] = ()
    """Policies that cannot run these jobs, with the reason."""
    has_writes: bool = True
    """Whether the writing of files is predicted, too."""

    @property
    def best(self) -> Option:
        return self.by_policy[0]

    @property
    def fewest(self) -> Option | None:
        """The smallest number of ranks on which nothing is late, and nothing fails."""
        return next((option for option in self.by_ranks if option.meets_all), None)

    @property
    def doubts(self) -> Sequence[Doubt]:
        """Predictions behind what is shown that no measurement of the like stands behind."""
        return sorted({doubt for option in (*self.by_policy, *self.by_ranks) for doubt in option.doubts})


def make_plan(
    jobs: Sequence[AdmittedJob],
    *,
    policies: Sequence[str],
    num_ranks: int,
    rank_counts: Sequence[int],
    profile: Profile,
    started_at: float,
    by_s: float | None = None,
    note: Callable[[str], None] = lambda _: None,
    residency: Callable[[int], Residency | None] = lambda _: None,
) -> Plan:
    """Simulate every policy on `num_ranks`, and the best one on each of `rank_counts`.

    A degree that a policy does not take on so many ranks counts as the next one that it does, which the
    log says. Where the best one misses something on another number, the next ones are tried there, until
    one does not.
    `note` is told what is being simulated; `residency` gives, for a number of ranks, who lets models take
    turns in one run.

    Raises: RunError when no policy can run the jobs.
    """
    refused: list[str] = []

    def option(policy: str, count: int) -> Option | None:
        note(f"{policy} on {count}")
        try:
            return _simulated(
                jobs,
                policy=policy,
                num_ranks=count,
                profile=profile,
                started_at=started_at,
                by_s=by_s,
                residency=residency(count),
            )
        except RunError as error:
            refused.append(str(error))
            return None

    called = {policy: _on(policy, num_ranks) for policy in policies}
    for asked, name in called.items():
        if name != load_policy(asked).name:
            logger.warning("policy %s: on %s it is %s", asked, counted(num_ranks, "rank"), name)
    names = dict.fromkeys(called.values())
    here = best_first([found for name in names if (found := option(name, num_ranks))])
    if not here:
        raise RunError(refused[0])
    by_ranks: list[Option] = []
    for count in rank_counts:
        tried = [here[0]] if count == num_ranks else []
        others = dict.fromkeys(_on(each.policy, count) for each in here) if count != num_ranks else ()
        for policy in others:
            tried += [found] if (found := option(policy, count)) else []
            if tried and tried[-1].meets_all:
                break
        by_ranks += best_first(tried)[:1]
    return Plan(
        started_at,
        by_s,
        len(jobs),
        here,
        tuple(by_ranks),
        refused=tuple(dict.fromkeys(refused)),
        has_writes=profile.has_writes,
    )


def best_first(options: Sequence[Option]) -> tuple[Option, ...]:
    """Fewest jobs late or failed first; then the earlier end; of about the same, the lower mean latency."""
    left, ordered = list(options), []
    while left:
        fewest = min(option.num_missed for option in left)
        candidates = [option for option in left if option.num_missed == fewest]
        soonest_s = min(option.end_s for option in candidates)
        as_soon = [option for option in candidates if option.end_s <= SAME_END * soonest_s]
        best = min(as_soon, key=lambda option: option.mean_latency_s)
        ordered.append(best)
        left.remove(best)
    return tuple(ordered)


def _on(policy: str, num_ranks: int) -> str:
    """The policy as it is called on so many ranks: a larger degree is this, or the next that it takes."""
    for most in range(num_ranks, 0, -1):
        text = _with_degree_up_to(most, policy)
        with contextlib.suppress(PolicyError):
            return load_policy(text).name
    return policy


def _with_degree_up_to(most: int, policy: str) -> str:
    return re.sub(r"\bdegree=(\d+)", lambda found: f"degree={min(int(found[1]), most)}", policy)


def _simulated(
    jobs: Sequence[AdmittedJob],
    *,
    policy: str,
    num_ranks: int,
    profile: Profile,
    started_at: float,
    by_s: float | None,
    residency: Residency | None,
) -> Option:
    """A policy that fails, and is replaced in the middle, is no option.

    Raises: RunError when the policy lets jobs wait for ever, or fails.
    """
    run = simulate(
        jobs,
        policy=load_policy(policy),
        num_ranks=num_ranks,
        profile=profile,
        started_at=started_at,
        residency=residency,
    )
    if run.summary.policy_fault is not None:
        raise RunError(f"policy {policy} failed too often: {run.summary.policy_fault}")
    late = [found for outcome in run.outcomes if (found := _late(outcome, by_s))]
    failed = [
        Failed(outcome.info.job_id, outcome.ended_s, outcome.error or "")
        for outcome in run.outcomes
        if outcome.status == "failed"
    ]
    deadlines = run.summary.deadlines
    latency = run.summary.latency
    return Option(
        policy=policy,
        num_ranks=num_ranks,
        end_s=max(outcome.ended_s for outcome in run.outcomes),
        mean_latency_s=latency.mean_s if latency else math.inf,
        late=tuple(sorted(late, key=lambda job: (-job.late_s, job.job_id))),
        failed=tuple(failed),
        ends_s=tuple(sorted(outcome.ended_s for outcome in run.outcomes if outcome.status == "done")),
        num_deadlines=deadlines.num_jobs if deadlines else 0,
        num_deadlines_missed=deadlines.num_jobs - deadlines.num_met if deadlines else 0,
        doubts=run.doubts,
    )


def _late(outcome: JobOutcome, by_s: float | None) -> Late | None:
    due_s = min([due_s for due_s in (outcome.deadline_s, by_s) if due_s is not None], default=math.inf)
    if outcome.status == "failed" or outcome.ended_s <= due_s:
        return None
    return Late(outcome.info.job_id, due_s, outcome.ended_s)
