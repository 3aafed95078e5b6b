"""A session on a cluster: the folder and its records are the driver's, the ranks are those of nodes."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gfgen.cluster.driver import driver_of, start_of
from gfgen.cluster.fleet import Fleet
from gfgen.cluster.ray_cluster import RayCluster
from gfgen.errors import Problem
from gfgen.job.spec import input_files
from gfgen.layout import MAX_RANKS
from gfgen.runtime.control.metrics import Summary
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.observer import JobInfo, Observer
from gfgen.runtime.files.journal import JOURNAL_NAME, first_arrivals
from gfgen.runtime.files.manifest import MANIFEST_NAME, ManifestWriter
from gfgen.runtime.predict.profile_file import Profile
from gfgen.session.admission import Admission, warn_of_passed_deadlines
from gfgen.session.session import Arrivals, Session, SessionOptions, known_profile

logger = logging.getLogger(__name__)

SPARE_SLOTS = 16
"""For nodes that join during the run."""


@dataclass(kw_only=True)
class ClusterAdmission(Admission):
    """Looks models up on nodes; each node checks its own memory."""

    cluster: RayCluster
    has_inputs: bool = False
    """Nodes can read the files that jobs begin with."""

    def check(self, checkpoints: Collection[Path]) -> Mapping[Path, int]:
        return {}

    def _refuse_large(
        self, jobs: Sequence[AdmittedJob], models_bytes: Mapping[Path, int]
    ) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        if self.has_inputs:
            return jobs, ()
        accepted = "nodes cannot read files of this machine; --shared says that all have the same folders"
        reading = [job for job in jobs if input_files(job.spec)]
        problems = [
            Problem(job.spec.line, name, str(path), accepted)
            for job in reading
            for name, path in input_files(job.spec)[:1]
        ]
        return [job for job in jobs if not input_files(job.spec)], problems

    def _look_up(self, name: str) -> ResolvedModel:
        return self.cluster.find_model(name)


class ClusterSession(Session):
    """Inside `with` it holds the output folder; `load` waits for the first node."""

    def __init__(self, options: SessionOptions, cluster: RayCluster) -> None:
        super().__init__(options)
        self._cluster = cluster
        self._last_number = 0

    @functools.cached_property
    def admission(self) -> Admission:
        ranks = self.options.ranks
        return ClusterAdmission(
            default_model=self.options.model,
            devices=ranks.devices,
            has_random_weights=ranks.has_random_weights,
            vae_dtype=ranks.vae_dtype,
            trusts_code=ranks.trusts_code,
            bounds=self.options.job_bounds,
            cluster=self._cluster,
            has_inputs=self._cluster.options.is_shared,
        )

    def load(
        self, jobs: Sequence[AdmittedJob], *, models: Sequence[str] = (), are_all_needed: bool = False
    ) -> None:
        """Let nodes load the models of these jobs; returns when the first is ready.

        Raises: InputError when no node can; InterruptedRunError when a signal comes first.
        """
        names = sorted({*models, *(job.spec.model or "" for job in jobs)})
        self.checkpoints = frozenset(job.checkpoint for job in jobs)
        with self.signals.interrupting("nodes were starting; nothing was started"):
            self._cluster.load(names)

    def run(
        self,
        jobs: Sequence[AdmittedJob],
        *,
        options: SessionOptions | None = None,
        observers: Sequence[Observer] = (),
        skipped: Sequence[AdmittedJob] = (),
        arrivals: Arrivals | None = None,
        profile: Profile | None = None,
        clock: Clock | None = None,
    ) -> Summary:
        """Run the driver's loop until all jobs have ended or the run stops."""
        assert arrivals is None, "a cluster's jobs are known when it starts"
        options, clock = options or self.options, clock or Clock()
        profile = profile or known_profile(options.ranks)
        most = max([MAX_RANKS, *(node.num_ranks for node in self._cluster.joined)])
        fleet = Fleet.of(len(self._cluster.joined) + SPARE_SLOTS, num_ranks=most)
        start = start_of(
            fleet,
            started_at=clock.started_at,
            last_number=self._last_number,
            arrived_at=first_arrivals(options.output_dir / JOURNAL_NAME),
            closes_s=None if options.closes_at is None else options.closes_at - clock.started_at,
            grace_s=options.grace_s,
        )
        warn_of_passed_deadlines(jobs, now=clock.started_at, arrived_at=start.arrived_at)
        manifest = ManifestWriter(options.output_dir / MANIFEST_NAME, made_with=self._made_with)
        observers = (manifest, *observers)
        with contextlib.ExitStack() as stack:
            for observer in observers:
                stack.callback(observer.close)
            self._cluster.begin_run(fleet, clock)
            driver = driver_of(
                jobs,
                self._cluster,
                fleet,
                policy=options.policy,
                clock=clock,
                start=start,
                profile=profile,
                signals=self.signals,
                journal=self._journal(jobs, start, options, profile, stack),
                observers=observers,
                skipped=skipped,
            )
            try:
                summary = driver.run()
            finally:
                self._last_number = driver.state.flights.last_number
        closing, left = driver.state.closing, driver.state.jobs.records
        self.stop_signal = closing.stop_signal if left else None
        return replace(summary, busy_s=(), waited_s=(), moved_s=())

    def _made_with(self, info: JobInfo) -> Mapping[str, Any] | None:
        """As the first node says."""
        for node in self._cluster.joined:
            if node.ready is not None:
                return node.ready.made_with.get(info.spec.model or "")
        return None
