"""Limits on open files."""

from __future__ import annotations

import math
import resource


def allow_most() -> float:
    """Raise this process's limit to what the system allows, and return it.

    A run holds a few files for each started job, a server one for each connection. Child processes inherit
    it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard
