"""`gfgen bench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from gfgen.bench.stock import is_stock
from gfgen.cli.compare import compare, workload


class _BenchGroup(click.Group):
    """Reads `bench --compare POLICY` as `bench compare --against POLICY`; each further --compare adds one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].partition("=")[0] == "--compare":
            args = ["compare", *_spelled_out(args)]
        return super().parse_args(ctx, args)


def _spelled_out(args: Sequence[str]) -> Iterator[str]:
    is_first, rest = True, iter(args)
    for word in rest:
        option, equals, text = word.partition("=")
        if option != "--compare":
            yield word
            continue
        text = text if equals else next(rest, "")
        yield "--against" if is_first else "--outside" if is_stock(text) else "--policy"
        yield from [text] if text else []
        is_first = False


@click.group(cls=_BenchGroup)
def bench() -> None:
    """Measure gfgen on this machine. Tables are Markdown, as in benchmarks/results/.

    `gfgen bench --compare legacy` compares the policies; see `gfgen bench compare --help`.
    """


bench.add_command(compare)
bench.add_command(workload)


@bench.command()
@click.option("--gpus", type=int, help="GPUs to use [default: all].")
@click.option(
    "--tune", is_flag=True, help="First find and store the fastest kernel per size for this device."
)
@click.option("--output", type=click.Path(path_type=Path), help="Folder for .json and .md.")
def gfc(*, gpus: int | None, tune: bool, output: Path | None) -> None:
    """Group-free collectives compared with NCCL on the GPUs of this machine."""
    from gfgen.bench import gfc as collectives
    from gfgen.gfc.cuda.driver import driver

    num_gpus = driver().num_devices if gpus is None else gpus
    report = collectives.measure_collectives(num_gpus=num_gpus, tune=tune)
    command = f"gfgen bench gfc --gpus {num_gpus}" + (" --tune" if tune else "")
    text = collectives.markdown(report, command)
    click.echo(text)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        stem = f"{report.facts['date']}-gfc"
        (output / f"{stem}.json").write_text(report.as_json())
        (output / f"{stem}.md").write_text(text)
