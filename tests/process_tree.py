"""Which processes a process has started, as Linux tells."""

from __future__ import annotations

from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Of all its threads; none of a process that is gone."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
