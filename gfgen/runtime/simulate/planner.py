"""Plans: the best policy, when everything is done, what is late, and how many ranks are enough."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import ClassVar

from gfgen.errors import PolicyError, RunError
from gfgen.policies.auto import SAME_END
from gfgen.policies.catalog import load_policy
from gfgen.policies.speed import rest_s, widest
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.predict.cost import UncertainEstimate
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.estimate import decides_first, estimate, everything_open, seldom_asked
from gfgen.runtime.simulate.simulation import OutcomeRecorder, Simulated, simulate
from gfgen.snapshot import Policy, Snapshot
from gfgen.system.signals import DecisionTimeout
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

FULL_TASKS = 20_000
"""With more tasks than this in all simulations together (about 3 s) the alternatives are estimated."""
ESTIMATE_SHARE = 0.15
"""Of a full simulation's time, which an estimate takes: for the progress bar."""


@dataclass(frozen=True, slots=True)
class LateJob:
    job_id: str
    due_s: float
    """Its deadline, or `PlanWindow.by_s` if that comes first."""
    ended_s: float

    @property
    def late_s(self) -> float:
        return self.ended_s - self.due_s


@dataclass(frozen=True, slots=True)
class PlanOption:
    """One policy on one number of ranks. Times are seconds since the start."""

    policy: str
    num_ranks: int
    end_s: float
    mean_latency_s: float
    late: tuple[LateJob, ...]
    """The latest first."""
    failed: tuple[JobOutcome, ...]
    """In the order in which they fail."""
    ends_s: tuple[float, ...]
    num_deadlines: int
    num_deadlines_missed: int
    doubts: Collection[UncertainEstimate] = ()
    is_estimated: bool = False
    """By a coarse rollout; otherwise every task was simulated."""

    @property
    def meets_all(self) -> bool:
        return not self.num_missed

    @property
    def num_missed(self) -> int:
        """Jobs that are late or fail."""
        return len(self.late) + len(self.failed)


@dataclass(frozen=True, slots=True)
class PlanWindow:
    """When the run starts, in Unix time, and when everything must be done, in seconds since the start."""

    started_at: float
    by_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    window: PlanWindow
    num_jobs: int
    by_policy: tuple[PlanOption, ...]
    """Every policy on the given ranks, the best first."""
    by_ranks: tuple[PlanOption, ...]
    refused: tuple[str, ...] = ()
    """Policies that cannot run these jobs, with reasons."""
    has_writes: bool = True
    """Whether the times include writing files."""
    machine: str = ""
    ranks_per_node: int | None = None

    @property
    def unit(self) -> str:
        """What the plan has a number of."""
        return "rank" if self.ranks_per_node is None else "node"

    def number(self, num_ranks: int) -> int:
        return num_ranks // (self.ranks_per_node or 1)

    def counted(self, num_ranks: int) -> str:
        """'4 ranks', or '2 nodes'."""
        return counted(self.number(num_ranks), self.unit)

    @property
    def best(self) -> PlanOption:
        return self.by_policy[0]

    @property
    def fewest(self) -> PlanOption | None:
        """The smallest number of ranks on which no job is late or fails."""
        return next((option for option in self.by_ranks if option.meets_all), None)

    @property
    def doubts(self) -> Collection[UncertainEstimate]:
        """Times in this plan that were extrapolated or guessed."""
        return {doubt for option in (*self.by_policy, *self.by_ranks) for doubt in option.doubts}


PlanProgress = Callable[[str, float], None]
"""Called with what is being evaluated, and the share of all work done since the last call."""


def best_first(options: Sequence[PlanOption]) -> tuple[PlanOption, ...]:
    """By late and failed jobs, then by end; among about equal ends by mean latency, if simulated."""

    def latency_s(option: PlanOption) -> float:
        return option.mean_latency_s * (1.0 if option.is_estimated else 1 / SAME_END)

    left, ordered = list(options), []
    while left:
        fewest = min(option.num_missed for option in left)
        candidates = [option for option in left if option.num_missed == fewest]
        soonest_s = min(option.end_s for option in candidates)
        as_soon = [option for option in candidates if option.end_s <= SAME_END * soonest_s]
        best = min(as_soon, key=latency_s)
        ordered.append(best)
        left.remove(best)
    return tuple(ordered)


def _on(policy: str, num_ranks: int) -> str:
    """The policy's name on this many ranks, its degree lowered to one that it accepts."""
    plain = policy.partition(",")[0]
    for most in range(num_ranks, 0, -1):
        text = _with_degree_up_to(most, policy)
        with contextlib.suppress(PolicyError):
            decide = load_policy(text).decide
            is_plain = num_ranks == 1 and _as_called(decide) == _as_called(load_policy(plain).decide)
            return plain if is_plain else text
    return policy


