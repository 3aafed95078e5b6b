"""The same workload under several policies: what each is worth, and how it stands to a baseline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gfgen.bench.scores import Score
from gfgen.runtime.durations import in_words
from gfgen.runtime.plot_runs import RunFigures

REPLICAS = "legacy,degree=1"
COMPARED = (REPLICAS, "fcfs", "srtf", "edf,rescue=false", "edf", "triage", "makespan", "auto")
"""Compared with the baseline unless told otherwise: single-rank replicas, then every policy."""
_HEAD = (
    "| policy | deadlines met | with slack | mean latency | P95 | jobs a minute | failed "
    "| mean latency, x | P95, x | throughput, x | missed with slack, x |"
)


def table(scores: Sequence[Score]) -> list[str]:
    """Markdown, a line per policy; the last columns are ratios to the first one, the baseline."""
    baseline = scores[0]
    lines = [_HEAD, "|---" * _HEAD.count(" |") + "|"]
    for found in scores:
        cells = [
            found.policy,
            f"{found.attainment:.0%}",
            f"{found.attainment_client:.0%}",
            in_words(found.mean_s),
            in_words(found.p95_s),
            f"{found.jobs_per_min:.1f}",
            str(found.num_failed),
            _ratio(found.mean_s, baseline.mean_s),
            _ratio(found.p95_s, baseline.p95_s),
            _ratio(found.jobs_per_min, baseline.jobs_per_min),
            _ratio(1 - found.attainment_client, 1 - baseline.attainment_client),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ratio(value: float, baseline: float) -> str:
    return f"{value / baseline:.2f}" if baseline > 0 else "-"


def figures(scores: Sequence[Score]) -> list[RunFigures]:
    """What the chart shows: the client's deadlines, latencies, throughput."""
    return [
        RunFigures(
            name=found.policy,
            attainment=found.attainment_client,
            mean_s=found.mean_s,
            p95_s=found.p95_s,
            jobs_per_min=found.jobs_per_min,
            makespan_s=found.makespan_s,
        )
        for found in scores
    ]


def as_json(scores: Sequence[Score], conditions: dict[str, Any]) -> str:
    """The raw numbers, with what they were found under."""
    return json.dumps({**conditions, "runs": [asdict(found) for found in scores]}, indent=1) + "\n"
