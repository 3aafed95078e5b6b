"""`gfgen`: the group of all commands. A command's module is imported when it is called."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from gfgen import log
from gfgen.cli.config import defaults_of, with_variables
from gfgen.errors import GfgenError, InputError, InterruptedRunError, RunError, nearest

_COMMANDS = {
    "run": ("gfgen.cli.run:run", "Generate the pictures and videos of a job file."),
    "check": ("gfgen.cli.run:check", "Check a job file: problems, what a run would do, memory and time."),
    "serve": ("gfgen.cli.serve:serve", "Generate pictures and videos on request over HTTP."),
    "status": ("gfgen.cli.remote.commands:status", "Show what a run or a server does, or how a run ended."),
    "top": ("gfgen.cli.remote.commands:top", "Show a run or a server live in the terminal."),
    "cancel": ("gfgen.cli.remote.commands:cancel", "Cancel jobs of a run or a server."),
    "submit": ("gfgen.cli.remote.commands:submit", "Give jobs to a server or to a run with --watch."),
    "profile": ("gfgen.cli.profile:profile", "Measure how long tasks take on this machine."),
    "simulate": ("gfgen.cli.simulate:simulate", "Run a job file in virtual time to compare policies."),
    "plan": ("gfgen.cli.simulate:plan", "Predict when a job file is done and which deadlines it misses."),
    "policies": ("gfgen.cli.listings:policies", "List the scheduling policies and when to use each."),
    "models": ("gfgen.cli.listings:models", "List models; write small ones for tests."),
    "report": (
        "gfgen.cli.report:report",
        "Report on an output folder: text, JSON, or a page with a gallery.",
    ),
    "plot": ("gfgen.cli.report:plot", "Draw a timeline of a run from its trace."),
    "config": ("gfgen.cli.config:config", "Show the options that files and variables set."),
    "doctor": ("gfgen.cli.doctor:doctor", "Check this machine: GPUs, packages, and what is missing."),
    "cache": ("gfgen.cli.doctor:cache", "List what gfgen keeps between runs, with sizes; clear it."),
    "bench": ("gfgen.cli.bench.commands:bench", "Measure gfgen on this machine."),
}
WITHOUT_FILES = ("config", "doctor")
"""Commands that show what is wrong, and so must not fail because of a faulty file."""


class _LazyGroup(click.Group):
    """Imports a command when it is called, so that --help stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module_name, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module_name), attribute)
        command = with_variables(command, cmd_name)
        if cmd_name == "check":  # which refuses the files that a run refuses
            self.get_command(ctx, "run")
        if cmd_name not in WITHOUT_FILES:
            ctx.default_map = {**(ctx.default_map or {}), cmd_name: defaults_of(command, cmd_name)}
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            near = nearest(name, _COMMANDS)
            hint = f"'gfgen run {name}'" if os.path.exists(name) else repr(near) if near else None
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {hint}?" if hint else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


def _show_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        from gfgen.system import machine

        commit = f", commit {found[:12]}" if (found := machine.commit()) else ""
        click.echo(f"gfgen, version {machine.versions()['gfgen']}{commit}")
        context.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Log details, and print a traceback when a command fails.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and the commit.",
)
@click.pass_context
def cli(ctx: click.Context, *, debug: bool) -> None:
    """Generate a batch of pictures and videos on all GPUs (or CPU cores) of this machine.

    Start with:  gfgen run jobs/batch.jsonl
    """
    ctx.obj = {"debug": debug}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: turns every GfgenError into one line and an exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: 2>&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as of stderr: names may have any bytes
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    try:
        exit_code = _invoke(arguments)
    except GfgenError as error:
        if isinstance(error, InterruptedRunError):  # the run has ended, so a further signal changes nothing
            from gfgen.system.signals import leave_to_the_run  # which --help can do without

            leave_to_the_run()
        if debug:
            logging.getLogger(__name__).exception("failed")
        if logging.getLogger("gfgen").handlers:  # the log file records the end of the command, too
            event = "stopped" if isinstance(error, InterruptedRunError) else "failed"
            fields = log.fields(event=event, exit_code=error.exit_code)
            extra = fields if log.is_json() else fields | log.FILE_ONLY
            logging.getLogger(__name__).error("%s", error, extra=extra)
        if not log.is_json():
            with contextlib.suppress(OSError):  # the terminal may be gone
                click.echo(f"gfgen: {error}", err=True)
        exit_code = error.exit_code
    except Exception:
        if logging.getLogger("gfgen").handlers:  # perhaps nobody reads standard error
            extra = log.fields(event="failed", exit_code=1) | log.FILE_ONLY
            logging.getLogger(__name__).exception("failed", extra=extra)
        raise
    _let_go_of_closed_streams()
    sys.exit(exit_code)


def _let_go_of_closed_streams() -> None:
    """Drop output that a closed terminal or pipe refused: at exit Python would retry, and exit with 120."""
    for stream in (each for each in (sys.stdout, sys.stderr) if not each.closed):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _invoke(arguments: list[str]) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the current folder was removed; change to another one") from None
    try:
        result: Any = cli.main(args=arguments, prog_name="gfgen", standalone_mode=False)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "gfgen"
        raise InputError(f"{error.format_message().rstrip('.')} ({command} --help)") from error
    except click.Abort as abort:
        stopped: BaseException | None = abort
        while stopped is not None and not isinstance(stopped, InterruptedRunError):
            stopped = stopped.__context__
        if stopped is not None:  # Ctrl-C came again while the stopped run was ending
            raise stopped from None
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "gfgen":
            raise
        raise RunError(
            f"the package {error.name} is missing: 'pip install gfgen' installs it; 'gfgen doctor' lists all"
        ) from error
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise RunError("too many open files: raise the limit (ulimit -n), then run again") from error
        if isinstance(error.filename, str) and error.errno not in (errno.ENOENT, errno.EEXIST):
            kind = InputError if error.errno in (errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP) else RunError
            raise kind(f"{error.filename[:80]}: {error.strerror}") from error  # such as of a lost drive
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            raise
        raise RunError(f"cannot write: {error.strerror}") from error
    return result if isinstance(result, int) else 0
