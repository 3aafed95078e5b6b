"""A GPU rank's worker on a CPU (gpu_worker_imitation.py) that runs bare loops, too."""

from __future__ import annotations

import socket
from functools import partial

from gpu_worker_imitation import imitate_cuda, imitation_worker

from benchmarks.worker_bare import with_bare_loops
from gfgen.runtime.ipc.messages import Channel
from gfgen.runtime.ipc.settings import WorkerSettings
from gfgen.runtime.worker.entry import load_model, run_worker
from gfgen.runtime.worker.loop import Worker


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    def make(channel: Channel, settings: WorkerSettings) -> Worker:
        imitate_cuda()
        load = partial(load_model, settings)
        worker = imitation_worker(channel, settings, load, may_record=settings.ranks.has_graphs)
        return with_bare_loops(worker, channel, settings)

    run_worker(channel_socket, settings, make)
