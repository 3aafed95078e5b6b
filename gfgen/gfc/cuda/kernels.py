"""The compiled kernels on one device, loaded and ready, and their launches.

The driver copies a launch's arguments before it returns, so one buffer per kind of call is reused. Converting
arguments with ctypes costs as much as the launch itself, so everything but the stream is converted once.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import Structure, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import partial
from typing import Any

from gfgen.errors import RunError
from gfgen.gfc.cuda.compiler import compiled
from gfgen.gfc.cuda.driver import MULTIPROCESSORS, SHARED_PER_BLOCK, Driver, LaunchConfig, driver
from gfgen.gfc.native import MAX_RANKS, NUM_KINDS, PlanStruct, TaskStruct, each

NUM_BANKS = 2
MAX_MOVES = 4
FLAGGED_BYTES = 1 << 20
AWAIT, COPY, PUBLISH = 1, 2, 4


class Peers(Structure):
    _fields_ = [
        *each(c_int32, "size", "own"),
        *each(c_uint32, "kind", "first_sequence"),
        *each(c_int32, "own_rank", "unused"),
        ("flagged", c_uint64),
        ("bank_offset", c_uint64 * NUM_BANKS),
        *each(c_int32 * MAX_RANKS, "layout_slot", "rank"),
        *each(c_uint64 * MAX_RANKS, "base", "inbox"),
    ]


class Edges(Structure):
    _fields_ = [
        *each(c_uint64 * MAX_RANKS, "entries", "sent", "received"),
        ("credit_tag", c_uint32 * NUM_BANKS * MAX_RANKS),
        ("broken", c_int32 * MAX_RANKS),
    ]


class Context(Structure):
    _fields_ = [
        ("plan", PlanStruct),
        ("rank", c_int32),
        ("link_mb_per_s", c_uint32),
        *each(c_uint64 * MAX_RANKS, "base", "inbox"),
        *each(c_uint64, "aborted_through", "record"),
        *each(c_uint32 * MAX_RANKS, "incarnation", "arrived"),
        *each(c_uint32, "finished", "poison_lock"),
        *each(c_uint32 * MAX_RANKS, "sent_blocks", "received_blocks"),
        ("task", TaskStruct),
        ("peers", Peers * NUM_KINDS),
        ("edges", Edges),
    ]


class Move(Structure):
    _fields_ = [
        *each(c_uint64, "input", "output"),
        *each(c_int64, "inner_bytes", "outer_stride", "first_stride", "middle_stride", "second_stride"),
        *each(c_int32, "outer", "middle", "is_concat_first", "is_split", "is_rotated", "unused"),
        *each(c_int32 * MAX_RANKS, "split_sizes", "concat_sizes"),
        ("result_offset", c_uint64 * MAX_RANKS),
    ]


class Exchange(Structure):
    _fields_ = [
        ("context", c_uint64),
        ("kind", c_uint32),
        ("num_moves", c_int32),
        *each(c_uint32, "num_slices", "num_keepers", "unit_bytes", "tile_bytes"),
        ("dense_bytes", c_uint64),
        ("moves", Move * MAX_MOVES),
    ]


class Chunk(Structure):
    _fields_ = [
        *each(c_uint64, "context", "address", "bytes", "dispatch", "timeout_ns", "chunk"),
        ("peer", c_int32),
        *each(c_uint32, "label", "steps", "link_mb_per_s"),
    ]


SIZES = tuple(ctypes.sizeof(structure) for structure in (Context, Move, Exchange, Chunk))
"""As `gfc_sizes` in the compiled kernels: other sizes mean other sources."""


NAMES = ("enter", "flagged", "flagged_dense", "exchange", "staged", "send", "recv", "restart_edge")
MAX_SHARED_BYTES = 200 << 10
"""Of one block: four stages of tiles, somewhat below the limit of sm_90. Desktop cards of compute capability
12.0 have bulk copies but only 99 KiB (CUDA C++ Programming Guide, table of compute capabilities), so threads
copy there."""


class Kernels:
    """Functions by name; `bulk` only if the device has bulk copies and shared memory for their stages."""

    def __init__(self, device: int) -> None:
        self.driver: Driver = driver()
        self.driver.use(device)
        self.num_multiprocessors = self.driver.attribute(device, MULTIPROCESSORS)
        architecture = self.driver.architecture(device)
        self._module = self.driver.load(compiled(architecture))
        found = self.driver.read_global(self._module, "gfc_sizes", 4 * len(SIZES))
        sizes = tuple(int.from_bytes(found[at : at + 4], "little") for at in range(0, len(found), 4))
        if sizes != SIZES:
            raise RunError(f"the kernels' structures are {sizes} bytes, this package's {SIZES}")
        self.functions = {name: self.driver.function(self._module, f"gfc_{name}") for name in NAMES}
        has_room = self.driver.attribute(device, SHARED_PER_BLOCK) >= MAX_SHARED_BYTES
        self.has_bulk = int(architecture.removeprefix("sm_")) >= 90 and has_room
        if self.has_bulk:
            self.functions["bulk"] = self.driver.function(self._module, "gfc_bulk")
            self.driver.allow_shared_memory(self.functions["bulk"], MAX_SHARED_BYTES)

    def __getitem__(self, name: str) -> int:
        return self.functions[name]


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
