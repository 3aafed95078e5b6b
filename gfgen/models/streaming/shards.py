"""Streamed blocks that the ranks of an island keep for each other.

Each rank keeps every N-th of the shared blocks in memory that others can map: on GPUs as arenas are
(gfc/cuda/device_arena.py), on CPU ranks a file in memory. A rank copies a block from there as it does from
the host copy, on its own stream. No rank takes part in another's read, and none waits for another.

The control plane makes a board for each rank: a pair of sockets. A rank posts its shard there when it is
complete: one message with the descriptor of the memory and one end of a pipe. Only the rank's process has the
other end. Others look at the message without taking it (MSG_PEEK), which gives them descriptors of their own.
They read from a shard while the pipe of its rank is open. Otherwise they read from the host copy, which has
all blocks.

A shard never changes once it is posted, and outlives its process. CUDA frees memory when no mapping and no
reference to its handle is left, "including its shareable counterparts" (CUDA driver API, cuMemRelease), and a
file in memory is freed alike. So a read ends well although the shard's rank is killed meanwhile, and the
rank's next process posts the same memory again.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gfgen.gfc.cuda.driver import driver

logger = logging.getLogger(__name__)

Board = tuple[socket.socket, socket.socket]
PAGE_BYTES = 2 << 20
"""The granularity of device memory."""


@dataclass(frozen=True, slots=True)
class Island:
    """The ranks that keep blocks for each other."""

    boards: Sequence[Board]
    position: int
    """Of this rank among them."""


class Shard:
    """One rank's shard, as another rank or itself sees it."""

    def __init__(self, board: Board, num_bytes: int, device: torch.device) -> None:
        self._writer, self._reader = board
        self._num_bytes, self._device = num_bytes, device
        self._memory: _InMemory | _OnGpu | None = None
        self._life: int | None = None
        """The pipe of the shard's rank; of the own shard, its other end."""
        self.own: Tensor | None = None
        """The bytes of the own shard."""

    def keep(self, parts: Mapping[int, Tensor]) -> None:
        """Keep these as the own shard, by their offsets, and let others read it."""
        if posted := self._posted(flags=0):
            fd, life = posted
            os.close(life)
            self._memory = _mapped(fd, self._num_bytes, self._device)
        else:
            self._memory, fd = _created(self._num_bytes, self._device)
            for offset, part in parts.items():
                self._memory.bytes[offset : offset + len(part)].copy_(part)
            torch.cuda.synchronize(self._device) if self._device.type == "cuda" else None
        self.own = self._memory.bytes
        limit_torch(self._device, less=self._num_bytes)
        end, self._life = os.pipe()
        socket.send_fds(self._writer, [b"1"], [fd, end])
        os.close(fd)
        os.close(end)

    def read(self, offset: int, into: Tensor) -> bool:
        """Launch a copy of bytes of the shard on the present stream; False if its rank is not there."""
        if self.own is not None:
            into.copy_(self.own[offset : offset + len(into)], non_blocking=True)
        elif (memory := self._present()) is not None:
            memory.copy(offset, into)
        else:
            return False
        return True

    def close(self) -> None:
        """Unmap it; no read may be under way. The own shard is taken from its board."""
        if self.own is not None and (posted := self._posted(flags=0)):
            limit_torch(self._device, less=-self._num_bytes)
            list(map(os.close, posted))
        self.own = None
        if self._memory is not None:
            self._memory.close()
        if self._life is not None:
            os.close(self._life)

    def _present(self) -> _InMemory | _OnGpu | None:
        """The memory if the shard is posted and its rank lives."""
        if self._life is not None and _has_ended(self._life):
            os.close(self._life)
            self._life = None
            logger.warning("another rank has ended: blocks that it kept are read from main memory, or a file")
        if self._life is None and (posted := self._posted()):
            fd, life = posted
            if _has_ended(life):
                os.close(life)
            else:
                self._memory = self._memory or _mapped(fd, self._num_bytes, self._device)
                self._life = life
            os.close(fd)
        return None if self._life is None else self._memory

    def _posted(self, flags: int = socket.MSG_PEEK) -> tuple[int, int] | None:
        """What is posted: memory and pipe. Without flags it is taken."""
        flags |= socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:  # not `socket.recv_fds`, which ignores its flags before Python 3.12
            _, ancillary, _, _ = self._reader.recvmsg(1, socket.CMSG_LEN(2 * 4), flags)
        except BlockingIOError:
            return None
        memory, life = array("i", ancillary[0][2])
        return memory, life


def _has_ended(life: int) -> bool:
    """Whether the other end of a pipe is closed."""
    poll = select.poll()
    poll.register(life, 0)
    return bool(poll.poll(0))


def _created(num_bytes: int, device: torch.device) -> tuple[_InMemory | _OnGpu, int]:
    """New memory on the device, and its descriptor."""
    if device.type == "cuda":
        driver().use(device.index or 0)
        handle, _, fd = driver().shareable(device.index or 0, num_bytes)
        return _OnGpu(handle, num_bytes, device), fd
    os.ftruncate(fd := os.memfd_create("gfgen-shard", os.MFD_CLOEXEC), num_bytes)
    return _InMemory(fd, num_bytes), fd


def _mapped(fd: int, num_bytes: int, device: torch.device) -> _InMemory | _OnGpu:
    if device.type == "cuda":
        driver().use(device.index or 0)
        return _OnGpu(driver().import_shared(fd), num_bytes, device)
    return _InMemory(fd, num_bytes)


class _InMemory:
    def __init__(self, fd: int, num_bytes: int) -> None:
        self.bytes = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)

    def copy(self, offset: int, into: Tensor) -> None:
        into.copy_(self.bytes[offset : offset + len(into)])

    def close(self) -> None:
        """What computes with it keeps it."""


class _OnGpu:
    """Memory of any GPU, for copies by this one."""

    def __init__(self, handle: int, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, device
        self._address = driver().map(handle, self._num_bytes, device.index or 0)

    @property
    def bytes(self) -> Tensor:
        """Only of memory of this GPU: torch would begin to use another one."""
        from gfgen.gfc.cuda.device_endpoint import as_tensor

        return as_tensor(self._address, self._num_bytes, self._device.index or 0)

    def copy(self, offset: int, into: Tensor) -> None:
        source, stream = self._address + offset, torch.cuda.current_stream(self._device).cuda_stream
        driver().call("cuMemcpyDtoDAsync_v2", into.data_ptr(), source, len(into), stream)

    def close(self) -> None:
        driver().unmap(self._address, self._num_bytes)


def limit_torch(device: torch.device, *, less: int) -> None:
    """Let torch use that much less of a GPU, because its limit does not know of shards."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = torch.cuda.get_per_process_memory_fraction(device) - less / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, fraction)), device)
