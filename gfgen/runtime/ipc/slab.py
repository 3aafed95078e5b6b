"""A job's artifacts in shared memory, through which its state moves from rank to rank.

The control plane creates one memfd per job, and every worker that runs a task of the job maps it. After each
task its rank copies the output into the slab, so the slab always holds the job's last complete state,
whichever process dies.

    line 0..4    one 64-byte line per region: the dispatch that made what the region holds,
                 and the dispatch that has outlined what it will hold
    regions      prompt | condition | latents, bank 0 | bank 1 | bank 2

An artifact's version is the number of tasks that led to it: `encode` makes version 1 and so on. Latents go to
bank `version % 3`: a task reads version n and publishes n + 1, and the task queued on it may publish n + 2
before all ranks of the first have ended. If one of those fails, version n is needed again; with two banks it
would be lost. On GPUs, two ranks may write both versions at once. One rank at a time writes to a region, and
only while no task reads it. The writer stores the payload first and the word last. Readers wait until the
word names the dispatch that they expect, and then read the payload, so they never read the output of a failed
attempt.

An outline is an artifact's names, shapes and scalars without its tensors. A rank on a GPU knows and shows it
as soon as a task is launched. The ranks that receive the tensors from device to device can then enqueue their
arrival, and the next task, before the tensors exist. They may read the outline during publication, which does
not change it.

This is safe for two reasons. The word lies at the start of a 64-byte line, and Python packs and unpacks a
native "Q" by one copy of 8 bytes, which is one move. So a reader sees the old word, the new word, or 0,
because Python clears the memory that it packs into, and 0 names no dispatch. Payload and word are plain
stores; x86-64 makes one core's stores visible in their order and does not reorder loads (total store order),
so a reader that sees the word sees the payload. A machine with a weaker order (AArch64, POWER) may show the
word first. It needs a store with release order and a load with acquire order, like signals in csrc/gfc, and
Python has neither.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gfgen.graph import Trajectory

_LINE_BYTES = 64
_NUM_BANKS = 3
_REGIONS = ("prompt", "condition", *[f"latents {bank}" for bank in range(_NUM_BANKS)])
_WORD = struct.Struct("Q")  # native, because a format with an explicit byte order may be stored byte by byte
_OUTLINE_WORD = 8  # offset of an outline's word in its line
_LENGTHS = struct.Struct("<QQ")
_META_BYTES = 64 * 1024  # space for an artifact's names, shapes and scalars
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """The offset of each region of a job's slab, from its trajectory alone."""

    offsets: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, trajectory: Trajectory) -> SlabPlan:
        sizes = {
            artifact.name: artifact.size_bytes + artifact.room_bytes for artifact in trajectory.artifacts
        }
        offsets = []
        end = _PAGE_BYTES
        for region in _REGIONS:
            offsets.append(end)
            num_fields_padding = _LINE_BYTES * 64
            room = sizes.get(region.split()[0], 0) + _META_BYTES + num_fields_padding
            end += -(-room // _PAGE_BYTES) * _PAGE_BYTES
        return cls(tuple(offsets), end)


class Slab:
    """One process's mapping of a job's slab. `loads` unpickles metas, which name torch's dtypes."""

    def __init__(
        self,
        fd: int,
        plan: SlabPlan,
        *,
        access: int = mmap.ACCESS_DEFAULT,
        loads: Callable[[bytes], Any] = pickle.loads,
    ) -> None:
        self._plan = plan
        self._map = mmap.mmap(fd, plan.size_bytes, access=access)
        self._loads = loads

    @staticmethod
    def create(plan: SlabPlan, *, name: str) -> int:
        """A file descriptor of a new slab; a page takes memory when it is first written."""
        fd = os.memfd_create(f"gfgen-{name[:100]}", os.MFD_CLOEXEC)
        os.truncate(fd, plan.size_bytes)
        return fd

    def producer(self, name: str, version: int) -> int:
        """The dispatch that made the content of this version's region; 0 for none."""
        return int(_WORD.unpack_from(self._map, _region(name, version) * _LINE_BYTES)[0])

    def outliner(self, name: str, version: int) -> int:
        """The dispatch that outlined the content of this version's region; 0 for none."""
        return int(_WORD.unpack_from(self._map, _region(name, version) * _LINE_BYTES + _OUTLINE_WORD)[0])

    def places(self, name: str, version: int, meta: Any, sizes: Sequence[int]) -> list[memoryview]:
        """Memory for buffers of these sizes, unread before `show`. Raises: ValueError for unplanned ones."""
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
        """Show the meta from `places` as that of dispatch `producer`."""
        _WORD.pack_into(self._map, _region(name, version) * _LINE_BYTES + _OUTLINE_WORD, producer)

    def show(self, name: str, version: int, *, producer: int) -> None:
        """Show the stored artifact as the output of dispatch `producer`."""
        if self.outliner(name, version) != producer:
            self.show_outline(name, version, producer=producer)
        _WORD.pack_into(self._map, _region(name, version) * _LINE_BYTES, producer)

    def outline(self, name: str, version: int) -> Any:
        assert self.outliner(name, version), f"{name} version {version} is not outlined"
        meta, _ = self._meta(name, version)
        return meta

    def fetch(self, name: str, version: int) -> tuple[Any, memoryview, int]:
        """(meta, the slab's memory, offset of the first buffer) of a published version.

        Each buffer starts at the next multiple of 64 bytes. Version + 3 overwrites the memory, so copy what
        you need.
        """
        assert self.producer(name, version), f"{name} version {version} is not there"
        meta, end = self._meta(name, version)
        return meta, memoryview(self._map), _aligned(end)

    def _meta(self, name: str, version: int) -> tuple[Any, int]:
        start, _ = self._bounds(_region(name, version))
        num_meta_bytes, _ = _LENGTHS.unpack_from(self._map, start)
        position = start + _LINE_BYTES
        end = position + num_meta_bytes
        return self._loads(self._map[position:end]), end

    def _bounds(self, region: int) -> tuple[int, int]:
        offsets = (*self._plan.offsets, self._plan.size_bytes)
        return offsets[region], offsets[region + 1]


def _region(name: str, version: int) -> int:
    return _REGIONS.index(f"latents {version % _NUM_BANKS}" if name == "latents" else name)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _LINE_BYTES) * _LINE_BYTES


