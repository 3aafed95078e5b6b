"""What exchanges over a slow link add to a step, and the links that were measured on this machine."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gfgen.layout import Degrees, Limits
from gfgen.system.linefile import write_whole
from gfgen.system.machine import cache_dir, file_stem

DEFAULT_BYTES_PER_S = 20e9
"""Through main memory in both directions at once, over 16 lanes of PCIe 4; before a measurement."""
_HIDDEN = 0.9
"""The share of its time in which attention hides exchanges."""
_SHOWN = 0.5
"""The share of an exchange that attention cannot hide: its queries come first, its results go last.
Both are from two H200 through main memory (benchmarks/results/collectives.md): Wan2.2-5B 832x480x49 gains
1.28 there and 1.25 by this, Qwen-Image 1536 1.38 and 1.39."""


def exposed_s(limits: Limits, degrees: Degrees, step_s: float) -> float:
    """How much longer a step takes because of its links, if it takes `step_s` over peer memory."""
    cfg, number = degrees[0], limits.num_apart(degrees)
    if number == 1:
        return 0.0
    moved = limits.exchanged_bytes / cfg * (number - 1) / number / math.prod(degrees[1:])
    exchange_s = moved / limits.link_bytes_per_s
    return max(exchange_s - _HIDDEN * limits.attention * step_s, _SHOWN * exchange_s)


def links_path(device: str) -> Path:
    return cache_dir() / f"links-{file_stem(device)}.json"


def keep_links(device: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows: transport, from, to, gb_per_s, us. Raises: OSError."""
    write_whole(links_path(device), json.dumps({"device": device, "links": list(rows)}, indent=1) + "\n")


def kept_links(device: str) -> Sequence[Mapping[str, Any]]:
    """Empty before `gfgen bench gfc` has measured them."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        rows = json.loads(links_path(device).read_text())["links"]
        if all(row["gb_per_s"] > 0 and {"transport", "from", "to", "us"} <= row.keys() for row in rows):
            return list(rows)
    return []


def host_bytes_per_s(device: str | None, limit: float | None) -> float:
    """Of the slowest link through main memory; infinite for CPU ranks (None) without a limit."""
    rates: list[float] = [
        1e9 * row["gb_per_s"] for row in kept_links(device or "") if row["transport"] == "host"
    ]
    usual = math.inf if device is None else DEFAULT_BYTES_PER_S
    return min([*(rates or [usual]), limit or math.inf])
