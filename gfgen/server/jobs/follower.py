"""Applies what the run reports to the store, the mirror and the folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gfgen.errors import OutputError, Problem
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.manifest import manifest_entry
from gfgen.server.jobs import job_requests
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol.link import OpenJobIds, OutcomesStored, RunInfo
from gfgen.server.protocol.problems import without_folders
from gfgen.server.shown.mirror import MAX_SHOWN_FINISHED
from gfgen.server.shown.served_job import ServedJob
from gfgen.server.store import Ended, Ending, JobFacts, Work
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

RETRY_S = 5.0
_ENDED: dict[str, Ended] = {"done": "completed", "failed": "failed", "cancelled": "cancelled"}


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
            if isinstance(note, RunInfo):
                await self._open(note)
            self._mirror.apply(note)
        if outcomes:
            await self._note_ends(outcomes)

    async def _open(self, run_info: RunInfo) -> None:
        """The run is ready: submit the open jobs of the store, except those that are done or impossible."""
        await self._note_finished_files()
        records, jobs = [], []
        for facts, spec in self._store.open_jobs():
            resumed = job_requests.resumed_spec(
                facts, spec, inputs=self._folder.inputs, now=self._service.now()
            )
            admitted, problems = run_info.admit_again([resumed])
            if problems:
                await self._refuse(facts, problems)
            else:
                records.append(ServedJob(facts))
                jobs.append(admitted[0])
        for owner in (None, *self._service.owners):
            ended = self._store.last_ended(MAX_SHOWN_FINISHED, owner)
            self._mirror.show_finished(owner, map(self._service.served, ended))
        self._mirror.add(records)
        self._service.submit(jobs)
        self._service.send(OpenJobIds(tuple(job.job_id for job in jobs)))
        if jobs:
            logger.info("resuming %s", counted(len(jobs), "open job"))

    async def _note_finished_files(self) -> None:
        """Record jobs as completed if their file exists: a server that was killed could not record it.

        If only this process was killed, the run soon sends their full outcomes, which are then added.
        """
        endings = []
        for facts, _ in self._store.open_jobs():
            stat = self._folder.result_stat(facts)
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
        await self._end_unseen(endings)

    async def _refuse(self, facts: JobFacts, problems: Sequence[Problem]) -> None:
        """Fail a job that an earlier server accepted and this one cannot run."""
        text = "; ".join(str(problem) for problem in problems[:5])
        logger.warning("job %s cannot be resumed: %s", facts.id, text)
        ending = Ending(
            facts.id,
            "failed",
            self._service.now(),
            error_code="cannot_be_done",
            error_message=without_folders(text),
        )
        await self._end_unseen([ending])

    async def _end_unseen(self, endings: Sequence[Ending]) -> None:
        firsts = await self._end_all(endings) if endings else []
        for ending, is_first in zip(endings, firsts, strict=True):
            if is_first and (record := self._service.job(ending.id)) is not None:
                self._service.on_end(record)

    async def _note_ends(self, outcomes: Sequence[JobOutcome]) -> None:
        endings = [self._ending(outcome) for outcome in outcomes]
        firsts = await self._end_all(endings)
        for outcome, ending, is_first in zip(outcomes, endings, firsts, strict=True):
            if is_first:
                self._service.note_end(ending)
            elif ending.status == "completed":
                await self._drop_unwanted(outcome)
        self._service.send(OutcomesStored(tuple(ending.id for ending in endings)))

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
            step=outcome.info.spec.steps or 0 if status == "completed" else record.step if record else 0,
            error_code=None if outcome.error is None else _code(outcome),
            error_message=outcome.error,
            manifest=(entry := manifest_entry(outcome, written_at=self._service.now())),
            work=Work.of(entry),
        )

    async def _drop_unwanted(self, outcome: JobOutcome) -> None:
        """Remove the file of a job that was cancelled while the file was being written."""
        stored = self._store.job(outcome.info.job_id)
        if stored is None or (stored.ending is not None and stored.ending.status != "completed"):
            self._folder.remove_result(outcome.info.file)


def _code(outcome: JobOutcome) -> str:
    if outcome.status == "cancelled":
        return "cancelled"
    return "timed_out" if (outcome.error or "").startswith("timed out") else "generation_failed"
