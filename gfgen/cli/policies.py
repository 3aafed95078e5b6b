"""`gfgen policies`."""

from __future__ import annotations

import textwrap

import click

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
