"""The C library's memory allocator, as a process that computes on the CPU wants it."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Source: malloc.h of glibc."""
KEPT_BYTES = 256 << 20
"""Of freed memory at the heap's end. Decoding 33 frames of 192x128 by the small Wan model peaks at 530 MB
with it and without, and ends with 90 MB more."""
LARGEST_KEPT_BYTES = 1 << 30
"""Larger blocks go back to the kernel when they are freed."""


def keep_freed_memory() -> None:
    """Reuse freed memory in place of giving it back to the kernel and asking for it again.

    By default glibc maps each large tensor anew, and the kernel has to clear its pages one by one: 430,000
    page faults and 45% of the processor time of the decode above (1.8 s; without them 1.0 s, each time
    alike). Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back_freed_memory() -> None:
    """To the kernel, wherever in the heap it lies; for after what will not be done again soon.

    As loading a model for a GPU: weights that are stored in another dtype are converted in main memory, block
    by block below LARGEST_KEPT_BYTES, and all of it would stay with the process. Other C libraries are left
    as they are.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
