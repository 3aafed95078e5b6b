"""`gfgen bench`: job files with arrivals, policies compared on them, and collectives."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gfgen import log
from gfgen.bench.policy_comparison import COMPARED, PolicyComparison
from gfgen.bench.workloads import WORKLOADS, Name, WorkloadOptions, calibration_jobs, mix_of, weightless_model
from gfgen.cli import options as opt
from gfgen.cli.compare_runs import Predicted, jobs_with, load_compared, on_workers, predicted, simulated
from gfgen.cli.shown.picture import RunFigures, draw_runs, save_figure
from gfgen.errors import InputError, InterruptedRunError
from gfgen.job.fields import MAX_STEPS
from gfgen.job.reader import to_mapping
from gfgen.runtime.control.decider import FALLBACK
from gfgen.runtime.predict.profile_file import load_profile
from gfgen.session.ranks import Ranks
from gfgen.system.machine import versions
from gfgen.system.wording import counted

SIMULATED_RANKS, REAL_RANKS = 4, 2
SIMULATED_JOBS, REAL_JOBS = 100, 40
SIMULATED_MODEL, REAL_MODEL = "wan2.2-ti2v-5b", "tiny-wan"
JSON_NAME = "compare.json"


class _BenchGroup(click.Group):
    """Reads `bench --compare POLICY` as `bench compare --compare POLICY`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_short = bool(args) and args[0].partition("=")[0] == "--compare"
        return super().parse_args(ctx, ["compare", *args] if is_short else args)


@click.group(cls=_BenchGroup)
def bench() -> None:
    """Measure gfgen on this machine. Tables are Markdown, as in benchmarks/results/.

    `gfgen bench --compare legacy` compares the policies; see `gfgen bench compare --help`.
    """


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
    deadlines_from: int = opt.option(
        "Deadlines are multiples of the time that a job takes alone on N ranks.",
        type=opt.RANKS,
        default=1,
        metavar="N",
    )
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
        return WorkloadOptions(
            load=self.load,
            seed=self.seed,
            num_jobs=self.num_jobs or num_jobs,
            num_ranks=num_ranks,
            deadlines_from=self.deadlines_from,
            timeout_s=self.timeout,
            minutes=minutes,
            steps=self.steps,
        )


