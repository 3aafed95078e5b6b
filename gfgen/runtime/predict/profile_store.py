"""Find and save the profiles of this machine.

<cache>/profiles/<device>-gfgen-<version>.json         what `gfgen profile` measured here
<cache>/profiles/<device>-gfgen-<version>-runs.json    what runs measured here
<cache>/profiles/<device>-calibration.json             the speed of a core
gfgen/models/profiles/*.json                           profiles that come with gfgen, by device name
gfgen/models/profiles/scaled/*.json                    times on one CPU core, to be scaled to others

This machine's profile joins their rows: first those of `gfgen profile`, then those of runs, then scaled ones.
For a GPU without a shipped profile, those of another GPU are scaled by what both compute.
"""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from gfgen.errors import InputError
from gfgen.graph import Stage
from gfgen.models.families import registry
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.cost import CostClass
from gfgen.runtime.predict.profile_file import (
    FORMAT,
    Profile,
    ProfileRow,
    TaskKey,
    interquartile_range,
    load_profile,
    profile_of,
)
from gfgen.runtime.predict.scaling import calibrated_speed, of_another_gpu, scaled_profile, speed_by_runs
from gfgen.system.linefile import write_whole
from gfgen.system.machine import cache_dir, cpu_name, file_stem, locked, versions

logger = logging.getLogger(__name__)

SHIPPED = Path(registry.__file__).parents[1] / "profiles"
SCALED = SHIPPED / "scaled"
NVIDIA = "NVIDIA "
"""Names of GPUs begin with it."""
BY_RUNS = "runs"
"""The source of a profile that runs measured, which has only task times."""
MIN_SAMPLES = 3
"""Samples that a row of runs needs, because one or two may be outliers."""
MAX_ROWS = 500
"""About 150 KB; the rows with the oldest measurements are dropped first."""
MAX_WEIGHT = 64
"""The most samples that earlier measurements count as, so that a row follows the machine."""
LOCK_S = 60.0
"""How long to wait for other runs that merge theirs."""
FAR_APART = 2.0
"""Medians of one task that differ by more than this factor are not measurements of the same."""


def default_path(device: str | None = None, *, kind: str = "") -> Path:
    """The path for a profile of this device, by default this machine's CPU."""
    name = file_stem(device or cpu_name())
    version = versions().get("gfgen", "unknown")
    return cache_dir() / "profiles" / f"{name}-gfgen-{version}{kind}.json"


def runs_path(device: str | None = None) -> Path:
    return default_path(device, kind="-runs")


def find_profile(device: str | None = None, *, calibrate: bool = False) -> tuple[Path, Profile] | None:
    """The profile of this device, and its first source; `calibrate` may measure for two seconds."""
    device = device or cpu_name()
    shipped = filter(None, map(_readable, sorted(SHIPPED.glob("*.json"))))
    own = _readable(default_path(device))
    measured = own or next((each for each in shipped if each[1].device == device), None)
    by_runs = _readable(runs_path(device))
    found = [each for each in (measured, by_runs) if each is not None]
    if device == cpu_name():
        found += _scaled(found, may_measure=calibrate)
    elif measured is None and device.startswith(NVIDIA):
        path = next(iter(sorted(SHIPPED.glob("*.json"))))
        found.append((path, of_another_gpu(load_profile(path), device)))
    return (found[0][0], joined([profile for _, profile in found])) if found else None


def joined(profiles: Sequence[Profile]) -> Profile:
    """All rows; of equal tasks the first, except for runs with few samples before a later profile."""
    rows: dict[TaskKey, ProfileRow] = {}
    for profile in reversed(profiles):
        known = {row.model for row in rows.values()}
        for row in profile.rows:
            if row.basis == "runs" and row.num_samples < MIN_SAMPLES and row.model in known:
                continue
            before = rows.get(row.task)
            rows[row.task] = row if before is None or row.write_s else replace(row, write_s=before.write_s)
    first = profiles[0]
    times = next((profile for profile in profiles if profile.source != BY_RUNS), first)
    return replace(
        first,
        rows=tuple(rows.values()),
        num_ranks=max(profile.num_ranks for profile in profiles),
        move_s=times.move_s,
        move_bytes_per_s=times.move_bytes_per_s,
        write_s=times.write_s,
        dispatch_s=times.dispatch_s,
        read_bytes_per_s=next(filter(None, (each.read_bytes_per_s for each in profiles)), None),
        peaks={key: size for each in reversed(profiles) for key, size in each.peaks.items()},
    )


