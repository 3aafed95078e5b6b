"""The memory of each job for its workers: the job, and its slab from its first task on."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import GivenUp
from gfgen.runtime.files import resume
from gfgen.runtime.files.resume import ResumePoint
from gfgen.runtime.ipc.messages import StartJob
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.processes.child import RankProcess
from gfgen.runtime.processes.pool import WorkerPool

logger = logging.getLogger(__name__)


class JobMemory:
    def __init__(
        self,
        jobs: Sequence[AdmittedJob],
        output_dir: Path,
        resume_points: Mapping[str, ResumePoint] | None = None,
    ) -> None:
        self.jobs = {job.job_id: job for job in jobs}
        self.output_dir = output_dir
        self._resume_points = dict(resume_points or {})
        self._slabs: dict[str, int] = {}

    def slab(self, job_id: str) -> int:
        """The job's slab; made at its first task, with the state that an earlier run kept.

        Raises: OSError when there is no descriptor for it; OSError, ValueError or KeyError when the kept
        state cannot be read.
        """
        if job_id not in self._slabs:
            job, point = self.jobs[job_id], self._resume_points.get(job_id)
            plan = SlabPlan.of(job.trajectory)
            self._slabs[job_id] = resume.restore(point, job) if point else Slab.create(plan, name=job_id)
            self._resume_points.pop(job_id, None)
        return self._slabs[job_id]

    def introduce(self, job_id: str, worker: RankProcess) -> None:
        """Make a job known to a worker, before its first task there."""
        if job_id not in worker.jobs:
            job = self.jobs[job_id]
            message = StartJob(job.spec, job.trajectory, str(job.checkpoint), job.shape)
            worker.tell(message, (self.slab(job_id),))
            worker.jobs.add(job_id)

    def save(
        self, job_id: str, pool: WorkerPool, *, next_index: int, producer: int, given_up: GivenUp
    ) -> None:
        """Keep a stopped job's state for the next run; if that fails, the job starts again then."""
        if job_id in self._resume_points:  # none of its tasks began, so the kept state is unchanged
            return
        job, path = self.jobs[job_id], resume.resume_path(self.output_dir, job_id)
        point = ResumePoint(next_index, producer, pool.last_number, path, given_up)
        try:
            resume.save(
                point,
                job,
                self.slab(job_id),
                weights=pool.models.weights_mark(job.checkpoint),
                computed_with=pool.settings.computed_with,
            )
        except OSError as error:
            logger.warning("job %s will start at the beginning: its state is not kept (%s)", job_id, error)

    def release(self, job_id: str) -> None:
        if job_id in self._slabs:
            os.close(self._slabs.pop(job_id))
        self._resume_points.pop(job_id, None)
        self.jobs.pop(job_id, None)
        resume.forget(self.output_dir, job_id)

    def close(self) -> None:
        for fd in self._slabs.values():
            os.close(fd)
        self._slabs.clear()
