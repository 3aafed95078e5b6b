"""`gfgen run`: from a job file to files."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from gfgen import log
from gfgen.cli.progress import make_progress
from gfgen.errors import InputError, InterruptedRunError, JobFileError, Problem
from gfgen.job import passed_deadlines, read_jobs
from gfgen.layout import MAX_RANKS
from gfgen.models.geometry import load_geometry
from gfgen.models.registry import resolve_checkpoint
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime import resume
from gfgen.runtime.admission import AdmittedJob, Model, admit
from gfgen.runtime.clock import Clock
from gfgen.runtime.control import Control
from gfgen.runtime.cost import CostModel
from gfgen.runtime.journal import Journal, first_arrivals, journal_header
from gfgen.runtime.manifest import ManifestWriter, finished_jobs
from gfgen.runtime.metrics import Summary
from gfgen.runtime.observer import Observer
from gfgen.runtime.pool import WorkerPool
from gfgen.runtime.signals import SignalPipe
from gfgen.runtime.state import State
from gfgen.runtime.trace import TraceWriter
from gfgen.runtime.workers import ProcessBackend

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "tiny-wan"
DEFAULT_RANKS = 4


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `gfgen run`, after click has read them."""

    output_dir: Path
    num_ranks: int
    policy: NamedPolicy
    guard_s: float
    trace: Path | None
    quiet: bool
    log_json: bool


@click.command()
@click.argument("jobs", metavar="JOBS")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Folder for files and manifest. [outputs/ and the job file's name]",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, MAX_RANKS),
    default=DEFAULT_RANKS,
    show_default=True,
    help="Workers to use, one process each.",
)
@click.option("--policy", default="srtf", show_default=True, help="NAME[,option=value...]: 'gfgen policies'.")
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    help="For jobs that name none: a name ('gfgen models'), a directory or a hub id.",
)
@click.option("--skip-invalid", is_flag=True, help="Run the valid jobs of a file with mistakes; exit with 1.")
@click.option(
    "--lookahead",
    type=click.FloatRange(0, 1000),
    default=5.0,
    show_default=True,
    metavar="MS",
    help="Queue a next task this long before the predicted end of the one before it; 0 waits for the end.",
)
@click.option(
    "--trace", type=click.Path(path_type=Path), help="Write a timeline, for Perfetto or gfgen plot."
)
@click.option("--quiet", "-q", is_flag=True, help="No progress: only problems, failures and the last line.")
@click.option("--log-json", is_flag=True, help="Log one JSON object per line in place of bars.")
@click.pass_context
def run(
    ctx: click.Context,
    *,
    jobs: str,
    output: Path | None,
    ranks: int,
    policy: str,
    model: str,
    skip_invalid: bool,
    lookahead: float,
    trace: Path | None,
    quiet: bool,
    log_json: bool,
) -> int:
    """Generate the pictures and videos that JOBS asks for (JSON Lines; - reads standard input).

    Run it again to go on: jobs that are done are skipped, failed ones are tried again.
    """
    level = "debug" if ctx.obj["debug"] else "warning" if quiet else "info"
    log.configure(level=level, as_json=log_json)
    options = RunOptions(
        output_dir=output or Path("outputs") / (Path(jobs).stem if jobs != "-" else "stdin"),
        num_ranks=ranks,
        policy=load_policy(policy),
        guard_s=lookahead / 1000,
        trace=trace,
        quiet=quiet,
        log_json=log_json,
    )
    admitted, problems = _admitted(jobs, default_model=model, skip_invalid=skip_invalid)
    summary = run_jobs(admitted, options)
    _report(summary, options, problems)
    return 1 if summary.num_failed or problems else 0


