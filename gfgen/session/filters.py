"""What the user has done with finished files: commands (`--on-file`, `--on-done`), and a filter.

`--keep-if`: a function of the user keeps or drops each result, or wants it again with the next seed. It runs
in a process of its own, so neither ranks nor the end of a stopped run wait for it. A result has its line in
the manifest before it is judged, and another one with the decision after.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gfgen.errors import GfgenError, InputError, RunError, in_one_line
from gfgen.models.ahead.pool import environment_of_others
from gfgen.policies.catalog import function_named
from gfgen.runtime.core.admission import AdmittedJob, with_attempt
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.files.manifest import MANIFEST_NAME, of_each_file
from gfgen.runtime.files.ownership import Claims
from gfgen.runtime.ipc.content import Content, is_unchanged
from gfgen.session.feed import Gone, Process, run
from gfgen.session.result import Result, result_of
from gfgen.system.linefile import LineFile
from gfgen.system.wording import counted, in_words

logger = logging.getLogger(__name__)


class Afterwards(Observer):
    """Takes finished jobs one after the other in a thread, so that ranks never wait."""

    def __init__(self, option: str) -> None:
        self._option, self._is_over = option, False
        self._todo: queue.Queue[JobOutcome] = queue.Queue()
        threading.Thread(target=self._work, name=option, daemon=True).start()

    def ended(self, outcome: JobOutcome) -> None:
        if outcome.status == "done":
            self._todo.put(outcome)

    def wait(self) -> None:
        """Return when all jobs that have ended are taken."""
        if num_left := self._todo.unfinished_tasks:
            logger.info("waiting for %s of %s", self._option, counted(num_left, "job"))
        self._todo.join()

    def take(self, outcome: JobOutcome) -> None:
        raise NotImplementedError

    def _work(self) -> None:
        while True:
            outcome = self._todo.get()
            try:
                if not self._is_over:
                    self.take(outcome)
            except Exception:
                logger.exception("%s failed for job %s", self._option, outcome.job_id)
            finally:
                self._todo.task_done()


class Filter(Afterwards):
    def __init__(
        self, named: str, output_dir: Path, *, most_again: int, limit_s: float, then: Observer | None
    ) -> None:
        """limit_s: for a call. then: is told of what is kept. Raises: InputError."""
        if ":" not in named:
            raise InputError(f"--keep-if {named}: MODULE:FUNCTION or FILE.py:FUNCTION is accepted")
        super().__init__("--keep-if")
        self._named, self._folder, self._then = named, output_dir.absolute(), then
        self._most_again, self._limit_s = most_again, limit_s
        self._again: list[AdmittedJob] = []
        self._process: Process | None = None
        self._counts: Counter[tuple[str, str]] = Counter()
        """By the outcome's status and the decision."""
        self.num_failed = 0

    def begin(self, jobs: Sequence[AdmittedJob], claims: Claims) -> None:
        """Load the filter, and judge what earlier runs left to it. Raises: InputError; OutputError."""
        self._jobs, self._lines = {job.job_id: job for job in jobs}, LineFile(self._folder / MANIFEST_NAME)
        self._load()
        left = [job for job in jobs if job.job_id in claims.done_ids and job.job_id not in claims.published]
        if num_stored := sum(job.job_id in claims.published for job in jobs):
            logger.info("--keep-if: %s in shards or a store are not judged", counted(num_stored, "result"))
        for outcome in map(claims.outcome, left):
            if outcome.error is None and "decision" not in outcome.entry.get("filter", {}):
                self._todo.put(outcome)

    def again(self) -> list[AdmittedJob]:
        """Wait until all results are judged: the jobs to run again."""
        self.wait()
        again, self._again = self._again, []
        return again

    def finish(self) -> None:
        """End the process, whatever it does."""
        num_left = self._todo.unfinished_tasks + self.num_failed
        self._is_over = True
        if (process := self._process) is not None:
            process.close()
        if num_left:
            results = counted(num_left, "result")
            logger.warning("--keep-if has not judged %s: run the same command again to go on", results)

    def counted(self, summary: Summary) -> Summary:
        """The summary without the results that are not kept."""
        before = self._counts["skipped", "drop"] + self._counts["skipped", "again"]
        num_dropped, num_again = self._counts["done", "drop"], self._counts["done", "again"]
        return replace(
            summary,
            num_done=summary.num_done - num_dropped - num_again,
            num_skipped=summary.num_skipped - before,
            num_dropped=num_dropped + self._counts["skipped", "drop"],
        )

    def take(self, outcome: JobOutcome) -> None:
        try:
            process = self._process or self._load()
            process.send(result_of(outcome, self._folder))
            verdict = self._answer(self._limit_s)
            if "error" in verdict:
                raise RunError(verdict["error"])
            self._settle(outcome, verdict)
        except (GfgenError, OSError) as error:
            if not self.num_failed and not self._is_over:
                logger.error("--keep-if failed for job %s, whose result stays: %s", outcome.job_id, error)
            self.num_failed += 1

    def _load(self) -> Process:
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._process = process = Process(__name__, self._named, self._heard.put)
        self._answer(None)
        return process

    def _answer(self, limit_s: float | None) -> Any:
        try:
            answer = self._heard.get(timeout=limit_s)
        except queue.Empty:
            answer = Gone(RunError(f"it took longer than the {in_words(self._limit_s)} of --hook-timeout"))
        if isinstance(answer, Gone):
            assert self._process is not None
            self._process.close()
            self._process = None
            raise answer.error or RunError("its process has ended")
        return answer

    def _settle(self, outcome: JobOutcome, verdict: dict[str, Any]) -> None:
        """Remove the files of what is not kept, then write the line: a run that is killed in between makes
        them again."""
        info, line, decision = outcome.info, dict(outcome.entry), verdict["decision"]
        if decision == "again" and info.attempt > self._most_again:
            decision = "drop"
        line["filter"] = {"by": self._named, "attempt": info.attempt, **verdict, "decision": decision}
        if decision != "keep":
            line["status"] = "again"
            for each in of_each_file(line):
                path = self._folder / each["file"]
                if is_unchanged(path, Content(each["size_bytes"], each["sha256"])):
                    path.unlink()
        if decision == "drop":
            line |= {"status": "dropped", "file": None, "size_bytes": None, "sha256": None}
            line.pop("outputs", None)
        self._lines.append(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._counts[outcome.status, decision] += 1
        if decision == "again":
            job = replace(self._jobs[info.job_id], info=info, replaces=None, replaces_numbered={})
            self._again.append(with_attempt(job, line))
        elif decision == "keep" and self._then is not None:
            self._then.ended(replace(outcome, status="done"))


# Commands of --on-file and --on-done ---------------------------------------------------------

MAX_SHOWN_CHARS = 300


class FileHook(Afterwards):
    """Runs a command for each finished job."""

    def __init__(self, command: str, output_dir: Path, *, limit_s: float) -> None:
        super().__init__("--on-file")
        self._command, self._output_dir, self._limit_s = command, output_dir, limit_s

    def finish(self, *, is_stopped: bool) -> None:
        """Wait for the commands of all finished jobs, or of a stopped run for the one that runs."""
        self._is_over = is_stopped
        num_left = self._todo.qsize() if is_stopped else 0
        self.wait()
        if num_left:
            logger.warning(
                "--on-file was not run for %s, because the run was stopped", counted(num_left, "job")
            )

    def take(self, outcome: JobOutcome) -> None:
        info = outcome.info
        variables = {
            "JOB_ID": info.job_id,
            "FILE": str(self._output_dir.absolute() / outcome.file_names[0]),
            "PROMPT": info.spec.prompt,
            "SEED": str(info.spec.seed),
            "TAG": info.spec.tag or "",
            "OUTPUT": str(self._output_dir.absolute()),
        }
        run_hook("--on-file", self._command, variables, limit_s=self._limit_s, what=f"job {info.job_id}")


def run_done_hook(command: str, summary: Summary, output_dir: Path, *, status: str, limit_s: float) -> None:
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
    """Run a shell command with GFGEN_ variables, its output in memory: `CMD &` would keep a pipe open."""
    values = {f"GFGEN_{name}": value.replace("\0", "") for name, value in variables.items()}
    with os.fdopen(os.memfd_create("gfgen-hook"), "w+b") as output:  # temporary folders may be full or gone
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env={**environment_of_others(), **values},
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


# In the process -------------------------------------------------------------------------------


def serve(connection: Connection) -> None:
    judge = load(connection.recv())
    connection.send(None)
    while True:
        connection.send(judged(judge, connection.recv()))


def load(named: str) -> Any:
    """The function of this name, or an instance of the class. Raises: InputError."""
    found = function_named(named, option="--keep-if")
    try:
        return found() if inspect.isclass(found) else found
    except Exception as error:  # a user's class may raise anything
        raise InputError(f"--keep-if {named}: {in_one_line(error)}") from error


def judged(judge: Callable[[Result], object], result: Result) -> dict[str, Any]:
    """Decision and score, or an error."""
    decisions = {True: "keep", False: "drop", "again": "again"}
    try:
        said = judge(result)
        decision, score = said if isinstance(said, tuple) else (said, None)
        known = next((name for value, name in decisions.items() if decision == value), None)
        if known is None or not math.isfinite(score or 0.0):
            accepted = "True, False or 'again', alone or with a score in a pair"
            return {"error": f"it returned {said!r}; {accepted}, is accepted"}
        return {"decision": known} | ({} if score is None else {"score": float(score)})
    except (Exception, SystemExit) as error:
        return {"error": in_one_line(error)}


if __name__ == "__main__":  # what it gets names classes of the imported module
    sys.exit(run(int(sys.argv[1]), importlib.import_module("gfgen.session.filters").serve))
