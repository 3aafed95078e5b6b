"""Device name and package versions, as records of a measurement, and where gfgen keeps what it measures."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("gfgen", "torch", "diffusers", "transformers")


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
