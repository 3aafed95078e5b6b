"""Host memory with the streamed blocks of a model, which the ranks of a machine share.

The control plane makes one file in memory for each model (processes/pool.py), and every rank maps it. Ranks
load the same weights and lay them out alike, so whoever comes first fills a region. The file begins with a
mark for each region: 1 when it is filled. A rank holds a lock on the mark while it fills the region. The
kernel takes the lock from a rank that dies, and the next one fills the region again.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

from gfgen.errors import RunError
from gfgen.gfc.cuda.driver import driver

logger = logging.getLogger(__name__)

_MARKS_BYTES = 1 << 16
"""One for each region."""
_PAGE = 4096
"""Regions begin at pages, which are what can be pinned."""


class HostCopy:
    """The copy as one rank sees it. Regions are taken in the same order by every rank."""

    def __init__(self, fd: int, device: torch.device, *, is_on_disk: bool = False) -> None:
        self._fd = os.dup(fd)
        self._file = mmap.mmap(fd, os.fstat(fd).st_size)
        self._num_regions, self._end = 0, _MARKS_BYTES
        self._may_pin = device.type == "cuda" and not is_on_disk
        if device.type == "cuda":
            driver().use(device.index or 0)
        self._pinned: list[Tensor] = []

    def region(self, num_bytes: int, fill: Callable[[Tensor], None]) -> Tensor:
        """The next region, with what `fill` writes there unless another rank has written it."""
        idx, start = self._num_regions, self._end
        self._num_regions, self._end = idx + 1, start + -(-num_bytes // _PAGE) * _PAGE
        assert idx < _MARKS_BYTES, "more blocks than marks"
        assert self._end <= len(self._file), "the copy is too small"
        region = torch.frombuffer(self._file, dtype=torch.uint8, count=num_bytes, offset=start)
        self._pin(region)
        # A rank that hangs with the lock is killed, as others that do not start (processes/child.py).
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, idx)
        try:
            if not self._file[idx]:
                fill(region)
                self._file[idx] = 1
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, idx)
        return region

    def close(self) -> None:
        """Unpin it; nothing may read it any more. The file's memory stays for other ranks."""
        for region in self._pinned:
            driver().call("cuMemHostUnregister", region.data_ptr())
        os.close(self._fd)

    def _pin(self, region: Tensor) -> None:
        if not self._may_pin:
            return
        try:
            driver().register_host(region.data_ptr(), region.nbytes)
            self._pinned.append(region)
        except RunError as error:
            self._may_pin = False
            text = "the system pins no more memory (%s), so reads of other weights take about twice as long: "
            text += "raise 'ulimit -l' or, of a container, its limits of locked and shared memory"
            logger.warning(text, error)
