"""`gfgen run`: from a job file to files."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from gfgen import log
from gfgen.cli.options import (
    NamedPath,
    grace_option,
    graphs_option,
    lookahead_option,
    max_step_time_option,
    memory_option,
    ranks_per_gpu_option,
    tell_of_graphs,
)
from gfgen.cli.run_files import admit_jobs, check_records, check_watched, check_written, resolved
from gfgen.cli.shown.progress import make_file_progress, make_progress
from gfgen.errors import InputError, InterruptedRunError, LockedError, Problem
from gfgen.layout import MAX_RANKS
from gfgen.models.families.registry import DEFAULT_MODEL
from gfgen.models.geometry.weights import VAE_DTYPES
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.closing import closing_at
from gfgen.runtime.control.control import GRACE_S
from gfgen.runtime.control.metrics import Summary
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.devices import DEVICES, Devices, choose_devices, parse_memory
from gfgen.runtime.core.observer import Observer
from gfgen.runtime.files import resume
from gfgen.runtime.files.inbox import Inbox
from gfgen.runtime.files.journal import JOURNAL_NAME, Journal, first_arrivals, journal_header
from gfgen.runtime.files.lock import hold_folder
from gfgen.runtime.files.manifest import MANIFEST_NAME, ManifestWriter
from gfgen.runtime.files.ownership import default_folder, job_file_name
from gfgen.runtime.files.start import RunStart
from gfgen.runtime.predict.choosers import ThreadedChooser
from gfgen.runtime.predict.job_bounds import JobBounds
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.predict.profile_store import find_profile, runs_path
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.report.trace import TraceWriter
from gfgen.runtime.simulate.comparison import numbers
from gfgen.session.admission import warn_of_passed_deadlines, with_time
from gfgen.session.ranks import Ranks, ready_pool
from gfgen.session.session import run_loop
from gfgen.session.warming import warm_up
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `gfgen run`, after click has read them."""

    output_dir: Path
    ranks: Ranks
    policy: NamedPolicy
    lookahead_s: float
    trace: Path | None
    quiet: bool
    log_json: bool
    model: str = DEFAULT_MODEL
    """For jobs that name none."""
    skip_invalid: bool = False
    overwrite: bool = False
    job_file: str | None = None
    """The job file or the watched folder, as the folder's records name it."""
    closes_at: float | None = None
    """Unix time at which the run is to end by itself."""
    log_file: Path | None = None
    grace_s: float = GRACE_S
    max_step_s: float | None = None
    """Predicted time of one step above which a job is refused."""

    @property
    def job_bounds(self) -> JobBounds:
        return JobBounds(step_s=self.max_step_s)


@click.command()
@click.argument("jobs", metavar="[JOBS]", required=False)
@click.option(
    "--output",
    "-o",
    type=NamedPath(),
    help="Folder for results and the manifest. [outputs/NAME, after JOBS or DIR; a suffix if that is taken]",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace files that are already in the folder under the names of outputs, whoever made them.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, MAX_RANKS),
    help="Number of workers, one process each. [all GPUs, or 4 on a CPU]",
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="Device of the workers. auto takes GPUs if there are any.",
)
@ranks_per_gpu_option
@memory_option
@click.option(
    "--policy", default="auto", show_default=True, help="NAME[,option=value...]; 'gfgen policies' lists them."
)
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    help="Model for jobs without one: a name from 'gfgen models', a directory or a hub id.",
)
@click.option(
    "--random-weights",
    is_flag=True,
    help="Draw full-size weights at random from config files, to measure speed without checkpoints.",
)
@click.option(
    "--vae-dtype",
    type=click.Choice(VAE_DTYPES),
    default="auto",
    show_default=True,
    help="Precision of VAEs. auto follows the model cards (Wan: float32).",
)
@graphs_option
@click.option(
    "--skip-invalid", is_flag=True, help="Run the valid jobs of a file with errors; the exit code is 1."
)
@lookahead_option
@grace_option
@max_step_time_option(None)
@click.option("--trace", type=NamedPath(), help="Write a timeline for Perfetto or 'gfgen plot'.")
@click.option(
    "--watch",
    type=NamedPath(),
    metavar="DIR",
    help="Instead of JOBS: watch DIR, and run each job file that appears there once, until stopped.",
)
@click.option(
    "--until",
    metavar="TIME",
    help='Stop at this time, and start no job that cannot finish by then: "06:00", "8h" or an ISO time.',
)
@click.option(
    "--log-file",
    type=NamedPath(dir_okay=False),
    help="Also append log lines to FILE. It may be rotated at any time.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print only problems, failures and the last line.")
