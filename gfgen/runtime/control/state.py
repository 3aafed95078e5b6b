"""The only mutable truth of a run, which changes on events alone; policies get frozen snapshots of it."""

from __future__ import annotations

import logging
import math
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from gfgen.errors import WorkerError
from gfgen.graph import FIRST_STEP, Stage, Task
from gfgen.layout import MAX_RANKS, Layout
from gfgen.policies.fair_share import Shares
from gfgen.runtime.control.backlog import Backlog
from gfgen.runtime.control.closing import Closing
from gfgen.runtime.control.decider import legal_job
from gfgen.runtime.control.job_record import JobRecord
from gfgen.runtime.control.jobs import Jobs
from gfgen.runtime.control.ranks import Flight, Flights, Ranks
from gfgen.runtime.control.residency import ModelTurns
from gfgen.runtime.control.sharing import Sharing
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, Event
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.core.openjobs import OpenJobOrders
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.content import Content
from gfgen.runtime.ipc.messages import RankTimes, Transfer
from gfgen.runtime.predict.cost import CostModel, JobCosts
from gfgen.snapshot import Decision, Snapshot

logger = logging.getLogger(__name__)

_SAME_TIME_S = 1e-6
FILES_PER_RANK, MIN_FILES = 4, 16
"""No further decode begins while this many files are being decoded or written: frames stay in memory until
they are written. Bursts of small pictures do not wait. A long video has 0.3 GB of frames."""


