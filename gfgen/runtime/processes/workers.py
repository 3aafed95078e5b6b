"""The process backend: turns dispatches into messages to workers, and settled answers into events; slabs."""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gfgen.errors import in_one_line
from gfgen.graph import Stage
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch, GivenUp
from gfgen.runtime.core.events import Clock, Event
from gfgen.runtime.files import resume
from gfgen.runtime.files.resume import ResumePoint
from gfgen.runtime.ipc import messages
from gfgen.runtime.ipc.messages import StartJob
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.processes.child import GONE, Joined, Loaded, Lost, Phase, RankProcess, WriterProcess
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.recovery import Attempts, Cause, Recovery
from gfgen.runtime.processes.writes import Writes
from gfgen.system.signals import SignalPipe

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
        self._saved: set[str] = set()

    def slab(self, job_id: str) -> int:
        """The job's slab, made at its first task with kept state. Raises: OSError, ValueError, KeyError."""
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
        """Keep a job's state for a later run; if that fails, the job starts again then."""
        self._saved.add(job_id)
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
        if job_id not in self._saved:
            resume.forget(self.output_dir, job_id)

    def close(self) -> None:
        for fd in self._slabs.values():
            os.close(fd)
        self._slabs.clear()


_ANSWER_S = 1.0  # the longest wait for the ranks' memory use at the end of a run


class Requests(Protocol):
    """Requests to a run from outside; readable when there is one."""

    def fileno(self) -> int: ...

    def take_events(self, now_s: float) -> Sequence[Event]:
        """The requests since the last call, whose only effect is a turn of the loop."""


WarmUps = Callable[[Sequence[AdmittedJob]], Sequence[messages.WarmUp]]


