"""What wide layouts gain on cards without peer access, simulated: `auto` with and without them.

    python -m benchmarks.slow_links --jobs 40 --seeds 2 --deadlines-from 4

The mixed workloads of `gfgen bench compare` with the profile of H200 that comes with gfgen, exchanges through
main memory at 12 and 25 GB/s by `runtime/predict/links.py`, and peer memory beside them. Where cards are in
pairs, "alone" means inside a pair, and the links are those between pairs. Deadlines are met within the
client's slack. A job is due after 1.5 to 6 times what it takes alone on `--deadlines-from` cards.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.measured import head, row
from gfgen.bench.policy_comparison import score
from gfgen.bench.workloads import (
    Name,
    WorkloadOptions,
    admitted,
    make_workload,
    mix_of,
    stand_alone,
    weightless_model,
)
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile, load_profile
from gfgen.runtime.predict.profile_store import SHIPPED
from gfgen.runtime.simulate.simulation import simulate

MODELS = ("wan2.2-ti2v-5b", "qwen-image")
WORKLOADS: tuple[Name, ...] = ("short", "foreground-burst", "steady")
LINKS = (12, 25, 0)
"""GB/s; 0: peer memory."""
KINDS = ((4, 1), (4, 2), (8, 1), (8, 2))
"""Cards, and how many of them reach each other."""


def over(jobs: Sequence[AdmittedJob], link: float, *, num_near: int) -> list[AdmittedJob]:
    limit = partial(replace, link_bytes_per_s=1e9 * link, num_near=num_near)
    return [replace(job, limits=limit(job.limits)) for job in jobs]


def measured(
    jobs: Sequence[AdmittedJob], profile: Profile, *, num_ranks: int, slack_s: float, **start: Any
) -> tuple[float, float]:
    """The share of deadlines met, and the mean latency. start: of `RunStart`."""
    run = simulate(jobs, policy=load_policy("auto"), num_ranks=num_ranks, profile=profile, **start)
    found = score("auto", run.outcomes, slack_s=slack_s)
    assert found.mean_s is not None
    return found.attainment_client, found.mean_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--deadlines-from", type=int, default=1, help="cards that a job has when alone")
    asked = parser.parse_args()
    profile = load_profile(SHIPPED / "h200.json")
    links = ("12 GB/s", "", "25 GB/s", "", "peer memory", "")
    print(head("model, workload", "cards", "alone: in time", "mean, s", *links))
    for model, name, (num_ranks, num_near) in itertools.product(MODELS, WORKLOADS, KINDS):
        print(_row(model, name, num_ranks, num_near, asked, profile), flush=True)


def _row(
    model: str, name: Name, num_ranks: int, num_near: int, asked: argparse.Namespace, profile: Profile
) -> str:
    near = [range(first, first + num_near) for first in range(0, num_ranks, num_near)]
    resolved, costs = weightless_model(model), CostModel(profile)
    times, slack_s = stand_alone(resolved, costs), mix_of(model).slack_s
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(1, asked.seeds + 1):
        options = WorkloadOptions(
            load=asked.load,
            seed=seed,
            num_jobs=asked.jobs,
            num_ranks=num_ranks,
            deadlines_from=asked.deadlines_from,
        )
        jobs = admitted(make_workload(name, model, times, options), resolved)
        measure = partial(measured, profile=profile, num_ranks=num_ranks, slack_s=slack_s)
        found.setdefault("alone", []).append(measure(jobs, islands=near))
        for link in LINKS:
            wide = measure(over(jobs, link, num_near=num_near), near=near if link else None)
            found.setdefault(str(link), []).append(wide)
    cells = [
        f"{100 * statistics.mean(met for met, _ in runs):.0f}% | {statistics.mean(s for _, s in runs):.1f}"
        for runs in found.values()
    ]
    cards = f"{num_ranks}, in pairs" if num_near > 1 else num_ranks
    return row(f"{model}, {name}", cards, *cells)


if __name__ == "__main__":
    main()
