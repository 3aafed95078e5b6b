"""Measured durations of tasks, as reviewed data: a JSON file per device.

`gfgen profile` measures a profile, or a person assembles it from measurements and says so in `source`. Cost
models start from it, and simulations and plans use it.

    {"format": 1, "device": "2 cores of AMD EPYC", "date": "2026-11-20", "source": "gfgen profile ...",
     "versions": {"torch": "2.13.0"}, "num_ranks": 2, "dispatch_s": 0.001,
     "move_s": 0.001, "move_bytes_per_s": 2e9,
     "rows": [{"model": "tiny-wan", "shape": "64x64x5+cfg", "stage": "denoise", "degrees": [1, 1, 1],
               "seconds": 0.021, "loaded_s": 0.023, "spread_s": 0.001, "num_samples": 20,
               "flops": 2.1e8, "state_bytes": 98304}]}
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

from gfgen.errors import InputError
from gfgen.graph import Stage
from gfgen.layout import MAX_RANKS, Degrees
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.system.wording import named

FORMAT = 1
BASES = ("measured", "runs", "scaled")
"""The source of a row: `gfgen profile`, measurements of runs, or a scaled profile of another machine."""
MAX_SECONDS = 1e6
"""Limit for one task: more than a week is not a measurement."""
IN_BATCHES = " in batches of "
"""Before the number of jobs, at the end of a row's shape, for steps that jobs share."""
TaskKey = tuple[str, str, Stage, Degrees]
"""Model, shape, stage and degrees."""


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One task on one layout: the median of its measurements, and their interquartile range."""

    model: str
    shape: str
    """`AdmittedJob.shape`; of a shared step, `CostClass.kind`."""
    stage: Stage
    degrees: Degrees
    seconds: float
    """While the other ranks idle."""
    spread_s: float = 0.0
    num_samples: int = 1
    loaded_s: float | None = None
    """While all other ranks are busy; None if they make no difference. CPU ranks share memory."""
    flops: float = 0.0
    """`AdmittedJob.flops` of the task; 0 if unknown, and for stages without arithmetic."""
    state_bytes: int = 0
    """`AdmittedJob.state_bytes`, which determines the time of stages without arithmetic."""
    write_s: float | None = None
    """For a decode: from its end to the renamed file, with an idle writer."""
    basis: str = "measured"

    @property
    def under_load_s(self) -> float:
        """While all other ranks are busy."""
        return self.seconds if self.loaded_s is None else self.loaded_s

    @property
    def task(self) -> TaskKey:
        return self.model, self.shape, self.stage, self.degrees


@dataclass(frozen=True, slots=True)
class Profile:
    """The table of one device."""

    device: str
    date: str
    source: str
    num_ranks: int
    rows: tuple[ProfileRow, ...]
    move_s: float = 0.0
    """Fixed time of a move of a job's state, in addition to the time for its bytes."""
    move_bytes_per_s: float = 2e9
    write_s: float = 0.0
    """From the end of a decode to the renamed file, for rows without their own value."""
    dispatch_s: float = 0.0
    """From the end of a task to the start of the next one, decided at that end, on the same rank."""
    versions: Mapping[str, str] = field(default_factory=dict)
    calibration_s: float | None = None
    """Time of `models/families/calibration.py` on the same core, by which other machines scale the rows."""
    read_bytes_per_s: float | None = None
    """At which a GPU reads streamed blocks of main memory."""
    peaks: Mapping[str, int] = field(default_factory=dict)
    """By `peak_key`: the memory of a GPU that tasks on one rank take besides what is there before them."""

    @property
    def models(self) -> frozenset[str]:
        return frozenset(row.model for row in self.rows)

    def knows(self, jobs: Sequence[AdmittedJob]) -> bool:
        """Whether it has all models of the jobs, by their own names or their twins'."""
        models = self.models
        return all(job.model_in(models) in models for job in jobs)

    @property
    def has_writes(self) -> bool:
        """Whether it has times for writing files; otherwise simulations leave writing out."""
        return self.write_s > 0 or any(row.write_s is not None for row in self.rows)

    @property
    def shares_cores(self) -> bool:
        """Whether ranks slow each other down, as those of a CPU do."""
        return any(row.loaded_s is not None for row in self.rows)

    def num_writers(self, num_ranks: int) -> int:
        """With which a run begins, given four cores for each GPU; more may start (`Writes`)."""
        return 1 if self.shares_cores else num_ranks

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.as_json().encode()).hexdigest()

    def as_json(self) -> str:
        """The content of its file: a line per row, without unknown values."""
        head = _known({"format": FORMAT, **asdict(replace(self, rows=()))})
        del head["rows"]
        rows = [_known(asdict(row)) for row in self.rows]
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'


def peak_key(model: str | None, shape: str, stage: Stage, vae_dtype: str) -> str:
    return f"{model} {shape} {stage}" + (f" {vae_dtype}" if vae_dtype != "auto" else "")


NO_PROFILE = Profile(device="", date="", source="", num_ranks=1, rows=())


