"""The figures and tables of the evaluation: the cells that each needs, and the table made of them.

Source: GF-DiT (arXiv 2606.13501), Table 1, sections 5.4, 6.1 and Figures 3, 6 to 11.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gfgen.bench.paper.cells import Cell, Results, admitted_of
from gfgen.bench.policy_comparison import Score
from gfgen.bench.workloads import Name, admitted, calibration_jobs, mix_of, models_of, weightless_model
from gfgen.graph import Stage
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile
from gfgen.system.wording import counted

WORKLOADS: tuple[Name, ...] = ("short", "foreground-burst")
LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)
GRID_LOADS = (0.3, 0.6, 0.8, 0.95, 1.1, 1.3, 1.5)
GRID_WORKLOADS: tuple[Name, ...] = ("short", "foreground-burst", "steady")
GRID_JOBS, GRID_SEEDS = 80, 5
COLLAPSE_LOAD, COLLAPSE_SEEDS = 1.1, 2
RESAMPLES = 2000
AUTO, NONE = "auto", "-"


@dataclass(frozen=True, slots=True)
class Grid:
    """What the cells of all figures have in common."""

    models: Sequence[str]
    num_ranks: int
    profile: Profile
    seeds: int = 3
    num_jobs: int = 120
    minutes: float | None = None
    steps: int | None = None
    load: float = 0.9
    deadlines_from: int = 1
    further: Sequence[str] = ()
    """Policies beside the paper's."""

    @property
    def single_models(self) -> list[str]:
        return list(dict.fromkeys(name for model in self.models for name in models_of(model)))

    @property
    def policies(self) -> dict[str, str]:
        """The paper's names, and `auto`. Its EDF does not give up lost jobs; SPmax takes all ranks."""
        most = f"srtf,degree={self.num_ranks}"
        return {
            "Legacy": "legacy", "EDF": "edf,rescue=false", "SRTF-SP1": "srtf", "SRTF-SPmax": most,
            "FCFS-SP1": "fcfs", AUTO: AUTO,
        } | {re.sub(r"^.*/|\.py", "", each): each for each in self.further}  # fmt: skip

    def cells(
        self,
        models: Iterable[str],
        workloads: Iterable[Name],
        loads: Iterable[float],
        policies: Iterable[str],
        **own: Any,
    ) -> tuple[Cell, ...]:
        """A cell for each combination and seed; `own` replaces fields."""
        seeds = range(1, own.pop("seeds", self.seeds) + 1)
        own = {name: getattr(self, name) for name in ("num_jobs", "minutes", "steps", "deadlines_from")} | own
        return tuple(
            Cell(model=model, workload=workload, load=load, seed=seed, policy=policy, **own)
            for model, workload, load, seed, policy in itertools.product(
                models, workloads, loads, seeds, policies
            )
        )


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a figure."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    curves: dict[str, list[tuple[float, float]]] | None = None
    """Points to draw, by name; the head's first word names the axis."""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    what: str
    """What it shows, in one line."""
    cells: Callable[[Grid], tuple[Cell, ...]] = lambda _: ()
    tables: Callable[[Grid, Results], Iterator[Table]] = lambda _grid, _cells: iter(())
    elsewhere: str | None = None
    """The command whose output is the figure, which is not simulated."""


# Numbers of several seeds ---------------------------------------------------------------------


