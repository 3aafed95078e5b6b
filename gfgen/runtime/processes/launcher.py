"""Starts processes: forks them from a fork server that has only done the imports.

Importing torch takes seconds, and CUDA must not be initialised before a fork. The folder with the socket of
`multiprocessing`, which a killed process leaves under /tmp, is removed as soon as the server listens; a
descriptor serves to ask for processes (an abstract socket would let any user connect: CVE-2022-42919). The
kernel kills the server with the run, and its children with it (`lifeline`). None of them gets signals meant
for the run.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess, current_process
from typing import Any

from gfgen.errors import WorkerError
from gfgen.models.ahead.pool import pin_compilers
from gfgen.runtime.ipc.messages import Channel
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.system import machine
from gfgen.system.lifeline import PACKAGE_ROOT
from gfgen.system.signals import FOR_THE_RUN

logger = logging.getLogger(__name__)

WORKER_MAINS = {"cpu": "gfgen.runtime.worker.entry:main", "cuda": "gfgen.runtime.worker.gpu:main"}
_PROGRAMS = ("gfgen.runtime.worker.entry", "gfgen.runtime.files.writer")
PRELOADS = {"cpu": (*_PROGRAMS, "gfgen.models.families.flow_adapter"), "cuda": _PROGRAMS}
"""By device: what the fork server imports before it forks the first process. Ranks on GPUs import diffusers
themselves, at the same time, so no fork inherits what it asks CUDA."""
_BY_DESCRIPTOR = "/proc/self/fd/"


class Launcher:
    def __init__(
        self,
        settings: RankSettings,
        *,
        worker_main: str | None,
        writer_main: str,
        preload: Sequence[str] | None,
        keep_fds: Sequence[int],
    ) -> None:
        pin_compilers()
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # users cannot act on their warnings
        os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
        # Imports in the fork server ask whether CUDA is there. Without this they initialise it, and it does
        # not survive a fork; NVML does.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        machine.allow_most()
        self._oom_kills = machine.oom_kills()
        self._settings = settings
        self._tuned_tables: dict[str, str] = {}
        if settings.are_on_gpus:
            from gfgen.gfc.cuda.selector import tuned_tables

            self._tuned_tables = tuned_tables()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADS[settings.device] if preload is None else preload))
        self.host_copies: Mapping[str, Connection] = {}
        self.boards: Mapping[str, Sequence[tuple[socket.socket, socket.socket]]] = {}
        """Both by checkpoint: handed to each worker."""
        self._keep_fds = keep_fds
        self._worker_main = worker_main or WORKER_MAINS[settings.device]
        self._writer_main = writer_main
        ensure_fork_server(keep_fds)

    def start_worker(self, rank: int, checkpoints: tuple[str, ...]) -> tuple[BaseProcess, Channel]:
        settings = WorkerSettings(
            rank, checkpoints, self._settings, self._tuned_tables, self.host_copies, self.boards
        )
        return self._start(f"rank {rank}", self._worker_main, settings)

    def start_writer(self, idx: int) -> tuple[BaseProcess, Channel]:
        return self._start(f"writer {idx}", self._writer_main)

    def _start(self, name: str, target: str, *settings: WorkerSettings) -> tuple[BaseProcess, Channel]:
        ensure_fork_server(self._keep_fds)  # it may have died
        ours, theirs = Channel.pair()
        arguments = (target, theirs, *settings)
        process = self._context.Process(target=_enter, args=arguments, name=f"gfgen {name}", daemon=True)
        try:
            process.start()
        except BaseException as error:  # if the process has begun, it ends with its channel
            ours.close()
            if not isinstance(error, OSError | EOFError):
                raise
            is_limit = isinstance(error, EOFError) or error.errno in (errno.EMFILE, errno.EAGAIN)
            limit = " (see above; perhaps raise ulimit -n, -u or -t)" if is_limit else ""
            reason = machine.why_killed(self._oom_kills) or f"{error}{limit}"
            raise WorkerError(f"{name} cannot be started: {reason}; run again to go on") from error
        finally:
            theirs.close()
        return process, Channel(ours)


def _enter(target: str, *arguments: socket.socket | WorkerSettings) -> None:
    """The first function of a child process: import its main and call it."""
    module_name, _, attribute = target.partition(":")
    main: Callable[..., None] = getattr(importlib.import_module(module_name), attribute)
    main(*arguments)


def ensure_fork_server(keep_fds: Sequence[int] = ()) -> None:
    """Start the fork server unless it runs; what it forks dies with the run and keeps `keep_fds` open."""
    try:
        _ensure_fork_server(keep_fds, None)
    except OSError as error:  # TMPDIR may be a volume without sockets: FUSE, virtiofs
        if error.errno in (errno.EMFILE, errno.EAGAIN) or not os.path.isdir("/dev/shm"):
            raise
        _ensure_fork_server(keep_fds, "/dev/shm")


def _ensure_fork_server(keep_fds: Sequence[int], place: str | None) -> None:
    # The kernel would kill the server at the end of any other thread.
    assert threading.current_thread() is threading.main_thread(), "the main thread starts processes"
    server: Any = multiprocessing.forkserver._forkserver
    address_before = server._forkserver_address
    with (
        _our_start(keep_fds),
        tempfile.TemporaryDirectory(prefix="gfgen-", dir=place) as made,
        _socket_folder(made) as folder,
    ):
        with _signals_blocked():
            multiprocessing.resource_tracker.ensure_running()
        with _signals_blocked():  # again: the tracker's start lets some of them through
            server.ensure_running()
        address = server._forkserver_address
        if address == address_before:
            return
        if address.startswith(folder):
            server._forkserver_address = f"{_BY_DESCRIPTOR}{os.open(address, os.O_PATH | os.O_CLOEXEC)}"
    if address_before and address_before.startswith(_BY_DESCRIPTOR):
        os.close(int(address_before.removeprefix(_BY_DESCRIPTOR)))


@contextlib.contextmanager
def _our_start(keep_fds: Sequence[int]) -> Iterator[None]:
    """Start processes with our modules in their path, and a fork server that dies with this process."""
    util: Any = multiprocessing.util
    spawn = util.spawnv_passfds

    def start(path: bytes, command: Sequence[str], fds: Sequence[int]) -> int:
        *flags, _, code = command
        if "forkserver" in code:  # the resource tracker ends when all others have
            # The server may not find this package.
            found = f"import sys; sys.path.append({str(PACKAGE_ROOT)!r})"
            bind = f"lifeline.die_with_parent({os.getpid()}); lifeline.bind_forks(); outlet.drop_unread()"
            code = f"{found}; from gfgen.system import lifeline, outlet; {bind}; {code}"
            fds = [*fds, *keep_fds]
        pid: int = spawn(path, [*flags, "-P", "-c", code], fds)
        return pid

    util.spawnv_passfds = start
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


@contextlib.contextmanager
def _socket_folder(folder: str) -> Iterator[str]:
    """Let `multiprocessing` put its socket there; a path has at most 107 bytes, and TMPDIR may be longer."""
    config: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    before = config.get("tempdir")
    if not os.path.isdir(_BY_DESCRIPTOR):
        raise WorkerError("no process can be started: /proc is not mounted here; mount it, then run again")
    fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    config["tempdir"] = path = f"{_BY_DESCRIPTOR}{fd}"
    try:
        yield path
    finally:
        config["tempdir"] = before
        os.close(fd)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Inside, processes start with the signals for the run blocked, and inherit that."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_RUN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])  # the fork server waits for it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
