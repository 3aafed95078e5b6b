"""Reads the streamed blocks of a model into a few buffers on its device, ahead of the computation.

Each block has one of the buffers, in turn, so its weights have the same addresses at every read. When a
forward has left a block, the next block of the same buffer is read into it; a forward enters a block when its
read has ended. Reads have a stream of their own, and wait for the computation by events:

    computes   ... | block 3 | block 4 | block 5 | ...
    reads      ... | 5 into the buffer of 2 | 6 into that of 3 | ...      with three buffers

The buffers serve all components. A block that is not where it should be, at first, after another component
or after a task that was stopped, is read when it is entered. So what was read ahead is never more than a
guess. On a CPU a read is a copy at once.

Blocks that this rank keeps for others (shards.py) are computed from where they are, unless they have patches.
What would take too long after each read is written once, to a copy of the block in the rank's own memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gfgen.models.geometry.weights import Placement, block_name
from gfgen.models.streaming.host_copy import HostCopy
from gfgen.models.streaming.shards import Shard
from gfgen.models.streaming.turns import pause

_ATTRIBUTE = "gfgen_stream"
"""Of streamed blocks, and of all that has some: their chain."""


class Buffer:
    """A buffer on the device, and what it holds or will hold when `ready`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # All ones are NaN: a model that does not call its blocks as modules fails at once.
        self.bytes = torch.full((num_bytes,), 255, dtype=torch.uint8, device=device)
        self.holds: Block | None = None
        self.ready: Any = None


@dataclass(slots=True, eq=False)
class Block:
    """A streamed block of a model."""

    region: Tensor
    """Its bytes in host memory."""
    point: Callable[[Tensor], None]
    """Lets its weights be parts of these bytes."""
    shard: Shard | None = None
    """Of the rank that keeps it for others."""
    offset: int = 0
    """In the shard."""
    buffer: Buffer = field(init=False)
    """Of a block that is read."""
    patches: Sequence[Callable[[], None]] = ()
    """Each changes a weight in the buffer."""
    is_patched: bool = False
    copy: Tensor | None = None
    """This rank's copy in host memory, with weights that were rewritten."""
    is_rewritten: bool = False
    """Whether it is read from there."""

    @property
    def own(self) -> Tensor | None:
        """Its bytes in the own shard, if it is computed from there; otherwise it is read."""
        if self.is_patched or self.shard is None or self.shard.own is None:
            return None
        return self.shard.own[self.offset : self.offset + len(self.region)]

    @property
    def is_read(self) -> bool:
        return self.own is None

    @property
    def bytes(self) -> Tensor:
        """From which it is computed."""
        return self.buffer.bytes if (own := self.own) is None else own


