"""The only mutable truth of a run: jobs, ranks, and what was dispatched.

The state decides what is legal and changes on events alone. It hands policies a frozen
snapshot, kept up incrementally: an event costs the jobs and ranks that it touches.
"""

from __future__ import annotations

import functools
import logging
import math
import signal
from collections import ChainMap, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from gfgen.errors import InterruptedRunError, PolicyFault, WorkerError
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.control.closing import Closing
from gfgen.runtime.control.legality import check_degrees, check_types
from gfgen.runtime.control.records import (
    Flight,
    JobRecord,
    RankRecord,
    ending,
    is_ending,
    lookahead_of,
    timed_out_after,
)
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.core.openjobs import OpenJobOrders, OpenJobs, is_unbegun, kind_of
from gfgen.runtime.files.start import RunStart
from gfgen.runtime.ipc.content import Content
from gfgen.runtime.predict.cost import CostModel
from gfgen.snapshot import Decision, JobView, RankView, RunningTask, Snapshot

logger = logging.getLogger(__name__)

MAX_TASK_FAILURES = 2
"""So many failures of the same task fail its job."""
MAX_LOST_WORKERS = 3
"""So many deaths of workers while they ran a task of a job fail the job."""
RETRY_LOAD_S = 600.0
"""A model that no rank could load is tried again for jobs that arrive so much later."""
_SAME_TIME_S = 1e-6
_SAME_END = 0.1
"""Of the guard: a predicted end that is off by less stays as it is, and costs nothing."""
NUM_RECENT = 24
"""Arrivals that are remembered, as a sample of what may be expected."""
_RENEWALS_S = (0.25, 10.0)
"""Predictions of waiting jobs are renewed about twice in the time that a run has lasted, within
these bounds: early measurements change much, later ones little, and each renewal takes 4 us a job."""