def _with_degree_up_to(most: int, policy: str) -> str:
    return re.sub(r"\bdegree=(\d+)", lambda found: f"degree={min(int(found[1]), most)}", policy)


@dataclass(kw_only=True)
class Planner(ABC):
    """Simulates, or with many jobs estimates, the same jobs under policies on numbers of ranks or nodes."""

    unit: ClassVar[str] = "rank"
    jobs: Sequence[AdmittedJob]
    profile: Profile
    window: PlanWindow
    progress: PlanProgress = lambda what, share: None
    is_coarse: bool = False
    """Whether it estimates."""
    refused: list[str] = field(default_factory=list)
    _total: float = 1.0

    @abstractmethod
    def in_full(self, policy: str, number: int) -> PlanOption:
        """The option with every task simulated. Raises: RunError if the policy cannot run the jobs."""

    @abstractmethod
    def estimated(self, policy: str, number: int) -> PlanOption | None:
        """The estimated option; None if only a simulation can tell. Raises: RunError, DecisionTimeout."""

    def expect(self, num_looks: int, *, may_estimate: bool = True) -> None:
        num_tasks = sum(job.trajectory.num_tasks for job in self.jobs)
        self.is_coarse = may_estimate and num_looks > 1 and num_looks * num_tasks > FULL_TASKS
        self._total = 1 + num_looks * ESTIMATE_SHARE if self.is_coarse else num_looks

    def best_on(self, policies: Iterable[str], number: int) -> tuple[PlanOption, ...]:
        """The options, the best first. Raises: RunError when no policy can run the jobs."""
        here = best_first(list(self._options(policies, number)))
        while here and here[0].is_estimated:
            here = best_first([*self._options([here[0].policy], number, in_full=True), *here[1:]])
        if not here:
            raise RunError(self.refused[0])
        return here

    def first_enough(
        self, policies: Iterable[str], number: int, *, is_searched: bool = True
    ) -> PlanOption | None:
        """The first option that misses nothing, or the best one; only the first if it is not searched."""
        tried: list[PlanOption] = []
        for option in self._options(policies, number):
            tried.append(option)
            if option.meets_all or not is_searched:
                break
        return best_first(tried)[0] if tried else None

    def made(
        self, here: tuple[PlanOption, ...], others: Iterable[PlanOption], ranks_per_node: int | None = None
    ) -> Plan:
        return Plan(
            self.window,
            len(self.jobs),
            here,
            tuple(others),
            refused=tuple(dict.fromkeys(self.refused)),
            has_writes=self.profile.has_writes,
            ranks_per_node=ranks_per_node,
        )

    def note(self, policy: str, number: int, *, share: float = 1.0) -> Callable[[], None]:
        """A function that reports one more ended job as progress. share: of a full simulation."""
        what = f"{policy} on {counted(number, self.unit)}"
        return functools.partial(self.progress, what, share / self._total / len(self.jobs))

    def _options(
        self, policies: Iterable[str], number: int, *, in_full: bool = False
    ) -> Iterator[PlanOption]:
        for policy in policies:
            try:
                found = None if in_full or not self.is_coarse else self.estimated(policy, number)
                yield found or self.in_full(policy, number)
            except DecisionTimeout as error:
                self.refused.append(f"policy {policy}: {error}")
            except RunError as error:
                self.refused.append(str(error))


