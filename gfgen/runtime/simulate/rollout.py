"""Simulate ahead from a snapshot, to see the outcome of its jobs under a policy.

The simulation is coarse and cheap enough to run many times within a run. Jobs, ranks and costs are those of
the snapshot, and the policy is the function that decides in the run. A job's steps on one layout are one
segment; the policy decides again, at the jobs' next boundaries, only when a job arrives or ends. The recent
arrivals repeat after the present jobs at the same pace, so that a policy is judged under continuing traffic.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from gfgen.graph import STEPS, Stage, Task
from gfgen.layout import Degrees, Layout
from gfgen.runtime.core.openjobs import JobKind, OpenJobOrders, OpenJobs, kind_of
from gfgen.runtime.predict.cost_table import speed_up
from gfgen.snapshot import Decision, JobView, Outlook, Policy, RankView, RunningTask, Snapshot

MAX_JOBS = 48
"""The most present jobs to consider, the next deadlines first."""
MAX_TURNS = 1000
"""The most calls of the policy in one look ahead."""
_SAME_S = 1e-9
_NUM_BEFORE_STEPS = 2
"""Encode and prepare, which take milliseconds and count as one."""
_ONE_RANK = Layout.single(0)

_names = [each.name for each in fields(JobView) if each.init]
_place = _names.index("next_task")
_before, _after = attrgetter(*_names[:_place]), attrgetter(*_names[_place + 4 :])
"""The fields of a job before and after `next_task`, `num_tasks`, `remaining_s` and `last_layout`."""


def rollout_ends(
    snapshot: Snapshot, policy: Policy, *, ended: Callable[[], None] = lambda: None
) -> Mapping[str, float]:
    """When each open job ends under a policy, with a call of `ended`; one that never starts is missing."""
    arrivals = sorted(snapshot.open.values(), key=lambda job: job.arrival_s)
    start = replace(snapshot, open={}, costs=RolloutCosts(snapshot), orders=None, recent=())
    rollout = _Rollout(start, policy, arrivals, ended=ended)
    rollout.pass_turns()
    return {job.job_id: end_s for job, end_s in rollout.ends}


def with_foresight(snapshot: Snapshot, *, pause: Callable[[], None] = lambda: None) -> Snapshot:
    """The same snapshot with `foresee`, plain values for another thread; `pause` is called each turn."""
    costs = RolloutCosts(snapshot)
    present, parked = _present(snapshot), _sample(snapshot.parked.values())
    num_jobs = len(snapshot.open) + len(snapshot.busy) + len(snapshot.parked) + snapshot.num_unseen
    start = replace(
        snapshot,
        open={job.job_id: job for job in present if job.job_id in snapshot.open},
        busy={job.job_id: job for job in present if job.job_id in snapshot.busy},
        costs=costs,
        parked={job_id: job for job_id, job in snapshot.parked.items() if job in parked},
        orders=None,
        recent=(),
        foresee=None,
    )
    arrivals, num_unseen = _expected(snapshot, costs), num_jobs - len(present) - len(parked)

    def foresee(policy: Policy) -> Outlook:
        return _Rollout(start, policy, arrivals, pause=pause).outlook(num_unseen=num_unseen)

    return replace(snapshot, costs=costs, orders=None, foresee=foresee, kept={})


def _present(snapshot: Snapshot) -> Sequence[JobView]:
    """Those that run, and the next due: the head of a maintained list, since a pass over all takes long."""
    if len(snapshot.open) + len(snapshot.busy) <= MAX_JOBS:
        return (*snapshot.open.values(), *snapshot.busy.values())
    running = [running.task.job_id for running in snapshot.running]
    at_work = [snapshot.open[job_id] for job_id in running if job_id in snapshot.open]
    sample = _sample(snapshot.in_order(_due))
    found = {job.job_id: job for job in (*sample, *at_work, *snapshot.busy.values())}
    return heapq.nsmallest(MAX_JOBS, found.values(), key=lambda job: (job.job_id not in running, *_due(job)))


def _sample(jobs: Collection[JobView]) -> Sequence[JobView]:
    """At most MAX_JOBS: the next due, or without deadlines as many of each length as there are."""
    if len(jobs) <= MAX_JOBS:
        return tuple(jobs)
    by_due = sorted(jobs, key=_due)
    if by_due[0].deadline_s < math.inf:
        return by_due[:MAX_JOBS]
    return [by_due[number * len(by_due) // MAX_JOBS] for number in range(MAX_JOBS)]


def _due(job: JobView) -> tuple[float, float]:
    return job.deadline_s, job.remaining_s


def _expected(snapshot: Snapshot, table: RolloutCosts) -> tuple[JobView, ...]:
    """The recent arrivals repeated from now on; None if no more are expected, or all came at once."""
    recent = snapshot.recent
    if not snapshot.expects_more or len(recent) < 2 or recent[-1].arrival_s <= recent[0].arrival_s:
        return ()
    later_s = snapshot.now_s - recent[0].arrival_s
    expected = []
    for job in recent:
        job_id = f"{job.job_id} again"
        table.like(job_id, job.job_id)
        expected.append(
            replace(
                job,
                job_id=job_id,
                arrival_s=job.arrival_s + later_s,
                deadline_s=job.deadline_s + later_s,
                next_task=replace(job.next_task, job_id=job_id),
                last_layout=None,
            )
        )
    return tuple(expected)


@dataclass(slots=True)
class _Segment:
    job: JobView
    seen: JobView | None
    """The job as policies see it during its current task: at its next one, or None if that is the last."""
    layout: Layout
    begun_s: float
    task_s: float
    num_tasks: int

    @property
    def end_s(self) -> float:
        return self.begun_s + self.num_tasks * self.task_s

    def num_done(self, now_s: float) -> int:
        """How many tasks have ended when the current one ends."""
        if self.task_s <= 0:
            return self.num_tasks
        return min(math.floor((now_s - self.begun_s) / self.task_s + _SAME_S) + 1, self.num_tasks)


class _Rollout:
    def __init__(
        self,
        snapshot: Snapshot,
        policy: Policy,
        arrivals: Sequence[JobView],
        *,
        pause: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """arrivals: expected jobs, by arrival."""
        self._start, self._policy, self._costs = snapshot, policy, snapshot.costs
        self._pause, self._ended = pause, ended
        self._now_s = snapshot.now_s
        self._kept: dict[Any, Any] = {}
        self._open = OpenJobs()
        for view in snapshot.open.values():
            self._open.put(view)
        self._segments: dict[str, _Segment] = {}
        self._num_expected = len(arrivals)
        self._arrivals = list(reversed(arrivals))
        self._settled_s = math.inf
        """Until then the policy starts single tasks, because other jobs reach their boundaries."""
        self.ends: list[tuple[JobView, float]] = []
        self._num_ended = 0
        """Jobs that have ended, or begun a decode, since the policy was last asked for all."""
        self._parked = list(snapshot.parked.values())
        self._writers_free_s = list(snapshot.writers_free_s or (snapshot.now_s,))
        self._rank_s = 0.0
        for running in snapshot.running:
            if (job := snapshot.busy.get(running.task.job_id)) is not None:
                left_s = max(0.0, running.predicted_end_s - self._now_s)
                # The running task precedes `job.next_task`, where the job stands when it ends.
                before = replace(job, next_task=running.task)
                self._segments[job.job_id] = _Segment(before, job, running.layout, self._now_s, left_s, 1)
        covered = {rank for segment in self._segments.values() for rank in segment.layout.ranks}
        self._decoding_until_s = {
            view.rank: view.free_at_s
            for view in snapshot.ranks
            if not view.can_take and view.rank not in covered and view.free_at_s > self._now_s
        }
        """Ranks with the last task of a job, which policies no longer see."""

    def outlook(self, *, num_unseen: int) -> Outlook:
        """Simulate until all jobs have ended, or MAX_TURNS; `num_unseen` are those beyond MAX_JOBS."""
        self.pass_turns(MAX_TURNS)
        left = [
            *self._open.frozen().values(),
            *self._parked,
            *(segment.job for segment in self._segments.values()),
        ]
        for job in left:  # a lower bound: their ends are unknown
            self._note_end(job, self._now_s + job.remaining_s)
        num_jobs, num_late, num_lost, makespan_s, spreads = len(self.ends), 0, 0, 0.0, 0.0
        for job, end_s in self.ends:
            spreads += self._costs.spread(job.next_task, _ONE_RANK)
            num_late += end_s > job.deadline_s
            num_lost += end_s > job.last_due_s + job.write_s
            if not job.job_id.endswith(" again"):
                makespan_s = max(makespan_s, end_s - self._start.now_s)
        num_present = max(1, num_jobs - self._num_expected)
        unseen_s = self._rank_s * num_unseen / num_present / max(1, len(self._start.ranks))
        chance = 1 / self._num_expected if self._num_expected else 0.0
        return Outlook(
            num_jobs,
            num_late,
            num_lost,
            sum([end_s - job.arrival_s for job, end_s in self.ends]) / max(1, num_jobs),
            makespan_s + unseen_s,
            spread=math.hypot(spreads / max(1, num_jobs), math.sqrt(chance)),
        )

    def pass_turns(self, most: int | None = None) -> None:
        """Simulate until all jobs that the policy starts have ended, or `most` turns have passed."""
        self._settle()
        for _ in itertools.count() if most is None else range(most):
            self._decide()
            if self._num_ended > len(self._segments) or (self._num_ended and self._num_idle):
                self._cut()
            is_at_rest = not self._segments and not self._decoding_until_s
            if is_at_rest and not self._arrivals and not self._load_next():
                break
            self._pass_time()
            self._pause()

    def _load_next(self) -> bool:
        """Load the next model that jobs wait for, when no task of the others can run."""
        if not self._parked or len(self._open):
            return False
        model = self._parked[0].model
        for job in self._parked:
            if job.model == model:
                self._open.put(job)
        self._parked = [job for job in self._parked if job.model != model]
        loaded_s = self._now_s + self._start.load_s.get(model, 0.0)
        self._decoding_until_s = dict.fromkeys([view.rank for view in self._start.ranks], loaded_s)
        return True

    def _pass_time(self) -> None:
        """Advance to the next end of a segment or the next arrival."""
        ends_s = [segment.end_s for segment in self._segments.values()]
        next_s = min([*ends_s, *self._decoding_until_s.values()], default=math.inf)
        if self._arrivals:
            next_s = min(next_s, self._arrivals[-1].arrival_s)
        self._now_s = max(self._now_s, next_s)
        due_s = self._now_s + _SAME_S
        for rank in [rank for rank, end_s in self._decoding_until_s.items() if end_s <= due_s]:
            del self._decoding_until_s[rank]
        for segment in [segment for segment in self._segments.values() if segment.end_s <= due_s]:
            self._num_ended += self._end(segment)
        num_before = len(self._arrivals)
        while self._arrivals and self._arrivals[-1].arrival_s <= due_s:
            self._open.put(self._arrivals.pop())
        if len(self._arrivals) < num_before:
            self._cut()

    def _end(self, segment: _Segment) -> bool:
        """Move the job past the segment; return whether the policy should decide again for others."""
        job = segment.job
        del self._segments[job.job_id]
        self._rank_s += segment.num_tasks * segment.task_s * segment.layout.degree
        index = job.next_task.index + segment.num_tasks
        job = _with_options(job, index)
        if index >= job.num_tasks:
            self._note_end(job, self._now_s)
            return True
        self._open.put(self._at(job, index, segment.layout))
        return index == job.num_tasks - 1 and segment.layout.degree > 1  # it may leave ranks to others

    def _at(self, job: JobView, index: int, last_layout: Layout | None) -> JobView:
        task = task_at(job, index)
        remaining_s = self._costs.remaining_s(task, _ONE_RANK)
        # Twice as fast as `replace`, for each segment of each job.
        return JobView(*(*_before(job), task, job.num_tasks, remaining_s, last_layout, *_after(job)))

    def _cut(self) -> None:
        """Cut every segment at its next boundary, so that the policy decides again."""
        self._num_ended = 0
        for segment in self._segments.values():
            segment.num_tasks = segment.num_done(self._now_s)
        self._settle()

    @property
    def _num_idle(self) -> int:
        num_taken = len(self._decoding_until_s)
        num_taken += sum([segment.layout.degree for segment in self._segments.values()])
        return len(self._start.ranks) - num_taken

    def _settle(self) -> None:
        ends_s = [segment.end_s for segment in self._segments.values() if segment.job.next_task.index > 1]
        self._settled_s = max(ends_s, default=self._now_s)

    def _decide(self) -> None:
        if not len(self._open):
            return
        snapshot = self._snapshot()
        if snapshot.free_ranks:
            for decision in list(self._policy(snapshot)):
                self._begin(decision, snapshot.open[decision.task.job_id])

    def _begin(self, decision: Decision, job: JobView) -> None:
        self._open.discard(job.job_id)
        task_s = self._costs.task_s(decision.task, decision.layout)
        num_tasks = 1
        if decision.task.stage in STEPS and (job.may_approximate or not job.num_approximable):
            num_left = job.num_tasks - 1 - decision.task.index
            if decision.task.stage is not Stage.REFINE:
                num_left -= job.num_refined  # those are a segment of their own
            if job.may_approximate and decision.task.stage is Stage.APPROXIMATE:
                task_s -= self._given_up_s(decision, job) / num_left
            segments = self._segments.values()  # the ranks of other tasks than steps may join a step
            others_s = [each.end_s for each in segments if each.job.next_task.stage not in STEPS]
            settled_s = max([self._settled_s, *others_s])
            until_settled = math.floor((settled_s - self._now_s) / task_s) if task_s > 0 else 1
            is_settled = settled_s <= self._now_s + _SAME_S
            num_tasks = num_left if is_settled else min(num_left, max(1, until_settled))
        elif decision.task.stage is Stage.ENCODE:  # together with prepare
            num_tasks = _NUM_BEFORE_STEPS
            task_s = (task_s + self._costs.task_s(task_at(job, 1), decision.layout)) / num_tasks
        self._segments[job.job_id] = _Segment(job, None, decision.layout, self._now_s, task_s, num_tasks)

    def _given_up_s(self, decision: Decision, job: JobView) -> float:
        """What a job saves by giving up as many of its steps as its deadline takes."""
        full_s = self._costs.remaining_s(decision.task, decision.layout)
        most = job.num_approximable
        most_s = full_s - self._costs.remaining_s(decision.task, decision.layout, num_given_up=most)
        late_s, each_s = self._now_s + full_s - job.due_s, most_s / most
        return min(most_s, max(1, math.ceil(late_s / each_s)) * each_s) if each_s > 0 else 0.0

    def _snapshot(self) -> Snapshot:
        running, busy, taken, now_s = [], {}, dict(self._decoding_until_s), self._now_s
        for job_id, segment in self._segments.items():
            job, num_done = segment.job, segment.num_done(self._now_s)
            end_s, index = segment.begun_s + num_done * segment.task_s, job.next_task.index + num_done
            if index < job.num_tasks:
                if segment.seen is None or segment.seen.next_task.index != index:
                    segment.seen = self._at(job, index, job.last_layout)
                busy[job_id] = segment.seen
            running.append(RunningTask(segment.job.next_task, segment.layout, end_s))
            taken.update(dict.fromkeys(segment.layout.ranks, end_s))
        ranks = tuple(
            [  # four times as fast as `replace`
                RankView(x.rank, taken.get(x.rank, now_s), x.rank not in taken, x.models, x.patches)
                for x in self._start.ranks
            ]
        )
        open_jobs = self._open.frozen()
        start = self._start
        return Snapshot(
            now_s=self._now_s,
            open=open_jobs,
            busy=busy,
            running=tuple(running),
            ranks=ranks,
            max_degree=start.max_degree,
            costs=self._costs,
            orders=OpenJobOrders(self._open, open_jobs, joining=[]),
            kept=self._kept,
        )

    def _note_end(self, job: JobView, end_s: float) -> None:
        """A decode has ended; its file waits for a writer."""
        writer = self._writers_free_s.index(min(self._writers_free_s))
        end_s = self._writers_free_s[writer] = max(end_s, self._writers_free_s[writer]) + job.write_s
        self.ends.append((job, end_s))
        self._ended()


def _with_options(job: JobView, index: int) -> JobView:
    """The job at a later task; the steps that it may give up count as spread evenly over its first pass."""
    if not job.num_approximable:
        return job
    end = job.num_tasks - 1 - job.num_refined
    before, left = (max(1, end - max(2, each)) for each in (job.next_task.index, index))
    num_approximable = min(job.num_approximable, round(job.num_approximable * left / before))
    num_approximable = num_approximable if index < end else 0
    saving_s = job.saving_s * num_approximable / job.num_approximable
    may_approximate = num_approximable > 0 and index >= 2
    return replace(job, num_approximable=num_approximable, saving_s=saving_s, may_approximate=may_approximate)


@dataclass(frozen=True, slots=True)
class KindCosts:
    stages_s: dict[Stage, float]
    steps_s: dict[Degrees, float]
    """A step of the first pass, by degrees; the mean of all of them if some are approximate."""
    refined_s: dict[Degrees, float]
    """A step of the second pass, by degrees."""
    decodes_s: dict[int, float]
    """A decode, by the number of ranks that it may use."""
    approximate_s: float = 0.0
    """A step that a policy has approximated."""
    spread: float = 0.0
    """How far the time of a step may be off, as a share of it."""
    num_refined: int = 0
    """Steps of the second pass."""


class RolloutCosts:
    """The costs of all kinds of jobs as plain numbers, so that another thread reads nothing that changes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.sets = snapshot.costs.sets
        self._kinds: dict[str, JobKind] = {}
        examples: dict[JobKind, JobView] = {}
        known = (snapshot.open.values(), snapshot.busy.values(), snapshot.parked.values(), snapshot.recent)
        for job in itertools.chain.from_iterable(known):
            kind = kind_of(job)
            self._kinds.setdefault(job.job_id, kind)
            if kind not in examples or (job.num_approximable and not examples[kind].num_approximable):
                examples[kind] = job
        self._costs = {kind: _kind_costs(snapshot, job) for kind, job in examples.items()}

    def like(self, job_id: str, other: str) -> None:
        self._kinds[job_id] = self._kinds[other]

    def spread(self, task: Task, layout: Layout) -> float:
        return self._costs[self._kinds[task.job_id]].spread

    def task_s(self, task: Task, layout: Layout) -> float:
        costs = self._costs[self._kinds[task.job_id]]
        match task.stage:
            case Stage.REFINE:
                return self._step_s(costs.refined_s, layout.degrees)
            case stage if stage in STEPS:
                return self._step_s(costs.steps_s, layout.degrees)
            case Stage.DECODE:
                return self._decode_s(costs, layout.degree)
            case stage:
                return costs.stages_s[stage]

    def remaining_s(self, task: Task, layout: Layout, *, num_given_up: int = 0) -> float:
        kind = self._kinds[task.job_id]
        costs, num_tasks = self._costs[kind], kind[2]
        num_steps = min(num_tasks - task.index - 1, num_tasks - 3)
        total_s = self._decode_s(costs, layout.degree)
        if num_steps > 0:
            num_refined = min(num_steps, costs.num_refined)
            num_given_up = min(num_given_up, num_steps - num_refined)
            total_s += (num_steps - num_refined - num_given_up) * self._step_s(costs.steps_s, layout.degrees)
            total_s += num_given_up * costs.approximate_s
            total_s += num_refined * self._step_s(costs.refined_s, layout.degrees) if num_refined else 0.0
        for stage in (Stage.ENCODE, Stage.PREPARE)[task.index :]:
            total_s += costs.stages_s[stage]
        return total_s

    def first_use_s(self, task: Task, layout: Layout) -> float:
        """A part of the tasks' times."""
        return 0.0

    def move_s(self, job_id: str, source: Layout | None, layout: Layout) -> float:
        """Moves are left out: they take a few milliseconds, a few times per job."""
        return 0.0

    @staticmethod
    def _step_s(steps_s: dict[Degrees, float], degrees: Degrees) -> float:
        """Unknown degrees cost the same as the next lower ones."""
        found = steps_s.get(degrees)
        if found is None:
            degree = math.prod(degrees)
            found = min(s for other, s in steps_s.items() if math.prod(other) <= degree)
            steps_s[degrees] = found
        return found

    @staticmethod
    def _decode_s(costs: KindCosts, degree: int) -> float:
        """Unknown numbers of ranks cost the same as the next lower one."""
        if degree not in costs.decodes_s:
            lower = max(number for number in costs.decodes_s if number <= degree)
            costs.decodes_s[degree] = costs.decodes_s[lower]
        return costs.decodes_s[degree]


