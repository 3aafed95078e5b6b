"""Cells of the evaluation: one policy on one workload, kept as a file each, by the place where it ran."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

from gfgen.bench.policy_comparison import PolicyRun, Score, score, simulated_run
from gfgen.bench.workloads import (
    Name,
    WorkloadOptions,
    jobs_with,
    load_compared,
    mix_of,
    models_of,
    weightless_model,
    workload_of,
)
from gfgen.errors import InputError
from gfgen.job.spec import JobSpec
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.profile_file import Profile
from gfgen.system.linefile import write_whole
from gfgen.system.machine import commit, versions


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Cell:
    model: str
    """Or several, joined by '+'."""
    workload: Name
    load: float
    deadlines_from: int = 1
    num_jobs: int
    minutes: float | None = None
    """No job arrives later."""
    steps: int | None = None
    timeout_s: float | None = None
    seed: int
    policy: str

    @property
    def name(self) -> str:
        """Of its file: readable, and different for other cells."""
        key = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        words = f"{self.model}-{self.workload}-{self.load:g}-{self.policy}-{self.seed}"
        return f"{re.sub(r'[^a-z0-9.]+', '-', words.lower())}-{key}"

    def jobs(self, profile: Profile, *, num_ranks: int) -> tuple[JobSpec, ...]:
        """Arrivals and deadlines follow from the profile, so they are the same simulated and run."""
        names = {each.name for each in fields(WorkloadOptions)} - {"num_ranks"}
        options = WorkloadOptions(num_ranks=num_ranks, **{name: getattr(self, name) for name in names})
        return workload_of(self.workload, self.model, profile, options)


@dataclass(frozen=True, slots=True)
class Place:
    """Where cells ran. Cells of different places are never mixed."""

    card: str
    """Of a simulation: that of its profile."""
    num_ranks: int
    profile: str
    """The hash of the profile, from which arrivals and deadlines follow."""
    is_simulated: bool

    @property
    def name(self) -> str:
        card = re.sub(r"[^a-z0-9]+", "-", self.card.lower()).strip("-")
        words = f"{card}-x{self.num_ranks}-{self.profile[:8]}"
        return f"simulated-{words}" if self.is_simulated else words

    @property
    def words(self) -> str:
        how = "simulated with the profile of" if self.is_simulated else "run on"
        return f"{how} {self.num_ranks} x {self.card}"


@dataclass(frozen=True, slots=True)
class Found:
    """A cell with its result."""

    cell: Cell
    score: Score | None
    error: str | None
    """Why the policy has no score, or was replaced."""
    commit: str
    date: str


class CellStore:
    """`FOLDER/cells/PLACE/CELL.json`. A folder of a place can be carried to another machine."""

    def __init__(self, folder: Path, place: Place) -> None:
        self.place = place
        self._folder = folder / "cells" / place.name

    def read(self, cells: Sequence[Cell]) -> dict[Cell, Found]:
        found = {cell: self._read(cell) for cell in dict.fromkeys(cells)}
        return {cell: each for cell, each in found.items() if each is not None}

    def _read(self, cell: Cell) -> Found | None:
        path = self._folder / f"{cell.name}.json"
        try:
            content = json.loads(path.read_text())
            if content["place"] != asdict(self.place) or content["cell"] != asdict(cell):
                raise InputError(f"{path}: this is a cell of another place or workload; remove it")
            scored = content["score"] and Score(**content["score"])
            return Found(cell, scored, content["error"], content["commit"], content["date"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a kept cell ({error}); remove it") from None

    def keep(self, cell: Cell, run: PolicyRun) -> Found:
        found = found_of(cell, run)
        content = {**asdict(found), "place": asdict(self.place), "versions": versions()}
        path = self._folder / f"{cell.name}.json"
        write_whole(path, json.dumps(content, indent=1) + "\n")
        return found


def found_of(cell: Cell, run: PolicyRun) -> Found:
    slacks_s = {model: mix_of(model).slack_s for model in models_of(cell.model)}
    scored = None if run.error else score(cell.policy, run.outcomes, slacks_s=slacks_s, replaced_by=None)
    return Found(cell, scored, run.error or run.fault, commit(), time.strftime("%Y-%m-%d"))


def simulated(
    cells: Sequence[Cell], profile: Profile, *, num_ranks: int
) -> Generator[tuple[Cell, PolicyRun], None, None]:
    """Run the cells in virtual time, in a process per core. Closing it ends them."""
    run = partial(_simulated, profile=profile, num_ranks=num_ranks)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=gc.disable) as pool:
        try:
            yield from zip(cells, pool.map(run, cells, chunksize=4), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _simulated(cell: Cell, *, profile: Profile, num_ranks: int) -> PolicyRun:
    jobs = admitted_of(cell, profile, num_ranks=num_ranks)
    try:
        return simulated_run(cell.policy, jobs, profile, num_ranks=num_ranks)
    finally:
        gc.collect()


def admitted_of(cell: Cell, profile: Profile, *, num_ranks: int) -> tuple[AdmittedJob, ...]:
    models = map(weightless_model, models_of(cell.model))
    return jobs_with(cell.jobs(profile, num_ranks=num_ranks), load_compared(cell.policy)[1], *models)


class Results:
    """Found cells, by workload and policy."""

    def __init__(self, cells: Mapping[Cell, Found]) -> None:
        self.cells = cells
        self._by_seed: dict[Cell, list[Found]] = {}
        for cell, found in cells.items():
            self._by_seed.setdefault(replace(cell, seed=0), []).append(found)

    def score(self, cell: Cell) -> Score | None:
        found = self.cells.get(cell)
        return None if found is None else found.score

    def values(self, like: Cell, value: Callable[[Score], float | None]) -> list[float]:
        """Over the seeds of a cell that are there and have a value."""
        scores = [found.score for found in self._by_seed.get(replace(like, seed=0), ())]
        return [known for each in scores if each is not None and (known := value(each)) is not None]
