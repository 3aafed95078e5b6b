"""Starts processes: forks them from a fork server that has only done the imports.

Importing torch takes seconds, and CUDA must not be initialised before a fork.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from gfgen.errors import WorkerError
from gfgen.models.ahead.places import pin_compilers
from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.system import forkserver, machine

logger = logging.getLogger(__name__)

WORKER_MAINS = {"cpu": "gfgen.runtime.worker.entry:main", "cuda": "gfgen.runtime.worker.gpu:main"}
"""By device: where a rank's process begins."""
_PROGRAMS = ("gfgen.runtime.worker.entry", "gfgen.runtime.files.writer")
PRELOADS = {
    "cpu": (*_PROGRAMS, "gfgen.models.families.wan_adapter", "gfgen.models.families.qwen_adapter"),
    "cuda": _PROGRAMS,
}
"""By device: what the fork server imports before it forks the first process. Ranks on GPUs import diffusers
themselves, at the same time, so no fork inherits what it asks CUDA."""
MAX_FORKS = 3
"""Tries to start a process if it, or the fork server, is killed during its start."""


class Launcher:
    """Starts workers and writers."""

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
        self._keep_fds = keep_fds
        """All processes keep these open until they end."""
        self._worker_main = worker_main or WORKER_MAINS[settings.device]
        self._writer_main = writer_main
        forkserver.ensure_running(keep_fds)

    def start_worker(self, rank: int, checkpoints: tuple[str, ...]) -> tuple[BaseProcess, Channel]:
        settings = WorkerSettings(rank, checkpoints, self._settings, self._tuned_tables)
        return self._start(f"rank {rank}", self._worker_main, settings)

    def start_writer(self, idx: int) -> tuple[BaseProcess, Channel]:
        return self._start(f"writer {idx}", self._writer_main)

    def _start(self, name: str, target: str, *settings: WorkerSettings) -> tuple[BaseProcess, Channel]:
        tries_left = MAX_FORKS
        while True:
            tries_left -= 1
            try:
                return self._fork(name, target, settings)
            except (OSError, EOFError) as error:
                reason = machine.why_killed(self._oom_kills) or error
                if not tries_left or not isinstance(error, ConnectionError | EOFError):
                    raise WorkerError(f"{name} cannot be started: {reason}; run again to go on") from error
                logger.warning("%s was killed as it was started (%s); it is started again", name, reason)

    def _fork(
        self, name: str, target: str, settings: tuple[WorkerSettings, ...]
    ) -> tuple[BaseProcess, Channel]:
        """Try once. If this fails and the process has begun, it ends with its channel."""
        forkserver.ensure_running(self._keep_fds)  # it may have died
        ours, theirs = Channel.pair()
        arguments = (target, theirs, *settings)
        process = self._context.Process(target=_enter, args=arguments, name=f"gfgen {name}", daemon=True)
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return process, Channel(ours)


def _enter(target: str, *arguments: socket.socket | WorkerSettings) -> None:
    """The first function of a child process: import its main and call it."""
    module_name, _, attribute = target.partition(":")
    main: Callable[..., None] = getattr(importlib.import_module(module_name), attribute)
    main(*arguments)
