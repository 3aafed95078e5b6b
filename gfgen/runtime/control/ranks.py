"""The ranks of a run and the dispatches on them, of which one may be queued shortly before another's end."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field

from gfgen.graph import Artifact
from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch, plan_transfers
from gfgen.runtime.core.events import RankLost
from gfgen.runtime.ipc.messages import RankTimes, Transfer
from gfgen.snapshot import RankView, RunningTask
from gfgen.system.wording import in_words

logger = logging.getLogger(__name__)

LOOKAHEAD_S = 0.005  # the default: dispatching takes a millisecond or two, on a busy machine more
SHARE, MAX_SHARE_S = 0.02, 0.025
"""A task adds this share of its predicted time, by which it may vary, to the lookahead. The share is limited:
an early decision may be wrong, and a long task can bear a gap."""
MAX_EARLY_S = 0.1  # a task is expected to end at most so long before its predicted end, likewise
_ROUNDING_S = 1e-9  # the loop turns at the soonest end less the lookahead, and sums of floats are not exact
_SAME_END = 0.1  # a predicted end that is off by less than this share of the lookahead stays as it is


def lookahead_of(predicted_s: float, *, lookahead_s: float) -> float:
    """How long before its soonest end the task after this one may be queued."""
    return lookahead_s + min(SHARE * predicted_s, MAX_SHARE_S) if lookahead_s > 0 else 0.0


@dataclass(slots=True, eq=False)
class Flight:
    dispatch: Dispatch
    view: RunningTask  # its predicted end is corrected when the task before it has ended
    lookahead_s: float  # around its end, when the next task may be queued; 0 if never
    failure: str | None = None
    is_void: bool = False
    look_s: float = math.inf  # when to decide what follows it; infinity if nothing may be queued behind it
    opens_s: float = math.inf  # the same, less an allowance for rounding
    late_s: float = 0.0  # from here on nothing may be queued, which would wait for this late task

    def set_end(self, view: RunningTask, soonest_s: float) -> None:
        """Predict this end, and that no rank is free before `soonest_s`; what follows is decided for that."""
        self.view, end_s = view, view.predicted_end_s
        soonest_s = min(end_s, max(soonest_s, end_s - MAX_EARLY_S))
        self.look_s = soonest_s - self.lookahead_s if self.lookahead_s > 0 else math.inf
        self.opens_s = self.look_s - _ROUNDING_S
        self.late_s = end_s + self.lookahead_s

    def is_ending(self, now_s: float) -> bool:
        """Whether the next task may be queued behind it."""
        return self.opens_s <= now_s <= self.late_s and self.failure is None


class Flights(dict[int, Flight]):
    """All flights of a run by number, in the order of their dispatches."""

    def __init__(self, *, lookahead_s: float, last_number: int) -> None:
        super().__init__()
        self._lookahead_s = lookahead_s
        self.unwanted: set[int] = set()
        self.last_number = last_number

    def add(
        self, dispatch: Dispatch, *, soonest_s: float, is_foreseeable: bool, owner: str | None = None
    ) -> Flight:
        """Note a dispatch; nothing is queued behind it by a mere guess of when it ends."""
        assert dispatch.number == self.last_number + 1, f"{dispatch} is not the next dispatch"
        view = RunningTask(dispatch.task, dispatch.layout, dispatch.predicted_end_s, owner)
        predicted_s = dispatch.predicted_end_s - dispatch.predicted_start_s
        own_s = lookahead_of(predicted_s, lookahead_s=self._lookahead_s) if is_foreseeable else 0.0
        flight = self[dispatch.number] = Flight(dispatch, view, own_s)
        flight.set_end(view, soonest_s)
        self.last_number = dispatch.number
        return flight

    def ending(self, now_s: float) -> list[Flight]:
        """Flights behind which the next tasks may be queued."""
        return [x for x in self.values() if x.opens_s <= now_s <= x.late_s and x.failure is None]

    def next_look_s(self, now_s: float) -> float:
        """When to decide next what follows a flight; infinity if there is nothing to decide."""
        return min([each.look_s for each in self.values() if each.look_s > now_s], default=math.inf)

    def move_end(self, flight: Flight, end_s: float, *, soonest_s: float) -> bool:
        """Predict other ends; whether that changes what policies see."""
        view = flight.view
        has_moved = abs(end_s - view.predicted_end_s) > _SAME_END * self._lookahead_s
        if has_moved:
            view = RunningTask(view.task, view.layout, end_s, view.owner)
        flight.set_end(view, soonest_s)
        return has_moved

    def give_up(self, flights: Iterable[Flight]) -> None:
        """Nobody wants the results of these dispatches any more."""
        self.unwanted.update(flight.dispatch.number for flight in flights)

    def take_unwanted(self) -> list[Dispatch]:
        """Dispatches to stop, each returned once."""
        unwanted, self.unwanted = self.unwanted, set()
        return [self[number].dispatch for number in sorted(unwanted & self.keys())]

    def check(self) -> None:
        numbers = list(self)
        assert numbers == sorted(numbers), f"dispatches out of order: {numbers}"
        assert not numbers or numbers[-1] <= self.last_number, f"{numbers[-1]} is past {self.last_number}"


@dataclass(slots=True, eq=False)
class RankRecord:
    rank: int
    is_ready: bool = False
    is_retired: bool = False
    is_loading: bool = False  # it has yet to load the models of the last change
    load_s: float = 0.0  # how long that is predicted to take
    flights: list[Flight] = field(default_factory=list)
    idle_since_s: float = 0.0
    ended_s: float = 0.0
    lost_s: float | None = None  # when its last worker died in this run
    patches: dict[str, str] = field(default_factory=dict)  # by model: of the last task with its weights
    view: RankView | None = None  # what policies saw last of this rank; None when it is outdated

    @property
    def free_at_s(self) -> float:
        free_s = self.flights[-1].view.predicted_end_s if self.flights else self.idle_since_s
        return free_s + self.load_s if self.is_loading else free_s

    @property
    def can_work(self) -> bool:
        return self.is_ready and not self.is_loading

    def can_take(self, now_s: float) -> bool:
        """Whether it is idle, or its only task is about to end."""
        flights = self.flights
        return self.can_work and (not flights or (len(flights) == 1 and flights[0].is_ending(now_s)))


class Ranks:
    def __init__(self, num_ranks: int, islands: Sequence[Sequence[int]] | None) -> None:
        self.records = [RankRecord(rank) for rank in range(num_ranks)]
        self.islands = tuple(map(tuple, islands or [range(num_ranks)]))
        """Sets of ranks that reach each other's memory."""

    def free(self, ending: Iterable[Flight]) -> Set[int]:
        """Ranks that can take a task: idle ones, and those whose only task is about to end."""
        free = {each.rank for each in self.records if not each.flights and each.can_work}
        for flight in ending:
            for rank in flight.dispatch.layout.ranks:
                record = self.records[rank]
                if len(record.flights) == 1 and record.can_work:
                    free.add(rank)
        return free

    def views(self, free: Set[int], models: frozenset[str]) -> tuple[RankView, ...]:
        """What policies see of the ranks that are ready, which hold these models."""
        views = []
        for rank in self.records:
            view, can_take = rank.view, rank.rank in free
            if view is None or view.can_take is not can_take:
                held = frozenset[str]() if rank.is_loading else models
                view = rank.view = RankView(rank.rank, rank.free_at_s, can_take, held, dict(rank.patches))
            if rank.is_ready:
                views.append(view)
        return tuple(views)

    def transfers(self, latents: Artifact, *, source: Layout, destination: Layout) -> tuple[Transfer, ...]:
        """What ranks send each other of what the source holds; nothing if they take it from the slab.

        They do if they do not reach each other, or one has to load models first. A GPU rank that loads maps
        the arena of a new peer afterwards, so both would wait for each other.
        """
        is_loading = any(self.records[rank].is_loading for rank in source.ranks)
        if is_loading or not share_island((*source.ranks, *destination.ranks), self.islands):
            return ()
        return plan_transfers(latents, source=source, destination=destination)

    def take(self, flight: Flight) -> None:
        for rank in flight.dispatch.layout.ranks:
            record = self.records[rank]
            record.flights.append(flight)
            record.view = None

    def merge(self, layout: Layout, model: str, patches: str) -> bool:
        """A task needs a model with these patches and no others; whether a rank of it has to merge them."""
        held = [self.records[rank].patches for rank in layout.ranks]
        if all(each.get(model, "") == patches for each in held):
            return False
        for each in held:
            each[model] = patches
        return True

    def leave(self, flight: Flight, *, at_s: float, times: Sequence[RankTimes] = ()) -> None:
        for each in times:
            record = self.records[each.rank]
            record.ended_s = max(record.ended_s, each.ended_s)
        for rank in flight.dispatch.layout.ranks:
            record = self.records[rank]
            record.flights.remove(flight)
            record.idle_since_s, record.view = at_s, None

    def become_ready(self, rank: int, *, at_s: float) -> None:
        """Its worker has loaded the models of this moment and takes tasks."""
        record = self.records[rank]
        record.is_ready, record.idle_since_s, record.view = True, at_s, None
        if record.lost_s is not None:
            logger.info("rank %d works again after %s", rank, in_words(at_s - record.lost_s))

    def load(self, models: Collection[str], load_s: float, *, at_s: float) -> None:
        """Every rank loads these models in place of others, after its present task."""
        for rank in self.records:
            rank.patches = {model: patches for model, patches in rank.patches.items() if model in models}
            rank.is_loading, rank.load_s, rank.view = not rank.is_retired, load_s, None
            rank.idle_since_s = max(rank.idle_since_s, at_s)

    def finish_loading(self, rank: int, *, at_s: float) -> None:
        record = self.records[rank]
        record.is_loading, record.idle_since_s, record.view = False, at_s, None

    def lose(self, event: RankLost) -> None:
        rank = self.records[event.rank]
        rank.is_ready, rank.is_loading, rank.view = False, False, None
        rank.is_retired, rank.lost_s = event.is_retired, event.time_s
        rank.patches.clear()

    def check(self) -> None:
        for rank in self.records:
            tasks = {each.dispatch.sharers or each.dispatch.number for each in rank.flights}
            assert len(tasks) <= 2, f"rank {rank.rank} has {len(tasks)} tasks"
            assert not (rank.is_retired and rank.is_ready), f"rank {rank.rank} is retired and ready"
            for flight in rank.flights:
                assert rank.rank in flight.dispatch.layout.ranks, f"rank {rank.rank} has a task of others"


@functools.lru_cache(maxsize=1024)
def share_island(ranks: tuple[int, ...], islands: tuple[tuple[int, ...], ...]) -> bool:
    """Whether these ranks reach each other's memory; cached, because every step asks about the same few."""
    return any(set(island).issuperset(ranks) for island in islands)