class State:
    def __init__(
        self, jobs: Sequence[AdmittedJob], start: RunStart, *, clock: Clock, costs: CostModel
    ) -> None:
        self.clock = clock
        self._costs = costs
        costs.price_first_uses(start.first_use_s, start.warm)
        costs.reads_s = start.reads_s
        self._is_looking_ahead = start.lookahead_s > 0
        self._num_writers = start.num_writers
        self.models = ModelTurns(
            start.resident if start.resident is not None else {job.spec.model or "" for job in jobs},
            is_limited=start.resident is not None,
            clock=clock,
        )
        self.jobs = Jobs(jobs, start, costs=costs, models=self.models)
        self.ranks = Ranks(start.num_ranks, start.islands)
        last_numbers = [point.last_number for point in start.resume.values()]
        self.flights = Flights(
            lookahead_s=start.lookahead_s, last_number=max([start.last_number, *last_numbers])
        )
        self.closing = Closing(start, costs, self.jobs.records)
        self.shares = Shares()
        self.sharing = Sharing(self.jobs.records, costs)
        self.max_degree = start.max_degree or min(MAX_RANKS, max(map(len, self.ranks.islands)))
        near = tuple(map(tuple, start.near or self.ranks.islands))
        self._job_costs = JobCosts(self.jobs.records, costs, near=near)
        self.expects_more = False  # jobs may still be added: that all have ended does not finish the run
        self.backlog = Backlog()

    @property
    def finished(self) -> bool:
        """All jobs have ended; or the run is stopping and nothing is under way any more."""
        if self.closing.is_stopping:
            return not self.flights and not self.jobs.writing
        return not self.jobs.records and not self.backlog and not self.expects_more

    @property
    def is_stuck(self) -> bool:
        """Jobs are open, and no event will come unless something is dispatched."""
        are_settled = all(rank.is_retired or rank.can_work for rank in self.ranks.records)
        return not self.flights and not self.jobs.writing and len(self.jobs.open) > 0 and are_settled

    @property
    def is_at_rest(self) -> bool:
        """Nothing runs, and nothing of the resident models can be started."""
        return not self.flights and not self.closing.going_on(self.jobs.open, now_s=self.clock.turn_s)

    def choice(self) -> Snapshot | None:
        """The snapshot if a policy has something to decide. Renews predictions, as nothing else does."""
        now_s = self.clock.turn_s
        ending = self.flights.ending(now_s)
        free = self.ranks.free(ending)
        if not free:
            return None
        joining = self.jobs.joining(ending)
        if not (joining or self.jobs.open):
            return None
        self.jobs.renew_predictions(now_s)
        return self._snapshot(now_s, free, joining)

    def snapshot(self) -> Snapshot:
        now_s = self.clock.turn_s
        ending = self.flights.ending(now_s)
        found = self._snapshot(now_s, self.ranks.free(ending), self.jobs.joining(ending))
        if not self.backlog:
            return found
        return replace(found, num_unseen=len(self.backlog), unseen_s=self.backlog.work_s(self._costs))

    def _snapshot(self, now_s: float, free: Set[int], joining_ids: Sequence[str]) -> Snapshot:
        open_jobs = self.closing.going_on(self.jobs.open, now_s=now_s)
        busy = self.jobs.busy.copy()
        joining = [busy.pop(job_id) for job_id in joining_ids]
        for view in joining:
            open_jobs[view.job_id] = view
        return Snapshot(
            now_s=now_s,
            open=open_jobs,
            busy=busy,
            running=tuple([flight.view for flight in self.flights.values()]),
            ranks=self.ranks.views(free, self.models.resident),
            max_degree=self.max_degree,
            costs=self._job_costs,
            orders=OpenJobOrders(self.jobs.open, open_jobs, joining=joining),
            served_s=self.shares.served_s.copy(),
            kept=self._costs.kept,
        )

    def snapshot_of_traffic(self, load_s: Mapping[str, float] | None = None) -> Snapshot:
        """The same for looks ahead; `load_s` by model. It does not change what policies see later."""
        recent = self.jobs.recent
        records = ChainMap(dict(self.jobs.records), {record.job_id: record for record, _ in recent})
        own, places = self.jobs.records, {model: place for place, model in enumerate(self.models.wanted())}
        parked = sorted([own[each] for each in self.models.parked], key=lambda job: places[job.model])
        left_s = sum([own[each].cost_class.write_s for each in self.jobs.writing]) / self._num_writers
        return replace(
            self.snapshot(),
            costs=self._job_costs.of_records(records),
            recent=tuple([view for _, view in recent]),
            parked={record.job_id: record.view(self._costs) for record in parked},
            load_s=load_s or {},
            writers_free_s=(self.clock.turn_s + left_s,) * self._num_writers,
            expects_more=self.expects_more or not all(job.arrived for job in self.jobs.records.values()),
            shares_cores=self._costs.shares_cores,
            kept={},
        )

    def holds_back(self, decision: Decision) -> bool:
        """Whether a decode has to wait for files that are under way, or a job for room for its own."""
        task = decision.task
        if task.index == 0 and (record := self.jobs.records.get(task.job_id)) is not None:
            return record.file_bytes > self.closing.room.left_bytes
        if task.stage is not Stage.DECODE:
            return False
        num_decoding = sum(flight.dispatch.task.stage is Stage.DECODE for flight in self.flights.values())
        return num_decoding + len(self.jobs.writing) >= max(
            MIN_FILES, FILES_PER_RANK * len(self.ranks.records)
        )

    def begin(self, decision: Decision) -> list[Dispatch]:
        """Register a decision as the next dispatches, one for each job. Raises: PolicyFault."""
        record = legal_job(
            decision,
            jobs=self.jobs,
            ranks=self.ranks,
            models=self.models,
            now_s=self.clock.turn_s,
            max_degree=self.max_degree,
        )
        task, layout, sharers = decision.task, decision.layout, None
        if peers := self.sharing.peers(record, decision):
            first = self.flights.last_number + 1
            sharers = range(first, first + 1 + len(peers))
        lead = self._begin(record, task, layout, sharers=sharers)
        return [lead, *[self._begin(each, each.next_task, layout, sharers=sharers) for each in peers]]

    def _begin(self, record: JobRecord, task: Task, layout: Layout, *, sharers: range | None) -> Dispatch:
        """Shared steps are predicted, and later reported, as if they ran in turn."""
        number, progress, cost_class = self.flights.last_number + 1, record.progress, record.cost_class
        degrees, source = layout.degrees, progress.holder if progress.is_held else None
        task_s, least_s = self._costs.ends_after_s(cost_class, task.stage, degrees)
        start_s = max([self.clock.turn_s, *[self.ranks.records[rank].free_at_s for rank in layout.ranks]])
        switch_s = move_s = 0.0
        if record.needs_patches(task.stage) and self.ranks.merge(layout, record.model, record.patches):
            switch_s = self._costs.switch_s(cost_class)
        transfers: tuple[Transfer, ...] = ()
        if source is not None and source != layout:
            move_s = self._costs.move_s(cost_class, source, layout)
            if task.index >= FIRST_STEP and sharers is None:
                latents = record.job.trajectory.artifact("latents")
                transfers = self.ranks.transfers(latents, source=source, destination=layout)
        late_s = 0.0
        if task.stage is Stage.APPROXIMATE and record.job.trajectory.approximable:
            ends_s = start_s + self._job_costs.remaining_s(task, layout) + cost_class.write_s
            late_s = ends_s - record.deadline_s
        dispatch = Dispatch(
            number=number,
            task=task,
            layout=layout,
            submitted_s=self.clock.turn_s,
            predicted_start_s=start_s,
            predicted_end_s=start_s + move_s + switch_s + task_s,
            producer=progress.producer,
            source=source,
            transfers=transfers,
            switch_s=switch_s,
            sharers=sharers,
            late_s=late_s,
        )
        # Nothing is queued behind shared steps, which end together.
        is_measured = sharers is None and self._costs.has_seen(cost_class, task.stage, degrees)
        flight = self.flights.add(
            dispatch,
            soonest_s=start_s + least_s,  # moves and switches may take less than predicted
            is_foreseeable=is_measured,
            owner=record.owner,
        )
        self.ranks.take(flight)
        if task.stage is Stage.DENOISE and self.closing.closes_s < math.inf:
            self.closing.note(cost_class, degrees)
        if task.index == 0:
            self.closing.room.left_bytes -= record.file_bytes
        record.flights.append(flight)
        progress.begin(task.index, layout, number)
        self.jobs.place(record)
        return dispatch

    def apply(self, event: Event) -> Iterable[JobOutcome]:
        """Change by one event; returns the jobs that have ended by it."""
        match event:
            case events.TaskDone():
                return self._task_done(event)
            case events.TaskFailed():
                return self._task_failed(event)
            case events.JobArrived():
                return self._arrived(event)
            case events.JobTimedOut() | events.JobCancelled():
                return self._given_up(event)
            case events.OutputWritten() | events.OutputFailed() | events.FramesLost():
                return self._written(event)
            case events.LoadFailed():
                return self._load_failed(event)
            case events.PriorityChanged():
                self.jobs.prioritise(event.job_id, event.priority)
            case events.ModelsChanged():
                self._models_changed(event)
            case events.RankReady():
                self.ranks.become_ready(event.rank, at_s=event.time_s)
            case events.RankLoaded():
                self.ranks.finish_loading(event.rank, at_s=event.time_s)
            case events.RankLost():
                self._rank_lost(event)
            case events.StopRequested():
                self.closing.stop(event.signal_number)
            case events.ClosingTime():
                self.closing.is_stopping = True
            case events.SpaceLeft():
                self.closing.room.left_bytes = self.closing.room.left_of(event.free_bytes)
            case events.GraceOver():
                self.flights.give_up(self.flights.values())
        return ()

    def _task_done(self, event: events.TaskDone) -> Iterable[JobOutcome]:
        flight, record = self._land(event, event.times)
        if flight.failure is not None:  # its input failed, and it ended before that was known
            record.fail_flight(flight, flight.failure, is_lost=False)
            return self._settle(record)
        dispatch = flight.dispatch
        task, layout, busy_s = dispatch.task, dispatch.layout, event.busy_s
        record.progress.complete(dispatch.number, event.ended_s, is_decode=task.stage is Stage.DECODE)
        record.use(task.stage, layout, event)
        self.shares.serve(record.owner, event.rank_s)
        cost_class = self.sharing.class_of(record, dispatch)
        kind = cost_class, task.stage, layout.degrees
        if event.is_first_use:
            self._costs.observe_first_use(*kind, busy_s, prepared_s=max(x.prepared_s for x in event.times))
        elif dispatch.switch_s:
            self._costs.observe_switch(*kind, busy_s)
        else:
            first_end_s = busy_s if len(event.times) == 1 else event.first_end_s
            self._costs.observe(*kind, busy_s, first_end_s=first_end_s)
        if record.job.trajectory.approximable and task.stage is Stage.APPROXIMATE:
            record.give_up(task, late_s=dispatch.late_s)
        if task.index + 1 == record.num_tasks:
            self.jobs.writing.add(record.job_id)
        if self._is_looking_ahead:
            self._renew_ends_behind(flight, record)
        return self._settle(record)

    def _land(
        self, event: events.TaskDone | events.TaskFailed, times: Sequence[RankTimes] = ()
    ) -> tuple[Flight, JobRecord]:
        """The flight that ends by this event, and its job; neither the job nor its ranks have it any more."""
        flight = self.flights.pop(event.dispatch)
        record = self.jobs.records[flight.dispatch.task.job_id]
        record.flights.remove(flight)
        self.ranks.leave(flight, at_s=event.time_s, times=times)
        return flight, record

    def _renew_ends_behind(self, flight: Flight, record: JobRecord) -> None:
        places = [self.ranks.records[rank] for rank in flight.dispatch.layout.ranks]
        waiting = [*record.flights[:1], *[first for place in places for first in place.flights[:1]]]
        for other in dict.fromkeys(waiting):
            dispatch = other.dispatch
            job = self.jobs.records[dispatch.task.job_id]
            ranks = [self.ranks.records[rank] for rank in dispatch.layout.ranks]
            if job.flights[0] is not other or any(rank.flights[0] is not other for rank in ranks):
                continue  # its input or a rank is still to come
            kind = job.cost_class, dispatch.task.stage, dispatch.layout.degrees
            began_s = max(dispatch.submitted_s, job.progress.last_ended_s, *[rank.ended_s for rank in ranks])
            task_s, least_s = self._costs.ends_after_s(*kind)
            end_s = began_s + dispatch.switch_s + task_s
            if self.flights.move_end(other, end_s, soonest_s=began_s + least_s):
                for rank in ranks:
                    rank.view = None

    def _task_failed(self, event: events.TaskFailed) -> Iterable[JobOutcome]:
        flight, record = self._land(event)
        flight.is_void = flight.is_void or event.void
        record.fail_flight(flight, flight.failure or event.reason, is_lost=event.lost)
        return self._settle(record)

    def _arrived(self, event: events.JobArrived) -> Iterable[JobOutcome]:
        record = self.jobs.records.get(event.job_id)
        if record is None or record.arrived:  # it was cancelled before, or stood in the backlog
            return ()
        place = self.backlog.near.get(record.job_id) if record.arrival_s <= 0 else None
        self.jobs.arrive(record, place=place)
        self.shares.arrive(record.owner)
        if (doom := self.models.failure_of(record.model, now_s=event.time_s)) is not None:
            record.trouble.fail(doom)
        return self._settle(record)

    def _given_up(self, event: events.JobTimedOut | events.JobCancelled) -> Iterable[JobOutcome]:
        """The job fails, unless a file that is being written is there first."""
        record = self.jobs.records.get(event.job_id)
        if record is None or record.trouble.doom:
            return ()
        if isinstance(event, events.JobCancelled):
            record.trouble.doom, record.trouble.is_cancelled = "cancelled", True
        # The time-out may be that of an earlier job of the same id.
        elif record.is_writing or abs(record.times_out_s - event.time_s) > _SAME_TIME_S:
            return ()
        else:
            record.time_out()
        return self._settle(record)

    def _written(
        self, event: events.OutputWritten | events.OutputFailed | events.FramesLost
    ) -> Iterable[JobOutcome]:
        """The job ends, or is decoded again if its frames are lost."""
        record = self.jobs.records[event.job_id]
        self.jobs.writing.remove(event.job_id)
        match event:
            case events.OutputFailed():
                return self._end(record, error=event.reason)
            case events.FramesLost():
                if event.time_s >= record.times_out_s:
                    record.time_out()
                record.lose_frames(event.reason, is_lost=event.lost)
                return self._settle(record)
        if event.write_s:  # not where another machine writes it
            self._costs.observe_write(record.cost_class, event.write_s)
        if event.size_bytes:  # simulations write nothing
            record.outcome.written = Content(event.size_bytes, event.sha256)
            record.outcome.files, record.outcome.made = event.files, event.made
            if event.made and (difference := record.job.info.difference(event.made)):
                record.trouble.warnings.append(difference)
        return self._end(record, error=None)

    def _rank_lost(self, event: events.RankLost) -> None:
        self.ranks.lose(event)
        self.jobs.forget_held(event.rank)
        again = "it stays away" if event.is_retired else "a new worker is started"
        again = "the run stops" if self.closing.is_stopping else again
        logger.warning("rank %d is gone (%s); %s", event.rank, event.reason, again)
        if all(rank.is_retired for rank in self.ranks.records):
            raise WorkerError(f"no rank is left ({event.reason}); see the log, then run again")

    def _models_changed(self, event: events.ModelsChanged) -> None:
        """Every rank loads what it lacks; jobs become visible or are parked."""
        logger.info("from now on ranks hold %s: %s", ", ".join(event.models), event.reason)
        self.models.change(event.models)
        self.ranks.load(event.models, event.load_s, at_s=event.time_s)
        for record in self.jobs.records.values():
            self.jobs.place(record)

    def _load_failed(self, event: events.LoadFailed) -> Iterable[JobOutcome]:
        """The jobs of a model that no rank can load fail, now and for a while."""
        logger.error("model %s cannot be loaded: %s", " and ".join(event.models), event.reason)
        doom = self.models.give_up(event.models, event.reason, now_s=event.time_s)
        for rank in self.ranks.records:
            rank.view = None
        ended: list[JobOutcome] = []
        for record in [each for each in self.jobs.records.values() if each.model in event.models]:
            if record.arrived and not record.is_writing:
                record.trouble.fail(doom)
                ended += self._settle(record)
        return ended

    def _settle(self, record: JobRecord) -> Iterable[JobOutcome]:
        if record.trouble.doom and not record.flights and not record.is_writing:
            return self._end(record, error=record.trouble.doom)
        if record.trouble.doom:
            # A shared step ends for the sake of the others.
            self.flights.give_up(each for each in record.flights if each.dispatch.sharers is None)
        self.jobs.place(record)
        return ()

    def _end(self, record: JobRecord, *, error: str | None) -> Iterable[JobOutcome]:
        self.jobs.remove(record)
        if record.arrived:
            self.shares.leave(record.owner)
        return (record.end(ended_s=self.clock.now_s, error=error),)

    def check(self) -> None:
        """Assert what always holds: after every event in tests, and in runs when idle."""
        for part in (self.jobs, self.ranks, self.flights, self.models, self.closing, self.shares):
            part.check()
        for flight in self.flights.values():
            dispatch = flight.dispatch
            assert flight in self.jobs.records[dispatch.task.job_id].flights, f"{dispatch} is not its job's"
            for rank in dispatch.layout.ranks:
                assert flight in self.ranks.records[rank].flights, f"{dispatch} is not on rank {rank}"
        num_flights = sum(len(record.flights) for record in self.jobs.records.values())
        assert num_flights == len(self.flights), (
            f"jobs have {num_flights} dispatches, not {len(self.flights)}"
        )