def _kind_costs(snapshot: Snapshot, job: JobView) -> KindCosts:
    """Several ranks are not believed to gain more than their number, or than guessed where they share cores.

    There a rank that computes alone is measured while others use the same cores, a shared step while nothing
    else does, and each beside whatever the machine did then: such measurements cannot be compared.
    """

    num_steps = max(1, job.num_tasks - 3 - job.num_refined)

    def task_s(index: int, layout: Layout) -> float:
        """With the price of a first step spread over all steps of the first pass."""
        task, num_tasks = task_at(job, index), num_steps if index == 2 else 1
        first_use_s = snapshot.costs.first_use_s(task, layout)
        return snapshot.costs.task_s(task, layout) + first_use_s / num_tasks

    def rank_sets(most: int) -> list[tuple[int, ...]]:
        numbers = itertools.takewhile(lambda n: n <= min(snapshot.max_degree, most), (1, 2, 4, 8))
        return [tuple(range(number)) for number in numbers]

    def step_s(layout: Layout, index: int = 2) -> float:
        most = speed_up(layout.degree) if snapshot.shares_cores else layout.degree
        return max(task_s(index, layout), task_s(index, _ONE_RANK) / most)

    def mean_s(layout: Layout) -> float:
        full_s = step_s(layout)
        return full_s + share * (approximate_s - full_s)

    steps = [job.step_layout(ranks) for ranks in rank_sets(job.step_degree)]
    share, approximate_s = job.num_approximate / num_steps, 0.0
    if job.num_approximate or job.num_approximable:
        approximate_s = snapshot.costs.task_s(task_at(job, 2).as_approximate, _ONE_RANK)
    return KindCosts(
        {stage: task_s(index, _ONE_RANK) for index, stage in enumerate((Stage.ENCODE, Stage.PREPARE))},
        {layout.degrees: mean_s(layout) for layout in steps},
        {layout.degrees: step_s(layout, job.num_tasks - 2) for layout in steps if job.num_refined},
        {
            len(ranks): task_s(job.num_tasks - 1, job.decode_layout(ranks))
            for ranks in rank_sets(job.max_decode_degree)
        },
        approximate_s,
        max(snapshot.costs.spread(task_at(job, 2), layout) for layout in steps),
        job.num_refined,
    )


def task_at(job: JobView, index: int) -> Task:
    if index == 0:
        return Task(job.job_id, 0, Stage.ENCODE)
    if index == 1:
        return Task(job.job_id, 1, Stage.PREPARE)
    if index == job.num_tasks - 1:
        return Task(job.job_id, index, Stage.DECODE)
    is_refined = index >= job.num_tasks - 1 - job.num_refined
    return Task(job.job_id, index, Stage.REFINE if is_refined else Stage.DENOISE, index - 2)