class Lane:
    """The stream of reads of a model, with its buffers, its host copy and shards.

    When the model goes, reads end before their memory is given back.
    """

    def __init__(
        self, device: torch.device, copy: HostCopy, buffers: Sequence[Buffer], shards: Sequence[Shard]
    ) -> None:
        self.buffers = buffers
        self._device = device
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._sources: list[HostCopy | Shard] = [*shards, copy]
        end = weakref.finalize(self, _close, self._stream, self._sources, [each.bytes for each in buffers])
        end.atexit = False

    def read(self, block: Block) -> None:
        """Launch a read behind all that the present stream has launched so far."""
        buffer, stream = block.buffer, self._stream
        buffer.holds = None  # until the launch has succeeded
        if stream is None:
            _fill(block)
        else:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                _fill(block)
                buffer.ready = stream.record_event()
        buffer.holds = block

    def copy(self, blocks: Sequence[Block]) -> None:
        """Let these blocks have copies with their original bytes."""
        if self._stream is not None:  # what still reads the last copies is a guess that nothing will use
            torch.cuda.current_stream(self._device).synchronize()
        if new := [block for block in blocks if block.copy is None]:
            fd = Placement(streamed_bytes=sum(len(block.region) for block in new)).new_copy()
            self._sources.append(own := HostCopy(fd, self._device))
            os.close(fd)
            for block in new:
                block.copy = own.region(len(block.region), lambda _: None)
        for block in blocks:
            if block.copy is not None:
                block.copy.copy_(block.region)

    def wait(self, buffer: Buffer) -> None:
        """Let the present stream wait for the buffer's last read."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(buffer.ready)


def _close(
    stream: torch.cuda.Stream | None, sources: Sequence[HostCopy | Shard], written: Sequence[Tensor]
) -> None:
    if stream is not None:
        stream.synchronize()
    for source in sources:
        source.close()


def _fill(block: Block) -> None:
    into = block.buffer.bytes[: len(block.region)]
    if block.is_rewritten and block.copy is not None:
        into.copy_(block.copy, non_blocking=True)
    elif block.shard is None or not block.shard.read(block.offset, into):
        into.copy_(block.region, non_blocking=True)
    for patch in block.patches:
        patch()


class Chain:
    """The streamed blocks of one component, in the order of its forward."""

    def __init__(self, blocks: Mapping[str, Block], lane: Lane, *, wraps: bool) -> None:
        self._by_name = blocks
        self._blocks = tuple(blocks.values())
        self._lane = lane
        self._wraps = wraps  # whether to read ahead for another forward
        self._is_last = True
        """Of the forwards that share reads, the one that runs is the last in its block."""
        self._arrange()

    def _arrange(self) -> None:
        """Let the blocks that are read have the buffers in turn."""
        self._read_blocks = [block for block in self._blocks if block.is_read]
        for buffer in self._lane.buffers:
            buffer.holds = None
        for idx, block in enumerate(self._read_blocks):
            block.buffer = self._lane.buffers[idx % len(self._lane.buffers)]
        self._num_buffers = min(len(self._lane.buffers), len(self._read_blocks))
        for block in self._blocks:
            block.point(block.bytes)

    def attach(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Read ahead in the forwards of this model, of which these modules are the blocks."""
        model.register_forward_pre_hook(lambda *_: self._begin())
        for part in model.modules():
            if not set(modules).isdisjoint(part.modules()):
                vars(part)[_ATTRIBUTE] = self
        for idx, module in enumerate(modules):
            module.register_forward_pre_hook(lambda *_, idx=idx: self.enter(idx))
            module.register_forward_hook(lambda *_, idx=idx: self._leave(idx))

    def streams(self, name: str, weight: Any) -> bool:
        """Whether a weight of the component is streamed; a part that its block has given away is not."""
        block = self._by_name.get(block_name(name) or "")
        memory = weight.untyped_storage().data_ptr()
        return block is not None and block.bytes.untyped_storage().data_ptr() == memory

    def move(self, changed: Collection[str]) -> bool:
        """Let the blocks of these weights be read, so that they can have patches; whether any has moved."""
        names, before = {block_name(name) for name in changed}, self._read_blocks
        for name, block in self._by_name.items():
            block.is_patched = name in names
        if [block for block in self._blocks if block.is_read] == before:
            return False
        self._arrange()
        return True

    def patch(
        self, patches: Mapping[str, Sequence[Callable[[], None]]], *, rewritten: Collection[str] = ()
    ) -> None:
        """Apply these patches, by weight, after each read from now on, and no others.

        rewritten: weights that the caller changes instead, once (`renew`, `in_copy`).
        """
        copied = {block_name(weight) for weight in rewritten}
        for name, block in self._by_name.items():
            own = [each for weight in patches if block_name(weight) == name for each in patches[weight]]
            is_changed = own or block.patches or name in copied or block.is_rewritten
            if is_changed and block.is_read and block.buffer.holds is block:
                block.buffer.holds = None
            block.patches, block.is_rewritten = own, name in copied

    def renew(self) -> None:
        """Give rewritten weights their original values."""
        self._lane.copy([block for block in self._blocks if block.is_rewritten])

    def in_copy(self, weight: str, part: Tensor) -> Tensor:
        """Where a rewritten weight, of which this is a part, is read from."""
        block = self._by_name[block_name(weight) or ""]
        assert block.copy is not None
        start = part.data_ptr() - block.bytes.data_ptr()
        return block.copy[start : start + part.nbytes].view(part.dtype).view(part.shape)

    def _begin(self) -> None:
        """Before a forward. Others that share reads first leave the last block of theirs."""
        pause(self)
        self._read_from(0)

    def enter(self, idx: int) -> None:
        """Before a block."""
        block = self._blocks[idx]
        self._is_last = pause(block)  # also where it is not read: others of a layout may read it
        if block.is_read:
            if block.buffer.holds is not block:
                self._read_from(self._read_blocks.index(block))
            self._lane.wait(block.buffer)

    def _leave(self, idx: int) -> None:
        """After a block. The last of the forwards that share reads launches the next one, behind all that is
        launched by then."""
        if not self._is_last or not self._blocks[idx].is_read:
            return
        place = self._read_blocks.index(self._blocks[idx])
        following = place + self._num_buffers
        if following < len(self._read_blocks):
            self._read(following)
        elif self._wraps:
            self._read(place % self._num_buffers)

    def _read_from(self, place: int) -> None:
        """Read as many blocks as there are buffers."""
        for each in range(place, min(place + self._num_buffers, len(self._read_blocks))):
            self._read(each)

    def _read(self, place: int) -> None:
        block = self._read_blocks[place]
        if block.buffer.holds is not block:
            self._lane.read(block)


def stream_of(model: nn.Module | None) -> Chain | None:
    """Of a model, or a part of it, whose forwards read blocks, and so should take turns; otherwise None."""
    return getattr(model, _ATTRIBUTE, None)
