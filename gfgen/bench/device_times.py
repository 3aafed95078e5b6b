"""The times of a run's tasks, and the gaps between them, by the clocks of the devices. Pure.

The times of CPU ranks come from the machine's clock. The host hears of a GPU's task only after a thread wakes
up, which takes as long as the gaps to measure. So the times of GPUs add up durations and idle times by the
device's clock. Its offset follows from the reports: none comes before the end of its task, and the earliest
come almost at once.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gfgen.bench.scripted import MeasuredRun
from gfgen.graph import Stage
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import RankTimes

MAX_DRIFT = 2e-4
"""Of a device's clock against the machine's; a larger estimate is noise of a few reports."""


@dataclass(frozen=True, slots=True)
class Span:
    """One rank's part of a dispatch, in seconds of the run."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Time between two steps of a job."""

    before: Dispatch
    after: Dispatch
    seconds: float


Spans = Mapping[int, Mapping[int, Span]]
"""By dispatch and rank."""


def spans_of(record: MeasuredRun) -> Spans:
    by_rank: dict[int, dict[int, RankTimes]] = defaultdict(dict)
    for number in sorted(record.done):
        for times in record.done[number]:
            by_rank[times.rank][number] = times
    spans: dict[int, dict[int, Span]] = defaultdict(dict)
    for rank, tasks in by_rank.items():
        for number, span in zip(tasks, _rank_spans(list(tasks.values())), strict=True):
            spans[number][rank] = span
    return spans


def gaps_of(record: MeasuredRun, spans: Spans) -> Iterator[Gap]:
    last_on_rank = _previous_on_rank(record)
    steps: dict[str, list[Dispatch]] = defaultdict(list)
    for number in sorted(record.done):
        dispatch = record.dispatches[number]
        if dispatch.task.stage is Stage.DENOISE:
            steps[dispatch.task.job_id].append(dispatch)
    for before, after in (pair for each in steps.values() for pair in pairwise(each)):
        yield Gap(before, after, _gap_s(before, after, spans, last_on_rank))


def lasted_s(spans: Mapping[int, Span]) -> float:
    """The time of a dispatch on its slowest rank."""
    return max(span.end_s - span.start_s for span in spans.values())


def _gap_s(
    before: Dispatch, after: Dispatch, spans: Spans, last_on_rank: Mapping[tuple[int, int], int]
) -> float:
    """The longest idle time of a rank that ran both; else from the last end to the last start."""
    begins, ends = spans[after.number], spans[before.number]
    both = [rank for rank in begins if last_on_rank.get((after.number, rank)) == before.number]
    if both:
        return max(begins[rank].start_s - ends[rank].end_s for rank in both)
    return max(span.start_s for span in begins.values()) - max(span.end_s for span in ends.values())


def _previous_on_rank(record: MeasuredRun) -> Mapping[tuple[int, int], int]:
    """By dispatch and rank: the rank's previous dispatch."""
    found: dict[tuple[int, int], int] = {}
    latest: dict[int, int] = {}
    for number in sorted(record.done):
        for times in record.done[number]:
            if times.rank in latest:
                found[number, times.rank] = latest[times.rank]
            latest[times.rank] = number
    return found


def _rank_spans(tasks: Sequence[RankTimes]) -> list[Span]:
    if any(times.idle_s is None for times in tasks[1:]):
        return [Span(times.started_s, times.ended_s) for times in tasks]
    own: list[Span] = []
    for times in tasks:
        start_s = own[-1].end_s + (times.idle_s or 0.0) if own else 0.0
        own.append(Span(start_s, start_s + times.busy_s))
    late = [times.ended_s - span.end_s for times, span in zip(tasks, own, strict=True)]
    drift = _drift([span.end_s for span in own], late)
    offset_s = min(each - drift * span.end_s for each, span in zip(late, own, strict=True))
    rate = 1 + drift
    return [Span(offset_s + rate * span.start_s, offset_s + rate * span.end_s) for span in own]


def _drift(own_s: Sequence[float], late_s: Sequence[float]) -> float:
    """Seconds per second that the machine's clock gains on the device's.

    This is the slope of the highest line below all reports, an edge of their lower hull.
    """
    hull: list[tuple[float, float]] = []
    for point in zip(own_s, late_s, strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    middle_s = statistics.fmean(own_s)
    for left, right in pairwise(hull):
        if left[0] <= middle_s <= right[0]:
            return max(-MAX_DRIFT, min(MAX_DRIFT, _slope(left, right)))
    return 0.0


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0]) if right[0] > left[0] else 0.0
