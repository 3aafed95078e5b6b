"""All that a policy sees, and what it returns.

A policy is a function `policy(snapshot) -> list[Decision]`. The snapshot is a frozen picture:
it does not change while a policy looks at it, and looking at it changes nothing. Times are
seconds since the start of the run. Everything predicted comes from the cost model and gets
better while the run goes on.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gfgen.graph import STEPS, Stage, Task
from gfgen.layout import MAX_RANKS, Degrees, Layout, Limits


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How tasks of one model and shape use a number of ranks best, by what is predicted of them.

    Entry n is for n + 1 ranks, up to MAX_RANKS.
    """

    steps: tuple[Degrees, ...]
    """The degrees of a step, whose product is as many ranks as it can use."""
    decodes: tuple[int, ...]
    """How many ranks a decode takes of them."""


@dataclass(frozen=True, slots=True)
class JobView:
    """One unfinished job that has arrived."""

    job_id: str
    tag: str | None
    model: str
    arrival_s: float
    deadline_s: float
    """When its file is due; infinity without a deadline."""
    precedence: int
    """Minus the job's priority: in a sort key, as everywhere in one, smaller goes first."""
    next_task: Task
    num_tasks: int
    remaining_s: float
    """Predicted work from `next_task` to the end, on one rank."""
    last_layout: Layout | None
    """Where its last task ran, or was queued; None until the first, or when nobody holds its state."""
    uses_cfg: bool = False
    """Whether a step evaluates two guidance branches, which two halves of the ranks can share."""
    max_sequence_degree: int = 1
    """The most ranks that can share the tokens of one branch."""
    max_ulysses_degree: int = MAX_RANKS
    """The most of them that can share the heads; beyond that they share keys, in rings."""
    shape: str = ""
    """Jobs of one model and shape take equally long for a task; the size of a batch is part of it."""
    max_decode_degree: int = 1
    """The most ranks that can share the rows of its decode."""
    arrangement: Arrangement | None = None
    """How it uses its ranks; None where nothing is predicted."""
    patches: str = ""
    """What it merges into its model's weights (LoRAs); equal texts are equal patches, and "" is none."""
    switch_s: float = 0.0
    """Predicted time to merge them on a rank that holds others."""
    owner: str | None = None
    """Owners get equal shares of the ranks (policies/fair_share.py)."""
    num_approximate: int = 0
    """Steps of the whole job that are approximate in any case; `remaining_s` counts them as such."""
    num_approximable: int = 0
    """Steps from `next_task` on that a policy may have approximated."""
    saving_s: float = 0.0
    """How much less than `remaining_s` is left if all of these are approximate."""
    may_approximate: bool = False
    """Whether `next_task` is one of them."""
    write_s: float = 0.0
    """Predicted time from the end of its decode to its file."""
    num_refined: int = 0
    """Last steps of the whole job that are of a second pass, with a cost of their own."""
    due_s: float = field(init=False)
    """When its decode is due: `deadline_s` less `write_s`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "due_s", self.deadline_s - self.write_s)

    @property
    def last_due_s(self) -> float:
        """When its decode is due if its client accepts a late file: after half its time again, as a guess."""
        return self.due_s + 0.5 * (self.deadline_s - self.arrival_s)

    @property
    def step_degree(self) -> int:
        """The most ranks that one of its denoising steps can use."""
        return self.max_sequence_degree * (2 if self.uses_cfg else 1)

    @property
    def max_degree(self) -> int:
        """The most ranks that its next task can use: several share a denoising step, or a decode."""
        match self.next_task.stage:
            case stage if stage in STEPS:
                return self.step_degree
            case Stage.DECODE:
                return self.max_decode_degree
            case _:
                return 1

    def layout(self, ranks: Sequence[int]) -> Layout:
        """A layout of its next task on these ranks, or on the first of them when they are too many."""
        stage = self.next_task.stage
        if stage is Stage.DECODE:
            return self.decode_layout(ranks)
        return self.step_layout(ranks if stage in STEPS else ranks[:1])

    def step_layout(self, ranks: Sequence[int]) -> Layout:
        """A layout of its denoising steps on these ranks, whatever its next task is.

        Guidance branches go to two halves of the ranks, or one after the other to all of them,
        whichever is predicted to be quicker; to two halves where nothing is. Of the ranks of a
        branch as many share heads as can.
        """
        ranks = tuple(map(operator.index, ranks[:MAX_RANKS]))  # plain ints: layouts are kept by them
        if self.arrangement is not None:
            return _layout(ranks, self.arrangement.steps[len(ranks) - 1])
        limits = Limits(self.uses_cfg, self.max_sequence_degree, self.max_ulysses_degree)
        return _layout(ranks, limits.ways(len(ranks))[0])

    def decode_layout(self, ranks: Sequence[int]) -> Layout:
        """A layout of its decode: on as many of these ranks as make it quickest, or as it can use."""
        degree = min(len(ranks), self.max_decode_degree)
        if self.arrangement is not None:
            degree = self.arrangement.decodes[degree - 1]
        return _layout(tuple(map(operator.index, ranks[:degree])), (1, degree, 1))


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task that was dispatched and has not ended on all of its ranks."""

    task: Task
    layout: Layout
    predicted_end_s: float
    owner: str | None = None
    """Of its job."""


