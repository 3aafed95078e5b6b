"""Compiles kernels on all CPU cores, as ranks would. Needs neither a GPU nor torch.

    python -m gfgen.models.ahead.compiling < REQUEST

reads and writes JSON (pool.py). Triton computes specialisations and keys as in a launch; here its driver is
replaced, and arguments have no memory.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from gfgen.errors import in_one_line
from gfgen.gfc.cuda import compiler
from gfgen.models.ahead.pool import LOOKUP, STORE, pin_compilers
from gfgen.system import lifeline
from gfgen.system.machine import locked, num_cores

EXCHANGES = "exchanges"
_KINDS = {"row_kernels": "denoising", "frame_kernels": "decoding", "low_rank": "LoRAs"}
Item = tuple[str, Any]
"""An architecture and a call of a Triton kernel, or None for the exchanges between GPUs."""
_FIRST_E4M3 = 89
_LINK_S = 5.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends this process
    request = json.load(sys.stdin)
    os.nice(10)
    lifeline.bind_forks()
    pin_compilers()
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
    items: list[Item] = [
        (name, call)
        for name in request["architectures"]
        for call in (None, *request["calls"])
        if call is None or _number(name) >= _FIRST_E4M3 or "float8_e4m3fn" not in call[1]
    ]
    print(json.dumps(outcomes(items, functools.partial(outcome, compiles=request["compiles"]))))


def outcomes(items: Sequence[Item], of: Callable[[Item], str]) -> list[tuple[str, str, str]]:
    """By item: kind, what was done (`outcome`) or "missing", and why it is."""
    context = multiprocessing.get_context("fork")
    found = []
    with ProcessPoolExecutor(num_cores(), mp_context=context) as pool:
        futures: list[Future[str]] = [pool.submit(of, item) for item in items]
        for item, future in zip(items, futures, strict=True):
            error = future.exception()
            reason = "" if error is None or isinstance(error, LookupError) else in_one_line(error)
            found.append((kind_of(item), future.result() if error is None else "missing", reason))
    return found


def kind_of(item: Item) -> str:
    return EXCHANGES if item[1] is None else _KINDS[item[1][0].partition(":")[0].rpartition(".")[2]]


def outcome(item: Item, *, compiles: bool) -> str:
    """Compile what is missing: "present" or "compiled".

    Raises: LookupError for what is missing, unless it `compiles`.
    """
    architecture, call = item
    try:
        _find(architecture, call)
        result = "present"
    except LookupError:
        if not compiles:
            raise
        result = "compiled"
    if compiles and call is None:
        compiler.compiled(architecture)
    elif compiles:
        _link(call[0], _warmed(architecture, call))
    return result


def _find(architecture: str, call: Any) -> None:
    """Raises: LookupError for what is missing."""
    if call is None:
        if not compiler.is_kept(architecture):
            raise LookupError(architecture)
    elif os.environ["TRITON_CACHE_MANAGER"] == STORE:  # another one of the user's finds it when it compiles
        os.environ["TRITON_CACHE_MANAGER"] = LOOKUP
        try:
            _warmed(architecture, call)
        finally:
            os.environ["TRITON_CACHE_MANAGER"] = STORE


def _warmed(architecture: str, call: Sequence[Any]) -> Any:
    """A kernel as Triton's launch finds or compiles it."""
    name, arguments, keywords = call
    module, _, attribute = name.partition(":")
    kernel = getattr(importlib.import_module(module), attribute)
    number, backends = _number(architecture), importlib.import_module("triton.backends.compiler")
    importlib.import_module("triton.runtime").driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: number,  # a device for each architecture
            get_current_stream=lambda device: 0,
            get_current_target=lambda: backends.GPUTarget("cuda", number, 32),
        )
    )
    return kernel.warmup(*map(_given, arguments), grid=(1,), **keywords)


def _given(argument: Any) -> Any:
    """In place of a tensor: its dtype, and where it begins modulo 16."""
    if not isinstance(argument, str):
        return argument
    dtype, _, address = argument.partition("+")
    return SimpleNamespace(dtype=dtype, data_ptr=lambda: int(address or 0))


def _link(name: str, kernel: Any) -> None:
    """Compile by gcc what Triton 3.6 launches a kernel with; that needs the driver's library, but no GPU."""
    with suppress(Exception):  # then ranks do it
        ctypes.CDLL("libcuda.so.1")
        driver = importlib.import_module("triton.backends.nvidia.driver")
        with locked(compiler.kernels_dir() / f"{name.rpartition(':')[2]}.lock", timeout_s=_LINK_S):
            driver.CudaUtils()
            driver.CudaLauncher(kernel.src, kernel.metadata)


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_"))


if __name__ == "__main__":
    main()
