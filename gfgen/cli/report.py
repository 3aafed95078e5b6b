"""`gfgen report` and `gfgen plot`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gfgen.cli.options import configure_log
from gfgen.cli.shown.folder_report import FolderReport
from gfgen.errors import InputError
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


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--html", "as_html", is_flag=True, help="Write a page with a gallery to DIR/report.html.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Another file for the page."
)
def report(*, folder: Path, as_html: bool, as_json: bool, output: Path | None) -> None:
    """Report on the output folder DIR of runs: what was made, when, how long it took, and what failed.

    The page of --html is one file: it has thumbnails, prompts, seeds, times and failures, and links to the
    files.
    """
    configure_log("warning")
    found = FolderReport.read(folder)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        click.echo("\n".join(found.lines()))
    if not as_html and output is None:
        return
    target = output or folder / "report.html"
    try:
        target.write_text(found.as_html(target), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror}); name another --output") from None
    click.echo(f"the page is {target}", err=as_json)
