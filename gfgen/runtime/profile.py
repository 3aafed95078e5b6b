"""Measured durations of tasks, as reviewed data: a JSON file per device.

A profile is what `gfgen profile` measures, or what a person puts together from measurements and
says so in `source`. Cost models start from it; simulations and plans rest on it.

    {"format": 1, "device": "2 CPU cores", "date": "2026-11-20", "source": "gfgen profile ...",
     "versions": {"torch": "2.13.0"}, "num_ranks": 2, "move_s": 0.001, "move_bytes_per_s": 2e9,
     "rows": [{"model": "tiny-wan", "shape": "64x64x5+cfg", "stage": "denoise", "degrees": [1, 1, 1],
               "seconds": 0.021, "spread_s": 0.001, "num_samples": 20}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gfgen.errors import InputError
from gfgen.graph import Stage

Degrees = tuple[int, int, int]
"""(cfg, ulysses, ring), as `Layout.degrees`."""

FORMAT = 1


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One task on one layout: the median of its measurements, and their interquartile range."""

    model: str
    shape: str
    """`AdmittedJob.shape`."""
    stage: Stage
    degrees: Degrees
    seconds: float
    spread_s: float = 0.0
    num_samples: int = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """The table of one device."""

    device: str
    date: str
    source: str
    num_ranks: int
    """The most ranks that a row has."""
    rows: tuple[ProfileRow, ...]
    move_s: float = 0.0
    """What any move of a job's state takes, beside its bytes."""
    move_bytes_per_s: float = 2e9
    write_s: float = 0.0
    """From the end of a decode to the renamed file."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def models(self) -> frozenset[str]:
        return frozenset(row.model for row in self.rows)

    def as_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def load_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises: InputError that names the file and what is wrong with it.
    """
    try:
        content: Any = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"--profile {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"--profile {path}: not JSON ({error})") from None
    try:
        if content.pop("format") != FORMAT:
            raise ValueError(f"another format than {FORMAT}")
        rows = tuple(
            ProfileRow(**{**row, "stage": Stage(row["stage"]), "degrees": tuple(row["degrees"])})
            for row in content.pop("rows")
        )
        return Profile(rows=rows, **content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"--profile {path}: not a profile ({error}); 'gfgen profile' makes one") from None
