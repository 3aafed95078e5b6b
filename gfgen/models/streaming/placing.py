"""Puts the blocks of a model where its placement says, one after the other as they become final.

A model with streamed blocks is larger than its device. So its components are loaded to host memory, or onto
`meta` where weights are drawn, and each block is brought to the device for its last changes (fused, in 8
bits). Then a block that is streamed goes to the host copy, and the others stay. The device holds one block
more than in the end, at most.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from gfgen.gfc.cuda.driver import driver
from gfgen.models.geometry.weights import TEXT_ENCODER, WHOLE, Placement, block_key, block_name
from gfgen.models.streaming.host_copy import HostCopy
from gfgen.models.streaming.shards import PAGE_BYTES, Island, Shard, limit_torch
from gfgen.models.streaming.stream import Block, Buffer, Chain, Lane

logger = logging.getLogger(__name__)

_ATTRIBUTE = "gfgen_placing"
"""Of all modules of a model that is being placed."""
_ALIGNMENT = 512
"""As torch aligns tensors on GPUs: libraries choose kernels by the alignment, and so bits."""
_FILE_ALIGNMENT = 16
"""Weights mapped from a file may be aligned to less, and keep that: MKL's small products round by it."""
_MEASURED_BYTES, _MEASURED_COPIES, _MEASURED_S = 1 << 27, 4, 0.04
"""A copy takes 3 ms at 50 GB/s, and 30 ms at the 4 GB/s of memory that is not pinned."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where a block belongs."""

    component: str
    key: str
    is_streamed: bool
    is_final: bool = False
    region: Tensor | None = None
    """Of a streamed block that is final: its bytes in the host copy."""


class Placing:
    """Places the blocks of one model."""

    def __init__(
        self,
        placement: Placement = WHOLE,
        *,
        device: torch.device | None = None,
        copy_fd: int | None = None,
        brought: Collection[str] = (),
        island: Island | None = None,
    ) -> None:
        """copy_fd: the file for streamed blocks, which ranks share; None makes one. brought: components that
        are brought block by block although none of them is streamed. island: ranks that keep blocks for each
        other; None reads them from the host copy."""
        self._placement = placement
        self._device = device or torch.device("cpu")
        self._brought = brought
        self._island = island
        self._copy: HostCopy | None = None
        if placement.streamed:
            fd = placement.new_copy() if copy_fd is None else copy_fd
            self._copy = HostCopy(fd, self._device, is_on_disk=placement.is_on_disk)
            if copy_fd is None:
                os.close(fd)
        self._models: dict[str, nn.Module] = {}
        self._origins = WeakKeyDictionary[nn.Module, tuple[str, Callable[[Tensor], Any]]]()
        """Names and values of parts; what a fused or quantised block replaces must not stay on the device."""
        self._places: dict[nn.Module, _Place] = {}

    def takes(self, component: str) -> bool:
        """Whether to load a component without its weights on the device, and give it to `begin`."""
        return component in self._placement.streamed or component in self._brought

    def begin(
        self, component: str, model: nn.Module, draw: Callable[[str, Tensor], Tensor] | None = None
    ) -> None:
        """Bring all of a component but its blocks to the device.

        draw: gives values to parameters without memory, by their name in the component.
        """
        self._models[component] = model
        streamed = self._placement.streamed.get(component, frozenset())
        names: dict[Tensor, str] = {tensor: name for name, tensor in model.named_parameters() if draw}
        tied = WeakValueDictionary[Tensor, Tensor]()

        def drawn(tensor: Tensor) -> Any:
            found = tied.get(tensor)
            if found is None and draw is not None:
                found = tied[tensor] = draw(names[tensor], tensor)
            return found

        inside = set[nn.Module]()
        for name, module in model.named_modules():
            self._origins[module] = name, drawn
            vars(module)[_ATTRIBUTE] = self
            if (key := block_key(name)) is not None and block_name(name) == name:
                self._places[module] = _Place(component, key, key in streamed)
                inside.update(module.modules())
        for module in model.modules():
            if module not in inside:
                self._bring(module)

    def bring(self, part: nn.Module) -> None:
        """Bring a part of a block to the device, where it stays if it leaves the block."""
        for module in part.modules():
            self._bring(module)

    @contextmanager
    def final(self, block: nn.Module) -> Iterator[None]:
        """Around the last changes of a block; inside, it is on the device."""
        place = self._places.get(block)
        if place is None or place.is_final:
            yield
            return
        self.bring(block)
        yield
        place.is_final = True
        if place.is_streamed:
            assert self._copy is not None
            place.region = moved_to(self._copy, tensors_of(block.modules()))

    def finish(self) -> None:
        """Place the blocks that are left, and let forwards stream."""
        for block in list(self._places):
            with self.final(block):
                pass
        for module in self._origins:
            vars(module).pop(_ATTRIBUTE)
        if self._copy is None:
            return
        regions = {block: place.region for block, place in self._places.items() if place.region is not None}
        torch.cuda.empty_cache()  # blocks came to this stream's memory, and tasks have another stream
        shards = self._keep_shard(regions)
        size = max(map(len, regions.values()), default=0)
        buffers = [Buffer(size, self._device) for _ in range(self._placement.num_buffers)]
        lane = Lane(self._device, self._copy, buffers, list({shard for shard, _ in shards.values()}))
        for component, model in self._models.items():
            modules = [block for block in regions if self._places[block].component == component]
            found = {self._places[block].key for block in modules}
            if lacking := self._placement.streamed.get(component, frozenset()) - found:
                logger.warning("%s lacks the blocks %s, so GPUs hold more", component, sorted(lacking))
            blocks = {
                self._origins[each][0]: Block(regions[each], partial(_point, each), *shards.get(each, ()))
                for each in modules
            }
            wraps = TEXT_ENCODER.fullmatch(component) is None
            Chain(blocks, lane, wraps=wraps).attach(model, modules)

    def read_rate(self) -> float:
        """Bytes per second that the device reads of the host copy, the best of a few copies; 0 on a CPU."""
        regions = [place.region for place in self._places.values() if place.region is not None]
        if not regions or self._device.type != "cuda" or self._placement.is_on_disk:
            return 0.0
        source, lasted_s = max(regions, key=len)[:_MEASURED_BYTES], list[float]()
        target = torch.empty_like(source, device=self._device)
        while len(lasted_s) < _MEASURED_COPIES and sum(lasted_s) < _MEASURED_S:
            began_s = time.perf_counter()
            target.copy_(source)  # returns when it is done
            lasted_s.append(time.perf_counter() - began_s)
        del target
        torch.cuda.empty_cache()  # tasks have another stream, and could not use it
        return len(source) / min(lasted_s)

    def _keep_shard(self, regions: Mapping[nn.Module, Tensor]) -> Mapping[nn.Module, tuple[Shard, int]]:
        """Fill this rank's shard; returns where each shared block is. Every rank finds the same places."""
        if self._island is None:
            return {}
        places, shared = self._places, self._placement.shared
        modules = [each for each in regions if places[each].key in shared.get(places[each].component, ())]
        modules.sort(key=lambda each: places[each].component)  # as geometry/weights.py counts them
        ends, offsets = [0] * len(self._island.boards), dict[nn.Module, tuple[int, int]]()
        for idx, module in enumerate(modules):
            owner = idx % len(ends)
            offsets[module] = owner, ends[owner]
            ends[owner] += len(regions[module])
        boards, position = self._island.boards, self._island.position
        shards = [Shard(board, size, self._device) for board, size in zip(boards, ends, strict=True)]
        if ends[position]:
            own = {at: regions[module] for module, (owner, at) in offsets.items() if owner == position}
            shards[position].keep(own)
        return {module: (shards[owner], at) for module, (owner, at) in offsets.items()}

    def _bring(self, module: nn.Module) -> None:
        """Bring a module's own tensors; those of modules that others made are there already."""
        if module not in self._origins:
            return
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or tensor.device == self._device:
                    continue
                if tensor.is_meta:
                    table[name] = self._origins[module][1](tensor)
                else:
                    tensor.data = tensor.data.to(self._device)


