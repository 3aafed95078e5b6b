"""The ranks of a run: which of them live, what each is at, which can take a task, and who had how much."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field

from gfgen.layout import Layout
from gfgen.runtime.control.flights import Flight
from gfgen.runtime.core.events import RankLost, RankTimes
from gfgen.snapshot import RankView


@dataclass(slots=True, eq=False)
class RankRecord:
    """A rank, living or not."""

    rank: int
    is_ready: bool = False
    is_retired: bool = False
    is_loading: bool = False
    """It has yet to load the models of the last change."""
    load_s: float = 0.0
    """How long that is predicted to take."""
    flights: list[Flight] = field(default_factory=list)
    """A running task, or a batch of steps, and a queued one at most."""
    idle_since_s: float = 0.0
    ended_s: float = 0.0
    """When its part of the last finished task ended."""
    loras: dict[str, str] = field(default_factory=dict)
    """By model, the LoRAs of the last task that needed its weights."""
    view: RankView | None = None
    """What policies saw last of this rank; None when it is outdated."""

    @property
    def free_at_s(self) -> float:
        """When all that it was given is predicted to have ended, or has ended."""
        free_s = self.flights[-1].view.predicted_end_s if self.flights else self.idle_since_s
        return free_s + self.load_s if self.is_loading else free_s

    @property
    def can_work(self) -> bool:
        return self.is_ready and not self.is_loading


class Ranks:
    """All ranks; a rank is idle if it can work and has nothing to do."""

    def __init__(self, num_ranks: int, islands: Sequence[Sequence[int]] | None) -> None:
        self.records = [RankRecord(rank) for rank in range(num_ranks)]
        self.islands = tuple(map(tuple, islands or [range(num_ranks)]))
        """Sets of ranks that reach each other's memory."""
        self.idle: set[int] = set()

    @property
    def has_ready(self) -> bool:
        """Whether some rank lives and has been ready."""
        return any(rank.is_ready for rank in self.records)

    @property
    def are_settled(self) -> bool:
        """Whether no rank starts or loads models."""
        return all(rank.can_work or rank.is_retired for rank in self.records)

    @property
    def are_loading(self) -> bool:
        """Whether some rank has yet to load the models of the last change."""
        return any(rank.is_loading for rank in self.records)

    @property
    def are_gone(self) -> bool:
        """Whether every rank stays away."""
        return all(rank.is_retired for rank in self.records)

    # What a policy and a decision need -------------------------------------------------------

    def free(self, ending: Sequence[Flight]) -> Set[int]:
        """Ranks that can take a task: idle ones, and those whose only task is about to end."""
        if not ending:
            return self.idle
        behind = [
            rank
            for flight in ending
            for rank in flight.dispatch.layout.ranks
            if len(self.records[rank].flights) == 1 and self.records[rank].can_work
        ]
        return self.idle.union(behind)

    def views(self, free: Set[int], models: frozenset[str]) -> tuple[RankView, ...]:
        """What policies see of the ranks that are ready, which hold these models."""
        views = []
        for rank in self.records:
            view, can_take = rank.view, rank.rank in free
            if view is None or view.can_take is not can_take:
                held = frozenset[str]() if rank.is_loading else models
                view = rank.view = RankView(rank.rank, rank.free_at_s, can_take, held, dict(rank.loras))
            if rank.is_ready:
                views.append(view)
        return tuple(views)

    def can_take(self, rank: int, now_s: float) -> bool:
        """Whether a rank is idle, or its only task is about to end."""
        record = self.records[rank]
        flights = record.flights
        return record.can_work and (not flights or (len(flights) == 1 and flights[0].is_ending(now_s)))

    def can_send(self, source: Layout, destination: Layout) -> bool:
        """Whether ranks can send what they hold: they reach each other, and none has to load models first.

        A GPU rank that loads maps the arena of a new peer afterwards, so both would wait for each other.
        """
        if any(self.records[rank].is_loading for rank in source.ranks):
            return False
        return share_island((*source.ranks, *destination.ranks), self.islands)

    def hold(self, layout: Layout, model: str, loras: str) -> bool:
        """Whether a model contains these LoRAs, and no others, on all ranks of a layout."""
        return all(self.records[rank].loras.get(model, "") == loras for rank in layout.ranks)

    # What happens to ranks -------------------------------------------------------------------

    def take(self, flight: Flight) -> None:
        """A task is dispatched."""
        for rank in flight.dispatch.layout.ranks:
            record = self.records[rank]
            record.flights.append(flight)
            record.view = None
            self.idle.discard(rank)

    def merge(self, layout: Layout, model: str, loras: str) -> None:
        """A task with these LoRAs is dispatched."""
        for rank in layout.ranks:
            self.records[rank].loras[model] = loras

    def leave(self, flight: Flight, *, at_s: float, times: Sequence[RankTimes] = ()) -> None:
        """A task has ended, or failed, on its ranks."""
        for each in times:
            record = self.records[each.rank]
            record.ended_s = max(record.ended_s, each.ended_s)
        for rank in flight.dispatch.layout.ranks:
            record = self.records[rank]
            record.flights.remove(flight)
            record.view = None
            if not record.flights:
                self._note_idle(record, since_s=at_s)

    def become_ready(self, rank: int, *, at_s: float) -> None:
        """Its worker has loaded the models of this moment and takes tasks."""
        self.records[rank].is_ready = True
        self._note_idle(self.records[rank], since_s=at_s)

    def load(self, models: Collection[str], load_s: float, *, at_s: float) -> None:
        """Every rank loads these models in place of others, after its present task."""
        for rank in self.records:
            rank.loras = {model: loras for model, loras in rank.loras.items() if model in models}
            rank.is_loading, rank.load_s, rank.view = not rank.is_retired, load_s, None
            rank.idle_since_s = max(rank.idle_since_s, at_s)
        self.idle.clear()

    def finish_loading(self, rank: int, *, at_s: float) -> None:
        self.records[rank].is_loading, self.records[rank].view = False, None
        self._note_idle(self.records[rank], since_s=at_s)

    def lose(self, event: RankLost) -> None:
        """The rank takes nothing until its successor is ready."""
        rank = self.records[event.rank]
        rank.is_ready, rank.is_loading, rank.view = False, False, None
        rank.is_retired = event.is_retired
        rank.loras.clear()
        self.idle.discard(event.rank)

    def outdate(self, ranks: Collection[int] | None = None) -> None:
        """Renew the views of these ranks, or of all."""
        for rank in range(len(self.records)) if ranks is None else ranks:
            self.records[rank].view = None

    def check(self) -> None:
        """Assert what always holds."""
        for rank in self.records:
            tasks = {each.dispatch.batch or each.dispatch.number for each in rank.flights}
            assert len(tasks) <= 2, f"rank {rank.rank} has {len(tasks)} tasks"
            is_idle = rank.can_work and not rank.flights
            assert (rank.rank in self.idle) is is_idle, f"rank {rank.rank}: idle is {not is_idle}"
            assert not (rank.is_retired and rank.is_ready), f"rank {rank.rank} is retired and ready"
            for flight in rank.flights:
                assert rank.rank in flight.dispatch.layout.ranks, f"rank {rank.rank} has a task of others"

    def _note_idle(self, rank: RankRecord, *, since_s: float) -> None:
        if rank.is_ready and not rank.flights:
            rank.idle_since_s = since_s
            if not rank.is_loading:
                self.idle.add(rank.rank)


