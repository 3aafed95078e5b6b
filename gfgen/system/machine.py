"""Device name and package versions, as records of a measurement, and where gfgen keeps what it measures."""

from __future__ import annotations

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
