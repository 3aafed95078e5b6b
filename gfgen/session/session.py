"""One run of the control loop on workers that are ready: what `gfgen run` and `gfgen serve` share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.control.control import Backend, Chooser, Control, Intake
from gfgen.runtime.control.metrics import Summary
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.observer import Observer
from gfgen.runtime.files.journal import Journal
from gfgen.runtime.files.start import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.predict.run_profile import keep_measured
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.workers import ProcessBackend, Requests
from gfgen.session.ranks import Ranks
from gfgen.session.warming import warm_ups_of
from gfgen.system.signals import SignalPipe


class LoopOptions(Protocol):
    """Those that both commands have."""

    @property
    def output_dir(self) -> Path: ...

    @property
    def ranks(self) -> Ranks: ...

    @property
    def policy(self) -> NamedPolicy: ...

    @property
    def grace_s(self) -> float: ...


def run_loop(
    pool: WorkerPool,
    todo: Sequence[AdmittedJob],
    options: LoopOptions,
    *,
    clock: Clock,
    start: RunStart,
    profile: Profile | None,
    signals: SignalPipe,
    observers: Sequence[Observer],
    residency: Residency | None,
    chooser: Chooser | None,
    journal: Journal | None = None,
    skipped: Sequence[AdmittedJob] = (),
    intake: Intake | None = None,
    requests: Requests | None = None,
    seen_through: Callable[[ProcessBackend], Backend] = lambda backend: backend,
    measured_path: Path | None = None,
) -> tuple[State, Summary]:
    """The state at the end, and the numbers; the workers can be used again.

    `clock` has started at `start.started_at`. `seen_through` gives what stands between the loop and
    its ranks. What tasks took is kept in the profile `measured_path`, however the run ends.

    Raises: InterruptedRunError when a second signal did not let steps end.
    """
    costs = CostModel(profile)
    state = State(todo, start, clock=clock, costs=costs)
    ranks = options.ranks
    backend = ProcessBackend(
        pool,
        todo,
        clock=clock,
        output_dir=options.output_dir,
        resume_points=start.resume,
        signals=signals,
        requests=requests,
        warm_ups=warm_ups_of(ranks.devices, options.policy) if ranks.has_graphs else None,
    )
    with contextlib.closing(backend):
        control = Control(
            todo,
            state=state,
            backend=seen_through(backend),
            clock=clock,
            policy=options.policy,
            journal=journal,
            observers=observers,
            skipped=skipped,
            intake=intake,
            chooser=chooser,
            residency=residency,
            grace_s=options.grace_s,
        )
        try:
            return state, control.run()
        finally:
            if measured_path is not None:
                keep_measured(
                    measured_path,
                    costs.classes,
                    device=ranks.device_name,
                    num_ranks=max(map(len, pool.islands)),
                    share_cores=not ranks.are_on_gpus and ranks.num_ranks > 1,
                )
