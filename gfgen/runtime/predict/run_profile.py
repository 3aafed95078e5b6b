"""Keep a run's task times for the predictions of later runs and plans.

They have a separate file, because no run changes the file of `gfgen profile`. A failure here is one line in
the log and does not affect the run.
"""

from __future__ import annotations

import fcntl
import logging
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from gfgen.errors import InputError
from gfgen.graph import Stage
from gfgen.layout import Degrees
from gfgen.runtime.predict.cost import CostClass
from gfgen.runtime.predict.profile_file import Profile, ProfileRow, interquartile_range, load_profile
from gfgen.runtime.predict.profile_store import BY_RUNS, MIN_SAMPLES, write_profile
from gfgen.system.machine import versions

logger = logging.getLogger(__name__)

MAX_ROWS = 500
"""About 150 KB; the rows with the oldest measurements are dropped first."""
MAX_WEIGHT = 64
"""The most samples that earlier measurements count as, so that a row follows the machine."""
FAR_APART = 2.0
"""Medians of one task that differ by more than this factor are not measurements of the same."""


def keep_measured(
    path: Path, classes: Iterable[CostClass], *, device: str, num_ranks: int, share_cores: bool
) -> None:
    """Merge a run's measurements into the file; several runs may do so at once.

    share_cores: ranks slow each other down, so durations are those under load.
    """
    rows = list(_rows(classes, share_cores=share_cores))
    if not rows:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            profile = Profile(
                device=device,
                date=time.strftime("%Y-%m-%d"),
                source=BY_RUNS,
                num_ranks=num_ranks,
                rows=tuple(rows),
                versions=versions(),
            )
            write_profile(_merged(path, profile), path)
    except (OSError, InputError) as error:
        logger.warning("this run's measurements are not kept for plans: %s", error)


def _rows(classes: Iterable[CostClass], *, share_cores: bool) -> Iterator[ProfileRow]:
    found: dict[tuple[str, str, Stage, Degrees], tuple[CostClass, list[float]]] = {}
    for each in {id(each): each for each in classes}.values():
        for (stage, degrees), recent in each.measured.items():
            if stage is not Stage.REUSE:  # profiles have computed tasks only
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
    """The profile merged with the rows of the file; equal tasks get the mean, weighted by samples.

    Raises: InputError if the file is not a profile.
    """
    if not path.is_file():
        return profile
    before = load_profile(path)
    if (before.device, before.versions) != (profile.device, profile.versions):
        logger.info("%s is for another device or other versions: replacing it", path)
        return profile
    rows = {(row.model, row.shape, row.stage, row.degrees): row for row in before.rows}
    for row in profile.rows:
        old = rows.pop((row.model, row.shape, row.stage, row.degrees), None)
        rows[row.model, row.shape, row.stage, row.degrees] = row if old is None else _mean(old, row)
    return replace(
        profile,
        rows=tuple(rows.values())[-MAX_ROWS:],
        num_ranks=max(before.num_ranks, profile.num_ranks),
    )


def _mean(old: ProfileRow, new: ProfileRow) -> ProfileRow:
    """Their mean. If they are far apart, one is wrong, or the machine has changed: the new one if it has some
    samples, or else the old one with half of its weight.
    """
    if max(old.seconds, new.seconds) > FAR_APART * min(old.seconds, new.seconds):
        if new.num_samples >= min(MIN_SAMPLES, old.num_samples):
            return replace(new, write_s=old.write_s if new.write_s is None else new.write_s)
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
        write_s=old.write_s if new.write_s is None else new.write_s,
    )
