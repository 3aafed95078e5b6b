"""The process backend: dispatches become messages to workers, and what they answer, events.

What goes wrong with a task or a process is settled here (recovery.py has the rounds) before
it becomes an event: when the control plane learns of a failure, its ranks are free again.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gfgen.errors import in_one_line
from gfgen.graph import Stage
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import (
    ClosingTime,
    Event,
    FramesLost,
    LoadFailed,
    OutputFailed,
    OutputWritten,
    RankLoaded,
    RankLost,
    RankReady,
    RankTimes,
    StopRequested,
    TaskDone,
    TaskFailed,
)
from gfgen.runtime.files import resume
from gfgen.runtime.files.resume import ResumePoint
from gfgen.runtime.ipc.messages import (
    Abandon,
    Abandoned,
    EdgesRestarted,
    ForgetJob,
    FramesStored,
    Loading,
    MemoryUse,
    ModelsSet,
    PeerReplaced,
    Ping,
    Pong,
    Reset,
    RestartEdges,
    RunTask,
    SendState,
    StartJob,
    TaskFault,
    TaskReport,
    TellMemory,
    WarmedUp,
    WarmUp,
    WorkerFailed,
    WorkerReady,
    WriteDone,
    WriteFailed,
    WriterReady,
)
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.processes.attempts import Attempt, Attempts
from gfgen.runtime.processes.loads import Loads
from gfgen.runtime.processes.pool import Child, WorkerPool
from gfgen.runtime.processes.recovery import Cause, Recovery, given_up
from gfgen.runtime.processes.watchdog import Patience, Watchdog
from gfgen.runtime.processes.writes import Writes
from gfgen.system.signals import SignalPipe

logger = logging.getLogger(__name__)

_TICK_S = 0.25
"""The control loop turns at least this often: progress is shown, and silence noticed."""
_ANSWER_S = 1.0
"""How long is waited, at the end of a run, for what ranks tell of themselves."""
_CANNOT_LOAD = "it cannot load its models: "
_STOPPED = "it did not leave a task that was stopped"
_REAP_S = 1.0
"""How long a process whose channel has ended may take to end itself."""


class Requests(Protocol):
    """What is asked of a run from outside while it goes on; readable when there is something."""

    def fileno(self) -> int: ...

    def take_events(self, now_s: float) -> Sequence[Event]:
        """What was asked since the last call, as events of this moment; nothing may follow from it but a
        turn of the loop, in which the intake is looked at."""
        ...


class ProcessBackend:
    """Runs dispatches on a pool of processes."""

    def __init__(
        self,
        pool: WorkerPool,
        jobs: Sequence[AdmittedJob],
        *,
        clock: Clock,
        output_dir: Path,
        patience: Patience | None = None,
        resume_points: Mapping[str, ResumePoint] | None = None,
        signals: SignalPipe | None = None,
        requests: Requests | None = None,
        warm_ups: Callable[[Sequence[AdmittedJob]], Sequence[WarmUp]] | None = None,
    ) -> None:
        self._pool = pool
        self._jobs = {job.job_id: job for job in jobs}
        self._clock = clock
        self._resume_points = dict(resume_points or {})
        self._output_dir = output_dir
        self._slabs: dict[str, int] = {}
        self._writes = Writes(pool, output_dir)
        self._attempts = Attempts()
        self._unsent: list[TaskFailed] = []
        """Of dispatches that could not be handed out."""
        self._recovery: Recovery | None = None
        self._watchdog: Watchdog[Child] = Watchdog(patience or pool.patience, looked_s=clock.now_s)
        self._verdicts: dict[Child, str] = {}
        """Why a process was killed, until its end is noticed."""
        self._arriving: list[Child] = []
        """Workers that take tasks when all others know them and they have ready what jobs at hand need."""
        self._warming: set[Child] = set()
        """Of those: the ones that still get steps ready."""
        self._held_back: list[Child] = []
        """New workers that wait until the others have left what their predecessors died in."""
        self._loads: Loads | None = None
        """Of the last change of models; None before the first one."""
        self._memory_use: dict[int, MemoryUse] = {}
        self._selector = selectors.DefaultSelector()
        self._own_signals = SignalPipe() if signals is None else None
        self._signals = signals or self._own_signals
        assert self._signals is not None
        self._selector.register(self._signals, selectors.EVENT_READ, self._signals)
        self._warm_ups = warm_ups
        """What ranks get ready for jobs when they load other models; None for nothing."""
        self._requests = requests
        if requests is not None:
            self._selector.register(requests, selectors.EVENT_READ, requests)
        for child in pool.children:
            self._selector.register(child.channel, selectors.EVENT_READ, child)
            if child.rank is not None:
                child.jobs.clear()
                child.tell(Reset())
        self._unannounced = [worker for worker in pool.living if worker.is_ready]
        self._absent = [worker for worker in pool.workers if worker.rank in pool.retired]
        """Of ranks that were retired before this run began."""
        self._unchecked = list(self._jobs)
        """Jobs of which it may have to be told that no rank could load their model at the start."""
        self._known_unloadable: set[str] = set()
        """Models of which that was told."""
        self._is_stopping = False
        """The run has been asked to stop: nothing more is dispatched."""

    # What the control loop calls ------------------------------------------------------------

    def wait(self, until: float | None) -> list[Event]:
        """Events in order of receipt, and what has fallen due; none when nothing happened for a tick."""
        events = [*self._greet(), *self._tell_unloadable(), *self._unsent]
        self._unsent.clear()
        timeout_s = _TICK_S if until is None else min(_TICK_S, max(0.0, until - self._clock.now_s))
        for key, _ in self._selector.select(0 if events else timeout_s):
            if isinstance(key.data, Child):
                events.extend(self._receive(key.data))
            elif self._requests is not None and key.data is self._requests:
                events.extend(self._requests.take_events(self._clock.now_s))
            else:
                events.extend(StopRequested(self._clock.now_s, n) for n in key.data.take())
        self._look_for_hung_processes()
        events.extend(self._leave_stuck_processes())
        self._start_writers()
        events.extend(self._take_in())
        events += self._clock.due()
        self._is_stopping = self._is_stopping or any(map(_ends_run, events))
        return events

    def submit(self, dispatch: Dispatch) -> None:
        """Send a task to its ranks, and before it what they do not know yet of the job."""
        task, ranks = dispatch.task, dispatch.layout.ranks
        try:
            slab = self._slab(task.job_id)
            fds = (self._writes.new_frames(self._jobs[task.job_id]),) if task.stage is Stage.DECODE else ()
        except (OSError, ValueError, KeyError) as error:  # too many open files, or what was kept is gone
            reason = f"its state has no place here: {in_one_line(error)}"
            self._unsent.append(TaskFailed(self._clock.now_s, dispatch.number, reason))
            return
        self._attempts.begin(dispatch)
        self._pool.last_number = dispatch.number
        incarnations = tuple([self._pool.workers[rank].incarnation for rank in ranks])
        self._ask_for_state(dispatch)
        for rank in ranks:
            worker = self._pool.workers[rank]
            if task.job_id not in worker.jobs:
                self._introduce_job(worker, task.job_id, slab)
            message = RunTask(
                number=dispatch.number,
                job_id=task.job_id,
                index=task.index,
                producer=dispatch.producer,
                layout=dispatch.layout,
                incarnations=incarnations,
                transfers=tuple([t for t in dispatch.transfers if t.destination == rank]),
                wait_s=self._watchdog.time_to_wait_s(dispatch),
                expected_s=dispatch.predicted_end_s - dispatch.predicted_start_s,
            )
            worker.tell(message, fds)
        if given_up(self._given_up, self._attempts.dispatches) - self._given_up:
            self._give_up({})

    def stop(self, dispatches: Sequence[Dispatch]) -> None:
        """Let ranks leave tasks that nobody wants; those that do not in time are killed and replaced."""
        numbers = {each.number for each in dispatches} - self._given_up
        stopped = [attempt for attempt in map(self._attempts.running, numbers) if attempt is not None]
        for attempt in stopped:
            attempt.stop(self._clock.now_s)
        if stopped:
            self._give_up({attempt.dispatch.number: None for attempt in stopped})

    def release(self, job_id: str) -> None:
        """Close the job's memory and let workers forget it."""
        for worker in self._pool.workers:
            if job_id in worker.jobs:
                worker.jobs.discard(job_id)
                worker.tell(ForgetJob(job_id))
        if job_id in self._slabs:
            os.close(self._slabs.pop(job_id))
        self._writes.release(job_id)
        self._attempts.forget(job_id)
        self._resume_points.pop(job_id, None)
        self._jobs.pop(job_id, None)
        resume.forget(self._output_dir, job_id)

    def save(self, job_id: str, *, next_index: int, producer: int) -> None:
        """Keep a stopped job's state for the next run; a job that cannot be kept starts anew then."""
        if job_id in self._resume_points:  # no task of it was begun: what was kept is as it was
            return
        path = resume.resume_path(self._output_dir, job_id)
        try:
            resume.save(
                path,
                self._jobs[job_id],
                self._slab(job_id),
                next_index=next_index,
                producer=producer,
                last_number=self._pool.last_number,
                weights=self._pool.weights_mark(self._jobs[job_id].checkpoint),
                computed_with=self._pool.computed_with,
            )
        except OSError as error:
            logger.warning("job %s will start at the beginning: its state is not kept (%s)", job_id, error)

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        """Let all ranks hold these models and no others."""
        checkpoints = set(models.values())
        self._pool.set_models(checkpoints, warm_ups=self._warm_ups_of(set(map(str, checkpoints))))
        self._loads = Loads(models)
        self._warming.clear()  # what they got ready was for other models than those they are to load

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        """Know these jobs too; workers are told of one before its first task."""
        self._jobs |= {job.job_id: job for job in jobs}
        self._unchecked += [job.job_id for job in jobs]

    def memory_use(self) -> dict[int, MemoryUse]:
        """What the ranks have taken in this run, as far as they answer in time."""
        asked = [worker for worker in self._pool.living if worker.is_ready]
        for worker in asked:
            worker.tell(TellMemory())
        deadline_s = self._clock.now_s + _ANSWER_S
        while len(self._memory_use) < len(asked) and (left_s := deadline_s - self._clock.now_s) > 0:
            ready = [key.data for key, _ in self._selector.select(left_s)]
            for child in ready:
                if not isinstance(child, Child):  # a signal: nobody is to wait any more
                    return self._memory_use
                list(self._receive(child))
        return self._memory_use

    def close(self) -> None:
        """Let go of the pool, which stays usable, and of all memory."""
        if self._own_signals:
            self._own_signals.close()
        self._selector.close()
        for fd in self._slabs.values():
            os.close(fd)
        self._slabs.clear()
        self._writes.close()

    # What children say ------------------------------------------------------------------------

    def _greet(self) -> Iterator[Event]:
        """Workers that were ready before this run began, or before they were told to load other models; and
        before them the ranks that this run goes without."""
        for worker in self._absent:
            assert worker.rank is not None
            why = "it was given up before the run began"
            yield RankLost(self._clock.now_s, worker.rank, worker.incarnation, why, is_retired=True)
        self._absent = []
        for worker in self._unannounced:
            if not worker.has_arenas:  # the last run ended before it could be told
                self._pool.welcome(worker)
        self._arriving += self._unannounced
        self._unannounced = []
        yield from self._take_in()

    def _tell_unloadable(self) -> Iterator[LoadFailed]:
        """Models of jobs at hand that no rank could load when the workers started."""
        unchecked, self._unchecked = self._unchecked, []
        for job in filter(None, map(self._jobs.get, unchecked)):
            model, reason = job.spec.model or "", self._pool.unloadable.get(str(job.checkpoint))
            if reason is not None and model not in self._known_unloadable:
                self._known_unloadable.add(model)
                yield LoadFailed(self._clock.now_s, (model,), reason)

    def _take_in(self) -> Iterator[RankReady]:
        """The workers that have arrived take tasks from now on."""
        arrived = [each for each in self._arriving if each not in self._warming and not each.unknown_to]
        for worker in arrived:
            assert worker.rank is not None
            self._arriving.remove(worker)
            self._watchdog.heard(worker, self._clock.now_s)
            yield RankReady(self._clock.now_s, worker.rank, worker.incarnation, worker.startup_s)

    def _receive(self, child: Child) -> Iterator[Event]:
        received = self._pool.receive(child)
        if received is None:
            yield from self._lost(child)
            return
        now_s = self._clock.now_s
        if child.is_ready and child.rank is not None:
            self._watchdog.heard(child, now_s)
        match received[0]:
            case TaskReport() as report:
                yield from self._task_done(child, report, now_s)
            case TaskFault() as fault:
                self._task_failed(child, fault)
            case FramesStored() as stored:
                yield from self._frames_stored(child, stored, now_s)
            case ModelsSet() as answer:
                self._note_loaded(child)
                yield from self._take_load(child, answer.load_s, now_s)
            case WarmedUp() as answer:
                if answer.reason is not None:
                    logger.warning(
                        "%s: warming up: %s; jobs are tried all the same", child.name, answer.reason
                    )
                if child.num_to_warm:
                    child.num_to_warm -= 1
                    yield from self._take_warm_up(child, answer.seconds, now_s)
            case Loading() as loading:
                child.loading = loading.checkpoint
            case Abandoned() | EdgesRestarted() as answer:
                yield from self._answered(child, answer)
            case WriteDone() as done:
                self._writes.ended(done.job_id)
                writer = self._pool.writers.index(child)
                yield OutputWritten(
                    now_s, done.job_id, done.path, done.size_bytes, done.write_s, writer, done.sha256
                )
            case WriteFailed() as failed:
                self._writes.ended(failed.job_id)
                yield OutputFailed(now_s, failed.job_id, failed.reason)
            case WriterReady():
                child.is_ready = True
            case WorkerReady() as ready:
                self._pool.take_ready(child, ready, received[1])
                if child.asked_to_load_s is None:  # else it holds those of before, and has yet to change
                    self._note_loaded(child)
                child.is_ready = True
                self._watchdog.heard(child, now_s)
                if self._recovery and child.rank in self._recovery.dead:
                    self._held_back.append(child)
                else:
                    self._let_in(child)
            case WorkerFailed() as failure:
                self._verdicts[child] = f"{_CANNOT_LOAD if child.loading else ''}{failure.reason}"
            case MemoryUse() as use:
                assert child.rank is not None
                self._memory_use[child.rank] = use
            case Pong() | PeerReplaced():
                pass
            case message:
                raise AssertionError(f"{child.name} sent {message!r}")

    def _task_done(self, worker: Child, report: TaskReport, now_s: float) -> Iterator[Event]:
        """A rank has done its part; what is being given up counts no more."""
        if report.number in self._given_up:
            return
        assert worker.rank is not None
        times = RankTimes(
            worker.rank,
            started_s=self._clock.from_monotonic(report.started_s),
            ended_s=self._clock.from_monotonic(report.ended_s),
            waited_s=report.waited_s,
            moved_s=report.moved_s,
            idle_s=report.idle_s,
        )
        self._attempts.report(report.number, times, now_s=now_s, do_frames_follow=report.do_frames_follow)
        for attempt in self._attempts.take_done(report.number, given_up=self._given_up):
            yield TaskDone(now_s, attempt.dispatch.number, attempt.times)
            self._write_what_is_there(attempt)

    @property
    def _given_up(self) -> frozenset[int]:
        """Dispatches that ranks are leaving."""
        return self._recovery.numbers if self._recovery else frozenset()

    def _write_what_is_there(self, attempt: Attempt) -> None:
        """Let a job be written whose decode has ended, once all of its frames have come."""
        task = attempt.dispatch.task
        if task.stage is Stage.DECODE and attempt.is_done and not attempt.storing:
            self._writes.begin(self._jobs[task.job_id])

    def _frames_stored(self, worker: Child, stored: FramesStored, now_s: float) -> Iterator[Event]:
        """A rank's frames have reached the writer's memory, or never will."""
        assert worker.rank is not None
        attempt = self._attempts.stored(stored.number, worker.rank, are_lost=stored.reason is not None)
        if attempt is None:
            return  # of an earlier run, or given up
        if stored.reason is None:
            self._write_what_is_there(attempt)
        elif attempt.is_done:
            yield FramesLost(now_s, attempt.dispatch.task.job_id, stored.reason)
        else:
            self._task_failed(worker, TaskFault(stored.number, stored.reason))

    def _frames_lost_with(self, rank: int, reason: str, now_s: float) -> Iterator[Event]:
        """What a dead rank had decoded and not stored, of decodes that had ended."""
        for attempt in self._attempts:
            if attempt.is_done and rank in attempt.storing:
                self._attempts.drop(attempt)
                yield FramesLost(now_s, attempt.dispatch.task.job_id, f"rank {rank}: {reason}", lost=True)

    # Failures: recovery.py has the rounds ---------------------------------------------------------

    def _task_failed(self, worker: Child, fault: TaskFault) -> None:
        """A task, or its transfer, failed on one rank: all that take part, and what needs it, stop."""
        if self._attempts.running(fault.number) is None:
            return
        cause = None if fault.void else Cause(fault.reason)
        if self._recovery and fault.number in self._recovery.numbers:
            if cause and self._recovery.causes.get(fault.number) is None:
                self._recovery.causes[fault.number] = cause
            return
        if fault.void:
            logger.info("%s: dispatch %d was given up: %s", worker.name, fault.number, fault.reason)
        self._give_up({fault.number: cause})

    def _lost(self, child: Child) -> Iterator[Event]:
        """A process is gone: reap it, start another, and give up what it was part of."""
        self._selector.unregister(child.channel)
        self._watchdog.forget(child)
        ending, verdict = child.reap(patience_s=_REAP_S), self._verdicts.pop(child, None)
        reason = verdict or ending
        if verdict and child.is_stuck:
            reason = f"{verdict}; {ending}"
        now_s = self._clock.now_s
        if child.rank is None:
            yield from self._writer_lost(child, reason, now_s)
            return
        unloadable, is_to_blame = self._note_failed_load(child)
        is_to_blame = is_to_blame and verdict != _STOPPED
        yield self._replace(child, reason, now_s=now_s, is_to_blame=is_to_blame)
        if unloadable:
            why = reason.removeprefix(_CANNOT_LOAD) if verdict else f"{reason} while it was loading"
            yield LoadFailed(now_s, unloadable, f"rank {child.rank}: {why}")
        yield from self._frames_lost_with(child.rank, reason, now_s)
        self._recovery = self._recovery or Recovery()
        self._recovery.dead.add(child.rank)
        for attempt in self._attempts:
            attempt.inside.discard(child.rank)
        self._warming.discard(child)
        self._arriving = [worker for worker in self._arriving if worker is not child]
        self._held_back = [worker for worker in self._held_back if worker is not child]
        self._give_up(self._died_with(child.rank, reason, was_stopped=verdict == _STOPPED))
        yield from self._advance_recovery()

    def _writer_lost(self, writer: Child, reason: str, now_s: float) -> Iterator[Event]:
        """Start another one, and let it write what this one has not."""
        pause_s = self._pool.replace_writer(writer)
        when = f" in {pause_s:g} s" if pause_s else ""
        logger.warning("%s is gone (%s); a new one is started%s", writer.name, reason, when)
        for job_id in self._writes.writer_lost(writer):
            yield OutputFailed(now_s, job_id, f"its writer died twice: {reason}")
        if self._is_stopping and not writer.is_ready:  # the run would never end
            for job_id in self._writes.take_back():
                yield FramesLost(now_s, job_id, f"{writer.name} cannot start: {reason}", lost=True)
        self._register_new_children()

    def _start_writers(self) -> None:
        """Start those that were to wait because others could not start, once it is time."""
        if self._pool.start_writers():
            self._register_new_children()
            self._writes.give_out()

    def _replace(self, dead: Child, reason: str, *, now_s: float, is_to_blame: bool) -> RankLost:
        """Start a successor; not while the run stops, which would end before that has loaded its models."""
        assert dead.rank is not None
        if self._is_stopping:
            self._pool.leave_out(dead.rank)
            # Without its last rank a run would end as one that cannot go on, and keep nothing.
            is_retired = bool(self._pool.living)
        else:
            is_retired = self._pool.replace_worker(dead.rank, now_s=now_s, is_to_blame=is_to_blame) is None
            self._register_new_children()
        return RankLost(now_s, dead.rank, dead.incarnation, reason, is_retired=is_retired)

    def _let_in(self, worker: Child) -> None:
        """Make a new worker known to the others, and let it get ready what jobs at hand need.

        One that has other models to load yet does not: what it got ready for these would be in vain.
        """
        self._pool.welcome(worker)
        self._arriving.append(worker)
        items = () if worker.asked_to_load_s is not None else self._warm_ups_of(self._pool.checkpoints)
        if not items:
            return
        self._warming.add(worker)
        worker.asked_to_load_s, worker.num_to_warm = time.monotonic(), len(items)
        worker.warm_up(items)

    def _warm_ups_of(self, checkpoints: Collection[str]) -> Sequence[WarmUp]:
        """What is to be got ready for the jobs at hand of these models."""
        if self._warm_ups is None:
            return ()
        return self._warm_ups([job for job in self._jobs.values() if str(job.checkpoint) in checkpoints])

    def _take_warm_up(self, worker: Child, seconds: float, now_s: float) -> Iterator[Event]:
        """Steps of a kind are ready on a rank that has loaded other models, or that is new."""
        if worker not in self._warming:
            yield from self._take_load(worker, seconds, now_s)
        elif not worker.num_to_warm:
            self._warming.discard(worker)
            worker.asked_to_load_s = None

    def _take_load(self, worker: Child, seconds: float, now_s: float) -> Iterator[RankLoaded]:
        """A part of what a rank has to do about other models; it takes tasks again after the last one."""
        worker.load_s += seconds
        if not worker.num_to_warm:
            assert worker.rank is not None
            worker.asked_to_load_s = None
            yield RankLoaded(now_s, worker.rank, worker.load_s)

    def _note_loaded(self, worker: Child) -> None:
        """A worker holds the models of now, as far as anybody does."""
        worker.loading = None
        if self._loads is not None and worker.rank is not None:
            self._loads.succeeded(worker.rank)

    def _note_failed_load(self, worker: Child) -> tuple[Sequence[str], bool]:
        """What the death of a worker says of the model that it was loading, if it was.

        Returns the names of that model where no rank can load it, and whether the rank is to blame.
        """
        loads, rank = self._loads, worker.rank
        if loads is None or rank is None:
            return (), True
        loads.lost(rank)
        if worker.loading is None:
            return (), True
        ranks = set(range(self._pool.num_ranks)) - self._pool.retired
        names = loads.failed(worker.loading, rank, ranks=ranks)
        if names:
            self._pool.do_without(worker.loading)
        return names, not loads.spares(rank)

    def _died_with(self, rank: int, reason: str, *, was_stopped: bool) -> dict[int, Cause | None]:
        """The dispatches that a dead rank was still needed for; it was running the first of them."""
        causes: dict[int, Cause | None] = {}
        lost = None if was_stopped else Cause(f"rank {rank}: {reason}", lost=True)
        is_running = False
        for attempt in self._attempts:
            number = attempt.dispatch.number
            if attempt.is_done:
                continue
            if rank in attempt.unreported:
                causes[number] = None if is_running else lost
                is_running = True
            elif rank in attempt.storing:
                causes[number] = lost
            elif attempt.is_sent_by(rank):
                causes[number] = None
        return causes

    def _give_up(self, causes: Mapping[int, Cause | None]) -> None:
        """Ask every rank concerned to leave the failed dispatches, and all that goes with them."""
        recovery = self._recovery = self._recovery or Recovery()
        dispatches = self._attempts.dispatches
        recovery.extend(causes, dispatches)
        lost = [dispatches[number] for number in recovery.numbers]
        recovery.deadline_s = self._clock.now_s + self._watchdog.time_to_leave_s(lost)
        for rank in sorted(recovery.waiting_for):
            self._pool.workers[rank].tell(Abandon(recovery.numbers))

    def _answered(self, worker: Child, answer: Abandoned | EdgesRestarted) -> Iterator[Event]:
        """A rank has left, or counts anew; answers to an earlier, smaller question do not count."""
        recovery = self._recovery
        if isinstance(answer, Abandoned):
            for attempt in self._attempts:
                if attempt.dispatch.number in answer.numbers:
                    attempt.inside.discard(worker.rank)
        if recovery is None or answer.numbers != recovery.numbers or worker.rank is None:
            return
        if isinstance(answer, EdgesRestarted) is recovery.all_have_left:
            recovery.waiting_for.discard(worker.rank)
            yield from self._advance_recovery()

    def _advance_recovery(self) -> Iterator[Event]:
        """When all have left, restart the edges between them; when that is done, tell what failed."""
        recovery = self._recovery
        assert recovery is not None
        if not recovery.waiting_for and not recovery.all_have_left:
            recovery.all_have_left = True
            recovery.ask()
            recovery.deadline_s = self._clock.now_s + self._watchdog.patience.leaving_s
            for rank in sorted(recovery.waiting_for):
                peers = recovery.peers_of(rank, self._attempts.dispatches)
                self._pool.workers[rank].tell(RestartEdges(recovery.numbers, peers))
        if recovery.waiting_for:
            return
        self._recovery = None
        recovery.blame()
        now_s = self._clock.now_s
        for number in sorted(recovery.numbers):
            attempt = self._attempts.running(number)
            assert attempt is not None, f"dispatch {number} ended while ranks left it"
            self._attempts.drop(attempt)
            cause = recovery.causes.get(number)
            text = cause.reason if cause else "given up with another task"
            yield TaskFailed(now_s, number, text, void=cause is None, lost=bool(cause and cause.lost))
        held_back, self._held_back = self._held_back, []
        for worker in held_back:
            self._let_in(worker)

    # Processes that live and yet do nothing ---------------------------------------------------------

    def _look_for_hung_processes(self) -> None:
        """Kill what is hung; its end is then noticed like any other."""
        now_s = self._clock.now_s
        living = self._pool.living
        if paused_s := self._watchdog.look(now_s):
            self._forgive(paused_s, living)
        for worker in living:
            if worker.is_starting_for_s > self._watchdog.patience.starting_s:
                self._kill(worker, "it does not get ready")
            if worker.is_loading_for_s > self._watchdog.patience.starting_s:
                self._kill(worker, "it does not get its models or its steps ready")
        if self._watchdog.wants_ping(now_s):
            for worker in living:
                if worker.is_ready:
                    worker.tell(Ping())
        for child, why in list(self._watchdog.silent(now_s)):
            is_loading = isinstance(child, Child) and child.asked_to_load_s is not None
            if not is_loading:  # which has a bound of its own
                self._kill(child, why)
        for writer in list(self._writes.overdue(patience_s=self._watchdog.patience.write_s)):
            self._kill(writer, "it does not finish a file")
        overdue = set()
        for attempt in self._attempts:
            for rank, since_s in attempt.storing.items():
                if now_s > since_s + self._watchdog.patience.task_s:
                    self._kill(self._pool.workers[rank], "it does not store its frames")
            if not attempt.is_done and self._watchdog.is_overdue(attempt.dispatch, now_s):
                overdue.add(attempt.dispatch.number)
            stopped_s = attempt.stopped_s
            if stopped_s is not None and now_s > stopped_s + self._watchdog.patience.stopping_s:
                for rank in attempt.inside:
                    self._kill(self._pool.workers[rank], _STOPPED)
        if overdue - self._given_up:
            # Those who wait for the hung rank will leave; it will not, and is known by that.
            self._recovery = self._recovery or Recovery()
            self._recovery.overdue |= overdue
            self._give_up(dict.fromkeys(overdue - self._given_up))
        if self._recovery and now_s > self._recovery.deadline_s:
            for rank in self._recovery.waiting_for:
                self._kill(self._pool.workers[rank], "it hangs in a task that was given up")

    def _leave_stuck_processes(self) -> Iterator[Event]:
        """Go on without those that were killed and do not end: their channels stay open, too."""
        for child in self._pool.children:
            if child.should_have_ended:
                yield from self._lost(child)

    def _forgive(self, paused_s: float, workers: Sequence[Child]) -> None:
        """This process was stopped itself for so long: nobody could be heard, whatever they did."""
        logger.info("not at work for %.0f s: that counts for nobody", paused_s)
        for worker in workers:
            worker.started_s += paused_s
            if worker.asked_to_load_s is not None:
                worker.asked_to_load_s += paused_s
        for attempt in self._attempts:
            attempt.forgive(paused_s)
        self._writes.forgive(paused_s)
        if self._recovery:
            self._recovery.deadline_s += paused_s

    def _kill(self, child: Child, why: str) -> None:
        if child not in self._verdicts:
            self._verdicts[child] = why
            child.kill()

    def _register_new_children(self) -> None:
        known = {key.data for key in self._selector.get_map().values()}
        for child in self._pool.children:
            if child not in known:
                self._selector.register(child.channel, selectors.EVENT_READ, child)

    # What workers need to know -----------------------------------------------------------------------

    def _ask_for_state(self, dispatch: Dispatch) -> None:
        """Tell the ranks that hold a job's state which parts of it to send where."""
        for source in sorted({transfer.source for transfer in dispatch.transfers}):
            assert dispatch.producer is not None
            mine = tuple([transfer for transfer in dispatch.transfers if transfer.source == source])
            message = SendState(dispatch.number, dispatch.task.job_id, dispatch.producer, mine)
            self._pool.workers[source].tell(message)

    def _introduce_job(self, worker: Child, job_id: str, slab: int) -> None:
        job = self._jobs[job_id]
        worker.tell(StartJob(job.spec, job.trajectory, str(job.checkpoint)), (slab,))
        worker.jobs.add(job_id)

    def _slab(self, job_id: str) -> int:
        """The job's slab; made at its first task, with what an earlier run has left of it.

        Raises: OSError when there is no descriptor for it; that, ValueError or KeyError when what was left
        cannot be read any more.
        """
        if job_id not in self._slabs:
            job, point = self._jobs[job_id], self._resume_points.get(job_id)
            plan = SlabPlan.of(job.trajectory)
            self._slabs[job_id] = resume.restore(point, job) if point else Slab.create(plan, name=job_id)
            self._resume_points.pop(job_id, None)
        return self._slabs[job_id]


def _ends_run(event: Event) -> bool:
    return isinstance(event, StopRequested | ClosingTime)
