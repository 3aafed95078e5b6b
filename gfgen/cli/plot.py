"""`gfgen plot`: a trace as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from gfgen.runtime.plot import plot_timeline


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("timeline.png"),
    show_default=True,
    help="The picture; .png, .svg or .pdf.",
)
@click.option("--title", help="In place of what the trace says of itself.")
def plot(*, trace: Path, output: Path, title: str | None) -> None:
    """Draw TRACE, which 'gfgen run --trace' wrote, as a timeline: a lane per rank, a colour per job."""
    plot_timeline(trace, output, title=title)
    click.echo(str(output))
