"""The jobs of a run that policies do not see yet, because a thousand others come first.

Policies take jobs by arrival, by deadline, or by work: the least or the most first. A run has a record of the
first `AHEAD` jobs in each of these orders. The others wait here, packed.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from gfgen.graph import Stage
from gfgen.job.reader import due_at
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.predict.cost import CostModel

AHEAD = 1_000
STEP = 100  # other jobs come into sight after this many have ended
Kind = tuple[str, str, int]  # model, shape, tasks: jobs of one kind that have not begun have equal durations


class Backlog(Observer):
    """Hands out jobs as others end. `len` is the number of those that wait, and iteration gives their ids."""

    def __init__(
        self,
        jobs: Sequence[AdmittedJob] = (),
        *,
        without: Collection[str] = (),
        first: Collection[str] = (),
        arrived_at: Callable[[], Mapping[tuple[str, str], float]] = dict,
        ahead: int = AHEAD,
    ) -> None:
        self._jobs, self._ahead = jobs, ahead + STEP
        self._ids: list[str | None] = []  # by place in `jobs`; None after the job was handed out
        self._kinds = Counter[Kind]()
        self._examples: dict[Kind, AdmittedJob] = {}
        self._first: list[int] = []  # that arrive later, are the first of their kind, or were begun before
        self.near: dict[str, int] = {}  # places of the jobs that were handed out and have not ended
        self._failed: list[int] = []
        self._num_ended = STEP  # jobs since `take` handed some out
        self._timed = array("L")  # jobs whose deadlines count from their arrivals
        digest, keys, now, known = hashlib.sha256(), array("d"), time.time(), functools.cache(arrived_at)
        places: dict[str, array[int]] = {}
        for place, job in enumerate(jobs):
            if job.job_id in without:
                self._ids.append(None)
                keys.extend((0, 0, 0))
                continue
            info, spec, kind = job.info, job.spec, _kind_of(job)
            digest.update(f"{job.job_id} {info.spec_hash}\n".encode())
            self._ids.append(job.job_id)
            self._kinds[kind] += 1
            if kind not in self._examples or spec.arrival_s > 0 or job.job_id in first:
                self._examples.setdefault(kind, job)
                self._first.append(place)
            arrival = now
            if spec.deadline_s is not None or spec.deadline_clock is not None:
                self._timed.append(place)
                arrival = known().get((job.job_id, info.spec_hash), now)
            due = due_at(spec, arrived_at=arrival)
            keys.extend((-spec.priority, math.inf if due is None else due, _work_of(job)))
            if spec.arrival_s <= 0:  # others are among the first
                places.setdefault(spec.model or "", array("L")).append(place)
        self.header = {"jobs": len(self), "jobs_hash": digest.hexdigest()} if self else {}  # of a journal
        orders = [iter(order) for own in places.values() for order in _orders(own, keys)]
        self._orders = [(rest, list[int]()) for rest in orders]  # each: places that wait, and near ones

    def __len__(self) -> int:
        return self._kinds.total()

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._ids

    def __iter__(self) -> Iterator[str]:
        return filter(None, self._ids)

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {job_id: place for place, job_id in enumerate(self._ids) if job_id is not None}

    def timed(self) -> Iterator[AdmittedJob]:
        """The waiting jobs whose deadlines count from their arrivals."""
        return (self._jobs[place] for place in self._timed if self._ids[place] is not None)

    def take(self) -> list[AdmittedJob]:
        """The jobs that come into sight now, in the order of the file."""
        if self._num_ended < STEP or not self:
            return []
        found, self._first, self._num_ended = set(self._first), [], 0
        present = {*self.near.values(), *found}
        for rest, near in self._orders:
            near[:] = [place for place in near if place in present]
            while len(near) < self._ahead and (place := next(rest, None)) is not None:
                if place in present or self._ids[place] is not None:
                    near.append(place)
                    found |= {place} - present
                    present.add(place)
        return [self._out(place) for place in sorted(found) if self._ids[place] is not None]

    def named(self, job_id: str) -> list[AdmittedJob]:
        """The job of this id comes into sight now, if it waits."""
        place = self._places.get(job_id) if self else None
        return [] if place is None or self._ids[place] is None else [self._out(place)]

    def _out(self, place: int) -> AdmittedJob:
        job = self._jobs[place]
        self.near[job.job_id], self._ids[place] = place, None
        self._kinds[_kind_of(job)] -= 1
        return job

    def drop(self, job_id: str) -> int | None:
        """A job that was handed out is no job of the run any more; its place, if it was one."""
        self._num_ended += 1
        return self.near.pop(job_id, None)

    def ended(self, outcome: JobOutcome) -> None:
        place = self.drop(outcome.info.job_id)
        if place is not None and outcome.status == "failed":
            self._failed.append(place)

    @property
    def failed(self) -> list[AdmittedJob]:
        return [self._jobs[place] for place in sorted(self._failed)]

    def work_s(self, costs: CostModel) -> float:
        """Predicted work of the jobs that wait, on one rank."""
        kinds = [(self._examples[kind], number) for kind, number in self._kinds.items() if number]
        return sum(
            number * costs.remaining_s(costs.class_of(job), job.trajectory.task(0), job.trajectory.num_tasks)
            for job, number in kinds
        )


def _kind_of(job: AdmittedJob) -> Kind:
    return job.spec.model or "", job.shape, job.trajectory.num_tasks


def _work_of(job: AdmittedJob) -> float:
    """For comparison with other jobs of its model."""
    num_steps = job.trajectory.num_steps - len(job.trajectory.approximate)
    return num_steps * job.flops[Stage.DENOISE] + job.flops[Stage.ENCODE] + job.flops[Stage.DECODE]


def _orders(places: array[int], keys: Sequence[float]) -> Iterator[array[int]]:
    """By arrival, deadline (as `edf`), least and most work, if these differ; `keys` has three for each.

    A policy's new order goes here, too. The least work of any priority is what fits into little time or room.
    """

    def sorted_by(*signs: int) -> array[int]:
        columns = [(abs(sign) - 1, 1 if sign > 0 else -1) for sign in signs]
        return array("L", sorted(places, key=lambda x: [way * keys[3 * x + idx] for idx, way in columns]))

    ways: list[tuple[int, ...]] = (
        [(1,), (1, 2, 3)] if any(keys[3 * x + 1] < math.inf for x in places) else [(1,)]
    )
    if any(keys[3 * x + 2] != keys[3 * places[0] + 2] for x in places):
        ways += [(1, 3), (1, -3), (3,)]
    return (sorted_by(*way) for way in ways)
