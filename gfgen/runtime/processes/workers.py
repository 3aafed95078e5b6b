"""The process backend: turns dispatches into messages to workers, and their answers into events.

A failure becomes an event when it is settled (recovery.py has the rounds): when the control plane learns of
it, the ranks are free again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gfgen.errors import in_one_line
from gfgen.graph import Stage
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.dispatch import Dispatch, GivenUp
from gfgen.runtime.core.events import (
    ClosingTime,
    Event,
    FramesLost,
    LoadFailed,
    RankLoaded,
    RankLost,
    RankReady,
    RankTimes,
    StopRequested,
    TaskDone,
    TaskFailed,
)
from gfgen.runtime.ipc.messages import (
    Abandoned,
    EdgesRestarted,
    ForgetJob,
    FramesStored,
    MemoryUse,
    Ping,
    Reset,
    RunTask,
    SendState,
    TaskFault,
    TaskReport,
    TellMemory,
    WarmedUp,
    WarmUp,
)
from gfgen.runtime.processes.attempts import Attempt, Attempts, Cause
from gfgen.runtime.processes.child import GONE, Joined, Loaded, Lost, Phase, RankProcess, WriterProcess
from gfgen.runtime.processes.job_memory import JobMemory
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.recovery import Rounds
from gfgen.runtime.processes.watchdog import Patience, Watchdog
from gfgen.runtime.processes.writes import Writes
from gfgen.system.signals import SignalPipe

logger = logging.getLogger(__name__)

_TICK_S = 0.25
"""The control loop turns at least this often, to show progress and to notice silent processes."""
_ANSWER_S = 1.0
"""The longest wait for the ranks' memory use at the end of a run."""


class Requests(Protocol):
    """Requests to a run from outside; readable when there is one."""

    def fileno(self) -> int: ...

    def take_events(self, now_s: float) -> Sequence[Event]:
        """The requests since the last call, as events of this moment. Their only effect is a turn of the
        loop, which looks at the intake."""