@click.option(
    "--log-json", is_flag=True, help="Log one JSON object per line instead of progress bars and text."
)
@click.pass_context
def run(
    ctx: click.Context,
    *,
    jobs: str | None,
    output: Path | None,
    overwrite: bool,
    ranks: int | None,
    device: str,
    ranks_per_gpu: int,
    memory: str | None,
    policy: str,
    model: str,
    random_weights: bool,
    vae_dtype: str,
    graphs: bool,
    skip_invalid: bool,
    lookahead: float,
    grace: float,
    trace: Path | None,
    watch: Path | None,
    until: str | None,
    max_step_time: float | None,
    log_file: Path | None,
    quiet: bool,
    log_json: bool,
) -> int:
    """Generate the pictures and videos of JOBS, a file of JSON lines (- reads standard input).

    Run the same command again to continue: it skips finished jobs and retries failed ones.
    """
    level = "debug" if ctx.obj["debug"] else "warning" if quiet else "info"
    file_level = "debug" if ctx.obj["debug"] else "info"
    log.configure(level=level, as_json=log_json)
    name = _name_of(jobs, watch)
    source = watch or (None if jobs in (None, "-") else Path(jobs or ""))
    output_dir = output or default_folder(Path("outputs"), name, source)
    check_written(jobs, output_dir, {"--trace": trace, "--log-file": log_file})
    log.configure(level=level, as_json=log_json, file=log_file, file_level=file_level)
    if output is None and output_dir.name != name:
        logger.info("outputs/%s belongs to another job file: files go to %s", name, output_dir)
    memory_limit = None if memory is None else parse_memory(memory)
    devices = choose_devices(device, ranks, memory_limit=memory_limit, ranks_per_gpu=ranks_per_gpu)
    options = RunOptions(
        output_dir=output_dir,
        ranks=Ranks(devices, random_weights, vae_dtype, graphs),
        policy=load_policy(policy),
        model=model,
        skip_invalid=skip_invalid,
        overwrite=overwrite,
        job_file=job_file_name(source, output_dir),
        lookahead_s=lookahead / 1000,
        grace_s=grace,
        trace=trace,
        closes_at=None if until is None else closing_at(until, now=time.time()),
        log_file=log_file,
        max_step_s=max_step_time,
        quiet=quiet,
        log_json=log_json,
    )
    problems: Sequence[Problem] = ()
    tell_of_graphs(ctx, devices)
    if watch is not None:
        summary = watch_folder(watch, options)
    else:
        assert jobs is not None
        with held_folder(output_dir) as lock:
            if output is None and default_folder(Path("outputs"), name, source) != output_dir:
                raise LockedError(f"another job file has just taken {output_dir}: run the same command again")
            check_records(output_dir)
            admitted, done, problems = admit_jobs(jobs, options)
            summary = run_jobs(admitted, options, done=done, lock=lock)
    _report(summary, options)
    return 1 if summary.num_failed or problems else 0


def run_jobs(
    admitted: Sequence[AdmittedJob], options: RunOptions, *, done: Collection[str], lock: int
) -> Summary:
    """Run jobs that were admitted, except those that an earlier run has done; `lock` holds their folder.

    Raises: InterruptedRunError when a signal ended the run before all jobs had.
    """
    with contextlib.closing(SignalPipe()) as signals:
        todo = [job for job in admitted if job.job_id not in done]
        if not todo:
            if options.trace:
                logger.warning(
                    "--trace has no effect, because no job is left to do; %s was not written", options.trace
                )
            return Summary(num_skipped=len(admitted))
        _check_trace(options.trace)
        skipped = [job for job in admitted if job.job_id in done]
        fitting, num_left = with_time(todo, options.ranks.step_times, closes_at=options.closes_at)
        residency = options.ranks.admission(options.model).residency(fitting)
        checkpoints = residency.checkpoints if residency else {job.checkpoint for job in fitting}
        with ready_pool(checkpoints, options.ranks, signals, keep_fds=[lock]) as pool:
            if options.ranks.has_graphs:
                held = of_held_models(fitting, residency)
                warm_up(pool, held, devices=options.ranks.devices, policy=options.policy, signals=signals)
            summary = run_on(pool, fitting, options, signals=signals, skipped=skipped, residency=residency)
        return replace(summary, num_unfinished=summary.num_unfinished + num_left)