class State:
    """Jobs, ranks and dispatches of one run."""

    def __init__(
        self, jobs: Sequence[AdmittedJob], start: RunStart, *, clock: Clock, costs: CostModel
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._lookahead_s = start.lookahead_s
        self._islands = tuple(map(tuple, start.islands or [range(start.num_ranks)]))
        self._max_degree = start.max_degree or max(map(len, self._islands))
        self._started_at = start.started_at
        self._arrived_at = start.arrived_at
        self._resume = dict(start.resume)
        last_numbers = [point.last_number for point in self._resume.values()]
        self._ranks = [RankRecord(rank) for rank in range(start.num_ranks)]
        self._jobs = {job.job_id: self._record(job) for job in jobs}
        self._looks_s: list[float] = []
        self._unwanted: set[int] = set()
        """Dispatches that are to be stopped, as far as nobody was told yet."""
        self._idle: set[int] = set()
        """Ranks that are ready and have nothing to do."""
        self._models = (
            frozenset(job.spec.model or "" for job in jobs)
            if start.resident is None
            else frozenset(start.resident)
        )
        self._is_limited = start.resident is not None
        self._parked: dict[str, JobRecord] = {}
        """Jobs that wait for their models, the longest first."""
        self._urgent: set[str] = set()
        """Those of them that have a deadline or a raised priority."""
        self._unloadable: dict[str, tuple[float, str]] = {}
        """By model that no rank could load: until when its jobs fail at once, and with what."""
        self._open = OpenJobs()
        self._recent: deque[tuple[JobRecord, JobView]] = deque(maxlen=NUM_RECENT)
        """The last arrivals, as they were then."""
        self._busy: dict[str, JobView] = {}
        self._flights: dict[int, Flight] = {}
        self._num_unfinished = len(self._jobs)
        self._num_writing = 0
        self._last_number = max([start.last_number, *last_numbers])
        self._job_costs = _JobCosts(self._jobs, costs)
        self._costs_version = costs.version
        self._renewed_s = 0.0
        self._closing = None if start.closes_s is None else Closing(start.closes_s, costs)
        self.is_closed = False
        """The closing time has come."""
        self.expects_more = False
        """Jobs may still be added: that all have ended does not finish the run."""
        self.stop_signal: int | None = None
        """The signal that asked the run to stop."""

    # What the control loop asks -----------------------------------------------------------

    @property
    def finished(self) -> bool:
        """All jobs have ended; or the run is stopping and nothing is under way any more."""
        if self.is_stopping:
            return not self._flights and not self._num_writing
        return self.all_ended and not self.expects_more

    @property
    def is_stopping(self) -> bool:
        """Nothing new is dispatched; what runs is left to end."""
        return self.stop_signal is not None or self.is_closed

    @property
    def closes_s(self) -> float | None:
        """When the run is to stop by itself."""
        return None if self._closing is None else self._closing.closes_s

    @property
    def all_ended(self) -> bool:
        """Every job has ended, well or not."""
        return self._num_unfinished == 0

    @property
    def stopped_at(self) -> dict[str, tuple[int, int]]:
        """(next task, dispatch that made its input) of jobs that have begun and not ended.

        Of those of which nothing is under way on a rank that lives.
        """
        return {
            job_id: (record.first_open_index, record.last_completed)
            for job_id, record in self._jobs.items()
            if record.last_completed is not None and not record.is_writing and self._has_stopped(record)
        }

    def _has_stopped(self, record: JobRecord) -> bool:
        flown = {rank for flight in record.flights for rank in flight.dispatch.layout.ranks}
        return all(self._ranks[rank].is_retired for rank in flown)

    @property
    def last_number(self) -> int:
        """Of the last dispatch."""
        return self._last_number

    @property
    def is_stuck(self) -> bool:
        """Jobs are open, and no event will come unless something is dispatched."""
        settled = all((rank.is_ready and not rank.is_loading) or rank.is_retired for rank in self._ranks)
        return len(self._open) > 0 and not self._flights and not self._num_writing and settled

    @property
    def num_ranks(self) -> int:
        """Ranks of this run, living or not."""
        return len(self._ranks)

    @property
    def has_ready_ranks(self) -> bool:
        """Some rank lives and has been ready; there is nothing to foresee without."""
        return any(rank.is_ready for rank in self._ranks)

    @property
    def max_degree(self) -> int:
        """The most ranks that one task can use."""
        return self._max_degree

    @property
    def num_parked(self) -> int:
        """Jobs that wait for their models."""
        return len(self._parked)

    @property
    def has_urgent_parked(self) -> bool:
        """Whether one of them has a deadline or a raised priority."""
        return bool(self._urgent)

    @property
    def is_loading(self) -> bool:
        """Some rank has yet to load the models of the last change."""
        return any(rank.is_loading for rank in self._ranks)

    @property
    def is_at_rest(self) -> bool:
        """Nothing runs, and nothing of the resident models can be started."""
        return not self._flights and not self._open_in_time(self._clock.turn_s)

    def parked_models(self) -> list[str]:
        """Models that jobs wait for, the most urgent first."""
        by_urgency = sorted(self._parked.values(), key=_urgency)
        return list(dict.fromkeys([record.model for record in by_urgency]))

    @property
    def longest_parked(self) -> tuple[str, float]:
        """The model of the job that has waited longest for it, and since when."""
        record = next(iter(self._parked.values()))
        return record.model, record.parked_since_s

    def resident_models_at_work(self) -> set[str]:
        """Resident models with jobs that have arrived and not ended."""
        return {record.model for record in self._jobs.values() if record.arrived} & self._models

    @property
    def open_jobs(self) -> tuple[str, ...]:
        """Jobs whose next task could run."""
        return self._open.ids

    @property
    def has_choice(self) -> bool:
        """Some job is open and some rank can take it: a policy has something to decide."""
        if self._idle and len(self._open):
            return True
        about_to_end = self._ending(self._clock.turn_s)
        if not about_to_end and not self._idle:
            return False
        is_open = len(self._open) > 0 or bool(self._opening(about_to_end))
        return is_open and bool(self._free_ranks(about_to_end))

    def snapshot(self) -> Snapshot:
        """The frozen picture of this moment, for a policy."""
        now_s = self._clock.turn_s
        about_to_end = self._ending(now_s)
        open_jobs = self._open_in_time(now_s)
        busy = self._busy.copy()
        joining = [busy.pop(job_id) for job_id in self._opening(about_to_end)]
        for view in joining:
            open_jobs[view.job_id] = view
        return Snapshot(
            now_s=now_s,
            open=open_jobs,
            busy=busy,
            running=tuple([flight.view for flight in self._flights.values()]),
            ranks=self._rank_views(self._free_ranks(about_to_end)),
            islands=self._islands,
            max_degree=self._max_degree,
            costs=self._job_costs,
            orders=OpenJobOrders(self._open, open_jobs, joining=joining),
        )

    def snapshot_of_traffic(self) -> Snapshot:
        """The same, with the last arrivals and what their tasks cost: to look ahead from.

        What a policy sees later does not depend on whether somebody looked ahead: a replay does not.
        """
        records = ChainMap(self._jobs, {record.job_id: record for record, _ in self._recent})
        return replace(
            self.snapshot(),
            costs=_JobCosts(records, self._costs, are_handed_out=False),
            recent=tuple([view for _, view in self._recent]),
        )

    def begin(self, decision: Decision) -> Dispatch:
        """Register a decision as the next dispatch; it is judged at the moment of this turn's snapshot.

        Raises: PolicyFault when it is illegal; nothing has changed then.
        """
        now_s = self._clock.turn_s
        record = self._legal(decision, now_s)
        task, layout = decision.task, decision.layout
        start_s = max([now_s, *[self._ranks[rank].free_at_s for rank in layout.ranks]])
        source = self._living_holder(record)
        is_reached = source is not None and self._can_send(source, layout)
        move_s = self._costs.move_s(record.cost_class, source, layout)
        task_s = self._costs.expected_s(record.cost_class, task.stage, layout.degrees)
        self._last_number += 1
        dispatch = Dispatch(
            number=self._last_number,
            task=task,
            layout=layout,
            submitted_s=now_s,
            predicted_start_s=start_s,
            predicted_end_s=start_s + move_s + task_s,
            producer=record.producer,
            source=source,
            # Otherwise ranks take the state from the slab, where its last holders publish it.
            transfers=record.transfers(task, source=source if is_reached else None, destination=layout),
        )
        view = RunningTask(task, layout, dispatch.predicted_end_s)
        is_measured = self._costs.has_seen(record.cost_class, task.stage, layout.degrees)
        lead = lookahead_of(move_s + task_s, lookahead_s=self._lookahead_s)
        flight = Flight(dispatch, view, is_foreseeable=is_measured, lookahead_s=lead)
        if lead > 0:
            self._looks_s.append(dispatch.predicted_end_s - lead)
        self._flights[dispatch.number] = flight
        record.flights.append(flight)
        for rank in layout.ranks:
            self._ranks[rank].flights.append(flight)
            self._ranks[rank].view = None
            self._idle.discard(rank)
        if self._closing is not None and task.stage is Stage.DENOISE:
            self._closing.note(record.cost_class, layout)
        record.next_index = task.index + 1
        record.holder = layout
        record.holder_lives = self._lives(layout)
        record.producer = dispatch.number
        self._place(record)
        return dispatch

    def add(self, job: AdmittedJob) -> None:
        """One more job, of a model that the ranks have loaded; it arrives by its event."""
        assert job.job_id not in self._jobs, f"job {job.job_id} is at work"
        self._jobs[job.job_id] = self._record(job)
        self._num_unfinished += 1

    # What events do -----------------------------------------------------------------------

    def apply(self, event: Event) -> Iterable[JobOutcome]:
        """Change by one event; returns the jobs that have ended by it."""
        match event:
            case events.TaskDone():
                return self._task_done(event)
            case events.Wakeup():
                return ()
            case events.TaskFailed():
                return self._task_failed(event)
            case events.JobArrived():
                return self._arrived(event)
            case events.JobTimedOut():
                return self._timed_out(self._jobs.get(event.job_id), event.time_s)
            case events.JobCancelled():
                return self._cancelled(self._jobs.get(event.job_id))
            case events.OutputWritten():
                record = self._jobs[event.job_id]
                if event.size_bytes:  # simulations write nothing
                    record.written = Content(event.size_bytes, event.sha256)
                return self._written(record, error=None)
            case events.OutputFailed():
                return self._written(self._jobs[event.job_id], error=event.reason)
            case events.FramesLost():
                return self._frames_lost(self._jobs[event.job_id], event)
            case events.RankReady():
                self._ranks[event.rank].is_ready = True
                self._note_idle(event.rank, since_s=event.time_s)
            case events.RankLost():
                self._rank_lost(event)
            case events.ModelsChanged():
                self._models_changed(event)
            case events.LoadFailed():
                return self._load_failed(event)
            case events.RankLoaded():
                rank = self._ranks[event.rank]
                rank.is_loading, rank.view = False, None
                self._note_idle(event.rank, since_s=event.time_s)
            case events.StopRequested():
                self._stop(event.signal_number)
            case events.ClosingTime():
                self.is_closed = True
            case events.GraceOver():
                self._unwanted.update(self._flights)
            case _:
                pass
        return ()

    def _arrived(self, event: events.JobArrived) -> Iterable[JobOutcome]:
        """The job is there; unless it was cancelled before."""
        record = self._jobs.get(event.job_id)
        if record is None:
            return ()
        record.arrived = True
        until_s, reason = self._unloadable.get(record.model, (-math.inf, None))
        if event.time_s < until_s:
            record.doom = record.doom or reason
        self._recent.append((record, record.view(self._costs)))
        return self._settle(record)

    def _stop(self, signal_number: int) -> None:
        """The first signal lets running tasks end; the second one does not wait for them."""
        if self.stop_signal is not None:
            raise InterruptedRunError("stopped at once; finished jobs are kept", signal_number=signal_number)
        self.stop_signal = signal_number
        again = "press again" if signal_number == signal.SIGINT else "a second signal"
        logger.warning("stopping after the running tasks; %s to stop at once", again)

    def _task_done(self, event: events.TaskDone) -> Iterable[JobOutcome]:
        for times in event.times:
            self._ranks[times.rank].ended_s = max(self._ranks[times.rank].ended_s, times.ended_s)
        flight, record = self._landed(event)
        if flight.failure is None:
            self._completed(record, flight, event)
            self._renew_ends_behind(record, flight)
        else:
            self._failed(record, flight)
        return self._settle(record)

    def _task_failed(self, event: events.TaskFailed) -> Iterable[JobOutcome]:
        flight, record = self._landed(event)
        flight.failure = flight.failure or event.reason
        flight.void = flight.void or event.void
        flight.lost = flight.lost or event.lost
        self._failed(record, flight)
        return self._settle(record)

    def _landed(self, event: events.TaskDone | events.TaskFailed) -> tuple[Flight, JobRecord]:
        """A dispatch has ended: its ranks are free of it."""
        flight = self._flights.pop(event.dispatch)
        record = self._jobs[flight.dispatch.task.job_id]
        record.flights.remove(flight)
        for rank in flight.dispatch.layout.ranks:
            self._ranks[rank].flights.remove(flight)
            self._ranks[rank].view = None
            self._note_idle(rank, since_s=event.time_s)
        return flight, record

    def _completed(self, record: JobRecord, flight: Flight, event: events.TaskDone) -> None:
        task, layout, busy_s = flight.dispatch.task, flight.dispatch.layout, event.busy_s
        record.last_completed, record.last_ended_s = flight.dispatch.number, event.ended_s
        if task.stage is not Stage.DECODE:
            record.made_latents = flight.dispatch.number
        if record.started_s is None:
            record.started_s = event.started_s
        record.busy_s += busy_s
        record.timings[task.stage] = record.timings.get(task.stage, 0.0) + busy_s
        if record.last_layout != layout:
            record.last_layout = layout
            record.layouts.append(str(layout))
        self._costs.observe(record.cost_class, task.stage, layout.degrees, busy_s)
        if task.index + 1 == record.num_tasks:
            record.is_writing = True
            self._num_writing += 1

    def _renew_ends_behind(self, record: JobRecord, flight: Flight) -> None:
        """What waited for a task, or for its ranks, begins when that has really ended.

        Else what each prediction is off by would add up from step to step.
        """
        if self._lookahead_s <= 0:
            return
        waiting = record.flights[:1]
        for rank in flight.dispatch.layout.ranks:
            waiting += [other for other in self._ranks[rank].flights[:1] if other not in waiting]
        for other in waiting:
            task, layout = other.dispatch.task, other.dispatch.layout
            cost_class = self._jobs[task.job_id].cost_class
            end_s = self._began_s(other) + self._costs.expected_s(cost_class, task.stage, layout.degrees)
            is_off = abs(end_s - other.view.predicted_end_s) > _SAME_END * self._lookahead_s
            if is_off and self._has_begun(other):
                other.view = RunningTask(task, layout, end_s)
                for rank in layout.ranks:
                    self._ranks[rank].view = None
                self._looks_s.append(end_s - other.lookahead_s)

    def _has_begun(self, flight: Flight) -> bool:
        """Whether its input is there, and nothing is before it on any of its ranks."""
        record = self._jobs[flight.dispatch.task.job_id]
        return record.flights[0] is flight and all(
            self._ranks[rank].flights[0] is flight for rank in flight.dispatch.layout.ranks
        )

    def _began_s(self, flight: Flight) -> float:
        """When its input was there, and its ranks had ended what was before."""
        record = self._jobs[flight.dispatch.task.job_id]
        ended_s = [self._ranks[rank].ended_s for rank in flight.dispatch.layout.ranks]
        return max(flight.dispatch.submitted_s, record.last_ended_s, *ended_s)

    def take_looks(self) -> list[float]:
        """When something may be queued behind a running task, as far as that was not asked before."""
        looks_s, self._looks_s = self._looks_s, []
        return looks_s

    def take_unwanted(self) -> list[Dispatch]:
        """Running tasks whose results nobody wants any more, as far as that was not asked before."""
        unwanted, self._unwanted = self._unwanted, set()
        return [self._flights[number].dispatch for number in sorted(unwanted & self._flights.keys())]

    def _failed(self, record: JobRecord, flight: Flight) -> None:
        """Go back to the failed task; what was queued on its output is void and ends by itself."""
        task, number = flight.dispatch.task, flight.dispatch.number
        for queued in [other for other in record.flights if other.dispatch.number > number]:
            queued.failure, queued.void = "its input failed", True
        if flight.lost or not flight.void:
            self._blame(record, task, flight.failure or "", lost=flight.lost)
        record.next_index = min(record.next_index, task.index)
        record.holder = None
        # A task that fails early may do so before its producer has reported.
        under_way = [other.dispatch.number for other in record.flights if other.dispatch.number < number]
        record.producer = under_way[0] if under_way else record.last_completed

    def _blame(self, record: JobRecord, task: Task, reason: str, *, lost: bool) -> None:
        """Count a failure, which dooms the job when there have been too many."""
        name = record.job.trajectory.name_of(task)
        if lost:
            record.num_lost_workers += 1
            logger.warning("job %s: %s lost its worker: %s", record.job_id, name, reason)
            record.warnings.append(f"{name} lost its worker ({reason})")
            if record.num_lost_workers >= MAX_LOST_WORKERS:
                record.doom = record.doom or f"{record.num_lost_workers} workers died under it: {reason}"
            return
        record.failures[task.index] += 1
        logger.warning("job %s: %s failed: %s", record.job_id, name, reason)
        record.warnings.append(f"{name} failed ({reason})")
        if record.failures[task.index] >= MAX_TASK_FAILURES:
            record.doom = record.doom or f"{name}: {reason}"

    def _frames_lost(self, record: JobRecord, event: events.FramesLost) -> Iterable[JobOutcome]:
        """The decode runs again, from latents in the slab."""
        self._num_writing -= 1
        record.is_writing = False
        timeout_s = record.job.spec.timeout_s
        if timeout_s is not None and event.time_s >= record.arrival_s + timeout_s:
            record.doom = record.doom or timed_out_after(timeout_s)
        record.next_index, record.holder = record.num_tasks - 1, None
        record.producer = record.last_completed = record.made_latents
        self._blame(record, record.next_task, event.reason, lost=event.lost)
        return self._settle(record)

    def _rank_lost(self, event: events.RankLost) -> None:
        """The rank takes nothing until its successor is ready; what it held is in the slabs."""
        rank = self._ranks[event.rank]
        rank.is_ready, rank.is_retired, rank.is_loading, rank.view = False, event.is_retired, False, None
        self._idle.discard(event.rank)
        rank.num_lives += 1
        again = "it stays away" if event.is_retired else "a new worker is started"
        again = "the run stops" if self.is_stopping else again
        logger.warning("rank %d is gone (%s); %s", event.rank, event.reason, again)
        if all(rank.is_retired for rank in self._ranks):
            raise WorkerError(f"no rank is left ({event.reason}); see the log, then run again")

    def _models_changed(self, event: events.ModelsChanged) -> None:
        """Every rank loads what it lacks; jobs become visible or are parked."""
        logger.info("from now on ranks hold %s: %s", ", ".join(event.models), event.reason)
        self._models = frozenset(event.models)
        for rank in self._ranks:
            rank.is_loading, rank.load_s, rank.view = not rank.is_retired, event.load_s, None
            rank.idle_since_s = max(rank.idle_since_s, event.time_s)
        self._idle.clear()
        for record in self._jobs.values():
            self._place(record)

    def _load_failed(self, event: events.LoadFailed) -> Iterable[JobOutcome]:
        """Jobs of a model that no rank can load fail, now and for a while; the others go on."""
        names = " and ".join(event.models)
        logger.error("model %s cannot be loaded: %s", names, event.reason)
        self._models -= set(event.models)
        for rank in self._ranks:
            rank.view = None
        doom = f"model {names} cannot be loaded: {event.reason}"
        until_s = event.time_s + RETRY_LOAD_S if self._is_limited else math.inf  # or nobody loads it again
        self._unloadable |= dict.fromkeys(event.models, (until_s, doom))
        ended: list[JobOutcome] = []
        for record in [each for each in self._jobs.values() if each.model in event.models]:
            if record.arrived and not record.is_writing:
                record.doom = record.doom or doom
                ended += self._settle(record)
        return ended

    def _timed_out(self, record: JobRecord | None, at_s: float) -> Iterable[JobOutcome]:
        """The job's time is up; unless this is the time-out of an earlier job of the same id."""
        if record is None or record.is_writing or record.job.spec.timeout_s is None:
            return ()
        if abs(record.arrival_s + record.job.spec.timeout_s - at_s) > _SAME_TIME_S:
            return ()
        record.doom = record.doom or timed_out_after(record.job.spec.timeout_s)
        return self._settle(record)

    def _cancelled(self, record: JobRecord | None) -> Iterable[JobOutcome]:
        """Nobody wants the job any more; unless its file, which is being written, is there first."""
        if record is None or record.doom:
            return ()
        record.doom, record.is_cancelled = "cancelled", True
        return self._settle(record)

    def _settle(self, record: JobRecord) -> Iterable[JobOutcome]:
        """Put the job where its state says; a doomed one ends when nothing of it is in flight."""
        if record.doom and not record.flights and not record.is_writing:
            return self._ended(record, error=record.doom)
        if record.doom:
            self._unwanted.update(flight.dispatch.number for flight in record.flights)
        self._place(record)
        return ()

    def _written(self, record: JobRecord, error: str | None) -> Iterable[JobOutcome]:
        self._num_writing -= 1
        record.is_cancelled = record.is_cancelled and error is not None
        return self._ended(record, error=error)

    def _ended(self, record: JobRecord, *, error: str | None) -> Iterable[JobOutcome]:
        del self._jobs[record.job_id]
        self._open.discard(record.job_id)
        self._busy.pop(record.job_id, None)
        self._unpark(record.job_id)
        self._num_unfinished -= 1
        return (record.outcome(ended_s=self._clock.now_s, error=error),)

    # What keeps the snapshot up -----------------------------------------------------------

    def _place(self, record: JobRecord) -> None:
        """Move the job's view to where it belongs: open, busy, or out of the policies' sight."""
        job_id = record.job_id
        self._busy.pop(job_id, None)
        is_visible = record.arrived and not record.doom and record.next_index < record.num_tasks
        if self._is_limited:
            is_visible = self._is_resident(record, is_visible=is_visible)
        if is_visible and not record.flights:
            self._open.put(record.view(self._costs))
            return
        self._open.discard(job_id)
        if is_visible:
            self._busy[job_id] = record.view(self._costs)

    def _is_resident(self, record: JobRecord, *, is_visible: bool) -> bool:
        """Whether a job is visible, and its model resident; if only the latter is wanting, it is parked."""
        if not is_visible or record.model in self._models:
            self._unpark(record.job_id)
            return is_visible
        if record.job_id not in self._parked:
            self._parked[record.job_id] = record
            record.parked_since_s = self._clock.turn_s
        if record.deadline_s is not None or record.job.spec.priority > 0:
            self._urgent.add(record.job_id)
        return False

    def _unpark(self, job_id: str) -> None:
        self._parked.pop(job_id, None)
        self._urgent.discard(job_id)

    def _open_in_time(self, now_s: float) -> dict[str, JobView]:
        """The open jobs, without those that would begin now and not end by the closing time."""
        views = self._open.frozen()
        if self._closing is None:
            return views
        late = set()
        for model, shape, num_tasks in self._open.unbegun_kinds:
            cost_class = self._costs.known_class(model, shape)
            if self._closing.holds_back(cost_class, num_tasks, now_s=now_s):
                late.add((model, shape, num_tasks))
        if not late:  # nearly all night: to look at each job would cost more than all else
            return views
        return {
            job_id: view
            for job_id, view in views.items()
            if not is_unbegun(view) or kind_of(view) not in late
        }

    def renew_predictions(self) -> None:
        """Let what was learned reach all views, now and then: it costs a view for every job.

        Before a policy is asked, and never for those who watch: what a policy sees does not
        depend on whether somebody looks on.
        """
        if self._costs_version == self._costs.version:
            return
        now_s = self._clock.turn_s
        soonest, latest = _RENEWALS_S
        if now_s < self._renewed_s + min(latest, max(soonest, self._renewed_s / 2)):
            return
        self._costs_version, self._renewed_s = self._costs.version, now_s
        self._open.renew(lambda job_id: self._jobs[job_id].view(self._costs))
        for job_id in self._busy:
            self._busy[job_id] = self._jobs[job_id].view(self._costs)

    def _rank_views(self, free: Set[int]) -> tuple[RankView, ...]:
        views = []
        for rank in self._ranks:
            view, can_take = rank.view, rank.rank in free
            if view is None or view.can_take is not can_take:
                models = frozenset[str]() if rank.is_loading else self._models
                view = rank.view = RankView(rank.rank, rank.free_at_s, can_take, models)
            if rank.is_ready:
                views.append(view)
        return tuple(views)

    def _note_idle(self, rank: int, *, since_s: float) -> None:
        record = self._ranks[rank]
        if record.is_ready and not record.flights:
            record.idle_since_s = since_s
            if not record.is_loading:
                self._idle.add(rank)

    def _free_ranks(self, about_to_end: Sequence[Flight]) -> Set[int]:
        """Ranks that can take a task: idle ones, and those whose only one is about to end."""
        behind = [
            rank
            for flight in about_to_end
            for rank in flight.dispatch.layout.ranks
            if len(self._ranks[rank].flights) == 1
            and self._ranks[rank].is_ready
            and not self._ranks[rank].is_loading
        ]
        return self._idle.union(behind) if behind else self._idle

    def _lives(self, layout: Layout) -> tuple[int, ...]:
        return tuple([self._ranks[rank].num_lives for rank in layout.ranks])

    def _living_holder(self, record: JobRecord) -> Layout | None:
        """The layout that holds the job's latents; None when one of its ranks has died since."""
        if record.holder is None or self._lives(record.holder) != record.holder_lives:
            return None
        return record.holder

    def _can_send(self, source: Layout, destination: Layout) -> bool:
        """Whether ranks send what they hold: they reach each other, and none of them loads models first.

        On a GPU one that does maps the arena of a new peer afterwards, and would wait with it for itself.
        """
        if any(self._ranks[rank].is_loading for rank in source.ranks):
            return False
        return _share_island((*source.ranks, *destination.ranks), self._islands)

    def _ending(self, now_s: float) -> list[Flight]:
        """Running tasks behind which the next ones may be queued."""
        return ending(self._flights.values(), now_s=now_s)

    def _opening(self, about_to_end: Sequence[Flight]) -> list[str]:
        """Jobs whose next task may be queued behind the one that runs: one step ahead, and no more."""
        job_ids = [flight.dispatch.task.job_id for flight in about_to_end]
        return [job_id for job_id in job_ids if job_id in self._busy and len(self._jobs[job_id].flights) == 1]

    def _legal(self, decision: Decision, now_s: float) -> JobRecord:
        check_types(decision)
        task, layout = decision.task, decision.layout
        record = self._jobs.get(task.job_id)
        if record is None or not record.arrived or record.doom:
            raise PolicyFault(f"there is no open job {task.job_id}")
        if record.model not in self._models and self._is_limited:
            raise PolicyFault(f"job {task.job_id}: ranks do not hold {record.model} now")
        is_over = record.next_index == record.num_tasks
        if is_over or task != record.next_task:
            raise PolicyFault(f"job {task.job_id}: {task} (number {task.index}) is not its next task")
        if record.flights and not is_ending(record.flights, now_s=now_s):
            raise PolicyFault(f"job {task.job_id}: {task} is not open, its input does not exist yet")
        if layout.degree > self._max_degree:
            raise PolicyFault(f"job {task.job_id}: {layout} has more than {self._max_degree} ranks")
        check_degrees(record.job, task, layout)
        if not _share_island(layout.ranks, self._islands):
            raise PolicyFault(f"job {task.job_id}: the ranks of {layout} do not reach each other")
        for number in layout.ranks:
            rank = self._ranks[number]
            is_free = not rank.flights or is_ending(rank.flights, now_s=now_s)
            if not rank.is_ready or rank.is_loading or not is_free:
                raise PolicyFault(f"job {task.job_id}: rank {number} is not free")
        return record

    def _record(self, job: AdmittedJob) -> JobRecord:
        spec = job.spec
        deadline_s = None
        if spec.deadline_s is not None:
            now = self._started_at + spec.arrival_s
            arrived_at = self._arrived_at.get((job.job_id, job.info.spec_hash), now)
            deadline_s = arrived_at + spec.deadline_s - self._started_at
        elif spec.deadline_at is not None:
            deadline_s = spec.deadline_at - self._started_at
        record = JobRecord(job, self._costs.class_of(job), spec.arrival_s, deadline_s)
        if job.info.rounding is not None:
            record.warnings.append(f"rounded {job.info.rounding}")
        point = self._resume.pop(job.job_id, None)
        if point is not None:
            record.next_index = point.next_index
            record.producer = record.last_completed = record.made_latents = point.producer
            record.warnings.append(f"resumed at {job.trajectory.task(point.next_index)}")
        return record


def _urgency(record: JobRecord) -> tuple[float, float]:
    """Of jobs that are parked, in the order in which they were."""
    return -record.job.spec.priority, math.inf if record.deadline_s is None else record.deadline_s


@functools.lru_cache(maxsize=1024)
def _share_island(ranks: tuple[int, ...], islands: tuple[tuple[int, ...], ...]) -> bool:
    """Whether these ranks all reach each other's memory; the same few are asked about at every step."""
    return any(set(island).issuperset(ranks) for island in islands)


class _JobCosts:
    """The cost model, asked by job."""

    __slots__ = ("_are_handed_out", "_costs", "_jobs")

    def __init__(
        self, jobs: Mapping[str, JobRecord], costs: CostModel, *, are_handed_out: bool = True
    ) -> None:
        self._jobs = jobs
        self._costs = costs
        self._are_handed_out = are_handed_out

    def task_s(self, task: Task, layout: Layout) -> float:
        cost_class = self._jobs[task.job_id].cost_class
        return self._costs.task_s(cost_class, task.stage, layout.degrees, is_handed_out=self._are_handed_out)

    def remaining_s(self, task: Task, layout: Layout) -> float:
        record = self._jobs[task.job_id]
        return self._costs.remaining_s(
            record.cost_class, task, record.num_tasks, layout.degrees, is_handed_out=self._are_handed_out
        )

    def move_s(self, job_id: str, source: Layout | None, layout: Layout) -> float:
        return self._costs.move_s(self._jobs[job_id].cost_class, source, layout)
