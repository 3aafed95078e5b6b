"""The process backend: a worker process per rank, writer processes, and their channels.

CUDA and its like must not be initialised before a process starts, and importing torch takes
seconds: so processes are forked from a fork server that has the imports done and has run
nothing yet.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gfgen.errors import WorkerError
from gfgen.gfc.arena import Plan, create_arena
from gfgen.graph import Stage
from gfgen.runtime.admission import AdmittedJob
from gfgen.runtime.channel import Channel
from gfgen.runtime.clock import Clock
from gfgen.runtime.dispatch import Dispatch
from gfgen.runtime.events import (
    Event,
    OutputFailed,
    OutputWritten,
    RankLost,
    RankReady,
    StopRequested,
    TaskDone,
    TaskFailed,
)
from gfgen.runtime.messages import (
    Abandon,
    Arenas,
    EdgesRestarted,
    ForgetJob,
    Left,
    Reset,
    RestartEdges,
    RunTask,
    SendState,
    StartJob,
    TaskFault,
    TaskReport,
    WorkerFailed,
    WorkerReady,
    WriteDone,
    WriteFailed,
    WriteRequest,
)
from gfgen.runtime.metadata import describe
from gfgen.runtime.recovery import Recovery, given_up
from gfgen.runtime.slab import Slab, SlabPlan

logger = logging.getLogger(__name__)

_PRELOAD = ["gfgen.runtime.worker", "gfgen.runtime.writer"]
"""What the fork server imports, once, before it forks the first process."""
_TICK_S = 0.25
"""The control loop turns at least this often, so that progress can be shown."""
_EXIT_S = 5.0
"""How long a process may take to end after its channel is closed, before it is killed."""


@dataclass(slots=True, eq=False)
class _Child:
    """A process and the channel to it."""

    name: str
    process: BaseProcess
    channel: Channel
    rank: int | None = None
    is_ready: bool = False
    jobs: set[str] = field(default_factory=set)
    """Jobs that this worker knows."""


class WorkerPool:
    """Worker and writer processes. Outlives a run: the next one starts on warm workers."""

    def __init__(
        self,
        *,
        num_ranks: int,
        checkpoints: Sequence[Path],
        worker_main: str = "gfgen.runtime.worker:main",
        device: str = "cpu",
        num_writers: int = 1,
        plan: Plan | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.last_number = 0
        """Of the last dispatch that these workers were given, in any run."""
        self.incarnations = [1] * num_ranks
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings are not the user's to mend
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        settings = [
            {"rank": rank, "checkpoints": tuple(map(str, checkpoints)), "device": device}
            for rank in range(num_ranks)
        ]
        self.workers = [self._start(f"rank {s['rank']}", worker_main, s) for s in settings]
        for rank, worker in enumerate(self.workers):
            worker.rank = rank
        writer_main = "gfgen.runtime.writer:main"
        self.writers = [self._start(f"writer {idx}", writer_main, None) for idx in range(num_writers)]
        self._share_arenas(plan or Plan())

    @property
    def children(self) -> list[_Child]:
        return [*self.workers, *self.writers]

    def _start(self, name: str, target: str, settings: Mapping[str, Any] | None) -> _Child:
        ours, theirs = Channel.pair()
        process = self._context.Process(
            target=_enter, args=(target, theirs, settings), name=f"gfgen {name}", daemon=True
        )
        process.start()
        theirs.close()
        return _Child(name, process, Channel(ours))

    def _share_arenas(self, plan: Plan) -> None:
        """Make an arena for every rank, and let every rank map all of them."""
        fds = [
            create_arena(plan, rank=rank, incarnation=incarnation)
            for rank, incarnation in enumerate(self.incarnations)
        ]
        message = Arenas(plan.data_bytes, plan.post_bytes, tuple(self.incarnations))
        for worker in self.workers:
            worker.channel.send(message, tuple(fds))
        for fd in fds:
            os.close(fd)

    def wait_ready(self) -> None:
        """Wait until every worker has loaded its models.

        Raises: WorkerError when one cannot start, with its reason.
        """
        for worker in self.workers:
            received = None if worker.is_ready else worker.channel.receive()
            if received is None and not worker.is_ready:
                worker.process.join(_EXIT_S)
                raise WorkerError(
                    f"{worker.name} died while it started (exit code {worker.process.exitcode})"
                )
            if received is not None and isinstance(received[0], WorkerFailed):
                raise WorkerError(f"{worker.name} cannot start: {received[0].reason}")
            worker.is_ready = True

    def close(self) -> None:
        """End all processes: they leave when their channel closes, and are killed if not."""
        for child in self.children:
            child.channel.close()
        for child in self.children:
            child.process.join(_EXIT_S)
            if child.process.is_alive():
                logger.warning("%s did not end within %g s and is killed", child.name, _EXIT_S)
                child.process.kill()
                child.process.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _enter(target: str, end: socket.socket, settings: Mapping[str, Any] | None) -> None:
    """First function of a child process: import its main and go there."""
    module_name, _, attribute = target.partition(":")
    module = __import__(module_name, fromlist=[attribute])
    main: Callable[..., None] = getattr(module, attribute)
    if settings is None:
        main(end)
    else:
        main(end, module.WorkerSettings(**settings))


class ProcessBackend:
    """Runs dispatches on a pool of processes."""

    def __init__(
        self, pool: WorkerPool, jobs: Sequence[AdmittedJob], *, clock: Clock, output_dir: Path
    ) -> None:
        self._pool = pool
        self._jobs = {job.job_id: job for job in jobs}
        self._clock = clock
        self._output_dir = output_dir
        self._slabs: dict[str, int] = {}
        self._frames: dict[str, int] = {}
        self._dispatches: dict[int, Dispatch] = {}
        """Those that have not ended on all of their ranks."""
        self._unreported: dict[int, set[int]] = {}
        """By dispatch: the ranks that have not reported."""
        self._recovery: Recovery | None = None
        self._num_writing = dict.fromkeys(range(len(pool.writers)), 0)
        self._selector = selectors.DefaultSelector()
        for child in pool.children:
            self._selector.register(child.channel, selectors.EVENT_READ, child)
        for worker in pool.workers:
            worker.jobs.clear()
            worker.channel.send(Reset())
        self._signals = _SignalPipe()
        self._selector.register(self._signals, selectors.EVENT_READ, self._signals)
        self._unannounced = [worker for worker in pool.workers if worker.is_ready]

    # What the control loop calls ------------------------------------------------------------

    def wait(self, until: float | None) -> list[Event]:
        """Events in order of receipt, and what has fallen due; none when nothing happened for a tick."""
        events = list(self._greet())
        timeout_s = _TICK_S if until is None else min(_TICK_S, max(0.0, until - self._clock.now_s))
        for key, _ in self._selector.select(0 if events else timeout_s):
            if isinstance(key.data, _Child):
                events.extend(self._receive(key.data))
            else:
                events.extend(StopRequested(self._clock.now_s, n) for n in self._signals.take())
        return events + self._clock.due()

    def submit(self, dispatch: Dispatch) -> None:
        """Send a task to its ranks, and before it what they do not know yet of the job."""
        task, ranks = dispatch.task, dispatch.layout.ranks
        self._dispatches[dispatch.number] = dispatch
        self._unreported[dispatch.number] = set(ranks)
        self._pool.last_number = dispatch.number
        incarnations = tuple([self._pool.incarnations[rank] for rank in ranks])
        fds = (self._new_frames(task.job_id),) if task.stage is Stage.DECODE else ()
        self._ask_for_state(dispatch)
        for rank in ranks:
            worker = self._pool.workers[rank]
            if task.job_id not in worker.jobs:
                self._introduce(worker, task.job_id)
            message = RunTask(
                number=dispatch.number,
                job_id=task.job_id,
                index=task.index,
                producer=dispatch.producer,
                layout=dispatch.layout,
                incarnations=incarnations,
                transfers=tuple([t for t in dispatch.transfers if t.destination == rank]),
            )
            worker.channel.send(message, fds)
        if self._recovery and given_up(self._recovery.numbers, self._dispatches) - self._recovery.numbers:
            self._give_up({})

    def release(self, job_id: str) -> None:
        """Close the job's memory and let workers forget it."""
        for worker in self._pool.workers:
            if job_id in worker.jobs:
                worker.jobs.discard(job_id)
                worker.channel.send(ForgetJob(job_id))
        for memory in (self._slabs, self._frames):
            if job_id in memory:
                os.close(memory.pop(job_id))

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        """Know these jobs too; workers are told of one before its first task."""
        self._jobs |= {job.job_id: job for job in jobs}

    def close(self) -> None:
        """Let go of the pool, which stays usable, and of all memory."""
        self._signals.close()
        self._selector.close()
        for job_id in {*self._slabs, *self._frames}:
            self.release(job_id)

    # What children say ------------------------------------------------------------------------

    def _greet(self) -> Iterator[Event]:
        """Workers that were ready before this run began."""
        for worker in self._unannounced:
            assert worker.rank is not None
            yield RankReady(self._clock.now_s, worker.rank, 1, 0.0)
        self._unannounced = []

    def _receive(self, child: _Child) -> Iterator[Event]:
        received = child.channel.receive()
        now_s = self._clock.now_s
        if received is None:
            yield self._lost(child)
            return
        match received[0]:
            case TaskReport() as report:
                yield from self._task_done(child, report, now_s)
            case TaskFault() as fault:
                self._task_failed(child, fault)
            case Left() | EdgesRestarted() as answer:
                yield from self._answered(child, answer, now_s)
            case WriteDone() as done:
                self._num_writing[self._pool.writers.index(child)] -= 1
                yield OutputWritten(now_s, done.job_id, done.path, done.size_bytes, done.write_s)
            case WriteFailed() as failed:
                self._num_writing[self._pool.writers.index(child)] -= 1
                yield OutputFailed(now_s, failed.job_id, failed.reason)
            case WorkerReady() as ready:
                child.is_ready = True
                yield RankReady(now_s, ready.rank, 1, ready.startup_s)
            case WorkerFailed() as failure:
                raise WorkerError(f"rank {failure.rank} cannot start: {failure.reason}")
            case message:
                raise AssertionError(f"{child.name} sent {message!r}")

    def _task_done(self, worker: _Child, report: TaskReport, now_s: float) -> Iterator[Event]:
        """A rank has done its part; what is being given up counts no more."""
        if self._recovery and report.number in self._recovery.numbers:
            return
        assert worker.rank is not None
        dispatch = self._dispatches[report.number]
        self._unreported[report.number].remove(worker.rank)
        if not self._unreported[report.number]:
            del self._dispatches[report.number], self._unreported[report.number]
            if dispatch.task.stage is Stage.DECODE:
                self._write(dispatch.task.job_id)
        yield TaskDone(
            now_s,
            report.number,
            worker.rank,
            started_s=self._clock.from_monotonic(report.started_s),
            ended_s=self._clock.from_monotonic(report.ended_s),
            waited_s=report.waited_s,
            moved_s=report.moved_s,
        )

    def _lost(self, child: _Child) -> Event:
        self._selector.unregister(child.channel)
        child.process.join(_EXIT_S)
        reason = f"the process ended with exit code {child.process.exitcode}"
        if child.rank is None:
            raise WorkerError(f"{child.name}: {reason}; run again to go on")
        return RankLost(self._clock.now_s, child.rank, 1, reason)

    # Failures: see recovery.py for the rounds -----------------------------------------------------

    def _task_failed(self, worker: _Child, fault: TaskFault) -> None:
        """A task raised on one rank: its other ranks, and what depends on it, have to stop."""
        if self._recovery and fault.number in self._recovery.numbers:
            if not fault.void:
                self._recovery.reasons.setdefault(fault.number, fault.reason)
            return
        if fault.void:
            logger.info("%s: dispatch %d was given up: %s", worker.name, fault.number, fault.reason)
        self._give_up({fault.number: None if fault.void else fault.reason})

    def _give_up(self, reasons: Mapping[int, str | None]) -> None:
        """Ask every rank concerned to leave the failed dispatches, and all that goes with them."""
        self._recovery = self._recovery or Recovery()
        self._recovery.extend(reasons, self._dispatches)
        self._tell_ranks(Abandon(self._recovery.numbers))

    def _answered(self, worker: _Child, answer: Left | EdgesRestarted, now_s: float) -> Iterator[Event]:
        """Ranks have left, or counted anew; answers to an earlier, smaller question do not count."""
        recovery = self._recovery
        if recovery is None or answer.numbers != recovery.numbers:
            return
        assert worker.rank is not None
        if isinstance(answer, EdgesRestarted) is not recovery.all_have_left:
            return
        if not recovery.answered(worker.rank):
            return
        if not recovery.all_have_left:
            recovery.all_have_left = True
            recovery.waiting_for = set(recovery.ranks)
            self._tell_ranks(RestartEdges(recovery.numbers, recovery.ranks))
            return
        self._recovery = None
        for number in sorted(recovery.numbers):
            del self._dispatches[number]
            reason = recovery.reasons.get(number)
            for rank in sorted(self._unreported.pop(number)):
                text = reason or "given up with another task"
                yield TaskFailed(now_s, number, rank, text, void=reason is None)

    def _tell_ranks(self, message: Abandon | RestartEdges) -> None:
        assert self._recovery is not None
        for rank in sorted(self._recovery.ranks):
            self._pool.workers[rank].channel.send(message)

    # Memory and files ---------------------------------------------------------------------------

    def _ask_for_state(self, dispatch: Dispatch) -> None:
        """Tell the ranks that hold a job's state which parts of it to send where."""
        for source in sorted({transfer.source for transfer in dispatch.transfers}):
            assert dispatch.producer is not None
            mine = tuple([transfer for transfer in dispatch.transfers if transfer.source == source])
            message = SendState(dispatch.number, dispatch.task.job_id, dispatch.producer, mine)
            self._pool.workers[source].channel.send(message)

    def _introduce(self, worker: _Child, job_id: str) -> None:
        job = self._jobs[job_id]
        if job_id not in self._slabs:
            self._slabs[job_id] = Slab.create(SlabPlan.of(job.trajectory), name=job_id)
        message = StartJob(job.spec, job.trajectory, str(job.checkpoint))
        worker.channel.send(message, (self._slabs[job_id],))
        worker.jobs.add(job_id)

    def _new_frames(self, job_id: str) -> int:
        """Memory for the frames of a job, uint8 [F, H, W, 3]; replaces that of a failed attempt."""
        if job_id in self._frames:
            os.close(self._frames.pop(job_id))
        fd = os.memfd_create("gfgen-frames", os.MFD_CLOEXEC)
        os.truncate(fd, self._jobs[job_id].trajectory.artifact("frames").size_bytes)
        self._frames[job_id] = fd
        return fd

    def _write(self, job_id: str) -> None:
        """Give the frames to the writer with the least to do."""
        job = self._jobs[job_id]
        ((_, shape, _),) = job.trajectory.artifact("frames").fields
        frames, height, width, channels = shape
        request = WriteRequest(
            job_id=job_id,
            shape=(frames, height, width, channels),
            path=str(self._output_dir / job.info.file),
            fps=job.spec.fps,
            metadata=describe(job.spec),
        )
        idx = min(self._num_writing, key=lambda i: self._num_writing[i])
        self._num_writing[idx] += 1
        fd = self._frames.pop(job_id)
        self._pool.writers[idx].channel.send(request, (fd,))
        os.close(fd)


class _SignalPipe:
    """SIGINT and SIGTERM as something to select on, in place of an exception anywhere."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Numbers of the signals that came."""
        return list(self._reader.recv(64))

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()
