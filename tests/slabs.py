"""Artifacts of plain bytes in slabs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gfgen.runtime.ipc.slab import Slab


def publish(
    slab: Slab, name: str, version: int, meta: Any, buffers: Sequence[memoryview], *, producer: int
) -> None:
    """Store an artifact, then show it, as workers do with tensors."""
    places = slab.places(name, version, meta, [buffer.nbytes for buffer in buffers])
    for place, buffer in zip(places, buffers, strict=True):
        place[:] = buffer
    slab.show(name, version, producer=producer)
