"""What Ray adds to a job: the same jobs on one node of a local Ray cluster and in a plain run, in turn.

    python -m benchmarks.ray_overhead --jobs 100 --pairs 6

Ranks of both load once and stay; the order within a pair alternates. Needs Ray.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil

from benchmarks.measured import about, cpu_s, head, row
from gfgen.cluster.member import MemberOptions
from gfgen.cluster.ray_cluster import LOCAL, RayCluster
from gfgen.cluster.ray_node import RayOptions
from gfgen.cluster.session import ClusterSession
from gfgen.policies.catalog import load_policy
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.simulate.simulation import OutcomeRecorder
from gfgen.session.ranks import AskedRanks
from gfgen.session.session import Session, SessionOptions

MODEL = "shapes"


@dataclass(frozen=True, slots=True)
class Measured:
    ms: float
    """Of the makespan, per job."""
    processor_ms: float
    """Of all processes, per job."""
    busy: float
    """The share of the makespan in which ranks execute tasks."""

    @classmethod
    def of(cls, session: Session, lines: Sequence[dict[str, Any]]) -> Measured:
        kept, jobs, own = OutcomeRecorder(), session.admit(lines), psutil.Process()
        processes = [own, *own.children(recursive=True)]
        began_s = cpu_s(*processes)
        summary = session.run(jobs, observers=[kept])
        used_s = cpu_s(*processes) - began_s
        assert summary.num_done == len(lines), summary
        busy_s = sum(outcome.busy_s for outcome in kept.outcomes)
        busy = busy_s / session.options.ranks.num_ranks / summary.makespan_s
        return cls(1000 * summary.makespan_s / len(lines), 1000 * used_s / len(lines), busy)


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
        same: Any = {"ranks": asked.here(), "policy": load_policy("fcfs"), "model": MODEL}
        options = {name: SessionOptions(output_dir=folder / name, **same) for name in ("plain", "ray")}
        plain = stack.enter_context(Session(options["plain"]))
        cluster = RayCluster(RayOptions(address=LOCAL, member=member, output_dir=folder / "ray"))
        over_ray = ClusterSession(options["ray"], stack.enter_context(cluster))
        sessions = {"plain": plain, "ray": stack.enter_context(over_ray)}
        for session in sessions.values():
            session.load([], models=[MODEL])
        click.echo(f"{about()}, {num_ranks} ranks, {num_jobs} jobs\n")
        columns = "pair, ms per job: plain, Ray, processor ms: plain, Ray, busy: plain, Ray, load"
        click.echo(head(*columns.split(", ")))
        more: list[tuple[float, float, float]] = []
        for pair in range(num_pairs + 1):
            lines = [
                {"prompt": "a red circle falls", "id": f"{pair}-{n}", "frames": 1, "steps": steps, "seed": n}
                for n in range(num_jobs)
            ]
            order = sorted(sessions, reverse=bool(pair % 2))
            found = {name: Measured.of(sessions[name], lines) for name in order}
            if not pair:  # warms up
                continue
            own, ray = found["plain"], found["ray"]
            more.append((ray.ms - own.ms, ray.processor_ms - own.processor_ms, 100 * (ray.busy - own.busy)))
            cells = [*(f"{x:.1f}" for x in (own.ms, ray.ms, own.processor_ms, ray.processor_ms))]
            cells += [f"{own.busy:.1%}", f"{ray.busy:.1%}", f"{os.getloadavg()[0]:.0f}"]
            click.echo(row(pair, *cells))
    ms, processor_ms, points = (median(column) for column in zip(*more, strict=True))
    click.echo(f"\nMedians of what Ray adds: {ms:+.1f} ms per job, {processor_ms:+.1f} ms of processors, ")
    click.echo(f"{points:+.1f} points of busy ranks")


if __name__ == "__main__":
    main()
