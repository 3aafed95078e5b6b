"""Launches through the driver: one prepared argument buffer per kind of call.

The driver copies a launch's arguments before it returns, so the buffer is used again at once.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_void_p
from typing import Any

from gfgen.errors import RunError
from gfgen.gfc.cuda.driver import Driver

PAIR = struct.Struct("<QQ")


class Launch:
    """A kernel with its grid and arguments; `run` enqueues it."""

    __slots__ = ("_arguments", "_function", "_launch", "_params", "_shape", "_values", "buffer")

    def __init__(
        self, cuda: Driver, function: int, *values: Any, grid: int, block: int, shared_bytes: int = 0
    ) -> None:
        self._values = values  # kept alive: `_params` points at them
        self._params = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._function = c_void_p(function)
        self._shape = (grid, 1, 1, block, 1, 1, shared_bytes)
        self._launch = cuda.library.cuLaunchKernel
        self.buffer = values[0]

    def run(self, stream: int) -> None:
        status = self._launch(self._function, *self._shape, stream, self._params, None)
        if status != 0:
            raise RunError(f"CUDA: a launch failed with error {status}")
