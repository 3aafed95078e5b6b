"""Defaults of options from files and environment variables, and `gfgen config`, which shows them.

The command line counts before GFGEN_COMMAND_OPTION, this before GFGEN_OPTION, then ./gfgen.toml, then
gfgen/config.toml in ~/.config (or $XDG_CONFIG_HOME).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gfgen.errors import InputError, nearest
from gfgen.system.home import home

LOCAL_NAME, RECIPES = "gfgen.toml", "recipes"
PAGES = "Pages in docs/ come with gfgen's source code, not with its wheels."
NOT_SET = frozenset({"prompt", "help", "version", "yes"})
_OTHER_VARIABLES = ("GFGEN_CACHE", "GFGEN_PREPARED", "GFGEN_COMPLETE")
"""Variables of no option: folders of caches, and shell completion (click)."""


def config_paths() -> tuple[Path, ...]:
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config")
    return Path(LOCAL_NAME), folder / "gfgen" / "config.toml"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    path: Path
    content: Mapping[str, Any]

    def values_for(self, name: str, command: click.Command) -> dict[str, Any]:
        """The options that the file sets for a command, such as "run" or "bench compare".

        Names are those on the command line without the dashes. Those outside of a table are for every
        command that has them. Raises: InputError for others in the command's own table.
        """
        options, found = options_of(command), dict[str, Any]()
        table: Any = self.content
        if name == "check" and isinstance(of_run := table.get("run"), dict):  # as a run would have it
            table = {**table, **of_run}
        for word in ("", *name.split()):
            table = table.get(word, {}) if word else table
            if not isinstance(table, dict):
                raise InputError(f"{self.path}: {word}: write a table, such as [{word}]")
            own = {
                each.replace("_", "-"): value for each, value in table.items() if not isinstance(value, dict)
            }
            found |= {each: value for each, value in own.items() if each in options}
        if not isinstance(command, click.Group) and (
            unknown := next((x for x in own if x not in options), None)
        ):
            raise InputError(f"{self.path}: [{name}] {unknown}: {_hint(unknown, options)}")
        return found


def read_files() -> Sequence[ConfigFile]:
    found = []
    for path in config_paths():
        if not path.exists() and not path.is_symlink():
            continue
        if path.is_fifo():
            raise InputError(f"{path}: a named pipe, which might never end; write a file")
        import tomllib

        try:
            found.append(ConfigFile(path, tomllib.loads(path.read_text(encoding="utf-8-sig"))))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise InputError(f"{path}: not TOML ({error})") from None
    return found


def own_recipes() -> dict[str, Any]:
    """The table [recipes] of the files, by name. Raises: InputError."""
    from gfgen.job.fields import FIELDS, Refused

    found: dict[str, Any] = {}
    for file in reversed(read_files()):
        if not isinstance(table := file.content.get(RECIPES, {}), dict):
            raise InputError(f"{file.path}: {RECIPES}: write tables, such as [{RECIPES}.mine.wan]")
        for name, recipe in table.items():
            try:
                found[name] = FIELDS["recipe"].parse(recipe or 0)
            except Refused as refused:
                missing = f"the family of models is missing; write a table such as [{RECIPES}.{name}.wan]"
                raise InputError(f"{file.path}: {RECIPES}.{name}: {str(refused) or missing}") from None
    return found


def options_of(command: click.Command) -> dict[str, click.Option]:
    """By name on the command line without the dashes."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    return {name: option for option in options if (name := name_of(option)) not in NOT_SET}


def name_of(option: click.Option) -> str:
    return next((text for text in option.opts if text.startswith("--")), option.opts[0]).lstrip("-")


def with_variables(command: click.Command, name: str) -> click.Command:
    if isinstance(command, click.Group):
        for each, below in command.commands.items():
            with_variables(below, f"{name} {each}")
    texts = [command.help, *(getattr(param, "help", None) for param in command.params)]
    if any("docs/" in (text or "") for text in texts):
        command.epilog = PAGES
    for text, option in options_of(command).items():
        if option.envvar is None:
            word = text.replace("-", "_").upper()
            names = [name.replace(" ", "_").upper(), *(["RUN"] if name == "check" else [])]
            option.envvar = [*(f"GFGEN_{each}_{word}" for each in names), f"GFGEN_{word}"]
    return command


