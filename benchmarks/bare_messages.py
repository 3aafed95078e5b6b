"""Messages between a benchmark and its bare workers (worker_bare.py)."""

from __future__ import annotations

from dataclasses import dataclass

from gfgen.job.spec import JobSpec
from gfgen.layout import Layout


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
