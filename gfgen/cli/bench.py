"""`gfgen bench`: measurements of gfgen on this machine."""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from gfgen import log
from gfgen.bench.runtime import measure_control_plane
from gfgen.bench.simulator import measure_simulator
from gfgen.bench.stock import is_stock
from gfgen.cli.compare import compare, workload
from gfgen.cli.elasticity import elasticity
from gfgen.cli.session.options import FiniteRange
from gfgen.system.machine import cpu_name

POLICIES = ("srtf", "fcfs", "edf", "triage", "legacy")
_STARTUP_COMMANDS = ("--help", "policies")
_STARTUP_RUNS = 5


class _BenchGroup(click.Group):
    """Reads `bench --compare POLICY ...` as `bench compare --against POLICY ...`.

    What more is compared comes as `--compare` again: `diffusers` from outside, or another policy.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].partition("=")[0] == "--compare":
            args = ["compare", *_spelled_out(args)]
        return super().parse_args(ctx, args)


def _spelled_out(args: Sequence[str]) -> Iterator[str]:
    """With the options of `bench compare` in place of each `--compare`."""
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

    `gfgen bench --compare legacy` shows what policies are worth here: `gfgen bench compare --help`.
    """


bench.add_command(compare)
bench.add_command(workload)
bench.add_command(elasticity)


