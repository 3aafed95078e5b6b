"""What giving up steps is worth to deadlines: `auto` with and without `"reuse": "if-late"`, simulated.

    python -m benchmarks.if_late_study --processes 2 --output benchmarks/results/2026-11-25-if-late

Every point is 20 workloads of 80 jobs, the same with and without. Durations are those of the shipped profile
h200.json; a reused step's is an estimate (`CostModel.estimate`). Writes OUTPUT.json and
OUTPUT-tables.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from gfgen.bench.workloads import (
    Name,
    WorkloadOptions,
    admitted,
    make_workload,
    stand_alone,
    weightless_model,
)
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import load_profile
from gfgen.runtime.predict.profile_store import SHIPPED
from gfgen.runtime.simulate.simulation import simulate

MODELS = ("wan2.2-ti2v-5b", "qwen-image")
LOADS = (0.6, 0.8, 0.95, 1.1, 1.3, 1.5)
NUM_RANKS, NUM_JOBS = 2, 80
DEADLINES_FROM = (2, 4)
"""Deadlines are multiples of the time alone on so many GPUs; those from 4 are tight for two."""
Point = tuple[str, Name, int, float, int]
"""Model, workload, GPUs that deadlines are set from, load, seed."""


def run_point(point: Point) -> dict[str, Any]:
    """Shares of jobs in time without and with `if-late`, and the share of steps given up."""
    model, workload, deadlines_from, load, seed = point
    found, profile = weightless_model(model), load_profile(SHIPPED / "h200.json")
    options = WorkloadOptions(
        load=load, seed=seed, num_jobs=NUM_JOBS, num_ranks=NUM_RANKS, deadlines_from=deadlines_from
    )
    times = stand_alone(found, CostModel(profile), degrees=(1, *DEADLINES_FROM))
    jobs = admitted(make_workload(workload, model, times, options), found)
    row: dict[str, Any] = dict(zip(("model", "workload", "from", "load", "seed"), point, strict=True))
    for name, those in (("without", jobs), ("with", [_if_late(job, found.geometry) for job in jobs])):
        outcomes = simulate(those, policy=load_policy("auto"), num_ranks=NUM_RANKS, profile=profile).outcomes
        row[name] = statistics.fmean(bool(each.met_deadline) for each in outcomes)
        steps = sum(each.info.spec.steps or 0 for each in outcomes)
        row[f"given_up_{name}"] = sum(each.num_approximate for each in outcomes) / steps
    return row


def _if_late(job: AdmittedJob, geometry: Any) -> AdmittedJob:
    spec = replace(job.spec, reuse="if-late")
    return replace(job, info=replace(job.info, spec=spec), trajectory=geometry.trajectory(spec))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each point: means over seeds, and the standard error of the difference."""
    lines = [
        "| model | workload | deadlines from | load | without | if-late | gain | steps given up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = list(dict.fromkeys((r["model"], r["workload"], r["from"], r["load"]) for r in rows))
    for key in keys:
        own = [r for r in rows if (r["model"], r["workload"], r["from"], r["load"]) == key]
        before, after = (100 * statistics.fmean(r[name] for r in own) for name in ("without", "with"))
        gains = [100 * (r["with"] - r["without"]) for r in own]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        share = 100 * statistics.fmean(r["given_up_with"] for r in own)
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} GPUs | {key[3]} | {before:.1f}% | {after:.1f}% "
            f"| {after - before:+.1f} +- {error:.1f} | {share:.1f}% |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.if_late_study", description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--workload", default="short")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    models = options.model or MODELS
    points: list[Point] = [
        *itertools.product(models, [options.workload], DEADLINES_FROM, LOADS, range(options.seeds))
    ]
    began_s = time.monotonic()
    with ProcessPoolExecutor(options.processes) as pool:
        rows = list(pool.map(run_point, points, chunksize=4))
    options.output.with_suffix(".json").write_text(json.dumps(rows) + "\n")
    text = f"{len(points)} points in {(time.monotonic() - began_s) / 60:.1f} minutes\n\n{table(rows)}"
    options.output.with_name(options.output.name + "-tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
