"""A session in a process of its own, for a parent without a main thread for it: a node's actor, a program.

Both ends send messages over one connection, in order. What the parent starts has a number, by which it is
cancelled, and with which it ends.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gfgen.errors import GfgenError, RunError, WorkerError, in_one_line
from gfgen.runtime.core import events
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.system.lifeline import module_command, module_environment

logger = logging.getLogger(__name__)

END_S = 20.0
"""How long the process may take to end its ranks before it is killed."""


@dataclass(frozen=True, slots=True)
class Cancel:
    attempt: int


@dataclass(frozen=True, slots=True)
class Ended:
    attempt: int
    outcome: JobOutcome


@dataclass(frozen=True, slots=True)
class Gone:
    error: GfgenError | None
    """None: all is done."""


class Process:
    """A process with a session, which runs `module`. A thread hears its messages, and at last `Gone`."""

    def __init__(self, module: str, setup: object, heard: Callable[[Any], None]) -> None:
        self._lock = threading.Lock()
        begun = Future[tuple[subprocess.Popen[bytes], Connection]]()
        self._thread = threading.Thread(
            target=_listen, args=(module, setup, heard, begun), name=module, daemon=True
        )
        self._thread.start()
        self._process, self._connection = begun.result()

    def send(self, message: object) -> None:
        """No effect if the process has ended, which is heard. Raises: what cannot be pickled."""
        with self._lock, suppress(OSError):
            self._connection.send(message)

    def close(self) -> None:
        """Stop the run, and end the process."""
        _end(self._process)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:  # threads may close it together
            self._connection.close()


def _listen(module: str, setup: object, heard: Callable[[Any], None], begun: Future[Any]) -> None:
    # The kernel ends the process with the thread that starts it, which is this one.
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                module_command(module, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a session of its own would get less processor time on busy machines
            )
    except OSError as error:
        begun.set_exception(WorkerError(f"a process cannot be started: {error.strerror}"))
        return
    connection = Connection(ours.detach())
    begun.set_result((process, connection))
    end: GfgenError | None = None
    try:
        with suppress(OSError):
            connection.send(setup)
        for message in _received(connection):
            heard(message)
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        end = WorkerError(f"its process {how}")
    except Exception as raised:
        logger.exception("a message of a session's process failed")
        end = RunError(f"a message of its process failed: {in_one_line(raised)}")
    finally:
        heard(Gone(end))
    _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _received(connection: Connection) -> Iterator[Any]:
    """Until the other end is gone. Raises: what unpickling a message raises."""
    with suppress(EOFError, OSError):
        while True:
            yield connection.recv()


def run(fd: int, serve: Callable[[Connection], None]) -> int:
    """The process's `main`: serve the parent, and tell it why this ends."""
    connection, error = Connection(fd), None
    try:
        serve(connection)
    except GfgenError as raised:
        error = raised
    except Exception as raised:
        logger.exception("the process of a session failed")
        error = RunError(in_one_line(raised))
    with suppress(OSError):
        connection.send(Gone(error))
    return 0 if error is None else error.exit_code


class Feed(Observer):
    """Messages of the parent, which a thread reads: `Requests` and `Intake` of a run that ends with them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: list[AdmittedJob] = []
        self._attempts: dict[str, int] = {}
        """By job."""
        threading.Thread(target=self._read, name="jobs", daemon=True).start()

    def _read(self) -> None:
        end: Exception | None = None
        try:
            for message in _received(self._connection):
                self._inbox.put(message)
                os.eventfd_write(self._wake_fd, 1)
        except Exception as error:  # `take_events` ends the run with it
            end = error
        self._inbox.put(end)
        os.eventfd_write(self._wake_fd, 1)

    def fileno(self) -> int:
        return self._wake_fd

    def take_events(self, now_s: float) -> Sequence[events.Event]:
        """Raises: RunError for a message that cannot be read."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        found: list[events.Event] = []
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, Exception):
                raise RunError(f"a message cannot be read: {in_one_line(message)}") from message
            is_end = message is None
            found += [events.StopRequested(now_s, signal.SIGTERM)] if is_end else self.got(message, now_s)
        return found

    def got(self, message: Any, now_s: float) -> Sequence[events.Event]:
        """The events that a message means for the run."""
        raise NotImplementedError

    def take(self) -> Sequence[AdmittedJob]:
        taken, self._waiting = self._waiting, []
        return taken

    def put(self, job: AdmittedJob, attempt: int) -> None:
        self._attempts[job.job_id] = attempt
        self._waiting.append(job)

    def cancel(self, attempt: int, now_s: float) -> Sequence[events.Event]:
        """A job that the run has not taken yet ends without an event."""
        job_id = next((job_id for job_id, number in self._attempts.items() if number == attempt), None)
        for job in self._waiting:
            if job.job_id == job_id:
                self._waiting.remove(job)
                self.ended(JobOutcome(job.info, "cancelled"))
                return ()
        return () if job_id is None else [events.JobCancelled(now_s, job_id)]

    def ended(self, outcome: JobOutcome) -> None:
        self.send(Ended(self._attempts.pop(outcome.info.job_id), outcome))

    def send(self, message: object) -> None:
        with suppress(OSError):  # the parent is gone, and this process with it
            self._connection.send(message)
