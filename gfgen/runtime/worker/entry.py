"""How the process of a worker starts: its settings, its models, and its life until the channel ends."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gfgen.models.families.adapter import Adapter
from gfgen.models.families.registry import load_adapter
from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.messages import Loading, WorkerFailed, WorkerReady
from gfgen.runtime.worker.loop import Worker, reason_of
from gfgen.system.allocator import give_back_freed_memory, keep_freed_memory
from gfgen.system.signals import leave_to_the_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings that a worker gets when it starts."""

    rank: int
    checkpoints: tuple[str, ...]
    device: str = "cpu"
    has_random_weights: bool = False
    vae_dtype: str = "auto"
    arena_bytes: tuple[int, int] = (0, 0)
    """For exchanges and for a chunk of a transfer, where the rank makes its own arena (`Plan`)."""
    num_threads: int = 1
    has_graphs: bool = False
    """On a GPU: whether forwards may be recorded, to be launched at once."""
    memory_limit: int | None = None
    """Bytes of its GPU that a rank may use; None for all."""
    num_gpus: int = 0
    """GPUs that the ranks use; fewer than ranks where they share them, 0 if each has its own."""
    tuned_tables: Mapping[str, str] = field(default_factory=dict)
    """On a GPU: by which all ranks choose kernels of exchanges (gfc/cuda/selector.py)."""

    @property
    def gpu(self) -> int:
        """The number of this rank's GPU."""
        return self.rank % self.num_gpus if self.num_gpus else self.rank


def run_worker(
    channel_socket: socket.socket,
    settings: WorkerSettings,
    make: Callable[[Channel, WorkerSettings], Worker],
) -> None:
    """The life of a worker that `make` sets up."""
    leave_to_the_run()  # which closes the channel
    channel = Channel(channel_socket)
    started_s = time.monotonic()
    try:
        torch.set_num_threads(settings.num_threads)
        keep_freed_memory()
        worker = make(channel, settings)
    except Exception as error:
        logger.debug("rank %d cannot start", settings.rank, exc_info=True)
        with contextlib.suppress(ConnectionError):
            channel.send(WorkerFailed(settings.rank, reason_of(error)))
        return
    with contextlib.suppress(ConnectionError):  # the control plane is gone, and no report is read any more
        device = worker.device
        ready = WorkerReady(settings.rank, time.monotonic() - started_s, device.counts_tokens)
        channel.send(ready, device.arena_fds)
        worker.serve()
        if device.runs_ahead:  # teardown would wait for kernels that wait for other ranks
            sys.stderr.flush()
            os._exit(0)


def load_models(
    channel: Channel, settings: WorkerSettings, load: Callable[[str], Adapter]
) -> dict[str, Adapter]:
    """The adapters of the models that a rank holds at first, by checkpoint."""
    adapters = {}
    for path in settings.checkpoints:
        channel.send(Loading(path))
        adapters[path] = load(path)
    return adapters


def load_model(settings: WorkerSettings, path: str, *, device: str = "cpu") -> Adapter:
    """The adapter of one model."""
    adapter = load_adapter(
        Path(path),
        device=device,
        vae_dtype=settings.vae_dtype,
        has_random_weights=settings.has_random_weights,
    )
    give_back_freed_memory()
    return adapter
