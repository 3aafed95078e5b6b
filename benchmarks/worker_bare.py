"""Workers that also run jobs without a control plane: what a run is compared with.

A bare loop is what remains of a run when nobody schedules: each rank calls the same adapter for one task
after the other, and meets the others in each shared one. It runs in the very processes of the run beside it,
so models, memory and recorded forwards are the same.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.bare import BareTimes, RunBare
from gfgen.gfc.descriptor import Descriptor
from gfgen.layout import Layout
from gfgen.models.families.adapter import Adapter
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.runtime.ipc.messages import Channel
from gfgen.runtime.ipc.settings import WorkerSettings
from gfgen.runtime.worker import entry, gpu
from gfgen.runtime.worker.entry import run_worker
from gfgen.runtime.worker.loop import Worker

MAX_AHEAD = 2
"""So many steps are launched at once at most, as in a run."""


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    """Entry of a rank's process."""
    make_worker = entry.make_worker if settings.ranks.device == "cpu" else gpu.make_worker

    def make(channel: Channel, settings: WorkerSettings) -> Worker:
        return with_bare_loops(make_worker(channel, settings), channel, settings)

    run_worker(channel_socket, settings, make)


def with_bare_loops(worker: Worker, channel: Channel, settings: WorkerSettings) -> Worker:
    """The same worker, which also answers `RunBare`."""

    def run(message: RunBare, _: Sequence[int]) -> None:
        device, mark = worker.device, None
        if isinstance(device, gpu.GpuDevice):
            device.forwards.attach(message.checkpoint)
            mark = device.event
        adapter = device.adapters[message.checkpoint]
        loop = BareLoop(message, adapter, settings.rank, device.endpoint, wait=device.drain, mark=mark)
        worker.last_number = message.last_number
        channel.send(loop.run())

    worker.on_main[RunBare] = run
    return worker


@dataclass(slots=True)
class BareLoop:
    """Some equal jobs one after the other, as one rank sees them."""

    message: RunBare
    adapter: Adapter
    rank: int
    endpoint: Any
    wait: Callable[[], None]
    """Until nothing is under way."""
    mark: Callable[[], torch.cuda.Event] | None = None
    """What has been launched so far, on a device to which launching is not computing."""

    @torch.no_grad()
    def run(self) -> BareTimes:
        """The seconds of each job, and of its steps."""
        num_tasks, first = len(self.message.layouts), self.message.first_number
        times = [self._run_job(first + number * num_tasks) for number in range(self.message.num_jobs)]
        return BareTimes(tuple([whole_s for whole_s, _ in times]), tuple([steps_s for _, steps_s in times]))

    def _run_job(self, first_number: int) -> tuple[float, float]:
        """Seconds of a job, and of its steps; the clock runs from when all of its ranks have come."""
        spec, layouts = self.message.spec, self.message.layouts
        widest = max(layouts, key=lambda layout: layout.degree)
        if self.rank in widest.ranks:  # else others' first step would last as long as a decode on one rank
            self._meet(first_number, widest)
        self.wait()
        times = [time.monotonic()]
        prompt = self.adapter.encode(spec)
        condition, latents = self.adapter.prepare(spec, prompt)
        self.wait()
        times.append(time.monotonic())
        marks: deque[torch.cuda.Event] = deque()
        for step, layout in enumerate(layouts[2:-1]):
            if self.rank in layout.ranks:
                parallel = self._meet(first_number + 2 + step, layout)
                latents = self.adapter.denoise(spec, prompt, condition, latents, step=step, parallel=parallel)
                self._keep_pace(marks)
        self.wait()
        times.append(time.monotonic())
        if self.rank in layouts[-1].ranks:
            self.adapter.decode(
                spec, latents, parallel=self._meet(first_number + len(layouts) - 1, layouts[-1])
            )
        self.wait()
        times.append(time.monotonic())
        return times[3] - times[0], times[2] - times[1]

    def _meet(self, number: int, layout: Layout) -> Parallel | None:
        if layout.degree == 1:
            return None
        incarnations = tuple([self.message.incarnations[rank] for rank in layout.ranks])
        group = self.endpoint.group(Descriptor(number, layout, incarnations))
        group.enter()
        return parallel_from(group)

    def _keep_pace(self, marks: deque[torch.cuda.Event]) -> None:
        if self.mark is None:
            return
        marks.append(self.mark())
        if len(marks) >= MAX_AHEAD:
            marks.popleft().synchronize()