class ProcessBackend:
    """Runs dispatches on a pool of processes."""

    def __init__(
        self,
        pool: WorkerPool,
        memory: JobMemory,
        *,
        clock: Clock,
        patience: Patience | None = None,
        signals: SignalPipe | None = None,
        requests: Requests | None = None,
        warm_ups: Callable[[Sequence[AdmittedJob]], Sequence[WarmUp]] | None = None,
        waits_for_space: bool = False,
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._clock = clock
        self._writes = Writes(pool, memory.output_dir, waits_for_space=waits_for_space)
        self._attempts = Attempts()
        self._watchdog = Watchdog(patience or pool.patience, looked_s=clock.now_s)
        self._rounds = Rounds(pool, self._attempts, self._watchdog)
        self._memory_use: dict[int, MemoryUse] = {}
        self._own_signals = SignalPipe() if signals is None else None
        self._inputs = [each for each in (signals, self._own_signals, requests) if each is not None]
        for source in self._inputs:
            pool.listen(source)
        self._warm_ups = warm_ups
        """Chooses the steps that ranks prepare before they join, or when they load other models."""
        self._unchecked = list(memory.jobs)
        """Jobs whose models may be ones that no rank could load at the start."""
        self._known_unloadable: set[str] = set()
        """Such models that were reported."""
        self._pending: list[Event] = []
        """Events that come from no message."""
        self._begin()

    def _begin(self) -> None:
        """Take over a pool: report workers that take tasks as ready, and retired ranks as lost."""
        pool, now_s = self._pool, self._clock.now_s
        pool.begin_run(partial(self._warm_ups_of, None))
        for worker in pool.workers:
            worker.jobs.clear()
            if worker.phase in GONE:
                why = "it was given up before the run began"
                self._pending.append(RankLost(now_s, worker.rank, worker.incarnation, why, is_retired=True))
                continue
            worker.tell(Reset())
            worker.heard_s = time.monotonic()  # between runs it is not asked to send anything
            if worker.phase in (Phase.SERVING, Phase.LOADING):
                self._pending.append(RankReady(now_s, worker.rank, worker.incarnation, worker.startup_s))

    # What the control loop calls ------------------------------------------------------------

    def wait(self, until: float | None) -> list[Event]:
        """Events in order of receipt, then those that are due; none if nothing happened for a tick."""
        events, self._pending = [*self._pending, *self._tell_unloadable()], []
        timeout_s = _TICK_S if until is None else min(_TICK_S, until - self._clock.now_s)
        for source, what in self._pool.turn(0.0 if events else timeout_s):
            events.extend(self._events_of(source, what))
        self._look_for_hung_processes()
        events += self._writes.give_out_again(self._clock.now_s)
        events += self._clock.due()
        self._pool.is_stopping |= any(isinstance(each, StopRequested | ClosingTime) for each in events)
        return events

    def submit(self, dispatch: Dispatch) -> None:
        """Send a task to its ranks, after what they do not know yet of its job."""
        task, ranks = dispatch.task, dispatch.layout.ranks
        try:
            self._memory.slab(task.job_id)
            job = self._memory.jobs[task.job_id]
            fds = (self._writes.new_frames(job),) if task.stage is Stage.DECODE else ()
        except (OSError, ValueError, KeyError) as error:  # too many open files, or kept state is gone
            reason = f"its state has no place here: {in_one_line(error)}"
            self._pending.append(TaskFailed(self._clock.now_s, dispatch.number, reason))
            return
        self._attempts.begin(dispatch)
        self._pool.last_number = dispatch.number
        incarnations = tuple([self._pool.workers[rank].incarnation for rank in ranks])
        self._ask_for_state(dispatch)
        for rank in ranks:
            worker = self._pool.workers[rank]
            self._memory.introduce(task.job_id, worker)
            message = RunTask(
                number=dispatch.number,
                job_id=task.job_id,
                task_index=task.index,
                producer=dispatch.producer,
                layout=dispatch.layout,
                incarnations=incarnations,
                transfers=tuple([t for t in dispatch.transfers if t.destination == rank]),
                wait_s=self._watchdog.time_to_wait_s(dispatch),
                expected_s=dispatch.predicted_end_s - dispatch.predicted_start_s,
                batch_end=None if dispatch.batch is None else dispatch.batch[-1],
                is_reused=task.stage is Stage.REUSE,
            )
            worker.tell(message, fds)
        self._rounds.include(now_s=self._clock.now_s)

    def stop(self, dispatches: Sequence[Dispatch]) -> None:
        """Let ranks leave unwanted tasks; a rank that does not leave in time is killed and replaced."""
        numbers, now_s = {each.number for each in dispatches} - self._leaving, self._clock.now_s
        stopped = [attempt for attempt in map(self._attempts.running, numbers) if attempt is not None]
        for attempt in stopped:
            attempt.stop(now_s)
        if stopped:
            self._rounds.give_up({attempt.dispatch.number: None for attempt in stopped}, now_s=now_s)

    def release(self, job_id: str) -> None:
        """Close the job's memory and let workers forget it."""
        for worker in self._pool.workers:
            if job_id in worker.jobs:
                worker.jobs.discard(job_id)
                worker.tell(ForgetJob(job_id))
        self._writes.release(job_id)
        self._attempts.forget(job_id)
        self._memory.release(job_id)

    def save(self, job_id: str, *, next_index: int, producer: int, given_up: GivenUp) -> None:
        """Keep a stopped job's state for the next run."""
        self._memory.save(job_id, self._pool, next_index=next_index, producer=producer, given_up=given_up)

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        """Let all ranks hold these models and no others."""
        checkpoints = set(map(str, models.values()))
        self._pool.set_models(models, warm_ups=self._warm_ups_of(checkpoints))

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        """Accept more jobs; workers get each of them before its first task."""
        self._memory.jobs |= {job.job_id: job for job in jobs}
        self._unchecked += [job.job_id for job in jobs]

    def memory_use(self) -> dict[int, MemoryUse]:
        """The memory that ranks have used in this run, of those that answer in time."""
        asked = [worker for worker in self._pool.living if worker.has_started]
        for worker in asked:
            worker.tell(TellMemory())
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
        self._pool.steps_at_hand = None
        self._memory.close()
        self._writes.close()

    @property
    def _leaving(self) -> frozenset[int]:
        """Dispatches that ranks are leaving."""
        return self._rounds.recovery.numbers

    # What processes say ------------------------------------------------------------------------

    def _tell_unloadable(self) -> Iterator[LoadFailed]:
        """Models of jobs at hand that no rank could load when the workers started."""
        unchecked, self._unchecked = self._unchecked, []
        for job in filter(None, map(self._memory.jobs.get, unchecked)):
            model, reason = job.spec.model or "", self._pool.models.unloadable.get(str(job.checkpoint))
            if reason is not None and model not in self._known_unloadable:
                self._known_unloadable.add(model)
                yield LoadFailed(self._clock.now_s, (model,), reason)

    def _events_of(self, source: Any, what: Any) -> Iterator[Event]:
        """The events that a message, or a change of a process, means for the run."""
        now_s = self._clock.now_s
        if isinstance(source, WriterProcess):
            yield from self._writes.events_of(source, what, now_s)
            return
        match what:
            case TaskReport():
                yield from self._task_done(source, what, now_s)
            case TaskFault():
                self._rounds.fail(source, what, now_s=now_s)
            case FramesStored():
                yield from self._frames_stored(source, what, now_s)
            case Abandoned():
                self._attempts.leave(source.rank, what.numbers)
                yield from self._rounds.answered(source.rank, what, now_s=now_s)
            case EdgesRestarted():
                yield from self._rounds.answered(source.rank, what, now_s=now_s)
            case Joined():
                yield RankReady(now_s, source.rank, source.incarnation, source.startup_s)
            case Loaded():
                yield RankLoaded(now_s, source.rank, what.load_s)
            case Lost():
                yield from self._worker_lost(source, what, now_s)
            case WarmedUp() if what.reason is not None:
                text = "%s: warming up: %s; its jobs run anyway"
                logger.warning(text, source.name, what.reason)
            case MemoryUse():
                self._memory_use[source.rank] = what
            case None if isinstance(source, SignalPipe):
                yield from (StopRequested(now_s, number) for number in source.take())
            case None:
                yield from source.take_events(now_s)
            case _:  # the pool has taken it
                pass

    def _task_done(self, worker: RankProcess, report: TaskReport, now_s: float) -> Iterator[Event]:
        """A rank has done its part, which does not count if the dispatch is being given up."""
        if report.number in self._leaving:
            return
        times = RankTimes(
            worker.rank,
            started_s=self._clock.from_monotonic(report.started_s),
            ended_s=self._clock.from_monotonic(report.ended_s),
            waited_s=report.waited_s,
            moved_s=report.moved_s,
            idle_s=report.idle_s,
            peak_bytes=report.peak_bytes,
        )
        self._attempts.report(report.number, times, now_s=now_s, do_frames_follow=report.do_frames_follow)
        for attempt in self._attempts.take_done(report.number, given_up=self._leaving):
            yield TaskDone(now_s, attempt.dispatch.number, attempt.times)
            self._write_what_is_there(attempt)

    def _write_what_is_there(self, attempt: Attempt) -> None:
        """Write the file of a decode that has ended, once all of its frames have come."""
        task = attempt.dispatch.task
        if task.stage is Stage.DECODE and attempt.is_done and not attempt.storing:
            self._writes.begin(self._memory.jobs[task.job_id])

    def _frames_stored(self, worker: RankProcess, stored: FramesStored, now_s: float) -> Iterator[Event]:
        """A rank's frames have reached the writer's memory, or never will."""
        attempt = self._attempts.stored(stored.number, worker.rank, are_lost=stored.reason is not None)
        if attempt is None:
            return  # it is of an earlier run, or given up
        if stored.reason is None:
            self._write_what_is_there(attempt)
        elif attempt.is_done:
            yield FramesLost(now_s, attempt.dispatch.task.job_id, stored.reason)
        else:
            self._rounds.fail(worker, TaskFault(stored.number, stored.reason), now_s=now_s)

    def _frames_lost_with(self, rank: int, reason: str, now_s: float) -> Iterator[Event]:
        """Decodes that had ended, and whose frames a dead rank had not stored."""
        for attempt in self._attempts:
            if attempt.is_done and rank in attempt.storing:
                self._attempts.drop(attempt)
                yield FramesLost(now_s, attempt.dispatch.task.job_id, f"rank {rank}: {reason}", lost=True)

    def _worker_lost(self, worker: RankProcess, lost: Lost, now_s: float) -> Iterator[Event]:
        """A rank is gone: give up what it was part of."""
        reason = lost.reason
        if lost.was_told and worker.loading is not None:
            reason = f"it cannot load its models: {reason}"
        # A run without ranks ends with an error and keeps nothing. One that stops keeps its jobs.
        is_retired = lost.is_retired and bool(self._pool.living or not self._pool.is_stopping)
        yield RankLost(now_s, worker.rank, worker.incarnation, reason, is_retired=is_retired)
        if lost.unloadable:
            why = lost.reason if lost.was_told else f"{lost.reason} while it was loading"
            yield LoadFailed(now_s, lost.unloadable, f"rank {worker.rank}: {why}")
        yield from self._frames_lost_with(worker.rank, reason, now_s)
        cause = Cause(f"rank {worker.rank}: {reason}", lost=True) if worker.is_to_blame else None
        yield from self._rounds.lose(worker.rank, cause, now_s=now_s)

    def _warm_ups_of(self, checkpoints: Collection[str] | None) -> Sequence[WarmUp]:
        """The steps to prepare for known jobs of these models; None stands for the models that ranks hold."""
        if self._warm_ups is None:
            return ()
        held = self._pool.models.checkpoints if checkpoints is None else checkpoints
        return self._warm_ups([job for job in self._memory.jobs.values() if str(job.checkpoint) in held])

    # Processes that hang ----------------------------------------------------------------------------

    def _look_for_hung_processes(self) -> None:
        """Kill processes that hang; the loop then notices their end."""
        now_s, patience = self._clock.now_s, self._watchdog.patience
        if paused_s := self._watchdog.look(now_s):
            self._forgive(paused_s)
        living = self._pool.living
        if self._watchdog.wants_ping(now_s):
            for worker in living:
                if worker.has_started:
                    worker.tell(Ping())
        for worker in living:
            if (why := worker.why_hung(patience, time.monotonic())) is not None:
                worker.kill(why)
        for writer in list(self._writes.overdue(patience_s=patience.write_s)):
            writer.kill("it does not finish a file")
        overdue = set()
        for attempt in self._attempts:
            for rank in attempt.storing_since(now_s - patience.task_s):
                self._pool.workers[rank].kill("it does not store its frames")
            if not attempt.is_done and self._watchdog.is_overdue(attempt.dispatch, now_s):
                overdue.add(attempt.dispatch.number)
            if attempt.stopped_s is not None and now_s > attempt.stopped_s + patience.stopping_s:
                for worker in [self._pool.workers[rank] for rank in attempt.inside]:
                    worker.is_to_blame = worker.phase is Phase.ENDING and worker.is_to_blame
                    worker.kill("it did not leave a task that was stopped")
        self._rounds.give_up_overdue(overdue, now_s=now_s)
        self._rounds.kill_late(now_s)

    def _forgive(self, paused_s: float) -> None:
        """This process was stopped for this time, in which it could hear nobody: it counts for no process."""
        logger.info("this process stood still for %.0f s, which counts for no other process", paused_s)
        for worker in self._pool.living:
            worker.forgive(paused_s)
        for attempt in self._attempts:
            attempt.forgive(paused_s)
        self._writes.forgive(paused_s)
        self._rounds.forgive(paused_s)

    def _ask_for_state(self, dispatch: Dispatch) -> None:
        """Let the ranks that hold a job's state send the parts that others need."""
        for source in sorted({transfer.source for transfer in dispatch.transfers}):
            assert dispatch.producer is not None
            mine = tuple([transfer for transfer in dispatch.transfers if transfer.source == source])
            message = SendState(dispatch.number, dispatch.task.job_id, dispatch.producer, mine)
            self._pool.workers[source].tell(message)
