"""A worker that fails where a job's prompt tells it to.

    "a fox | fail rank=1 step=2 times=1"     raises on that rank at that step, so many times
    "a fox | die rank=1 step=2 times=1"      kills its own process, as the kernel would
    "a fox | stop rank=1 step=2 times=1"     stops its own process: alive, and silent
    "a fox | loop rank=1 step=2 times=1"     computes for ever
    "a fox | crawl rank=1 step=2 times=1"    computes for ever in many small parts, so that it can be stopped
    "a fox | short rank=1 step=2 times=1"    asks for more memory than any machine has
    "a fox | nan rank=1 step=2 times=1"      makes latents that hold NaN

On a GPU (`gpu_main`) it is the device that computes for ever and whose memory runs out, and a process
dies with the step under way on the device.

How often it was done is counted in files, since a process that dies forgets; their folder is
named by the environment variable GFGEN_TEST_FAULTS.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gfgen.models.fast import stop_checks
from gfgen.models.streaming.turns import pause
from gfgen.runtime.ipc.settings import WorkerSettings
from gfgen.runtime.worker import entry, gpu

ORDER = re.compile(r"(fail|die|stop|loop|crawl|short|nan) rank=(\d+) step=(\d+) times=(\d+)")


class FaultyAdapter:
    """An adapter that fails on command and does its work otherwise."""

    def __init__(self, adapter: Any, rank: int, *, faults: Mapping[str, Callable[[], None]]) -> None:
        self._adapter = adapter
        self._rank = rank
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    @property
    def takes_turns(self) -> bool:
        """Where a file says so, blocks are as if they were read for each forward."""
        streams = (Path(os.environ["GFGEN_TEST_FAULTS"]) / "streams").exists()
        experts = getattr(self._adapter, "_experts", None) or [self._adapter._pipeline.transformer]
        for transformer in filter(None, experts):
            if streams and not hasattr(transformer, "has_pauses"):
                transformer.has_pauses = True
                blocks = next(each for each in transformer.modules() if isinstance(each, torch.nn.ModuleList))
                for block in blocks:
                    block.register_forward_pre_hook(_pause)
            vars(transformer)["gfgen_stream"] = object() if streams else None
        return streams

    def denoise(self, spec: Any, *artifacts: Any, step: int, **options: Any) -> Any:
        orders = self._begin(spec, step)
        result = self._adapter.denoise(spec, *artifacts, step=step, **options)
        self._end(result, orders)
        return result

    def _begin(self, spec: Any, step: int) -> list[str]:
        """Do what a prompt orders before this step; returns all its orders."""
        orders = [
            kind
            for kind, rank, at_step, times in ORDER.findall(spec.prompt)
            if (int(rank), int(at_step)) == (self._rank, step) and self._is_due(spec.id, kind, int(times))
        ]
        for kind in orders:
            if kind != "nan":
                self._faults[kind]()
        return orders

    def _end(self, result: Any, orders: list[str]) -> None:
        if "nan" in orders:
            result.tensors["sample"].view(-1)[-1] = torch.nan
        if "die" in orders:  # on a GPU, which has only been told of the step
            _die()

    def _is_due(self, job_id: str, kind: str, times: int) -> bool:
        count = Path(os.environ["GFGEN_TEST_FAULTS"]) / f"{job_id}.{kind}.{self._rank}"
        done = int(count.read_text()) if count.exists() else 0
        if done < times:
            count.write_text(str(done + 1))
        return done < times


def _pause(block: object, args: object) -> None:
    pause(block)


def _fail() -> None:
    raise RuntimeError("as told by the prompt")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _loop() -> None:
    while True:
        time.sleep(0.01)


def _crawl() -> None:
    part = torch.nn.Identity()
    stop_checks.install(torch.nn.Sequential(torch.nn.ModuleList([part])))
    while True:
        part(torch.zeros(1))
        time.sleep(0.01)


def _run_short() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def _keep_the_device_busy(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _fill_the_device() -> None:
    """As a step that is too large does: piece by piece, until there is nothing left."""
    pieces = []
    while True:
        pieces.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))


FAULTS = {
    "fail": _fail,
    "die": _die,
    "stop": _stop,
    "loop": _loop,
    "crawl": _crawl,
    "short": _run_short,
}
GPU_FAULTS = FAULTS | {
    "die": partial(_keep_the_device_busy, 10**9),
    "loop": partial(_keep_the_device_busy, 2**62),
    "short": _fill_the_device,
}


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    _load_faulty(settings.rank, FAULTS)
    entry.main(channel_socket, settings)


def gpu_main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    _load_faulty(settings.rank, GPU_FAULTS)
    gpu.main(channel_socket, settings)


def _load_faulty(rank: int, faults: Mapping[str, Callable[[], None]]) -> None:
    load = entry.load_adapter

    def load_faulty(*arguments: Any, **options: Any) -> Any:
        return FaultyAdapter(load(*arguments, **options), rank, faults=faults)

    entry.load_adapter = load_faulty
