"""Simulated runs of a workload beside its real runs: how well the simulation predicts them.

    python -m benchmarks.beside simulated/compare.json ran/compare.json

Both files are of `gfgen bench compare` with the same workload and --profile, one of them with --simulate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gfgen.bench.policy_comparison import Score, scores_of
from gfgen.system.wording import in_words

ATTAINMENT_GOAL, MAKESPAN_GOAL = 0.03, 0.05
"""Largest errors of a simulation."""
ALIKE = ("workload", "profile", "deadlines_from")


def fidelity_table(simulated: Sequence[Score], ran: Sequence[Score]) -> Iterator[str]:
    """Simulated and real results in Markdown, for policies with both."""
    real = {found.policy: found for found in ran}
    yield (
        "| policy | deadlines met: run | simulated | off by, points | makespan: run | simulated | off by "
        f"| within {100 * ATTAINMENT_GOAL:g} points and {MAKESPAN_GOAL:.0%} |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for found in simulated:
        if found.policy not in real:
            continue
        other = real[found.policy]
        points = found.attainment - other.attainment
        makespan = found.makespan_s / other.makespan_s - 1
        is_met = abs(points) <= ATTAINMENT_GOAL and abs(makespan) <= MAKESPAN_GOAL
        yield (
            f"| {found.policy} | {other.attainment:.0%} | {found.attainment:.0%} | {100 * points:+.1f} "
            f"| {in_words(other.makespan_s)} | {in_words(found.makespan_s)} | {makespan:+.1%} "
            f"| {'yes' if is_met else '**no**'} |"
        )


def surprises(simulated: Sequence[Score], ran: Sequence[Score]) -> Iterator[str]:
    """A line per policy with jobs that met their deadlines only in the run or only in the simulation."""
    real = {found.policy: {job["id"]: job for job in found.jobs} for found in ran}
    for found in simulated:
        twins = [(job, real.get(found.policy, {}).get(job["id"])) for job in found.jobs]
        differing = [
            f"{job['id']} {_margin(twin)} (simulated {_margin(job)})"
            for job, twin in twins
            if twin is not None and _is_in_time(twin) != _is_in_time(job)
        ]
        if differing:
            yield f"{found.policy}, in time in one of the two alone: {', '.join(differing)}"


def _is_in_time(job: Mapping[str, Any]) -> bool:
    return job["status"] == "done" and (job["due_s"] is None or job["ended_s"] <= job["due_s"])


def _margin(job: Mapping[str, Any]) -> str:
    if job["status"] != "done" or job["due_s"] is None:
        return str(job["status"])
    left_s = job["due_s"] - job["ended_s"]
    return f"{in_words(abs(left_s))} {'late' if left_s < 0 else 'early'}"


def main(*paths: str) -> None:
    simulated, ran = contents = [json.loads(Path(path).read_text()) for path in paths]
    _check_alike(contents)
    print("\n".join(fidelity_table(scores_of(simulated), scores_of(ran))))
    for line in surprises(scores_of(simulated), scores_of(ran)):
        print(f"\n{line}")


def _check_alike(contents: Sequence[Any]) -> None:
    simulated, ran = contents
    for key in ALIKE:
        if simulated[key] != ran[key]:
            sys.exit(f"{key} is {simulated[key]!r} there and {ran[key]!r} here")
    if ran["profile"] is None and not ran["simulated"]:
        sys.exit("the arrivals of the run follow from measured times, so they differ; it needs --profile")


if __name__ == "__main__":
    main(*sys.argv[1:])