def run_jobs(admitted: Sequence[AdmittedJob], options: RunOptions) -> Summary:
    """Run jobs that were admitted, except those that an earlier run has finished.

    Raises: InterruptedRunError when a signal ended the run before all jobs had.
    """
    _make_folder(options.output_dir)
    manifest = options.output_dir / "manifest.jsonl"
    done = finished_jobs(manifest, [job.info for job in admitted])
    todo = [job for job in admitted if job.job_id not in done]
    if not todo:
        return Summary(num_skipped=len(done))
    arrived_at = first_arrivals(options.output_dir / "journal.jsonl")
    resume_points = resume.find(options.output_dir, todo)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(contextlib.closing(SignalPipe()))
        pool = stack.enter_context(_ready_pool(todo, options, signals))
        started_at, clock = time.time(), Clock()
        _warn_of_passed_deadlines(todo, started_at, arrived_at)
        state = State(
            todo,
            num_ranks=options.num_ranks,
            clock=clock,
            costs=CostModel(),
            guard_s=options.guard_s,
            started_at=started_at,
            last_number=pool.last_number,
            arrived_at=arrived_at,
            resume=resume_points,
        )
        observers = [stack.enter_context(_closing(o)) for o in _observers(options, manifest)]
        backend = ProcessBackend(
            pool,
            todo,
            clock=clock,
            output_dir=options.output_dir,
            resume_points=resume_points,
            signals=signals,
        )
        stack.callback(backend.close)
        journal = Journal(
            options.output_dir / "journal.jsonl",
            header=journal_header(
                [job.info for job in todo],
                policy=options.policy.name,
                num_ranks=options.num_ranks,
                guard_s=options.guard_s,
                started_at=started_at,
            ),
        )
        stack.callback(journal.close)
        control = Control(
            todo,
            state=state,
            backend=backend,
            clock=clock,
            policy=options.policy,
            guard_s=options.guard_s,
            journal=journal,
            observers=observers,
            skipped=[job for job in admitted if job.job_id in done],
        )
        summary = control.run()
        for job_id, (next_index, producer) in state.stopped_at.items():
            backend.save(job_id, next_index=next_index, producer=producer)
    if state.stop_signal is not None and not state.all_ended:
        raise InterruptedRunError(
            f"stopped; {summary.num_done} jobs are done, {summary.num_unfinished} are left: "
            "run the same command again to go on",
            signal_number=state.stop_signal,
        )
    return summary


@contextlib.contextmanager
def _ready_pool(
    jobs: Sequence[AdmittedJob], options: RunOptions, signals: SignalPipe
) -> Iterator[WorkerPool]:
    """Workers with the models that these jobs need; the run's clock starts after this."""
    models = sorted({job.spec.model or "" for job in jobs})
    logger.info("starting %d ranks with %s", options.num_ranks, ", ".join(models))
    began_s = time.monotonic()
    checkpoints = sorted({job.checkpoint for job in jobs})
    with WorkerPool(num_ranks=options.num_ranks, checkpoints=checkpoints) as pool:
        pool.wait_ready(signals)
        logger.info("ready after %.1f s", time.monotonic() - began_s)
        yield pool


def _warn_of_passed_deadlines(
    jobs: Sequence[AdmittedJob], now: float, arrived_at: Mapping[tuple[str, str], float]
) -> None:
    hashes = {job.job_id: job.info.spec_hash for job in jobs}
    arrivals = {
        job_id: at for (job_id, spec_hash), at in arrived_at.items() if hashes.get(job_id) == spec_hash
    }
    for warning in passed_deadlines([job.spec for job in jobs], now=now, arrived_at=arrivals):
        logger.warning("%s", warning)


def _admitted(
    source: str, *, default_model: str, skip_invalid: bool
) -> tuple[tuple[AdmittedJob, ...], tuple[Problem, ...]]:
    """The jobs to run, and what was wrong with others if those may be skipped."""
    parsed = read_jobs("-" if source == "-" else Path(source))
    admitted, refused = admit(parsed.specs, default_model=default_model, find_model=_find_model)
    problems = tuple(sorted((*parsed.problems, *refused), key=lambda problem: problem.line or 0))
    if problems and not (skip_invalid and admitted):
        raise JobFileError(parsed.source, problems)
    for problem in problems:
        logger.warning("skipped: %s", problem)
    return admitted, problems


def _find_model(name: str) -> Model:
    checkpoint = resolve_checkpoint(name)
    return Model(name, checkpoint, load_geometry(checkpoint))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise InputError(
            f"--output {folder}: cannot write there ({error.strerror}); name another folder"
        ) from None


def _observers(options: RunOptions, manifest: Path) -> list[Observer]:
    observers: list[Observer] = [
        ManifestWriter(manifest),
        make_progress(quiet=options.quiet, log_json=options.log_json),
    ]
    if options.trace:
        options.trace.parent.mkdir(parents=True, exist_ok=True)
        observers.append(TraceWriter(options.trace))
    return observers


@contextlib.contextmanager
def _closing(observer: Observer) -> Iterator[Observer]:
    try:
        yield observer
    finally:
        observer.close()


def _report(summary: Summary, options: RunOptions, problems: tuple[Problem, ...]) -> None:
    """The end-of-run block; its last line says where the files are, and whether some are missing."""
    if not options.quiet:
        for line in summary.lines():
            click.echo(line)
    num_failed = summary.num_failed
    failed = f"; {num_failed} job{'s' if num_failed > 1 else ''} failed" if num_failed else ""
    click.echo(f"files and manifest.jsonl are in {options.output_dir}/{failed}")
