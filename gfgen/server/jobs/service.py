"""Accepts, follows, cancels and removes jobs: the layer between HTTP, the store and the run.

Runs in the front's event loop. The store is the authority: a job is accepted once the store has it, and has
ended once the store records how. `RunMirror` is updated and the run is notified after that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gfgen.errors import JobFileError, OutputError, Problem
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.manifest import manifest_entry
from gfgen.server.jobs import files, job_requests
from gfgen.server.jobs.job_requests import RequestedJob
from gfgen.server.jobs.mirror import MAX_SHOWN_FINISHED, RunMirror
from gfgen.server.jobs.served_job import ServedJob
from gfgen.server.jobs.store import Ended, Ending, JobFacts, KeyTakenError, RequestKey, Store, StoredJob
from gfgen.server.protocol.limits import ServerLimits
from gfgen.server.protocol.link import CancelJobs, OpenJobIds, OutcomesStored, RunInfo, SetPolicy, SubmitJobs
from gfgen.server.protocol.problems import ApiError, without_folders
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

FORECAST_S = 0.5
SUBMITTED_AT_ONCE = 8
RETRY_S = 5.0
"""Pause before a failed write to the store is retried."""
THUMBNAILS_NAME = ".thumbnails"
FOLDERS = (job_requests.INPUTS_NAME, THUMBNAILS_NAME)
_ENDED: dict[str, Ended] = {"done": "completed", "failed": "failed", "cancelled": "cancelled"}


class JobService:
    """The jobs of this server. `send` passes a message to the run."""

    def __init__(
        self,
        *,
        store: Store,
        mirror: RunMirror,
        folder: Path,
        limits: ServerLimits,
        send: Callable[[Any], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.mirror = mirror
        self.folder = folder
        self.limits = limits
        self._send = send
        self._now = now
        self._num_reserved = 0
        """Jobs that are being written to the store."""
        self._pictures = asyncio.Semaphore(1)
        """Limits how many pictures are decoded at the same time."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._folders = {str(folder)}
        """Paths of this server and its models; clients do not see them."""

    # Notes from the run -----------------------------------------------------------------------------

    async def hear(self, notes: Sequence[Any]) -> None:
        """Apply the run's notes in order; outcomes of jobs go to the store first."""
        outcomes: list[JobOutcome] = []
        for note in notes:
            if isinstance(note, JobOutcome):
                outcomes.append(note)
                continue
            if isinstance(note, RunInfo):
                await self._open(note)
            self.mirror.apply(note)
        if outcomes:
            await self._note_ends(outcomes)

    async def _open(self, run_info: RunInfo) -> None:
        """The run is ready: submit the open jobs of the store, except those that are done or impossible."""
        await self._note_finished_files()
        records, jobs = [], []
        for facts, spec in self.store.open_jobs():
            resumed = job_requests.resumed_spec(facts, spec, folder=self.folder, now=self._now())
            admitted, problems = run_info.admit_again([resumed])
            if problems:
                await self._refuse(facts, problems)
            else:
                records.append(ServedJob(facts))
                jobs.append(admitted[0])
        for stored in reversed(self.store.last_ended(MAX_SHOWN_FINISHED)):
            self.mirror.finished.appendleft(self.served(stored).shown())
        self.mirror.add(records)
        self._submit(jobs)
        self._send(OpenJobIds(tuple(job.job_id for job in jobs)))
        if jobs:
            logger.info("resuming %s", counted(len(jobs), "open job"))

    async def _note_finished_files(self) -> None:
        """Record jobs as completed if their file exists: a server that was killed could not record it.

        If only this process was killed, the run soon sends their full outcomes, which are then added.
        """
        endings = []
        for facts, _ in self.store.open_jobs():
            stat = _stat(self.folder / facts.file)
            if stat is None:
                continue
            met = None if facts.deadline_at is None else stat.st_mtime <= facts.deadline_at
            endings.append(
                Ending(
                    facts.id,
                    "completed",
                    completed_at=max(stat.st_mtime, facts.created_at),
                    size_bytes=stat.st_size,
                    met_deadline=met,
                    step=facts.steps,
                )
            )
        if endings:
            await self._end_all(endings)

    async def _refuse(self, facts: JobFacts, problems: Sequence[Problem]) -> None:
        """Fail a job that an earlier server accepted and this one cannot run."""
        text = "; ".join(str(problem) for problem in problems[:5])
        logger.warning("job %s cannot be resumed: %s", facts.id, text)
        ending = Ending(
            facts.id,
            "failed",
            self._now(),
            error_code="cannot_be_done",
            error_message=self._public(text),
        )
        await self._end_all([ending])

    async def _note_ends(self, outcomes: Sequence[JobOutcome]) -> None:
        endings = [self._ending(outcome) for outcome in outcomes]
        firsts = await self._end_all(endings)
        for outcome, ending, is_first in zip(outcomes, endings, firsts, strict=True):
            if is_first:
                self._ended(ending)
            elif ending.status == "completed":
                await self._drop_unwanted(outcome)
        self._send(OutcomesStored(tuple(ending.id for ending in endings)))

    async def _end_all(self, endings: Sequence[Ending]) -> list[bool]:
        """Record these endings; retry until it succeeds, since the disk may be full."""
        while True:
            try:
                return await self.store.end_all(endings)
            except OutputError:  # the store has logged it
                await asyncio.sleep(RETRY_S)

    def _public(self, text: str) -> str:
        return without_folders(text, known=self._folders)

    def _ending(self, outcome: JobOutcome) -> Ending:
        error = None if outcome.error is None else self._public(outcome.error)
        outcome = replace(outcome, error=error, warnings=tuple(map(self._public, outcome.warnings)))
        job_id = outcome.info.job_id
        record = self.mirror.records.get(job_id)
        status = _ENDED[outcome.status]
        return Ending(
            job_id,
            status,
            completed_at=self.mirror.lanes.at(outcome.ended_s),
            started_at=None if outcome.started_s is None else self.mirror.lanes.at(outcome.started_s),
            size_bytes=None if outcome.written is None else outcome.written.size_bytes,
            met_deadline=outcome.met_deadline,
            step=outcome.info.spec.steps or 0 if status == "completed" else record.step if record else 0,
            error_code=None if outcome.error is None else _code(outcome),
            error_message=outcome.error,
            manifest=manifest_entry(outcome, written_at=self._now()),
        )

    def _ended(self, ending: Ending) -> None:
        record = self.mirror.end(ending.id, ending, expires_at=ending.completed_at + self.limits.keep_s)
        if record is not None and record.facts.input_file is not None:
            self._unlink(self._input(record.facts.input_file))

    async def _drop_unwanted(self, outcome: JobOutcome) -> None:
        """Remove the file of a job that was cancelled while the file was being written."""
        stored = self.store.job(outcome.info.job_id)
        if stored is None or (stored.ending is not None and stored.ending.status != "completed"):
            self._unlink(self.folder / outcome.info.file)

    # Requests ---------------------------------------------------------------------------------------

    def check_ready(self) -> RunInfo:
        """The ready run; raises ApiError with the reason if there is none."""
        if self.mirror.status != "ready" or self.mirror.run_info is None:
            raise self.not_ready()
        return self.mirror.run_info

    def not_ready(self) -> ApiError:
        return ApiError(503, self.mirror.reason or "not ready", code="not_ready", retry_after_s=5)

    async def take(self, requested: Sequence[RequestedJob], *, key: RequestKey | None = None) -> list[str]:
        """Accept jobs and return their ids, or the ids that an earlier request with this key created.

        Raises: ApiError or OutputError if they are not accepted; then nothing is stored.
        """
        if key is not None and (taken := self.store.request(key, now=self._now())):
            return _same(taken)
        run_info = self.check_ready()
        async with self._reserved(len(requested)):
            try:
                jobs = await self._admitted(requested, run_info)
            except BaseException:  # a thread may still write a picture; the next start removes it (front.py)
                self._drop_pictures(requested)
                raise
            try:
                await self._accept(jobs, batch_id=None, key=key)
            except KeyTakenError as taken:
                self._drop_pictures(requested)
                return _same(taken)
            except Exception:  # not CancelledError: the jobs may have been accepted all the same
                self._drop_pictures(requested)
                raise
        return [job.job_id for _, job in jobs]

    async def take_batch(
        self,
        requested: Sequence[RequestedJob],
        *,
        batch_id: str,
        key: RequestKey | None,
        problems: Sequence[Problem],
        skip_invalid: bool,
    ) -> tuple[str, Sequence[Problem] | None]:
        """Accept the jobs of a file; returns the batch id and the problems of the jobs that were skipped.

        `problems` are those already found in the file. If an earlier request with this key created the
        batch, its problems are unknown (None).

        Raises: as `take`; JobFileError with all problems, unless they may be skipped and valid jobs remain.
        """
        if key is not None and (taken := self.store.request(key, now=self._now())):
            return _same(taken)[0], None
        run_info = self.check_ready()
        async with self._reserved(len(requested)):
            jobs, refused = await asyncio.to_thread(job_requests.admitted_of_file, requested, run_info.admit)
            problems = sorted((*problems, *refused), key=lambda problem: problem.line or 0)
            if problems and not (skip_invalid and jobs):
                raise JobFileError("the job file", tuple(problems))
            try:
                await self._accept(jobs, batch_id=batch_id, key=key)
            except KeyTakenError as taken:
                return _same(taken)[0], None
        return batch_id, problems

    async def _accept(
        self,
        jobs: Sequence[tuple[RequestedJob, AdmittedJob]],
        *,
        batch_id: str | None,
        key: RequestKey | None,
    ) -> None:
        """Store jobs and submit them to the run."""
        now = self._now()
        accepted = [job_requests.accepted(one, job, now=now) for one, job in jobs]
        await self.store.accept(accepted, batch_id=batch_id, key=key, now=now)
        self.mirror.add(ServedJob(one.facts) for one in accepted)
        self._submit([job for _, job in jobs])

    def _submit(self, jobs: Sequence[AdmittedJob]) -> None:
        self._folders |= {str(job.checkpoint) for job in jobs}
        for start in range(0, len(jobs), SUBMITTED_AT_ONCE):
            self._send(SubmitJobs(tuple(jobs[start : start + SUBMITTED_AT_ONCE])))

    async def _admitted(
        self, requested: Sequence[RequestedJob], run_info: RunInfo
    ) -> Sequence[tuple[RequestedJob, AdmittedJob]]:
        """The admitted jobs; their pictures are checked and saved."""
        if all(one.picture is None for one in requested):
            return job_requests.admitted(requested, run_info.admit)
        with_pictures = [await self._with_picture(one) for one in requested]
        return await asyncio.to_thread(job_requests.admitted, with_pictures, run_info.admit)

    async def _with_picture(self, requested: RequestedJob) -> RequestedJob:
        """Check the picture and save it under the job's id."""
        if requested.picture is None:
            return requested
        async with self._pictures:
            sha256 = await asyncio.to_thread(
                job_requests.checked_picture, requested.picture, param="input_reference"
            )
        path = self._input(requested.spec.id)
        await asyncio.to_thread(_write_picture, path, requested.picture)
        return replace(requested, spec=replace(requested.spec, image=str(path), image_sha256=sha256))

    def _input(self, name: str) -> Path:
        return self.folder / job_requests.INPUTS_NAME / name

    def check_fits(self, num_jobs: int) -> None:
        """Raises ApiError if a request has more jobs than may ever be open."""
        if num_jobs > self.limits.open_jobs:
            raise ApiError(
                413, f"{counted(num_jobs, 'job')}; {self.limits.open_jobs:,} may be open at once: split it"
            )

    @asynccontextmanager
    async def _reserved(self, num_jobs: int) -> AsyncIterator[None]:
        """Reserve room for this many jobs; raises ApiError if there is none."""
        self.check_fits(num_jobs)
        num_open = len(self.mirror.records) + self._num_reserved
        if num_open + num_jobs > self.limits.open_jobs:
            raise ApiError(
                429,
                f"{num_open:,} of {self.limits.open_jobs:,} jobs are open; retry when some have ended",
                retry_after_s=self._soonest_end_s(),
            )
        self._num_reserved += num_jobs
        try:
            yield
        finally:
            self._num_reserved -= num_jobs

    def _soonest_end_s(self) -> float:
        now = self._now()
        ends = [r.predicted_end_at - now for r in self.mirror.records.values() if r.predicted_end_at]
        return min(60.0, max(1.0, min(ends, default=5.0)))

    async def cancel(self, job_ids: Iterable[str]) -> list[str]:
        """Cancel the jobs that have not ended; returns the ids of those that this call cancelled."""
        now, mirror = self._now(), self.mirror
        endings = [
            Ending(
                job_id,
                "cancelled",
                completed_at=now,
                started_at=mirror.records[job_id].started_at,
                step=mirror.records[job_id].step,
                error_code="cancelled",
                error_message="cancelled",
            )
            for job_id in job_ids
            if job_id in mirror.records
        ]
        firsts = await self.store.end_all(endings) if endings else []
        cancelled = [ending for ending, is_first in zip(endings, firsts, strict=True) if is_first]
        for ending in cancelled:
            self._ended(ending)
        if cancelled:
            self._send(CancelJobs(tuple(ending.id for ending in cancelled)))
        return [ending.id for ending in cancelled]

    async def remove(self, stored: Sequence[StoredJob]) -> None:
        """Remove ended jobs and their files."""
        for one in stored:
            self._unlink(self.folder / one.facts.file)
            self._unlink(self.folder / THUMBNAILS_NAME / f"{one.facts.id}.webp")
        ids = [one.facts.id for one in stored]
        await self.store.remove(ids)
        self.mirror.remove(ids)

    async def remove_expired(self) -> None:
        """Remove jobs that are older than `keep_s`, and the oldest beyond `keep_bytes`."""
        before = self._now() - self.limits.keep_s
        if outdated := self.store.outdated(before=before, keep_bytes=self.limits.keep_bytes):
            await self.remove(outdated)
            logger.info("removed %s past the retention limits", counted(len(outdated), "ended job"))
        await self.store.forget_requests(now=self._now())

    def set_policy(self, policy: str) -> None:
        self.mirror.policy_asked(policy)
        self._send(SetPolicy(policy))

    # Responses --------------------------------------------------------------------------------------

    def job(self, job_id: str) -> ServedJob | None:
        """The job, from memory or from the store; None if there is no such job."""
        record = self.mirror.find(job_id)
        if record is None and (stored := self.store.job(job_id)) is not None:
            record = self.served(stored)
        return record

    def served(self, stored: StoredJob) -> ServedJob:
        """A job of the store. It counts as queued if it is open while the server is loading."""
        record = self.mirror.find(stored.facts.id)
        if record is None:
            record = ServedJob(stored.facts)
            if stored.ending is not None:
                record.end(stored.ending, expires_at=stored.ending.completed_at + self.limits.keep_s)
        return record

    async def thumbnail(self, stored: StoredJob) -> Path:
        small = self.folder / THUMBNAILS_NAME / f"{stored.facts.id}.webp"
        return await files.thumbnail(self.folder / stored.facts.file, small, one_at_a_time=self._pictures)

    async def wait(self, job_ids: Sequence[str]) -> None:
        """Wait until all of these jobs have ended; raises ApiError if the server stops first."""
        async with asyncio.timeout(self.limits.waiting_s):
            for job_id in job_ids:
                while (record := self.mirror.records.get(job_id)) is not None:
                    if self.mirror.status == "draining":
                        raise ApiError(
                            503,
                            f"the server is stopping; {job_id} continues after its restart",
                            code="not_ready",
                            retry_after_s=10,
                        )
                    await record.updates.wait(1.0)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot remove %s: %s", path, error.strerror)

    def _drop_pictures(self, requested: Sequence[RequestedJob]) -> None:
        for one in requested:
            if one.picture is not None:
                self._unlink(self._input(one.spec.id))


def _write_picture(path: Path, content: bytes) -> None:
    """Raises: OutputError if the disk is full; the caller removes the partial file."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OutputError(
            f"cannot save the input picture ({error.strerror}); free some space and retry"
        ) from None


def _stat(path: Path) -> os.stat_result | None:
    """None if the file is missing or inaccessible."""
    try:
        return path.stat()
    except OSError:
        return None


def _same(taken: KeyTakenError) -> list[str]:
    """The ids that the same request created earlier; raises ApiError if that request was a different one."""
    if not taken.is_same:
        raise ApiError(
            422,
            "this Idempotency-Key was used for a different request",
            code="idempotency_key_reused",
        )
    return list(taken.ids)


def _code(outcome: JobOutcome) -> str:
    if outcome.status == "cancelled":
        return "cancelled"
    return "timed_out" if (outcome.error or "").startswith("timed out") else "generation_failed"
