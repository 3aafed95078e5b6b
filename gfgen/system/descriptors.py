"""Limits on open files."""

from __future__ import annotations

import math
import resource

from gfgen.errors import InputError

LEAST = 64
"""A run on 8 ranks needs 3 for each process, one for each arena, 14 of its own, and some for jobs."""


def allow_most() -> float:
    """Raise this process's limit to what the system allows, and return it.

    A run holds a few files for each started job, a server one for each connection. Child processes inherit
    it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard


def check_enough() -> None:
    """Raises: InputError if this process may not open as many files as a run needs."""
    most = allow_most()
    if most < LEAST:
        raise InputError(
            f"this process may open {most:g} files; a run needs {LEAST} and a few for each job: "
            "raise the limit (ulimit -n)"
        )