@bench.command()
@click.option("--tasks", default=5000, show_default=True, help="Tasks to dispatch per row.")
def runtime(*, tasks: int) -> None:
    """Cost of the scheduler: time per task, message size, start-up time."""
    click.echo(f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, Python {platform.python_version()}")
    click.echo(f"command: gfgen bench runtime --tasks {tasks}\n")
    click.echo("| policy, 8 ranks | open jobs | median us | P99 us | message bytes |")
    click.echo("|---|---|---|---|---|")
    for num_open in (50, 1000):
        for policy in POLICIES:
            cost = measure_control_plane(policy, num_open=num_open, num_tasks=tasks)
            click.echo(
                f"| {policy} | {num_open} | {cost.median_s * 1e6:.0f} | {cost.p99_s * 1e6:.0f} "
                f"| {cost.message_bytes} |"
            )
    click.echo("\n| command | median s |\n|---|---|")
    for command in _STARTUP_COMMANDS:
        click.echo(f"| gfgen {command} | {_startup_s(command):.2f} |")


@bench.command()
@click.option("--tasks", type=click.IntRange(1), default=10_000, show_default=True, help="Tasks per run.")
@click.option(
    "--runs", type=click.IntRange(1), default=5, show_default=True, help="Runs; the fastest counts."
)
def simulator(*, tasks: int, runs: int) -> None:
    """Tasks per second of 'gfgen simulate' on one core."""
    click.echo(f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, Python {platform.python_version()}")
    click.echo(f"command: gfgen bench simulator --tasks {tasks} --runs {runs}")
    click.echo("(processor time of one process; the fastest run)\n")
    click.echo("| policy, 8 ranks | open jobs | tasks a second |\n|---|---|---|")
    for num_open in (50, 1000):
        for policy in POLICIES:
            speed = measure_simulator(policy, num_open=num_open, num_tasks=tasks, num_runs=runs)
            click.echo(f"| {policy} | {num_open} | {speed.tasks_per_s:,.0f} |")


@bench.command()
@click.option("--gpus", type=int, help="GPUs to use [default: all].")
@click.option(
    "--tune", is_flag=True, help="First find and store the fastest kernel per size for this device."
)
@click.option("--output", type=click.Path(path_type=Path), help="Folder for .json, .md and .png.")
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
        try:
            collectives.chart(json.loads(report.as_json()), output / f"{stem}.png")
        except ImportError:
            click.echo("no chart: matplotlib is missing (pip install 'gfgen[plot]')", err=True)


@bench.command()
@click.option("--gpus", type=int, help="GPUs to use [default: all].")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for .json and .md.")
def attention(*, gpus: int | None, output: Path | None) -> None:
    """Attention shared by GPUs: Ulysses, ring, both, and in chunks of heads."""
    from gfgen.bench.attention import as_content, measure_attention, table_of
    from gfgen.gfc.cuda.driver import driver

    num_gpus = driver().num_devices if gpus is None else gpus
    rows = measure_attention(num_gpus=num_gpus)
    device = f"{num_gpus} x {driver().name(0)}"
    text = "\n".join(table_of(rows, device=device, command=f"gfgen bench attention --gpus {num_gpus}"))
    click.echo(text)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        stem = f"{time.strftime('%Y-%m-%d')}-attention"
        (output / f"{stem}.json").write_text(json.dumps(as_content(rows), indent=1) + "\n")
        (output / f"{stem}.md").write_text(text + "\n")


@bench.command()
@click.option("--gpus", type=int, help="GPUs to use [default: all, 4 at most].")
@click.option(
    "--only", multiple=True, metavar="PATTERN", help='Cells to run, such as "qwen-*/2/ours*". Repeatable.'
)
@click.option("--seconds", type=FiniteRange(0), help="Start no cell after this time.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for .json, .md and .png.")
def forward(*, gpus: int | None, only: tuple[str, ...], seconds: float | None, output: Path | None) -> None:
    """One forward of full-size Wan2.2-5B and Qwen-Image, compared with diffusers, on 1, 2 and 4 GPUs.

    A cell is SHAPE/GPUS/WAY, as in wan-832x480x49/4/ours-graph; the ways are diffusers,
    diffusers-compiled, diffusers-uneven, diffusers-uneven-compiled, ours, ours-graph; and for both branches
    of guidance both-in-turn, both-in-batch, both-on-halves.
    """
    from gfgen.bench.forward import Measured, keep, measure_forwards, store, table_of
    from gfgen.gfc.cuda.driver import driver

    num_gpus = min(4, driver().num_devices) if gpus is None else gpus
    began_s = time.monotonic()
    patterns = "".join(f" --only '{pattern}'" for pattern in only)
    device = f"{num_gpus} x {driver().name(0)}"
    command = f"gfgen bench forward --gpus {num_gpus}{patterns}"
    stem = None
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        stem = output / f"{time.strftime('%Y-%m-%d')}-forward"

    def tell(measured: Measured) -> None:
        result = measured.error or f"{measured.ms:.1f} ms (first {measured.first_s:.1f} s)"
        click.echo(f"{time.monotonic() - began_s:5.0f} s  {measured.cell.name}: {result}", err=True)
        if stem is not None:
            keep([measured], stem, device=device, command=command)  # whatever happens next

    results = measure_forwards(num_gpus=num_gpus, only=only, seconds=seconds, tell=tell)
    for line in table_of(results, device=device, command=command):
        click.echo(line)
    if stem is not None:
        store(results, stem, device=device, command=command)


@bench.command()
@click.option("--gpus", type=int, help="GPUs to use [default: all].")
@click.option("--seconds", type=FiniteRange(0), help="Start no measurement after this time.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for .json and .md.")
def decode(*, gpus: int | None, seconds: float | None, output: Path | None) -> None:
    """Decodes of full-size Wan2.2-5B and Qwen-Image in fp32 and bf16, on 1, 2, 4 and 8 GPUs.

    Compares the result of several GPUs, each with a band of rows, with the result of one GPU.
    """
    from gfgen.bench.decode import Row, measure_decodes, store, table_of
    from gfgen.gfc.cuda.driver import driver

    num_gpus = driver().num_devices if gpus is None else gpus
    began_s = time.monotonic()

    def tell(row: Row) -> None:
        click.echo(
            f"{time.monotonic() - began_s:5.0f} s  {row.shape}/{row.dtype}/{row.degree}: {row.seconds:.3f} s",
            err=True,
        )

    rows = measure_decodes(num_gpus=num_gpus, seconds=seconds, tell=tell)
    device = f"{num_gpus} x {driver().name(0)}"
    text = "\n".join(table_of(rows, device=device, command=f"gfgen bench decode --gpus {num_gpus}"))
    click.echo(text)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        store(rows, output / f"{time.strftime('%Y-%m-%d')}-decode", text)


@bench.command()
@click.option(
    "--schedules", type=click.IntRange(1), default=200, show_default=True, help="Most runs to make."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the first run; later runs count up.")
@click.option("--seconds", type=FiniteRange(0), help="Start no run after this time.")
def faults(*, schedules: int, seed: int, seconds: float | None) -> int:
    """Runs with random jobs and faults: workers and writers that die, hang or raise.

    Everything is real but the models. Afterwards each run is checked: no job is lost or doubled,
    every file is right, nothing is left behind. Exits with 1 and the seeds when anything is wrong.
    """
    from gfgen.bench.faults import soak, table_of  # imports numpy, which --help can do without

    log.configure(level="critical")  # a thousand deaths are announced, one by one
    began_s = time.monotonic()
    until_s = math.inf if seconds is None else began_s + seconds
    results = []
    for result in soak(range(seed, seed + schedules), until_s=until_s):
        results.append(result)
        for problem in result.problems:
            click.echo(f"seed {result.seed}: {problem}", err=True)
    limit = "" if seconds is None else f" --seconds {seconds:g}"
    click.echo(f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, Python {platform.python_version()}")
    click.echo(f"command: gfgen bench faults --schedules {schedules} --seed {seed}{limit}\n")
    for line in table_of(results, wall_s=time.monotonic() - began_s):
        click.echo(line)
    wrong = [result.seed for result in results if result.problems]
    if wrong:
        click.echo(f"\nwrong: seeds {', '.join(map(str, wrong))}")
    return 1 if wrong else 0


@bench.command()
@click.option("--ranks", type=click.IntRange(1, 8), default=2, show_default=True, help="Number of CPU ranks.")
@click.option(
    "--jobs", type=click.IntRange(2), default=40, show_default=True, help="Jobs to run one by one, each way."
)
@click.option(
    "--seconds", type=FiniteRange(1), default=10.0, show_default=True, help="Time to send status requests."
)
def serve(*, ranks: int, jobs: int, seconds: float) -> None:
    """Cost of HTTP: a job over `gfgen serve` against `gfgen run`, status requests, pauses of the loop."""
    from gfgen.bench.serve import measure_serving, table_of

    report = measure_serving(num_ranks=ranks, num_jobs=jobs, seconds=seconds)
    click.echo(f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, Python {platform.python_version()}")
    click.echo(f"command: gfgen bench serve --ranks {ranks} --jobs {jobs} --seconds {seconds:g}\n")
    for line in table_of(report):
        click.echo(line)


def _startup_s(command: str) -> float:
    """Wall time of a command in a fresh process, median of several."""
    seconds = []
    for _ in range(_STARTUP_RUNS):
        began_s = time.perf_counter()
        subprocess.run([sys.executable, "-m", "gfgen", command], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)
