"""What `gfgen check` and `gfgen run --dry-run` report: problems, what a run would do, memory and time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from logging.handlers import BufferingHandler
from typing import Any

import click

from gfgen.cli.run_files import RunOptions, claims_of, has_bar, session_of
from gfgen.cli.shown.prediction import AT_LOADING, known_here, machine, slowdowns
from gfgen.errors import InputError, Problem, RunError, listed
from gfgen.job.fields import shown
from gfgen.job.inputs import FileLine
from gfgen.job.reader import JobSource
from gfgen.runtime.core.admission import AdmittedJob, tell_of_warnings
from gfgen.runtime.files.journal import JOURNAL_NAME, first_arrivals
from gfgen.runtime.files.ownership import STATUSES, Claims, check_records
from gfgen.runtime.predict.profile_file import check_profile
from gfgen.runtime.simulate.planner import FULL_TASKS, PlanWindow, RankPlanner
from gfgen.session.admission import AdmittedSource, judge, warn_of_passed_deadlines
from gfgen.session.memory import GpuMemory, HostMemory
from gfgen.session.ranks import Ranks, differences, made_with
from gfgen.system.machine import free_bytes
from gfgen.system.signals import DecisionTimeout
from gfgen.system.wording import counted, in_words, named, size_in_words

logger = logging.getLogger(__name__)

WORDS = {"left": "begun by a run", "again": "to make again", "colliding": "colliding with other files"}


def check_jobs(source: JobSource, options: RunOptions) -> int:
    """Print the report; returns 2 if a run would start nothing because of a problem."""
    found = report(source, options)
    click.echo(json.dumps(found.as_json(), indent=1) if options.logs.log_json else str(found))
    problems, jobs = found.found.problems, found.found.jobs
    return 2 if problems and not (options.skip_invalid and jobs) else 0


def report(source: JobSource, options: RunOptions) -> Report:
    """What a run would do. Raises: InputError for a file, a folder or a model."""
    there = next(each for each in (options.output_dir, *options.output_dir.parents) if os.path.lexists(each))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--output {options.output_dir}: cannot write there; name another folder")
    if there == options.output_dir:
        check_records(there)
    claims, now = claims_of(source, options), time.time()
    with _collected() as logged:
        cluster, admission = options.cluster, session_of(options, options.cluster).admission
        found = judge(source, admission, claims=claims, has_bar=has_bar(options))
        tell_of_warnings((job.info.spec, job.info.warnings) for job in found.jobs)
        todo = [job for job in found.jobs if job.job_id not in claims.done_ids]
        arrived_at = first_arrivals(options.output_dir / JOURNAL_NAME, forced_from=claims.forced_from)
        warn_of_passed_deadlines(todo, now=now, arrived_at=arrived_at)
        memory = _memory(todo, admission.memory) if cluster is None else None
        prediction = _prediction(todo, options, admission.memory, now=now)
        sizes = sum(job.file_bytes for job in todo), free_bytes(options.output_dir)
        nodes = {} if cluster is None else cluster.started()
    statuses = {job.job_id: claims.status(job) for job in found.jobs}
    begun = {job.job_id for job in found.jobs if (job.job_id, job.info.spec_hash) in arrived_at}
    statuses |= {name: ("left", "") for name in begun if statuses[name][0] == "new"}
    counts = Counter(status for status, _ in statuses.values())
    others = {} if cluster is not None else _made_with_others(claims, found.jobs, options.ranks)
    facts = {
        "source": source.name,
        "jobs": len(found.parsed.specs),
        "problems": [_problem_as_json(problem) for problem in found.problems],
        "counts": {each: counts[each] for each in STATUSES} | {"colliding": found.num_colliding},
        "changed": [job_id for job_id, (status, _) in statuses.items() if status == "changed"],
        "made_with_others": others,
        "again": {job_id: why for job_id, (status, why) in statuses.items() if status == "again"},
        "output": str(options.output_dir),
        "overrides": dict(source.overrides),
        "fallbacks": dict(source.fallbacks),
        "defaults": {name: dict(defaults) for name, defaults in found.parsed.defaults},
        "rounded": {job.job_id: job.info.rounding for job in found.jobs if job.info.rounding is not None},
        "nodes": {name: ranks.description for name, ranks in nodes.items()},
        "memory": memory,
        "space": dict(zip(("files_bytes", "free_bytes"), sizes, strict=True)) if todo else {},
        "prediction": None if prediction is None else asdict(prediction),
        "notes": [each.getMessage() for each in logged if each.levelno == logging.INFO],
        "warnings": [each.getMessage() for each in logged if each.levelno > logging.INFO],
    }
    return Report(found, facts, prediction, logged)


@contextlib.contextmanager
def _collected() -> Iterator[list[logging.LogRecord]]:
    logger, kept = logging.getLogger("gfgen"), BufferingHandler(sys.maxsize)
    handlers, level = logger.handlers, logger.level
    logger.handlers = [kept]
    logger.setLevel(logging.INFO)
    try:
        yield kept.buffer
    finally:
        logger.handlers = handlers
        logger.setLevel(level)


def _memory(jobs: Sequence[AdmittedJob], memory: HostMemory) -> dict[str, Any] | None:
    if not jobs:
        return None
    checkpoints = {job.checkpoint: job.spec.model or "" for job in jobs}
    weights = {checkpoints[path]: size for path, size in memory.with_patches(checkpoints).items()}
    memory.streaming(checkpoints)  # which logs it
    return {
        "weights_bytes": weights,
        "largest_job_bytes": max(map(memory.work_bytes, jobs)),
        "available_bytes": memory.room_bytes,
        "of": "each GPU" if isinstance(memory, GpuMemory) else "main memory",
    }


def _memory_in_words(found: Mapping[str, Any]) -> str:
    sizes = [f"{name} {size_in_words(size)}" for name, size in found["weights_bytes"].items() if size]
    text = f"weights of {', '.join(sizes) or 'unknown size'}, "
    text += f"largest job {size_in_words(found['largest_job_bytes'])}"
    if (available := found["available_bytes"]) is None:
        return text
    return f"{text}; {size_in_words(available)} of {found['of']} is available"


@dataclass(frozen=True, slots=True)
class _Prediction:
    """When a run that starts now ends, with the keys of the JSON."""

    unknown: str | None = None
    machine: str = ""
    seconds: float = 0.0
    ends_at: float = 0.0
    late: tuple[str, ...] = ()
    deadlines: int = 0
    timed_out: tuple[str, ...] = ()

    def in_words(self) -> str:
        if self.unknown is not None:
            return f"unknown: {self.unknown}"
        form = "%H:%M" if self.seconds < 43_200 else "%a %Y-%m-%d %H:%M"
        ends = time.strftime(form, time.localtime(self.ends_at))
        text = (
            f"about {in_words(self.seconds)} on {self.machine}, plus loading; done at {ends} if it starts now"
        )
        if self.timed_out:
            text += f"; {counted(len(self.timed_out), 'job')} would time out: {named(self.timed_out, 'job')}"
        if not self.deadlines:
            return text
        if not self.late:
            due = "its deadline" if self.deadlines == 1 else f"all {self.deadlines:,} deadlines"
            return f"{text}; {due} met"
        return f"{text}; {len(self.late)} of {self.deadlines} deadlines missed: {named(self.late, 'job')}"


def _prediction(
    jobs: Sequence[AdmittedJob], options: RunOptions, memory: HostMemory, *, now: float
) -> _Prediction | None:
    if not jobs:
        return None
    if options.cluster is not None:
        return _Prediction("'gfgen plan JOBS --nodes NxRANKS' predicts several machines")
    num_ranks = options.ranks.num_ranks
    profile = known_here(jobs, options.ranks)
    if profile is None:
        return _Prediction("this machine has no profile; 'gfgen profile JOBS' measures one")
    reads_s = memory.reads_s({job.spec.model or "": job.checkpoint for job in jobs})
    for line in slowdowns(jobs, profile, reads_s):
        logger.info("%s", line)
    try:
        check_profile(profile, jobs, num_ranks=num_ranks)
    except InputError as error:
        return _Prediction(str(error))
    about: dict[str, Any] = dict(jobs=jobs, profile=profile, window=PlanWindow(now))
    turns = memory.residency(jobs)
    planner = RankPlanner(residency=lambda _: turns, reads_s=reads_s, is_coarse=True, **about)
    needs_all = bool(reads_s) or turns is not None
    in_full = needs_all and sum(job.trajectory.num_tasks for job in jobs) <= FULL_TASKS
    if turns is not None:
        counted_as = f"is {AT_LOADING}" if in_full else "is left out of the time, because there are many jobs"
        logger.info("loading of models that take turns %s", counted_as)
    try:
        found = (planner.in_full if in_full else planner.estimated)(options.policy.name, num_ranks)
    except DecisionTimeout as error:
        return _Prediction(str(error))
    except RunError:
        found = None
    if found is None:
        return _Prediction(f"{options.policy.name} fails in an estimate; 'gfgen simulate' shows the details")
    timed_out = tuple(job.job_id for job in found.failed)
    due = {job.job_id for job in jobs if job.spec.deadline_s is not None or job.spec.deadline_at is not None}
    return _Prediction(
        machine=machine(profile, jobs, num_ranks=num_ranks),
        seconds=round(found.end_s, 3),
        ends_at=now + found.end_s,
        late=(*(job.job_id for job in found.late), *(each for each in timed_out if each in due)),
        deadlines=len(due),
        timed_out=timed_out,
    )


@dataclass(frozen=True)
class Report:
    found: AdmittedSource
    facts: dict[str, Any]
    """With the keys of the JSON."""
    prediction: _Prediction | None
    logged: Sequence[logging.LogRecord]

    def as_json(self) -> dict[str, Any]:
        return self.facts

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        facts, problems = self.facts, self.found.problems
        jobs = counted(facts["jobs"], "job")
        yield f"{facts['source']}: {jobs}, {counted(len(problems), 'problem') if problems else 'no problem'}"
        yield from (f"  {line}" for line in listed(problems, limit=len(problems)))
        shown = [f"{count:,} {WORDS.get(name, name)}" for name, count in facts["counts"].items() if count]
        yield f"jobs      {', '.join(shown) or 'none'}"
        if changed := facts["changed"]:
            names = named(changed, "job")
            yield f"changed   {names}: made again, since the job differs from the finished one"
        if again := facts["again"]:
            yield f"again     {named([f'{job_id} ({why})' for job_id, why in again.items()], 'job')}"
        by_change: dict[str, list[str]] = {}
        for job_id, changes in facts["made_with_others"].items():
            by_change.setdefault(", ".join(changes), []).append(job_id)
        for text, ids in by_change.items():
            yield f"done      with {text}: {named(ids, 'job')}; --force makes them again"
        yield f"output    {facts['output']}/"
        if facts["overrides"]:
            yield f"fields    {_fields(facts['overrides'])} on all jobs, by options"
        if facts["fallbacks"]:
            yield f"fields    {_fields(facts['fallbacks'])} where jobs have no value, by options"
        for name, defaults in self.found.parsed.defaults:
            yield f"fields    {_fields(defaults)} where a line of {name} has no value, by its defaults"
        for name, ranks in facts["nodes"].items():
            yield f"node      {name}: {ranks}"
        if facts["memory"] is not None:
            yield f"memory    {_memory_in_words(facts['memory'])}"
        if facts["space"]:
            needed, left = facts["space"].values()
            lack = f": {size_in_words(needed - left)} may be missing" if needed > left else ""
            yield f"space     files take up to {size_in_words(needed)}; {size_in_words(left)} is free{lack}"
        if self.prediction is not None:
            yield f"time      {self.prediction.in_words()}"
        for record in self.logged:
            kind = "note" if record.levelno == logging.INFO else record.levelname.lower()
            yield f"{kind:<10}{record.getMessage()}"


def _made_with_others(claims: Claims, jobs: Sequence[AdmittedJob], ranks: Ranks) -> dict[str, list[str]]:
    """By id of a finished job, what has changed since."""
    found = {}
    for job in jobs:
        before = claims.entries.get(job.job_id, {}).get("made_with")
        if job.job_id in claims.done_ids and isinstance(before, dict):
            found[job.job_id] = differences(before, made_with(ranks, job.checkpoint))
    return {job_id: changes for job_id, changes in found.items() if changes}


def _problem_as_json(problem: Problem) -> dict[str, Any]:
    line = problem.line
    return {
        "file": line.file if isinstance(line, FileLine) else None,
        "line": line.line if isinstance(line, FileLine) else line,
        **{name: getattr(problem, name) for name in ("field", "value", "accepted")},
        "text": str(problem),
    }


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {shown(value)}" for name, value in fields.items())