def watch_folder(folder: Path, options: RunOptions) -> Summary:
    """Run the jobs of files that come to a folder, until a signal or the closing time.

    The models are those of the files that are there at the start, and the default one.
    """
    check_watched(folder, options.output_dir)
    _check_trace(options.trace)
    admit = options.ranks.admission(options.model, bounds=options.job_bounds)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(contextlib.closing(SignalPipe()))
        lock = stack.enter_context(held_folder(options.output_dir))
        check_records(options.output_dir)
        inbox = stack.enter_context(
            contextlib.closing(
                Inbox(
                    folder,
                    output_dir=options.output_dir,
                    admit=admit,
                    skip_invalid=options.skip_invalid,
                    overwrite=options.overwrite,
                )
            )
        )
        first = inbox.look()
        checkpoints = {admit.find_model(options.model).checkpoint, *(job.checkpoint for job in first)}
        admit.check(checkpoints)
        residency = admit.residency(first, names={options.model: admit.find_model(options.model).checkpoint})
        loaded = residency.checkpoints if residency else checkpoints
        pool = stack.enter_context(ready_pool(loaded, options.ranks, signals, keep_fds=[lock]))
        if options.ranks.has_graphs:
            held = of_held_models(first, residency)
            warm_up(pool, held, devices=options.ranks.devices, policy=options.policy, signals=signals)
        inbox.start(admit=admit.of_loaded(checkpoints))
        return run_on(pool, first, options, signals=signals, inbox=inbox, residency=residency)


def of_held_models(jobs: Sequence[AdmittedJob], residency: Residency | None) -> Sequence[AdmittedJob]:
    """Those whose models ranks hold at first."""
    return [job for job in jobs if residency is None or job.spec.model in residency.resident]


def run_on(
    pool: WorkerPool,
    todo: Sequence[AdmittedJob],
    options: RunOptions,
    *,
    signals: SignalPipe,
    skipped: Sequence[AdmittedJob] = (),
    inbox: Inbox | None = None,
    watchers: Sequence[Observer] = (),
    residency: Residency | None = None,
    profile: Profile | None = None,
) -> Summary:
    """One run of the control loop on workers that are ready; `residency` says which models they hold.

    profile: what predictions start from, in place of this machine's.
    """
    arrived_at = first_arrivals(options.output_dir / JOURNAL_NAME)
    resume_points = resume.find(
        options.output_dir, todo, weights_mark=pool.weights_mark, computed_with=pool.computed_with
    )
    started_at, clock = time.time(), Clock()
    measured_path = measured_by_runs(options.ranks) if profile is None else None
    profile = profile or default_profile(options.ranks.devices)
    start = RunStart(
        num_ranks=pool.num_ranks,
        lookahead_s=options.lookahead_s,
        started_at=started_at,
        last_number=pool.last_number,
        arrived_at=arrived_at,
        resume=resume_points,
        closes_s=None if options.closes_at is None else options.closes_at - started_at,
        resident=residency.resident if residency else None,
        islands=pool.islands,
    )
    _warn_of_passed_deadlines(todo, started_at, arrived_at)
    with contextlib.ExitStack() as stack:
        observers = [stack.enter_context(contextlib.closing(o)) for o in _observers(options)]
        header = journal_header(
            [job.info for job in todo],
            start,
            policy=options.policy.name,
            profile=None if profile is None else profile.hash,
            job_file=options.job_file,
        )
        journal = Journal(options.output_dir / JOURNAL_NAME, header=header)
        stack.callback(journal.close)
        chooser = None if options.policy.choose is None else ThreadedChooser(options.policy.choose)
        if chooser is not None:
            stack.callback(chooser.close)
        state, summary = run_loop(
            pool,
            todo,
            options,
            clock=clock,
            start=start,
            profile=profile,
            signals=signals,
            observers=[*observers, *watchers, *([] if inbox is None else [inbox])],
            residency=residency,
            chooser=chooser,
            journal=journal,
            skipped=skipped,
            intake=inbox,
            measured_path=measured_path,
        )
    if state.stop_signal is not None and not state.all_ended:
        if options.log_json:
            _tell_of_end(summary, options, stopped_by=signal.Signals(state.stop_signal).name)
        raise InterruptedRunError(
            f"stopped; {counted(summary.num_done, 'job')} done, {summary.num_unfinished} left: "
            "run the same command again to go on",
            signal_number=state.stop_signal,
        )
    return summary


def default_profile(devices: Devices) -> Profile | None:
    """What this machine's tasks took when they were measured, if they were: predictions start from it."""
    found = find_profile(devices.gpus[0].name if devices.gpus else None)
    if found is None:
        return None
    path, profile = found
    logger.info("predictions start from the profile of %s: %s", profile.date, path)
    return profile


