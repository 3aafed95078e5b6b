"""A worker whose adapters fail where a job's prompt tells them to.

"a fox | fail rank=1 step=2 times=1"    raises on that rank at that step, so many times
"a fox | short rank=1 step=2 times=1"   asks there for more memory than any machine has
"""

from __future__ import annotations

import re
import socket
from typing import Any

import torch

from gfgen.runtime import worker
from gfgen.runtime.worker import WorkerSettings

__all__ = ["WorkerSettings", "main"]


class FaultyAdapter:
    """An adapter that fails on command and does its work otherwise."""

    def __init__(self, adapter: Any, rank: int) -> None:
        self._adapter = adapter
        self._rank = rank
        self._num_failures: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def denoise(self, spec: Any, *artifacts: Any, step: int, **options: Any) -> Any:
        order = re.search(r"(fail|short) rank=(\d+) step=(\d+) times=(\d+)", spec.prompt)
        if order:
            rank, at_step, times = map(int, order.groups()[1:])
            if (rank, at_step) == (self._rank, step) and self._num_failures.get(spec.id, 0) < times:
                self._num_failures[spec.id] = self._num_failures.get(spec.id, 0) + 1
                if order[1] == "short":
                    torch.empty(2**60, dtype=torch.uint8)
                raise RuntimeError("as told by the prompt")
        return self._adapter.denoise(spec, *artifacts, step=step, **options)


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    load = worker.load_adapter

    def load_faulty(*arguments: Any, **options: Any) -> Any:
        return FaultyAdapter(load(*arguments, **options), settings.rank)

    worker.load_adapter = load_faulty
    worker.main(channel_socket, settings)
