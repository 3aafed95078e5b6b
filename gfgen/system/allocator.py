"""Settings of the C library's memory allocator for processes that compute."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Source: malloc.h of glibc."""
KEPT_BYTES = 256 << 20
"""Freed memory kept at the end of the heap. Decoding 33 frames of 192x128 by the small Wan model peaks at
530 MB with and without it, and ends with 90 MB more."""
ALWAYS_RETURNED_BYTES = 1 << 20
LARGEST_KEPT_BYTES = 1 << 30
"""Larger blocks return to the kernel when they are freed."""


def keep_freed_memory() -> None:
    """Reuse freed memory instead of returning it to the kernel.

    By default glibc maps each large tensor again, and the kernel clears its pages one by one: 430,000 page
    faults and 45% of the processor time of the decode above (1.8 s; without them 1.0 s). Works with glibc
    only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back_large_blocks() -> None:
    """Return blocks of ALWAYS_RETURNED_BYTES or more to the kernel when they are freed.

    By default glibc keeps blocks of up to 32 MiB in each of its heaps once the first ones were freed, and
    every thread that has decoded a large picture has such a heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, ALWAYS_RETURNED_BYTES)


def give_back_freed_memory() -> None:
    """Return all freed memory to the kernel, wherever in the heap it is.

    Use it after large work that will not be repeated soon, such as loading a model for a GPU: weights
    stored in another dtype are converted in main memory in blocks below LARGEST_KEPT_BYTES, which the
    process would keep.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