@functools.lru_cache(maxsize=1024)
def share_island(ranks: tuple[int, ...], islands: tuple[tuple[int, ...], ...]) -> bool:
    """Whether these ranks reach each other's memory; cached, because every step asks about the same few."""
    return any(set(island).issuperset(ranks) for island in islands)


class Shares:
    """Rank seconds of the owners that have jobs: who is next where owners share the ranks.

    An owner without jobs saves nothing up: when its next job arrives, it begins with the seconds of the
    owner that has had the least. Nor does it pay for ranks that it had while nobody else wanted them.
    """

    def __init__(self) -> None:
        self._num_jobs: Counter[str | None] = Counter()
        self.served_s: dict[str | None, float] = {}
        """By owner, for comparison with each other."""
        self._least_s = 0.0

    def arrive(self, owner: str | None) -> None:
        """A job of this owner has arrived."""
        self._num_jobs[owner] += 1
        self.served_s.setdefault(owner, self._least_s)

    def serve(self, owner: str | None, rank_s: float) -> None:
        """A task of this owner has run."""
        if owner in self.served_s:
            self.served_s[owner] += rank_s
            self._least_s = min(self.served_s.values())

    def leave(self, owner: str | None) -> None:
        """A job that had arrived has ended."""
        self._num_jobs[owner] -= 1
        if not self._num_jobs[owner]:
            del self._num_jobs[owner], self.served_s[owner]

    def check(self) -> None:
        """Assert what always holds."""
        assert self._num_jobs.keys() == self.served_s.keys(), "owners without jobs have shares"
        assert min(self._num_jobs.values(), default=1) > 0, f"jobs of owners: {self._num_jobs}"
