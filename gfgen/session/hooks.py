"""Commands of the user that run when a file is complete, and when a run has ended (--on-file, --on-done)."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.system.wording import counted, in_words

logger = logging.getLogger(__name__)

MAX_SHOWN_CHARS = 300


class FileHook(Observer):
    """Runs a command for each finished job, one after the other, in a thread: ranks never wait for it."""

    def __init__(self, command: str, output_dir: Path, *, limit_s: float) -> None:
        self._command, self._output_dir, self._limit_s = command, output_dir, limit_s
        self._todo: queue.SimpleQueue[JobOutcome | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def ended(self, outcome: JobOutcome) -> None:
        if outcome.status != "done":
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="on-file", daemon=True)
            self._thread.start()
        self._todo.put(outcome)

    def stop(self) -> None:
        self._is_stopped = True

    def finish(self) -> None:
        """Wait for the commands of all finished jobs; each has its time limit."""
        if self._thread is None:
            return
        self._todo.put(None)
        if num_left := self._todo.qsize() - 1:
            logger.info("waiting for --on-file of %s", counted(num_left, "job"))
        self._thread.join()

    def _work(self) -> None:
        num_left = 0
        while (outcome := self._todo.get()) is not None:
            if self._is_stopped:
                num_left += 1
                continue
            info = outcome.info
            variables = {
                "JOB_ID": info.job_id,
                "FILE": str(self._output_dir.absolute() / info.file),
                "PROMPT": info.spec.prompt,
                "SEED": str(info.spec.seed),
                "TAG": info.spec.tag or "",
                "OUTPUT": str(self._output_dir.absolute()),
            }
            run_hook("--on-file", self._command, variables, limit_s=self._limit_s, what=f"job {info.job_id}")
        if num_left:
            logger.warning(
                "--on-file was not run for %s, because the run was stopped", counted(num_left, "job")
            )


def run_done_hook(command: str, summary: Summary, output_dir: Path, *, status: str, limit_s: float) -> None:
    """Run a command with the counts of a run; `status` is done, failed or stopped."""
    variables = {
        "STATUS": status,
        "DONE": str(summary.num_done),
        "FAILED": str(summary.num_failed),
        "SKIPPED": str(summary.num_skipped),
        "UNFINISHED": str(summary.num_unfinished),
        "OUTPUT": str(output_dir.absolute()),
    }
    run_hook("--on-done", command, variables, limit_s=limit_s, what="the run")


def run_hook(option: str, command: str, variables: Mapping[str, str], *, limit_s: float, what: str) -> bool:
    """Run a shell command with GFGEN_ variables; a failure is logged. Returns whether it succeeded.

    Its output goes to a file, not to a pipe: a command that it leaves in the background (`CMD &`) would
    keep a pipe open.
    """
    values = {f"GFGEN_{name}": value.replace("\0", "") for name, value in variables.items()}
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env={**os.environ, **values},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:  # such as a prompt longer than an environment may be
            logger.error("%s for %s could not start: %s", option, what, error.strerror)
            return False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            logger.error("%s for %s took longer than %s and was killed", option, what, in_words(limit_s))
            return False
        output.seek(max(output.seek(0, os.SEEK_END) - 4 * MAX_SHOWN_CHARS, 0))
        text = " ".join(output.read().decode("utf-8", "replace").split())[-MAX_SHOWN_CHARS:]
    if process.returncode != 0:
        logger.error(
            "%s for %s failed with status %d%s", option, what, process.returncode, text and f": {text}"
        )
        return False
    logger.debug("%s for %s: %s", option, what, text or "done")
    return True
