"""This machine: its device, packages and memory, where gfgen keeps its measurements, limits of a process."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import os
import platform
import re
import resource
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gfgen.errors import InputError
from gfgen.system.wording import size_in_words

_PACKAGES = ("gfgen", "torch", "diffusers", "transformers")
_MAX_CGROUP_DEPTH = 32
_NO_LIMIT = 1 << 60
"""Version 1 of cgroups writes a number near 2**63 where there is no limit."""
LEAST_ADDRESSES_BYTES = 1_500_000_000
"""For a CPU rank with the built-in model: with 1.0 GB it does not start, with 1.3 GB its tasks fail."""


def cpu_name() -> str:
    """The processor's name and the number of its cores that this process may use."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"


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
    found = versions()
    return {name: found[name] for name in ("gfgen", "torch", "diffusers", "transformers") if name in found}


def free_bytes(folder: Path) -> int:
    """Of the disk on which a folder is, or will be made."""
    disk = os.statvfs(next(each for each in (folder, *folder.absolute().parents) if each.exists()))
    return disk.f_bavail * disk.f_frsize


def cache_dir() -> Path:
    """Where gfgen keeps what it makes for itself: $GFGEN_CACHE, or gfgen/ in the user's cache folder."""
    if own := os.environ.get("GFGEN_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "gfgen"


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

LORAS: Mapping[str, str] = {"peft": "peft"}

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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard


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
    rooms = [_machine_room(root / "proc/meminfo"), *_cgroup_rooms(root)]
    return min((room for room in rooms if room is not None), default=None)


def check_addresses() -> None:
    """Raises: InputError if `ulimit -v` is below the address space that any rank needs."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESSES_BYTES:
        raise InputError(
            f"a process may take {size_in_words(most)} of memory here (ulimit -v); each rank needs at least "
            f"{size_in_words(LEAST_ADDRESSES_BYTES)}, and more for larger models: raise the limit"
        )


def _machine_room(meminfo: Path) -> int | None:
    room = _number(_text(meminfo), "MemAvailable:")
    return None if room is None else room * 1024


def _cgroup_rooms(root: Path) -> list[int | None]:
    """The rest of the limit of each memory cgroup of this process (versions 1 and 2)."""
    rooms: list[int | None] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        parts = Path(path.lstrip("/")).parts[:_MAX_CGROUP_DEPTH]
        rooms += [_room(base.joinpath(*parts[:depth]), *names) for depth in range(len(parts) + 1)]
    return rooms


def _room(folder: Path, limit_name: str, used_name: str) -> int | None:
    limit = _text(folder / limit_name).strip()
    if not limit.isdigit() or int(limit) >= _NO_LIMIT:
        return None
    used = _text(folder / used_name).strip()
    if not used.isdigit():
        return None
    stat = _text(folder / "memory.stat")
    cache = (_number(stat, "inactive_file") or 0) + (_number(stat, "active_file") or 0)
    return max(0, int(limit) - int(used) + cache)


def _number(text: str, name: str) -> int | None:
    """The number behind this name in a text with a name and a number per line."""
    found = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    return None if found is None else int(found[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