IN_PLACE = Placing()
"""Of models that are loaded where they stay."""


def placing_of(module: nn.Module) -> Placing:
    """To which a model or a part of it was given, until it has finished."""
    return cast(Placing, vars(module).get(_ATTRIBUTE, IN_PLACE))


def moved_to(copy: HostCopy, tensors: Sequence[Tensor]) -> Tensor:
    """Move tensors to the next region of a host copy, which is returned."""
    places, num_bytes = _layout(tensors)

    def fill(region: Tensor) -> None:
        for tensor, offset in places:
            _part(region, offset, like=tensor).copy_(tensor.detach())

    region = copy.region(num_bytes, fill)
    point_to(region, tensors)
    return region


def point_to(at: Tensor, tensors: Sequence[Tensor]) -> None:
    """Let tensors be parts of these bytes, in which they are laid out."""
    for tensor, offset in _layout(tensors)[0]:
        tensor.data = _part(at, offset, like=tensor)


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """All that modules compute with; layers that are no submodules are joined ones (fast/linears.py)."""
    found: dict[int, Tensor] = {}
    for module in modules:
        hidden = [each for each in vars(module).values() if isinstance(each, nn.Linear)]
        for each in (module, *hidden):
            for tensor in (*each._parameters.values(), *each._buffers.values()):
                if tensor is not None and tensor.numel():
                    found[id(tensor)] = tensor
    return list(found.values())


def _layout(tensors: Iterable[Tensor]) -> tuple[list[tuple[Tensor, int]], int]:
    """Where these tensors begin in their region, and the length of the region.

    Those that are parts of others, as of joined layers, are parts of them there. Larger ones come first, so
    that these are known. The order does not depend on addresses, which differ between ranks.
    """
    found, spans, end = list[tuple[Tensor, int]](), list[tuple[int, int, int]](), 0
    for tensor in sorted(tensors, key=_extent, reverse=True):
        start, stop = tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)
        shared = (at + start - first for first, last, at in spans if first <= start and stop <= last)
        offset = next(shared, end + start % _FILE_ALIGNMENT)
        found.append((tensor, offset))
        if offset >= end:
            spans.append((start, stop, offset))
            end = -(-(offset + _extent(tensor)) // _ALIGNMENT) * _ALIGNMENT
    return found, end


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first to its last number."""
    steps = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return (sum(steps) + 1) * tensor.element_size()


def _part(region: Tensor, offset: int, *, like: Tensor) -> Tensor:
    numbers = region[offset : offset + _extent(like)].view(like.dtype)
    return numbers.as_strided(like.shape, like.stride())


def _point(block: nn.Module, at: Tensor) -> None:
    point_to(at, tensors_of(block.modules()))


# Models that leave and come back --------------------------------------------------------------------
# Where not all models of a run fit together, all of a loaded one goes to the host copy, which ranks share. It
# comes back from there: now, and whenever it has left. It stays in its rank's process as it is, fused and
# quantised. On a GPU its addresses stay reserved while it is away, and new memory is mapped there when it
# comes back. So recorded forwards stay valid.


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
