"""Putting a run's times together from what the devices' own clocks say."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gfgen.bench.scripted import MeasuredRun, gaps_of, lasted_s, spans_of
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import RankTimes

STEP_S, GAP_S = 0.1, 0.0002


def record_of(*layouts, heard_late=lambda: 0.0, clocks=(1.0, 1.0, 1.0), gaps=(GAP_S,), has_own_clock=True):
    """A job's steps, one on each of these layouts; ranks hear of their ends late."""
    record, now_s, ended_s = MeasuredRun(), 1.0, {}
    for number, ranks in enumerate(layouts, start=1):
        layout = Layout(ranks, ulysses=len(ranks))
        task = Task("job", number, Stage.DENOISE, number - 1)
        record.dispatches[number] = Dispatch(number, task, layout, 0.0, 0.0, 0.0)
        start_s, end_s = now_s, now_s + STEP_S
        for rank in ranks:
            idle_s = (start_s - ended_s[rank]) * clocks[rank] if rank in ended_s else None
            heard_s = end_s + heard_late()
            started_s, idle_s = heard_s - STEP_S * clocks[rank], idle_s if has_own_clock else None
            times = RankTimes(rank, started_s, heard_s, idle_s=idle_s)
            record.done[number] = (*record.done.get(number, ()), times)
            ended_s[rank] = end_s
        now_s = end_s + gaps[(number - 1) % len(gaps)]
    return record


def gaps_found(record):
    return [gap.seconds for gap in gaps_of(record, spans_of(record))]


def test_what_a_rank_hears_late_is_no_gap():
    late = random.Random(1)
    record = record_of(*[(0, 1)] * 9, heard_late=lambda: late.random() * 0.01)
    assert gaps_found(record) == pytest.approx([GAP_S] * 8, rel=1e-3)


def test_a_gap_between_ranks_that_share_no_step_is_told_within_the_shortest_delay():
    late = random.Random(2)
    record = record_of(
        *[(0,), (1,)] * 30,
        heard_late=lambda: 0.00002 + late.expovariate(1 / 0.0001),
        clocks=(1.00001, 0.99998, 1.0),
    )
    assert gaps_found(record) == pytest.approx([GAP_S] * 59, abs=4e-5)


def test_a_change_of_layout_idles_the_ranks_that_run_both_steps():
    record = record_of((0, 1), (0, 1, 2), (1,), (2, 0), gaps=(0.001, 0.002, 0.003))
    assert gaps_found(record) == pytest.approx([0.001, 0.002, 0.003])


def test_a_gap_in_which_its_rank_did_something_else_goes_from_end_to_start():
    record = record_of((0,), (0,), (0, 1), gaps=(0.01, 0.05))
    record.dispatches[2] = replace(record.dispatches[2], task=Task("other", 1, Stage.DENOISE, 0))
    (gap,) = [gap for gap in gaps_of(record, spans_of(record)) if gap.after.number == 3]
    assert gap.seconds == pytest.approx(0.01 + STEP_S + 0.05)


def test_without_a_clock_of_its_own_a_ranks_times_are_the_machines():
    record = record_of((0,), (0,), (0,), has_own_clock=False)
    spans = spans_of(record)
    assert spans[2][0].start_s == record.done[2][0].started_s
    assert lasted_s(spans[1]) == pytest.approx(STEP_S)
    assert gaps_found(record) == pytest.approx([GAP_S] * 2)