_HEAD_BYTES = 4096
_ALIGNMENT = 64
_SOUND_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class OutputShape:
    """Pictures and sound in the writer's memory, where only the decode knows their size.

    length of the head | head: JSON with the shapes | pictures: uint8 [F, H, W, 3] | sound: float32 [C, S]
    """

    pictures: tuple[int, int, int, int]  # [F, H, W, 3]
    sound: tuple[int, int] | None = None  # [C, S]: channels and samples
    sound_rate: int = 0

    @property
    def pictures_offset(self) -> int:
        return _HEAD_BYTES

    @property
    def sound_offset(self) -> int:
        frames, height, width, channels = self.pictures
        end = _HEAD_BYTES + frames * height * width * channels
        return -(-end // _ALIGNMENT) * _ALIGNMENT

    @property
    def size_bytes(self) -> int:
        channels, samples = self.sound or (0, 0)
        return self.sound_offset + channels * samples * _SOUND_ITEM_BYTES


def map_for(fd: int, shape: OutputShape) -> mmap.mmap:
    """Memory for pictures and sound, with their head, in a memfd of any size."""
    os.truncate(fd, shape.size_bytes)
    memory = mmap.mmap(fd, shape.size_bytes)
    head = json.dumps([shape.pictures, shape.sound, shape.sound_rate]).encode()
    memory[:8] = len(head).to_bytes(8, "little")
    memory[8 : 8 + len(head)] = head
    return memory


def shape_in(fd: int) -> OutputShape:
    """Raises: ValueError when the memory holds no output, or less than its head says."""
    size_bytes = os.fstat(fd).st_size
    start = os.pread(fd, _HEAD_BYTES, 0)
    length = int.from_bytes(start[:8], "little")
    if not 0 < length <= _HEAD_BYTES - 8:
        raise ValueError(f"shared memory of {size_bytes} bytes holds no output")
    pictures, sound, sound_rate = json.loads(start[8 : 8 + length])
    shape = OutputShape(tuple(pictures), None if sound is None else tuple(sound), sound_rate)
    if size_bytes < shape.size_bytes:
        raise ValueError(f"shared memory of {size_bytes} bytes cannot hold {shape.size_bytes}")
    return shape
