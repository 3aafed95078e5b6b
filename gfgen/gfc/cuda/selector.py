"""Which kernel moves an exchange, and with how many blocks, by size.

`gfgen bench gfc --tune` writes a table per device; without one the shipped table applies. All ranks of a
run must choose alike, also a rank that restarts after the table was tuned again. So the process that starts
the ranks reads the tables once, for all of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gfgen.system.linefile import write_whole
from gfgen.system.machine import cache_dir

KernelPath = Literal["flagged", "threads", "bulk", "staged"]
KIB, MIB = 1 << 10, 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel and its launch: at most `blocks` in the grid; `tile_bytes` for bulk copies.

    in_turn: all blocks push to one rank after the other, not to all at once.
    """

    path: KernelPath
    blocks: int
    tile_bytes: int = 0
    in_turn: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The choice for messages between two ranks of up to `up_to_bytes`."""

    up_to_bytes: int
    choice: KernelChoice


# Measured on 4 H200, 2026-11-20, with `gfgen bench gfc --tune`.
DEFAULT_RULES = (
    Rule(362 * KIB, KernelChoice("flagged", 132)),
    Rule(12 * MIB, KernelChoice("bulk", 132, 24 * KIB)),
    Rule(1 << 62, KernelChoice("bulk", 132, 24 * KIB, in_turn=True)),
)
TableKey = tuple[int, bool]
"""Number of ranks, and whether the result stays in the arena."""
FALLBACK = KernelChoice("threads", 128)
"""If the choice does not apply: bulk copies need units of 16 bytes, flags units of 8."""

HOST_BLOCKS, HOST_SLICE_BYTES = 24, 128 * KIB
"""Of exchanges through host memory: at most so many blocks, half of which push and half of which take, and
slices, on which all ranks must agree. Forwards on two H200 are 2% faster than with 16 blocks and 256 KiB."""

FLAGGED_LIMIT = 512 * KIB
MIN_FLAGGED_UNIT, MIN_BULK_UNIT = 8, 16
MIN_BULK_ROW = 256
"""Bytes; the setup of bulk copies costs too much for shorter rows."""


def host_choice(num_multiprocessors: int) -> KernelChoice:
    """At most a fifth of a small device: attention needs the rest, and 8 blocks fill PCIe 4."""
    return KernelChoice("staged", max(8, min(HOST_BLOCKS, num_multiprocessors // 5)), HOST_SLICE_BYTES)


@dataclass(frozen=True, slots=True)
class Selector:
    """Rules by number of ranks and kind of result."""

    rules: Mapping[TableKey, tuple[Rule, ...]]
    has_bulk: bool

    def choose(
        self,
        *,
        num_ranks: int,
        in_arena: bool,
        pair_bytes: int,
        unit_bytes: int,
        dense_unit_bytes: int,
        row_bytes: int,
    ) -> KernelChoice:
        """The kernel for an exchange.

        Either all ranks choose flags or none does, so that choice depends on sizes and the unit of dense
        tensors. Threads and bulk copies write the same bytes, so each rank may choose by its own unit and
        rows.
        """
        rules = self.rules.get((num_ranks, in_arena), DEFAULT_RULES)
        choice = next((rule.choice for rule in rules if pair_bytes <= rule.up_to_bytes), FALLBACK)
        if choice.path == "flagged" and (dense_unit_bytes < MIN_FLAGGED_UNIT or pair_bytes > FLAGGED_LIMIT):
            return FALLBACK
        if choice.path == "bulk" and not (
            self.has_bulk and unit_bytes >= MIN_BULK_UNIT and row_bytes >= MIN_BULK_ROW
        ):
            return FALLBACK
        return choice


def table_path(device_name: str) -> Path:
    slug = "".join(c if c.isalnum() else "-" for c in device_name.lower())
    return cache_dir() / f"gfc-{slug}.json"


def tuned_tables() -> dict[str, str]:
    """Contents of all tables that were tuned on this machine, by file name."""
    found = {}
    for path in cache_dir().glob("gfc-*.json"):
        try:
            found[path.name] = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            _log.warning("cannot read %s (%s): using the shipped table", path, error)
    return found


def load_selector(device_name: str, *, has_bulk: bool, tables: Mapping[str, str] | None = None) -> Selector:
    """The device's tuned table, or the shipped one. tables: from `tuned_tables`; None: read them now."""
    path, rules = table_path(device_name), dict[TableKey, tuple[Rule, ...]]()
    text = (tuned_tables() if tables is None else tables).get(path.name)
    if text is not None:
        try:
            for table in json.loads(text)["tables"]:
                rows = tuple(
                    Rule(row["up_to_bytes"], KernelChoice(**row["choice"])) for row in table["rules"]
                )
                rules[table["num_members"], table["in_arena"]] = rows
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s is not a table of rules (%s): using the shipped table", path, error)
            rules = {}
    return Selector(rules, has_bulk)


def store_rules(device_name: str, rules: Mapping[TableKey, tuple[Rule, ...]]) -> Path:
    path = table_path(device_name)
    tables = [
        {"num_members": size, "in_arena": in_arena, "rules": [asdict(rule) for rule in rows]}
        for (size, in_arena), rows in rules.items()
    ]
    write_whole(path, json.dumps({"device": device_name, "tables": tables}, indent=1) + "\n")
    return path
