"""Scale a profile of one CPU core to this machine, by measurements of runs or two seconds of calibration."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gfgen.graph import Stage
from gfgen.layout import ALONE, Degrees
from gfgen.runtime.core.devices import DEFAULT_CPU_RANKS
from gfgen.runtime.predict.cost_table import CostTable, TaskWork, speed_up
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.system.lifeline import output_of
from gfgen.system.linefile import write_whole
from gfgen.system.machine import cache_dir, cpu_name, file_stem, versions

logger = logging.getLogger(__name__)

TFLOPS = {
    "H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "H20": 148, "B200": 2250, "B300": 2250,
    "A100": 312, "A800": 312, "A40": 150, "A10": 125, "A6000": 155, "6000 Ada": 364, "L40S": 362, "L40": 181,
    "L4": 121, "RTX 5090": 210, "RTX 5080": 113, "RTX 4090": 165, "RTX 4080": 98, "RTX 3090": 71,
}  # fmt: skip
"""Dense products of bf16 matrices, by a part of the GPU's name; the first match counts.
Source: the vendor's datasheets and architecture papers."""
OTHER_TFLOPS = 80
_TIMEOUT_S = 60.0
"""For the calibration, including the import of torch."""


@dataclass(frozen=True, slots=True)
class Speed:
    alone: float
    """While the other ranks idle."""
    loaded: float
    """While all ranks are busy."""


def scaled_profile(profile: Profile, speed: Speed, *, device: str) -> Profile:
    rows = [_scaled(row, degrees, speed) for row in profile.rows for degrees in _degrees_of(row.stage)]
    return replace(profile, device=device, num_ranks=DEFAULT_CPU_RANKS, rows=tuple(rows), calibration_s=None)


def of_another_gpu(profile: Profile, device: str) -> Profile:
    """The profile of a GPU scaled to another one, by what both compute at most."""
    ratio = _tflops(profile.device) / _tflops(device)
    rows = [
        replace(
            row,
            seconds=row.seconds * ratio,
            loaded_s=None if row.loaded_s is None else row.loaded_s * ratio,
            basis="scaled",
        )
        for row in profile.rows
    ]
    return replace(profile, device=device, rows=tuple(rows), read_bytes_per_s=None, peaks={})


def _tflops(device: str) -> float:
    return next((tflops for name, tflops in TFLOPS.items() if name in device), OTHER_TFLOPS)


def _degrees_of(stage: Stage) -> Sequence[Degrees]:
    """The degrees in which ranks share a task of this stage."""
    alone, bands = [ALONE], [(1, number, 1) for number in range(2, DEFAULT_CPU_RANKS + 1)]
    branches = [(2, number, 1) for number in range(1, DEFAULT_CPU_RANKS // 2 + 1)]
    return {Stage.DENOISE: [*alone, *bands, *branches], Stage.DECODE: [*alone, *bands]}.get(stage, alone)


def _scaled(row: ProfileRow, degrees: Degrees, speed: Speed) -> ProfileRow:
    """Ranks that share a task need one core each to be faster."""
    number = math.prod(degrees)
    in_turn = max(1.0, number / _num_cores())
    return replace(
        row,
        degrees=degrees,
        seconds=row.seconds * speed.alone * in_turn / speed_up(number),
        loaded_s=row.seconds * speed.loaded / speed_up(number),
        basis="scaled",
    )


def speed_by_runs(profile: Profile, rows: Sequence[ProfileRow]) -> Speed | None:
    """The speed from steps that runs measured with all ranks busy; None if there are none of these models."""
    table, ratios = CostTable(profile), []
    for row in rows:
        if row.model in table.models and row.stage is Stage.DENOISE and row.loaded_s is not None:
            work = TaskWork(row.flops, row.state_bytes)
            found = table.task(row.model, row.shape, row.stage, row.degrees, work)
            if found is not None and found.seconds > 0:
                ratios.append(row.seconds / found.seconds)
    if not ratios:
        return None
    loaded = statistics.median(ratios)
    return Speed(loaded / _share_of_core(), loaded)


def calibrated_speed(profile: Profile, *, may_measure: bool) -> Speed | None:
    """The speed from a calibration, which is kept; None if there is none and `may_measure` is false."""
    kept = cache_dir() / "profiles" / f"{file_stem(cpu_name())}-calibration.json"
    found = _kept(kept)
    if found is None and may_measure:
        found = _measured()
        if found is not None:
            _keep(kept, found)
    if found is None or not profile.calibration_s:
        return None
    alone, together = (found[name] / profile.calibration_s for name in ("alone_s", "together_s"))
    return Speed(alone, together * _share_of_core())


def _share_of_core() -> float:
    """The number of the usual ranks that share a core."""
    return max(1.0, DEFAULT_CPU_RANKS / _num_cores())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


@cache
def _measured() -> dict[str, Any] | None:
    num_threads = min(DEFAULT_CPU_RANKS, _num_cores())
    logger.info("calibrating the speed of this machine, once")
    try:
        said = output_of("gfgen.models.families.calibration", str(num_threads), timeout_s=_TIMEOUT_S)
        return _checked({**json.loads(said), "versions": versions()})
    except (OSError, ValueError) as error:
        logger.warning("this machine could not be calibrated: %s", error)
        return None


def _kept(path: Path) -> dict[str, Any] | None:
    try:
        return _checked(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError):
        return None


def _checked(content: Any) -> dict[str, Any] | None:
    """The content if it is a calibration of these versions; None otherwise."""
    if not isinstance(content, dict) or content.get("versions") != versions():
        return None
    times = [content.get(name) for name in ("alone_s", "together_s")]
    is_sound = all(isinstance(each, float) and 0 < each < math.inf for each in times)
    return content if is_sound else None


def _keep(path: Path, content: dict[str, Any]) -> None:
    try:
        write_whole(path, json.dumps(content))
    except OSError as error:
        logger.info("the calibration is not kept: %s", error)
