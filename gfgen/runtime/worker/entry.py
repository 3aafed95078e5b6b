"""A worker's process, from its start to the end of its channel."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from gfgen.models.families.adapter import Adapter
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.weights import WHOLE
from gfgen.models.loading.random_weights import StoredWeights
from gfgen.models.streaming.shards import Island
from gfgen.runtime.ipc.messages import Abandoned, Channel, Loading, WorkerFailed, WorkerReady
from gfgen.runtime.ipc.settings import WorkerSettings
from gfgen.runtime.worker.device import Device
from gfgen.runtime.worker.dispatches import Dispatches
from gfgen.runtime.worker.loop import Worker
from gfgen.runtime.worker.preparing import reason_of
from gfgen.system.machine import available_bytes, give_back_freed_memory, keep_freed_memory
from gfgen.system.signals import leave_to_the_run

logger = logging.getLogger(__name__)


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    run_worker(channel_socket, settings, make_worker)


def make_worker(channel: Channel, settings: WorkerSettings) -> Worker:
    """The worker of a CPU rank, with its models."""
    load = partial(load_model, settings)
    dispatches = Dispatches(lambda numbers: channel.send(Abandoned(numbers)))
    adapters, rank, ranks = load_models(channel, settings, load), settings.rank, settings.ranks
    rate, near = ranks.link_bytes_per_s, ranks.near_to(rank)
    device = Device(rank, adapters, dispatches, load_model=load, link_bytes_per_s=rate, near=near)
    return Worker(channel, rank, device, dispatches)


def run_worker(
    channel_socket: socket.socket, settings: WorkerSettings, make: Callable[[Channel, WorkerSettings], Worker]
) -> None:
    """Run a worker that `make` sets up, until its channel ends."""
    leave_to_the_run()  # which closes the channel
    channel = Channel(channel_socket)
    started_s = time.monotonic()
    for name in ("loading", "stepping") if settings.rank else ():  # rank 0 warns of what all ranks load
        logging.getLogger(f"gfgen.models.{name}").setLevel(logging.ERROR)
    try:
        torch.set_num_threads(1)
        keep_freed_memory()
        worker = make(channel, settings)
    except Exception as error:
        logger.debug("rank %d cannot start", settings.rank, exc_info=True)
        with contextlib.suppress(ConnectionError):
            channel.send(WorkerFailed(settings.rank, reason_of(error)))
        return
    with contextlib.suppress(ConnectionError):  # the control plane is gone
        device = worker.device
        startup_s = time.monotonic() - started_s
        ready = WorkerReady(settings.rank, startup_s, device.counts_tokens, device.read_bytes_per_s)
        channel.send(ready, device.arena_fds)
        worker.serve()
    sys.stderr.flush()
    os._exit(0)  # teardown would wait for kernels that wait for other ranks


def load_models(
    channel: Channel, settings: WorkerSettings, load: Callable[[str], Adapter]
) -> dict[str, Adapter]:
    """The adapters of the rank's first models, by checkpoint."""
    adapters = {}
    for path in settings.checkpoints:
        channel.send(Loading(path))
        adapters[path] = load(path)
    return adapters


def load_model(settings: WorkerSettings, path: str, *, device: str = "cpu") -> Adapter:
    adapter = load_adapter(
        Path(path),
        device=device,
        vae_dtype=settings.ranks.vae_dtype,
        has_random_weights=settings.ranks.has_random_weights,
        trusts_code=settings.ranks.trusts_code,
        kernels=settings.ranks.kernels,
        placement=settings.ranks.placements.get(path, WHOLE),
        copy_fd=settings.host_copies[path].fileno() if path in settings.host_copies else None,
        island=_island(settings, path),
        is_kept=_is_kept(settings, path),
        quantised=settings.ranks.precision.quantised(Path(path)),
    )
    adapter.patches.keeps_on_host = path in settings.ranks.patch_copies_on_host
    adapter.patches.stored = StoredWeights(Path(path), settings.ranks.has_random_weights)
    give_back_freed_memory()
    return adapter


def _is_kept(settings: WorkerSettings, path: str) -> bool:
    """Whether main memory has a copy of all of a model, or room for what is not written yet."""
    if (lacking := settings.ranks.kept.get(path)) is None:
        return False
    lacking -= os.fstat(settings.host_copies[path].fileno()).st_blocks * 512
    if is_short := lacking > (available_bytes() or lacking):
        logger.warning("main memory has no room for a copy of %s, which comes back from its files", path)
    return not is_short


def _island(settings: WorkerSettings, path: str) -> Island | None:
    """The ranks that keep blocks of a model for each other; None if they keep none."""
    if path not in settings.boards:
        return None
    ranks = settings.ranks
    members = sorted(ranks.near_to(settings.rank) | {settings.rank})
    return Island([settings.boards[path][rank] for rank in members], members.index(settings.rank))
