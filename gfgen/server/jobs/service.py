"""Accepts, cancels and removes jobs, and applies what the run reports: between HTTP, the store and the run.

Runs in the front's event loop. The store is the authority: a job is accepted once the store has it, and has
ended once the store records how. `RunMirror` is updated and the run is notified after that.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gfgen.errors import OutputError
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob, tell_of_warnings
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.manifest import manifest_entry
from gfgen.server.jobs import job_requests
from gfgen.server.jobs.files import JobFolder, Uploads
from gfgen.server.jobs.job_requests import ANY_NAME, RequestedJob
from gfgen.server.protocol import link, server_schemas
from gfgen.server.protocol.limits import ApiOptions, NamedKey, ServerLimits
from gfgen.server.protocol.problems import ApiError, without_folders
from gfgen.server.shown.mirror import MAX_SHOWN_FINISHED, RunMirror
from gfgen.server.shown.previews import Previews
from gfgen.server.shown.served_job import ServedJob
from gfgen.server.shown.webhooks import check_webhook
from gfgen.server.store import (
    DAY_S,
    BatchRow,
    Ended,
    Ending,
    JobFacts,
    KeyTakenError,
    RequestKey,
    Store,
    StoredJob,
    used_rank_s,
)
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

FORECAST_S = 0.5
SUBMITTED_AT_ONCE = 8
RETRY_S = 5.0
Admitted = tuple[RequestedJob, AdmittedJob]
_ENDED: dict[str, Ended] = {"done": "completed", "failed": "failed", "cancelled": "cancelled"}


@dataclass(kw_only=True, eq=False)
class JobService:
    store: Store
    mirror: RunMirror
    folder: JobFolder
    limits: ServerLimits
    send: Callable[[Any], None]
    api: ApiOptions = field(default_factory=ApiOptions)
    keys: Mapping[str, NamedKey] = field(default_factory=dict)
    now: Callable[[], float] = time.time
    on_end: Callable[[ServedJob], None] = lambda record: None
    owner: str | None = None
    """The key whose jobs are seen; None sees all."""

    def __post_init__(self) -> None:
        self.uploads = Uploads(self.folder.path, most_bytes=10 * self.limits.body_bytes)
        self.previews = Previews()
        self._num_reserved: Counter[str | None] = Counter()
        """Jobs that are being written to the store, by owner."""

    def seen_by(self, owner: str | None) -> JobService:
        """This service for the requests of one key, which sees its own jobs, batches and files; None: all."""
        if owner is None:
            return self
        service = copy.copy(self)
        service.owner, service.uploads = owner, self.uploads.seen_by(owner)
        return service

    def check_ready(self) -> link.RunInfo:
        if self.mirror.status != "ready" or self.mirror.run_info is None:
            raise self.not_ready()
        return self.mirror.run_info

    def models(self, *, has_any: bool = False) -> list[server_schemas.ServedModel]:
        """The models and their aliases; none while the server is loading. With `has_any` also what any other
        name stands for."""
        models = {model.id: model for model in self.mirror.models()}
        aliases = [
            models[name].model_copy(update={"id": alias, "root": name})
            for alias, name in self.api.aliases.items()
            if name in models and (has_any or alias != ANY_NAME)
        ]
        return [*models.values(), *aliases]

    def ready_models(self) -> list[server_schemas.ServedModel]:
        """As `models` with `has_any`; raises ApiError if the server is not ready."""
        self.check_ready()
        return self.models(has_any=True)

    def not_ready(self) -> ApiError:
        return ApiError(503, self.mirror.reason or "not ready", code="not_ready", retry_after_s=5)

    async def take(self, requested: Sequence[RequestedJob], *, key: RequestKey | None = None) -> list[str]:
        """Accept jobs and return their ids, or the ids that an earlier request with this key created.

        Raises: ApiError or OutputError if they are not accepted; then nothing is stored.
        """

        async def admitted(admit: link.Admit) -> Sequence[Admitted]:
            if not any(one.has_inputs for one in requested):
                return job_requests.admitted(requested, admit)
            with_pictures = [await self.folder.save_input(one) for one in requested]
            return await asyncio.to_thread(job_requests.admitted, with_pictures, admit)

        try:
            ids = await self._take(len(requested), admitted, batch_id=None, key=key)
        except Exception:  # not CancelledError: the jobs may have been accepted all the same
            self.folder.remove_inputs(requested)
            raise
        self.folder.remove_inputs(one for one in requested if one.spec.id not in ids)
        return ids

    async def take_batch(
        self,
        num_jobs: int,
        admitted: Callable[[link.Admit], Sequence[Admitted]],
        *,
        batch_id: str,
        key: RequestKey | None,
    ) -> str:
        """Accept those of at most `num_jobs` that `admitted` returns; another thread calls it.

        Returns the batch's id, or the id of the batch that an earlier request with this key created.
        Raises: as `take`, and what `admitted` raises.
        """

        async def in_thread(admit: link.Admit) -> Sequence[Admitted]:
            return await asyncio.to_thread(admitted, admit)

        (taken_id,) = await self._take(num_jobs, in_thread, batch_id=batch_id, key=key)
        return taken_id

    async def _take(
        self,
        num_jobs: int,
        admitted: Callable[[link.Admit], Awaitable[Sequence[Admitted]]],
        *,
        batch_id: str | None,
        key: RequestKey | None,
    ) -> list[str]:
        if key is not None and (taken := self.store.request(key, now=self.now())):
            return _same(taken)
        run_info = self.check_ready()
        async with self._reserved(num_jobs):
            jobs = await admitted(self._owned(run_info.admit))
            try:
                await self._accept(jobs, batch_id=batch_id, key=key)
            except KeyTakenError as error:
                return _same(error)
        return [job.job_id for _, job in jobs] if batch_id is None else [batch_id]

    async def _accept(
        self,
        jobs: Sequence[Admitted],
        *,
        batch_id: str | None,
        key: RequestKey | None,
    ) -> None:
        for url in {one.webhook for one, _ in jobs if one.webhook is not None}:
            check_webhook(url, self.api.webhook_hosts)
        now = self.now()
        accepted = [job_requests.accepted(one, job, now=now) for one, job in jobs]
        await self.store.accept(accepted, batch_id=batch_id, key=key, owner=self.owner, now=now)
        self.mirror.add(ServedJob(facts) for facts, _ in accepted)
        tell_of_warnings((job.info.spec, job.info.warnings) for _, job in jobs)
        self.submit([job for _, job in jobs])

    def submit(self, jobs: Sequence[AdmittedJob]) -> None:
        for job in jobs:
            if (record := self.mirror.records.get(job.job_id)) is not None:
                record.has_previews = self.previews.add(job)
        for start in range(0, len(jobs), SUBMITTED_AT_ONCE):
            self.send(link.SubmitJobs(tuple(jobs[start : start + SUBMITTED_AT_ONCE])))

    def _owned(self, admit: link.Admit) -> link.Admit:
        """Admission that marks the jobs as those of this key."""
        owner = self.owner
        return lambda specs: admit([replace(spec, owner=owner) for spec in specs])

    @asynccontextmanager
    async def _reserved(self, num_jobs: int) -> AsyncIterator[None]:
        """Reserve room for this many jobs; raises ApiError if there is none.

        With several keys, each may have half of the room that the others leave, so there is always some for
        a key that has no jobs.
        """
        key = self.keys.get(self.owner or "")
        own_most = self.limits.open_jobs if key is None or key.open_jobs is None else key.open_jobs
        most = min(own_most, self.limits.open_jobs // (2 if self.keys else 1))
        if num_jobs > most:
            text = f"{counted(num_jobs, 'job')}; {most:,} may be open at once: split it"
            raise ApiError(413, text) if own_most else ApiError(403, "this key may open no jobs (open=0)")
        num_open, most = len(self.mirror.records) + self._num_reserved.total(), self.limits.open_jobs
        if self.keys:
            own_jobs = [each for each in self.mirror.records.values() if each.facts.owner == self.owner]
            own = len(own_jobs) + self._num_reserved[self.owner]
            num_open, most = own, min(own_most, (most - (num_open - own)) // 2)
            if key is not None and key.gpu_s_per_day is not None:
                used_s = used_rank_s(self.store, self.owner, day=int(self.now() // DAY_S))
                used_s += sum(each.rank_s for each in own_jobs)
                _check_day(used_s, key.gpu_s_per_day, now=self.now())
        if num_open + num_jobs > most:
            whose = "of this key are open" if self.keys else "are open"
            raise ApiError(
                429,
                f"{num_open:,} of {most:,} jobs {whose}; retry when some have ended",
                retry_after_s=_soonest_end_s(self.mirror.records.values(), now=self.now()),
            )
        self._num_reserved[self.owner] += num_jobs
        try:
            yield
        finally:
            self._num_reserved[self.owner] -= num_jobs

    async def cancel(self, job_ids: Iterable[str], *, batch_id: str | None = None) -> list[str]:
        now, mirror = self.now(), self.mirror
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
        firsts = await self.store.end_all(endings, cancelled_batch=batch_id) if endings else []
        cancelled = [ending for ending, is_first in zip(endings, firsts, strict=True) if is_first]
        for ending in cancelled:
            self.note_end(ending)
        if cancelled:
            self.send(link.CancelJobs(tuple(ending.id for ending in cancelled)))
        return [ending.id for ending in cancelled]

    async def set_priority(self, job_id: str, priority: int) -> None:
        self.check_ready()
        if not await self.store.change(job_id, is_open=True, priority=priority):
            raise ApiError(409, f"{job_id} has ended", code="not_open")
        if (record := self.mirror.records.get(job_id)) is not None:
            record.facts = replace(record.facts, priority=priority)
            record.changed()
            self.send(events.PriorityChanged(0.0, job_id, priority))

    def note_end(self, ending: Ending) -> None:
        self.previews.forget(ending.id)
        record = self.mirror.end(ending.id, ending, expires_at=ending.completed_at + self.limits.keep_s)
        if record is None:
            return
        self.on_end(record)
        if record.facts.input_file is not None:
            self.folder.remove_input(record.facts.input_file)

    async def remove(self, jobs: Sequence[JobFacts]) -> None:
        for facts in jobs:
            self.folder.remove(facts)
        ids = [facts.id for facts in jobs]
        await self.store.remove(ids)
        self.mirror.remove(ids)

    async def remove_expired(self) -> None:
        """Remove jobs that are older than `keep_s`, and the oldest beyond `keep_bytes`."""
        before = self.now() - self.limits.keep_s
        if outdated := self.store.outdated(before=before, keep_bytes=self.limits.keep_bytes):
            await self.remove([stored.facts for stored in outdated])
            logger.info("removed %s past the retention limits", counted(len(outdated), "ended job"))
        self.uploads.remove_expired(before=before, is_kept=lambda name: self.store.batch(name) is not None)
        await self.store.forget_requests(now=self.now())

    def set_policy(self, policy: str) -> None:
        self.mirror.policy_asked(policy)
        self.send(events.PolicyChanged(0.0, policy, "requested over HTTP"))

    def job(self, job_id: str) -> ServedJob | None:
        """The job, from memory or from the store; None if there is no such job, or it is another key's."""
        record = self.mirror.find(job_id)
        if record is None and (stored := self.store.job(job_id)) is not None:
            record = self.served(stored)
        return record if record is not None and self._sees(record.facts.owner) else None

    def batch(self, batch_id: str) -> BatchRow | None:
        row = self.store.batch(batch_id)
        return row if row is not None and self._sees(row.owner) else None

    def _sees(self, owner: str | None) -> bool:
        return self.owner in (None, owner)

    def served(self, stored: StoredJob) -> ServedJob:
        """A job of the store, which knows an end first. An open one is queued while the server loads."""
        record = self.mirror.find(stored.facts.id)
        if record is None or (stored.ending is not None and not record.has_ended):
            record = ServedJob(stored.facts)
            if stored.ending is not None:
                record.end(stored.ending, expires_at=stored.ending.completed_at + self.limits.keep_s)
        return record

    async def wait(self, job_ids: Sequence[str]) -> None:
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
                    await record.ends.wait(1.0)


