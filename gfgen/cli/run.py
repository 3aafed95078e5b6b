"""`gfgen run`."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

from gfgen import log
from gfgen.cli import options as opt
from gfgen.cli.config import tell_of_variables
from gfgen.cli.run_files import (
    ClusterOptions,
    RunOptions,
    StoreOptions,
    admit_jobs,
    check_watched,
    check_written,
    options_of,
    session_of,
)
from gfgen.errors import (
    GfgenError,
    InputError,
    InterruptedRunError,
    LockedError,
    OutputError,
    Problem,
    without_secrets,
)
from gfgen.job.inputs import is_url
from gfgen.job.shared import closing_at
from gfgen.job.spec import ENDINGS
from gfgen.policies.catalog import function_named
from gfgen.runtime.control.backlog import AHEAD, Backlog
from gfgen.runtime.control.closing import check_room
from gfgen.runtime.core.admission import AdmittedJob, arriving_after
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import Observer
from gfgen.runtime.files import resume
from gfgen.runtime.files.journal import JOURNAL_NAME, first_arrivals
from gfgen.runtime.files.ownership import Claims, check_records, default_folder, job_file_name
from gfgen.runtime.predict.job_bounds import JobBounds
from gfgen.session.admission import with_time
from gfgen.session.session import Arrivals, Session, try_to_write
from gfgen.system.outlet import drain, unblocked
from gfgen.system.wording import MAX_NAMED, counted

if TYPE_CHECKING:
    from gfgen.cluster.ray_cluster import RayCluster
    from gfgen.runtime.publish.publisher import Publisher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    jobs: opt.JobOptions = opt.group(opt.JobOptions)
    failed: bool = opt.flag("Take only jobs that failed in the last run of this folder.")
    retries: int = opt.option(
        "Run jobs that failed again at the end, up to N times.",
        type=click.IntRange(0, 100),
        default=0,
        metavar="N",
        cls=opt.RunOnly,
    )
    force: bool = opt.flag("Make finished jobs again, too, and replace their files.")
    dry_run: bool = opt.flag(
        "Start nothing; print what the run would do, as 'gfgen check' does.", cls=opt.RunOnly
    )
    output: Path | str | None = opt.option(
        "Folder for results and the manifest, or s3://BUCKET/NAME (docs/data.md). [outputs/NAME, after JOBS "
        "or DIR; a suffix if that is taken]",
        "-o",
        type=opt.NamedPath(may_be_store=True),
    )
    store: StoreOptions = opt.group(StoreOptions)
    overwrite: bool = opt.flag(
        "Replace files that are already in the folder under the names of outputs, whoever made them."
    )
    ranks: opt.RankOptions = opt.group(opt.RankOptions)
    cluster: ClusterOptions = opt.group(ClusterOptions, cls=opt.RunOnly)
    policy: str = opt.policy_option()
    model: str = opt.model_option()
    skip_invalid: bool = opt.flag("Run the valid jobs of a file with errors; the exit code is 1.")
    lookahead: float = opt.lookahead_option(cls=opt.RunOnly)
    grace_s: float = opt.grace_option(cls=opt.RunOnly)
    max_step_time: float | None = opt.max_step_time_option(show_default="no bound")
    trace: Path | None = opt.option(
        "Write a timeline for Perfetto or 'gfgen plot'.", type=opt.NamedPath(), cls=opt.RunOnly
    )
    keep_if: str | None = opt.option(
        "Keep a result if this Python function says so; it may want another seed (docs/data.md).",
        metavar="MODULE:FUNCTION",
        cls=opt.RunOnly,
    )
    again: int = opt.option(
        "With --keep-if: the most further seeds of a job.", type=click.IntRange(0), default=3, cls=opt.RunOnly
    )
    on_file: str | None = opt.option(
        "Run this shell command for each finished file; GFGEN_FILE names it (docs/unattended.md).",
        metavar="CMD",
        cls=opt.RunOnly,
    )
    on_done: str | None = opt.option(
        "Run this shell command when the run has ended; GFGEN_FAILED counts.", metavar="CMD", cls=opt.RunOnly
    )
    hook_timeout_s: float = opt.option(
        "Kill a command of --on-file or --on-done, or a call of --keep-if, after this time.",
        "--hook-timeout",
        type=opt.Duration(),
        default="60s",
        cls=opt.RunOnly,
    )
    watch: Path | None = opt.option(
        "Instead of JOBS: watch DIR, and run each job file that appears there once, until stopped.",
        type=opt.NamedPath(),
        metavar="DIR",
        cls=opt.RunOnly,
    )
    until: str | None = opt.option(
        'Stop at this time, and start no job that cannot finish by then: "06:00", "8h" or an ISO time.',
        metavar="TIME",
    )
    logs: opt.LogOptions = opt.group(opt.LogOptions, cls=opt.RunOnly)


@click.command()
@opt.takes(given=Arguments)
def run(given: Arguments) -> int:
    """Generate the pictures and videos of JOBS: files of JSON lines, CSV or prompts (- reads standard input).

    Run the same command again to continue: it skips finished jobs and retries failed ones.
    """
    jobs, watch, cluster, logs = given.jobs, given.watch, given.cluster, given.logs
    logs.configure(file=None)
    if watch is not None:
        _check_watching(given)
    if given.keep_if is None and opt.given_in(given, "again"):
        raise click.UsageError("--again goes with --keep-if")
    source = None if watch is not None else jobs.source()
    name = _name_of(jobs, watch)
    cluster.check({"--gpus": given.ranks.gpus is not None})
    file = next((file for file in jobs.jobs[:1] if file != "-"), None)
    first = watch or (file if file is None or is_url(file) else Path(file))
    output = given.output or default_folder(Path("outputs"), name, first)
    if os.path.splitext(given.output or "")[1].lower() in ENDINGS and not os.path.isdir(output):
        raise click.UsageError(f"--output {output}: it is a folder; --output-name names the file in it")
    publisher = given.store.publisher(output, given)
    output_dir = Path(output) if publisher is None else publisher.state
    check_written(source.paths if source else (), {"--trace": given.trace, "--log-file": logs.log_file})
    logs.configure(file=logs.log_file)
    tell_of_variables(click.get_current_context())
    if isinstance(output, Path) and given.output is None and output.name != name:
        logger.info("outputs/%s belongs to another job file: files go to %s", name, output)
    with cluster.connected(given, model=given.model, output_dir=output_dir) as found:
        job_file = job_file_name(first, output_dir)
        options = _options_of(given, found, output_dir, publisher, job_file)
        if given.dry_run:
            assert source is not None
            from gfgen.cli.check import check_jobs

            if given.keep_if is not None:
                function_named(given.keep_if, option="--keep-if")
            return check_jobs(source, options)
        problems: Sequence[Problem] = ()
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(session_of(options, found))
            if given.output is None and default_folder(Path("outputs"), name, first) != output:
                raise LockedError(f"another job file has just taken {output}: run the same command again")
            check_records(output_dir)
            if publisher is not None:
                if publisher.url != str(output_dir):
                    logger.info("files wait in %s until they are in %s", output_dir, publisher.url)
                stack.enter_context(publisher.opened(lambda doing: session.signals.interrupting(doing)))
            if source is None:
                assert watch is not None
                summary = watch_folder(session, watch, options)
            else:
                admitted, claims, problems = admit_jobs(source, session.admission, options)
                options = replace(options, forced_from=claims.forced_from)
                if options.keep_if is not None:
                    with session.signals.interrupting("--keep-if was loaded; nothing was started"):
                        options.keep_if.begin(admitted, claims)
                if publisher is not None:
                    publisher.expect([job.info for job in admitted])
                try:
                    summary = run_jobs(session, admitted, options, claims)
                finally:
                    if claims.index is not None:
                        claims.index.close()
                if options.keep_if is not None:
                    summary = options.keep_if.counted(summary)
            left = "" if publisher is None else publisher.finish()
    _end_hooks(summary, options, status="failed" if summary.num_failed or left else "done")
    _report(summary, options)
    if left:
        raise OutputError(left)
    num_left = 0 if options.keep_if is None else options.keep_if.num_failed
    return 1 if summary.num_failed or summary.num_cancelled or problems or num_left else 0


def _options_of(
    given: Arguments, cluster: RayCluster | None, output_dir: Path, publisher: Publisher | None, job_file: str
) -> RunOptions:
    hook = keep_if = None
    if given.on_file is not None or given.keep_if is not None or given.on_done is not None:
        from gfgen.session.filters import FileHook, Filter  # also for the end, when the package may be gone
    if given.on_file is not None:
        hook = FileHook(given.on_file, output_dir, limit_s=given.hook_timeout_s)
    if given.keep_if is not None:
        then, limit_s = publisher or hook, given.hook_timeout_s
        keep_if = Filter(given.keep_if, output_dir, most_again=given.again, limit_s=limit_s, then=then)
    return options_of(
        RunOptions,
        given,
        cluster,
        output_dir=output_dir,
        job_file=job_file,
        on_file=hook,
        keep_if=keep_if,
        publisher=publisher,
        waits_for_space=given.watch is not None,
        closes_at=None if given.until is None else closing_at(given.until, now=time.time()),
        job_bounds=JobBounds(step_s=given.max_step_time),
    )


def run_jobs(
    session: Session, admitted: Sequence[AdmittedJob], options: RunOptions, claims: Claims
) -> Summary:
    """Run admitted jobs that are not done. Raises: InterruptedRunError when a signal ended the run before."""
    journal = options.output_dir / JOURNAL_NAME
    arrived_at = partial(first_arrivals, journal, forced_from=options.forced_from)
    ahead = AHEAD if options.cluster is None else len(admitted)  # nodes have queues of their own
    begun = resume.begun(options.output_dir)
    backlog = Backlog(admitted, without=claims.done_ids, first=begun, arrived_at=arrived_at, ahead=ahead)
    num_skipped, todo = claims.num_known + len(admitted) - len(backlog), backlog.take()
    if not todo:
        backlog = Backlog(_wanted_again(session, options, Summary()))
        todo = backlog.take()
    if not todo:
        if options.trace:
            why = "because no job is left to do"
            logger.warning("--trace has no effect, %s; %s was not written", why, options.trace)
        return Summary(num_skipped=num_skipped)
    check_trace(options.trace)
    fitting, num_left = with_time(todo, options.ranks.step_times, closes_at=options.closes_at)
    for job_id in {job.job_id for job in todo} - {job.job_id for job in fitting}:
        backlog.drop(job_id)
    try:
        check_room(fitting, options.output_dir)
    except GfgenError:
        _end_hooks(Summary(num_unfinished=len(todo) + len(backlog)), options, status="failed")
        raise
    session.load(fitting)
    arrivals = Arrivals(backlog=backlog, observers=[] if claims.index is None else [claims.index])
    summary = _run(session, fitting, options, num_skipped=num_skipped, arrivals=arrivals)
    for number in itertools.count(1):
        retried = backlog.failed if number <= options.retries else []
        wanted = _wanted_again(session, options, summary)
        backlog = Backlog([arriving_after(job, -job.spec.arrival_s) for job in (*retried, *wanted)])
        if not (again := backlog.take()):
            break
        if session.signal_number is not None:  # it came as the last job ended
            _stop(session.signal_number, replace(summary, num_unfinished=len(again) + len(backlog)), options)
        if retried:
            jobs = counted(len(retried), "job")
            logger.info("running %s again that failed (%d of %d)", jobs, number, options.retries)
            summary = replace(summary, num_failed=0, failures=())
        if wanted:
            logger.info("running %s again with the next seed", counted(len(wanted), "job"))
        arrivals = replace(arrivals, backlog=backlog)
        summary = _run(session, again, replace(options, trace=None), arrivals=arrivals, before=summary)
    return replace(summary, num_unfinished=summary.num_unfinished + num_left)


def _wanted_again(session: Session, options: RunOptions, summary: Summary) -> Sequence[AdmittedJob]:
    """The jobs that --keep-if wants with the next seed, once it has judged all results."""
    if options.keep_if is None:
        return ()
    try:
        with session.signals.interrupting("--keep-if judged results; run the same command again to go on"):
            return options.keep_if.again()
    except InterruptedRunError:
        _end_hooks(summary, options, status="stopped")
        raise


def _joined(first: Summary, retried: Summary) -> Summary:
    """The summary of a run and of the jobs that it ran again; latencies are those of the first run."""
    added = ("num_done", "num_failed", "num_unfinished", "num_cancelled", "num_tasks", "makespan_s")
    sums: dict[str, Any] = {name: getattr(first, name) + getattr(retried, name) for name in added}
    return replace(first, **sums, failures=(*first.failures, *retried.failures)[:MAX_NAMED], num_ranks=0)


def watch_folder(session: Session, folder: Path, options: RunOptions) -> Summary:
    """Run jobs of files that arrive in a folder, with the models of those that are there at the start."""
    check_watched(folder, options.output_dir)
    check_trace(options.trace)
    _ = session.signals  # caught from here on: looking at the folder and loading may take long
    from gfgen.runtime.files.inbox import Inbox
    from gfgen.session.live import write_live

    inbox = Inbox(
        folder,
        output_dir=options.output_dir,
        admit=partial(session.admission, may_ask=True),
        skip_invalid=options.skip_invalid,
        overwrite=options.overwrite,
        named_at=options.named_at,
    )
    with contextlib.closing(inbox):
        first = inbox.look()
        session.load(first, models=[options.model])
        session.admission.models.precision.tell_of_other_models(session.checkpoints)
        with contextlib.suppress(OSError):  # a folder that others own: gfgen status needs the output folder
            write_live(folder, {"output": str(options.output_dir.absolute())})
        inbox.start(admit=partial(session.admission.of_loaded(session.checkpoints), may_ask=True))
        arrivals = Arrivals(inbox, observers=[inbox], watched=inbox.folder)
        return _run(session, first, options, arrivals=arrivals)


def _run(
    session: Session,
    todo: Sequence[AdmittedJob],
    options: RunOptions,
    *,
    num_skipped: int = 0,
    arrivals: Arrivals,
    before: Summary | None = None,
) -> Summary:
    """The summary, and that of the run whose failed jobs these are. Raises: InterruptedRunError."""
    try:
        summary = session.run(
            todo, options=options, observers=_observers(options), num_skipped=num_skipped, arrivals=arrivals
        )
    except GfgenError:  # such as a full disk, or no rank that is left
        before, num_left = before or Summary(), len(todo) + len(arrivals.backlog)
        _end_hooks(replace(before, num_unfinished=before.num_unfinished + num_left), options, status="failed")
        raise
    if before is not None:
        summary = _joined(before, summary)
    if session.stop_signal is not None:
        _stop(session.stop_signal, summary, options)
    return summary


def _stop(signal_number: int, summary: Summary, options: RunOptions) -> NoReturn:
    _end_hooks(summary, options, status="stopped")
    if options.logs.log_json:
        _tell_of_end(summary, options, stopped_by=signal.Signals(signal_number).name)
    raise InterruptedRunError(
        f"stopped; {counted(summary.num_done, 'job')} done, {summary.num_unfinished} left: "
        "run the same command again to go on",
        signal_number=signal_number,
    )


def _end_hooks(
    summary: Summary, options: RunOptions, *, status: Literal["done", "failed", "stopped"]
) -> None:
    if options.keep_if is not None:
        options.keep_if.finish()
    if options.on_file is not None:
        options.on_file.finish(is_stopped=status == "stopped")
    if options.on_done is not None:
        from gfgen.session.filters import run_done_hook

        limit_s = options.hook_timeout_s
        run_done_hook(options.on_done, summary, options.output_dir, status=status, limit_s=limit_s)


def _name_of(jobs: opt.JobOptions, watch: Path | None) -> str:
    if watch is not None:
        return os.path.basename(os.path.realpath(watch))
    first = next(iter(jobs.jobs), "prompts")
    return "stdin" if first == "-" else Path(without_secrets(first)).stem


def _check_watching(given: Arguments) -> None:
    if given.jobs.jobs:
        raise click.UsageError("give either JOBS or --watch DIR, a folder of job files")
    others = ("failed", "retries", "force", "dry_run", "keep_if")
    named = opt.given_in(given.jobs) or opt.given_in(given, *others)
    if named is not None:
        raise click.UsageError(f"{named} goes with JOBS; with --watch, write defaults in the job files")


def check_trace(trace: Path | None) -> None:
    """Raises InputError if the trace cannot be written, before models are loaded."""
    try:
        if trace is not None and trace.exists():
            trace.open("ab").close()
        elif trace is not None:
            try_to_write(trace.parent)
    except OSError as error:
        raise InputError(f"--trace {trace}: cannot write there ({error.strerror}); name another") from None


def _observers(options: RunOptions) -> list[Observer]:
    from gfgen.cli.shown.progress import progress_of

    logs = options.logs
    observers = progress_of(quiet=logs.quiet, log_json=logs.log_json, has_file=logs.log_file is not None)
    if (hook := options.keep_if or options.publisher or options.on_file) is not None:
        observers.append(hook)
    if options.trace:
        from gfgen.runtime.files.trace import TraceWriter

        observers.append(TraceWriter(options.trace))
    return observers


def _report(summary: Summary, options: RunOptions) -> None:
    if options.logs.log_json:
        _tell_of_end(summary, options)
        return
    for line in summary.lines():
        logger.info("%s", line, extra=log.FILE_ONLY)
        if not options.logs.quiet:
            _say(line)
    failed = f"; {counted(summary.num_failed, 'job')} failed" if summary.num_failed else ""
    cancelled = f"; {counted(summary.num_cancelled, 'job')} cancelled" if summary.num_cancelled else ""
    where = options.output_dir if options.publisher is None else options.publisher.url
    _say(f"files and manifest.jsonl are in {where}/{failed}{cancelled}")
    if options.closes_at is not None:
        jobs = "1 job is" if summary.num_unfinished == 1 else f"{summary.num_unfinished or 'no'} jobs are"
        left = f"{jobs} left" + (": run the same command again to go on" if summary.num_unfinished else "")
        logger.info("%s", left, extra=log.FILE_ONLY)
        _say(left)


def _tell_of_end(summary: Summary, options: RunOptions, *, stopped_by: str | None = None) -> None:
    """Write the event `run_ended` to standard output and the log file; `stopped_by` names a signal."""
    ended = {"event": "run_ended", "output": str(options.output_dir), "stopped_by": stopped_by}
    ended |= summary.as_json()
    message = "the run has ended" if stopped_by is None else f"the run was stopped by {stopped_by}"
    logger.info("%s", message, extra={**log.FILE_ONLY, **log.fields(**ended)})
    _say(log.json_line(logger.name, message, **ended))


def _say(line: str) -> None:
    drain(sys.stderr)  # perhaps the same terminal
    with contextlib.suppress(OSError):  # a closed pipe or terminal does not fail a run that has ended
        sys.stdout = unblocked(sys.stdout)
        click.echo(line)


def _check(as_json: bool, **params: Any) -> int:
    given = {"dry_run": True, "quiet": True, "log_json": as_json, **params}
    return int(click.get_current_context().invoke(run, **given))


check = click.Command(
    "check",
    callback=_check,
    params=[
        *(copy.copy(param) for param in run.params if not isinstance(param, opt.RunOnly)),
        click.Option(["--json", "as_json"], is_flag=True, help="Print JSON instead of text."),
    ],
    help="""Check JOBS and print what 'gfgen run' would do with the same options. Starts nothing.

    Lists every problem, what is rounded, which jobs are new, done, changed or made again, the memory, and
    when the run would end. The exit code is 0, or 2 if the run would start nothing.
    """,
)
