"""The open jobs as policies see them: by id, and sorted by a policy's key."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from gfgen.snapshot import JobView

SortKey = Callable[[JobView], Any]
JobKind = tuple[str, str, int, int]  # model, shape, tasks, approximate steps: equally long if not started

_NUM_PLACES = 2**40
MAX_ORDERS = 4  # a policy has one or two; a key created at each call evicts others
MAX_CHANGED = 10_000  # an order with more changes is dropped: its policy no longer decides


def kind_of(view: JobView) -> JobKind:
    return view.model, view.shape, view.num_tasks, view.num_approximate


def is_unbegun(view: JobView) -> bool:
    return view.next_task.index == 0


class OpenJobs:
    """Views of the open jobs, in the order in which they opened."""

    def __init__(self) -> None:
        self._views: dict[str, JobView] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = itertools.count()
        self._orders: dict[SortKey, _SortedViews] = {}
        self._num_unbegun: Counter[JobKind] = Counter()
        self.generation = 0  # rises with every change

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._views

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._views)

    @property
    def unbegun_kinds(self) -> Set[JobKind]:
        return self._num_unbegun.keys()

    def put(self, view: JobView, *, place: int | None = None) -> None:
        """Add or replace a job; it comes last among equals, or by its place before all without one."""
        self.discard(view.job_id)
        self._views[view.job_id] = view
        self._numbers[view.job_id] = next(self._next_number) if place is None else place - _NUM_PLACES
        if is_unbegun(view):
            self._num_unbegun[kind_of(view)] += 1
        self._note(view.job_id)

    def discard(self, job_id: str) -> None:
        view = self._views.pop(job_id, None)
        if view is None:
            return
        del self._numbers[job_id]
        if is_unbegun(view):
            kind = kind_of(view)
            self._num_unbegun[kind] -= 1
            if not self._num_unbegun[kind]:
                del self._num_unbegun[kind]
        self._note(job_id)

    def renew(self, view_of: Callable[[str], JobView]) -> None:
        self.generation += 1
        self._orders.clear()
        for job_id in self._views:
            self._views[job_id] = view_of(job_id)

    def frozen(self) -> dict[str, JobView]:
        """The views by id. This keeps the copy, which has no gaps: the next copy is five times faster."""
        views, self._views = self._views, self._views.copy()
        return views

    def sorted(self, key: SortKey) -> list[JobView]:
        """A new list, smallest key first, ties in the order of opening; maintained between calls."""
        order = self._orders.pop(key, None) or _SortedViews(key, changed=set(self._views))
        order.catch_up(self._views, self._numbers)
        if len(self._orders) >= MAX_ORDERS:
            del self._orders[next(iter(self._orders))]
        self._orders[key] = order
        return order.views.copy()

    def _note(self, job_id: str) -> None:
        self.generation += 1
        for order in self._orders.values():
            order.changed.add(job_id)
            if len(order.changed) > MAX_CHANGED:
                self._orders.clear()
                break


@dataclass(slots=True)
class _SortedViews:
    """One sorted list. Keys are computed when a policy asks, not when the state changes."""

    key: SortKey
    changed: set[str]  # jobs added, changed or removed since the last update of the list
    places: dict[str, tuple[Any, int]] = field(default_factory=dict)  # its sort key, and its number
    keys: list[tuple[Any, int]] = field(default_factory=list)  # the places in order, as `views`
    views: list[JobView] = field(default_factory=list)

    def catch_up(self, views: Mapping[str, JobView], numbers: Mapping[str, int]) -> None:
        if len(self.changed) * 4 > len(views):
            self.places = {job_id: (self.key(view), numbers[job_id]) for job_id, view in views.items()}
            pairs = sorted(self.places.items(), key=lambda pair: pair[1])
            self.keys, self.views = [place for _, place in pairs], [views[job_id] for job_id, _ in pairs]
            self.changed.clear()
        for job_id in self.changed:
            if job_id in self.places:
                at = bisect_left(self.keys, self.places.pop(job_id))
                del self.keys[at], self.views[at]
            if job_id in views:
                place = (self.key(views[job_id]), numbers[job_id])
                at = bisect_left(self.keys, place)
                self.keys.insert(at, place)
                self.views.insert(at, views[job_id])
                self.places[job_id] = place
        self.changed.clear()


class OpenJobOrders:
    """`OpenJobs.sorted` for one snapshot, until the open jobs change."""

    __slots__ = ("_generation", "_jobs", "_joining", "_of")

    def __init__(self, jobs: OpenJobs, of: Mapping[str, JobView], *, joining: list[JobView]) -> None:
        self._jobs = jobs
        self._generation = jobs.generation
        self._of = of
        self._joining = joining  # jobs of the snapshot that are not open yet

    def sorted(self, views: Mapping[str, JobView], key: SortKey) -> list[JobView] | None:
        """These views in order; None if they are not the snapshot's, or the snapshot is out of date."""
        if views is not self._of or self._generation != self._jobs.generation:
            return None
        in_order = self._jobs.sorted(key)
        for view in self._joining:
            insort(in_order, view, key=key)
        if len(in_order) > len(views):  # jobs that would not be done by closing time are left out
            in_order = [view for view in in_order if view.job_id in views]
        return in_order
