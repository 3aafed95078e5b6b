"""Arenas on GPUs: memory of one rank's device that the processes of all ranks map.

Each rank makes its own and passes the file descriptor to the others (SCM_RIGHTS). Arenas are VMM
allocations: if a peer is killed while it writes, the survivors' contexts stay valid. With cudaIpc mappings
they do not (measured).

For ranks whose GPUs do not reach its own, a rank has an arena in host memory (`HostArena`). The host makes
it, and these ranks map and pin it.

Each rank also has a page in host memory that the host maps, too: the word that aborts, and the record of the
last failure. It is the header of a small CPU arena, so the host needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from gfgen.errors import RunError
from gfgen.gfc.arena import CONTROL_PLAN, Arena, ArenaPlan, map_memory
from gfgen.gfc.cuda.driver import Driver, driver
from gfgen.gfc.cuda.kernels import FLAGGED_BYTES, NUM_BANKS
from gfgen.gfc.native import MAX_RANKS, library

MIB = 1 << 20

# csrc/gfc/cpu_memory.h, struct ArenaHeader.
ABORTED_THROUGH_OFFSET, FAILURE_OFFSET, HEADER_BYTES = 128, 384, 4096
# csrc/gfc/plan.h.
SIGNALS_OFFSET, LINE_BYTES = 4096, 128


def arena_bytes(plan: ArenaPlan) -> int:
    """csrc/gfc/cuda/context.h: the plan's arena, and the inboxes of messages with flags."""
    return plan.arena_bytes + MAX_RANKS * NUM_BANKS * FLAGGED_BYTES


@dataclass(slots=True)
class DeviceArena:
    """One rank's arena as this process maps it, for kernels of one device."""

    plan: ArenaPlan
    device: int
    address: int
    num_bytes: int
    driver: Driver

    @classmethod
    def create(cls, plan: ArenaPlan, *, device: int) -> tuple[DeviceArena, int]:
        """A fresh arena on this device, and the file descriptor to hand to the other ranks."""
        cuda = driver()
        cuda.use(device)
        handle, num_bytes, fd = cuda.shareable(device, arena_bytes(plan))
        address = cuda.map(handle, num_bytes, device)
        # Inboxes with flags start with zeros; everything else is written before it is read.
        cuda.write(address + SIGNALS_OFFSET, _fresh_lines(plan))
        flagged = address + plan.arena_bytes
        cuda.call("cuMemsetD8_v2", flagged, 0, MAX_RANKS * NUM_BANKS * FLAGGED_BYTES)
        cuda.call("cuCtxSynchronize")
        return cls(plan, device, address, num_bytes, cuda), fd

    @classmethod
    def open(cls, fd: int, plan: ArenaPlan, *, device: int) -> DeviceArena:
        """Another rank's arena, for use by kernels of this device. The descriptor may be closed."""
        cuda = driver()
        cuda.use(device)
        handle = cuda.import_shared(fd)
        unit = 2 * MIB  # the granularity of device memory, which `create` rounded up to
        num_bytes = -(-arena_bytes(plan) // unit) * unit
        address = cuda.map(handle, num_bytes, device)
        return cls(plan, device, address, num_bytes, cuda)

    def open_peer(self, fd: int) -> DeviceArena:
        """Another rank's arena of the same kind."""
        return type(self).open(fd, self.plan, device=self.device)

    def close(self) -> None:
        if self.address:
            self._unmap()
            self.address = 0

    def _unmap(self) -> None:
        self.driver.unmap(self.address, self.num_bytes)


@dataclass(slots=True)
class HostArena(DeviceArena):
    """An arena in host memory (`arena.create_arena` of `arena_bytes`), pinned for kernels of one device."""

    host_address: int = 0

    @classmethod
    def open(cls, fd: int, plan: ArenaPlan, *, device: int) -> HostArena:
        cuda, num_bytes = driver(), arena_bytes(plan)
        cuda.use(device)
        host_address = map_memory(fd, num_bytes)
        try:
            address = cuda.register_host(host_address, num_bytes)
        except RunError as error:
            library().gfc_arena_unmap(host_address, num_bytes)
            raise RunError(
                f"cannot pin {num_bytes} bytes of main memory for exchanges ({error}): raise 'ulimit -l' or "
                "a container's limit of locked memory, or let no step use GPUs without peer access with "
                "--transport peer"
            ) from error
        return cls(plan, device, address, num_bytes, cuda, host_address)

    def _unmap(self) -> None:
        self.driver.call("cuMemHostUnregister", self.host_address)
        library().gfc_arena_unmap(self.host_address, self.num_bytes)


def _fresh_lines(plan: ArenaPlan) -> bytes:
    """Signal lines before the first signal: counts at their start, entries at zero."""
    entry = bytes(LINE_BYTES)
    other = plan.first_sequence.to_bytes(8, "little").ljust(LINE_BYTES, b"\0")
    return (entry * 2 + other * 6) * MAX_RANKS


class ControlPage:
    """The own rank's page in host memory, pinned for its kernels."""

    def __init__(self, fd: int, *, rank: int, incarnation: int) -> None:
        self.arena = Arena(fd, CONTROL_PLAN, rank=rank, incarnation=incarnation)
        self._driver = driver()
        address = self._driver.register_host(self.arena.address, HEADER_BYTES)
        self.aborted_through, self.record = address + ABORTED_THROUGH_OFFSET, address + FAILURE_OFFSET
        """Device addresses of the word and of the record."""
        self.failure_address = self.arena.address + FAILURE_OFFSET

    def close(self) -> None:
        if self.arena.address:
            self._driver.call("cuMemHostUnregister", self.arena.address)
            self.arena.close()
