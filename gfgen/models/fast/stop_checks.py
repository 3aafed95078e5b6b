"""Places where a task can stop: before each block of a transformer or text encoder, and each part of a VAE.

`install` puts a hook on these modules of unmodified diffusers and transformers models. Inside
`with watching(watch)` each of them first asks the watch; elsewhere, and on other threads, hooks do nothing.

On a GPU, Python launches a whole forward in a fraction of the device's time for it, and a stop would have
to wait for all launched work. So a `DeviceWatch` lets Python run ahead by a few blocks only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from gfgen.errors import AbortedError
from gfgen.models.parallel.parallel import held

AHEAD_S = 0.04
"""Launched work that is not done yet: enough to hide a slow launch, short enough to wait for."""
MIN_AHEAD = 2
"""Parts: one that runs and the next one, so that the device has no gap between parts."""
LONG_S = 0.25
"""If a part takes this long, the next one is not launched ahead: the gap is negligible."""


class Watch:
    """Checks whether a task is to stop. On a CPU a part is done when it returns."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self.is_stopped = is_stopped

    def check(self) -> None:
        """Raises: AbortedError if the task is to stop."""
        if self.is_stopped():
            raise AbortedError("the task was stopped")


class DeviceWatch(Watch):
    """For a stream of a device: also waits until little launched work is left on it.

    `record` returns an event that is recorded on that stream.
    """

    def __init__(self, is_stopped: Callable[[], bool], *, record: Callable[[], Any]) -> None:
        super().__init__(is_stopped)
        self._record = record
        self._marks: deque[Any] = deque()
        """One event after each part that may not be done yet, the oldest first."""
        self._last_done: Any = None
        self._part_s = 0.0
        """Moving average of the parts done."""

    def check(self) -> None:
        super().check()
        self._marks.append(self._record())
        while len(self._marks) > self._max_ahead:
            self._take_oldest()
        super().check()

    @property
    def _max_ahead(self) -> int:
        """How many marks may be pending when the next part is launched."""
        if self._part_s >= LONG_S:
            return 0
        return MIN_AHEAD - 1 if self._part_s == 0.0 else max(MIN_AHEAD, math.ceil(AHEAD_S / self._part_s)) - 1

    def _take_oldest(self) -> None:
        done = self._marks.popleft()
        done.synchronize()
        if self._last_done is not None:
            took_s = self._last_done.elapsed_time(done) / 1e3
            self._part_s = took_s if self._part_s == 0.0 else 0.75 * self._part_s + 0.25 * took_s
        self._last_done = done


# Per context and so per thread: ranks may be threads around one model.
_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


def watching(watch: Watch | None) -> AbstractContextManager[None]:
    return held(_WATCH, watch)


def install(*models: torch.nn.Module | None) -> None:
    """Put hooks on the elements of every list of modules in these models, permanently; once for each model.

    diffusers and transformers keep blocks, layers and the stages of a VAE in such lists.
    """
    for model in filter(None, models):
        for module in model.modules():
            if isinstance(module, torch.nn.ModuleList):
                for part in module.children():  # elements may be None
                    part.register_forward_pre_hook(_check)


def check() -> None:
    """Ask the present watch; for blocks that are not called as modules."""
    watch = _WATCH.get()
    if watch is not None:
        watch.check()


def _check(module: torch.nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():  # a compiled block is one part
        check()
