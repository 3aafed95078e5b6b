"""A cluster in virtual time: how well the driver splits work, and what it costs per job.

    python -m benchmarks.cluster_simulated --jobs 10000 --nodes 1,2,4,8,16

Nodes have 8 ranks with the shipped profile of the H200, which knows 1 and 2 ranks of a job; times of more are
extrapolated. A perfect split is the time of all jobs on one rank, divided by all ranks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import click

from benchmarks.measured import about, head, row
from gfgen.bench.workloads import (
    Name,
    WorkloadOptions,
    admitted,
    alone_s,
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
from gfgen.runtime.simulate.simulation import Simulated, simulate

MODEL, NUM_RANKS = "qwen-image", 8


def on_nodes(
    jobs: Sequence[AdmittedJob], policy: str, profile: Profile, num_nodes: int
) -> tuple[Simulated, float]:
    """The run, and the driver's processor time per job in ms."""
    nodes_s = [0.0]
    with (
        _timed(simulated.SimulatedCluster, "wait", nodes_s),
        _timed(simulated.SimulatedNode, "__init__", nodes_s),
        _timed(simulated, "profiled_times", nodes_s),
    ):
        began_s = time.process_time()
        sizes: Any = {"num_nodes": num_nodes, "num_ranks": NUM_RANKS}
        run = simulated.simulate_nodes(jobs, policy=load_policy(policy), profile=profile, **sizes)
        driver_s = time.process_time() - began_s - nodes_s[0]
    return run, 1000 * driver_s / len(jobs)


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


def table(profile: Profile, num_jobs: int, counts: Sequence[int], policy: str, load: float | None) -> None:
    """Of jobs at once, or of jobs with deadlines that arrive over time at this load."""
    when = "at once" if load is None else f"that arrive over time, load {load}"
    click.echo(f"\n{num_jobs} jobs {when}, {policy}\n")
    columns = "perfect split s, makespan s, longer by, ranks busy"
    columns = columns if load is None else "deadlines met, on one machine, points"
    click.echo(head("nodes", *columns.split(", "), "driver ms per job"))
    model, costs = weightless_model(MODEL), CostModel(profile)
    times = stand_alone(model, costs)
    for num_nodes in counts:
        num_ranks = NUM_RANKS * num_nodes
        name: Name = "overnight" if load is None else "short"
        options = WorkloadOptions(num_jobs=num_jobs, num_ranks=num_ranks, load=load or 1.0)
        jobs = admitted(make_workload(name, MODEL, times, options), model)
        run, driver_ms = on_nodes(jobs, policy, profile, num_nodes)
        assert load or run.summary.num_done == num_jobs
        if load is None:
            best_s = sum(alone_s(job, costs, degree=1) for job in jobs) / num_ranks
            made_s = run.summary.makespan_s
            longer, busy = f"{made_s / best_s - 1:.1%}", f"{run.summary.utilisation:.1%}"
            cells = [f"{best_s:.1f}", f"{made_s:.1f}", longer, busy]
        else:
            whole = simulate(jobs, policy=load_policy(policy), num_ranks=num_ranks, profile=profile)
            split, one = attainment(run), attainment(whole)
            cells = [f"{split:.2%}", f"{one:.2%}", f"{100 * (split - one):+.2f}"]
        click.echo(row(num_nodes, *cells, f"{driver_ms:.2f}"))


@click.command(help=__doc__)
@click.option("--jobs", "num_jobs", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--nodes", default="1,2,4,8,16", show_default=True)
@click.option("--split", multiple=True, default=("makespan",), help="Policies for jobs at once.")
@click.option("--due", multiple=True, help="Policies for jobs with deadlines.")
@click.option("--load", "loads", type=float, multiple=True, default=(0.8,), show_default=True)
def main(
    *, num_jobs: int, nodes: str, split: tuple[str, ...], due: tuple[str, ...], loads: tuple[float, ...]
) -> None:
    profile = load_profile(SHIPPED / "h200.json")
    click.echo(about())
    for policy, load in [*((each, None) for each in split), *itertools.product(due, loads)]:
        table(profile, num_jobs, [int(count) for count in nodes.split(",")], policy, load)


if __name__ == "__main__":
    main()
