"""The policy in charge: asking it, judging what it decides, counting its faults, and replacing it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from gfgen.errors import PolicyError, PolicyFault, in_one_line
from gfgen.graph import STEPS, Stage, Task
from gfgen.layout import Layout
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.policies.fair_share import shared, with_held_patches
from gfgen.runtime.control.job_record import JobRecord
from gfgen.runtime.control.jobs import Jobs
from gfgen.runtime.control.ranks import Ranks, share_island
from gfgen.runtime.control.residency import ModelTurns
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import Clock, PolicyChanged
from gfgen.snapshot import Choice, Decision, Policy, Snapshot
from gfgen.system.signals import DECISION_LIMIT_S, within
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

MAX_POLICY_FAULTS = 3  # after this many calls in which the policy was at fault the run goes on under FALLBACK
FALLBACK = "fcfs"
CHANGES_PER_CHOICE = 24
"""A policy is chosen again after this many arrivals and ends of jobs, or an eighth of the jobs left; at the
start of a run sooner, when each changes the picture. More often gained nothing in the study of policies."""


class Chooser(Protocol):
    """Thinks about which policy is to decide, in its own time."""

    def consider(self, snapshot: Snapshot) -> None:
        """Begin to think about this, unless it is still busy."""

    def take(self) -> Choice | None:
        """What it has chosen since the last call; returns at once."""


class Decider:
    """Asks the policy. `fcfs` replaces a policy that fails too often, and a chooser may replace any."""

    def __init__(
        self,
        policy: NamedPolicy,
        *,
        clock: Clock,
        chooser: Chooser | None,
        load: Callable[[str], NamedPolicy] = load_policy,
    ) -> None:
        self.policy = policy
        self._load = load
        self.given_up: str | None = None  # why FALLBACK has replaced the policy, if it has
        self.num_faults = 0
        self._clock = clock
        self.chooser = self._usual_chooser = chooser  # None after FALLBACK, until another is asked for
        self._num_changes = 0
        self._next_choice = 1

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """The policy's decisions; those of `fcfs` for this once when it raises."""
        try:
            if not self.policy.is_built_in:
                return _ask(partial(within, DECISION_LIMIT_S, self._decided), snapshot)
            return with_held_patches(snapshot, _ask(self.policy.decide, snapshot))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a policy may be the user's own, and call sys.exit()
            logger.debug("policy %s raised", self.policy.name, exc_info=True)
            self.blame(error)
            return _ask(load_policy(FALLBACK).decide, snapshot)

    def _decided(self, snapshot: Snapshot) -> list[Decision]:
        # Each rank takes one task, so one more than ranks is a fault; a generator may be endless.
        decided = list(itertools.islice(self.policy.decide(snapshot), len(snapshot.ranks) + 1))
        for each in decided:
            check_types(each)
        return decided

    def blame(self, error: BaseException) -> None:
        """Count a fault; after too many `fcfs` takes over. Raises: PolicyFault when it is that one's."""
        self.num_faults += 1
        reason = " ".join(str(error).split()) if isinstance(error, PolicyFault) else in_one_line(error)
        logger.warning("policy %s: %s", self.policy.name, reason)
        if self.num_faults < MAX_POLICY_FAULTS:
            return
        times = counted(self.num_faults, "time")
        if self.policy.name == FALLBACK:
            raise PolicyFault(f"policy {FALLBACK} failed {times}: {reason}")
        logger.error("policy %s failed %s; going on with %s", self.policy.name, times, FALLBACK)
        self.policy, self.chooser = load_policy(FALLBACK), None
        self.num_faults, self.given_up = 0, reason
        self._clock.at(PolicyChanged(self._clock.now_s, self.policy.name, reason))

    def follow(self, event: PolicyChanged) -> None:
        if event.policy != self.policy.name:
            self.policy, self.chooser = self._load(event.policy), self._usual_chooser
            logger.debug("from now on %s decides: %s", event.policy, event.reason)

    def note_change(self) -> None:
        self._num_changes += 1

    def can_follow(self, choice: Choice) -> bool:
        """Whether this is another policy than the present one, and exists."""
        if choice.policy == self.policy.name:
            return False
        try:
            load_policy(choice.policy)
        except PolicyError as error:
            logger.warning("choosing a policy failed: %s", error)
            return False
        return True

    def is_choice_due(self, num_jobs: int) -> bool:
        """Whether enough jobs have come or gone since this was true last; `num_jobs` are left."""
        if self._num_changes < self._next_choice:
            return False
        self._next_choice = self._num_changes + min(self._num_changes, max(CHANGES_PER_CHOICE, num_jobs // 8))
        return True


def _ask(policy: Policy, snapshot: Snapshot) -> list[Decision]:
    return list(shared(policy, snapshot) if len(snapshot.served_s) > 1 else policy(snapshot))


def check_types(decision: object) -> None:
    """Refuse a value that is not a decision: a policy may be the user's own, and untyped."""
    if not isinstance(decision, Decision):
        kind = type(decision).__name__
        raise PolicyFault(f"it decided a value of type {kind}; a Decision(task, layout) is accepted")
    task, layout = decision.task, decision.layout
    if not isinstance(task, Task) or not isinstance(task.job_id, str) or not isinstance(layout, Layout):
        kinds = f"{type(task).__name__}, {type(layout).__name__}"
        raise PolicyFault(f"it decided a Decision({kinds}); the job's next_task and a Layout are accepted")
    numbers = (*layout.ranks, *layout.degrees)
    if not isinstance(layout.ranks, tuple) or set(map(type, numbers)) != {int}:
        raise PolicyFault(
            f"job {task.job_id}: {layout} is made of other things than a tuple of whole numbers"
        )


def legal_job(
    decision: Decision, *, jobs: Jobs, ranks: Ranks, models: ModelTurns, now_s: float, max_degree: int
) -> JobRecord:
    """The job of a decision. Raises: PolicyFault for what it cannot run, or its ranks cannot take now."""
    task, layout = decision.task, decision.layout
    record = jobs.records.get(task.job_id)
    if record is None or not record.arrived or record.trouble.doom:
        raise PolicyFault(f"there is no open job {task.job_id}")
    if models.is_limited and record.model not in models.resident:
        raise PolicyFault(f"job {task.job_id}: ranks do not hold {record.model} now")
    own = record.next_task if record.progress.next_index < record.num_tasks else None
    if own is None or (task != own and task != record.job.trajectory.variant(own)):
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


def check_degrees(job: AdmittedJob, task: Task, layout: Layout) -> None:
    """Refuse degrees that the task cannot use."""
    if task.stage is Stage.DECODE:
        if layout != Layout.bands(layout.ranks):
            raise PolicyFault(f"job {task.job_id}: ranks share a {task} in bands of rows, not as {layout}")
        if layout.degree > (most := job.limits.max_decode_degree):
            raise PolicyFault(f"job {task.job_id}: a {task} has {most} bands of rows at most, not {layout}")
        return
    if layout.degree > 1 and task.stage not in STEPS:
        raise PolicyFault(f"job {task.job_id}: {task} runs on one rank, not on {layout}")
    if layout.cfg > 1 and not job.limits.uses_cfg:
        raise PolicyFault(f"job {task.job_id} has one guidance branch, {layout} has ranks for two")
    if layout.head_degree > (most := job.limits.max_ulysses_degree):
        raise PolicyFault(f"job {task.job_id} has {most} attention heads, too few for {layout}")
    if layout.sequence_degree > (most := job.limits.max_sequence_degree):
        raise PolicyFault(f"job {task.job_id} can be split into {most} parts at most, not {layout}")
