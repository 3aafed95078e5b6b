"""What the cgroups of this process allow it (versions 1 and 2), as containers and batch systems set them.

`root` replaces the root folder of the system.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_MAX_DEPTH = 32
_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2**63 where there is no limit."""
_LIMIT, _USED = ("memory.limit_in_bytes", "memory.max"), ("memory.usage_in_bytes", "memory.current")
"""The files of versions 1 and 2."""


def rooms(root: Path) -> Iterator[int]:
    """The rest of each memory limit. Page cache that can be dropped counts as free."""
    files = [_texts(root, "memory", *names) for names in (_LIMIT, _USED, ("memory.stat", "memory.stat"))]
    for limit, used, stat in zip(*files, strict=True):
        if _is_limit(limit) and used.isdigit():
            cache = sum(number_in(stat, name) or 0 for name in ("inactive_file", "active_file"))
            yield max(0, int(limit) - int(used) + cache)


def memory_limit(root: Path = Path("/")) -> int | None:
    """The least limit; None without one."""
    return min(map(int, filter(_is_limit, _texts(root, "memory", *_LIMIT))), default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many cores may be busy at once; None without a limit."""
    files = _texts(root, "cpu", "cpu.cfs_quota_us", "cpu.max"), _texts(root, "cpu", "cpu.cfs_period_us", "-")
    found = [re.fullmatch(r"(\d+) (\d+)", " ".join(filter(None, both))) for both in zip(*files, strict=True)]
    return min([int(each[1]) / int(each[2]) for each in found if each], default=None)


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for lack of memory in this process's own cgroup."""
    texts = _texts(root, "memory", "memory.oom_control", "memory.events")
    return next((each for text in reversed(texts) if (each := number_in(text, "oom_kill")) is not None), 0)


def _texts(root: Path, controller: str, old_name: str, new_name: str) -> list[str]:
    """This file of each of this process's cgroups, its own last; empty where a container does not see it."""
    found = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            parts = Path(path.lstrip("/")).parts[:_MAX_DEPTH]
            name = old_name if controllers else new_name
            found += [text_of(base.joinpath(*parts[:depth], name)) for depth in range(len(parts) + 1)]
    return found


def _is_limit(text: str) -> bool:
    return text.isdigit() and int(text) < _NO_LIMIT


def number_in(text: str, name: str) -> int | None:
    """The number behind this name in a text with a name and a number per line."""
    found = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    return None if found is None else int(found[1])


def text_of(path: Path) -> str:
    """The content of a small file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
