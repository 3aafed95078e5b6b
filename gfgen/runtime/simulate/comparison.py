"""Compare runs of the same jobs: a table for people, numbers for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from gfgen.runtime.core.metrics import Attainment, Latency, Summary
from gfgen.system.wording import in_words

ALL_TAGS = "all"
NONE = "-"


def numbers(summary: Summary) -> dict[str, Any]:
    """The numbers of a run; times in seconds, shares from 0 to 1."""
    return {
        "jobs": {
            "done": summary.num_done,
            "failed": summary.num_failed,
            "cancelled": summary.num_cancelled,
            "skipped": summary.num_skipped,
            "unfinished": summary.num_unfinished,
        },
        "num_tasks": summary.num_tasks,
        "model_changes": {"times": summary.num_model_changes, "load_s": summary.load_s},
        "makespan_s": summary.makespan_s,
        "jobs_per_min": summary.jobs_per_min,
        "latency": None if summary.latency is None else asdict(summary.latency),
        "deadlines": {
            tag: {"met": met.num_met, "jobs": met.num_jobs, "share": met.fraction}
            for tag, met in _attained(summary).items()
        },
        "num_ranks": len(summary.busy_s),
        "utilisation": summary.utilisation,
        "waited_share": summary.waited_share,
        "moved_s": sum(summary.moved_s),
        "moved_share": summary.moved_share,
        "memory": {
            "host_bytes": max((use.host_bytes for use in summary.memory.values()), default=None),
            "device_bytes": dict(summary.device_peaks),
        },
        "policy_fault": summary.policy_fault,
    }


def table(runs: Sequence[tuple[str, Summary]]) -> list[str]:
    """The lines of a table with a column for each named run."""
    summaries = [summary for _, summary in runs]
    rows = [("", *(name for name, _ in runs))]
    rows += [(name, *map(cell, summaries)) for name, cell in _ROWS.items()]
    if any(summary.num_failed for summary in summaries):
        rows.append(("jobs failed", *(str(summary.num_failed) for summary in summaries)))
    if any(summary.num_model_changes for summary in summaries):
        rows.append(("model changes", *map(_changes, summaries)))
    tags = sorted({tag for summary in summaries for tag in _attained(summary)} - {ALL_TAGS})
    for tag in ([ALL_TAGS] if any(summary.deadlines for summary in summaries) else []) + tags:
        name = "deadlines met" if tag == ALL_TAGS else f"  {tag}"
        rows.append((name, *(_met(_attained(summary).get(tag)) for summary in summaries)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(runs) + 1)]
    return [_line(row, widths) for row in rows]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *cells = row
    parts = [
        first.ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)),
    ]
    return "  ".join(parts).rstrip()


def _attained(summary: Summary) -> dict[str, Attainment]:
    """Overall, and by tag if jobs have tags."""
    if summary.deadlines is None:
        return {}
    by_tag = {tag: met for tag, met in summary.deadlines_by_tag.items() if tag}
    return {ALL_TAGS: summary.deadlines, **by_tag}


def _met(attained: Attainment | None) -> str:
    return NONE if attained is None else f"{attained.num_met}/{attained.num_jobs} {attained.fraction:.0%}"


def _changes(summary: Summary) -> str:
    """The number of model changes, and their time on each rank."""
    return f"{summary.num_model_changes} in {in_words(summary.load_s)}" if summary.num_model_changes else NONE


def _latency(name: str, latency: Latency | None) -> str:
    return NONE if latency is None else in_words(getattr(latency, name))


_ROWS: dict[str, Callable[[Summary], str]] = {
    "makespan": lambda summary: in_words(summary.makespan_s),
    "jobs a minute": lambda summary: f"{summary.jobs_per_min:,.2f}",
    "latency, mean": lambda summary: _latency("mean_s", summary.latency),
    "latency, P50": lambda summary: _latency("p50_s", summary.latency),
    "latency, P95": lambda summary: _latency("p95_s", summary.latency),
    "latency, P99": lambda summary: _latency("p99_s", summary.latency),
    "ranks busy": lambda summary: f"{summary.utilisation:.0%}",
    "moving state": lambda summary: f"{in_words(sum(summary.moved_s))} {summary.moved_share:.1%}",
}
