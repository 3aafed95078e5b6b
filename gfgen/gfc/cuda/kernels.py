"""The compiled kernels on one device, loaded and ready."""

from __future__ import annotations

from gfgen.errors import RunError
from gfgen.gfc.cuda.compiler import compiled
from gfgen.gfc.cuda.driver import MULTIPROCESSORS, SHARED_PER_BLOCK, Driver, driver
from gfgen.gfc.cuda.structs import SIZES

NAMES = ("enter", "flagged", "flagged_dense", "exchange", "send", "recv", "restart_edge")
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
