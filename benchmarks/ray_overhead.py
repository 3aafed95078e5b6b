"""What Ray adds to a job: the same jobs on one node of a local Ray cluster and in a plain run, in turn.

    python -m benchmarks.ray_overhead --jobs 100 --pairs 6

Ranks of both load once and stay; the order within a pair alternates. Needs Ray.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from gfgen.cluster.member import MemberOptions
from gfgen.cluster.ray_cluster import LOCAL, RayCluster
from gfgen.cluster.ray_node import RayOptions
from gfgen.cluster.session import ClusterSession
from gfgen.policies.catalog import load_policy
from gfgen.runtime.control.flights import LOOKAHEAD_S
from gfgen.runtime.simulate.simulation import OutcomeRecorder
from gfgen.session.ranks import AskedRanks
from gfgen.session.session import Session, SessionOptions
from gfgen.system.machine import cpu_name

MODEL = "shapes"


def measured(session: Session, lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The makespan of these jobs, and the share of it in which ranks are busy."""
    kept = OutcomeRecorder()
    summary = session.run(session.admit(lines), observers=[kept])
    assert summary.num_done == len(lines), summary
    busy_s = sum(outcome.busy_s for outcome in kept.outcomes)
    return summary.makespan_s, busy_s / session.options.ranks.num_ranks / summary.makespan_s


@click.command()
@click.option("--jobs", "num_jobs", type=click.IntRange(1), default=100, show_default=True)
@click.option("--pairs", "num_pairs", type=click.IntRange(1), default=6, show_default=True)
@click.option("--ranks", "num_ranks", type=click.IntRange(1), default=2, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=1, show_default=True)
def main(*, num_jobs: int, num_pairs: int, num_ranks: int, steps: int) -> None:
    """Time per job and busy ranks over Ray and without."""
    asked = AskedRanks(ranks=num_ranks, device="cpu")
    member = MemberOptions(
        policy="fcfs", model=MODEL, ranks=asked, lookahead_s=LOOKAHEAD_S, work_dir=os.getcwd()
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = {
            name: SessionOptions(
                output_dir=folder / name, ranks=asked.here(), policy=load_policy("fcfs"), model=MODEL
            )
            for name in ("plain", "ray")
        }
        plain = stack.enter_context(Session(options["plain"]))
        cluster = RayCluster(RayOptions(address=LOCAL, member=member, output_dir=folder / "ray"))
        over_ray = ClusterSession(options["ray"], stack.enter_context(cluster))
        sessions = {"plain": plain, "ray": stack.enter_context(over_ray)}
        for session in sessions.values():
            session.load([], models=[MODEL])
        click.echo(f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, {num_ranks} ranks, {num_jobs} jobs\n")
        click.echo("| pair | plain ms per job | over Ray | more | ranks busy | over Ray | load |")
        click.echo("|---|---|---|---|---|---|---|")
        more = []
        for pair in range(num_pairs + 1):
            lines = [
                {"prompt": "a red circle falls", "id": f"{pair}-{n}", "frames": 1, "steps": steps, "seed": n}
                for n in range(num_jobs)
            ]
            order = sorted(sessions, reverse=bool(pair % 2))
            found = {name: measured(sessions[name], lines) for name in order}
            if not pair:  # warms up
                continue
            (plain_s, plain_busy), (ray_s, ray_busy) = found["plain"], found["ray"]
            plain_ms, ray_ms = 1000 * plain_s / num_jobs, 1000 * ray_s / num_jobs
            more.append(ray_ms - plain_ms)
            click.echo(
                f"| {pair} | {plain_ms:.1f} | {ray_ms:.1f} | {more[-1]:+.1f} "
                f"| {plain_busy:.1%} | {ray_busy:.1%} | {os.getloadavg()[0]:.0f} |"
            )
    click.echo(f"\nMedian over Ray: {median(more):+.1f} ms per job")


if __name__ == "__main__":
    main()
