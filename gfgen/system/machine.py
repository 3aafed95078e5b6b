"""This machine: cores, packages, memory, folders and limits; `root` replaces the system's root folder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import importlib.util
import json
import logging
import math
import mmap
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import IO

from gfgen.errors import InputError
from gfgen.system.home import home
from gfgen.system.wording import counted, size_in_words

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SPARE_FILES = 8  # files that a run has open at once beside its outputs
_PACKAGES = ("gfgen", "torch", "diffusers", "transformers")
RUN_BYTES, RANK_BYTES = 380_000_000, 80_000_000
"""Runs of tiny-wan on 1, 2 and 4 CPU ranks peak at 457, 552 and 689 MB; processes share their imports."""
LEAST_FILE_BYTES = 1 << 27  # the shared memory of a rank is a file to the system


def num_cores() -> int:
    """The cores that this process may keep busy, by its affinity and its quota."""
    return math.ceil(_share_of_cores())


def _share_of_cores() -> float:
    return min(len(os.sched_getaffinity(0)), cpu_quota() or math.inf)


def fitting_ranks(most: int) -> int:
    """At most this many CPU ranks, and no more than the quota and the available memory allow."""
    available, quota = available_bytes(), cpu_quota()
    by_memory = most if available is None else (available - RUN_BYTES) // RANK_BYTES
    return max(1, min(most, by_memory, most if quota is None else math.ceil(quota)))


def cpu_name() -> str:
    """The processor's name and the number of its cores that this process may use."""
    found = re.search(r"^model name\s*: (.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{_share_of_cores():.3g} cores of {found[1] if found else platform.machine()}"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that task durations depend on."""
    found = {name: number for name in _PACKAGES if (number := version_of(name))}
    return {"python": platform.python_version()} | found


def version_of(package: str) -> str:
    """Empty if it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return ""


@functools.cache
def commit() -> str:
    """That of the installed gfgen, from its repository, wheel or what pip noted; empty if it is not known."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, ValueError, PackageNotFoundError, subprocess.SubprocessError):
        if (root / ".git").exists():
            return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=5).strip()
        if (built := root / "gfgen/commit.txt").exists():
            return built.read_text().strip()
        noted = json.loads(distribution("gfgen").read_text("direct_url.json") or "{}")
        return str(noted.get("vcs_info", {}).get("commit_id", ""))
    return ""


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
        return Path(os.path.expanduser(own))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or home() / ".cache"), "gfgen")


def prepared_dirs() -> list[Path]:
    """$GFGEN_PREPARED, which is only read: a folder that `gfgen cache fill` filled, as for a container."""
    return [Path(os.path.expanduser(own))] if (own := os.environ.get("GFGEN_PREPARED")) else []


def locked(path: Path, *, timeout_s: float) -> IO[bytes]:
    """An open file that nobody else has until it is closed; after the timeout without the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another has it
            if time.monotonic() < until_s:
                time.sleep(_POLL_S)
                continue
        except OSError:  # the file system has no locks
            pass
        return file


def file_stem(device: str) -> str:
    """A device's name as part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-")


COMPUTING = (
    *("torch", "diffusers", "transformers", "accelerate", "safetensors"),
    *("greenlet", "huggingface_hub", "numpy", "pillow", "tqdm"),
)
"""Packages that every run needs."""
VIDEOS, PATCHING, OWN_POLICIES = ("ftfy", "imageio", "imageio-ffmpeg"), ("peft",), ("cloudpickle",)
SERVING = (
    *("fastapi", "uvicorn", "pydantic", "httptools", "httpx"),
    *("python-multipart", "prometheus_client"),
)


def check_packages(packages: Iterable[str]) -> None:
    """Raises ModuleNotFoundError for the first missing package, before processes fail; imports nothing."""
    for name in packages:
        module = "PIL" if name == "pillow" else name.replace("-", "_")
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def allow_most(kind: int = resource.RLIMIT_NOFILE) -> float:
    """Raise this process's limit, which children inherit, to what the system allows, and return it."""
    soft, hard = resource.getrlimit(kind)
    if soft != hard:
        resource.setrlimit(kind, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard


def why_killed(kills_before: int) -> str | None:
    """The reason if the kernel has killed processes here for lack of memory since it had killed so many."""
    if oom_kills() <= kills_before:
        return None
    limit = memory_limit()
    most = "" if limit is None else f" (the limit is {size_in_words(limit)})"
    return f"killed for lack of memory{most}; fewer --ranks, smaller jobs or more memory help"


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # source: malloc.h of glibc
KEPT_BYTES = 256 << 20  # at the end of the heap: 90 MB more at the end of a run, and no higher peak
ALWAYS_RETURNED_BYTES = 1 << 20
LARGEST_KEPT_BYTES = 1 << 30  # larger blocks return to the kernel when they are freed


def keep_freed_memory() -> None:
    """Reuse freed memory instead of returning it to the kernel.

    By default glibc maps each large tensor again, and the kernel clears its pages one by one: 45% of the time
    of a decode of 33 frames of 192x128 by the small Wan model (1.8 s; without 1.0 s). Works with glibc only.
    """
    _tell_glibc("mallopt", _M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    _tell_glibc("mallopt", _M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back_large_blocks() -> None:
    """Return blocks of ALWAYS_RETURNED_BYTES or more to the kernel; glibc keeps 32 MiB of them per thread."""
    _tell_glibc("mallopt", _M_MMAP_THRESHOLD, ALWAYS_RETURNED_BYTES)


def give_back_freed_memory() -> None:
    """Return all freed memory to the kernel, for after large work, such as loading a model for a GPU."""
    _tell_glibc("malloc_trim", 0)


def _tell_glibc(name: str, *arguments: int) -> None:
    if (function := getattr(ctypes.CDLL(None), name, None)) is not None:
        function(*arguments)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process can still get, with page cache, within cgroups' limits; None if unknown."""
    free_kib = _number_in(_text_of(root / "proc/meminfo"), "MemAvailable:")
    rooms = [*_rooms(root), *([] if free_kib is None else [free_kib * 1024])]
    return min(rooms, default=None)


def peak_bytes() -> int:
    """The most main memory that this process has had; 0 where the system does not report it."""
    return 1024 * (_number_in(_text_of(Path("/proc/self/status")), "VmHWM:") or 0)


def forget_peak() -> None:
    """Let `peak_bytes` start again from the present use, where the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


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
    allow_most(resource.RLIMIT_FSIZE)
    try:
        with os.fdopen(os.memfd_create("gfgen"), "wb") as file:
            file.truncate(LEAST_FILE_BYTES)
    except OSError as error:
        why, help_ = f"memfd_create: {error.strerror}", "a container or sandbox has to allow it"
        if error.errno == errno.EFBIG:
            why, help_ = f"files of {size_in_words(LEAST_FILE_BYTES)} are too large", "raise ulimit -f"
        raise InputError(f"shared memory is refused here ({why}); {help_}") from None


def check_code_memory() -> None:
    """Raises: InputError where a sandbox refuses the memory into which convolutions on CPUs write code."""
    try:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except PermissionError:
        help_ = "allow it in the sandbox (systemd: MemoryDenyWriteExecute=no; SELinux: execmem)"
        raise InputError(f"memory that is writable and executable is refused here; {help_}") from None


_MAX_DEPTH = 32
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 where there is no limit
_LIMIT, _USED = ("memory.limit_in_bytes", "memory.max"), ("memory.usage_in_bytes", "memory.current")
"""The files of versions 1 and 2."""


def _rooms(root: Path) -> Iterator[int]:
    """The rest of each memory limit. Page cache that can be dropped counts as free."""
    files = [_texts(root, "memory", *names) for names in (_LIMIT, _USED, ("memory.stat", "memory.stat"))]
    for limit, used, stat in zip(*files, strict=True):
        if _is_limit(limit) and used.isdigit():
            cache = sum(_number_in(stat, name) or 0 for name in ("inactive_file", "active_file"))
            yield max(0, int(limit) - int(used) + cache)


def memory_limit(root: Path = Path("/")) -> int | None:
    """The least limit; None without one."""
    return min(map(int, filter(_is_limit, _texts(root, "memory", *_LIMIT))), default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many cores may be busy at once; None without a limit."""
    files = _texts(root, "cpu", "cpu.cfs_quota_us", "cpu.max"), _texts(root, "cpu", "cpu.cfs_period_us", "-")
    found = [re.fullmatch(r"(\d+) (\d+)", " ".join(filter(None, both))) for both in zip(*files, strict=True)]
    return min([int(each[1]) / int(each[2]) for each in found if each], default=None)


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for lack of memory in this process's own cgroup."""
    texts = _texts(root, "memory", "memory.oom_control", "memory.events")
    return next((each for text in reversed(texts) if (each := _number_in(text, "oom_kill")) is not None), 0)


def _texts(root: Path, controller: str, old_name: str, new_name: str) -> list[str]:
    """This file of each of this process's cgroups, its own last; empty where a container does not see it."""
    found = []
    for line in _text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            parts = Path(path.lstrip("/")).parts[:_MAX_DEPTH]
            name = old_name if controllers else new_name
            found += [_text_of(base.joinpath(*parts[:depth], name)) for depth in range(len(parts) + 1)]
    return found


def _is_limit(text: str) -> bool:
    return text.isdigit() and int(text) < _NO_LIMIT


def _number_in(text: str, name: str) -> int | None:
    found = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    return None if found is None else int(found[1])


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
