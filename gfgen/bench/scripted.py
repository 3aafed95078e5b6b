"""Measured runs of the real control plane, whose policy is a script."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gfgen.errors import InterruptedRunError, WorkerError
from gfgen.graph import Trajectory
from gfgen.layout import Layout
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.control.control import Control
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event, OutputWritten, RankTimes, TaskDone
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes.job_memory import JobMemory
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.workers import ProcessBackend
from gfgen.snapshot import Decision, JobView, Snapshot
from gfgen.system.signals import SignalPipe

Place = Callable[[JobView], Layout]
"""The layout of a job's next task, which starts when these ranks are free."""


class MeasuredRun(Observer):
    def __init__(self) -> None:
        self.dispatches: dict[int, Dispatch] = {}
        self.done: dict[int, Sequence[RankTimes]] = {}
        """By successful dispatch: the times of its ranks, by slot."""
        self.written: dict[str, float] = {}
        """By job: seconds to write its file."""
        self.outcomes: list[JobOutcome] = []

    @property
    def errors(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error]

    def dispatched(self, dispatch: Dispatch) -> None:
        self.dispatches[dispatch.number] = dispatch

    def applied(self, event: Event) -> None:
        match event:
            case TaskDone():
                self.done[event.dispatch] = event.times
            case OutputWritten():
                self.written[event.job_id] = event.write_s

    def ended(self, outcome: JobOutcome) -> None:
        self.outcomes.append(outcome)


def placed_by(place: Place) -> NamedPolicy:
    """A policy from `place`; if jobs need the same ranks, the one with the most steps done goes first."""

    def decide(snapshot: Snapshot) -> list[Decision]:
        free, decisions = set(snapshot.free_ranks), []
        for view in sorted(snapshot.open.values(), key=lambda view: (-view.next_task.index, view.job_id)):
            layout = place(view)
            if free.issuperset(layout.ranks):
                free -= set(layout.ranks)
                decisions.append(Decision(view.next_task, layout))
        return decisions

    return NamedPolicy("measuring", decide)


def run_jobs(
    jobs: Sequence[AdmittedJob],
    pool: WorkerPool,
    record: MeasuredRun,
    *,
    policy: NamedPolicy,
    folder: Path,
    lookahead_s: float = 0.0,
    costs: CostModel | None = None,
    signals: SignalPipe | None = None,
) -> None:
    """Run jobs on a ready pool and record them.

    Raises: WorkerError when a job fails; InterruptedRunError when a signal comes first.
    """
    for job in jobs:  # files of an earlier measurement
        (folder / job.info.file).unlink(missing_ok=True)
    clock, costs = Clock(), costs or CostModel()
    state = State(
        jobs,
        RunStart(
            num_ranks=pool.num_ranks,
            lookahead_s=lookahead_s,
            last_number=pool.last_number,
            islands=pool.islands,
        ),
        clock=clock,
        costs=costs,
    )
    backend = ProcessBackend(pool, JobMemory(jobs, folder), clock=clock, signals=signals)
    control = Control(jobs, state=state, backend=backend, policy=policy, observers=[record])
    try:
        summary = control.run()
    finally:
        backend.close()
    if state.closing.stop_signal is not None:
        raise InterruptedRunError("stopped", signal_number=state.closing.stop_signal)
    if record.errors or summary.policy_fault:
        raise WorkerError((record.errors or [summary.policy_fault or ""])[0])


def copy_of(
    job: AdmittedJob, job_id: str, steps: int, *, arrival_s: float = 0.0, priority: int = 0
) -> AdmittedJob:
    """The same work under another id, with other steps and without deadline and timeout."""
    spec = replace(
        job.spec,
        id=job_id,
        steps=steps,
        arrival_s=arrival_s,
        deadline_s=None,
        deadline_at=None,
        timeout_s=None,
        priority=priority,
    )
    trajectory = Trajectory(job_id, steps, job.trajectory.artifacts)
    suffix = Path(job.info.file).suffix
    info = replace(
        job.info,
        asked=spec,
        spec=spec,
        num_tasks=trajectory.num_tasks,
        file=job_id + suffix,
        spec_hash=job_id,
    )
    return replace(job, info=info, trajectory=trajectory)


def new_copy_of(job: AdmittedJob, job_id: str, steps: int, *, occasion: str) -> AdmittedJob:
    """`copy_of` with another prompt, because ranks cache encoded prompts.

    The prompts end in five digits, so all have the same number of tokens.
    """
    number = zlib.crc32(f"{occasion} {job_id}".encode()) % 100_000
    spec = replace(job.spec, prompt=f"{job.spec.prompt} {number:05d}")
    return copy_of(replace(job, info=replace(job.info, spec=spec)), job_id, steps)
