"""The jobs of a run that have not ended: how far each is, what went wrong, and what policies see of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from gfgen.job.reader import due_at
from gfgen.runtime.control.job_record import JobRecord, Progress
from gfgen.runtime.control.ranks import Flight, RankRecord
from gfgen.runtime.control.residency import ModelTurns
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.openjobs import OpenJobs
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.snapshot import JobView

NUM_RECENT = 24  # arrivals that are remembered, as a sample of what may be expected
_RENEWALS_S = (0.25, 10.0)
"""Predictions of waiting jobs are renewed about twice in the time that a run has lasted, within these bounds,
since early measurements change much, and a renewal takes 4 us a job; wrong guesses are renewed at once."""


class Jobs:
    """Records by id; the views of visible jobs are open, or busy while a task of the job is in flight."""

    def __init__(
        self, jobs: Sequence[AdmittedJob], start: RunStart, *, costs: CostModel, models: ModelTurns
    ) -> None:
        self._start = start
        self._resume = dict(start.resume)  # where stopped jobs go on that have not been added yet
        self._costs = costs
        self._models = models
        self.records: dict[str, JobRecord] = {}
        self.open = OpenJobs()
        self.busy: dict[str, JobView] = {}
        self.recent: deque[tuple[JobRecord, JobView]] = deque(maxlen=NUM_RECENT)
        self.writing: set[str] = set()
        self._renewed_s = 0.0
        for job in jobs:
            self.add(job)

    @property
    def models_at_work(self) -> set[str]:
        """Models of jobs that have arrived and not ended."""
        return {record.model for record in self.records.values() if record.arrived}

    def add(self, job: AdmittedJob) -> None:
        """One more job, which arrives by its event."""
        assert job.job_id not in self.records, f"job {job.job_id} is at work"
        spec, start = job.spec, self._start
        now = start.started_at + spec.arrival_s
        due = due_at(spec, arrived_at=start.arrived_at.get((job.job_id, job.info.spec_hash), now))
        deadline_s = math.inf if due is None else due - start.started_at
        record = JobRecord(job, self._costs.class_of(job), spec.arrival_s, deadline_s)
        record.trouble.warnings += map(str, job.info.warnings)
        if (point := self._resume.pop(job.job_id, None)) is not None:
            made = point.producer
            record.progress = Progress(
                point.next_index, producer=made, last_completed=made, made_latents=made
            )
            record.trouble.warnings.append(f"resumed at {job.trajectory.task(point.next_index)}")
            record.given_up = point.given_up
        self.records[job.job_id] = record

    def arrive(self, record: JobRecord, *, place: int | None) -> None:
        """`place` is the job's in the file, whose order counts among equals."""
        record.arrived, record.place = True, place
        self.recent.append((record, record.view(self._costs)))

    def prioritise(self, job_id: str, priority: int) -> None:
        """Give a job another priority, unless it has ended."""
        if (record := self.records.get(job_id)) is None:
            return
        record.job, record._view = record.job.with_priority(priority), None
        self._models.unpark(job_id)
        self.place(record)

    def remove(self, record: JobRecord) -> None:
        del self.records[record.job_id]
        self.open.discard(record.job_id)
        self.busy.pop(record.job_id, None)
        self._models.unpark(record.job_id)

    def place(self, record: JobRecord) -> None:
        """Move the job's view to where it belongs: open, busy, or out of sight."""
        job_id = record.job_id
        was_busy = self.busy.pop(job_id, None) is not None
        is_unfinished = record.progress.next_index < record.num_tasks and not record.trouble.doom
        is_visible = record.arrived and is_unfinished
        if self._models.is_limited:
            urgency = (-record.job.spec.priority, record.deadline_s)
            is_visible = self._models.admit(job_id, record.model, urgency, can_run=is_visible)
        if is_visible and record.flights:
            self.busy[job_id] = record.view(self._costs)
        if is_visible and not record.flights:
            self.open.put(record.view(self._costs), place=record.place)
            record.place = None
        elif not was_busy:
            self.open.discard(job_id)

    def joining(self, ending: Iterable[Flight]) -> list[str]:
        """Jobs whose next task may be queued behind the running one: one step ahead and no more."""
        job_ids = [flight.dispatch.task.job_id for flight in ending]
        records = [self.records[each] for each in job_ids if each in self.busy]
        return [each.job_id for each in records if len(each.flights) == 1]

    def stopped_at(self, ranks: Sequence[RankRecord]) -> dict[str, tuple[int, int]]:
        """(next task, dispatch that made its input) of begun jobs with nothing under way on a living rank."""
        return {
            record.job_id: (record.first_open_index, record.progress.last_completed)
            for record in self.records.values()
            if record.progress.last_completed is not None
            and not record.is_writing
            and all(ranks[rank].is_retired for x in record.flights for rank in x.dispatch.layout.ranks)
        }

    def renew_predictions(self, now_s: float) -> None:
        """Let what was learned reach all views of a class, now and then: it costs a view for every job."""
        costs = self._costs
        if not costs.changed:
            return
        soonest, latest = _RENEWALS_S
        if now_s >= self._renewed_s + min(latest, max(soonest, self._renewed_s / 2)):
            self._renewed_s = now_s
            costs.renew(costs.changed)
        elif costs.corrected:
            costs.renew(costs.corrected)
        else:
            return
        self.open.renew(lambda job_id: self.records[job_id].view(self._costs))
        for job_id in self.busy:
            self.busy[job_id] = self.records[job_id].view(self._costs)

    def forget_held(self, rank: int) -> None:
        """The rank has died: what it held is in the slabs."""
        for record in self.records.values():
            holder = record.progress.holder
            if holder is not None and rank in holder.ranks:
                record.progress.is_held = False

    def check(self) -> None:
        assert not self.busy.keys() & set(self.open.ids), "a job is open and busy"
        assert self.busy.keys() | set(self.open.ids) <= self.records.keys(), "a job that has ended is visible"
        writing = {record.job_id for record in self.records.values() if record.is_writing}
        assert self.writing == writing, f"files of {self.writing} are being written, not of {writing}"
        for record in self.records.values():
            record.check()
            is_open = record.job_id in self.open
            assert not (is_open and record.flights), f"job {record.job_id} is open and runs"
            is_resident = not self._models.is_limited or record.model in self._models.resident
            can_run = record.arrived and is_resident and not record.trouble.doom
            is_visible = is_open or record.job_id in self.busy
            has_next = record.progress.next_index < record.num_tasks
            assert is_visible is (can_run and has_next), f"job {record.job_id} and policies"
