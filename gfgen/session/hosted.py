"""The session of a program (`gfgen.api`), in a process of its own, which never imports the program.

It runs jobs that are known at its start, or those that come until the program ends it.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gfgen import log
from gfgen.errors import GfgenError, InputError, InterruptedRunError, in_one_line
from gfgen.graph import Stage
from gfgen.job.reader import JobSource
from gfgen.policies.catalog import policy_of
from gfgen.runtime.control.closing import check_room
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.ownership import Claims, check_records, owner_name
from gfgen.session.admission import Admission, jobs_to_run, judge
from gfgen.session.feed import Cancel, Feed, run
from gfgen.session.ranks import AskedRanks
from gfgen.session.session import Arrivals, Session, SessionOptions

OTHER_MODEL = "name it, too: gfgen.Session(model=[...])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message."""

    options: Mapping[str, Any]
    """Of `SessionOptions`."""
    ranks: AskedRanks
    gpus: str | None
    policy: bytes
    """Pickled, since its class may be one of the program's own, in a module of `path`."""
    path: Sequence[str]
    models: Sequence[str]
    jobs: JobSource | None
    """None: they come later."""
    log_level: str


@dataclass(frozen=True, slots=True)
class Submit:
    attempt: int
    fields: Mapping[str, Any]
    is_watched: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded, and jobs may come."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A task of a job begins; steps count from 1, and are 0 before the first one."""

    job_id: str
    stage: str
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class Began:
    attempt: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Refused:
    attempt: int
    error: GfgenError


class ProgramFeed(Feed):
    """Admits jobs, and sends how far they are and how they end."""

    def __init__(self, connection: Connection, admission: Admission, claims: Claims) -> None:
        super().__init__(connection)
        self.admission, self._claims = admission, claims
        self._used: Counter[str] = Counter()
        self._steps: dict[str, int] = {}
        """Of each job that is watched."""

    def got(self, message: Submit | Cancel, now_s: float) -> Sequence[Event]:
        if isinstance(message, Cancel):
            return self.cancel(message.attempt, now_s)
        try:
            jobs = self.admit(self._source(message.fields), message.attempt)
        except Exception as error:  # it must not end the jobs that run
            told = error if isinstance(error, GfgenError) else InputError(in_one_line(error))
            self.send(Refused(message.attempt, told))
            return ()
        self._waiting += jobs
        if message.is_watched:
            self._steps |= {job.job_id: job.info.num_tasks - 3 for job in jobs}
        return ()

    def admit(self, source: JobSource, attempt: int) -> Sequence[AdmittedJob]:
        """The jobs that are to run; those that the folder has end here. Raises: JobFileError."""
        self._claims.done_ids.clear()
        jobs, _ = jobs_to_run(judge(source, self.admission, claims=self._claims, is_whole=attempt == 0))
        self._attempts |= {job.job_id: attempt for job in jobs}
        for job in jobs:
            if job.job_id in self._claims.done_ids:
                self.ended(self._claims.outcome(job))
        return [job for job in jobs if job.job_id in self._attempts]

    def _source(self, fields: Mapping[str, Any]) -> JobSource:
        """With an id that no open job has. Raises: InputError for several jobs, or an id that one has."""
        specs = JobSource(given=(fields,)).read().specs
        if len(specs) > 1:
            raise InputError("vary, seeds and num_images stand for several jobs: give them to gfgen.generate")
        if not specs:
            return JobSource(given=(fields,))
        job_id = specs[0].id
        if "id" not in fields:
            self._used[job_id] += 1
            job_id += f"-{number}" if (number := self._used[job_id]) > 1 else ""
        if job_id in self._attempts:
            raise InputError(f"id = {job_id}: an open job has it; each job needs its own")
        return JobSource(given=({**fields, "id": job_id},))

    def dispatched(self, dispatch: Dispatch) -> None:
        task = dispatch.task
        if (steps := self._steps.get(task.job_id)) is not None:
            step = steps if task.stage is Stage.DECODE else 0 if task.step is None else task.step + 1
            progress = Progress(task.job_id, str(task.stage), step, steps)
            self.send(Began(self._attempts[task.job_id], progress))

    def ended(self, outcome: JobOutcome) -> None:
        self._steps.pop(outcome.info.job_id, None)
        if outcome.entry:
            self._claims.entries[outcome.job_id] = outcome.entry
        super().ended(outcome)


def serve(connection: Connection) -> None:
    setup: Setup = connection.recv()
    log.configure(level=setup.log_level)
    sys.path += [path for path in setup.path if path not in sys.path]
    source, output_dir = setup.jobs, setup.options["output_dir"]
    inputs = () if source is None else source.paths
    options = SessionOptions(
        **setup.options,
        ranks=setup.ranks.here(gpus=setup.gpus),
        policy=policy_of(pickle.loads(setup.policy)),
        model=setup.models[0],
        grace_s=0.0,
        job_file=owner_name(inputs, output_dir),
    )
    with Session(options) as session:
        signals = session.signals  # caught from here on
        check_records(output_dir)
        claims = Claims(
            output_dir=output_dir, job_file=options.job_file, inputs=inputs, named_at=options.named_at
        )
        feed, jobs = ProgramFeed(connection, session.admission, claims), list[AdmittedJob]()
        if source is not None:
            with signals.interrupting("jobs were checked; nothing was started"):
                jobs += feed.admit(source, 0)
            if not jobs:
                return
            check_room(jobs, output_dir)
        session.load(jobs, models=setup.models if source is None else ())
        feed.admission = session.admission.of_loaded(session.checkpoints, help_=OTHER_MODEL)
        feed.send(Ready())
        arrivals = Arrivals(feed, requests=feed) if source is None else None
        session.run(jobs, observers=[feed], arrivals=arrivals)
        if session.stop_signal is not None:
            raise InterruptedRunError("stopped before all jobs ended", signal_number=session.stop_signal)


if __name__ == "__main__":  # what it sends names the classes of the imported module
    sys.exit(run(int(sys.argv[1]), importlib.import_module("gfgen.session.hosted").serve))
