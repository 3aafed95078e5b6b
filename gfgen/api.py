"""gfgen from Python (docs/python.md): what `import gfgen` offers.

A session runs in a process of its own (session/hosted.py), which never imports the program, so scripts need
no `if __name__ == "__main__"`, and computing in the program does not delay the scheduler.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import queue
import re
import secrets
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from gfgen.cli.check import Report, report
from gfgen.cli.options import JobOptions, LogOptions, RankOptions, checked
from gfgen.cli.run_files import RunOptions
from gfgen.cli.simulate import Assumed, FoundPlan, PlanArguments, planned
from gfgen.errors import GfgenError, InputError, JobFileError, WorkerError, in_one_line, nearest
from gfgen.job.fields import shown
from gfgen.job.inputs import is_url, plain
from gfgen.job.reader import JobSource
from gfgen.job.shared import check_defaults
from gfgen.models.families.registry import DEFAULT_MODEL
from gfgen.policies.catalog import policy_of
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.lock import hold_folder, holder_of
from gfgen.runtime.files.ownership import owner_name
from gfgen.session import hosted
from gfgen.session.feed import Cancel, Ended, Gone, Process
from gfgen.session.ranks import AskedRanks
from gfgen.session.result import Result, result_of

logger = logging.getLogger(__name__)

Jobs = str | os.PathLike[str] | Mapping[str, Any] | Iterable[str | Mapping[str, Any]]
_RANKS = tuple(each.name for each in fields(AskedRanks))
_OPTIONS = ("model", "gpus", "policy", "output_dir", *_RANKS)
_ARGUMENTS = {"output": "output_dir", "profile": "profile_path", "by": "by", "at": "at"}


def _name_arguments(error: GfgenError | None) -> None:
    """Let the error name arguments in place of options of commands."""

    def argument(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return _ARGUMENTS.get(name, name if name in _OPTIONS else found[0])

    if error is not None:
        error.args = tuple([re.sub("--([a-z-]+)", argument, str(each)) for each in error.args])


@contextlib.contextmanager
def _naming_arguments() -> Iterator[None]:
    try:
        yield
    except GfgenError as error:
        _name_arguments(error)
        raise


def generate(jobs: Jobs, **defaults: Any) -> Iterator[Result]:
    """Make pictures and videos; yield each job's result as it ends.

    A result has image (PIL), frames (an array), files (their content), path, error, seconds and job.
    jobs: a path of a job file, or a list of prompts and of dictionaries with fields of a job.
    defaults: fields of jobs without a value, such as steps=8, and options of `Session`.

    Without `output_dir` no file is left. With it, files and manifest are those of `gfgen run`: what is done
    is not made again, and what was stopped goes on. A failed job is a result with `error`.
    Raises: JobFileError with all problems; other errors of `gfgen.errors`.
    """
    options, source = told(jobs, defaults)
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    run = _Run(options, source, heard.put)
    try:
        while not isinstance(message := heard.get(), Gone):
            if isinstance(message, Ended):
                yield run.result(message.outcome)
        if message.error is not None:
            raise message.error
    finally:
        run.close()


class Session:
    """Ranks with their models, which take jobs as they come.

    with gfgen.Session(model="wan2.2-ti2v-5b", gpus=[0, 1]) as session:
        future = session.submit(prompt="waves", frames=81, deadline="10min", callback=print)
        video = future.result()

    model: a name of `gfgen models`, a directory or a hub id, or a list of them.
    policy: a name of `gfgen policies`, or a function or class of your own (docs/policies.md).
    options: ranks, device, memory, precision, attention, compile, ... as of `gfgen run`.

    The end of `with` waits for all jobs; an exception stops them.
    """

    def __init__(
        self,
        model: str | Sequence[str] = DEFAULT_MODEL,
        *,
        gpus: Sequence[int] | None = None,
        policy: Any = "auto",
        output_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self._options = dict(model=model, gpus=gpus, policy=policy, output_dir=output_dir) | options
        self._run: _Run | None = None
        self._ready: Future[None] = Future()
        self._end: GfgenError | None = None
        """Why it takes no more jobs."""
        self._attempts = itertools.count(1)
        self._open: dict[int, tuple[Future[Result], Callable[[hosted.Progress], object] | None]] = {}
        self._is_closed = False
        self._inboxes: dict[int, queue.SimpleQueue[Any]] = {}
        """Of the threads of jobs."""

    def __enter__(self) -> Session:
        """Load the models. Raises: errors of `gfgen.errors`."""
        self._run = _Run(self._options, None, self._heard)
        try:
            self._ready.result()
        except BaseException:
            self._run.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        assert self._run is not None
        try:
            if kind is None:
                wait([future for future, _ in list(self._open.values())])
        finally:
            for future, _ in list(self._open.values()):
                future.cancel()
            self._is_closed = True
            self._run.close()

    def submit(
        self, *, callback: Callable[[hosted.Progress], object] | None = None, **fields: Any
    ) -> Future[Result]:
        """The future of a job with these fields. It raises RunError if the job has failed.

        callback: gets the job's progress, in a thread of the job, so that it may wait for other jobs.
        """
        if self._run is None or self._is_closed:
            raise InputError("a session takes jobs inside of 'with'")
        attempt, future = next(self._attempts), Future[Result]()
        message = hosted.Submit(attempt, _pickled(fields, _plain), callback is not None)
        self._open[attempt] = future, callback
        future.add_done_callback(partial(self._done, attempt))
        self._run.process.send(message)
        if self._end is not None:
            self._settle(attempt, None, self._end)
        return future

    def _done(self, attempt: int, future: Future[Result]) -> None:
        if future.cancelled() and self._open.pop(attempt, None) is not None and self._run is not None:
            future.set_running_or_notify_cancel()  # those who wait for it learn of it
            self._run.process.send(Cancel(attempt))

    def _heard(self, message: Any) -> None:
        """In the thread that reads, which nothing may delay: the process waits until it has read."""
        match message:
            case hosted.Ready():
                self._ready.set_result(None)
            case hosted.Began(attempt) | Ended(attempt) | hosted.Refused(attempt):
                self._pass_on(attempt, message)
            case Gone(error):
                self._end = self._end or error or WorkerError("gfgen's process has ended")
                if not self._ready.done():
                    self._ready.set_exception(self._end)
                for attempt in {*list(self._open), *list(self._inboxes)}:
                    self._pass_on(attempt, message)

    def _pass_on(self, attempt: int, message: Any) -> None:
        inbox = self._inboxes.get(attempt)
        if inbox is None:
            inbox = self._inboxes[attempt] = queue.SimpleQueue()
            threading.Thread(
                target=self._tell, args=(attempt, inbox), name=f"gfgen job {attempt}", daemon=True
            ).start()
        inbox.put(message)

    def _tell(self, attempt: int, inbox: queue.SimpleQueue[Any]) -> None:
        """In a thread of the job, since functions of the program run here: call them, and end its future."""
        while isinstance(message := inbox.get(), hosted.Began):
            callback = self._open.get(attempt, (None, None))[1]
            try:
                if callback is not None:
                    callback(message.progress)
            except BaseException:
                logger.exception("the callback of job %s failed", message.progress.job_id)
        try:
            if isinstance(message, Ended) and self._run is not None:
                result = self._run.result(message.outcome)
                result.check()
                self._settle(attempt, result, None)
            else:
                self._settle(attempt, None, self._end if isinstance(message, Gone) else message.error)
        except Exception as failed:
            self._settle(attempt, None, failed)
        finally:
            self._inboxes.pop(attempt, None)

    def _settle(self, attempt: int, result: Result | None, error: Exception | None) -> None:
        future, _ = self._open.pop(attempt, (None, None))
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)


@_naming_arguments()
def check(jobs: Jobs, **defaults: Any) -> Report:
    """What `gfgen check` prints, as an object: print(report), report.found.problems, report.as_json().

    jobs, defaults: as of `generate`; without `output_dir` as if in an empty folder.
    """
    options, source = told(jobs, defaults)
    ranks, gpus = _ranks(options), options.get("gpus")
    nowhere = Path(tempfile.gettempdir(), f"gfgen-{secrets.token_hex(8)}")
    folder = Path(options.get("output_dir") or nowhere)
    asked = RunOptions(
        output_dir=folder,
        job_file=owner_name(source.paths, folder),
        ranks=(ranks if gpus is None else replace(ranks, ranks=len(_several(gpus)))).here(),
        policy=policy_of(options.get("policy", "auto")),
        model=_models(options)[0],
        trace=None,
        logs=LogOptions(),
    )
    return report(source, asked)


@_naming_arguments()
def plan(jobs: Jobs, *, ranks: int | Sequence[int] | None = None, **defaults: Any) -> FoundPlan:
    """What `gfgen plan` prints, as an object: print(found), found.plan, found.as_json().

    ranks: a number, or several. defaults: fields of jobs, and by, at, policy, profile_path, memory.
    """
    own: dict[str, Any] = {name: defaults.pop(name) for name in ("by", "at") if name in defaults}
    if ranks is not None:
        own["ranks"] = ",".join(map(str, _several(ranks)))
    if "policy" in defaults:
        own["policies"] = _several(defaults.pop("policy"))
    of_machine = ("model", "profile_path", "memory")
    assumed = {name: defaults.pop(name) for name in of_machine if name in defaults}
    given = PlanArguments(
        jobs=JobOptions(),
        assumed=Assumed(**checked(Assumed, assumed)),
        **checked(PlanArguments, own),
    )
    return planned(_source(jobs, defaults), given)


def told(jobs: Jobs, defaults: Mapping[str, Any]) -> tuple[dict[str, Any], JobSource]:
    """Options of a session, and the jobs with the other defaults."""
    own = {name: value for name, value in defaults.items() if name in _OPTIONS}
    return own, _source(jobs, {name: value for name, value in defaults.items() if name not in own})


def _source(jobs: Jobs, defaults: Mapping[str, Any]) -> JobSource:
    """Raises: JobFileError for the defaults; InputError for a path."""
    fields = {name: value for name, value in defaults.items() if name != "columns"}
    if problems := check_defaults(fields):
        raise JobFileError("the defaults", tuple(problems))
    if isinstance(jobs, str) and not (is_url(jobs) or os.path.lexists(jobs)):
        raise InputError(f"job file {jobs}: no such file; a prompt goes into a list: [{jobs!r}]")
    if isinstance(jobs, str | os.PathLike):
        columns = defaults.get("columns", {})
        return JobSource(files=(os.fspath(jobs),), fallbacks=fields, columns=columns)
    if "columns" in defaults:
        raise InputError("columns: they are those of a job file in Parquet; jobs are given otherwise")
    if not isinstance(jobs, Iterable):
        raise InputError(f"jobs = {shown(jobs)}: a list of prompts or dictionaries, or a path, is accepted")
    return JobSource(given=(jobs,) if isinstance(jobs, Mapping) else tuple(jobs), fallbacks=fields)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple | range) else (value,)


def _ranks(options: Mapping[str, Any]) -> AskedRanks:
    """Raises: InputError for a value that the command refuses."""
    given = {name: value for name, value in options.items() if name in _RANKS}
    given |= {name: _several(given[name]) for name in ("precision", "attention") if name in given}
    if isinstance(given.get("ranks"), float):
        raise InputError(f"ranks = {given['ranks']}: a whole number is accepted")
    return AskedRanks(**checked(RankOptions, given))


def _models(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Raises: InputError for what is no name and no path."""
    found = _several(options.get("model", DEFAULT_MODEL))
    if not found or not all(each and isinstance(each, str | os.PathLike) for each in found):
        raise InputError(f"model = {shown(found)}: a name, a path or a list of these is accepted")
    return tuple([str(os.fspath(each)) for each in found])


