"""`gfgen doctor`. It reads versions from package metadata and does not import torch, to be fast."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from gfgen.errors import RunError
from gfgen.gfc import native
from gfgen.gfc.cuda.compiler import cache_dir, find_nvrtc, kept, kernels_dir
from gfgen.gfc.cuda.driver import SEE_DOCTOR, Driver, driver
from gfgen.gfc.cuda.selector import table_path
from gfgen.session.packages import COMPUTING, LORAS, SERVING, VIDEOS

_CUDNN = "nvidia-cudnn-frontend"
_INSTALL = "'pip install gfgen' installs it"
_MIN_CUDA = (12, 4)
"""The first version with all driver calls that the collectives need."""
_GIB = 1 << 30


@click.command()
def doctor() -> int:
    """Show what gfgen finds on this machine, what is missing, and how to install it.

    The exit code is 1 if gfgen cannot run at all.
    """
    missing: list[str] = []
    for section, lines in (
        ("machine", _machine()),
        ("packages", _packages(missing)),
        ("GPUs", _gpus(missing)),
        ("caches", _caches()),
    ):
        click.echo(f"{section}")
        for line in lines:
            click.echo(f"  {line}")
    for line in missing:
        click.echo(f"missing: {line}")
    if not missing:
        click.echo("nothing is missing")
    return int(any(line.startswith("! ") for line in missing))


def _machine() -> Iterator[str]:
    yield f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield f"{len(os.sched_getaffinity(0))} CPU cores, {pages / _GIB:.0f} GiB of memory"


def _packages(missing: list[str]) -> Iterator[str]:
    for name in COMPUTING:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            missing.append(f"! {name} ({_INSTALL})")
    for purpose, names in (("videos", VIDEOS), ("LoRAs", LORAS), ("gfgen serve", SERVING)):
        for name in names:
            try:
                version(name)
            except PackageNotFoundError:
                missing.append(f"{name}, for {purpose} ({_INSTALL})")
    try:
        native.library()
        yield "native CPU collectives: ready"
    except RunError as error:
        missing.append(f"! native CPU collectives ({error})")


def _gpus(missing: list[str]) -> Iterator[str]:
    try:
        cuda = driver()
    except RunError as error:
        yield f"none ({str(error).removesuffix(SEE_DOCTOR)}): jobs run on CPU ranks"
        return
    number = ".".join(map(str, cuda.version))
    yield f"driver for CUDA {number}"
    if cuda.version < _MIN_CUDA:
        missing.append("an NVIDIA driver for CUDA 12.4 or newer, for collectives between GPUs")
    for device in range(cuda.num_devices):
        memory = cuda.memory_bytes(device) / _GIB
        yield f"{device}: {cuda.name(device)}, {memory:.0f} GiB, {cuda.architecture(device)}"
    yield from _links(cuda, missing)
    nvrtc = find_nvrtc()
    if nvrtc is None:
        missing.append("NVRTC, which compiles the collectives (it comes with a CUDA build of PyTorch)")
    else:
        yield f"kernel compiler: {nvrtc.name}"
    try:
        yield f"attention for prompts of any length: {_CUDNN} {version(_CUDNN)}"
    except PackageNotFoundError:
        missing.append(f"{_CUDNN}, to share CUDA graphs between prompts of any length ({_INSTALL})")
    try:
        if "+cpu" in version("torch"):
            missing.append(
                "a CUDA build of PyTorch: the installed one supports CPUs only (https://pytorch.org)"
            )
    except PackageNotFoundError:
        pass


def _links(cuda: Driver, missing: list[str]) -> Iterator[str]:
    devices = range(cuda.num_devices)
    for device in devices:
        peers = [peer for peer in devices if peer != device]
        reached = [peer for peer in peers if cuda.can_access(device, peer)]
        apart = [str(peer) for peer in peers if peer not in reached]
        if apart:
            missing.append(f"peer access from GPU {device} to {', '.join(apart)}: they cannot share a layout")
        fast = [str(peer) for peer in reached if cuda.has_nvlink(device, peer)]
        slow = [str(peer) for peer in reached if str(peer) not in fast]
        if fast:
            yield f"{device} reaches {', '.join(fast)} over NVLink"
        if slow:
            yield f"{device} reaches {', '.join(slow)} over PCIe"


def _caches() -> Iterator[str]:
    yield f"compiled kernels: {len(kept())} in {_short(kernels_dir())} (compiled at first use)"
    tables = [path.name for path in cache_dir().glob("gfc-*.json")]
    example = _short(table_path("name"))
    yield f"tuned tables: {', '.join(tables) or f'none (`gfgen bench gfc --tune` writes {example})'}"
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home).expanduser()
    nearest = next(folder for folder in (hub, *hub.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(nearest).free / _GIB
    yield f"models: {_short(hub)}{'' if hub.is_dir() else ' (does not exist yet)'}, {free:.0f} GiB free"


def _short(path: Path) -> str:
    return str(path).replace(str(Path.home()), "~", 1)
