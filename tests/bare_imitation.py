"""A GPU rank's worker on a CPU (gpu_worker_imitation.py) that runs bare loops, too."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

from gpu_worker_imitation import ImitationRecorder, ImitationWorker, imitate_cuda

from benchmarks.worker_bare import BareGpuWorker
from gfgen.gfc.arena import Plan
from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.worker.host import Worker, WorkerSettings, load, load_model, run_worker

__all__ = ["WorkerSettings", "main"]


class BareImitation(BareGpuWorker, ImitationWorker):
    """First what bare loops add, then the imitation, then the worker that is imitated."""

    def __init__(self, *arguments: Any) -> None:
        ImitationWorker.__init__(self, *arguments)


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    def make(channel: Channel) -> Worker:
        imitate_cuda()

        adapters = load(settings, channel=channel)
        load_more = partial(load_model, settings)
        worker = BareImitation(channel, settings.rank, adapters, Plan(*settings.arena_bytes), load_more)
        worker.set_up_forwards(ImitationRecorder(), may_record=settings.has_graphs)
        return worker

    run_worker(channel_socket, settings, make)
