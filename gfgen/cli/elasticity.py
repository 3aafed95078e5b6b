"""`gfgen bench elasticity`: the price of changing layouts at every step."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import click

from gfgen import log
from gfgen.bench import elasticity as bench
from gfgen.bench.workloads import calibration_jobs
from gfgen.cli.prediction import choose_profile
from gfgen.cli.ranks import Ranks, admitted_on, rank_options
from gfgen.cli.run import ready_pool
from gfgen.errors import InputError
from gfgen.layout import MAX_RANKS
from gfgen.runtime.admission import AdmittedJob
from gfgen.runtime.cost import CostModel
from gfgen.runtime.devices import choose_devices
from gfgen.runtime.pool import WorkerPool
from gfgen.runtime.signals import SignalPipe
from gfgen.runtime.warming import warm_ups

GPU_MODEL, CPU_MODEL = "wan2.2-ti2v-5b", "tiny-wan"
GPU_SAMPLES, CPU_SAMPLES = 100, 20


@click.command()
@click.option("--ranks", type=click.IntRange(1, MAX_RANKS), help="[all GPUs, or 4 on a CPU]")
@click.option("--model", help=f"Its classes S and L. [{GPU_MODEL}; on CPU ranks {CPU_MODEL}]")
@click.option(
    "--samples", type=click.IntRange(4), help=f"Of each gap. [{GPU_SAMPLES}; on CPU ranks {CPU_SAMPLES}]"
)
@click.option(
    "--lookahead", type=click.FloatRange(0, 1000), default=5.0, show_default=True, metavar="MS",
    help="As of gfgen run; some measurements are made with 0 as well.",
)  # fmt: skip
@click.option("--only", multiple=True, metavar="PATTERN", help='Cases, as in "changed*"; repeatable.')
@click.option("--seconds", type=click.FloatRange(0), help="Begin no case that would end after so long.")
@click.option("--output", "-o", type=click.Path(file_okay=False, path_type=Path), help="For .json and .md.")
@click.option("--json", "as_json", is_flag=True, help="Print every sample as JSON in place of the table.")
@rank_options
def elasticity(
    *,
    ranks: int | None,
    model: str | None,
    samples: int | None,
    lookahead: float,
    only: tuple[str, ...],
    seconds: float | None,
    output: Path | None,
    as_json: bool,
    device: str,
    random_weights: bool,
    vae_dtype: str,
    graphs: bool,
) -> None:
    """What it costs that every step may run elsewhere: idle gaps on the devices' timeline, beside the goals.

    Real runs under scripted policies: layouts that stay and change, groups that are new, `fcfs` on all ranks
    beside a bare loop, urgent jobs, lookahead on and off.
    """
    log.configure(level="warning")
    began_s = time.monotonic()
    if output is not None:
        _make(output)
    options = Ranks(choose_devices(device, ranks), random_weights, vae_dtype, graphs)
    model = model or (GPU_MODEL if options.are_on_gpus else CPU_MODEL)
    small, large = _jobs(model, options)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(contextlib.closing(SignalPipe()))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gfgen-elasticity-")))
        main = bench.WORKER_MAIN
        pool = stack.enter_context(ready_pool({small.checkpoint}, options, signals, worker_main=main))
        setting = bench.Setting(
            pool,
            small,
            large,
            folder,
            CostModel(),
            num_samples=samples or (GPU_SAMPLES if options.are_on_gpus else CPU_SAMPLES),
            guard_s=lookahead / 1000,
            islands=options.devices.islands,
            signals=signals,
        )
        _tell(f"{time.monotonic() - began_s:5.0f} s  models are loaded")
        _warm_up(pool, setting, signals)
        setting = _expecting(setting)
        found = bench.cases_of(setting)
        cases = [case for case in found if _is_wanted(case.name, only)]
        if not cases:
            raise InputError(f"--only {' '.join(only)}: fits no case such as {found[0].name!r}")
        left_s = None if seconds is None else seconds - (time.monotonic() - began_s)
        _tell(f"{time.monotonic() - began_s:5.0f} s  warm; {_announced(cases)}")
        words = _words(options, model=model, samples=samples, lookahead=lookahead, only=only)
        about = {"device": options.description, "command": " ".join(words), "model": model}
        rows: list[bench.Row] = []
        try:
            for row in bench.measure_cases(cases, seconds=left_s, tell=_tell):
                rows.append(row)
        finally:  # what a failed case left is kept
            _report(rows, about, output, as_json=as_json)


def _make(folder: Path) -> None:
    """A place that cannot be written is told before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {folder}: cannot be made ({error.strerror})") from None


def _report(
    rows: Sequence[bench.Row], about: Mapping[str, str], output: Path | None, *, as_json: bool
) -> None:
    content = json.dumps(bench.as_content(rows, **about), indent=1) + "\n"
    text = "\n".join(bench.table_of(rows, **about)) + "\n"
    click.echo(content if as_json else text, nl=False)
    if output is not None and rows:
        stem = f"{time.strftime('%Y-%m-%d')}-elasticity-{Path(about['model']).name}"
        (output / f"{stem}.json").write_text(content)
        (output / f"{stem}.md").write_text(text)


def _jobs(model: str, options: Ranks) -> tuple[AdmittedJob, AdmittedJob]:
    """The small and the large class of the model's mix."""
    jobs = admitted_on(options, calibration_jobs(model), default_model=model, source="--model")
    return jobs[0], jobs[-1]


def _warm_up(pool: WorkerPool, setting: bench.Setting, signals: SignalPipe) -> None:
    degrees = sorted({1, setting.half, pool.num_ranks})
    for item, answer in pool.warm_up(warm_ups([setting.small, setting.large], degrees), signals):
        if answer.reason is not None:
            raise InputError(f"warming up {item.spec.width}x{item.spec.height}: {answer.reason}")
    bench.warm(setting)


def _expecting(setting: bench.Setting) -> bench.Setting:
    """With predictions of what cases take: by a profile that has the model, or by what warming up took."""
    try:
        profile = choose_profile(None, [setting.small], num_ranks=setting.pool.num_ranks)
    except InputError:
        return replace(setting, expected=setting.costs)
    return replace(setting, expected=CostModel(profile))


def _announced(cases: Sequence[bench.Case]) -> str:
    noun = "case" if len(cases) == 1 else "cases"
    return f"{len(cases)} {noun}, about {sum(case.predicted_s for case in cases):.0f} s"


def _is_wanted(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


def _words(
    options: Ranks, *, model: str, samples: int | None, lookahead: float, only: Sequence[str]
) -> Iterator[str]:
    yield from ("gfgen", "bench", "elasticity", "--ranks", str(options.num_ranks), "--model", model)
    yield from options.words
    if samples is not None:
        yield from ("--samples", str(samples))
    if lookahead != 5.0:
        yield from ("--lookahead", f"{lookahead:g}")
    for pattern in only:
        yield from ("--only", f"'{pattern}'")


def _tell(line: str) -> None:
    click.echo(line, err=True)
