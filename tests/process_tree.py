"""Which processes a process has started, as Linux tells."""

from __future__ import annotations

import contextlib
from pathlib import Path


def command_of(pid: int) -> bytes:
    """Empty of a process that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def front_of(pid: int) -> int:
    """The HTTP process of a server."""
    return next(child for child in children_of(pid) if b"gfgen.server.http.front" in command_of(child))


def descendants_of(pid: int) -> list[int]:
    """All processes below one."""
    children = children_of(pid)
    return [*children, *(below for child in children for below in descendants_of(child))]


def children_of(pid: int) -> list[int]:
    """Of all its threads; none of a process that is gone."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
