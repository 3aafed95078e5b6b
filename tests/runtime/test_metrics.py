"""The numbers at the end of a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from acted_run import ActedRun, Part, batch, job_info
from hypothesis import given
from hypothesis import strategies as st

from gfgen.runtime.core.events import ModelsChanged, RankLoaded, RankTimes, TaskDone, TaskFailed
from gfgen.runtime.core.metrics import Attainment, Latency, Metrics, Summary, percentile
from gfgen.runtime.core.observer import JobInfo, JobOutcome
from gfgen.runtime.ipc.messages import MemoryUse
from gfgen.system.wording import in_words, on_clock


def ended(info: JobInfo, *, arrival_s: float, ended_s: float, deadline_s: float | None = None) -> JobOutcome:
    return JobOutcome(
        info=info,
        status="done",
        arrival_s=arrival_s,
        started_s=arrival_s,
        ended_s=ended_s,
        deadline_s=deadline_s,
        busy_s=1.0,
        layouts=(),
    )


def metrics_of(*outcomes: JobOutcome, num_ranks: int = 2) -> Metrics:
    metrics = Metrics()
    jobs = tuple(outcome.info for outcome in outcomes if outcome.status != "skipped")
    metrics.began(jobs, num_ranks=num_ranks, policy="srtf")
    for outcome in outcomes:
        metrics.ended(outcome)
    return metrics


def test_latencies_count_jobs_that_are_done() -> None:
    good = [ended(job_info(f"j{n}"), arrival_s=1.0, ended_s=1.0 + n) for n in range(1, 6)]
    bad = replace(ended(job_info("bad"), arrival_s=0.0, ended_s=90.0), status="failed", error="x")
    summary = metrics_of(*good, bad).summary()
    assert summary.latency is not None
    assert (summary.latency.mean_s, summary.latency.p50_s) == (3.0, 3.0)
    assert (summary.num_done, summary.num_failed, summary.makespan_s) == (5, 1, 90.0)


def test_failed_job_has_not_met_its_deadline() -> None:
    info = job_info("a", tag="express")
    met = ended(info, arrival_s=0.0, ended_s=5.0, deadline_s=6.0)
    late = ended(job_info("b", tag="bulk"), arrival_s=0.0, ended_s=7.0, deadline_s=6.0)
    failed = replace(met, info=job_info("c", tag="bulk"), status="failed", error="x")
    free = ended(job_info("d", tag="none"), arrival_s=0.0, ended_s=7.0)
    summary = metrics_of(met, late, failed, free).summary()
    assert summary.deadlines == Attainment(1, 3)
    assert summary.deadlines_by_tag == {"express": Attainment(1, 1), "bulk": Attainment(0, 2)}


def test_a_cancelled_job_has_neither_met_nor_missed_its_deadline() -> None:
    met = ended(job_info("a"), arrival_s=0.0, ended_s=5.0, deadline_s=6.0)
    gone = replace(met, info=job_info("b"), status="cancelled", error="cancelled")
    summary = metrics_of(met, gone).summary()
    assert summary.deadlines == Attainment(1, 1)
    assert (summary.num_done, summary.num_cancelled, summary.num_jobs) == (1, 1, 2)


def test_a_task_counts_once_however_many_ranks_report_it() -> None:
    metrics = Metrics()
    ActedRun([Part(job_info("a", steps=4), degree=2)], num_ranks=2, observers=[metrics]).play()
    assert metrics.summary().num_tasks == 7


def test_skipped_and_unfinished_jobs_are_counted_and_nothing_else() -> None:
    metrics = Metrics()
    metrics.skipped(1)
    metrics.began((job_info("a"), job_info("b")), num_ranks=1, policy="srtf")
    metrics.ended(ended(job_info("a"), arrival_s=0.0, ended_s=1.0))
    summary = metrics.summary()
    assert (summary.num_done, summary.num_skipped, summary.num_unfinished) == (1, 1, 1)
    assert summary.num_jobs == 3


def test_ranks_time_is_split_into_executing_waiting_and_moving() -> None:
    metrics = metrics_of(ended(job_info("a"), arrival_s=0.0, ended_s=10.0))
    metrics.applied(TaskDone(3.0, 1, (RankTimes(0, 1.0, 3.0, waited_s=0.5, moved_s=0.25),)))
    metrics.applied(TaskDone(8.0, 2, (RankTimes(1, 2.0, 8.0),)))
    summary = metrics.summary()
    assert (summary.busy_s, summary.waited_s, summary.moved_s) == (8.0, 0.5, 0.25)
    assert summary.utilisation == 8.0 / 20.0


def test_a_task_counts_once_however_many_ranks_ran_it_and_not_when_it_failed() -> None:
    metrics = Metrics()
    metrics.applied(TaskFailed(3.5, 2, "boom"))
    metrics.applied(TaskDone(4.0, 1, (RankTimes(0, 1.0, 3.0), RankTimes(1, 1.0, 4.0))))
    assert metrics.summary().num_tasks == 1


def test_what_is_kept_does_not_grow_with_the_jobs_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gfgen.runtime.core.metrics.MAX_LATENCIES", 50)
    metrics = Metrics()
    for number in range(50):
        metrics.ended(ended(job_info("a"), arrival_s=0.0, ended_s=float(number), deadline_s=10.0))
    size, exact = sizes_of(metrics), metrics.summary().latency
    assert exact == Latency(24.5, 24.5, pytest.approx(46.55), pytest.approx(48.51))
    for number in range(2000):
        metrics.applied(TaskDone(9.0, number, (RankTimes(0, 1.0, 2.0),)))
        metrics.ended(ended(job_info("a"), arrival_s=0.0, ended_s=float(number % 100), deadline_s=10.0))
    assert sizes_of(metrics) == size
    summary = metrics.summary()
    assert (summary.num_done, summary.num_tasks) == (2050, 2000)
    assert summary.deadlines == Attainment(11 + 20 * 11, 2050)
    assert summary.latency is not None
    assert summary.latency.is_sampled
    assert summary.latency.mean_s == pytest.approx((50 * 24.5 + 2000 * 49.5) / 2050)
    assert summary.latency.p50_s == 74.5
    assert "median about " in summary.lines()[1]


def sizes_of(metrics: Metrics) -> list[int]:
    return [len(metrics._latencies_s), len(metrics._num_due)]


def test_a_run_takes_as_long_as_its_jobs() -> None:
    half = ended(job_info("a"), arrival_s=0.25, ended_s=0.75)
    assert metrics_of(half).summary().makespan_s == 0.5
    none = metrics_of(ended(job_info("a"), arrival_s=0.0, ended_s=0.0)).summary()
    assert (none.makespan_s, none.jobs_per_min) == (0.0, 0.0)


def test_run_without_jobs_has_a_summary() -> None:
    assert Metrics().summary() == Summary()
    assert Summary().lines() == ["jobs       0 done"]


def test_lines_say_what_a_person_wants_to_know() -> None:
    metrics = Metrics()
    ActedRun(batch(12), num_ranks=4, observers=[metrics]).play()
    lines = metrics.summary().lines()
    assert [line.split()[0] for line in lines] == ["jobs", "latency", "deadlines", "ranks", "failed"]
    assert "11 done, 1 failed in" in lines[0]
    assert all(len(line) < 110 for line in lines)


def test_jobs_that_failed_are_named_with_their_reasons_up_to_a_bound() -> None:
    metrics = Metrics()
    for number in range(13):
        done = ended(job_info(f"job-{number}"), arrival_s=0.0, ended_s=1.0)
        metrics.ended(replace(done, status="failed", error="decode: out of memory"))
    lines = metrics.summary().lines()
    assert lines[-11] == "failed     job-0: decode: out of memory"
    assert lines[-2] == "failed     job-9: decode: out of memory"
    assert lines[-1] == "failed     3 more; the manifest has the reasons"


def test_changes_of_models_are_told_with_what_they_took() -> None:
    metrics = metrics_of(ended(job_info("a"), arrival_s=0.0, ended_s=10.0), num_ranks=2)
    metrics.applied(ModelsChanged(1.0, ("wan",), 3.0, "a reason"))
    for rank in range(2):
        metrics.applied(RankLoaded(5.0, rank, 4.0))
    assert metrics.summary().lines()[-1] == "models     changed once, 4.0 s of each rank's time"


def test_memory_is_told_by_model_where_ranks_are_on_gpus() -> None:
    metrics = Metrics()
    metrics.measured(
        {
            0: MemoryUse(int(2e9), {"wan": int(24e9), "qwen": int(5e9)}, int(40e9), int(2.4e9)),
            1: MemoryUse(int(3e9), {"wan": int(25e9)}, int(30e9), int(2.4e9)),
        }
    )
    summary = metrics.summary()
    assert summary.device_peaks == {"qwen": int(5e9), "wan": int(25e9)}
    assert summary.lines()[-1] == (
        "memory     qwen 5.0 GB, wan 25.0 GB of a GPU (40.0 GB reserved, 2.4 GB arena), "
        "3.0 GB of main memory a rank"
    )
    metrics.measured({0: MemoryUse(int(2e9))})
    assert metrics.summary().lines()[-1] == "memory     2.0 GB of main memory a rank"


def test_tags_are_listed_when_there_are_several() -> None:
    parts = [Part(job_info("a", tag="x", deadline_s=99)), Part(job_info("b", tag="y", deadline_s=1))]
    metrics = Metrics()
    ActedRun(parts, num_ranks=1, observers=[metrics]).play()
    assert "1 of 2 met (50%): x 1/1, y 0/1" in metrics.summary().lines()[2]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_is_that_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


@pytest.mark.parametrize(
    ("seconds", "words", "clock"),
    [
        (0.0, "0 ms", "0:00"),
        (0.0124, "12 ms", "0:00"),
        (0.9999, "1.0 s", "0:01"),
        (59.94, "59.9 s", "1:00"),
        (59.96, "1 min 00 s", "1:00"),
        (134.2, "2 min 14 s", "2:14"),
        (3725.0, "1 h 02 min", "1:02:05"),
        (86_399.0, "23 h 59 min", "23:59:59"),
        (86_400.0, "1 day 0 h", "24:00:00"),
        (183_600.0, "2 days 3 h", "51:00:00"),
        (365 * 86_400.0, "365 days 0 h", "8760:00:00"),
    ],
)
def test_seconds_are_readable(seconds: float, words: str, clock: str) -> None:
    assert in_words(seconds) == words
    assert on_clock(seconds) == clock
