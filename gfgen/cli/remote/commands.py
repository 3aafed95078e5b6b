"""`gfgen status`, `gfgen cancel`, `gfgen submit` and `gfgen top`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gfgen.cli.options import JobOptions, Named, argument, configure_log, flag, group, option, takes
from gfgen.cli.remote.folder import RunStatus, Target
from gfgen.cli.shown.board import has_cursor, printable
from gfgen.errors import GfgenError, InputError
from gfgen.runtime.files.lock import holder_of
from gfgen.session.live import read_live
from gfgen.system.wording import counted, named

if TYPE_CHECKING:
    import curses

RUNS = Path("outputs")
_ADDRESS = re.compile(r"[A-Za-z0-9.\-]+:[0-9]{1,5}")

MAX_STATUS_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    target: str | None = option(
        "A run's output folder, a watched folder or a server's URL. [what runs below ./outputs]",
        type=Named(),
        metavar="TARGET",
    )
    api_key: str | None = option(
        "Key of a server that wants one. Prefer the environment variable GFGEN_API_KEY."
    )
    as_json: bool = flag("Print JSON instead of text.", "--json")

    def found(self) -> Target:
        return find_target(self.target, key=self.api_key)


_BY_ARGUMENT = group(
    Asked, target=argument(metavar="[TARGET]", required=False, envvar="GFGEN_TARGET", type=Named())
)


@click.command()
@takes(asked=_BY_ARGUMENT)
def status(asked: Asked) -> int:
    """Show what a run or a server does now, or how the last run of a folder ended.

    TARGET is a run's output folder, a watched folder or a server's URL. Without it, all that run below
    ./outputs are shown.
    """
    configure_log("warning")
    folders = live_folders() if asked.target is None else ()
    named = [find_target(str(folder), key=asked.api_key) for folder in folders]
    found = [each.status() for each in named or [asked.found()]]
    if asked.as_json:
        documents = list(map(asdict, found))
        _print_json(documents[0] if len(documents) == 1 else documents)
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else MAX_COLUMNS
    for number, status in enumerate(found):
        lines = status.lines(now=time.time(), columns=columns, rows=MAX_STATUS_ROWS)
        click.echo("\n".join([""] * bool(number) + lines))
    return 0


@click.command()
@takes(asked=_BY_ARGUMENT)
def top(asked: Asked) -> int:
    """Show a run or a server live in the terminal, until q or Ctrl-C.

    TARGET is as for 'gfgen status'. Without a terminal the view is printed once; with --json there is a line
    of JSON for each change.
    """
    configure_log("warning")
    watch(asked.found(), as_json=asked.as_json)
    return 0


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@takes(asked=Asked)
def cancel(ids: tuple[str, ...], *, asked: Asked) -> int:
    """Cancel open jobs of a run or a server: those with this ID, or of a pattern such as "fox-*".

    For a server, an ID may also be that in the job file, or the id of a batch. A running step stops. A job
    whose file is being written may be done all the same. The next run makes cancelled jobs again.
    """
    configure_log("warning")
    found = asked.found().cancel(ids)
    if asked.as_json:
        _print_json(
            {"num_cancelled": found.num_cancelled, "cancelled": found.ids, "unmatched": found.unmatched}
        )
    elif found.num_cancelled:
        names = named([*found.ids, *[""] * (found.num_cancelled - len(found.ids))], "job")
        click.echo(f"cancelled {counted(found.num_cancelled, 'job')}: {names}")
    for pattern in found.unmatched:
        click.echo(f"gfgen: no open job matches {pattern}", err=True)
    return 1 if found.unmatched else 0


@click.command()
@takes(jobs=JobOptions, asked=Asked)
def submit(*, jobs: JobOptions, asked: Asked) -> int:
    """Give the jobs of JOBS to a server, or to a run that watches a folder.

    JOBS and the options for jobs are those of 'gfgen run'. All jobs are taken, or none.
    """
    configure_log("warning")
    source = jobs.source()
    taken = asked.found().submit(source)
    if asked.as_json:
        answer = {"num_jobs": taken.num_jobs, "text": taken.text, "problems": taken.problems}
        _print_json(answer | ({} if taken.answer is None else {"answers": taken.answer}))
    else:
        click.echo(taken.text)
    for line in taken.problems:
        click.echo(f"gfgen: {line}", err=True)
    return 1 if taken.problems else 0


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=1))


REDRAW_S = 0.5
MAX_COLUMNS = 1_000
"""Of a line that no terminal shows."""


def watch(target: Target, *, as_json: bool) -> None:
    """Show the target until q, Ctrl-C, or without a terminal once; as JSON, a line for each change."""
    status = target.status()
    if as_json:
        with contextlib.suppress(KeyboardInterrupt):
            _print_changes(target, status)
    elif not (has_cursor(sys.stdout) and sys.stdin.isatty()):
        click.echo("\n".join(status.lines(now=time.time(), columns=MAX_COLUMNS)))
    else:
        _show(target, status)


def _print_changes(target: Target, status: RunStatus) -> None:
    before = None
    while True:
        document = asdict(replace(status, written_at=None))
        if document != before:
            click.echo(json.dumps(asdict(status)))
        if not status.is_live:
            return
        before = document
        time.sleep(REDRAW_S)
        status = target.status()


def _show(target: Target, status: RunStatus) -> None:
    most = 2
    try:
        import curses  # which some builds of Python lack

        status = curses.wrapper(_redraw, target, status)
    except KeyboardInterrupt:
        pass
    except ImportError:
        most = MAX_STATUS_ROWS
    except curses.error:  # a terminal that its database lacks
        most = MAX_STATUS_ROWS
    click.echo("\n".join(status.lines(now=time.time())[:most]))


def _redraw(screen: curses.window, target: Target, status: RunStatus) -> RunStatus:
    """Draw until q; the last status."""
    import curses

    screen.timeout(round(1e3 * REDRAW_S))
    with contextlib.suppress(curses.error):  # a terminal without
        curses.use_default_colors()
        curses.curs_set(0)
    problem = ""
    while True:
        rows, columns = screen.getmaxyx()
        lines = status.lines(now=time.time(), columns=columns, rows=max(3, rows - 1))[: rows - 1]
        lines += [""] * (rows - 1 - len(lines)) + [problem or "q ends this view; the run goes on"]
        screen.erase()
        for row, line in enumerate(lines):
            screen.insstr(row, 0, printable(line, sys.stdout)[:columns])
        if screen.getch() in (ord("q"), ord("Q")):
            return status
        try:
            status, problem = target.status(), ""
        except GfgenError as error:  # a server that starts again is shown again
            problem = str(error).splitlines()[0]


def find_target(text: str | None, *, key: str | None) -> Target:
    """The named run or server, or the only one below ./outputs. Raises: InputError if there is none."""
    if text is not None:
        return _named(text, key)
    found = live_folders()
    if len(found) != 1:
        several = f"several run: {', '.join(map(str, found))}" if found else "nothing runs below ./outputs"
        raise InputError(f"{several}; name a folder or a URL, such as outputs/night or http://localhost:3000")
    return _named(str(found[0]), key)


def live_folders() -> Sequence[Path]:
    folders = sorted(RUNS.iterdir()) if RUNS.is_dir() else []
    return [folder for folder in folders if folder.is_dir() and holder_of(folder) is not None]


def _named(text: str, key: str | None) -> Target:
    from gfgen.cli.remote.folder import RunFolder
    from gfgen.cli.remote.server import Server

    path = Path(os.path.expanduser(text))
    if "://" in text or (_ADDRESS.fullmatch(text) and not path.exists()):
        return Server(text if "://" in text else f"http://{text}", key=key)
    if not path.is_dir():
        what = "is a file" if path.exists() else "there is no such folder"
        raise InputError(f"{text}: {what}; name a run's output folder, a watched folder or a server's URL")
    record = read_live(path) or {}
    if isinstance(url := record.get("url"), str):
        if holder_of(path) is None:
            raise InputError(f"{path}: the server of this folder does not run; start 'gfgen serve -o {path}'")
        return Server(url, key=key)
    if isinstance(output := record.get("output"), str):
        return RunFolder(Path(output), name=text)
    return RunFolder(path, name=text)