def _readable(path: Path) -> tuple[Path, Profile] | None:
    if not path.is_file():
        return None
    try:
        return path, load_profile(path)
    except InputError as error:
        logger.warning("%s", error)
        return None


def _scaled(known: Sequence[tuple[Path, Profile]], *, may_measure: bool) -> list[tuple[Path, Profile]]:
    """The shipped profiles of a core at this machine's speed, for models without one of their own."""
    measured = {row.model for _, profile in known for row in profile.rows if row.basis == "measured"}
    run_rows = [row for _, profile in known for row in profile.rows if row.basis == "runs"]
    found = []
    for path in sorted(SCALED.glob("*.json")):
        if (base := _readable(path)) is None or base[1].models & measured:
            continue
        speed = speed_by_runs(base[1], run_rows) or calibrated_speed(base[1], may_measure=may_measure)
        if speed is not None:
            found.append((path, scaled_profile(base[1], speed, device=cpu_name())))
    return found


@cache
def shipped_profiles() -> tuple[Profile, ...]:
    return tuple(load_profile(path) for path in sorted(SHIPPED.glob("*.json")))


def first_fitting(
    profiles: Iterable[Profile], jobs: Sequence[AdmittedJob], *, num_ranks: int
) -> Profile | None:
    """The first profile with the jobs' models and at least this many ranks."""
    fitting = (each for each in profiles if each.knows(jobs) and num_ranks <= each.num_ranks)
    return next(fitting, None)


def open_profile(path: Path | None) -> Profile:
    """The profile in a file, or this machine's. Raises: InputError if there is none, or it is unreadable."""
    if path is not None:
        return load_profile(path)
    found = find_profile()
    if found is None:
        raise InputError(
            f"there is no profile of this machine ({cpu_name()}): measure one with 'gfgen profile JOBS', or "
            "name one with --profile FILE"
        )
    return found[1]


def save_profile(profile: Profile, path: Path) -> Profile:
    """Write a profile; other shapes of an equal one stay. Raises: InputError if that fails."""
    if path.is_file():
        profile = _with_rows_of(profile, path)
    try:
        write_whole(path, profile.as_json())
    except OSError as error:
        raise InputError(f"--output {path}: cannot be written ({error.strerror})") from None
    return profile


def export_times(path: Path) -> Sequence[Profile]:
    """Write what was measured on this machine to one file. Raises: InputError if that is not possible."""
    here = default_path("any").parent.glob(f"*-gfgen-{versions().get('gfgen')}*.json")
    profiles = [each[1] for found in sorted(here) if (each := _readable(found)) is not None]
    if not profiles:
        raise InputError("no times of tasks were measured here: 'gfgen profile' and runs measure them")
    if path.is_file():
        _exported(path)
    content = {"gfgen_times": FORMAT, "profiles": [json.loads(each.as_json()) for each in profiles]}
    try:
        write_whole(path, json.dumps(content))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    return profiles


def import_times(path: Path) -> Iterator[tuple[Profile, str | None]]:
    """Keep the profiles of a file; each with the reason why not, or None. Raises: InputError."""
    for profile in _exported(path):
        target = default_path(profile.device, kind="-runs" if profile.source == BY_RUNS else "")
        here = _readable(target)
        if (other := profile.versions.get("gfgen")) != versions().get("gfgen"):
            yield profile, f"measured by gfgen {other}"
        elif here is not None and here[1].date >= profile.date:
            yield profile, f"the one here is of {here[1].date}"
        else:
            yield save_profile(profile, target), None


def _exported(path: Path) -> Sequence[Profile]:
    try:
        content = json.loads(path.read_text())
        if content["gfgen_times"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return [profile_of(each) for each in content["profiles"]]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: no file of 'gfgen cache export', or damaged ({error})") from None


def check_replaceable(path: Path) -> None:
    """Raises: InputError if the file exists and is not a profile of any format, since it would be lost."""
    if not path.is_file():
        return
    content: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text() or "{}")
    if not isinstance(content, dict) or (content and not {"format", "rows"} <= content.keys()):
        raise InputError(f"--output {path}: exists and is not a profile; name another file")


