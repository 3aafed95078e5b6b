"""Compiles kernels on all CPU cores, as ranks would. Needs no GPU, and neither imports nor asks torch.

    python -m gfgen.models.ahead.compiling < REQUEST

reads and writes JSON (pool.py). Triton computes specialisations and keys as in a launch; here its driver is
replaced, and arguments have no memory.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gfgen.errors import in_one_line
from gfgen.gfc.cuda import compiler
from gfgen.models.ahead.places import LOOKUP, STORE, pin_compilers
from gfgen.system import lifeline
from gfgen.system.sharing import locked

logger = logging.getLogger(__name__)

EXCHANGES = "exchanges between GPUs"
_KINDS = {"row_kernels": "denoising", "frame_kernels": "decoding and encoding", "low_rank": "merging LoRAs"}
Item = tuple[str, Any]
"""An architecture and a call of a Triton kernel, or None for the exchanges."""
_LINK_S = 5.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends this process
    request = json.load(sys.stdin)
    os.nice(10)
    lifeline.bind_forks()
    pin_compilers()
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
    calls = (None, *request["calls"])
    items: list[Item] = [
        (each, call) for each in request["architectures"] for call in calls if _is_for(each, call)
    ]
    with _library_to_link():
        report = prepare(items, is_there=_is_there, make=_make if request["compiles"] else None)
    print(json.dumps(report))


def prepare(
    items: Sequence[Item], *, is_there: Callable[[Item], bool], make: Callable[[Item], None] | None
) -> dict[str, Any]:
    """Make what is missing, on all cores; None makes nothing.

    Returns how many of each kind were there, were made and are missing, and why.
    """
    counts = {kind_of(item): [0, 0, 0] for item in items}
    missing: list[Item] = []
    for item in items:
        if is_there(item):
            counts[kind_of(item)][0] += 1
        else:
            missing.append(item)
    problems: list[str] = []
    if make is None or not missing:
        for item in missing:
            counts[kind_of(item)][2] += 1
        return {"kinds": counts, "problems": problems}
    context = multiprocessing.get_context("fork")
    num_processes = min(len(missing), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        made: list[Future[None]] = [pool.submit(make, item) for item in missing]
        for item, future in zip(missing, made, strict=True):
            error = future.exception()
            counts[kind_of(item)][2 if error else 1] += 1
            if error is not None:
                problems.append(f"{_name_of(item)}: {in_one_line(error)}")
    return {"kinds": counts, "problems": problems}


def _is_for(architecture: str, call: Any) -> bool:
    """Runs with fp8 need the kernels with fp8, and GPUs that have it."""
    return call is None or int(architecture.removeprefix("sm_")) >= 89 or "float8_e4m3fn" not in call[1]


def kind_of(item: Item) -> str:
    return EXCHANGES if item[1] is None else _KINDS[item[1][0].partition(":")[0].rpartition(".")[2]]


def _name_of(item: Item) -> str:
    architecture, call = item
    return f"{kind_of(item)} for {architecture}" + (f" ({json.dumps(call)})" if call else "")


def _is_there(item: Item) -> bool:
    architecture, call = item
    manager = os.environ["TRITON_CACHE_MANAGER"]
    try:
        if call is None:
            return compiler.is_kept(architecture)
        if manager != STORE:
            return False  # the user's own finds it when it is compiled
        os.environ["TRITON_CACHE_MANAGER"] = LOOKUP
        _warm(architecture, call)
        return True
    except Exception:  # whatever the reason, compiling it will say so
        return False
    finally:
        os.environ["TRITON_CACHE_MANAGER"] = manager


def _make(item: Item) -> None:
    architecture, call = item
    if call is None:
        compiler.compiled(architecture)
    else:
        _link(call[0], _warm(architecture, call))


def _warm(architecture: str, call: Sequence[Any]) -> Any:
    """A kernel as Triton's launch finds or compiles it."""
    name, arguments, keywords = call
    module, _, attribute = name.partition(":")
    kernel = getattr(importlib.import_module(module), attribute)
    driver = importlib.import_module("triton.runtime").driver
    driver.set_active(_Driver(int(architecture.removeprefix("sm_"))))
    given = [_Address(each) if isinstance(each, str) else each for each in arguments]
    return kernel.warmup(*given, grid=(1,), **keywords)


class _Driver:
    """What Triton asks its driver for before it compiles. A device's number is its architecture's."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_device(self) -> int:
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        backends = importlib.import_module("triton.backends.compiler")
        return backends.GPUTarget("cuda", self._architecture, 32)


class _Address:
    """In place of a tensor: its dtype, and where it begins modulo 16."""

    def __init__(self, text: str) -> None:
        self.dtype, _, address = text.partition("+")
        self._address = int(address or 0)

    def data_ptr(self) -> int:
        return self._address


# Launchers ------------------------------------------------------------------------------------------


def _link(name: str, kernel: Any) -> None:
    """Compile what Triton 3.6 launches a kernel with, by gcc; later versions need nothing for each kernel."""
    try:
        driver = importlib.import_module("triton.backends.nvidia.driver")
        with locked(compiler.kernels_dir() / f"{name.rpartition(':')[2]}.lock", timeout_s=_LINK_S):
            driver.CudaUtils()
            driver.CudaLauncher(kernel.src, kernel.metadata)
    except Exception as error:  # ranks do it then
        logger.debug("%s: %s", name, error)


@contextmanager
def _library_to_link() -> Iterator[None]:
    """Where no driver is installed, an empty libcuda.so.1 to link with, and to load what was linked."""
    try:
        ctypes.CDLL("libcuda.so.1")
        yield
        return
    except OSError:
        pass
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libcuda.so.1"
        command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True)
            ctypes.CDLL(str(path))
            sys.setdlopenflags(os.RTLD_LAZY)  # functions are looked up when they are called
            os.environ.setdefault("TRITON_LIBCUDA_PATH", folder)
        except (OSError, subprocess.CalledProcessError) as error:
            logger.debug("no launchers: %s", error)
        yield


if __name__ == "__main__":
    main()
