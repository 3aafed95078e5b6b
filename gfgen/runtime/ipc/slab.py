"""A job's artifacts in shared memory: how its state gets from one rank to the next.

One memfd per job, made by the control plane and mapped by every worker that runs a task of
the job. After each task its rank copies what the task made into the slab, so the slab always
holds the job's last complete state, whoever dies.

    line 0..4    one 64-byte line per region: the dispatch that made what the region holds,
                 and the dispatch that has outlined what it will hold
    regions      prompt | condition | latents, bank 0 | bank 1 | bank 2

An artifact's version is the number of tasks that led to it: `encode` makes version 1 and so
on. Latents go to bank `version % 3`: a task reads version n and publishes n + 1, and the one
that is queued on it may publish n + 2 before all ranks of the first have ended. Should one of
those fail, version n is needed again; two banks would have lost it. On GPUs both may be on
their way at once, from two ranks. One rank at a time writes to a region, and only what no task
reads: it stores the payload first and the word last; readers look at the word first, and wait
until it names the very dispatch that they were told to expect. So nothing of an attempt that
failed is ever read.

An outline is an artifact's names, shapes and scalars without its tensors. A GPU's rank knows it
as soon as a task is launched, and shows it then; the ranks to which the tensors go from device to
device can enqueue their arrival, and the task behind it, before there is anything to arrive. They may
read it while the artifact is published, which leaves it as it is.

Why that is safe. The word lies at the start of a 64-byte line, and a native "Q" is packed and
unpacked by one copy of 8 bytes, which is one move: it is seen whole or not at all, as what it was
or, since Python clears what it packs into, as 0, which names no dispatch. Payload and
word are plain stores; x86-64 makes one core's stores visible in their order and does not
reorder loads (total store order), so who sees the word sees the payload. A machine with a
weaker order (AArch64, POWER) may show the word first. There this is not right: the word would
have to be stored with release and loaded with acquire order, as signals in csrc/gfc are, and
Python has no word for either.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gfgen.graph import Trajectory

_LINE_BYTES = 64
_NUM_BANKS = 3
_REGIONS = ("prompt", "condition", *[f"latents {bank}" for bank in range(_NUM_BANKS)])
_WORD = struct.Struct("Q")
"""Native, since a format with a byte order of its own may be stored byte by byte."""
_OUTLINE_WORD = 8
"""Where a line has the word of an outline."""
_LENGTHS = struct.Struct("<QQ")
_META_BYTES = 64 * 1024
"""Room for names, shapes and scalars beside an artifact's tensors."""
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """Where each region of a job's slab begins, from its trajectory alone."""

    offsets: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, trajectory: Trajectory) -> SlabPlan:
        sizes = {artifact.name: artifact.size_bytes for artifact in trajectory.artifacts}
        offsets = []
        end = _PAGE_BYTES
        for region in _REGIONS:
            offsets.append(end)
            num_fields_padding = _LINE_BYTES * 64
            room = sizes.get(region.split()[0], 0) + _META_BYTES + num_fields_padding
            end += -(-room // _PAGE_BYTES) * _PAGE_BYTES
        return cls(tuple(offsets), end)


class Slab:
    """One process's mapping of a job's slab."""

    def __init__(self, fd: int, plan: SlabPlan) -> None:
        self._plan = plan
        self._map = mmap.mmap(fd, plan.size_bytes)

    @staticmethod
    def create(plan: SlabPlan, *, name: str) -> int:
        """A file descriptor of a new slab; its pages are taken as they are written."""
        fd = os.memfd_create(f"gfgen-{name[:100]}", os.MFD_CLOEXEC)
        os.truncate(fd, plan.size_bytes)
        return fd

    def producer(self, name: str, version: int) -> int:
        """The dispatch that made what is published where this version belongs; 0 for none."""
        return int(_WORD.unpack_from(self._map, _region(name, version) * _LINE_BYTES)[0])

    def outliner(self, name: str, version: int) -> int:
        """The dispatch that has outlined what belongs where this version does; 0 for none."""
        return int(_WORD.unpack_from(self._map, _region(name, version) * _LINE_BYTES + _OUTLINE_WORD)[0])

    def publish(
        self, name: str, version: int, meta: Any, buffers: Sequence[memoryview], *, producer: int
    ) -> None:
        """Store an artifact, then make it visible as made by dispatch `producer`.

        Raises: ValueError when it is larger than the trajectory said.
        """
        places = self.places(name, version, meta, [buffer.nbytes for buffer in buffers])
        for place, buffer in zip(places, buffers, strict=True):
            place[:] = buffer
        self.show(name, version, producer=producer)

    def places(self, name: str, version: int, meta: Any, sizes: Sequence[int]) -> list[memoryview]:
        """Memory for an artifact's buffers of so many bytes; nobody reads it before `show`.

        Raises: ValueError when they are larger than the trajectory said.
        """
        region = _region(name, version)
        start, limit = self._bounds(region)
        packed = pickle.dumps(meta)
        position = start + _LINE_BYTES
        needed = position + len(packed) + sum(map(_aligned, sizes)) + _LINE_BYTES
        if needed > limit:
            raise ValueError(f"artifact {name} takes {needed - start} bytes, {limit - start} were planned")
        lengths, end = (len(packed), len(sizes)), position + len(packed)
        if _LENGTHS.unpack_from(self._map, start) != lengths or self._map[position:end] != packed:
            _LENGTHS.pack_into(self._map, start, *lengths)
            self._map[position:end] = packed
        position = _aligned(end)
        memory, places = memoryview(self._map), []
        for size_bytes in sizes:
            places.append(memory[position : position + size_bytes])
            position += _aligned(size_bytes)
        return places

    def show_outline(self, name: str, version: int, *, producer: int) -> None:
        """Make visible what `places` was told, as what dispatch `producer` makes."""
        _WORD.pack_into(self._map, _region(name, version) * _LINE_BYTES + _OUTLINE_WORD, producer)

    def show(self, name: str, version: int, *, producer: int) -> None:
        """Make what was stored visible, as made by dispatch `producer`."""
        if self.outliner(name, version) != producer:
            self.show_outline(name, version, producer=producer)
        _WORD.pack_into(self._map, _region(name, version) * _LINE_BYTES, producer)

    def outline(self, name: str, version: int) -> Any:
        """The meta of a version that has been outlined."""
        assert self.outliner(name, version), f"{name} version {version} is not outlined"
        meta, _ = self._meta(name, version)
        return meta

    def fetch(self, name: str, version: int) -> tuple[Any, memoryview, int]:
        """(meta, the slab's memory, offset of the first buffer) of a published version.

        The buffers follow each other, each at the next multiple of 64 bytes; the memory is
        overwritten by version + 3, so copy what is needed.
        """
        assert self.producer(name, version), f"{name} version {version} is not there"
        meta, end = self._meta(name, version)
        return meta, memoryview(self._map), _aligned(end)

    def _meta(self, name: str, version: int) -> tuple[Any, int]:
        """What `places` was told, and where it ends."""
        start, _ = self._bounds(_region(name, version))
        num_meta_bytes, _ = _LENGTHS.unpack_from(self._map, start)
        position = start + _LINE_BYTES
        end = position + num_meta_bytes
        return pickle.loads(self._map[position:end]), end

    def _bounds(self, region: int) -> tuple[int, int]:
        offsets = (*self._plan.offsets, self._plan.size_bytes)
        return offsets[region], offsets[region + 1]


def _region(name: str, version: int) -> int:
    return _REGIONS.index(f"latents {version % _NUM_BANKS}" if name == "latents" else name)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _LINE_BYTES) * _LINE_BYTES