@dataclass(frozen=True, slots=True)
class RankView:
    """One living rank."""

    rank: int
    free_at_s: float
    """When all that it was given is predicted to have ended; in the past when it is idle or late."""
    can_take: bool
    """Free now, or predicted free within the lookahead, with nothing queued."""
    models: frozenset[str]
    """Models whose weights are resident."""
    patches: Mapping[str, str] = field(default_factory=dict, hash=False)
    """By model, those in its weights; models without any may be missing."""


class Costs(Protocol):
    """Predictions in seconds, for any task and layout of any open job."""

    def task_s(self, task: Task, layout: Layout) -> float: ...

    def remaining_s(self, task: Task, layout: Layout, *, num_given_up: int = 0) -> float:
        """From `task` to the end of its job, all on a layout of these degrees.

        num_given_up: approximate steps, of those that the policy may have approximated.
        """

    def first_use_s(self, task: Task, layout: Layout) -> float:
        """Extra time of `task` if it is the run's first such step or decode on these degrees; else 0.

        It counts in `remaining_s`, and not in `task_s`.
        """

    def move_s(self, job_id: str, source: Layout | None, layout: Layout) -> float: ...

    def sets(self, ranks: Sequence[int], degree: int = 1) -> tuple[tuple[int, ...], ...]:
        """These ranks, cut into sets that a layout of `degree` can be taken from.

        Ranks that reach each other's memory are neighbours, so take ranks in a row. Sets may be smaller.
        """

    def spread(self, task: Task, layout: Layout) -> float:
        """How far `task_s` may be off, as a share of it."""


