"""`gfgen bench`: job files with arrivals, policies compared on them, and collectives."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gfgen import log
from gfgen.bench.policy_comparison import COMPARED, PolicyComparison
from gfgen.bench.stock import NAME, is_stock, stock_options
from gfgen.bench.workloads import (
    WORKLOADS,
    Name,
    WorkloadOptions,
    calibration_jobs,
    jobs_with,
    load_compared,
    mix_of,
    weightless_model,
)
from gfgen.cli import options as opt
from gfgen.cli.bench.paper import deadlines_option, paper
from gfgen.cli.bench.runs import kinds_of, on_workers, predicted, simulated, traced
from gfgen.cli.shown.picture import RunFigures, draw_runs, save_figure
from gfgen.errors import InputError, InterruptedRunError
from gfgen.job.fields import MAX_STEPS
from gfgen.job.reader import to_mapping
from gfgen.job.spec import JobSpec
from gfgen.runtime.predict.profile_file import load_profile
from gfgen.session.ranks import Ranks
from gfgen.system.machine import versions
from gfgen.system.wording import counted

SIMULATED_RANKS, REAL_RANKS = 4, 2
SIMULATED_JOBS, REAL_JOBS = 100, 40
SIMULATED_MODEL, REAL_MODEL = "wan2.2-ti2v-5b", "tiny-wan"
JSON_NAME = "compare.json"


class _BenchGroup(click.Group):
    """Reads `bench --compare POLICY` as `bench compare --against POLICY`; each further --compare adds one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].partition("=")[0] == "--compare":
            args = ["compare", *_spelled_out(args)]
        return super().parse_args(ctx, args)


def _spelled_out(args: Sequence[str]) -> Iterator[str]:
    is_first, rest = True, iter(args)
    for word in rest:
        option, equals, text = word.partition("=")
        if option != "--compare":
            yield word
            continue
        text = text if equals else next(rest, "")
        yield "--against" if is_first else "--outside" if is_stock(text) else "--policy"
        yield from [text] if text else []
        is_first = False


@click.group(cls=_BenchGroup)
def bench() -> None:
    """Measure gfgen on this machine. Tables are Markdown, as in benchmarks/results/.

    `gfgen bench --compare legacy` compares the policies; see `gfgen bench compare --help`.
    """


bench.add_command(paper)


