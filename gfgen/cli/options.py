"""Options that several commands have."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gfgen.job.fields import parse_duration
from gfgen.layout import MAX_RANKS
from gfgen.models.geometry.weights import VAE_DTYPES
from gfgen.runtime.control.control import GRACE_S
from gfgen.runtime.control.flights import LOOKAHEAD_S
from gfgen.runtime.core.devices import CPU, DEVICES, Devices

logger = logging.getLogger(__name__)

Command = Callable[..., Any]

LOOKAHEAD_MS = 1e3 * LOOKAHEAD_S


class FiniteRange(click.FloatRange):
    """Refuses `nan` and `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class NamedPath(click.Path):
    """Refuses the empty path, which a script with an unset variable gives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; name a path", param, ctx)
        return super().convert(value, param, ctx)


class Duration(click.ParamType[float]):
    """Seconds, written as 30, 30s, 12h or 7d."""

    name = "duration"

    def __init__(self, *, may_be_zero: bool = False) -> None:
        self._may_be_zero = may_be_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = f"{value}s" if str(value).isdigit() else str(value)
        seconds = value if isinstance(value, float) else parse_duration(text)
        if seconds is None or (seconds == 0 and not self._may_be_zero):
            self.fail(f"{value!r}: a duration like 30s, 12h or 7d is accepted", param, ctx)
        return seconds


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
ranks_per_gpu_option = click.option(
    "--ranks-per-gpu",
    type=click.IntRange(1, MAX_RANKS),
    default=1,
    show_default=True,
    metavar="N",
    help="Let N ranks share each GPU, to try layouts of several ranks on one GPU. This is slower.",
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

grace_option = click.option(
    "--grace",
    type=Duration(may_be_zero=True),
    default=f"{GRACE_S:g}s",
    show_default=True,
    help="Time that running steps get to end by themselves when the run stops.",
)


def max_step_time_option(default: str | None) -> Callable[[Command], Command]:
    return click.option(
        "--max-step-time",
        type=Duration(),
        default=default,
        show_default=default or "no bound",
        help="Refuse a job if one of its steps is predicted to take longer.",
    )


def tell_of_graphs(ctx: click.Context, devices: Devices) -> None:
    """Log that --graphs or --no-graphs has no effect on CPU ranks."""
    if devices.kind == CPU and ctx.get_parameter_source("graphs") is ParameterSource.COMMANDLINE:
        word = "--graphs" if ctx.params["graphs"] else "--no-graphs"
        logger.info("%s has no effect on CPU ranks, which launch no kernels", word)


def rank_options(command: Command) -> Command:
    options = (
        click.option(
            "--device", type=click.Choice(DEVICES), default="auto", show_default=True,
            help="Device of the ranks. auto takes GPUs if there are any.",
        ),
        click.option("--random-weights", is_flag=True, help="Draw full-size weights at random."),
        click.option(
            "--vae-dtype", type=click.Choice(VAE_DTYPES), default="auto", show_default=True,
            help="Precision of VAEs.",
        ),
        graphs_option,
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command
