"""`gfgen`: the group of all commands. A command's module is imported when it is called."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from gfgen import log
from gfgen.errors import GfgenError, InterruptedRunError, RunError

_COMMANDS = {
    "run": ("gfgen.cli.run:run", "Generate what a job file asks for."),
    "serve": ("gfgen.cli.serve:serve", "Generate what is asked for over HTTP."),
    "profile": ("gfgen.cli.profile:profile", "Measure how long tasks take on this machine."),
    "simulate": ("gfgen.cli.simulate:simulate", "Run a job file in virtual time: which policy does best?"),
    "plan": (
        "gfgen.cli.plan:plan",
        "Say when a job file would be done, and which deadlines would be missed.",
    ),
    "policies": ("gfgen.cli.policies:policies", "Say what each scheduling policy is for."),
    "models": ("gfgen.cli.models:models", "List models; make small ones for trying things out."),
    "plot": ("gfgen.cli.plot:plot", "Draw a run's trace as a timeline."),
    "doctor": ("gfgen.cli.doctor:doctor", "Say what this machine offers, and what is missing."),
    "bench": ("gfgen.cli.bench:bench", "Measure gfgen on this machine."),
}


class _LazyGroup(click.Group):
    """Knows its commands by name and imports one when it is called: --help stays instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module_name, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module_name), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Log details, and show a traceback when something fails.")
@click.version_option(package_name="gfgen")
@click.pass_context
def cli(ctx: click.Context, *, debug: bool) -> None:
    """Generate a batch of pictures and videos on all GPUs (or CPU cores) of this machine.

    Start with:  gfgen run jobs/batch.jsonl
    """
    ctx.obj = {"debug": debug}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: every error of ours becomes one line and an exit code."""
    _stand_in_for_missing_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    try:
        exit_code = _invoke(arguments)
    except GfgenError as error:
        if isinstance(error, InterruptedRunError):  # a signal more finds a run that has ended already
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        if debug:
            logging.getLogger(__name__).exception("failed")
        if logging.getLogger("gfgen").handlers:  # whoever reads the log file only is to know, too
            _log_end(error)
        if not log.is_json():
            with contextlib.suppress(OSError):  # the terminal may be gone
                click.echo(f"gfgen: {error}", err=True)
        exit_code = error.exit_code
    _let_go_of_closed_streams()
    sys.exit(exit_code)


def _log_end(error: GfgenError) -> None:
    """What ended the command; for programs an event with the exit code."""
    event = "stopped" if isinstance(error, InterruptedRunError) else "failed"
    fields = log.fields(event=event, exit_code=error.exit_code)
    extra = fields if log.is_json() else fields | log.FILE_ONLY
    logging.getLogger(__name__).error("%s", error, extra=extra)


def _stand_in_for_missing_streams() -> None:
    """Started without one (`2>&-`), we have the null device in its place, under its number.

    Else the next file that is opened would have that number, and get what is meant for the stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", errors="backslashreplace"))


def _let_go_of_closed_streams() -> None:
    """What a closed terminal or pipe did not take would be written once more at the exit: with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _invoke(arguments: list[str]) -> int:
    try:
        result: Any = cli.main(args=arguments, prog_name="gfgen", standalone_mode=False)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "gfgen":
            raise
        raise RunError(
            f"the package {error.name} is missing: pip install gfgen brings it; gfgen doctor names all"
        ) from error
    except OSError as error:
        if not _is_of_echo(error):
            raise
        raise RunError(f"cannot write: {error.strerror}") from error
    return result if isinstance(result, int) else 0


def _is_of_echo(error: OSError) -> bool:
    """Whether it says that what was to be shown could not be written; all is shown by `click.echo`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_code is click.echo.__code__
