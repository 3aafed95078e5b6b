"""A session on a cluster: the folder and its records are the driver's, the ranks are those of nodes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gfgen.cluster.driver import Driver, Links, driver_of, start_of
from gfgen.cluster.node import Fleet
from gfgen.cluster.ray_cluster import RayCluster
from gfgen.cluster.watchers import Watchers
from gfgen.errors import ModelError, Problem
from gfgen.job.spec import input_files
from gfgen.layout import MAX_RANKS
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.core.admission import AdmittedJob, Judged, ResolvedModel
from gfgen.runtime.core.events import Clock
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobInfo, Observer
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.processes.workers import Requests
from gfgen.session.admission import Admission, Models
from gfgen.session.memory import HostMemory
from gfgen.session.session import Arrivals, RunSetup, Session, SessionOptions
from gfgen.system.signals import SignalPipe

SPARE_SLOTS = 16


@dataclass(kw_only=True)
class NodeModels(Models):
    cluster: RayCluster | None
    """None in another process, which knows the models that are loaded."""

    def __getstate__(self) -> Mapping[str, Any]:
        return self.__dict__ | {"cluster": None}

    def look_up(self, name: str) -> ResolvedModel:
        if self.cluster is None:
            raise ModelError(f"model {name!r} is not loaded; {self.help_}")
        return self.cluster.find_model(name)

    def try_calls(self, jobs: Sequence[AdmittedJob], *, may_ask: bool = True) -> Judged:
        return jobs, ()  # this machine may lack the files of models


@dataclass(kw_only=True)
class NodeMemory(HostMemory):
    has_inputs: bool = False
    """Nodes can read the files that jobs begin with."""

    def fit(self, jobs: Sequence[AdmittedJob], *, is_new: bool = True) -> Judged:
        accepted = "nodes cannot read files of this machine; --shared says that all have the same folders"
        kept, problems = list[AdmittedJob](), list[Problem]()
        for job in jobs:
            if is_new and not self.has_inputs and (files := input_files(job.spec)):
                name, path = files[0]
                problems.append(Problem(job.spec.line, name, str(path), accepted))
            else:
                kept.append(job)
        fitting, unfit = self.patches.fitting(kept)
        return fitting, (*problems, *unfit)


class ClusterSession(Session):
    """Inside `with` it holds the output folder; `load` waits for the first node."""

    def __init__(self, options: SessionOptions, cluster: RayCluster) -> None:
        super().__init__(options)
        self._cluster = cluster
        self._last_number = 0
        self._fleet = Fleet.of(0, num_ranks=0)

    @functools.cached_property
    def admission(self) -> Admission:
        own = self.options.ranks.admission(self.options.model, bounds=self.options.job_bounds)
        memory = NodeMemory(devices=self.options.ranks.devices, has_inputs=self._cluster.options.is_shared)
        return replace(own, models=NodeModels(**vars(own.models), cluster=self._cluster), memory=memory)

    def load(
        self, jobs: Sequence[AdmittedJob], *, models: Sequence[str] = (), are_all_needed: bool = False
    ) -> None:
        """Let nodes load models until one is ready. Raises: InputError if none can; InterruptedRunError."""
        names = sorted({*models, *(job.spec.model or "" for job in jobs)})
        self.checkpoints = frozenset(self.admission.models.find(name).checkpoint for name in names)
        with self.signals.interrupting("nodes were starting; nothing was started"):
            self._cluster.load(names)

    def warm_up(self, jobs: Sequence[AdmittedJob], *, are_all_needed: bool = False) -> None:
        """No effect: that is up to nodes."""

    @property
    def num_own_ranks(self) -> int:
        return 0

    def run(self, jobs: Sequence[AdmittedJob], **options: Any) -> Summary:
        """As of any session; times on ranks are those of nodes, which the summary does not have."""
        return replace(super().run(jobs, **options), num_ranks=0, busy_s=0.0, waited_s=0.0, moved_s=0.0)

    def _start(
        self, jobs: Sequence[AdmittedJob], options: SessionOptions, clock: Clock, arrivals: Arrivals
    ) -> RunStart:
        joined = self._cluster.joined
        most = max([MAX_RANKS, *(node.num_ranks for node in joined)])
        # A new one for each run: nodes join it again.
        self._fleet = Fleet.of(len(joined) + SPARE_SLOTS, num_ranks=most)
        return start_of(
            self._fleet,
            started_at=clock.started_at,
            last_number=self._last_number,
            arrived_at=self._first_arrivals(jobs, options, arrivals),
            closes_s=None if options.closes_at is None else options.closes_at - clock.started_at,
            grace_s=options.grace_s,
        )

    def _control(
        self,
        jobs: Sequence[AdmittedJob],
        setup: RunSetup,
        stack: contextlib.ExitStack,
        *,
        observers: Sequence[Observer] = (),
        **records: Any,
    ) -> Control:
        arrivals, watchers = setup.arrivals, Watchers(observers)
        inputs: list[Requests | SignalPipe] = [self.signals]
        inputs += [arrivals.requests] if arrivals.requests is not None else []
        scale = self._cluster.scale if self._cluster.options.scales else None
        self._cluster.begin_run(setup.clock, inputs)
        driver = driver_of(
            jobs,
            self._cluster,
            self._fleet,
            policy=setup.options.policy,
            clock=setup.clock,
            start=setup.start,
            profile=setup.profile,
            links=Links(inputs, watchers, self._cluster.tell, scale),
            steering=Steering(intake=arrivals.intake, on_turn=arrivals.on_turn),
            observers=[watchers],
            **records,
        )
        stack.callback(self._note_numbers, driver)
        return driver

    def _note_numbers(self, driver: Driver) -> None:
        """The next run's attempts go on from here, so that late results of this one are none of its own."""
        self._last_number = driver.state.flights.last_number

    def _made_with(self, info: JobInfo) -> Mapping[str, Any] | None:
        for node in self._cluster.joined:
            if node.ready is not None:
                return node.ready.made_with.get(info.spec.model or "")
        return None