@dataclass(kw_only=True)
class RankPlanner(Planner):
    """On numbers of ranks."""

    residency: Callable[[int], Residency | None] = lambda _: None
    """What lets models take turns on a number of ranks; then nothing is estimated."""
    reads_s: Mapping[str, float] = field(default_factory=dict)
    """As in `RunStart`; with any, nothing is estimated, since estimates share no steps."""
    _snapshots: dict[int, Snapshot] = field(default_factory=dict)
    _estimates: dict[object, Sequence[JobOutcome] | None] = field(default_factory=dict)

    def plan(self, policies: Sequence[str], *, num_ranks: int, rank_counts: Sequence[int]) -> Plan:
        """Every policy on `num_ranks`, and the best one on each of `rank_counts`.

        Degrees are lowered to those that a policy accepts, which the log says. On other numbers the next best
        policies are tried until one misses nothing; where all do, smaller numbers are not searched.
        Raises: RunError when no policy can run the jobs.
        """
        called = {policy: _on(policy, num_ranks) for policy in policies}
        for asked, name in called.items():
            if name != asked:
                logger.warning("policy %s: on %s it is %s", asked, counted(num_ranks, "rank"), name)
        names, others = dict.fromkeys(called.values()), {*rank_counts} - {num_ranks}
        may_estimate = not self.reads_s and self.residency(num_ranks) is None
        self.expect(len(names) + len(others), may_estimate=may_estimate)
        here = self.best_on(names, num_ranks)
        found: dict[int, PlanOption | None] = {num_ranks: here[0]} if num_ranks in rank_counts else {}
        is_hopeful = here[0].meets_all
        for count in sorted(others, reverse=True):
            is_searched = (is_hopeful or count > num_ranks) and self.may_fit(count)
            there = dict.fromkeys(_on(each.policy, count) for each in here)
            best = found[count] = self.first_enough(there, count, is_searched=is_searched)
            if count < num_ranks:
                is_hopeful = is_hopeful and best is not None and best.meets_all
        return self.made(here, [best for _, best in sorted(found.items()) if best is not None])

    def in_full(self, policy: str, number: int) -> PlanOption:
        load = seldom_asked if self.is_coarse else load_policy
        run = simulate(
            self.jobs,
            policy=load(policy),
            load=load,
            num_ranks=number,
            profile=self.profile,
            started_at=self.window.started_at,
            residency=self.residency(number),
            reads_s=self.reads_s,
            observers=[OutcomeRecorder(self.note(policy, number))],
        )
        return option_of_run(run, policy, self.window.by_s)

    def estimated(self, policy: str, number: int) -> PlanOption | None:
        snapshot = self._snapshot(number)
        first = decides_first(load_policy(policy), snapshot)
        key = (number, *_as_called(first.decide))
        if key not in self._estimates:
            note = self.note(policy, number, share=ESTIMATE_SHARE)
            self._estimates[key] = estimate(self.jobs, snapshot, first, ended=note)
        if (outcomes := self._estimates[key]) is None:
            return None
        return option_of(outcomes, policy, number, self.window.by_s, is_estimated=True)

    def may_fit(self, num_ranks: int) -> bool:
        """Whether the ranks have the time for the work that is due by each deadline."""
        snapshot, by_s, work_s = self._snapshot(num_ranks), self.window.by_s, 0.0
        for job in sorted(snapshot.open.values(), key=lambda job: job.deadline_s):
            degrees = [n for n in (1, 2, 4, 8) if n <= widest(snapshot, job)]
            work_s += min(n * rest_s(snapshot, job, n, num_given_up=job.num_approximable) for n in degrees)
            if work_s > num_ranks * min(job.deadline_s, math.inf if by_s is None else by_s):
                return False
        return True

    def _snapshot(self, num_ranks: int) -> Snapshot:
        if num_ranks not in self._snapshots:
            self._snapshots[num_ranks] = everything_open(
                self.jobs,
                num_ranks=num_ranks,
                profile=self.profile,
                started_at=self.window.started_at,
                reads_s=self.reads_s,
            )
        return self._snapshots[num_ranks]


def _as_called(policy: Policy) -> tuple[object, ...]:
    """The function and all its options: equal for `triage` and `triage,degree=2`."""
    parameters = inspect.signature(policy).parameters.values()
    return getattr(policy, "func", policy), *[(each.name, each.default) for each in parameters]


def option_of_run(run: Simulated, policy: str, by_s: float | None) -> PlanOption:
    """Raises: RunError if the policy failed."""
    if run.summary.policy_fault is not None:
        raise RunError(f"policy {policy} failed: {run.summary.policy_fault}")
    return option_of(run.outcomes, policy, run.num_ranks, by_s, doubts=run.doubts)


def option_of(
    outcomes: Sequence[JobOutcome],
    policy: str,
    num_ranks: int,
    by_s: float | None,
    *,
    doubts: Collection[UncertainEstimate] = (),
    is_estimated: bool = False,
) -> PlanOption:
    done = [outcome for outcome in outcomes if outcome.status == "done"]
    late = [found for outcome in outcomes if (found := _late(outcome, by_s))]
    met = [outcome.met_deadline for outcome in outcomes if outcome.met_deadline is not None]
    return PlanOption(
        policy=policy,
        num_ranks=num_ranks,
        end_s=max(outcome.ended_s for outcome in outcomes),
        mean_latency_s=fmean(each.ended_s - each.arrival_s for each in done) if done else math.inf,
        late=tuple(sorted(late, key=lambda job: (-job.late_s, job.job_id))),
        failed=tuple(outcome for outcome in outcomes if outcome.status == "failed"),
        ends_s=tuple(sorted(outcome.ended_s for outcome in done)),
        num_deadlines=len(met),
        num_deadlines_missed=met.count(False),
        doubts=doubts,
        is_estimated=is_estimated,
    )


def _late(outcome: JobOutcome, by_s: float | None) -> LateJob | None:
    due_s = min([due_s for due_s in (outcome.deadline_s, by_s) if due_s is not None], default=math.inf)
    if outcome.status == "failed" or outcome.ended_s <= due_s:
        return None
    return LateJob(outcome.info.job_id, due_s, outcome.ended_s)
