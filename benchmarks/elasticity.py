"""`python -m benchmarks.elasticity`: the price of changing layouts at every step."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from benchmarks import elasticity_cases as bench
from benchmarks import elasticity_rows as table
from benchmarks.bare import WORKER_MAIN
from benchmarks.measured import is_wanted, keep
from gfgen import log
from gfgen.bench.workloads import calibration_jobs
from gfgen.cli.options import FiniteRange, RankOptions, group, takes
from gfgen.cli.shown.prediction import choose_profile
from gfgen.errors import InputError
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes.starting import warm_up
from gfgen.session.ranks import Ranks, admitted_on, ready_pool
from gfgen.session.warming import warm_ups
from gfgen.system.signals import SignalPipe

GPU_MODEL, CPU_MODEL = "wan2.2-ti2v-5b", "tiny-wan"
GPU_SAMPLES, CPU_SAMPLES = 100, 20


@click.command()
@click.option("--model", help=f"Model whose small and large jobs run. [{GPU_MODEL}; CPU: {CPU_MODEL}]")
@click.option(
    "--samples", type=click.IntRange(4), help=f"Samples of each gap. [{GPU_SAMPLES}; CPU: {CPU_SAMPLES}]"
)
@click.option(
    "--only", multiple=True, metavar="PATTERN", help='Cases to run, such as "changed*". Repeatable.'
)
@click.option("--seconds", type=FiniteRange(0), help="Start no case that would end after this time.")
@click.option(
    "--output", "-o", type=click.Path(file_okay=False, path_type=Path), help="Folder for .json and .md."
)
@takes(
    ranks=group(
        RankOptions,
        without=(
            *("ranks_per_gpu", "memory", "offload", "trust_remote_code", "compile"),
            *("precision", "attention"),
        ),
    )
)
def main(
    *,
    ranks: RankOptions,
    model: str | None,
    samples: int | None,
    only: tuple[str, ...],
    seconds: float | None,
    output: Path | None,
) -> None:
    """Idle time of the devices when steps move between ranks, compared with the goals.

    Runs real jobs under scripted policies: fixed and changing layouts, new groups, `fcfs` on all ranks
    against a bare loop, urgent jobs, and lookahead on and off.
    """
    log.configure(level="warning")
    began_s = time.monotonic()
    if output is not None:
        _make(output)
    options = ranks.found()
    model = model or (GPU_MODEL if options.are_on_gpus else CPU_MODEL)
    subject = _subject(model, options, samples or (GPU_SAMPLES if options.are_on_gpus else CPU_SAMPLES))
    cases = _wanted(bench.cases_of(subject), only)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(contextlib.closing(SignalPipe()))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gfgen-elasticity-")))
        checkpoints = {subject.small.checkpoint}
        pool = stack.enter_context(
            ready_pool(checkpoints, options, signals, worker_main=WORKER_MAIN, are_all_needed=True)
        )
        setting = bench.Setting(pool, folder, CostModel(), signals=signals)
        _tell(f"{time.monotonic() - began_s:5.0f} s  models are loaded")
        _warm_up(setting, subject)
        setting = replace(setting, expected=_expected(setting, subject))
        left_s = None if seconds is None else seconds - (time.monotonic() - began_s)
        _tell(f"{time.monotonic() - began_s:5.0f} s  warm; {_announced(cases, setting.expected)}")
        words = _words(options, model=model, samples=samples, only=only)
        about = {"device": options.description, "command": " ".join(words), "model": model}
        rows: list[table.ElasticityRow] = []
        try:
            for row in bench.measure_cases(cases, setting, seconds=left_s, tell=_tell):
                rows.append(row)
        finally:  # what a failed case left is kept
            _report(rows, about, output)


def _make(folder: Path) -> None:
    """A place that cannot be written is told before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {folder}: cannot be made ({error.strerror})") from None


def _report(rows: Sequence[table.ElasticityRow], about: Mapping[str, str], output: Path | None) -> None:
    text = "\n".join(table.table_of(rows, **about))
    click.echo(text)
    if rows:
        content = {**about, "rows": [asdict(row) for row in rows]}
        keep(output, f"elasticity-{Path(about['model']).name}", content, text)


def _subject(model: str, options: Ranks, num_samples: int) -> bench.Subject:
    """The small and the large class of the model's mix, on all ranks."""
    small, *_, large = admitted_on(options, calibration_jobs(model), default_model=model, source="--model")
    return bench.Subject(options.num_ranks, small, large, num_samples)


def _wanted(cases: Sequence[bench.ElasticityCase], patterns: Sequence[str]) -> Sequence[bench.ElasticityCase]:
    """Those that fit one of the patterns, if there are any; InputError where none does."""
    fitting = [case for case in cases if is_wanted(case.name, patterns)]
    if not fitting:
        raise InputError(f"--only {' '.join(patterns)}: matches no case; an example is {cases[0].name!r}")
    return fitting


def _warm_up(setting: bench.Setting, subject: bench.Subject) -> None:
    degrees = sorted({1, subject.half, subject.num_ranks})
    items = warm_ups([subject.small, subject.large], degrees)
    for item, answer in warm_up(setting.pool, items, setting.signals):
        if answer.reason is not None:
            raise InputError(f"warming up {item.spec.width}x{item.spec.height}: {answer.reason}")
    bench.warm(setting, subject)


def _expected(setting: bench.Setting, subject: bench.Subject) -> CostModel:
    """What predicts how long cases take: a profile that has the model, or what warming up took."""
    try:
        return CostModel(choose_profile(None, [subject.small], num_ranks=subject.num_ranks))
    except InputError:
        return setting.costs


def _announced(cases: Sequence[bench.ElasticityCase], costs: CostModel) -> str:
    noun = "case" if len(cases) == 1 else "cases"
    return f"{len(cases)} {noun}, about {sum(case.predicted_s(costs) for case in cases):.0f} s"


def _words(options: Ranks, *, model: str, samples: int | None, only: Sequence[str]) -> Iterator[str]:
    yield from ("python -m benchmarks.elasticity --ranks", str(options.num_ranks), "--model", model)
    yield from options.words
    if samples is not None:
        yield from ("--samples", str(samples))
    for pattern in only:
        yield from ("--only", f"'{pattern}'")


def _tell(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
