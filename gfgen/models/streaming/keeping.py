"""Models that leave their device and come back, where not all models of a run fit together.

When such a model has been loaded, all of it goes to the host copy, which ranks share, and comes back from
there: now, and whenever it has left. It stays in its rank's process as it is, fused and quantised. On a GPU
its addresses stay reserved while it is away, and new memory is mapped there when it comes back. So recorded
forwards stay valid.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gfgen.gfc.cuda.driver import driver
from gfgen.models.geometry.weights import block_name
from gfgen.models.streaming.host_copy import HostCopy
from gfgen.models.streaming.placing import moved_to, point_to, tensors_of
from gfgen.models.streaming.shards import PAGE_BYTES, limit_torch


class Kept:
    """The weights of a pipeline, on its device or away."""

    def __init__(self, pipeline: Any, copy: HostCopy, device: torch.device) -> None:
        models = [each for each in pipeline.components.values() if isinstance(each, nn.Module)]
        parts = [tensors for model in models for tensors in _parts_of(model, device)]
        self._parts = [(tensors, moved_to(copy, tensors)) for tensors in parts]
        self.pages = _Pages(sum(len(region) for _, region in self._parts), device)
        weakref.finalize(self, _close, self.pages, copy).atexit = False
        self.come_back()

    def leave(self) -> None:
        """Give the device's memory back; nothing may compute with it."""
        for tensors, region in self._parts:
            point_to(region, tensors)
        self.pages.give_back()

    def come_back(self) -> None:
        """Enqueue copies of all weights to the device."""
        left = self.pages.take()
        for tensors, region in self._parts:
            place, left = left[: len(region)], left[len(region) :]
            place.copy_(region, non_blocking=True)
            point_to(place, tensors)


def _parts_of(model: nn.Module, device: torch.device) -> Iterator[list[Tensor]]:
    """A model's tensors on the device: those of each block, and the others."""
    blocks = [module for name, module in model.named_modules() if name and block_name(name) == name]
    inside = {module for block in blocks for module in block.modules()}
    rest = [module for module in model.modules() if module not in inside]
    for modules in (*(block.modules() for block in blocks), rest):
        if found := [each for each in tensors_of(modules) if each.device.type == device.type]:
            yield found


class _Pages:
    """Memory of a device. A GPU's has the same addresses each time that it is taken."""

    num_bytes = 0
    """What is taken of a GPU now, which torch does not know."""
    address: int | None = None

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.size, self._device = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, device

    def take(self) -> Tensor:
        if self._device.type != "cuda":
            return torch.empty(self.size, dtype=torch.uint8)
        from gfgen.gfc.cuda.device_endpoint import as_tensor

        torch.cuda.empty_cache()  # of what was there before
        device = self._device.index or 0
        handle, num_bytes, fd = driver().shareable(device, self.size)
        os.close(fd)
        self.address = driver().map(handle, self.size, device, at=self.address)
        self.num_bytes = num_bytes
        limit_torch(self._device, less=self.size)
        return as_tensor(self.address, self.size, device)

    def give_back(self) -> None:
        if self.num_bytes:
            torch.cuda.synchronize(self._device)
            driver().call("cuMemUnmap", self.address, self.size)
            limit_torch(self._device, less=-self.size)
        self.num_bytes = 0


def _close(pages: _Pages, copy: HostCopy) -> None:
    pages.give_back()
    if pages.address is not None:
        driver().call("cuMemAddressFree", pages.address, pages.size)
    copy.close()
