"""How many files this process may have open."""

from __future__ import annotations

import math
import resource

from gfgen.errors import InputError

LEAST = 64
"""What a run needs on 8 ranks (3 for each process, one for each arena, 14 of its own), and some for jobs."""


def allow_most() -> float:
    """As many as the system lets it, which is returned: a run holds a few for each job that has begun, a
    server one for each connection. What it starts inherits that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard


def check_enough() -> None:
    """Before processes start, which would fail one after the other.

    Raises: InputError when this process may not open as many files as a run needs.
    """
    most = allow_most()
    if most < LEAST:
        raise InputError(
            f"this process may open {most:g} files; a run needs {LEAST} and a few for each job: "
            "raise the limit (ulimit -n)"
        )
