"""Many schedules of faults (tests/fault_schedules.py), counted in a table."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import click
from fault_plan import FaultKind
from fault_schedules import Fleet, ScheduleResult, make_schedule, run_schedule

from benchmarks.measured import about, head, row
from gfgen import log
from gfgen.cli.options import FiniteRange


def soak(seeds: Iterable[int], *, until_s: float) -> Iterator[ScheduleResult]:
    """Results of the schedules of these seeds; none is begun after `until_s`."""
    with Fleet(preload=["fake_worker"]) as fleet:  # no torch: a fork takes 3 ms, not 20
        for seed in seeds:
            if time.monotonic() >= until_s:
                return
            yield run_schedule(make_schedule(seed), fleet)


def table_of(results: Sequence[ScheduleResult], *, wall_s: float) -> Iterator[str]:
    """The lines of a Markdown table."""
    faults = sum((result.faults for result in results), Counter[str]())
    num_delays = faults.pop(FaultKind.DELAY, 0)
    rows = {
        "schedules": len(results),
        "wall time, s": round(wall_s),
        "faults injected": faults.total(),
        **{f"- {kind}": faults[kind] for kind in sorted(faults)},
        "delays injected": num_delays,
        "workers lost and replaced, or retired": sum(result.num_deaths for result in results),
        "jobs done, with the right file": sum(result.num_done for result in results),
        "jobs failed, as they should": sum(result.num_failed for result in results),
        "jobs lost": sum(result.num_lost for result in results),
        "jobs doubled": sum(result.num_doubled for result in results),
        "schedules with anything wrong": sum(bool(result.problems) for result in results),
    }
    yield head("", "count")
    yield from itertools.starmap(row, rows.items())


@click.command()
@click.option(
    "--schedules", type=click.IntRange(1), default=200, show_default=True, help="Most runs to make."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the first run; later runs count up.")
@click.option("--seconds", type=FiniteRange(0), help="Start no run after this time.")
def main(*, schedules: int, seed: int, seconds: float | None) -> None:
    """Runs with random jobs and faults: workers and writers that die, hang or raise.

    Everything is real but the models. Afterwards each run is checked: no job is lost or doubled,
    every file is right, nothing is left behind. Exits with 1 and the seeds when anything is wrong.
    """

    log.configure(level="critical")  # a thousand deaths are announced, one by one
    began_s = time.monotonic()
    until_s = math.inf if seconds is None else began_s + seconds
    results = []
    for result in soak(range(seed, seed + schedules), until_s=until_s):
        results.append(result)
        for problem in result.problems:
            click.echo(f"seed {result.seed}: {problem}", err=True)
    limit = "" if seconds is None else f" --seconds {seconds:g}"
    click.echo(about(f"faults --schedules {schedules} --seed {seed}{limit}") + "\n")
    for line in table_of(results, wall_s=time.monotonic() - began_s):
        click.echo(line)
    wrong = [result.seed for result in results if result.problems]
    if wrong:
        click.echo(f"\nwrong: seeds {', '.join(map(str, wrong))}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