@bench.command()
@click.option("--gpus", type=int, help="GPUs to use [default: all].")
@click.option(
    "--tune", is_flag=True, help="First find and store the fastest kernel per size for this device."
)
@click.option("--output", type=opt.NamedPath(), help="Folder for .json and .md.")
def gfc(*, gpus: int | None, tune: bool, output: Path | None) -> None:
    """Group-free collectives compared with NCCL on the GPUs of this machine."""
    from gfgen.bench import gfc as collectives
    from gfgen.gfc.cuda.driver import driver

    num_gpus = driver().num_devices if gpus is None else gpus
    report = collectives.measure_collectives(num_gpus=num_gpus, tune=tune)
    command = f"gfgen bench gfc --gpus {num_gpus}" + (" --tune" if tune else "")
    text = collectives.markdown(report, command)
    click.echo(text)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        stem = f"{report.facts['date']}-gfc"
        (output / f"{stem}.json").write_text(report.as_json())
        (output / f"{stem}.md").write_text(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    load: float = opt.option(
        "Load, as a share of what single-rank replicas sustain.", type=opt.FiniteRange(0.01, 100), default=0.9
    )
    seed: int = opt.option("Seed for arrivals and prompts.", type=int, default=1)
    num_jobs: int | None = opt.option("Number of jobs.", "--jobs", type=click.IntRange(1, 100_000))
    deadlines_from: int = deadlines_option()
    timeout: float | None = opt.option(
        "A job fails after this time. [as in the paper: 3600 for videos, 1500 for images]",
        type=opt.FiniteRange(0.1),
        metavar="SECONDS",
    )
    steps: int | None = opt.option(
        "Steps of each job. [25; tiny models: 6]", type=click.IntRange(1, MAX_STEPS)
    )
    profile_path: Path | None = opt.profile_option()

    def options(self, *, num_jobs: int, num_ranks: int, minutes: float | None = None) -> WorkloadOptions:
        same = {name: getattr(self, name) for name in ("load", "seed", "deadlines_from", "steps")}
        num_jobs = self.num_jobs or num_jobs
        return WorkloadOptions(
            num_jobs=num_jobs, num_ranks=num_ranks, timeout_s=self.timeout, minutes=minutes, **same
        )


@bench.command()
@click.argument("name", type=click.Choice(WORKLOADS), required=False)
@click.option(
    "--model",
    default=SIMULATED_MODEL,
    show_default=True,
    help="Model whose job classes S, M and L are used, or several joined by '+', whose jobs are mixed.",
)
@click.option(
    "--arrivals",
    type=opt.NamedPath(exists=True, dir_okay=False),
    help="Instead of NAME: a public trace of requests (docs/policies.md).",
)
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="KIND=MODEL[,WxH[xF]][,slack=X]",
    help="What requests of this kind in the trace stand for; * are all others. Repeatable.",
)
@click.option("--ranks", type=opt.RANKS, default=SIMULATED_RANKS, show_default=True, help="Number of ranks.")
@click.option("--minutes", type=opt.FiniteRange(0.01), help="Instead of --jobs: time span of the arrivals.")
@click.option("--output", "-o", type=opt.NamedPath(dir_okay=False), help="File to write. [standard output]")
@opt.takes(given=Workload)
def workload(
    *,
    name: Name | None,
    model: str,
    arrivals: Path | None,
    maps: tuple[str, ...],
    ranks: int,
    minutes: float | None,
    output: Path | None,
    given: Workload,
) -> None:
    """Write a job file with arrivals and deadlines: mixed jobs, bursts, a stream or a nightly batch."""
    if minutes is not None and (given.num_jobs is not None or name == "overnight"):
        raise InputError(
            "--minutes: not possible with --jobs, or with overnight, whose jobs all arrive at once"
        )
    num_jobs = SIMULATED_JOBS if minutes is None and arrivals is None else 100_000
    options = given.options(num_jobs=num_jobs, num_ranks=ranks, minutes=minutes)
    if (name is None) == (arrivals is None) or (maps and arrivals is None):
        raise click.UsageError(f"give one of {', '.join(WORKLOADS)}, or --arrivals with --map")
    if name is not None:
        jobs: Sequence[JobSpec] = predicted(name, model, options, given.profile_path).specs
        about = f"{name}, {model}, load {given.load:g} of {counted(ranks, 'rank')}, seed {given.seed}"
    else:
        assert arrivals is not None
        jobs, unmapped = traced(arrivals, maps, options, given.profile_path)
        about = f"{arrivals.name}, {' '.join(maps)}"
        if unmapped:
            left_out = counted(unmapped.total(), "request")
            click.echo(f"left out, since no --map names them: {left_out}: {kinds_of(unmapped)}", err=True)
    text = "".join(json.dumps(to_mapping(job)) + "\n" for job in jobs)
    about = f"# {about}, gfgen bench workload\n"
    if output is None:
        click.echo(about + text, nl=False)
        return
    try:
        if output.exists() and ", gfgen bench workload\n" not in output.read_text(errors="replace"):
            raise InputError(f"--output {output}: exists and is no file of this command; name another file")
        output.write_text(about + text)
    except OSError as error:
        raise InputError(f"--output {output}: cannot be written ({error.strerror})") from None
    click.echo(f"wrote {counted(len(jobs), 'job')} to {output}: gfgen run {output}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    against: str = opt.option("Policy that the ratios compare with.", default="legacy")
    policies: tuple[str, ...] = opt.option(
        "Policy to run: NAME[,option=value...][,reuse=VALUE], the last for the field reuse of all jobs. "
        "Repeatable. [single-rank replicas and every policy]",
        "--policy",
        multiple=True,
    )
    name: Name = opt.option("Kind of workload.", "--workload", type=click.Choice(WORKLOADS), default="short")
    model: str | None = opt.option(
        f"Model whose job classes are used. [{REAL_MODEL}; simulated: {SIMULATED_MODEL}]"
    )
    outside: tuple[str, ...] = opt.option(
        "Also run stock diffusers: diffusers[,degree=N][,uneven=true][,compiled=true].",
        multiple=True,
        metavar=NAME,
    )
    is_simulated: bool = opt.flag("Simulate with a profile.", "--simulate")
    slack: float | None = opt.option(
        "Count a job as in time for its client up to this long after its deadline. [as in the paper]",
        type=opt.FiniteRange(0),
        metavar="SECONDS",
    )
    output: Path = opt.option(
        "Folder for compare.json, .md and .png.",
        "-o",
        type=opt.NamedPath(file_okay=False),
        default=Path("outputs/compare"),
    )
    workload: Workload = opt.group(Workload)
    ranks: opt.RankOptions = opt.group(
        opt.RankOptions,
        without=("memory", "offload", "trust_remote_code", "compile", "precision", "attention"),
        ranks=opt.option(
            f"Number of ranks. [{REAL_RANKS} on a CPU; all GPUs; simulated: {SIMULATED_RANKS}]",
            type=opt.RANKS,
        ),
    )


@bench.command()
@opt.takes(given=Arguments)
def compare(given: Arguments) -> int:
    """Run one workload under a baseline and other policies, and compare: table, chart, raw numbers.

    Runs on the GPUs or CPU ranks of this machine, or in virtual time with --simulate. `--compare diffusers`
    adds the stock pipeline. A failed job counts as a missed deadline; latencies are those of completed jobs.
    If a policy cannot run the workload, the table says so and the exit code is 1. Ctrl-C keeps finished runs.
    """
    log.configure(level="warning")
    began_s = time.monotonic()
    asked, name, output = given.workload, given.name, given.output
    ranked = None if given.is_simulated else given.ranks.found(cpu_ranks=REAL_RANKS)
    is_large = ranked is None or ranked.are_on_gpus
    model = given.model or (SIMULATED_MODEL if is_large else REAL_MODEL)
    mix = mix_of(model)
    texts = list(dict.fromkeys([given.against, *(given.policies or COMPARED), *given.outside]))
    _check_policies(texts, ranked, model, steps=asked.steps)
    options = asked.options(
        num_jobs=SIMULATED_JOBS if ranked is None else REAL_JOBS,
        num_ranks=given.ranks.ranks or SIMULATED_RANKS if ranked is None else ranked.num_ranks,
    )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: cannot be made ({error.strerror})") from None
    conditions = {
        "workload": f"{name}, {model}, load {asked.load:g} of {options.num_ranks} ranks, {options.num_jobs} "
        f"jobs of {asked.steps or mix.steps} steps, seed {asked.seed}",
        "simulated": ranked is None,
        "where": "simulated" if ranked is None else f"on {ranked.description}",
        "options": [] if ranked is None else list(ranked.words),
        "profile": None if asked.profile_path is None else load_profile(asked.profile_path).hash,
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "deadlines_from": asked.deadlines_from,
    }
    slack_s = mix.slack_s if given.slack is None else given.slack
    comparison = PolicyComparison(tuple(texts), baseline=given.against, slack_s=slack_s)
    if ranked is None and any(map(is_stock, texts)):
        raise InputError(f"{NAME}: cannot be simulated, because it has no profile; leave out --simulate")
    known = None
    if ranked is None or asked.profile_path:
        known = predicted(name, model, options, asked.profile_path)
    if ranked is None:
        assert known is not None
        runs = simulated(texts, known, num_ranks=options.num_ranks)
    else:
        runs = on_workers(texts, name, model, options, output, ranked, known)
    click.echo(f"{conditions['workload']}, {conditions['where']}")
    try:
        for run in runs:
            comparison.add(run)
            (output / JSON_NAME).write_text(comparison.as_json(conditions))
            at = f"{time.monotonic() - began_s:5.0f} s  "
            click.echo(f"{at}{run.policy}: {'done' if run.error is None else 'failed'}")
    except (KeyboardInterrupt, InterruptedRunError) as stop:
        raise _interrupted(stop, comparison, conditions, output) from None
    _report(comparison, conditions, output)
    return 1 if comparison.failures else 0


def _check_policies(texts: Sequence[str], ranked: Ranks | None, model: str, *, steps: int | None) -> None:
    if ranked is not None and ranked.devices.ranks_per_gpu > 1 and any(map(is_stock, texts)):
        raise InputError("--ranks-per-gpu: diffusers' own ranks cannot share a GPU; leave it out")
    for text in texts:
        if is_stock(text):
            stock_options(text, num_ranks=None if ranked is None else ranked.num_ranks)
        else:
            _, varied = load_compared(text)
            jobs_with(calibration_jobs(model, steps=steps), varied, weightless_model(model))


def _interrupted(
    stop: BaseException, comparison: PolicyComparison, conditions: dict[str, Any], output: Path
) -> InterruptedRunError:
    number = stop.signal_number if isinstance(stop, InterruptedRunError) else signal.SIGINT
    num_asked, num_left = len(comparison.policies), len(comparison.not_run)
    if num_left == num_asked:
        return InterruptedRunError("stopped; no policy was done, nothing is kept", signal_number=number)
    _report(comparison, conditions, output)
    return InterruptedRunError(
        f"stopped; {num_asked - num_left} of {num_asked} policies are done and kept in {output}/; "
        "the one that was running is lost",
        signal_number=number,
    )


def _report(comparison: PolicyComparison, conditions: dict[str, Any], output: Path) -> None:
    table, remarks = "\n".join(comparison.table()), comparison.remarks()
    click.echo("\n" + "\n\n".join([table, "\n".join(remarks)]).strip("\n") + "\n")
    (output / JSON_NAME).write_text(comparison.as_json(conditions))
    paragraphs = [conditions["workload"], *([table] if table else []), *remarks]
    (output / "compare.md").write_text("\n\n".join(paragraphs) + "\n")
    chart = output / "compare.png"
    chart.unlink(missing_ok=True)  # of an earlier comparison
    files = "compare.json and compare.md"
    if comparison.scores and _draw(comparison, conditions, chart):
        files = "compare.json, compare.md and compare.png"
    click.echo(f"{files} are in {output}/")


def _draw(comparison: PolicyComparison, conditions: dict[str, Any], chart: Path) -> bool:
    simulated = ", simulated" if conditions["simulated"] else ""
    title = f"{conditions['workload']}{simulated}; deadlines with {comparison.slack_s:g} s of slack"
    try:
        save_figure(lambda: draw_runs(figures(comparison), title=title), chart)
    except InputError as error:  # matplotlib is an extra
        click.echo(f"no chart: {error}", err=True)
        return False
    return True


def figures(comparison: PolicyComparison) -> list[RunFigures]:
    same = ("mean_s", "p95_s", "jobs_per_min", "makespan_s")
    return [
        RunFigures(
            name=found.name.replace(" (", "\n("),
            attainment=found.attainment_client,
            **{name: getattr(found, name) for name in same},
        )
        for found in comparison.scores
    ]
