"""Kernels compiled before they are needed, by processes that need no GPU (compiling.py).

Ranks find the result in Triton's cache and in that of the exchanges. A failure is a warning: ranks compile
what is missing. PyTorch's compilers keep their work where `pin_compilers` says. Which Triton kernels a model
uses is in the list that comes with gfgen. This module imports neither torch nor Triton.

`python -m benchmarks.kernel_list` makes kernels.json:

    kernels   module:name, arguments, keywords. An argument is a tensor's dtype, with its address modulo 16 if
              that is not 0, or a number that Triton specialises in the same way as the real one
    parts     parts of pipelines, by values of their config files: for each use, the numbers of its kernels
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self

from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.weights import component_dtypes
from gfgen.system.lifeline import module_command, module_environment
from gfgen.system.machine import cache_dir
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

STORE, LOOKUP = (f"gfgen.models.ahead.store:{name}" for name in ("Store", "Lookup"))
LIST = Path(__file__).with_name("kernels.json")
Call = tuple[str, Sequence[str | int | float], Mapping[str, Any]]
TIMEOUT_S = 300.0
"""The whole list takes about two minutes of one core."""


@dataclass(frozen=True, slots=True)
class Report:
    counts: Counter[tuple[str, str]]
    """By kind, and present, compiled or missing."""
    duration_s: float

    def number(self, outcome: str) -> int:
        return sum(number for (_, each), number in self.counts.items() if each == outcome)


class Compiling:
    """Processes that compile. They end at `close`, and with the thread that started them.

    compiles: otherwise they only count what is there.
    """

    def __init__(self, calls: Sequence[Call], architectures: Sequence[str], *, compiles: bool = True) -> None:
        pin_compilers()
        self._began_s = time.monotonic()
        self._result = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        with tempfile.TemporaryFile("w+") as request:  # files hold more than pipes, and nobody waits
            json.dump({"architectures": architectures, "calls": calls, "compiles": compiles}, request)
            request.seek(0)
            self._process = subprocess.Popen(
                module_command("gfgen.models.ahead.compiling"),
                env=module_environment(),
                stdin=request,
                stdout=self._result,
                stderr=subprocess.DEVNULL,
            )

    def wait(self) -> Report:
        """What was compiled, as soon as it is; the log says so."""
        found = []
        try:
            self._process.wait(TIMEOUT_S)
            self._result.seek(0)
            found = json.load(self._result)
        except (subprocess.TimeoutExpired, ValueError):
            logger.warning("kernels were not compiled ahead: the process ended, or took %g s", TIMEOUT_S)
        report = Report(
            Counter((kind, outcome) for kind, outcome, _ in found), time.monotonic() - self._began_s
        )
        if number := report.number("compiled"):
            logger.info("compiled %s in %.1f s", counted(number, "kernel"), report.duration_s)
        for reason in {reason: None for *_, reason in found if reason}:
            logger.warning("not compiled ahead: %s", reason)
        return report

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._result.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """What jobs do with a model; by default everything."""

    layers: Sequence[str] = ("auto", "fp8")
    attention: Sequence[str] = ("auto", "fp8")
    """As --precision and --attention take them."""
    vae_dtypes: Sequence[str] = ("float32", "bfloat16")
    """As --vae-dtype takes them."""
    outputs: Collection[str] = ("picture", "video")
    has_images: bool = True
    has_patches: bool = True

    def names(self, pipeline_class: str) -> Iterator[str]:
        """Names in the list, in the order in which a run needs them."""
        yield "start"
        if self.has_patches:
            yield "lora"
        dtypes = [component_dtypes(pipeline_class, each).get("vae", "bfloat16") for each in self.vae_dtypes]
        yield from (encode(dtype) for dtype in dtypes if self.has_images)
        for has_image in (False, True)[: 1 + self.has_images]:
            for layers, attention in product(self.layers, self.attention):
                yield denoise(layers, attention, has_image=has_image)
        yield from (decode(dtype, output) for dtype in dtypes for output in self.outputs)


def encode(dtype: str) -> str:
    """The name of this use; likewise below."""
    return f"encode {dtype}"


def denoise(layers: str, attention: str, *, has_image: bool = False) -> str:
    return f"denoise {layers} {attention}{' image' if has_image else ''}"


def decode(dtype: str, output: str) -> str:
    return f"decode {dtype} {output}"


def needed(models: Mapping[Path, Uses]) -> Sequence[Call]:
    """The kernels that these models take on GPUs, each once. The list knows full-size models only."""
    listed = json.loads(LIST.read_text())
    numbers: dict[int, None] = {}
    for checkpoint, uses in models.items():
        files = read_checkpoint(checkpoint, with_weights=False)
        parts = [
            part for part in listed["parts"] if any(_has(x, part["config"]) for x in files.configs.values())
        ]
        for name in uses.names(files.pipeline_class):
            numbers |= dict.fromkeys(number for part in parts for number in part["uses"].get(name, ()))
    return [listed["kernels"][number] for number in numbers]


def all_calls() -> Sequence[Call]:
    """The whole list."""
    calls: Sequence[Call] = json.loads(LIST.read_text())["kernels"]
    return calls


def compiler_dirs() -> dict[str, Path]:
    """Caches of PyTorch's compilers. Other programs use them, too, except for the default of Inductor's.

    Source: triton/knobs.py.
    """
    triton = Path(os.environ.get("TRITON_HOME") or "~") / ".triton" / "cache"
    return {
        "inductor": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir() / "inductor").expanduser(),
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or triton).expanduser(),
    }


def pin_compilers() -> None:
    """Set what the user has not set, in this process and those that it starts.

    Inductor's own default is a temporary folder. At its first compile it sets Triton's folder and another
    ptxas, and then Triton finds nothing that it has compiled before.
    Source: torch/_inductor/runtime/triton_heuristics.py, compile_tasks.py.
    """
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name, folder in zip(names, compiler_dirs().values(), strict=True):
        if name not in os.environ:
            os.environ[name] = str(_writable(folder))
    for name, value in {"TRITON_CACHE_MANAGER": STORE, "TRITON_PTXAS_PATH": _ptxas()}.items():
        if value is not None:
            os.environ.setdefault(name, str(value))


def _writable(folder: Path) -> Path:
    """The folder, or a temporary one: without Inductor's, PyTorch cannot even be imported."""
    with contextlib.suppress(OSError):  # root may have the right, and yet fail
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return folder
    logger.warning("%s cannot be written, so kernels are not kept; set GFGEN_CACHE or HOME", folder)
    made = tempfile.mkdtemp(prefix="gfgen-cache-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def environment_of_others() -> dict[str, str]:
    """This process's environment for programs that are not ours, whose Triton may be another one."""
    ours = {("TRITON_CACHE_MANAGER", STORE), ("TRITON_PTXAS_PATH", str(_ptxas()))}
    return dict(os.environ.items() - ours)


def _ptxas() -> Path | None:
    """Triton's own."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return path if path.is_file() else None


def _has(config: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(config.get(name) == value for name, value in values.items())
