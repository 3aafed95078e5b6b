"""The live view of `gfgen top`: plain ANSI on the terminal's alternate screen."""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import replace

import click

from gfgen.cli.remote.standing import Standing
from gfgen.cli.remote.target import Target
from gfgen.cli.shown.board import has_cursor, printable
from gfgen.errors import GfgenError

REDRAW_S = 0.5
MAX_COLUMNS = 1_000
"""Of a line that no terminal shows."""
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def watch(target: Target, *, as_json: bool) -> None:
    """Show the target until q, Ctrl-C, or without a terminal once.

    As JSON, a line for each change until the run ends.
    """
    standing = target.standing()
    if as_json:
        with contextlib.suppress(KeyboardInterrupt):
            _print_changes(target, standing)
    elif not (has_cursor(sys.stdout) and sys.stdin.isatty()):
        click.echo("\n".join(standing.lines(now=time.time(), columns=MAX_COLUMNS)))
    else:
        _show(target, standing)


def _print_changes(target: Target, standing: Standing) -> None:
    before = None
    while True:
        document = replace(standing, written_at=None).as_json()
        if document != before:
            click.echo(json.dumps(standing.as_json()))
        if not standing.is_live:
            return
        before = document
        time.sleep(REDRAW_S)
        standing = target.standing()


def _show(target: Target, standing: Standing) -> None:
    problem = ""
    with _screen():
        while True:
            _draw(standing, problem)
            if _is_quit():
                break
            try:
                standing, problem = target.standing(), ""
            except GfgenError as error:  # a server that starts again is shown again
                problem = str(error).splitlines()[0]
    click.echo("\n".join(standing.lines(now=time.time())[:2]))


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Another screen without a cursor, and keys without Enter."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(_ENTER)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _draw(standing: Standing, problem: str) -> None:
    columns, rows = shutil.get_terminal_size()
    lines = standing.lines(now=time.time(), columns=columns, rows=max(3, rows - 1))
    foot = problem or "q ends this view; the run goes on"
    lines = [*lines[: rows - 1], *[""] * (rows - 1 - len(lines)), foot[: columns - 1]]
    text = f"{_CLEAR_LINE}\n".join(printable(line, sys.stdout) for line in lines)
    sys.stdout.write(f"{_HOME}{text}{_CLEAR_LINE}{_CLEAR_BELOW}")
    sys.stdout.flush()


def _is_quit() -> bool:
    """Wait for the next redraw; whether q came meanwhile, or the terminal has gone."""
    end_s = time.monotonic() + REDRAW_S
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            key = sys.stdin.read(1)
            if key in ("q", "Q", ""):
                return True
    return False
