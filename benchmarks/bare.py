"""Jobs on ranks that nobody schedules: what a run's control plane costs is seen beside it.

The ranks' side is benchmarks/worker_bare.py: the same processes, adapters and exchanges as in a run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gfgen.errors import WorkerError
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.processes.child import Lost
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.starting import hear
from gfgen.system.signals import SignalPipe

WORKER_MAIN = "benchmarks.worker_bare:main"
"""Of a pool whose ranks know bare loops."""
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class RunBare:
    """Run jobs one after the other without a control plane, for comparisons; answer `BareTimes`.

    For all workers of worker_bare.py at once. Each task of each job takes one number, from `first_number` on.
    """

    first_number: int
    spec: JobSpec
    checkpoint: str
    layouts: tuple[Layout, ...]
    """One for each task of a job; every rank runs encode and prepare for itself."""
    incarnations: tuple[int, ...]
    """Of all ranks, by rank."""
    num_jobs: int

    @property
    def last_number(self) -> int:
        return self.first_number + self.num_jobs * len(self.layouts) - 1


@dataclass(frozen=True, slots=True)
class BareTimes:
    """Durations of the jobs of `RunBare`."""

    jobs_s: tuple[float, ...]
    steps_s: tuple[float, ...]
    """By job, from the start of the first step to the end of the last one."""


def run_bare(
    pool: WorkerPool,
    job: AdmittedJob,
    layouts: tuple[Layout, ...],
    *,
    num_jobs: int,
    signals: SignalPipe | None = None,
) -> list[BareTimes]:
    """The same job so many times on a pool of bare workers without a control plane, by rank.

    Raises: WorkerError when a rank dies, or does not answer; InterruptedRunError at a signal, after which
            ranks are still at it, and the pool is good for nothing but being closed.
    """
    incarnations = tuple([worker.incarnation for worker in pool.workers])
    message = RunBare(pool.last_number + 1, job.spec, str(job.checkpoint), layouts, incarnations, num_jobs)
    pool.last_number = message.last_number
    for worker in pool.workers:
        worker.tell(message)
    answers: dict[int, BareTimes] = {}
    deadline_s = time.monotonic() + PATIENCE_S
    while len(answers) < pool.num_ranks:
        if time.monotonic() > deadline_s:
            raise WorkerError(f"the bare loop has not ended after {PATIENCE_S:g} s")
        for worker, answer in hear(pool, signals, doing="ranks ran a bare loop"):
            if isinstance(answer, BareTimes):
                answers[worker.rank] = answer
            elif isinstance(answer, Lost):
                raise WorkerError(f"{worker.name} died in a bare loop")
    return [answers[rank] for rank in sorted(answers)]
