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
from typing import Protocol

import torch
from torch import Tensor

from gfgen.errors import RunError
from gfgen.gfc.cuda.driver import driver

logger = logging.getLogger(__name__)

Sockets = tuple[socket.socket, socket.socket]
_TOKEN_BYTES = 16
_UNIT = 2 << 20
"""The granularity of device memory."""


@dataclass(frozen=True, slots=True)
class Island:
    """The ranks that keep blocks for each other."""

    boards: Sequence[Sockets]
    position: int
    """Of this rank among them."""

    def shards(self, sizes: Sequence[int], device: torch.device) -> Sequence[Shard]:
        """One for each rank."""
        return [Shard(board, size, device) for board, size in zip(self.boards, sizes, strict=True)]


class Shard:
    """One rank's shard as another sees it, or the rank itself."""

    def __init__(self, board: Sockets, num_bytes: int, device: torch.device) -> None:
        self._writer, self._reader = board
        self._num_bytes, self._device = num_bytes, device
        self._memory: _Memory | None = None
        self._life: int | None = None
        """The pipe of the shard's rank; of the own shard, its other end."""
        self._may_map = True
        self.own: Tensor | None = None
        """The bytes of the own shard."""

    def keep(self, parts: Mapping[int, Tensor]) -> None:
        """Keep these as the own shard, by their offsets, and let others read it."""
        if (posted := self._posted()) is None:
            self._memory, fd = _created(self._num_bytes, self._device)
            self.own = self._memory.bytes()
            for offset, part in parts.items():
                self.own[offset : offset + len(part)].copy_(part)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        else:
            _, fd, life = posted
            os.close(life)
            self._memory = _mapped(fd, self._num_bytes, self._device)
            self.own = self._memory.bytes()
        _limit(self._device, less=self._num_bytes)
        end, self._life = os.pipe()
        socket.send_fds(self._writer, [new := os.urandom(_TOKEN_BYTES)], [fd, end])
        os.close(fd)
        os.close(end)
        self._take_posts(until=new)

    def read(self, offset: int, into: Tensor) -> bool:
        """Launch a copy of bytes of the shard on the present stream; False if its rank is not there."""
        if self.own is not None:
            into.copy_(self.own[offset : offset + len(into)], non_blocking=True)
            return True
        if not self._is_there():
            return False
        assert self._memory is not None
        self._memory.copy(offset, into)
        return True

    def close(self) -> None:
        """Unmap it; no read may be under way. The own shard is taken from its board."""
        if self.own is not None:
            self._take_posts()
            _limit(self._device, less=-self._num_bytes)
        self.own = None
        if self._memory is not None:
            self._memory.close()
        if self._life is not None:
            os.close(self._life)

    def _is_there(self) -> bool:
        if self._life is not None:
            if not _has_ended(self._life):
                return True
            os.close(self._life)
            self._life = None
            logger.warning("another rank has ended: blocks that it kept are read from main memory")
        if not self._may_map or (posted := self._posted()) is None:
            return False
        _, fd, life = posted
        try:
            if _has_ended(life):
                os.close(life)
                return False
            self._life = life
            if self._memory is None:
                self._memory = _mapped(fd, self._num_bytes, self._device)
            return True
        except RunError as error:
            self._may_map = False
            logger.warning("blocks of another GPU cannot be mapped (%s): main memory is read", error)
            return False
        finally:
            os.close(fd)

    def _posted(self, flags: int = socket.MSG_PEEK) -> tuple[bytes, int, int] | None:
        """Token, memory and pipe of the oldest post."""
        flags |= socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:  # not `socket.recv_fds`, which ignores its flags before Python 3.12
            token, ancillary, _, _ = self._reader.recvmsg(_TOKEN_BYTES, socket.CMSG_LEN(2 * 4), flags)
        except BlockingIOError:
            return None
        memory, life = array("i", ancillary[0][2])
        return token, memory, life

    def _take_posts(self, *, until: bytes = b"") -> None:
        """Take those that were posted before this one."""
        is_older = True
        while is_older and (posted := self._posted()) is not None:
            is_older = posted[0] != until
            taken = self._posted(0) if is_older else None
            for fd in (*posted[1:], *(taken or ())[1:]):
                os.close(fd)


def _has_ended(life: int) -> bool:
    """Whether the other end of a pipe is closed."""
    poll = select.poll()
    poll.register(life, 0)
    return bool(poll.poll(0))


class _Memory(Protocol):
    """A shard's memory, mapped into this process."""

    def bytes(self) -> Tensor: ...

    def copy(self, offset: int, into: Tensor) -> None: ...

    def close(self) -> None: ...


def _created(num_bytes: int, device: torch.device) -> tuple[_Memory, int]:
    """New memory on the device, and its descriptor."""
    if device.type == "cuda":
        driver().use(device.index or 0)
        handle, _, fd = driver().shareable(device.index or 0, num_bytes)
        return _OnGpu(handle, num_bytes, device), fd
    os.ftruncate(fd := os.memfd_create("gfgen-shard", os.MFD_CLOEXEC), num_bytes)
    return _InMemory(fd, num_bytes), fd


def _mapped(fd: int, num_bytes: int, device: torch.device) -> _Memory:
    if device.type == "cuda":
        driver().use(device.index or 0)
        return _OnGpu(driver().import_shared(fd), num_bytes, device)
    return _InMemory(fd, num_bytes)


class _InMemory:
    def __init__(self, fd: int, num_bytes: int) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)

    def bytes(self) -> Tensor:
        return self._bytes

    def copy(self, offset: int, into: Tensor) -> None:
        into.copy_(self._bytes[offset : offset + len(into)])

    def close(self) -> None:
        """What computes with it keeps it."""


class _OnGpu:
    """Any GPU's memory, for copies by this one."""

    def __init__(self, handle: int, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = -(-num_bytes // _UNIT) * _UNIT, device
        self._address = driver().map(handle, self._num_bytes, device.index or 0)
        driver().call("cuMemRelease", handle)  # the mapping keeps the memory

    def bytes(self) -> Tensor:
        from gfgen.gfc.cuda.device_endpoint import as_tensor

        return as_tensor(self._address, self._num_bytes, self._device.index or 0)

    def copy(self, offset: int, into: Tensor) -> None:
        # Not as a tensor: torch would begin to use the other GPU.
        stream = torch.cuda.current_stream(self._device).cuda_stream
        source = self._address + offset
        driver().call("cuMemcpyDtoDAsync_v2", into.data_ptr(), source, len(into), stream)

    def close(self) -> None:
        driver().unmap(self._address, self._num_bytes)


def _limit(device: torch.device, *, less: int) -> None:
    """Let torch use that much less of a GPU, because its limit does not know of shards."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = torch.cuda.get_per_process_memory_fraction(device) - less / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, fraction)), device)
