"""A cluster in virtual time: how well the driver splits work, and what it costs per job.

    python -m benchmarks.cluster_simulated --jobs 10000 --nodes 1,2,4,8,16

Nodes have 8 ranks with the shipped profile of the H200, which knows 1 and 2 ranks of a job; times of more are
extrapolated. A perfect split is `least_makespan_s`: the least work of all jobs, divided by all ranks.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import click

from gfgen.bench.paper.bounds import least_makespan_s
from gfgen.bench.workloads import (
    Name,
    StandAlone,
    WorkloadOptions,
    admitted,
    make_workload,
    stand_alone,
    weightless_model,
)
from gfgen.cluster import simulated
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile, load_profile
from gfgen.runtime.predict.profile_store import SHIPPED
from gfgen.runtime.simulate.simulation import Simulated, profiled_times, simulate
from gfgen.system.machine import cpu_name

MODEL, NUM_RANKS = "qwen-image", 8


@dataclass(slots=True)
class Study:
    """Runs of the same model on nodes of 8 ranks."""

    profile: Profile
    times: StandAlone

    def jobs(
        self, workload: Name, *, num_jobs: int, num_nodes: int, load: float = 1.0
    ) -> Sequence[AdmittedJob]:
        options = WorkloadOptions(num_jobs=num_jobs, num_ranks=NUM_RANKS * num_nodes, load=load)
        return admitted(make_workload(workload, MODEL, self.times, options), weightless_model(MODEL))

    def on_nodes(self, jobs: Sequence[AdmittedJob], policy: str, num_nodes: int) -> tuple[Simulated, float]:
        """The run, and the driver's processor time per job in ms."""
        nodes_s = [0.0]
        with (
            _timed(simulated.SimulatedCluster, "wait", nodes_s),
            _timed(simulated.SimulatedNode, "__init__", nodes_s),
            _timed(simulated, "profiled_times", nodes_s),
        ):
            began_s = time.process_time()
            sizes: Any = {"num_nodes": num_nodes, "num_ranks": NUM_RANKS}
            run = simulated.simulate_nodes(jobs, policy=load_policy(policy), profile=self.profile, **sizes)
            driver_s = time.process_time() - began_s - nodes_s[0]
        return run, 1000 * driver_s / len(jobs)

    def on_one(self, jobs: Sequence[AdmittedJob], policy: str, num_ranks: int) -> Simulated:
        return simulate(jobs, policy=load_policy(policy), num_ranks=num_ranks, profile=self.profile)

    def perfect_s(self, jobs: Sequence[AdmittedJob], num_ranks: int) -> float:
        times = profiled_times(self.profile, jobs, num_ranks=NUM_RANKS)
        return least_makespan_s(jobs, times, num_ranks=num_ranks, max_degree=2)


def _timed(owner: Any, name: str, total_s: list[float]) -> Any:
    """Add the time of a method to a total."""
    method: Callable[..., Any] = getattr(owner, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        began_s = time.process_time()
        try:
            return method(*arguments, **options)
        finally:
            total_s[0] += time.process_time() - began_s

    return mock.patch.object(owner, name, timed)


def attainment(run: Simulated) -> float:
    due = [outcome for outcome in run.outcomes if outcome.deadline_s is not None]
    return sum(bool(outcome.met_deadline) for outcome in due) / len(due)


def splits(study: Study, num_jobs: int, counts: Sequence[int], policy: str) -> None:
    click.echo(f"\n{num_jobs} jobs at once, {policy}\n")
    click.echo("| nodes | perfect split s | makespan s | longer by | ranks busy | driver ms per job |")
    click.echo("|---|---|---|---|---|---|")
    for num_nodes in counts:
        jobs = study.jobs("overnight", num_jobs=num_jobs, num_nodes=num_nodes)
        best_s = study.perfect_s(jobs, NUM_RANKS * num_nodes)
        run, driver_ms = study.on_nodes(jobs, policy, num_nodes)
        made_s, busy = run.summary.makespan_s, run.summary.utilisation
        assert run.summary.num_done == num_jobs
        click.echo(
            f"| {num_nodes} | {best_s:.1f} | {made_s:.1f} | {made_s / best_s - 1:.1%} | {busy:.1%} "
            f"| {driver_ms:.2f} |"
        )


def deadlines(study: Study, num_jobs: int, counts: Sequence[int], policy: str, load: float) -> None:
    click.echo(f"\n{num_jobs} jobs that arrive over time, load {load}, {policy}\n")
    click.echo(
        "| nodes | deadlines met | on one machine | points | driver ms per job |\n|---|---|---|---|---|"
    )
    for num_nodes in counts:
        jobs = study.jobs("short", num_jobs=num_jobs, num_nodes=num_nodes, load=load)
        run, driver_ms = study.on_nodes(jobs, policy, num_nodes)
        split, one = attainment(run), attainment(study.on_one(jobs, policy, NUM_RANKS * num_nodes))
        click.echo(
            f"| {num_nodes} | {split:.2%} | {one:.2%} | {100 * (split - one):+.2f} | {driver_ms:.2f} |"
        )


@click.command()
@click.option("--jobs", "num_jobs", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--nodes", default="1,2,4,8,16", show_default=True)
@click.option("--split", "split_policies", multiple=True, help="Policies for jobs at once.")
@click.option("--due", "due_policies", multiple=True, help="Policies for jobs with deadlines.")
@click.option("--load", "loads", type=float, multiple=True, default=(0.8,), show_default=True)
def main(
    *,
    num_jobs: int,
    nodes: str,
    split_policies: tuple[str, ...],
    due_policies: tuple[str, ...],
    loads: tuple[float, ...],
) -> None:
    """The split of work and the deadlines met by nodes of 8 H200."""
    profile = load_profile(SHIPPED / "h200.json")
    study = Study(profile, stand_alone(weightless_model(MODEL), CostModel(profile)))
    counts = [int(count) for count in nodes.split(",")]
    click.echo(f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, Python {platform.python_version()}")
    for policy in split_policies:
        splits(study, num_jobs, counts, policy)
    for policy in due_policies:
        for load in loads:
            deadlines(study, num_jobs, counts, policy, load)


if __name__ == "__main__":
    main()