def _check_day(used_s: float, most: int, *, now: float) -> None:
    if used_s >= most:
        text = f"this key has used {used_s:,.0f} of {most:,} GPU-seconds of this day; go on at 00:00 UTC"
        raise ApiError(429, text, code="quota_exceeded", retry_after_s=DAY_S - now % DAY_S)


def _soonest_end_s(open_jobs: Iterable[ServedJob], *, now: float) -> float:
    ends = [job.predicted_end_at - now for job in open_jobs if job.predicted_end_at]
    return min(60.0, max(1.0, min(ends, default=5.0)))


def _same(taken: KeyTakenError) -> list[str]:
    """The ids that the same request created earlier; raises ApiError if that request was a different one."""
    if not taken.is_same:
        raise ApiError(
            422, "this Idempotency-Key was used for a different request", code="idempotency_key_reused"
        )
    return list(taken.ids)


class RunFollower:
    def __init__(self, service: JobService) -> None:
        self._service = service
        self._store, self._mirror, self._folder = service.store, service.mirror, service.folder

    async def hear(self, notes: Sequence[Any]) -> None:
        """Apply the run's notes in order; outcomes of jobs go to the store first."""
        outcomes: list[JobOutcome] = []
        for note in notes:
            if isinstance(note, JobOutcome):
                outcomes.append(note)
                continue
            if isinstance(note, link.RunInfo):
                await self._open(note)
            self._mirror.apply(note)
        if outcomes:
            await self._note_ends(outcomes)

    async def _open(self, run_info: link.RunInfo) -> None:
        """The run is ready: submit the open jobs of the store, except those that are done or impossible.

        A job whose file exists is done: a server that was killed could not record it. If only this process
        was killed, the run soon sends the full outcome, which is then added.
        """
        records, jobs, endings = [], [], []
        for facts, spec in self._store.open_jobs():
            if (stat := self._folder.result_stat(facts)) is not None:
                met = None if facts.deadline_at is None else stat.st_mtime <= facts.deadline_at
                at, size_bytes = max(stat.st_mtime, facts.created_at), stat.st_size
                endings.append(Ending(facts.id, "completed", at, None, size_bytes, met, facts.steps))
                continue
            now = self._service.now()
            resumed = job_requests.resumed_spec(facts, spec, inputs=self._folder.inputs, now=now)
            admitted, problems = run_info.admit_again([resumed])
            if problems:  # an earlier server accepted it
                text = "; ".join(str(problem) for problem in problems[:5])
                logger.warning("job %s cannot be resumed: %s", facts.id, text)
                code, text = "cannot_be_done", without_folders(text)
                endings.append(Ending(facts.id, "failed", now, error_code=code, error_message=text))
            else:
                records.append(ServedJob(facts))
                jobs.append(admitted[0])
        firsts = await self._end_all(endings) if endings else []
        for ending, is_first in zip(endings, firsts, strict=True):
            if is_first and (record := self._service.job(ending.id)) is not None:
                self._service.on_end(record)
        for owner in (None, *self._service.keys):
            ended = self._store.jobs(limit=MAX_SHOWN_FINISHED, has_ended=True, owner=owner, is_by_end=True)
            self._mirror.finished_of(owner).extend(map(self._service.served, ended))
        self._mirror.add(records)
        self._service.submit(jobs)
        self._service.send(link.OpenJobIds(tuple(job.job_id for job in jobs)))
        if jobs:
            logger.info("resuming %s", counted(len(jobs), "open job"))

    async def _note_ends(self, outcomes: Sequence[JobOutcome]) -> None:
        endings = [self._ending(outcome) for outcome in outcomes]
        firsts = await self._end_all(endings)
        for outcome, ending, is_first in zip(outcomes, endings, firsts, strict=True):
            if is_first:
                self._service.note_end(ending)
            elif ending.status == "completed":
                await self._drop_unwanted(outcome)
        self._service.send(link.OutcomesStored(tuple(ending.id for ending in endings)))

    async def _end_all(self, endings: Sequence[Ending]) -> list[bool]:
        """Record these endings; retry until it succeeds, since the disk may be full."""
        while True:
            try:
                return await self._store.end_all(endings)
            except OutputError:  # the store has logged it
                await asyncio.sleep(RETRY_S)

    def _ending(self, outcome: JobOutcome) -> Ending:
        error = None if outcome.error is None else without_folders(outcome.error)
        outcome = replace(outcome, error=error, warnings=tuple(map(without_folders, outcome.warnings)))
        job_id = outcome.info.job_id
        record = self._mirror.records.get(job_id)
        status = _ENDED[outcome.status]
        return Ending(
            job_id,
            status,
            completed_at=self._mirror.run.at(outcome.ended_s),
            started_at=None if outcome.started_s is None else self._mirror.run.at(outcome.started_s),
            size_bytes=None if outcome.written is None else outcome.written.size_bytes,
            met_deadline=outcome.met_deadline,
            step=outcome.info.num_tasks - 3 if status == "completed" else record.step if record else 0,
            error_code=None if outcome.error is None else _code(outcome),
            error_message=outcome.error,
            manifest=manifest_entry(outcome, written_at=self._service.now()),
        )

    async def _drop_unwanted(self, outcome: JobOutcome) -> None:
        """Remove the file of a job that was cancelled while the file was being written."""
        stored = self._store.job(outcome.info.job_id)
        if stored is None or (stored.ending is not None and stored.ending.status != "completed"):
            self._folder.remove_result(outcome.info.file)


def _code(outcome: JobOutcome) -> str:
    if outcome.status == "cancelled":
        return "cancelled"
    failed = "cannot_be_done" if outcome.is_refused else "generation_failed"
    return "timed_out" if (outcome.error or "").startswith("timed out") else failed