def defaults_of(command: click.Command, name: str) -> dict[str, Any]:
    """click's default_map of a command. Raises: InputError for an option that it has not in its own table."""
    found: dict[str, Any] = {}
    options = options_of(command)
    for file in reversed(read_files()):
        for text, value in file.values_for(name, command).items():
            is_one = options[text].multiple and not isinstance(value, list)
            found[options[text].name or ""] = [value] if is_one else value
    if isinstance(command, click.Group):
        for each, below in command.commands.items():
            found[each] = defaults_of(below, f"{name} {each}")
    return found


def _hint(name: str, options: Mapping[str, object]) -> str:
    near = nearest(name, options)
    return f"no such option; did you mean {near}?" if near else "no such option of this command"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def config(ctx: click.Context, *, as_json: bool) -> int:
    """Show the options that files and environment variables set, and where.

    Files are ./gfgen.toml and ~/.config/gfgen/config.toml. Each option is a line, such as policy = "srtf".
    In a table such as [run] it holds for that command. Variables are GFGEN_POLICY or GFGEN_RUN_POLICY.
    The exit code is 2 if no command has an option.
    """
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    commands = dict(_commands(group, ctx))
    files = read_files()
    _check_names(files, commands)
    found = {name: dict(_settings(name, command, files)) for name, command in commands.items()}
    found = {name: settings for name, settings in found.items() if settings}
    faults = list(_unknown_variables(commands))
    if as_json:
        listed = {name: {text: {"value": value, "from": where} for text, (value, where) in each.items()}
                  for name, each in found.items()}  # fmt: skip
        read = [str(file.path) for file in files]
        report = {"files": read, "commands": listed, "faults": faults}
        click.echo(json.dumps(report, indent=1, default=str))
        return 2 if faults else 0
    for path in config_paths():
        click.echo(f"{path}: {'read' if path in [file.path for file in files] else 'not there'}")
    for name, settings in found.items():
        click.echo(f"gfgen {name}")
        for text, (value, where) in settings.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            click.echo(f"  --{text} {shown}  (from {where})")
    if not found:
        click.echo("no option is set")
    for fault in faults:
        click.echo(f"gfgen: {fault}", err=True)
    return 2 if faults else 0


def _commands(group: click.Group, ctx: click.Context, above: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, ctx, f"{above}{name} ")
        yield f"{above}{name}", command


def _check_names(files: Sequence[ConfigFile], commands: Mapping[str, click.Command]) -> None:
    known = {text: None for command in commands.values() for text in options_of(command)}
    tables = {name.partition(" ")[0]: None for name in commands}
    for file in files:
        for name, value in file.content.items():
            near = tables if isinstance(value, dict) else known
            if name != RECIPES and name.replace("_", "-") not in near:
                raise InputError(f"{file.path}: {name}: {_hint(name.replace('_', '-'), near)}")


def _unknown_variables(commands: Mapping[str, click.Command], *, prefix: str = "GFGEN_") -> Iterator[str]:
    """A line for each variable of this prefix that none of the commands reads."""
    known = {name: None for command in commands.values() for option in options_of(command).values()
             for name in _variables(option)}  # fmt: skip
    for name in sorted(os.environ):
        is_ours = name.startswith(prefix) and not name.startswith("GFGEN_TEST_")
        if is_ours and name not in known and name not in _OTHER_VARIABLES:
            yield f"{name}: {_hint(name, known)}"


def tell_of_variables(context: click.Context) -> None:
    """Log which GFGEN_COMMAND_ variables name no option of this command."""
    own = f"GFGEN_{context.command.name}_".upper()
    for fault in _unknown_variables({"": context.command}, prefix=own):
        logging.getLogger(__name__).warning("%s", fault)


def _variables(option: click.Option) -> Sequence[str]:
    return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())


def _settings(
    name: str, command: click.Command, files: Sequence[ConfigFile]
) -> Iterator[tuple[str, tuple[Any, str]]]:
    by_file = {str(file.path): file.values_for(name, command) for file in files}
    for text, option in options_of(command).items():
        found = [(os.environ[each], each) for each in _variables(option) if os.environ.get(each)]
        found += [(values[text], path) for path, values in by_file.items() if text in values]
        for value, where in found[:1]:
            yield text, ("(hidden)" if _is_secret(text) else value, where)


def _is_secret(option: str) -> bool:
    return "key" in option or "secret" in option or option == "webhook"