@bench.command()
@click.argument("name", type=click.Choice(WORKLOADS))
@click.option(
    "--model", default=SIMULATED_MODEL, show_default=True, help="Model whose job classes S, M and L are used."
)
@click.option("--ranks", type=opt.RANKS, default=SIMULATED_RANKS, show_default=True, help="Number of ranks.")
@click.option("--minutes", type=opt.FiniteRange(0.01), help="Instead of --jobs: time span of the arrivals.")
@click.option("--output", "-o", type=opt.NamedPath(dir_okay=False), help="File to write. [standard output]")
@opt.takes(given=Workload)
def workload(
    *, name: Name, model: str, ranks: int, minutes: float | None, output: Path | None, given: Workload
) -> None:
    """Write a job file with arrivals and deadlines: mixed jobs, bursts, a stream or a nightly batch."""
    if minutes is not None and (given.num_jobs is not None or name == "overnight"):
        raise InputError(
            "--minutes: not possible with --jobs, or with overnight, whose jobs all arrive at once"
        )
    num_jobs = SIMULATED_JOBS if minutes is None else 100_000
    options = given.options(num_jobs=num_jobs, num_ranks=ranks, minutes=minutes)
    jobs = predicted(name, model, options, given.profile_path).specs
    text = "".join(json.dumps(to_mapping(job)) + "\n" for job in jobs)
    on = f"{given.load:g} of {counted(ranks, 'rank')}, seed {given.seed}"
    about = f"# {name}, {model}, load {on}, gfgen bench workload\n"
    if output is None:
        click.echo(about + text, nl=False)
        return
    try:
        output.write_text(about + text)
    except OSError as error:
        raise InputError(f"--output {output}: cannot be written ({error.strerror})") from None
    click.echo(f"wrote {counted(len(jobs), 'job')} to {output}: gfgen run {output}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    against: tuple[str, ...] = opt.option(
        "Policy that the ratios compare with; further ones are only run.",
        "--against",
        "--compare",
        multiple=True,
        default=("legacy",),
    )
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
    earlier: tuple[Path, ...] = opt.option(
        "A compare.json of the same workload, whose runs are included and not repeated.",
        "--with",
        multiple=True,
        type=opt.NamedPath(exists=True, dir_okay=False),
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


@dataclass(frozen=True, slots=True)
class Setting:
    """What runs of a comparison have in common."""

    given: Arguments
    ranks: Ranks | None
    """None: simulated."""
    model: str
    options: WorkloadOptions

    @classmethod
    def of(cls, given: Arguments) -> Setting:
        ranks = None if given.is_simulated else given.ranks.found(cpu_ranks=REAL_RANKS)
        model = given.model or (SIMULATED_MODEL if ranks is None or ranks.are_on_gpus else REAL_MODEL)
        mix_of(model)
        options = given.workload.options(
            num_jobs=SIMULATED_JOBS if ranks is None else REAL_JOBS,
            num_ranks=given.ranks.ranks or SIMULATED_RANKS if ranks is None else ranks.num_ranks,
        )
        return cls(given, ranks, model, options)

    @property
    def slack_s(self) -> float:
        return mix_of(self.model).slack_s if self.given.slack is None else self.given.slack

    @property
    def predicted(self) -> Predicted:
        return predicted(self.given.name, self.model, self.options, self.given.workload.profile_path)

    def make_folder(self) -> None:
        try:
            self.given.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--output {self.given.output}: cannot be made ({error.strerror})") from None

    @property
    def conditions(self) -> dict[str, Any]:
        asked, options = self.given.workload, self.options
        steps = asked.steps or mix_of(self.model).steps
        return {
            "workload": f"{self.given.name}, {self.model}, load {asked.load:g} of {options.num_ranks} ranks, "
            f"{options.num_jobs} jobs of {steps} steps, seed {asked.seed}",
            "simulated": self.ranks is None,
            "where": "simulated" if self.ranks is None else f"on {self.ranks.description}",
            "options": [] if self.ranks is None else list(self.ranks.words),
            "profile": None if asked.profile_path is None else load_profile(asked.profile_path).hash,
            "date": time.strftime("%Y-%m-%d"),
            "versions": versions(),
            "deadlines_from": asked.deadlines_from,
        }


@bench.command()
@opt.takes(given=Arguments)
def compare(given: Arguments) -> int:
    """Run one workload under a baseline and other policies, and compare: table, chart, raw numbers.

    Runs on the GPUs or CPU ranks of this machine, or in virtual time with --simulate. A failed job counts as
    a missed deadline; latencies are those of completed jobs. If a policy cannot run the workload, the table
    says so and the exit code is 1. Ctrl-C keeps finished runs.
    """
    log.configure(level="warning")
    began_s = time.monotonic()
    baseline, *others = given.against
    texts = tuple(dict.fromkeys([baseline, *([*others, *given.policies] or COMPARED)]))
    found = Setting.of(given)
    name, output, model, ranked, options = given.name, given.output, found.model, found.ranks, found.options
    for text in texts:
        _, varied = load_compared(text)
        jobs_with(calibration_jobs(model, steps=options.steps), varied, weightless_model(model))
    found.make_folder()
    conditions = found.conditions
    comparison = PolicyComparison(texts, baseline=baseline, slack_s=found.slack_s)
    for path in given.earlier:
        _take_in(path, comparison, conditions)
    todo = comparison.not_run
    if ranked is None:
        runs = simulated(todo, found.predicted, num_ranks=options.num_ranks)
    else:
        known = found.predicted if given.workload.profile_path else None
        runs = on_workers(todo, name, model, options, output, ranked, known)
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


def _take_in(path: Path, comparison: PolicyComparison, conditions: Mapping[str, Any]) -> None:
    """Include earlier runs of this workload on these ranks. Raises InputError that names the difference."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("this is not a compare.json; it has no object")
        for key in ("workload", "where", "options", "profile", "deadlines_from"):
            if content[key] != conditions[key]:
                raise ValueError(f"its {key} is {content[key]!r}, but here it is {conditions[key]!r}")
        if conditions["profile"] is None and not content["simulated"]:
            raise ValueError("its arrivals follow from measured times, so they differ; give --profile")
        comparison.know(content)
    except KeyError as error:
        raise InputError(f"--with {path}: this is not a compare.json; it lacks {error}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"--with {path}: {error}") from None


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
    return [
        RunFigures(
            name="\n".join([found.policy, *([f"(replaced by {FALLBACK})"] if found.replaced_by else [])]),
            attainment=found.attainment_client,
            mean_s=found.mean_s,
            p95_s=found.p95_s,
            jobs_per_min=found.jobs_per_min,
            makespan_s=found.makespan_s,
        )
        for found in comparison.scores
    ]