class Orders(Protocol):
    """Sorted lists of a snapshot's open jobs that are kept up between snapshots."""

    def sorted(self, views: Mapping[str, JobView], key: Callable[[JobView], Any]) -> list[JobView] | None:
        """The views by key; None when nothing is kept of them: they are of the past, or others."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The frozen picture of the cluster."""

    now_s: float
    open: Mapping[str, JobView]
    """Jobs whose next task may be dispatched now."""
    busy: Mapping[str, JobView]
    """Jobs whose next task is not open: its producer still runs."""
    running: tuple[RunningTask, ...]
    ranks: tuple[RankView, ...]
    """Living ranks, in order."""
    max_degree: int
    """The most ranks that one task can use here."""
    costs: Costs
    orders: Orders | None = None
    """What keeps sorted lists of `open`; asked through `in_order`."""

    recent: tuple[JobView, ...] = ()
    """The jobs that arrived last, as they were then: what may be expected to come."""
    parked: Mapping[str, JobView] = field(default_factory=dict)
    """Jobs of models that ranks do not hold, those of the next model first."""
    load_s: Mapping[str, float] = field(default_factory=dict)
    """Predicted time of all ranks to load each of these models."""
    writers_free_s: tuple[float, ...] = ()
    """When each writer of files is predicted to have written all that it was given."""
    num_unseen: int = 0
    """Jobs that come after those in `open` in any order of a policy; only looks ahead count them."""
    unseen_s: float = 0.0
    """Their predicted work, on one rank."""
    expects_more: bool = False
    """Whether further jobs may come; if not, the end of the last present job is the end of all."""
    shares_cores: bool = False
    """Whether ranks slow each other down."""
    foresee: Callable[[Policy], Outlook] | None = None
    """Simulates ahead from here under a policy; None where nobody chooses between policies."""
    served_s: Mapping[str | None, float] = field(default_factory=dict)
    """Rank seconds that each owner of jobs has had, for comparison with each other."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """What policies have computed from views and costs, for later snapshots; empty when a prediction has
    changed. No decision may depend on whether something is in it."""

    def in_order(self, key: Callable[[JobView], Any]) -> Sequence[JobView]:
        """The open jobs, smallest key first, ties in the order in which they opened.

        With one and the same function as key at every call the order is kept up from snapshot to
        snapshot, and this costs less than looking at each job once. The key must depend on the
        view alone.
        """
        kept = self.orders.sorted(self.open, key) if self.orders else None
        return sorted(self.open.values(), key=key) if kept is None else kept

    @property
    def free_ranks(self) -> tuple[int, ...]:
        """Ranks that can be given a task now."""
        return tuple([view.rank for view in self.ranks if view.can_take])

    def groups(self, degree: int) -> list[tuple[int, ...]]:
        """The living ranks cut into fixed groups of `degree`, each of ranks that can share a task.

        A degree beyond `max_degree` counts as `max_degree`; ranks that do not fill a group
        are left out, unless no group can be filled, when all that can share a task are one group.
        """
        alive = tuple([view.rank for view in self.ranks])
        degree = max(1, min(degree, self.max_degree))
        return list(_groups(self.costs.sets(alive, degree), degree))


@dataclass(frozen=True, slots=True)
class Outlook:
    """How the present jobs would fare under a policy, and others like those that came last."""

    num_jobs: int
    num_late: int
    """Of those with a deadline."""
    num_lost: int
    """Of the late ones those that end after `last_due_s`."""
    mean_latency_s: float
    makespan_s: float
    """Until the last of the jobs that are here now."""
    spread: float = 0.0
    """How far these times may be off, as a share of them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy that is to decide from now on, as `--policy` would name it, and why."""

    policy: str
    reason: str
    losses: Mapping[str, float] = field(default_factory=dict)
    """A number for each compared policy, which `choose` finds in its last choice the next time."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Run a job's next task on this layout, now.

    If the job's view says `may_approximate`, the task may be `next_task.as_approximate`: no transformer.
    """

    task: Task
    layout: Layout


Policy = Callable[[Snapshot], Iterable[Decision]]
Choose = Callable[[Snapshot, Choice | None], Choice | None]
"""From a snapshot that can foresee, and the last choice, to the next one; None to leave it as it is."""


@functools.lru_cache(maxsize=4096)
def _layout(ranks: tuple[int, ...], degrees: Degrees) -> Layout:
    """The first of these ranks; kept, since layouts are values and the same few come again at every step."""
    return Layout(ranks[: math.prod(degrees)], *degrees)


@functools.lru_cache(maxsize=256)
def _groups(sets: tuple[tuple[int, ...], ...], degree: int) -> tuple[tuple[int, ...], ...]:
    """`Snapshot.groups`; kept, since the same ranks are cut into the same groups at every step."""
    groups = [
        each[start : start + degree] for each in sets for start in range(0, len(each) - degree + 1, degree)
    ]
    return tuple(groups or [each[:degree] for each in sets])
