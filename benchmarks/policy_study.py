"""Which policy meets the deadlines: `auto` beside fixed ones, simulated on 4 GPUs.

    python -m benchmarks.policy_study --processes 2 --output benchmarks/results/2026-11-27-policies

Every point is 20 workloads of 80 jobs; all policies get the same ones, so that differences are paired by
seed. Durations come from the profile of four H200 that comes with gfgen (h200.json): nothing here was run
on a GPU. Writes OUTPUT.json (by seed), OUTPUT.md (tables and bars); `--charts DIR` draws the curves.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bounds import least_makespan_s
from gfgen.bench.policy_comparison import Score, score
from gfgen.bench.workloads import (
    MIXES,
    Name,
    WorkloadOptions,
    admitted,
    make_workload,
    stand_alone,
    weightless_model,
)
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile, load_profile
from gfgen.runtime.predict.profile_store import SHIPPED
from gfgen.runtime.simulate.simulation import profiled_times, simulate

MODELS = ("wan2.2-ti2v-5b", "qwen-image")
WORKLOADS: tuple[Name, ...] = ("short", "foreground-burst", "steady")
LOADS = (0.3, 0.6, 0.8, 0.95, 1.1, 1.3, 1.5)
NUM_RANKS, NUM_JOBS, NUM_SEEDS = 4, 80, 20
BLIND = ("legacy", "fcfs", "srtf", "srtf,degree=4")
"""Policies that look at no deadline: one run serves both ways of setting them."""
PAPER = "edf,rescue=false"
BASELINES = (*BLIND, PAPER)
POLICIES = (*BASELINES, "auto")
OVERNIGHT_JOBS, OVERNIGHT_SEEDS = 300, 5
OVERNIGHT_POLICIES = ("legacy", "fcfs", "srtf", PAPER, "makespan", "auto")
RESAMPLES = 2000
RUN_FIELDS = ("attainment", "attainment_client", "mean_s", "p95_s", "jobs_per_min", "num_failed")
NIGHT_FIELDS = ("makespan_s", "bound_s", "excess", "attainment", "mean_s")
"""What is kept of every run."""
CONDITIONS = ("wall_s", "processes", "commit", "date", "machine")
"""And of all of them."""
StudyPoint = tuple[Name, str, float, int]
"""Workload, model, load, seed."""
StudyRows = list[dict[str, Any]]
StudyCell = tuple[str, str, int, float]
"""Model, workload, GPUs that deadlines are set from, load."""
Cells = dict[StudyCell, dict[str, list[float | None]]]
"""By policy: values by seed; no latency where no job was done."""
TICKS = (1, 2, 5)
"""On each decade of an axis of seconds."""


def profile() -> Profile:
    return load_profile(SHIPPED / "h200.json")


def jobs_of(
    model: str, workload: Name, *, load: float, seed: int, deadlines_from: int, num_jobs: int
) -> tuple[AdmittedJob, ...]:
    found = weightless_model(model)
    times = stand_alone(found, CostModel(profile()))
    options = WorkloadOptions(
        load=load, seed=seed, num_jobs=num_jobs, num_ranks=NUM_RANKS, deadlines_from=deadlines_from
    )
    return admitted(make_workload(workload, model, times, options), found)


def outcomes_of(jobs: Sequence[AdmittedJob], policy: str) -> Sequence[JobOutcome]:
    return simulate(jobs, policy=load_policy(policy), num_ranks=NUM_RANKS, profile=profile()).outcomes


def run_point(point: StudyPoint) -> StudyRows:
    """All policies on one workload, with deadlines of both kinds."""
    workload, model, load, seed = point
    slack_s = MIXES[model].slack_s
    by_kind = {
        n: jobs_of(model, workload, load=load, seed=seed, deadlines_from=n, num_jobs=NUM_JOBS) for n in (1, 4)
    }
    rows: StudyRows = []

    def note(found: Score, deadlines_from: int) -> None:
        keys = {"workload": workload, "model": model, "load": load, "seed": seed, "from": deadlines_from}
        rows.append({**keys, **asdict(found)})

    for policy in BLIND:
        outcomes = outcomes_of(by_kind[1], policy)
        for n, jobs in by_kind.items():
            deadlines_s = {job.job_id: job.spec.deadline_s for job in jobs if job.spec.deadline_s is not None}
            due = [
                replace(each, deadline_s=each.arrival_s + deadlines_s[each.info.job_id]) for each in outcomes
            ]
            note(score(policy, due, slack_s=slack_s), n)
    for policy, n in itertools.product((PAPER, "auto"), by_kind):
        note(score(policy, outcomes_of(by_kind[n], policy), slack_s=slack_s), n)
    gc.collect()
    return rows


def run_overnight(point: tuple[str, int]) -> StudyRows:
    model, seed = point
    jobs = jobs_of(model, "overnight", load=1.0, seed=seed, deadlines_from=1, num_jobs=OVERNIGHT_JOBS)
    times = profiled_times(profile(), jobs, num_ranks=NUM_RANKS)
    bound_s = least_makespan_s(jobs, times, num_ranks=NUM_RANKS)
    return [
        asdict(found)
        | {"model": model, "seed": seed, "bound_s": bound_s, "excess": found.makespan_s / bound_s - 1}
        for found in (score(name, outcomes_of(jobs, name), slack_s=0.0) for name in OVERNIGHT_POLICIES)
    ]


# Tables -----------------------------------------------------------------------------------


def gathered(rows: StudyRows, keys: tuple[str, ...], fields: tuple[str, ...]) -> StudyRows:
    """A row for each point and policy, with lists of values by seed."""
    found: dict[Any, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        key = tuple(row[name] for name in keys)
        into = found.setdefault(key, dict(zip(keys, key, strict=True)) | {field: [] for field in fields})
        for field in fields:
            value = row[field]
            into[field].append(round(value, 4) if isinstance(value, float) else value)
    return list(found.values())


def by_cell(rows: StudyRows, field: str) -> Cells:
    """Values by seed, of each policy at each point."""
    cells: Cells = defaultdict(dict)
    for row in rows:
        cells[row["model"], row["workload"], row["from"], row["load"]][row["policy"]] = row[field]
    return cells


def mean(values: Sequence[float | None]) -> float:
    """Over the seeds that have a value."""
    known = _known(values)
    return statistics.mean(known) if known else math.nan


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def interval(values: Sequence[float | None]) -> tuple[float, float]:
    """95% bootstrap interval of the mean over seeds."""
    known = np.array(_known(values))
    picks = np.random.default_rng(0).integers(0, len(known), (RESAMPLES, len(known)))
    low, high = np.percentile(known[picks].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def bars(rows: StudyRows, overnight: StudyRows) -> list[str]:
    """What issue 6 asks of `auto`, and what was found."""
    lines = []
    for field, words in (
        ("attainment", "the jobs' deadlines"),
        ("attainment_client", "with the client's slack"),
    ):
        cells = by_cell(rows, field)
        worst, worst_cell = min(
            (min(mean(of["auto"]) - mean(of[name]) for name in BASELINES), cell) for cell, of in cells.items()
        )
        bursts = [
            np.subtract(_known(of["auto"]), _known(of[_best(of)]))
            for cell, of in cells.items()
            if cell[1] == "foreground-burst" and 0.6 <= cell[3] <= 1.1
        ]
        gains = np.mean(bursts, axis=0)
        low, high = interval(gains.tolist())
        lines += [
            f"| {words}: `auto` less the best of the others, worst of {len(cells)} points "
            f"| at least -2 points | {100 * worst:+.1f} ({_name(worst_cell)}) |",
            f"| {words}: the same, mean over foreground-burst at loads 0.6 to 1.1 | at least +5 points "
            f"| {100 * gains.mean():+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] |",
        ]
        lines += [
            f"| ... {model}, deadlines from {n} GPU{'s' if n > 1 else ''} | |"
            f" {100 * np.mean([g for g, c in _burst_gains(cells) if (c[0], c[2]) == (model, n)]):+.1f} |"
            for model in MODELS
            for n in (1, 4)
        ]
    latencies = by_cell(rows, "mean_s")
    low_load = [
        (mean(of["auto"]), mean(of["srtf"]), cell) for cell, of in latencies.items() if cell[3] <= 0.6
    ]
    ratio = sum(auto for auto, _, _ in low_load) / sum(srtf for _, srtf, _ in low_load)
    worst_ratio, cell = max((auto / srtf, cell) for auto, srtf, cell in low_load)
    lines.append(
        f"| mean latency at loads 0.3 to 0.6, over that of srtf at degree 1 | at most 0.7 "
        f"| {ratio:.2f}; worst point {worst_ratio:.2f} ({_name(cell)}) |"
    )
    excess = [value for row in overnight if row["policy"] == "auto" for value in row["excess"]]
    lines.append(f"| overnight: makespan over the lower bound | at most 5% | {max(excess):.1%} at most |")
    return ["| | asked | found |", "|---|---|---|", *lines]


def _best(of: dict[str, list[float | None]]) -> str:
    """The policy that is best at a point, apart from `auto`."""
    return max(BASELINES, key=lambda name: mean(of[name]))


def _burst_gains(cells: Cells) -> Iterator[tuple[float, StudyCell]]:
    for cell, of in cells.items():
        if cell[1] == "foreground-burst" and 0.6 <= cell[3] <= 1.1:
            yield mean(of["auto"]) - mean(of[_best(of)]), cell


def _name(cell: StudyCell) -> str:
    model, workload, n, load = cell
    return f"{model}, {workload}, deadlines from {n}, load {load:g}"


def table(rows: StudyRows, model: str, workload: str, n: int) -> list[str]:
    """Attainment with its interval and mean latency, a line per load."""
    met, taken = by_cell(rows, "attainment"), by_cell(rows, "mean_s")
    client = by_cell(rows, "attainment_client")
    lines = [f"| load | {' | '.join(POLICIES)} |", "|---|" + "---|" * len(POLICIES)]
    for load in LOADS:
        cell, texts = (model, workload, n, load), []
        for policy in POLICIES:
            low, high = interval(met[cell][policy])
            texts.append(
                f"{100 * mean(met[cell][policy]):.0f} [{100 * low:.0f}, {100 * high:.0f}] "
                f"({100 * mean(client[cell][policy]):.0f}), {mean(taken[cell][policy]):.1f} s"
            )
        lines.append(f"| {load:g} | {' | '.join(texts)} |")
    return lines


def report(
    rows: StudyRows,
    overnight: StudyRows,
    *,
    output: Path,
    wall_s: float,
    processes: int,
    commit: str,
    date: str,
    machine: str,
) -> str:
    """The recorded result: what was asked and found, then a table for each workload."""
    lines = [
        "# Policies under load, simulated",
        "",
        f"{date}; command: `python -m benchmarks.policy_study --processes {processes} --output {output}`, "
        f"{wall_s / 60:.1f} minutes on {machine}; commit {commit}.",
        "",
        f"{NUM_RANKS} ranks of the profile h200.json (Wan on four GPUs: measured at its largest shape only), "
        f"{NUM_JOBS} jobs a workload, {NUM_SEEDS} seeds, every policy on the same workloads. "
        "`legacy,degree=1` (single-rank replicas) decides as `fcfs` does. In the tables: percentage of "
        "jobs that met their deadline, its 95% bootstrap interval over seeds, in parentheses with the "
        "client's slack (5 s for videos, 1 s for images) that no policy sees, and the mean latency of "
        "completed jobs.",
        "",
        *bars(rows, overnight),
    ]
    for model, workload, n in itertools.product(MODELS, WORKLOADS, (1, 4)):
        title = f"## {model}, {workload}, deadlines from the {n}-GPU time"
        lines += ["", title, "", *table(rows, model, workload, n)]
    lines += ["", f"## overnight: {OVERNIGHT_JOBS} jobs at time 0, a fifth with deadlines", ""]
    lines += [
        "| model | policy | makespan over the lower bound | deadlines met | mean latency |",
        "|---|---|---|---|---|",
    ]
    for model, policy in itertools.product(MODELS, OVERNIGHT_POLICIES):
        found = next(row for row in overnight if (row["model"], row["policy"]) == (model, policy))
        excess, met, taken_s = (mean(found[name]) for name in ("excess", "attainment", "mean_s"))
        lines.append(f"| {model} | {policy} | {excess:+.1%} | {met:.0%} | {taken_s:.0f} s |")
    return "\n".join(lines) + "\n"


def charts(rows: StudyRows, folder: Path) -> None:
    """For each way of setting deadlines: attainment and mean latency against load (the paper's Figure 10)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    colours = dict(
        zip(POLICIES, ("#999999", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00"), strict=True)
    )
    met, taken = by_cell(rows, "attainment"), by_cell(rows, "mean_s")
    for n in (1, 4):
        figure, axes = plt.subplots(4, 3, figsize=(12, 12), sharex=True, sharey="row")
        for (m, model), (w, workload) in itertools.product(enumerate(MODELS), enumerate(WORKLOADS)):
            for policy in POLICIES:
                look = {"color": colours[policy], "label": policy, "lw": 2.5 if policy == "auto" else 1.4}
                values = [met[model, workload, n, load][policy] for load in LOADS]
                ends = np.array([interval(v) for v in values])
                axes[2 * m][w].plot(LOADS, [100 * mean(v) for v in values], **look)
                axes[2 * m][w].fill_between(LOADS, *(100 * ends.T), color=colours[policy], alpha=0.15, lw=0)
                means = [mean(taken[model, workload, n, load][policy]) for load in LOADS]
                axes[2 * m + 1][w].plot(LOADS, means, **look)
            axes[2 * m][w].set_title(f"{model}, {workload}", fontsize=10)
            axes[2 * m][w].set_ylim(0, 102)
            seconds = axes[2 * m + 1][w]
            seconds.set_yscale("log")
            seconds.yaxis.set_major_locator(LogLocator(subs=TICKS))
            seconds.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            seconds.yaxis.set_minor_formatter(NullFormatter())
            axes[2 * m][0].set_ylabel("deadlines met, %")
            axes[2 * m + 1][0].set_ylabel("mean latency, s")
            axes[3][w].set_xlabel("load")
        figure.suptitle(
            f"Simulated on 4 ranks (h200.json), deadlines from the {n}-GPU time", fontsize=11, y=0.995
        )
        figure.legend(
            *axes[0][0].get_legend_handles_labels(), ncols=6, loc="upper center", bbox_to_anchor=(0.5, 0.978)
        )
        for axis in axes.flat:
            axis.grid(alpha=0.25)
        figure.tight_layout(rect=(0, 0, 1, 0.945))
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"policies-deadlines-{n}.png", dpi=90)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--machine", default="this machine", help="what it ran on, for the report")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--output", type=Path, required=True, help="path without suffix")
    parser.add_argument("--charts", type=Path, help="folder for the pictures")
    parser.add_argument("--from-json", action="store_true", help="only draw and write what OUTPUT.json holds")
    options = parser.parse_args()
    path = options.output.with_suffix(".json")
    if options.from_json:
        found = json.loads(path.read_text())
    else:
        began_s = time.monotonic()
        points = list(itertools.product(WORKLOADS, MODELS, LOADS, range(options.seeds)))
        nights = list(itertools.product(MODELS, range(min(options.seeds, OVERNIGHT_SEEDS))))
        with ProcessPoolExecutor(options.processes, initializer=gc.disable) as pool:
            overnight = [row for rows in pool.map(run_overnight, nights) for row in rows]
            rows = [row for rows in pool.map(run_point, points, chunksize=8) for row in rows]
        found = {
            "wall_s": round(time.monotonic() - began_s, 1),
            "processes": options.processes,
            "commit": _commit(),
            "date": time.strftime("%Y-%m-%d"),
            "machine": options.machine,
            "rows": gathered(rows, ("workload", "model", "from", "load", "policy"), RUN_FIELDS),
            "overnight": gathered(overnight, ("model", "policy"), NIGHT_FIELDS),
        }
        header = {key: found[key] for key in CONDITIONS}
        path.write_text(_as_lines(header, rows=found["rows"], overnight=found["overnight"]))
    text = report(
        found["rows"], found["overnight"], output=options.output, **{key: found[key] for key in CONDITIONS}
    )
    options.output.with_suffix(".md").write_text(text)
    print("\n".join(bars(found["rows"], found["overnight"])))
    if options.charts:
        charts(found["rows"], options.charts)


def _commit() -> str:
    """What the numbers were made with."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    asked = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def _as_lines(header: dict[str, Any], **tables: StudyRows) -> str:
    """JSON with a line per row."""
    parts = [json.dumps(header)[1:-1]]
    for name, rows in tables.items():
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        parts.append(f'"{name}": [\n  {lines}\n ]')
    return "{" + ",\n ".join(parts) + "}\n"


if __name__ == "__main__":
    main()