def interval(found: Sequence[float]) -> tuple[float, float]:
    """95% bootstrap interval of the mean."""
    picks = np.random.default_rng(0).integers(0, len(found), (RESAMPLES, len(found)))
    low, high = np.percentile(np.array(found)[picks].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def words(found: Sequence[float], form: str = "{:.1f}", scale: float = 1.0) -> str:
    """The mean, and its interval if there are several."""
    if not found:
        return NONE
    mean = form.format(scale * statistics.mean(found))
    if len(found) == 1:
        return mean
    low, high = (form.format(scale * end) for end in interval(found))
    return mean if low == high else f"{mean} [{low}, {high}]"


def _attainment(found: Score) -> float:
    return found.attainment_client


def _bare(found: Score) -> float:
    return found.attainment


# Figure 3 -------------------------------------------------------------------------------------


def _stages(grid: Grid, _: Results) -> Iterator[Table]:
    """The time of each stage of the middle class on n ranks, over that on one."""
    for model in grid.single_models:
        job = admitted(calibration_jobs(model), weightless_model(model))[1]
        costs = CostModel(grid.profile)
        found, numbers = costs.class_of(job), range(1, grid.num_ranks + 1)
        arrangement = costs.arrangement(found)
        degrees = {
            Stage.ENCODE: [(1, 1, 1)] * grid.num_ranks,
            Stage.DENOISE: arrangement.steps,
            Stage.DECODE: [(1, number, 1) for number in arrangement.decodes],
        }
        rows = []
        for stage, ways in degrees.items():
            taken_s = [costs.estimate(found, stage, ways[number - 1]).seconds for number in numbers]
            rows.append([stage.name.lower(), *(f"{each / taken_s[0]:.2f}" for each in taken_s)])
        yield Table(f"{model}, class {job.spec.tag}", ("stage", *_ranks(grid)), rows)


def _shapes(grid: Grid, _: Results) -> Iterator[Table]:
    """The time of a step of each class on n ranks, over that on one."""
    for model in grid.single_models:
        costs, rows = CostModel(grid.profile), []
        for job in admitted(calibration_jobs(model), weightless_model(model)):
            found = costs.class_of(job)
            ways = costs.arrangement(found).steps[: grid.num_ranks]
            taken_s = [costs.estimate(found, Stage.DENOISE, way).seconds for way in ways]
            size = f"{job.spec.width}x{job.spec.height}" + (f"x{job.spec.frames}" if job.spec.frames else "")
            rows.append([f"{job.spec.tag} ({size})", *(f"{each / taken_s[0]:.2f}" for each in taken_s)])
        yield Table(model, ("class", *_ranks(grid)), rows)


def _ranks(grid: Grid) -> list[str]:
    return [f"{number} rank{'s' if number > 1 else ''}" for number in range(1, grid.num_ranks + 1)]


# Policies -------------------------------------------------------------------------------------


def _conflict(grid: Grid) -> tuple[Cell, ...]:
    return grid.cells(grid.models, WORKLOADS, (0.6, 1.2), grid.policies.values())


def _winners(grid: Grid, cells: Results) -> Iterator[Table]:
    names = grid.policies
    rows = []
    for model, workload, load in itertools.product(grid.models, WORKLOADS, (0.6, 1.2)):
        likes = {name: grid.cells([model], [workload], [load], [policy])[0] for name, policy in names.items()}
        found = {name: cells.values(like, _attainment) for name, like in likes.items()}
        known = {name: statistics.mean(each) for name, each in found.items() if each and name != AUTO}
        best = max(known, key=lambda name: known[name]) if known else NONE
        shares = [f"{statistics.mean(each):.0%}" if each else NONE for each in found.values()]
        pairs = zip(found[AUTO], found.get(best, ()), strict=False)  # by seed
        gains = words([own - other for own, other in pairs], "{:+.1f}", 100)
        rows.append([f"{model}, {workload}, load {load:g}", *shares, best, gains])
    head = ("workload", *names, "best but auto", "auto less that one, points")
    yield Table(
        f"Jobs in time for the client, deadlines from {counted(grid.deadlines_from, 'rank')}", head, rows
    )


def _main(grid: Grid) -> tuple[Cell, ...]:
    return grid.cells(grid.models, WORKLOADS, (grid.load,), grid.policies.values())


def _scores(grid: Grid, cells: Results) -> Iterator[Table]:
    for model, workload in itertools.product(grid.models, WORKLOADS):
        likes = grid.cells([model], [workload], [grid.load], grid.policies.values(), seeds=1)
        rows = [_score_row(name, cells, like) for name, like in zip(grid.policies, likes, strict=True)]
        yield Table(f"{model}, {workload}, load {grid.load:g}", _SCORES, rows)


_VALUES: Sequence[tuple[Callable[[Score], float | None], str, float]] = (
    (lambda found: found.jobs_per_min, "{:.1f}", 1),
    (lambda found: found.mean_s, "{:.1f}", 1),
    (lambda found: found.p95_s, "{:.1f}", 1),
    (_attainment, "{:.0f}", 100),
    (_bare, "{:.0f}", 100),
    (lambda found: found.num_failed, "{:.1f}", 1),
)
_SCORES = (
    "policy", "jobs a minute", "mean latency, s", "P95, s", "in time, %", "bare deadline, %", "failed"
)  # fmt: skip


def _score_row(name: str, cells: Results, like: Cell) -> list[str]:
    return [name, *(words(cells.values(like, value), form, scale) for value, form, scale in _VALUES)]


def _collapse(grid: Grid) -> tuple[Cell, ...]:
    """Jobs arrive for 2.5 times the time-out."""
    model = grid.single_models[-1]
    timeout_s = mix_of(model).timeout_s * (grid.steps or mix_of(model).steps) / mix_of(model).steps
    return grid.cells(
        [model],
        ["foreground-burst"],
        [COLLAPSE_LOAD],
        grid.policies.values(),
        seeds=min(grid.seeds, COLLAPSE_SEEDS),
        num_jobs=100_000,
        minutes=2.5 * timeout_s / 60,
        timeout_s=timeout_s,
    )


def _completed(grid: Grid, cells: Results) -> Iterator[Table]:
    likes = {cell.policy: cell for cell in _collapse(grid) if cell.seed == 1}
    rows = []
    for name, policy in grid.policies.items():
        shares = cells.values(likes[policy], lambda found: 1 - found.num_failed / found.num_jobs)
        rows.append([name, words(shares, "{:.0f}", 100), *_score_row(name, cells, likes[policy])[1:3]])
    like = next(iter(likes.values()))
    title = f"{like.model}, {like.workload}, load {like.load:g}, {like.minutes:.0f} minutes of arrivals"
    head = ("policy", "completed, %", "jobs a minute", "mean latency, s")
    yield Table(f"{title}, time-out {like.timeout_s:.0f} s", head, rows)


def _arrivals(grid: Grid, _: Results) -> Iterator[Table]:
    """Arrivals in each minute, by class."""
    for cell in grid.cells(grid.models, WORKLOADS, (grid.load,), [AUTO], seeds=1):
        counts: dict[str, Counter[int]] = {}
        jobs = admitted_of(cell, grid.profile, num_ranks=grid.num_ranks)
        for job in jobs:
            counts.setdefault(job.spec.tag or "", Counter())[int((job.spec.arrival_s or 0.0) // 60)] += 1
        last = max(itertools.chain.from_iterable(counts.values()))
        curves = {
            tag: [(float(minute), float(counts[tag][minute])) for minute in range(last + 1)]
            for tag in sorted(counts, key="SML".find)
        }
        rows = [[tag, str(sum(counts[tag].values())), str(max(counts[tag].values()))] for tag in curves]
        title = f"{cell.model}, {cell.workload}, {last + 1} minutes"
        yield Table(title, ("class", "jobs", "most in a minute"), rows, curves, "arrivals a minute")


def _rates(grid: Grid) -> tuple[Cell, ...]:
    names = ("edf,rescue=false", "srtf", AUTO)
    return grid.cells(grid.models, ["short"], LOADS, names)


def _curves(grid: Grid, cells: Results) -> Iterator[Table]:
    names = {"EDF": "edf,rescue=false", "SRTF-SP1": "srtf", AUTO: AUTO}
    for model in grid.models:
        rows: list[list[str]] = []
        curves: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for load in LOADS:
            row = [f"{load:g}"]
            for name, policy in names.items():
                met = cells.values(grid.cells([model], ["short"], [load], [policy])[0], _attainment)
                row.append(words(met, "{:.0f}", 100))
                if met:
                    curves[name].append((load, 100 * statistics.mean(met)))
            rows.append(row)
        yield Table(f"{model}, short", ("load", *names), rows, curves, "in time for the client, %")


def _pinned(grid: Grid) -> dict[str, str]:
    """All ranks for each job, in order of arrival: as gfgen and diffusers do it."""
    most = grid.num_ranks
    stock = f"diffusers,degree={most}" + (",uneven=true" if most > 1 else "")
    return {"Legacy": "legacy", f"FCFS-SP{most}": f"fcfs,degree={most}", "diffusers": stock}


def _fixed(grid: Grid) -> tuple[Cell, ...]:
    names = _pinned(grid).values()
    return grid.cells(grid.single_models[:1], ["foreground-burst"], [grid.load], names, seeds=1)


def _overhead(grid: Grid, cells: Results) -> Iterator[Table]:
    likes = _fixed(grid)
    rows = [_score_row(name, cells, like) for name, like in zip(_pinned(grid), likes, strict=True)]
    yield Table(f"{likes[0].model}, {likes[0].workload}, load {grid.load:g}", _SCORES, rows)


def _replayed(grid: Grid) -> tuple[Cell, ...]:
    """The cells of figure 6, and a fixed layout under bursts."""
    found = grid.cells(grid.models[:1], WORKLOADS, [grid.load], grid.policies.values())
    fixed = f"fcfs,degree={grid.num_ranks}"
    return *found, *grid.cells(grid.models[:1], ["foreground-burst"], [grid.load], [fixed])


def fidelity(grid: Grid, simulated: Results, run: Results) -> Iterator[Table]:
    """Attainment and makespan of the same traces, simulated and run; means over the seeds that ran."""
    for workload in WORKLOADS:
        cells = [cell for cell in _replayed(grid) if cell.workload == workload]
        rows = []
        for like in (cell for cell in cells if cell.seed == 1):
            alike = [cell for cell in cells if cell.policy == like.policy]
            both = [(a, b) for cell in alike if (a := simulated.score(cell)) and (b := run.score(cell))]
            if not both:
                known = words(simulated.values(like, _attainment), "{:.1f}", 100)
                rows.append([like.policy, known, "not run", *[NONE] * 4, "0"])
                continue
            met, ran_met = (100 * statistics.mean(map(_attainment, each)) for each in zip(*both, strict=True))
            end_s, ran_s = (
                statistics.mean(found.makespan_s for found in each) for each in zip(*both, strict=True)
            )
            shares = [f"{met:.1f}", f"{ran_met:.1f}", f"{ran_met - met:+.1f}"]
            ends = [f"{end_s:.1f}", f"{ran_s:.1f}", f"{ran_s / end_s - 1:+.1%}"]
            rows.append([like.policy, *shares, *ends, str(len(both))])
        head = ("policy", "simulated, %", "run, %", "difference, points", "makespan simulated, s", "run, s")
        title = f"{grid.models[0]}, {workload}, load {grid.load:g}"
        yield Table(title, (*head, "difference", "seeds that ran"), rows)


# The grid -------------------------------------------------------------------------------------


def grid_cells(grid: Grid) -> tuple[Cell, ...]:
    policies = grid.policies.values()
    found: list[Cell] = []
    for number in (1, grid.num_ranks):
        found += grid.cells(
            grid.models, GRID_WORKLOADS, GRID_LOADS, policies,
            seeds=GRID_SEEDS, num_jobs=GRID_JOBS, minutes=None, deadlines_from=number,
        )  # fmt: skip
    return tuple(found)


def grid_table(grid: Grid, cells: Results) -> Iterator[Table]:
    """How far `auto` is from the best of the others, at each point."""
    points = sorted({replace(cell, policy="", seed=1) for cell in cells.cells})
    rows: list[list[str]] = []
    lost: dict[str, list[float]] = {"client": [], "bare": []}
    for point in points:
        row = [f"{point.model}, {point.workload}, from {point.deadlines_from}, load {point.load:g}"]
        for name, value in (("client", _attainment), ("bare", _bare)):
            met = {
                policy: statistics.mean(found)
                for policy in grid.policies.values()
                if (found := cells.values(replace(point, policy=policy), value))
            }
            if AUTO not in met or len(met) == 1:
                continue
            best = max((policy for policy in met if policy != AUTO), key=lambda policy: met[policy])
            lost[name].append(met[AUTO] - met[best])
            row += [f"{met[AUTO]:.1%}", f"{100 * lost[name][-1]:+.1f} ({best})"]
        if len(row) > 1:
            rows.append(row)
    head = ("point", "auto, client", "less the best", "auto, bare", "less the best")
    if rows:
        mean = [f"{100 * statistics.mean(lost[name]):+.1f}" for name in ("client", "bare")]
        worst = [f"{100 * min(lost[name]):+.1f}" for name in ("client", "bare")]
        rows = [["mean", "", mean[0], "", mean[1]], ["worst", "", worst[0], "", worst[1]], *rows]
    yield Table(f"{len(points)} points, {GRID_SEEDS} seeds of {GRID_JOBS} jobs", head, rows)


def auto_by_point(cells: Results) -> dict[str, list[float]]:
    """What is stored for `--check`: the attainment of `auto` at each point, for the client and bare."""
    points = {replace(cell, seed=1) for cell in cells.cells if cell.policy == AUTO}
    return {
        f"{cell.model} {cell.workload} from {cell.deadlines_from} load {cell.load:g}": [
            round(statistics.mean(cells.values(cell, value)), 4) for value in (_attainment, _bare)
        ]
        for cell in sorted(points)
    }


FIGURES = {
    "3a": Figure("Figure 3a", "Stages scale differently: time on n ranks over that on one", tables=_stages),
    "3b": Figure("Figure 3b", "Shapes scale differently: a step on n ranks over one", tables=_shapes),
    "3c": Figure("Figure 3c", "No fixed policy is the best everywhere", _conflict, _winners),
    "table1": Figure("Table 1", "What a new NCCL group costs, and ours", elsewhere="gfgen bench gfc"),
    "6": Figure("Figure 6", "Policies on the main workloads; intervals over seeds", _main, _scores),
    "collapse": Figure("Collapse", "Large groups time out under load", _collapse, _completed),
    "7": Figure("Figure 7", "Arrivals of the main workloads", tables=_arrivals),
    "8": Figure(
        "Figure 8", "A fixed layout beside diffusers, and beside a bare loop", _fixed, _overhead,
        elsewhere="python -m benchmarks.elasticity --only 'fcfs*'",
    ),
    "9": Figure("Figure 9", "Collectives beside NCCL's", elsewhere="gfgen bench gfc"),
    "10": Figure("Figure 10", "Deadlines met against load", _rates, _curves),
    "11": Figure("Figure 11", "The same trace, simulated and run", _replayed),
    "grid": Figure("Grid", "`auto` against the best policy at each point", grid_cells, grid_table),
}  # fmt: skip