class ProcessBackend:
    """Runs dispatches on a pool of processes."""

    def __init__(
        self,
        pool: WorkerPool,
        memory: JobMemory,
        *,
        clock: Clock,
        signals: SignalPipe | None = None,
        requests: Requests | None = None,
        warm_ups: WarmUps | None = None,
        waits_for_space: bool = False,
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._clock = clock
        self._writes = Writes(pool, memory.output_dir, waits_for_space=waits_for_space)
        self._attempts = Attempts()
        self._recovery = Recovery(pool, self._attempts)
        self._memory_use: dict[int, messages.MemoryUse] = {}
        self._own_signals = SignalPipe() if signals is None else None
        self._inputs = [each for each in (signals, self._own_signals, requests) if each is not None]
        for source in self._inputs:
            pool.listen(source)
        self._warm_ups: WarmUps | None = None
        self._kinds: set[object] = set()
        self._names: dict[str, set[str]] = defaultdict(set)
        self._told: set[str] = set()  # models whose failure to load has been reported
        self._pinged_s = pool.clock.now_s
        self._pending: list[Event] = []  # events that come from no message
        self.add(list(memory.jobs.values()))  # ranks were told of these before
        self._warm_ups = warm_ups
        self._begin()

    def _begin(self) -> None:
        """Take over a pool: report workers that take tasks as ready, and retired ranks as lost."""
        pool, now_s = self._pool, self._clock.now_s
        pool.begin_run()
        pool.steps_at_hand = self._steps_at_hand
        for worker in pool.workers:
            worker.jobs.clear()
            if worker.phase in GONE:
                why = "it was given up before the run began"
                lost = events.RankLost(
                    now_s, worker.rank, worker.incarnation, why, worker.rank in pool.retired
                )
                self._pending.append(lost)
                continue
            worker.tell(messages.Reset())
            worker.heard_s = pool.clock.now_s  # between runs it is not asked to send anything
            if worker.has_joined and worker.phase is not Phase.ENDING:
                self._pending.append(
                    events.RankReady(now_s, worker.rank, worker.incarnation, worker.startup_s)
                )

    def wait(self, until: float | None) -> list[Event]:
        """Events in order of receipt, then those that are due; none if nothing happened for a tick."""
        found, self._pending = [*self._pending, *self._load_failures()], []
        timeout_s = math.inf if until is None else until - self._clock.now_s
        for source, what in self._pool.turn(0.0 if found else timeout_s):
            found.extend(self._events_of(source, what))
        self._look_for_hung_processes()
        found += self._writes.look(self._clock.now_s)
        found += self._clock.due()
        self._pool.is_stopping |= any(
            isinstance(each, events.StopRequested | events.ClosingTime) for each in found
        )
        return found

    def submit(self, dispatch: Dispatch) -> None:
        """Send a task to its ranks, after what they do not know yet of its job."""
        task, ranks = dispatch.task, dispatch.layout.ranks
        try:
            self._memory.slab(task.job_id)
            job = self._memory.jobs[task.job_id]
            fds = (self._writes.new_frames(job, dispatch.number),) if task.stage is Stage.DECODE else ()
        except (OSError, ValueError, KeyError) as error:  # too many open files, or kept state is gone
            reason = f"its state has no place here: {in_one_line(error)}"
            self._pending.append(events.TaskFailed(self._clock.now_s, dispatch.number, reason))
            return
        due_s = dispatch.predicted_end_s - self._clock.now_s + self._pool.patience.for_task_s(dispatch)
        clock = self._pool.clock
        self._attempts.begin(dispatch, deadline_s=clock.now_s + due_s, paused_before_s=clock.paused_s)
        self._pool.last_number = dispatch.number
        incarnations = tuple([self._pool.workers[rank].incarnation for rank in ranks])
        self._ask_for_state(dispatch)
        for rank in ranks:
            worker = self._pool.workers[rank]
            self._memory.introduce(task.job_id, worker)
            message = messages.RunTask(
                number=dispatch.number,
                job_id=task.job_id,
                task_index=task.index,
                producer=dispatch.producer,
                layout=dispatch.layout,
                incarnations=incarnations,
                transfers=tuple([t for t in dispatch.transfers if t.destination == rank]),
                wait_s=self._pool.patience.to_wait_s(dispatch),
                expected_s=dispatch.predicted_s,
                last_sharer=None if dispatch.sharers is None else dispatch.sharers[-1],
                is_approximate=task.stage is Stage.APPROXIMATE,
            )
            worker.tell(message, fds)
        self._recovery.include_new()

    def stop(self, dispatches: Sequence[Dispatch]) -> None:
        """Let ranks leave unwanted tasks; a rank that does not leave in time is killed and replaced."""
        self._recovery.stop([dispatch.number for dispatch in dispatches])

    def release(self, job_id: str) -> None:
        """Close the job's memory and let workers forget it."""
        for worker in self._pool.workers:
            if job_id in worker.jobs:
                worker.jobs.discard(job_id)
                worker.tell(messages.ForgetJob(job_id))
        self._writes.release(job_id)
        self._memory.release(job_id)

    def save(self, job_id: str, *, next_index: int, producer: int, given_up: GivenUp) -> None:
        self._memory.save(job_id, self._pool, next_index=next_index, producer=producer, given_up=given_up)

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        for name, checkpoint in models.items():
            self._names[str(checkpoint)].add(name)
        self._told.difference_update(models)
        self._pool.set_models(models.values())

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        """Accept more jobs; workers get each of them before its first task."""
        new = [job for job in jobs if job.kind not in self._kinds]
        if new and self._warm_ups is not None:
            self._pool.prepare_later(self._warm_ups(new))
        self._kinds |= {job.kind for job in new}
        self._memory.jobs |= {job.job_id: job for job in jobs}
        for job in jobs:
            self._names[str(job.checkpoint)].add(job.spec.model or "")

    def memory_use(self) -> dict[int, messages.MemoryUse]:
        """The memory that ranks have used in this run, of those that answer in time."""
        asked = [worker for worker in self._pool.living if worker.has_started]
        for worker in asked:
            worker.tell(messages.TellMemory())
        deadline_s = self._clock.now_s + _ANSWER_S
        while len(self._memory_use) < len(asked) and (left_s := deadline_s - self._clock.now_s) > 0:
            for source, what in self._pool.turn(left_s):
                if source in self._inputs:  # a signal ends the wait
                    return self._memory_use
                list(self._events_of(source, what))
        return self._memory_use

    def close(self) -> None:
        """Release all memory, and the pool, which stays usable."""
        for source in self._inputs:
            self._pool.ignore(source)
        if self._own_signals:
            self._own_signals.close()
        self._pool.steps_at_hand = tuple
        self._memory.close()
        self._writes.close()

    def _load_failures(self) -> Iterator[events.LoadFailed]:
        for checkpoint, reason in self._pool.models.unloadable.items():
            names = self._names.pop(checkpoint, set()) - self._told
            self._told |= names
            if names:
                yield events.LoadFailed(self._clock.now_s, tuple(sorted(names)), reason)

    def _events_of(self, source: Any, what: Any) -> Iterator[Event]:
        now_s = self._clock.now_s
        if isinstance(source, WriterProcess):
            yield from self._writes.events_of(source, what, now_s)
            return
        match what:
            case messages.TaskReport():
                yield from self._task_done(source, what, now_s)
            case messages.TaskFault():
                self._recovery.fail(source, what)
            case messages.FramesStored(number, None):
                self._writes.stored(number, source.rank)
            case messages.FramesStored(number, str() as reason) if number in self._writes.storing(
                source.rank
            ):
                yield from self._writes.lose_frames([number], reason, now_s, lost=False)
                self._recovery.fail(source, messages.TaskFault(number, reason))
            case messages.Abandoned() | messages.EdgesRestarted():
                yield from self._recovery.answered(source.rank, what, now_s=now_s)
            case Joined():
                yield events.RankReady(now_s, source.rank, source.incarnation, source.startup_s)
            case Loaded():
                copied = {name for path in what.copied for name in self._names[path]}
                yield events.RankLoaded(now_s, source.rank, what.load_s, tuple(sorted(copied)))
            case Lost():
                yield from self._worker_lost(source, what, now_s)
            case messages.MemoryUse():
                self._memory_use[source.rank] = what
            case None if isinstance(source, SignalPipe):
                yield from (events.StopRequested(now_s, number) for number in source.take())
            case None:
                yield from source.take_events(now_s)
            case _:  # the pool has taken it
                pass

    def _task_done(self, worker: RankProcess, report: messages.TaskReport, now_s: float) -> Iterator[Event]:
        on_clock, times = self._clock.from_monotonic, report.times
        times = times._replace(started_s=on_clock(times.started_s), ended_s=on_clock(times.ended_s))
        if not self._attempts.report(report.number, times):
            return
        if report.do_frames_follow:
            self._writes.expect(self._attempts[report.number].dispatch.task.job_id, worker.rank)
        for attempt in self._attempts.take_done(report.number):
            yield events.TaskDone(now_s, attempt.dispatch.number, attempt.times)
            if attempt.dispatch.task.stage is Stage.DECODE:
                self._writes.decoded(attempt.dispatch.task.job_id)

    def _worker_lost(self, worker: RankProcess, lost: Lost, now_s: float) -> Iterator[Event]:
        """A rank is gone: give up what it was part of."""
        # A run without ranks ends with an error and keeps nothing. One that stops keeps its jobs.
        is_retired = lost.is_retired and bool(self._pool.living or not self._pool.is_stopping)
        yield events.RankLost(now_s, worker.rank, worker.incarnation, lost.reason, is_retired=is_retired)
        yield from self._load_failures()
        why, storing = f"rank {worker.rank}: {lost.reason}", self._writes.storing(worker.rank)
        yield from self._writes.lose_frames(storing, why, now_s, lost=True)
        cause = Cause(why, lost=True) if worker.is_to_blame else None
        self._recovery.give_up(self._attempts.lose(worker.rank, cause, storing=storing))
        yield from self._recovery.advance(now_s)

    def _steps_at_hand(self) -> Sequence[messages.WarmUp]:
        """What to prepare for known jobs of the models that ranks hold."""
        held = self._pool.models.checkpoints
        jobs = [job for job in self._memory.jobs.values() if str(job.checkpoint) in held]
        return self._warm_ups(jobs) if self._warm_ups else ()

    def _look_for_hung_processes(self) -> None:
        now_s, living = self._pool.clock.now_s, self._pool.living
        if now_s >= self._pinged_s + self._pool.patience.ping_s:
            self._pinged_s = now_s
            for worker in living:
                if worker.has_started:
                    worker.tell(messages.Ping())
        for worker in living:
            if (why := worker.why_hung(self._pool.patience)) is not None:
                worker.kill(why)
        self._recovery.look()

    def _ask_for_state(self, dispatch: Dispatch) -> None:
        for source in sorted({transfer.source for transfer in dispatch.transfers}):
            assert dispatch.producer is not None
            mine = tuple([transfer for transfer in dispatch.transfers if transfer.source == source])
            message = messages.SendState(dispatch.number, dispatch.task.job_id, dispatch.producer, mine)
            self._pool.workers[source].tell(message)