def _with_rows_of(profile: Profile, path: Path) -> Profile:
    try:
        before = load_profile(path)
    except InputError:
        return profile
    same = (before.device, before.num_ranks, before.versions)
    if same != (profile.device, profile.num_ranks, profile.versions):
        logger.info("%s is for another device, version or number of ranks: replacing it", path)
        return profile
    measured = {(row.model, row.shape) for row in profile.rows}
    kept = [row for row in before.rows if (row.model, row.shape) not in measured]
    return replace(profile, rows=(*kept, *profile.rows))


def keep_measured(
    path: Path, classes: Iterable[CostClass], *, device: str, num_ranks: int, share_cores: bool, **facts: Any
) -> None:
    """Merge a run's measurements into the file; several runs may do so at once.

    share_cores: ranks slow each other down, so durations are those under load. facts: more of the profile.
    """
    rows = list(_rows(classes, share_cores=share_cores))
    if not rows and not any(facts.values()):
        return
    try:
        with locked(path.with_name(f".{path.name}.lock"), timeout_s=LOCK_S):
            today = time.strftime("%Y-%m-%d")
            profile = Profile(device, today, BY_RUNS, num_ranks, tuple(rows), versions=versions(), **facts)
            write_whole(path, _merged(path, profile).as_json())
    except (OSError, InputError) as error:
        logger.warning("this run's measurements are not kept for plans: %s", error)


def _rows(classes: Iterable[CostClass], *, share_cores: bool) -> Iterator[ProfileRow]:
    found: dict[TaskKey, tuple[CostClass, list[float]]] = {}
    for each in dict.fromkeys(classes):
        for (stage, degrees), recent in each.measured.items():
            if stage is not Stage.APPROXIMATE:  # profiles have computed tasks only
                shape = each.kind if stage is Stage.DENOISE else each.shape
                found.setdefault((each.model, shape, stage, degrees), (each, []))[1].extend(recent.samples)
    for (model, shape, stage, degrees), (cost_class, samples) in found.items():
        seconds = round(statistics.median(samples), 6)
        writes = cost_class.writes.samples if stage is Stage.DECODE else ()
        yield ProfileRow(
            model=model,
            shape=shape,
            stage=stage,
            degrees=degrees,
            seconds=seconds,
            spread_s=round(interquartile_range(samples), 6),
            num_samples=len(samples),
            loaded_s=seconds if share_cores else None,
            flops=cost_class.flops[stage],
            state_bytes=cost_class.state_bytes,
            write_s=round(statistics.median(writes), 6) if writes else None,
            basis="runs",
        )


def _merged(path: Path, profile: Profile) -> Profile:
    """The profile with the rows of the file; equal tasks get the mean by samples. Raises: InputError."""
    if not path.is_file():
        return profile
    before = load_profile(path)
    if (before.device, before.versions) != (profile.device, profile.versions):
        logger.info("%s is for another device or other versions: replacing it", path)
        return profile
    rows = {row.task: row for row in before.rows}
    for row in profile.rows:
        old = rows.pop(row.task, None)
        rows[row.task] = row if old is None else _mean(old, row)
    return replace(
        profile,
        rows=tuple(rows.values())[-MAX_ROWS:],
        num_ranks=max(before.num_ranks, profile.num_ranks),
        read_bytes_per_s=profile.read_bytes_per_s or before.read_bytes_per_s,
        peaks=dict(list((Counter(before.peaks) | Counter(profile.peaks)).items())[-MAX_ROWS:]),
    )


def _mean(old: ProfileRow, new: ProfileRow) -> ProfileRow:
    """Their mean. If they are far apart, one is wrong, or the machine has changed: the new one if it has some
    samples, or else the old one with half of its weight.
    """
    if new.write_s is None:
        new = replace(new, write_s=old.write_s)
    if max(old.seconds, new.seconds) > FAR_APART * min(old.seconds, new.seconds):
        if new.num_samples >= min(MIN_SAMPLES, old.num_samples):
            return new
        return replace(old, num_samples=old.num_samples // 2)
    weight = min(old.num_samples, MAX_WEIGHT)
    share = new.num_samples / (weight + new.num_samples)
    seconds = round(old.seconds + (new.seconds - old.seconds) * share, 6)
    return replace(
        new,
        seconds=seconds,
        spread_s=round(old.spread_s + (new.spread_s - old.spread_s) * share, 6),
        num_samples=weight + new.num_samples,
        loaded_s=None if new.loaded_s is None else seconds,
    )