def interquartile_range(values: Collection[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def _known(content: dict[str, Any]) -> dict[str, Any]:
    """Without null values, empty tables and the default basis."""
    return {k: v for k, v in content.items() if v not in (None, {}) and (k, v) != ("basis", "measured")}


def load_profile(path: Path) -> Profile:
    """Raises: InputError that names the file and what is wrong with it."""
    try:
        content: Any = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"--profile {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"--profile {path}: not JSON ({error})") from None
    try:
        return profile_of(content)
    except (ValueError, TypeError) as error:
        raise InputError(f"--profile {path}: not a profile ({error}); 'gfgen profile' makes one") from None


def check_profile(profile: Profile, jobs: Sequence[AdmittedJob], *, num_ranks: int) -> None:
    """Raises: InputError, which says what to do, if a profile cannot predict these jobs on these ranks."""
    models = profile.models
    missing = [job.spec.model or "" for job in jobs if job.model_in(models) not in models]
    if missing:
        raise InputError(
            f"the profile of {profile.device!r} has no {named(list(dict.fromkeys(missing)), 'model')}, which "
            f"{len(missing)} of {len(jobs)} jobs use; it has {named(sorted(models), 'model')}: measure with "
            f"'gfgen profile JOBS' or 'gfgen profile --model {missing[0]}', or choose another with --profile"
        )
    for model in dict.fromkeys(job.model_in(models) for job in jobs):
        if not any(row.model == model and row.stage is Stage.DENOISE for row in profile.rows):
            raise InputError(
                f"the profile of {profile.device!r} has no row of {model} for denoise in any layout: measure "
                "it again with 'gfgen profile JOBS'"
            )
    if num_ranks > profile.num_ranks:
        raise InputError(
            f"--ranks {num_ranks}: the profile of {profile.device!r} knows "
            f"{'1 rank' if profile.num_ranks == 1 else f'1 to {profile.num_ranks} ranks'}; "
            f"use at most {profile.num_ranks}, or measure with 'gfgen profile --ranks {num_ranks}'"
        )


def profile_of(content: object) -> Profile:
    """The profile in a file's JSON. Raises: ValueError or TypeError that says what is wrong with it."""
    head = _checked(Profile, content)
    if head.pop("format", None) != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    if not isinstance(head.get("versions", {}), dict):
        raise ValueError(f"versions = {head['versions']!r} are no names with their versions")
    peaks, rows = head.get("peaks", {}), head.pop("rows", None)
    if not isinstance(peaks, dict) or any(type(size) is not int for size in peaks.values()):
        raise ValueError("peaks are no numbers of bytes by task")
    if not isinstance(rows, list) or not (rows or peaks or head.get("read_bytes_per_s")):
        raise ValueError("it has no rows")
    parsed = []
    for number, row in enumerate(rows, start=1):
        try:
            parsed.append(_row_of(row))
        except (ValueError, TypeError) as error:
            raise ValueError(f"row {number}: {error}") from None
    return Profile(rows=tuple(parsed), **head)


def _row_of(content: object) -> ProfileRow:
    row = _checked(ProfileRow, content)
    if row.get("basis", "measured") not in BASES:
        raise ValueError(f"basis = {row['basis']!r}: one of {', '.join(BASES)} is accepted")
    degrees: Any = row.get("degrees")
    is_known = isinstance(degrees, list) and len(degrees) in (3, 4)
    if not is_known or any(type(degree) is not int or degree < 1 for degree in degrees):
        raise ValueError(f"degrees {degrees!r}: three or four whole numbers are accepted, as in [1, 2, 1]")
    return ProfileRow(**{**row, "stage": Stage(row.get("stage", "")), "degrees": tuple(degrees)})


_NUMBERS: Mapping[str, Any] = {"int": (int,), "float": (int, float), "float | None": (int, float, NoneType)}
"""By annotation."""
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "num_ranks": (1, MAX_RANKS),
    "num_samples": (1, math.inf),
    "move_bytes_per_s": (1, math.inf),
    "calibration_s": (1e-6, math.inf),
    "read_bytes_per_s": (1, math.inf),
    **dict.fromkeys(("seconds", "spread_s", "loaded_s", "write_s"), (0, MAX_SECONDS)),
}
"""Of numbers that may not be anything from 0."""


def _checked(kind: type, content: object) -> dict[str, Any]:
    """The JSON object; its texts and numbers are such. The class refuses missing and unknown fields."""
    if not isinstance(content, dict):
        raise ValueError(f"{type(content).__name__} in place of an object with fields")
    for entry in fields(kind):
        if entry.name in content:
            _check(entry.name, content[entry.name], str(entry.type))
    return dict(content)


def _check(name: str, value: Any, kind: str) -> None:
    if kind == "str" and not isinstance(value, str):
        raise ValueError(f"{name} = {value!r} is no text")
    if kind not in _NUMBERS or (value is None and NoneType in _NUMBERS[kind]):
        return
    if isinstance(value, bool) or not isinstance(value, _NUMBERS[kind]) or not math.isfinite(value):
        raise ValueError(f"{name} = {value!r} is no {'whole ' if kind == 'int' else ''}number")
    least, most = _BOUNDS.get(name, (0, math.inf))
    if value < least:
        raise ValueError(f"{name} = {value!r} is below {least:g}")
    if value > most:
        raise ValueError(f"{name} = {value!r} is above {most:g}")
