"""This machine: its device, packages and memory, where gfgen keeps its measurements, limits of a process."""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib.util
import logging
import math
import os
import platform
import re
import resource
import sys
import zoneinfo
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gfgen.errors import InputError
from gfgen.system import cgroups
from gfgen.system.home import home
from gfgen.system.wording import counted, size_in_words

logger = logging.getLogger(__name__)

_SPARE_FILES = 8
"""Files that a run has open at once beside its outputs."""
_PACKAGES = ("gfgen", "torch", "diffusers", "transformers")
RUN_BYTES, RANK_BYTES = 380_000_000, 80_000_000
"""Runs of tiny-wan on 1, 2 and 4 CPU ranks peak at 457, 552 and 689 MB; processes share their imports."""
LEAST_FILE_BYTES = 1 << 27
"""The shared memory of a rank is a file to the system."""
LEAST_ADDRESSES_BYTES = 1_500_000_000
"""For a CPU rank with the built-in model: with 1.0 GB it does not start, with 1.3 GB its tasks fail."""


def num_cores() -> int:
    """The cores that this process may keep busy, by its affinity and its quota."""
    return math.ceil(_share_of_cores())


def _share_of_cores() -> float:
    return min(len(os.sched_getaffinity(0)), cgroups.cpu_quota() or math.inf)


def fitting_ranks(most: int) -> int:
    """At most this many CPU ranks, and no more than the quota and the available memory allow."""
    available, quota = available_bytes(), cgroups.cpu_quota()
    by_memory = most if available is None else (available - RUN_BYTES) // RANK_BYTES
    return max(1, min(most, by_memory, most if quota is None else math.ceil(quota)))


def cpu_name() -> str:
    """The processor's name and the number of its cores that this process may use."""
    found = re.search(r"^model name\s*: (.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{_share_of_cores():.3g} cores of {found[1] if found else platform.machine()}"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that task durations depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def key_versions() -> Mapping[str, str]:
    return {name: number for name, number in versions().items() if name != "python"}


def free_bytes(folder: Path) -> int:
    """Of the disk on which a folder is, or will be made; none if it has no room for more names."""
    disk = os.statvfs(next(each for each in (folder, *folder.absolute().parents) if each.exists()))
    return 0 if disk.f_files and disk.f_favail < _SPARE_FILES else disk.f_bavail * disk.f_frsize


def cache_dir() -> Path:
    """Where gfgen keeps what it makes for itself: $GFGEN_CACHE, or gfgen/ in the user's cache folder."""
    if own := os.environ.get("GFGEN_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache").expanduser() / "gfgen"


def prepared_dirs() -> list[Path]:
    """$GFGEN_PREPARED, which is only read: a folder that `gfgen cache fill` filled, as for a container."""
    return [Path(own).expanduser()] if (own := os.environ.get("GFGEN_PREPARED")) else []


def file_stem(device: str) -> str:
    """A device's name as part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-")


COMPUTING: Mapping[str, str] = {
    "torch": "torch",
    "diffusers": "diffusers",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "safetensors": "safetensors",
    "huggingface_hub": "huggingface_hub",
    "numpy": "numpy",
    "pillow": "PIL",
    "tqdm": "tqdm",
}
"""Every run needs these: package name -> module name."""

VIDEOS: Mapping[str, str] = {"ftfy": "ftfy", "imageio": "imageio", "imageio-ffmpeg": "imageio_ffmpeg"}

PATCHING: Mapping[str, str] = {"peft": "peft"}

SERVING: Mapping[str, str] = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "pydantic": "pydantic",
    "httptools": "httptools",
    "httpx": "httpx",
    "python-multipart": "python_multipart",
    "prometheus_client": "prometheus_client",
}


def check_packages(packages: Mapping[str, str]) -> None:
    """Raises ModuleNotFoundError for the first missing package, before processes fail; imports nothing."""
    for module in packages.values():
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def allow_most() -> float:
    """Raise this process's limit to what the system allows, and return it.

    A run holds a few files for each started job, a server one for each connection. Child processes inherit
    it.
    """
    return _raise_limit(resource.RLIMIT_NOFILE)


def _raise_limit(kind: int) -> float:
    soft, hard = resource.getrlimit(kind)
    if soft != hard:
        resource.setrlimit(kind, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard


def why_killed(kills_before: int) -> str | None:
    """The reason if the kernel has killed processes here for lack of memory since it had killed so many."""
    if cgroups.oom_kills() <= kills_before:
        return None
    limit = cgroups.memory_limit()
    most = "" if limit is None else f" (the limit is {size_in_words(limit)})"
    return f"killed for lack of memory{most}; fewer --ranks, smaller jobs or more memory help"


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


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process can still get, within its cgroups' limits; None if the system does not say.

    Page cache that can be dropped counts as available.
    """
    free_kib = cgroups.number_in(cgroups.text_of(root / "proc/meminfo"), "MemAvailable:")
    rooms = [*cgroups.rooms(root), *([] if free_kib is None else [free_kib * 1024])]
    return min(rooms, default=None)


def check_limits(num_ranks: int = 0) -> None:
    """Raises: InputError if this machine does not let so many ranks start; it says what to do."""
    if sys.flags.optimize > 1:
        raise InputError("PYTHONOPTIMIZE=2 (python -OO) removes texts that diffusers needs: unset it")
    need, available = RUN_BYTES + num_ranks * RANK_BYTES, available_bytes()
    if available is not None and available < need:
        fitting = (available - RUN_BYTES) // RANK_BYTES
        help_ = f"--ranks {fitting} would fit" if fitting > 0 else "free memory, or raise the limit"
        raise InputError(
            f"{counted(num_ranks, 'rank')}: about {size_in_words(need)} of memory needed without models, "
            f"{size_in_words(available)} available; {help_}"
        )
    _raise_limit(resource.RLIMIT_FSIZE)
    try:
        with os.fdopen(os.memfd_create("gfgen"), "wb") as file:
            file.truncate(LEAST_FILE_BYTES)
    except OSError as error:
        why, help_ = f"memfd_create: {error.strerror}", "a container or sandbox has to allow it"
        if error.errno == errno.EFBIG:
            why, help_ = f"files of {size_in_words(LEAST_FILE_BYTES)} are too large", "raise ulimit -f"
        raise InputError(f"shared memory is refused here ({why}); {help_}") from None
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESSES_BYTES:
        raise InputError(
            f"a process may take {size_in_words(most)} of memory here (ulimit -v); each rank needs at least "
            f"{size_in_words(LEAST_ADDRESSES_BYTES)}, and more for larger models: raise the limit"
        )


def warn_of_unknown_zone() -> None:
    """Log if TZ names a time zone that this system does not have: it then counts as UTC."""
    name = os.environ.get("TZ", "").removeprefix(":")
    is_rule = re.match(r"(\w{3,}|<[^>]+>)[+-]?\d", name)  # such as CET-1CEST
    if name in ("", "UTC", "GMT") or is_rule or any(Path(each, name).is_file() for each in zoneinfo.TZPATH):
        return
    logger.warning("TZ=%s is no time zone of this system, so times of day are those of UTC", name)
