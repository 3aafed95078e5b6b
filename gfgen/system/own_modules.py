"""Modules of gfgen that run in processes of their own, by `python -m`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE_ROOT = Path(__file__).parents[2]
"""Where this package is found, installed or not."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Runs the module by this interpreter, in a process that dies with the thread that starts it.

    A random.py in the current folder is not Python's own for it.
    """
    return [sys.executable, "-P", "-m", "gfgen.system.lifeline", str(os.getpid()), module, *arguments]


def module_environment() -> dict[str, str]:
    """This process's, by which such a command finds this package."""
    places = (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
