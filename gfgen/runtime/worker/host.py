"""A rank on the CPU: a task has ended when its call returns."""

from __future__ import annotations

import contextlib
import gc
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.endpoint import Endpoint
from gfgen.models.families.adapter import Adapter, Fields
from gfgen.models.fast import stop_checks
from gfgen.models.parallel.parallel import parallel_from
from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.messages import Abandoned, Arenas, MemoryUse, RunTask, SendState, WarmUp
from gfgen.runtime.ipc.settings import WorkerSettings
from gfgen.runtime.worker.device import RankTask, Run, bring_input, execute, meet
from gfgen.runtime.worker.dispatches import Dispatches
from gfgen.runtime.worker.entry import load_model, load_models, run_worker
from gfgen.runtime.worker.jobs import (
    Outline,
    Shipment,
    copied,
    receive_state,
    send_state,
    store_bytes,
    sum_of,
)
from gfgen.runtime.worker.loop import Worker
from gfgen.system.allocator import give_back_freed_memory


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    """Entry of a CPU rank's process."""
    run_worker(channel_socket, settings, make_worker)


def make_worker(channel: Channel, settings: WorkerSettings) -> Worker:
    """The worker of a CPU rank, with its models."""
    load = partial(load_model, settings)
    dispatches = Dispatches(lambda numbers: channel.send(Abandoned(numbers)))
    device = HostDevice(settings.rank, load_models(channel, settings, load), dispatches, load_model=load)
    return Worker(channel, settings.rank, device, dispatches)


class HostDevice:
    """A `Device` that computes in main memory, where arenas are shared memory."""

    runs_ahead = False
    arena_fds: tuple[int, ...] = ()
    counts_tokens = False

    def __init__(
        self,
        rank: int,
        adapters: dict[str, Adapter],
        dispatches: Dispatches,
        *,
        load_model: Callable[[str], Adapter],
    ) -> None:
        self.adapters = adapters
        self.endpoint: Any = None
        self._rank = rank
        self._dispatches = dispatches
        self._load_model = load_model

    def use(self, thread: str) -> None: ...

    def connect(self, message: Arenas, fds: Sequence[int]) -> None:
        self.endpoint = Endpoint(
            ArenaPlan(message.data_bytes, message.post_bytes),
            rank=self._rank,
            fds=dict(zip(message.ranks, fds, strict=True)),
            incarnations=dict(enumerate(message.incarnations)),
        )

    def load(self, path: str) -> None:
        self.adapters[path] = self._load_model(path)

    def drop(self, paths: Sequence[str]) -> None:
        drop_models(self.adapters, paths)

    def warm_up(self, message: WarmUp) -> None:
        """There is nothing to load."""

    def take_in(self, fields: Fields) -> Fields:
        return copied(fields)

    def fetch(self, work: RankTask) -> None:
        bring_input(work, self._receive, is_void=partial(self._dispatches.is_void, work.number))

    def _receive(self, message: RunTask, outline: Outline) -> Fields:
        return receive_state(self.endpoint, message.transfers, outline, dispatch=message.number)

    def run(self, work: RankTask) -> Run:
        arrived_s = time.monotonic()
        group = meet(self.endpoint, work.message)
        started_s = time.monotonic()
        with stop_checks.watching(stop_checks.Watch(partial(self._dispatches.is_void, work.number))):
            made = execute(self.adapters, work, None if group is None else parallel_from(group))
        return Run(made, sum_of(made), started_s, waited_s=started_s - arrived_s)

    def finish(self, run: Run) -> None: ...

    def store(self, tensor: torch.Tensor, place: memoryview) -> None:
        store_bytes(tensor, place)

    def store_rows(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(rows)

    def send(self, shipment: Shipment, message: SendState) -> None:
        send_state(self.endpoint, shipment.fields, message.transfers, dispatch=message.number)

    def await_sent(self, message: SendState) -> None: ...

    def drain(self) -> None: ...

    def memory_use(self) -> MemoryUse:
        return MemoryUse(peak_host_bytes())

    def forget_peaks(self) -> None:
        reset_host_peak()

    def note_shortage(self) -> None: ...

    def exit_if_lost(self, error: BaseException) -> None: ...


def drop_models(adapters: dict[str, Adapter], paths: Sequence[str]) -> None:
    """Release models and their main memory."""
    for path in paths:
        del adapters[path]
    gc.collect()
    give_back_freed_memory()


def peak_host_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Peak of this process's main memory; 0 where the system does not report it."""
    with contextlib.suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_host_peak() -> None:
    """Reset the peak of `peak_host_bytes`, where the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
