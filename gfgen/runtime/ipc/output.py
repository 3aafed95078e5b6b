"""Pictures and sound of a job in the writer's memory, where only the decode knows their size.

    length of the head | head: JSON with the shapes | pictures: uint8 [F, H, W, 3] | sound: float32 [C, S]

For jobs with a known size, that memory has the pictures alone.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass

_HEAD_BYTES = 4096
_ALIGNMENT = 64
_SOUND_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class OutputShape:
    pictures: tuple[int, int, int, int]
    """[F, H, W, 3]."""
    sound: tuple[int, int] | None = None
    """[C, S]: channels and samples."""
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
