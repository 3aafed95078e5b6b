"""`gfgen plot`."""

from __future__ import annotations

from pathlib import Path

import click

from gfgen.runtime.report.plot_runs import find_traces, plot_runs
from gfgen.runtime.report.plot_timeline import plot_timeline


@click.command()
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="File for the picture: .png, .svg or .pdf. [timeline.png or comparison.png]",
)
@click.option("--title", help="Title of the picture. [from the traces]")
def plot(*, traces: tuple[Path, ...], output: Path | None, title: str | None) -> None:
    """Draw the trace of a run or a simulation as a timeline: one lane per rank, one colour per job.

    Given several traces, or a folder with several, it compares deadlines met, latencies and throughput.
    """
    found = find_traces(traces)
    output = output or Path("timeline.png" if len(found) == 1 else "comparison.png")
    if len(found) == 1:
        plot_timeline(found[0], output, title=title)
    else:
        plot_runs(found, output, title=title)
    click.echo(str(output))