def measured_by_runs(ranks: Ranks) -> Path | None:
    """Where a run keeps what tasks take; None for one whose options change that."""
    is_usual = ranks.vae_dtype == "auto" and ranks.has_graphs
    return runs_path(ranks.device_name) if is_usual else None


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[int]:
    """The output folder, held for this run and cleared of what killed runs left.

    It is made if need be, and removed again if nothing came into it. Yields the lock's descriptor
    (`hold_folder`).
    """
    from gfgen.runtime.files.outputs import remove_leftovers  # imports numpy, which --help can do without

    made = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    _make_folder(folder)
    try:
        with hold_folder(folder) as lock:
            if num_leftovers := remove_leftovers(folder):
                logger.info("removed %s of an earlier run", counted(num_leftovers, "unfinished file"))
            yield lock
    finally:
        with contextlib.suppress(OSError):
            for each in made:
                each.rmdir()


def _warn_of_passed_deadlines(
    jobs: Sequence[AdmittedJob], now: float, arrived_at: Mapping[tuple[str, str], float]
) -> None:
    hashes = {job.job_id: job.info.spec_hash for job in jobs}
    arrivals = {
        job_id: at for (job_id, spec_hash), at in arrived_at.items() if hashes.get(job_id) == spec_hash
    }
    warn_of_passed_deadlines(jobs, now=now, arrived_at=arrivals)


def _name_of(jobs: str | None, watch: Path | None) -> str:
    """What the output folder is called after; tells a command line without a source of jobs."""
    if (jobs is None) == (watch is None):
        raise click.UsageError("give either JOBS, a job file, or --watch DIR, a folder of job files")
    if watch is not None:
        return resolved(watch).name
    return "stdin" if jobs == "-" else Path(jobs or "").stem


def _make_folder(folder: Path) -> None:
    try:
        _try_to_write(folder)
    except OSError as error:
        reason = "this is a file" if folder.is_file() else f"cannot write there ({error.strerror})"
        raise InputError(f"--output {folder}: {reason}; name another folder") from None


def _check_trace(trace: Path | None) -> None:
    """Before models are loaded."""
    if trace is None:
        return
    try:
        if trace.exists():
            trace.open("ab").close()
        else:
            _try_to_write(trace.parent)
    except OSError as error:
        raise InputError(f"--trace {trace}: cannot write there ({error.strerror}); name another") from None


def _try_to_write(folder: Path) -> None:
    """Others may try the same folder at the same time, so each has a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _observers(options: RunOptions) -> list[Observer]:
    observers: list[Observer] = [
        ManifestWriter(options.output_dir / MANIFEST_NAME),
        make_progress(quiet=options.quiet, log_json=options.log_json),
    ]
    if options.log_file:
        observers.append(make_file_progress(quiet=options.quiet, log_json=options.log_json))
    if options.trace:
        observers.append(TraceWriter(options.trace))
    return observers


def _report(summary: Summary, options: RunOptions) -> None:
    """The end-of-run block; its last lines say where the files are, and what is left. Or JSON."""
    if options.log_json:
        _tell_of_end(summary, options)
        return
    for line in summary.lines():
        logger.info("%s", line, extra=log.FILE_ONLY)
        if not options.quiet:
            _say(line)
    failed = f"; {counted(summary.num_failed, 'job')} failed" if summary.num_failed else ""
    _say(f"files and manifest.jsonl are in {options.output_dir}/{failed}")
    if options.closes_at is not None:
        jobs = "1 job is" if summary.num_unfinished == 1 else f"{summary.num_unfinished or 'no'} jobs are"
        left = f"{jobs} left" + (": run the same command again to go on" if summary.num_unfinished else "")
        logger.info("%s", left, extra=log.FILE_ONLY)
        _say(left)


def _tell_of_end(summary: Summary, options: RunOptions, *, stopped_by: str | None = None) -> None:
    """The event `run_ended`, to standard output and the log file; `stopped_by` names a signal."""
    ended = {"event": "run_ended", "output": str(options.output_dir), "stopped_by": stopped_by}
    ended |= numbers(summary)
    message = "the run has ended" if stopped_by is None else f"the run was stopped by {stopped_by}"
    logger.info("%s", message, extra={**log.FILE_ONLY, **log.fields(**ended)})
    _say(log.json_line(logger.name, message, **ended))


def _say(line: str) -> None:
    """To whoever reads it; that they have gone is no failure of a run that has ended."""
    with contextlib.suppress(OSError):  # a pipe that nobody reads, or a terminal that was closed
        click.echo(line)
