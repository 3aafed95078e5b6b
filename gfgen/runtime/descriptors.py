"""How many files this process may have open."""

from __future__ import annotations

import math
import resource


def allow_most() -> float:
    """As many as the system lets it, which is returned: a run holds a few for each job that has begun, a
    server one for each connection. What it starts inherits that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard
