"""Launches through the driver: one prepared argument buffer per kind of call.

The driver copies a launch's arguments before it returns, so the buffer can be reused at once. Converting
arguments with ctypes costs as much as the launch itself, so everything but the stream is converted once.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_void_p
from functools import partial
from typing import Any

from gfgen.errors import RunError
from gfgen.gfc.cuda.driver import Driver, LaunchConfig

PAIR = struct.Struct("<QQ")


class Launch:
    """A kernel with its grid and arguments; `run` enqueues it."""

    __slots__ = ("_config", "_launch", "_stream", "_values", "buffer")

    def __init__(
        self, cuda: Driver, function: int, *values: Any, grid: int, block: int, shared_bytes: int = 0
    ) -> None:
        params = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._values = (*values, params)  # kept alive: the driver reads them at each launch
        self._config = LaunchConfig(grid, 1, 1, block, 1, 1, shared_bytes)
        self._stream = 0
        self._launch = partial(
            cuda.library.cuLaunchKernelEx,
            c_void_p(ctypes.addressof(self._config)),
            c_void_p(function),
            c_void_p(ctypes.addressof(params)),
            None,
        )
        self.buffer = values[0]

    def run(self, stream: int) -> None:
        if stream != self._stream:
            self._config.stream = self._stream = stream
        status = self._launch()
        if status != 0:
            raise RunError(f"CUDA: a launch failed with error {status}")
