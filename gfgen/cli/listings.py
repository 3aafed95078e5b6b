"""`gfgen policies` and `gfgen models`."""

from __future__ import annotations

import json
import textwrap
from importlib import resources
from pathlib import Path

import click

from gfgen.errors import ModelError
from gfgen.models.families.registry import MODELS, TINY_NAMES, make_tiny_models
from gfgen.policies.catalog import BUILT_IN, describe


@click.command()
def policies() -> None:
    """List the scheduling policies, their options, and when to use each.

    Choose one with --policy NAME[,option=value...]. NAME can also be a policy of your own:
    package.module:attribute, or the path of a file (docs/policies.md shows how to write one).
    """
    for name in BUILT_IN:
        options, text = describe(name)
        summary, _, details = text.partition("\n\n")
        click.secho(name + (f"  ({options})" if options else ""), bold=True)
        for paragraph in (summary, details):
            click.echo(textwrap.fill(paragraph, width=88, initial_indent="  ", subsequent_indent="  "))
        click.echo()
    click.echo("Your own: --policy package.module:attribute or path/to/file.py; see docs/policies.md")


@click.group(invoke_without_command=True)
@click.option(
    "--pipelines", is_flag=True, help="List pipeline classes of diffusers with result and output kind."
)
@click.pass_context
def models(ctx: click.Context, *, pipelines: bool) -> None:
    """List the models that you can name in jobs and with --model."""
    if ctx.invoked_subcommand is not None:
        return
    found = _pipelines()
    if pipelines:
        width = max(map(len, found))
        for name, (result, kind) in found.items():
            click.echo(f"{name:<{width}}  {result:<11}  {kind}")
        return
    width = max(len(model.name) for model in MODELS)
    for model in MODELS:
        click.echo(f"{model.name:<{width}}  {model.summary}")
    click.echo("Or name a directory in diffusers' format, or the hub id of such a pipeline.")
    verified = sum(result == "in steps" for result, _ in found.values())
    click.echo(
        f"{verified} pipeline classes of diffusers for pictures and videos are verified in steps: "
        "--pipelines lists them, docs/models.md has details."
    )


def _pipelines() -> dict[str, tuple[str, str]]:
    """Result and output kind of each pipeline class that was tried."""
    text = resources.files("gfgen.models.families").joinpath("pipelines.json").read_text()
    return {name: (result, kind) for name, (result, kind) in json.loads(text)["pipelines"].items()}


@models.command("make-tiny")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.argument("names", nargs=-1)
def make_tiny(directory: Path, names: tuple[str, ...]) -> None:
    """Write small pipelines with random weights to DIRECTORY: all of them, or NAMES.

    They use the real model classes and run anywhere in seconds. Their pictures show only texture.
    """
    unknown = [name for name in names if name not in TINY_NAMES]
    if unknown:
        raise ModelError(f"no tiny model {unknown[0]!r}; there are {', '.join(TINY_NAMES)}")
    make_tiny_models(directory, names or TINY_NAMES)
    for name in names or TINY_NAMES:
        click.echo(str(directory / name))
