"""The table of `python -m benchmarks.elasticity`: from what ranks did to rows, beside the goals. Pure."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.bare import BareTimes
from gfgen.bench.scripted import MeasuredRun, Span, gaps_of, lasted_s, spans_of
from gfgen.errors import WorkerError
from gfgen.graph import Stage
from gfgen.runtime.core.metrics import percentile
from gfgen.system.wording import in_words, table_head, table_row

SAME_GOAL_S, SAME_P99_GOAL_S = 0.1e-3, 0.3e-3
CHANGED_GOAL_S = 1e-3
FRESH_GOAL_S = 0.1e-3
"""No difference that an unchanged layout's gap would not have, too."""
BARE_GOAL = 0.01


@dataclass(frozen=True, slots=True)
class ElasticityRow:
    """One thing that was measured."""

    name: str
    goal: str
    found: str
    num_samples: int
    is_met: bool | None = None
    """None where there is no goal."""
    samples_s: Mapping[str, Sequence[float]] = field(default_factory=dict)


# Rows ---------------------------------------------------------------------------------------------------


def gap_row(
    name: str, gaps_s: Sequence[float], *, goal_s: float | None, p99_goal_s: float | None = None
) -> ElasticityRow:
    """Idle times between steps; WorkerError where there are none."""
    if not gaps_s:
        raise WorkerError(f"{name}: no two steps followed each other")
    median_s, p99_s = statistics.median(gaps_s), percentile(gaps_s, 99)
    goals = [] if goal_s is None else [f"{goal_s * 1e3:g} ms"]
    goals += [] if p99_goal_s is None else [f"P99 {p99_goal_s * 1e3:g} ms"]
    is_met = None
    if goal_s is not None:
        is_met = median_s <= goal_s and (p99_goal_s is None or p99_s <= p99_goal_s)
    found = f"{median_s * 1e3:.3f} ms, P99 {p99_s * 1e3:.3f} ms"
    return ElasticityRow(name, ", ".join(goals), found, len(gaps_s), is_met, {"gaps": gaps_s})


def fresh_rows(record: MeasuredRun, name: str, *, num_fresh: int) -> Sequence[ElasticityRow]:
    """The last so many steps of a job, whose groups are new, beside as many before them, whose are not."""
    spans = spans_of(record)
    gaps = list(gaps_of(record, spans))
    first, late = gaps[-num_fresh:], gaps[-2 * num_fresh : -num_fresh]
    rows = []
    for what, values_of in (
        ("idle before it", lambda gap: gap.seconds),
        ("its step", lambda gap: lasted_s(spans[gap.after.number])),
    ):
        once, often = [values_of(gap) for gap in first], [values_of(gap) for gap in late]
        differs_s = statistics.median(once) - statistics.median(often)
        rows.append(
            ElasticityRow(
                f"{name}: {what}",
                "no difference",
                f"{_ms(once)} and {_ms(often)}: {differs_s * 1e3:+.3f} ms",
                len(once),
                abs(differs_s) <= FRESH_GOAL_S if what.startswith("idle") else None,
                {"first use": once, "late use": often},
            )
        )
    return rows


def _ms(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e3:.3f} ms"


def bare_rows(
    name: str, record: MeasuredRun, job_ids: Sequence[str], bare: Sequence[BareTimes]
) -> Sequence[ElasticityRow]:
    """Steps, and whole jobs: those of a run beside as many in a bare loop, by its slowest rank."""
    jobs_s, steps_s = _scheduled_times(record, job_ids)
    number = len(job_ids)
    bare_steps_s = [max(steps) for steps in zip(*[times.steps_s for times in bare], strict=True)]
    bare_jobs_s = [max(jobs) for jobs in zip(*[times.jobs_s for times in bare], strict=True)]
    return [
        _bare_row(f"{name}: steps", steps_s, bare_steps_s[-number:]),
        _bare_row(f"{name}: whole jobs", jobs_s, bare_jobs_s[-number:]),
    ]


