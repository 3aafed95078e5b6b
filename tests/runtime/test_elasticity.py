"""`python -m benchmarks.elasticity`, on CPU ranks that imitate GPUs: everything but what the numbers are."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping

import pytest
from test_workers import find_model

from benchmarks import elasticity_cases as elasticity
from benchmarks import elasticity_rows as table
from benchmarks.bare import BareTimes, run_bare
from benchmarks.elasticity_cases import (
    BARE_JOBS,
    ElasticityCase,
    Setting,
    Subject,
    cases_of,
    layout_on,
    measure_cases,
)
from benchmarks.elasticity_rows import ElasticityRow
from gfgen.bench.workloads import admitted, calibration_jobs
from gfgen.errors import InterruptedRunError
from gfgen.layout import Layout
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.system.signals import SignalPipe

RANKS, SAMPLES = 3, 4
NUM_FRESH = 3
"""Orders of three ranks that are no rotation of each other's."""


@pytest.fixture(scope="module")
def subject() -> Subject:
    job, *_ = admitted(calibration_jobs("tiny-wan"), find_model("tiny-wan"))
    return Subject(RANKS, job, job, SAMPLES)


@pytest.fixture(scope="module")
def setting(bare_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(bare_pool, tmp_path_factory.mktemp("files"), CostModel())


@pytest.fixture(scope="module")
def rows(setting: Setting, subject: Subject) -> Mapping[str, ElasticityRow]:
    """Of every case, in one go."""
    elasticity.warm(setting, subject)
    return {row.name: row for row in measure_cases(cases_of(subject), setting)}


def test_every_goal_has_its_row(rows):
    assert {name.partition(", ")[0] for name in rows} == {
        "unchanged",
        "changed",
        "fcfs on 3 ranks over a bare loop",
        "an urgent job's arrival to its first task",
        "group of 3",
    }
    changes = {name.split(", ")[1] for name in rows if name.startswith("changed")}
    assert changes == {"1 to 3", "3 to 1", "3 to 1 elsewhere", "1 to 3 elsewhere", "1 to 1 elsewhere"}


def test_gaps_are_as_many_as_were_asked_for_and_none_is_of_steps_that_overlap(rows):
    for name, row in rows.items():
        if name.startswith(("changed", "unchanged")):
            assert row.num_samples >= SAMPLES // 2
            assert min(row.samples_s["gaps"]) > 0


def test_what_is_measured_without_lookahead_has_no_goal(rows):
    off = [row for name, row in rows.items() if name.endswith("lookahead off")]
    assert len(off) == 3
    assert {(row.goal, row.is_met) for row in off} == {("", None)}


def test_a_new_groups_first_use_stands_beside_late_ones(rows):
    idle, step = (row for name, row in rows.items() if name.startswith("group of 3"))
    assert idle.num_samples == step.num_samples == NUM_FRESH
    assert set(idle.samples_s) == {"first use", "late use"}


@pytest.mark.parametrize(("num_ranks", "num_cases"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_no_case_is_of_groups_that_cannot_be_new(subject, num_ranks, num_cases):
    names = [case.name for case in cases_of(Subject(num_ranks, subject.small, subject.large))]
    assert len([name for name in names if "first use" in name]) == num_cases


def test_jobs_without_a_control_plane_are_measured_in_the_same_processes(rows, setting):
    steps, whole = (row for name, row in rows.items() if "bare loop" in name)
    assert {len(values) for row in (steps, whole) for values in row.samples_s.values()} == {BARE_JOBS - 1}
    assert min(whole.samples_s["bare"]) > min(steps.samples_s["bare"]) > 0


def test_a_bare_loop_leaves_the_ranks_ready_for_runs(setting, subject):
    job = elasticity.copy_of(subject.small, "bare", 2)
    wide = layout_on(job, subject.ranks)
    layouts = (Layout.single(0), Layout.single(0), Layout.single(3), wide, Layout.bands((0, 1)))
    times = run_bare(setting.pool, job, layouts, num_jobs=2)
    assert [len(each.jobs_s) for each in times] == [2] * RANKS
    assert setting.pool.last_number >= 2 * len(layouts)
    record = setting.run([elasticity.copy_of(job, "after", 2)], lambda view: Layout.single(1))
    assert [outcome.status for outcome in record.outcomes] == ["done"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bare_loop_is_left_at_a_signal(setting, subject, number):
    job = elasticity.copy_of(subject.small, "bare", 2)
    with contextlib.closing(SignalPipe()) as signals:
        os.kill(os.getpid(), number)
        with pytest.raises(InterruptedRunError, match="stopped while ranks ran a bare loop") as stop:
            run_bare(setting.pool, job, (Layout.single(0),) * job.info.num_tasks, num_jobs=1, signals=signals)
    assert stop.value.signal_number == number
    for worker in setting.pool.workers:  # other tests use them; some may have answered before the signal
        while select.select([worker.channel], [], [], 5.0)[0]:
            if isinstance(worker.channel.receive()[0], BareTimes):
                break


def test_urgent_jobs_arrive_while_others_work(rows):
    (row,) = (row for name, row in rows.items() if name.startswith("an urgent job"))
    assert row.goal == "one step at most"
    assert len(row.samples_s["delays"]) == SAMPLES
    assert "of a step of" in row.found


def test_no_case_is_begun_that_would_end_too_late(setting):
    def measured(name):
        return lambda _: [ElasticityRow(name, "", "found", 1)]

    told: list[str] = []
    cases = [
        ElasticityCase("long", measured("long"), lambda _: 100.0),
        ElasticityCase("short", measured("short"), lambda _: 0.5),
    ]
    assert [row.name for row in measure_cases(cases, setting, seconds=1.0, tell=told.append)] == ["short"]
    assert "long: left out, it would take 1 min 40 s" in told[0]


def test_the_table_has_the_goals_beside_what_was_found():
    about = {"device": "4 x GPU", "command": "python -m benchmarks.elasticity", "model": "wan"}
    rows = [
        table.gap_row("unchanged", [0.00005, 0.00006, 0.0001], goal_s=1e-4, p99_goal_s=3e-4),
        table.gap_row("changed", [0.002, 0.003], goal_s=1e-3),
    ]
    lines = list(table.table_of(rows, **about))
    assert lines[-2] == "| unchanged | 0.1 ms, P99 0.3 ms | 0.060 ms, P99 0.099 ms | 3 | yes |"
    assert lines[-1].startswith("| changed | 1 ms | 2.500 ms, P99 2.990 ms | 2 | **no** |")
