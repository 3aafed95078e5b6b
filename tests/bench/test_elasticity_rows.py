"""What a run's tasks come to beside a bare loop's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.bare import BareTimes
from benchmarks.elasticity_rows import bare_rows
from gfgen.bench.scripted import MeasuredRun
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import RankTimes

STAGES = (Stage.ENCODE, Stage.PREPARE, Stage.DENOISE, Stage.DENOISE, Stage.DECODE)
Part = tuple[Sequence[int], float, float]
"""Ranks, from when, until when."""


def record_of(**jobs: Sequence[Part]) -> MeasuredRun:
    """Jobs of two steps, whose tasks ran on these ranks at these times."""
    record = MeasuredRun()
    for job_id, parts in jobs.items():
        for index, (ranks, start_s, end_s) in enumerate(parts):
            number = len(record.dispatches) + 1
            stage = STAGES[index]
            task = Task(job_id, index, stage, index - 2 if stage is Stage.DENOISE else None)
            layout = Layout(tuple(ranks), ulysses=len(ranks))
            record.dispatches[number] = Dispatch(number, task, layout, 0.0, 0.0, 0.0)
            record.done[number] = [RankTimes(rank, start_s, end_s) for rank in ranks]
    return record


def job(begins_s: float, *, encoded_on: int = 0, encoded_s: float | None = None) -> Sequence[Part]:
    """Steps on two ranks for four seconds, and a decode on rank 0 for three."""
    first_s = begins_s if encoded_s is None else encoded_s
    return (
        ((encoded_on,), first_s, first_s + 0.5),
        ((encoded_on,), first_s + 0.5, first_s + 1),
        ((0, 1), begins_s + 1, begins_s + 3),
        ((0, 1), begins_s + 3, begins_s + 5),
        ((0,), begins_s + 5, begins_s + 8),
    )


def test_a_job_that_begins_beside_the_decode_of_another_counts_from_its_end():
    record = record_of(first=job(0.0), second=job(8.0, encoded_on=1, encoded_s=5.0))
    bare = [BareTimes((8.0, 8.0), (4.0, 4.0)), BareTimes((5.0, 5.0), (4.0, 4.0))]
    steps, whole = bare_rows("fcfs", record, ["second"], bare)
    assert steps.samples_s == {"scheduled": [pytest.approx(4.0)], "bare": [4.0]}
    assert whole.samples_s == {"scheduled": [pytest.approx(8.0)], "bare": [8.0]}


def test_a_pause_between_two_jobs_belongs_to_neither():
    record = record_of(first=job(0.0), second=job(9.0))
    _, whole = bare_rows("fcfs", record, ["second"], [BareTimes((8.0,), (4.0,))])
    assert whole.samples_s["scheduled"] == [pytest.approx(8.0)]
