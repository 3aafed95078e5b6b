"""The main memory that this process can still get, and the addresses that its limits allow."""

from __future__ import annotations

import re
import resource
from pathlib import Path

from gfgen.errors import InputError
from gfgen.system.wording import size_in_words

_MAX_CGROUP_DEPTH = 32
_NO_LIMIT = 1 << 60
"""Version 1 of cgroups writes a number near 2**63 where there is no limit."""
LEAST_ADDRESSES_BYTES = 1_500_000_000
"""For a CPU rank with the built-in model: with 1.0 GB it does not start, with 1.3 GB its tasks fail."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process can still get, within its cgroups' limits; None if the system does not say.

    Page cache that can be dropped counts as available.
    """
    rooms = [_machine_room(root / "proc/meminfo"), *_cgroup_rooms(root)]
    return min((room for room in rooms if room is not None), default=None)


def check_addresses() -> None:
    """Raises: InputError if `ulimit -v` is below the address space that any rank needs."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESSES_BYTES:
        raise InputError(
            f"a process may take {size_in_words(most)} of memory here (ulimit -v); each rank needs at least "
            f"{size_in_words(LEAST_ADDRESSES_BYTES)}, and more for larger models: raise the limit"
        )


def _machine_room(meminfo: Path) -> int | None:
    room = _number(_text(meminfo), "MemAvailable:")
    return None if room is None else room * 1024


def _cgroup_rooms(root: Path) -> list[int | None]:
    """The rest of the limit of each memory cgroup of this process (versions 1 and 2)."""
    rooms: list[int | None] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        parts = Path(path.lstrip("/")).parts[:_MAX_CGROUP_DEPTH]
        rooms += [_room(base.joinpath(*parts[:depth]), *names) for depth in range(len(parts) + 1)]
    return rooms


def _room(folder: Path, limit_name: str, used_name: str) -> int | None:
    limit = _text(folder / limit_name).strip()
    if not limit.isdigit() or int(limit) >= _NO_LIMIT:
        return None
    used = _text(folder / used_name).strip()
    if not used.isdigit():
        return None
    stat = _text(folder / "memory.stat")
    cache = (_number(stat, "inactive_file") or 0) + (_number(stat, "active_file") or 0)
    return max(0, int(limit) - int(used) + cache)


def _number(text: str, name: str) -> int | None:
    """The number behind this name in a text with a name and a number per line."""
    found = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    return None if found is None else int(found[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
