"""`gfgen policies`: what can be said after --policy."""

from __future__ import annotations

import textwrap

import click

from gfgen.policies.catalog import BUILT_IN, describe


@click.command()
def policies() -> None:
    """Say what each scheduling policy is for, and its options.

    A policy is chosen with --policy NAME[,option=value...]. NAME may also be your own:
    package.module:attribute, or a file's path (docs/policies.md shows how to write one).
    """
    for name in BUILT_IN:
        options, text = describe(name)
        summary, _, details = text.partition("\n\n")
        click.secho(name + (f"  ({options})" if options else ""), bold=True)
        for paragraph in (summary, details):
            click.echo(textwrap.fill(paragraph, width=88, initial_indent="  ", subsequent_indent="  "))
        click.echo()
    click.echo("Your own: --policy package.module:attribute or path/to/file.py; see docs/policies.md")
