"""`gfgen status`, `gfgen cancel`, `gfgen submit` and `gfgen top`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Any

import click

from gfgen.cli.options import JobOptions, Named, configure_log, job_options
from gfgen.cli.remote.target import find_target, live_folders
from gfgen.cli.remote.top import MAX_COLUMNS, watch
from gfgen.system.wording import counted, first_of

MAX_STATUS_ROWS = 40

_target_argument = click.argument(
    "target", metavar="[TARGET]", required=False, envvar="GFGEN_TARGET", type=Named()
)
_target_option = click.option(
    "--target",
    type=Named(),
    metavar="TARGET",
    help="A run's output folder, a watched folder or a server's URL. [what runs below ./outputs]",
)
_key_option = click.option(
    "--api-key", help="Key of a server that wants one. Prefer the environment variable GFGEN_API_KEY."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@click.command()
@_target_argument
@_key_option
@_json_option
def status(*, target: str | None, api_key: str | None, as_json: bool) -> int:
    """Show what a run or a server does now, or how the last run of a folder ended.

    TARGET is a run's output folder, a watched folder or a server's URL. Without it, all that run below
    ./outputs are shown.
    """
    configure_log("warning")
    folders = live_folders() if target is None else ()
    named = [find_target(str(folder), key=api_key) for folder in folders]
    found = [each.standing() for each in named or [find_target(target, key=api_key)]]
    if as_json:
        documents = [standing.as_json() for standing in found]
        _print_json(documents[0] if len(documents) == 1 else documents)
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else MAX_COLUMNS
    for number, standing in enumerate(found):
        lines = standing.lines(now=time.time(), columns=columns, rows=MAX_STATUS_ROWS)
        click.echo("\n".join([""] * bool(number) + lines))
    return 0


@click.command()
@_target_argument
@_key_option
@_json_option
def top(*, target: str | None, api_key: str | None, as_json: bool) -> int:
    """Show a run or a server live in the terminal, until q or Ctrl-C.

    TARGET is as for 'gfgen status'. Without a terminal the view is printed once; with --json there is a line
    of JSON for each change.
    """
    configure_log("warning")
    watch(find_target(target, key=api_key), as_json=as_json)
    return 0


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@_target_option
@_key_option
@_json_option
def cancel(*, ids: tuple[str, ...], target: str | None, api_key: str | None, as_json: bool) -> int:
    """Cancel open jobs of a run or a server: those with this ID, or of a pattern such as "fox-*".

    For a server, an ID may also be that in the job file, or the id of a batch. A running step stops. A job
    whose file is being written may be done all the same. The next run makes cancelled jobs again.
    """
    configure_log("warning")
    found = find_target(target, key=api_key).cancel(ids)
    if as_json:
        _print_json(
            {"num_cancelled": found.num_cancelled, "cancelled": found.ids, "unmatched": found.unmatched}
        )
    elif found.num_cancelled:
        names = ", ".join(first_of([*found.ids, *[""] * (found.num_cancelled - len(found.ids))], "job"))
        click.echo(f"cancelled {counted(found.num_cancelled, 'job')}: {names}")
    for pattern in found.unmatched:
        click.echo(f"gfgen: no open job matches {pattern}", err=True)
    return 1 if found.unmatched else 0


@click.command()
@job_options
@_target_option
@_key_option
@_json_option
def submit(*, jobs: JobOptions, target: str | None, api_key: str | None, as_json: bool) -> int:
    """Give the jobs of JOBS to a server, or to a run that watches a folder.

    JOBS and the options for jobs are those of 'gfgen run'. All jobs are taken, or none.
    """
    configure_log("warning")
    source = jobs.source()
    taken = find_target(target, key=api_key).submit(source)
    if as_json:
        answer = {"num_jobs": taken.num_jobs, "text": taken.text, "problems": taken.problems}
        _print_json(answer | ({} if taken.answer is None else {"answers": taken.answer}))
    else:
        click.echo(taken.text)
    for line in taken.problems:
        click.echo(f"gfgen: {line}", err=True)
    return 1 if taken.problems else 0


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=1))
