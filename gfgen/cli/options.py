"""Options that several commands have."""

from __future__ import annotations

import logging

import click

from gfgen.runtime.devices import CPU, Devices

logger = logging.getLogger(__name__)

memory_option = click.option(
    "--memory",
    metavar="SIZE",
    help='Room for weights and jobs, like "40GB": of each GPU, or of main memory. [all that there is]',
)
graphs_option = click.option(
    "--graphs",
    is_flag=True,
    help="On GPUs: warm up, and launch steps as CUDA graphs where that is faster (new; docs/models.md).",
)


def tell_of_graphs(devices: Devices, *, has_graphs: bool) -> None:
    """That --graphs has no effect, where it has none."""
    if has_graphs and devices.kind == CPU:
        logger.info("--graphs has no effect on CPU ranks, which launch no kernels")