def _scheduled_times(record: MeasuredRun, job_ids: Sequence[str]) -> tuple[list[float], list[float]]:
    """Of each job: from its first task to its last one, and of its steps alone.

    One that begins on a rank which the job before it does not need any more begins when that ends.
    """
    spans = spans_of(record)
    numbers: dict[str, list[int]] = defaultdict(list)
    for number in sorted(record.done):
        numbers[record.dispatches[number].task.job_id].append(number)
    ends_s = {job_id: _end_s(spans[each[-1]]) for job_id, each in numbers.items()}
    whole: list[float] = []
    steps: list[float] = []
    for job_id in job_ids:
        before_s = [end_s for end_s in ends_s.values() if end_s < ends_s[job_id]]
        whole.append(ends_s[job_id] - max([_begin_s(spans[numbers[job_id][0]]), *before_s]))
        denoising = [n for n in numbers[job_id] if record.dispatches[n].task.stage is Stage.DENOISE]
        steps.append(_end_s(spans[denoising[-1]]) - _begin_s(spans[denoising[0]]))
    return whole, steps


def _begin_s(spans: Mapping[int, Span]) -> float:
    """When the first rank of a dispatch began."""
    return min(span.start_s for span in spans.values())


def _end_s(spans: Mapping[int, Span]) -> float:
    """When the last rank of a dispatch was done."""
    return max(span.end_s for span in spans.values())


def _bare_row(name: str, scheduled_s: Sequence[float], bare_s: Sequence[float]) -> ElasticityRow:
    ratio = statistics.median(scheduled_s) / statistics.median(bare_s) - 1
    return ElasticityRow(
        name,
        f"within {BARE_GOAL:.0%}",
        f"{in_words(statistics.median(scheduled_s))} and {in_words(statistics.median(bare_s))}: {ratio:+.2%}",
        len(scheduled_s),
        ratio <= BARE_GOAL,
        {"scheduled": scheduled_s, "bare": bare_s},
    )


def urgent_row(name: str, record: MeasuredRun, arrivals_s: Mapping[str, float]) -> ElasticityRow:
    """How long these jobs waited for their first task, beside the steps of the others."""
    spans = spans_of(record)
    begins_s: dict[str, float] = {}
    steps_s = []
    for number in sorted(record.done):
        dispatch = record.dispatches[number]
        job_id = dispatch.task.job_id
        if job_id in arrivals_s:
            begins_s.setdefault(job_id, min(span.start_s for span in spans[number].values()))
        elif dispatch.task.stage is Stage.DENOISE:
            steps_s.append(lasted_s(spans[number]))
    delays_s = [begins_s[job_id] - arrival_s for job_id, arrival_s in arrivals_s.items()]
    step_s = statistics.median(steps_s)
    return ElasticityRow(
        name,
        "one step at most",
        f"median {in_words(statistics.median(delays_s))}, worst {in_words(max(delays_s))} "
        f"of a step of {in_words(step_s)}",
        len(delays_s),
        max(delays_s) <= percentile(steps_s, 99),
        {"delays": delays_s, "steps": steps_s},
    )


# The table ----------------------------------------------------------------------------------------------


def table_of(rows: Sequence[ElasticityRow], *, device: str, command: str, model: str) -> Iterator[str]:
    """Markdown."""
    yield f"# The price of elasticity, {time.strftime('%Y-%m-%d')}\n"
    yield f"{device}; {model}; command: `{command}`\n"
    yield (
        "Idle time of a device between two steps of a job, by the device's own clock: median and P99. "
        "Changed layouts move the job's state to ranks that do not have it. A group's first use is the "
        "first time that these ranks work together in this order. The bare loop calls the same adapters in "
        "the same processes, without a control plane.\n"
    )
    yield table_head("", "goal", "found", "samples", "met")
    for row in rows:
        met = "" if row.is_met is None else "yes" if row.is_met else "**no**"
        yield table_row(row.name, row.goal, row.found, row.num_samples, met)
