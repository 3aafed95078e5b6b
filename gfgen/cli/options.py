"""Options that several commands have."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gfgen.runtime.devices import CPU, Devices
from gfgen.runtime.records import LOOKAHEAD_S

logger = logging.getLogger(__name__)

LOOKAHEAD_MS = 1e3 * LOOKAHEAD_S


class FiniteRange(click.FloatRange):
    """Numbers within bounds, and no others: neither `nan` nor `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class NamedPath(click.Path):
    """A path that was named: the empty text, as a script gives whose variable is not set, is none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; name a path", param, ctx)
        return super().convert(value, param, ctx)


memory_option = click.option(
    "--memory",
    metavar="SIZE",
    help='Memory limit for weights and jobs, such as "40GB": per GPU, or of main memory. [all available]',
)
graphs_option = click.option(
    "--graphs/--no-graphs",
    default=True,
    show_default=True,
    help="On GPUs: run warm-up steps first, and use CUDA graphs where they are faster (docs/models.md).",
)
lookahead_option = click.option(
    "--lookahead",
    type=FiniteRange(0, 1000),
    default=LOOKAHEAD_MS,
    show_default=True,
    metavar="MS",
    help="Queue the next task this long before the predicted end of the current one, plus 2% of the current "
    "task's time. With 0, gfgen waits until the task has ended.",
)


def tell_of_graphs(ctx: click.Context, devices: Devices) -> None:
    """That --graphs or --no-graphs has no effect, where it was given and has none."""
    if devices.kind == CPU and ctx.get_parameter_source("graphs") is ParameterSource.COMMANDLINE:
        word = "--graphs" if ctx.params["graphs"] else "--no-graphs"
        logger.info("%s has no effect on CPU ranks, which launch no kernels", word)