class _Run:
    """A session's process and folder; without `output_dir` this is temporary, and results take its files."""

    def __init__(
        self, options: Mapping[str, Any], jobs: JobSource | None, heard: Callable[[Any], None]
    ) -> None:
        """Raises: InputError for an option that does not exist, or a value that cannot be sent."""
        for name in options:
            if name not in _OPTIONS:
                near = nearest(name, _OPTIONS)
                raise InputError(
                    f"{name}: not an option; {f'did you mean {near}?' if near else ', '.join(_OPTIONS)}"
                )
        given, gpus, policy = options.get("output_dir"), options.get("gpus"), options.get("policy", "auto")
        if is_url(str(given)):
            raise InputError("output_dir: a folder is accepted; 'gfgen run -o s3://...' writes to stores")
        self._stack, self._is_kept = contextlib.ExitStack(), given is not None
        dumps: Any = pickle.dumps
        if not isinstance(policy, str):
            import cloudpickle  # whose classes of __main__ need no __main__ there

            dumps = cloudpickle.dumps
        if jobs is not None:
            given_jobs = jobs.given and _pickled(jobs.given, partial(_plain, name="jobs"))
            jobs = replace(jobs, given=given_jobs, fallbacks=_pickled(jobs.fallbacks, _plain))
        level, names = logging.getLogger("gfgen").getEffectiveLevel(), ("debug", "info", "warning", "error")
        setup = hosted.Setup(
            options={"output_dir": None, "keeps_records": self._is_kept},
            ranks=_ranks(options),
            gpus=None if gpus is None else ",".join(map(str, _several(gpus))),
            policy=_pickled(policy, dumps),
            path=[os.path.abspath(path) for path in sys.path],
            models=_models(options),
            jobs=jobs,
            log_level=names[min(3, max(0, level // 10 - 1))],
        )
        _pickled(setup, pickle.dumps)
        if given is not None:
            self._folder = Path(given)
        else:
            self._folder = self._stack.enter_context(_temporary_folder()) / "files"
            made = self._folder.parent
            self._stack.callback(weakref.finalize(self, shutil.rmtree, made, ignore_errors=True))
        setup = replace(setup, options={**setup.options, "output_dir": self._folder})

        def hear(message: Any) -> None:
            _name_arguments(getattr(message, "error", None))
            heard(message)

        self.process = Process("gfgen.session.hosted", setup, hear)

    def result(self, outcome: JobOutcome) -> Result:
        found = result_of(outcome, self._folder)
        if self._is_kept:
            return found
        contents = [path.read_bytes() for path in found.contents if isinstance(path, Path)]
        for name in outcome.file_names:
            (self._folder / name).unlink(missing_ok=True)
        return replace(found, path=None, contents=contents)

    def close(self) -> None:
        self.process.close()
        self._stack.close()


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A new one, which this process locks; those of dead processes are removed."""
    for old in Path(tempfile.gettempdir()).glob("gfgen-session-*"):
        if holder_of(old) is None:
            shutil.rmtree(old, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix="gfgen-new-"))
    with hold_folder(made):
        yield made.rename(made.with_name(made.name.replace("new", "session", 1)))


def _plain(value: Any, name: str = "") -> Any:
    """Of Python's own classes alone, since no other one is in the process. Raises: InputError."""
    match value := plain(value):
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__index__(value)
        case float():
            return float.__float__(value)
        case list():
            return [_plain(each, name) for each in value]
        case tuple():
            return tuple([_plain(each, name) for each in value])
        case Mapping():
            if other := next((key for key in value if not isinstance(key, str)), None):
                raise InputError(f"{name}: {shown(other)} is a name of a field or argument; give a text")
            return {str.__str__(key): _plain(each, key) for key, each in value.items()}
    accepted = "give a text, a number, or a list or dictionary of these"
    raise InputError(f"{name} = {shown(value)}: this cannot go to another process; {accepted}")


def _pickled(value: Any, dumps: Callable[[Any], Any]) -> Any:
    try:
        return dumps(value)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"this cannot go to another process: {in_one_line(error)}") from error
