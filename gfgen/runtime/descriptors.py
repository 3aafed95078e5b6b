"""How many files this process may have open."""

from __future__ import annotations

import resource


def allow_most() -> None:
    """As many as the system lets it: a run holds a few for each job that has begun. What it starts inherits
    that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
