"""Where PyTorch's compilers keep their work, and settings that ranks and `compiling` must share.

Imports neither torch nor Triton.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from gfgen.system.machine import cache_dir

STORE, LOOKUP = (f"gfgen.models.ahead.store:{name}" for name in ("Store", "Lookup"))


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
    folders = compiler_dirs()
    values = {
        "TORCHINDUCTOR_CACHE_DIR": folders["inductor"],
        "TRITON_CACHE_DIR": folders["triton"],
        "TRITON_CACHE_MANAGER": STORE,
        "TRITON_PTXAS_PATH": _ptxas(),
    }
    for name, value in values.items():
        if value is not None:
            os.environ.setdefault(name, str(value))


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
