"""`gfgen run --retries`: jobs that fail run again at the end of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_job

from gfgen.cli.run import run_jobs
from gfgen.errors import InterruptedRunError, OutputError
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.ownership import Claims


class Session:
    """Fails the jobs that it is told to in each run."""

    stop_signal = signal_number = None

    def __init__(self, *failing: set[str]) -> None:
        self.failing, self.runs = list(failing), list[list[str]]()
        self.traces: list[bool] = []

    def load(self, jobs: object) -> None: ...

    def run(self, jobs: Any, *, observers: Any, arrivals: Any, **_: object) -> Summary:
        failing = self.failing.pop(0)
        self.runs.append([job.job_id for job in jobs])
        self.traces.append(any(type(each).__name__ == "TraceWriter" for each in observers))
        assert len(self.runs) == 1 or all(job.spec.arrival_s == 0 for job in jobs)
        for job in jobs:
            outcome: JobOutcome = JobOutcome(job.info, "failed" if job.job_id in failing else "done")
            for observer in (*observers, arrivals.backlog):
                observer.ended(outcome)
        for observer in observers:
            observer.close()
        num_failed = len(failing)
        return Summary(num_done=len(jobs) - num_failed, num_failed=num_failed, makespan_s=2.0)


@pytest.fixture(autouse=True)
def bare_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gfgen.cli.run._observers", lambda options: [])
    monkeypatch.setattr("gfgen.cli.run.replace", lambda thing, **changes: _replaced(thing, changes))
    monkeypatch.setattr("gfgen.cli.run.with_time", lambda jobs, *_, **__: (jobs, 0))


def run_abc(session: Any, given: Any, *, done_ids: Iterable[str] = (), **fields: Any) -> Summary:
    claims = Claims(output_dir=given.output_dir, job_file="-", done_ids={*done_ids})
    return run_jobs(session, [make_job(name, **fields) for name in "abc"], given, claims)


def options(tmp_path: Any, retries: int) -> Any:
    return SimpleNamespace(
        retries=retries,
        trace=tmp_path / "trace.json",
        closes_at=None,
        output_dir=tmp_path,
        cluster=None,
        forced_from=None,
        keep_if=None,
    )


@pytest.mark.parametrize(
    ("retries", "failing", "runs", "counts"),
    [
        (0, [{"a", "b"}], [["a", "b", "c"]], (1, 2)),
        (1, [{"a", "b"}, {"b"}], [["a", "b", "c"], ["a", "b"]], (2, 1)),
        (5, [{"a", "b"}, {"b"}, set()], [["a", "b", "c"], ["a", "b"], ["b"]], (3, 0)),
    ],
)
def test_failed_jobs_run_again_until_none_fails(tmp_path, monkeypatch, retries, failing, runs, counts):
    session = Session(*failing)
    given = options(tmp_path, retries)
    given.ranks = SimpleNamespace(step_times=None)
    summary = run_abc(session, given, arrival_s=3.0)
    assert session.runs == runs
    assert (summary.num_done, summary.num_failed) == counts
    assert summary.makespan_s == 2.0 * len(runs)


class KeepIf:
    """Wants these jobs again after each run."""

    def __init__(self, *wanted: list[str]) -> None:
        self._wanted = list(wanted)

    def again(self) -> list[Any]:
        return [make_job(name, arrival_s=3.0) for name in self._wanted.pop(0)]


def test_what_a_filter_wants_runs_again_with_the_jobs_that_failed(tmp_path, monkeypatch):
    session = Session({"a"}, {"b"}, {"b"})
    session.signals = SimpleNamespace(interrupting=contextlib.nullcontext)  # type: ignore[attr-defined]
    given = SimpleNamespace(**vars(options(tmp_path, 1)) | {"keep_if": KeepIf(["b"], ["b"], [])})
    given.ranks = SimpleNamespace(step_times=None)
    summary = run_abc(session, given, arrival_s=3.0)
    assert session.runs == [["a", "b", "c"], ["a", "b"], ["b"]]
    assert (summary.num_done, summary.num_failed) == (3, 2)
    given.keep_if = KeepIf(["b"], [])
    session.runs, session.failing = [], [set()]
    run_abc(session, given, done_ids="abc", arrival_s=3.0)
    assert session.runs == [["b"]], "an earlier run made it"


@pytest.mark.parametrize("comes", ["in the retry", "as the first run's last job ends"])
def test_a_signal_during_a_retry_or_before_it_counts_the_jobs_of_all_rounds(tmp_path, monkeypatch, comes):
    session = Session({"a"}, {"a"})
    real = session.run
    if comes != "in the retry":
        session.signal_number = 2  # type: ignore[assignment]

    def run(jobs: Any, **given: Any) -> Summary:
        session.stop_signal = 2 if session.runs else None  # type: ignore[assignment]
        return replace(real(jobs, **given), num_unfinished=len(session.runs) - 1)

    session.run = run  # type: ignore[method-assign]
    given = SimpleNamespace(**vars(options(tmp_path, 1)), ranks=SimpleNamespace(step_times=None))
    given.on_file = given.on_done = None
    given.logs = SimpleNamespace(log_json=False)
    with pytest.raises(InterruptedRunError, match="stopped; 2 jobs done, 1 left"):
        run_abc(session, given)
    assert len(session.runs) == (2 if comes == "in the retry" else 1)


def test_a_run_that_cannot_go_on_runs_the_commands_of_its_end(tmp_path, monkeypatch):
    session = Session()
    session.run = lambda *_, **__: (_ for _ in ()).throw(OutputError("the disk is full"))  # type: ignore[method-assign]
    ended: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "gfgen.session.filters.run_done_hook",
        lambda command, summary, folder, *, status, limit_s: ended.append((status, summary.num_unfinished)),
    )
    given = SimpleNamespace(**vars(options(tmp_path, 0)), ranks=SimpleNamespace(step_times=None))
    given.on_file, given.on_done, given.hook_timeout_s = None, "true", 1.0
    with pytest.raises(OutputError):
        run_abc(session, given)
    assert ended == [("failed", 3)]


def _replaced(thing: Any, changes: dict[str, Any]) -> Any:
    if isinstance(thing, SimpleNamespace):
        return SimpleNamespace(**{**vars(thing), **changes})
    return replace(thing, **changes)
