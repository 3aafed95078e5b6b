"""Compare runs in a picture: a row per run with bars for deadlines met, latencies and throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gfgen.errors import InputError
from gfgen.runtime.core.metrics import percentile
from gfgen.runtime.report.picture import job_colour, name_rows, save_figure
from gfgen.runtime.report.timeline import Timeline, read_timeline
from gfgen.system.wording import counted, in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, ROW_INCHES, TOP, BOTTOM = 14.0, 0.42, 1.0, 0.25
NAME_WIDTH = 0.17
"""Fraction of the width for the names of the runs."""
TRACE_NAMES = ("trace.json", "*/trace.json")


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The numbers of one run; None if it has no such number."""

    name: str
    attainment: float | None
    mean_s: float | None
    p95_s: float | None
    jobs_per_min: float
    makespan_s: float


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    value: Callable[[RunFigures], float | None]
    text: Callable[[float], str]
    limit: float | None = None
    """The end of the axis. None: the largest value."""


DEADLINES = _Panel("deadlines met", lambda run: run.attainment, lambda value: f"{value:.0%}", limit=1.0)
MAKESPAN = _Panel("makespan", lambda run: run.makespan_s, in_words)
OTHERS = (
    _Panel("mean latency", lambda run: run.mean_s, in_words),
    _Panel("P95 latency", lambda run: run.p95_s, in_words),
    _Panel("jobs a minute", lambda run: run.jobs_per_min, lambda value: f"{value:,.2f}"),
)


def find_traces(paths: Sequence[Path]) -> list[Path]:
    """The named traces; a folder stands for the traces in it and one level below.

    Traces of a folder are in the order in which they were written.

    Raises: InputError for a folder without traces.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = [trace for pattern in TRACE_NAMES for trace in path.glob(pattern)]
        if not inside:
            raise InputError(
                f"{path}: contains no trace.json; 'gfgen simulate --output' and 'run --trace' write them"
            )
        found += sorted(inside, key=lambda trace: (trace.stat().st_mtime_ns, trace))
    return found


def plot_runs(traces: Sequence[Path], output: Path, *, title: str | None = None) -> None:
    """Raises InputError when a trace cannot be read or no job has ended; otherwise as `save_figure`."""
    timelines = [read_timeline(trace) for trace in traces]
    for trace, timeline in zip(traces, timelines, strict=True):
        if not any(job.ended_s is not None for job in timeline.jobs.values()):
            raise InputError(f"{trace}: no job has ended in this trace; nothing to compare")
    names = _names(traces, timelines)
    runs = [figures_of(timeline, name=name) for timeline, name in zip(timelines, names, strict=True)]
    save_figure(lambda: draw_runs(runs, title=title or _title(timelines)), output)


def figures_of(timeline: Timeline, *, name: str) -> RunFigures:
    jobs = timeline.jobs.values()
    latencies = [
        job.ended_s - job.arrival_s for job in jobs if job.ended_s is not None and job.status == "done"
    ]
    verdicts = [job.met_deadline for job in jobs if job.met_deadline is not None]
    first_s = min(job.arrival_s for job in jobs)
    makespan_s = max(job.ended_s or first_s for job in jobs) - first_s
    return RunFigures(
        name=name,
        attainment=sum(verdicts) / len(verdicts) if verdicts else None,
        mean_s=sum(latencies) / len(latencies) if latencies else None,
        p95_s=percentile(latencies, 95) if latencies else None,
        jobs_per_min=60 * len(latencies) / makespan_s if makespan_s > 0 else 0.0,
        makespan_s=makespan_s,
    )


def draw_runs(runs: Sequence[RunFigures], *, title: str) -> Figure:
    """Draw a panel per number. Without deadlines the first panel shows the makespan."""
    from matplotlib.figure import Figure

    first = DEADLINES if any(run.attainment is not None for run in runs) else MAKESPAN
    panels = (first, *OTHERS)
    height = TOP + ROW_INCHES * len(runs) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    slot = (1 - NAME_WIDTH) / len(panels)
    for place, panel in enumerate(panels):
        left, width = NAME_WIDTH + place * slot, 0.64 * slot
        axes = figure.add_axes((left, BOTTOM / height, width, 1 - (TOP + BOTTOM) / height))
        _draw_panel(axes, panel, runs, has_names=place == 0)
    figure.text(0.01, 1 - 0.3 / height, title, fontsize=13, weight="bold", va="center", parse_math=False)
    return figure


def _draw_panel(axes: Axes, panel: _Panel, runs: Sequence[RunFigures], *, has_names: bool) -> None:
    values = [panel.value(run) for run in runs]
    limit = panel.limit or max([value for value in values if value is not None], default=0.0) or 1.0
    for row, value in enumerate(values):
        axes.barh(row, value or 0.0, 0.66, color=job_colour(row))
        text = "-" if value is None else panel.text(value)
        axes.text((value or 0.0) + 0.03 * limit, row, text, va="center", fontsize=9)
    axes.set_xlim(0, limit)
    axes.set_title(panel.title, fontsize=10, loc="left", pad=8)
    name_rows(axes, [run.name if has_names else "" for run in runs], fontsize=10)


def _names(traces: Sequence[Path], timelines: Sequence[Timeline]) -> list[str]:
    """Policies if they differ, or policies with ranks, or folders, or paths."""
    policies = [timeline.policy for timeline in timelines]
    with_ranks = [f"{timeline.policy}, {counted(timeline.num_ranks, 'rank')}" for timeline in timelines]
    folders = [trace.parent.name if trace.name in TRACE_NAMES else trace.name for trace in traces]
    for names in (policies, with_ranks, folders):
        if len(set(names)) == len(names) and all(names):
            return names
    return [str(trace) for trace in traces]


def _title(timelines: Sequence[Timeline]) -> str:
    num_jobs = {len(timeline.jobs) for timeline in timelines}
    jobs = (
        counted(num_jobs.pop(), "job") if len(num_jobs) == 1 else f"{min(num_jobs)} to {max(num_jobs)} jobs"
    )
    ranks = {counted(timeline.num_ranks, "rank") for timeline in timelines}
    on = f" on {ranks.pop()}" if len(ranks) == 1 else ""
    simulated = [timeline.is_simulated for timeline in timelines]
    note = ", simulated" if all(simulated) else ", partly simulated" if any(simulated) else ""
    return jobs + on + note
