"""A rank on the CPU: a task has ended when its call returns."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial

import torch

from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.endpoint import Endpoint
from gfgen.models.families.adapter import Fields
from gfgen.models.fast import stop_checks
from gfgen.models.parallel.parallel import parallel_from
from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.messages import Abandoned, Arenas, RunTask
from gfgen.runtime.ipc.settings import WorkerSettings
from gfgen.runtime.worker.device import Device, RankTask, Run, execute, execute_batch, meet
from gfgen.runtime.worker.dispatches import Dispatches
from gfgen.runtime.worker.entry import load_model, load_models, run_worker
from gfgen.runtime.worker.jobs import Outline, copied, receive_state, store_bytes, sum_of
from gfgen.runtime.worker.loop import Worker


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    """Entry of a CPU rank's process."""
    run_worker(channel_socket, settings, make_worker)


def make_worker(channel: Channel, settings: WorkerSettings) -> Worker:
    """The worker of a CPU rank, with its models."""
    load = partial(load_model, settings)
    dispatches = Dispatches(lambda numbers: channel.send(Abandoned(numbers)))
    device = HostDevice(settings.rank, load_models(channel, settings, load), dispatches, load_model=load)
    return Worker(channel, settings.rank, device, dispatches)


class HostDevice(Device):
    """Computes in main memory, where arenas are shared memory."""

    def connect(self, message: Arenas, fds: Sequence[int]) -> None:
        self.endpoint = Endpoint(
            ArenaPlan(message.data_bytes, message.post_bytes),
            rank=self._rank,
            fds=dict(zip(message.ranks, fds, strict=True)),
            incarnations=dict(enumerate(message.incarnations)),
        )

    def take_in(self, fields: Fields) -> Fields:
        return copied(fields)

    def _receive(self, message: RunTask, outline: Outline) -> Fields:
        return receive_state(self.endpoint, message.transfers, outline, dispatch=message.number)

    def run(self, work: RankTask) -> Run:
        arrived_s = time.monotonic()
        group = meet(self.endpoint, work.message)
        started_s = time.monotonic()
        with stop_checks.watching(stop_checks.Watch(partial(self._dispatches.is_void, work.number))):
            made = execute(self.adapters, work, None if group is None else parallel_from(group))
        return Run(made, sum_of(made), started_s, waited_s=started_s - arrived_s)

    def run_batch(self, works: Sequence[RankTask]) -> list[Run]:
        began_s = time.monotonic()
        numbers = [work.number for work in works]
        with stop_checks.watching(stop_checks.Watch(lambda: all(map(self._dispatches.is_void, numbers)))):
            made = execute_batch(self.adapters, works)
        runs = [Run(each, sum_of(each)) for each in made]
        share_s = (time.monotonic() - began_s) / len(runs)
        for idx, run in enumerate(runs):
            run.started_s, run.ended_s = began_s + idx * share_s, began_s + (idx + 1) * share_s
        return runs

    def store(self, tensor: torch.Tensor, place: memoryview) -> None:
        store_bytes(tensor, place)

    def store_rows(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(rows)
