"""What a run shows while it works."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import threading
from dataclasses import replace

import pytest
from acted_run import ActedRun, Part, batch, job_info

from gfgen.cli.shown import board
from gfgen.cli.shown.board import Line
from gfgen.cli.shown.progress import (
    BarProgress,
    FailureProgress,
    LineProgress,
    outcome_line,
    progress_of,
)
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer, with_view
from gfgen.runtime.simulate.forecast import forecast


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal, and keeps what is written."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        written: io.BytesIO = self.buffer  # type: ignore[assignment]
        return written.getvalue().decode(self.encoding)


class ClosedTerminal(Terminal):
    """One whose window is closed after so many writes."""

    def __init__(self, *, num_writes: int) -> None:
        super().__init__()
        self.num_left = num_writes

    def write(self, text: str) -> int:
        self.num_left -= 1
        if self.num_left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


class Seen(Observer):
    """Counts ends."""

    num_ended = 0

    def ended(self, outcome: JobOutcome) -> None:
        self.num_ended += 1


def outcome(info: JobInfo, *, status: str = "done", deadline_s: float | None = None) -> JobOutcome:
    return JobOutcome(
        info=info,
        status=status,  # type: ignore[arg-type]
        arrival_s=1.0,
        started_s=1.0,
        ended_s=5.0,
        deadline_s=deadline_s,
        busy_s=1.0,
        layouts=(),
        error="denoise 1: out of memory" if status == "failed" else None,
    )


def test_bars_on_a_terminal_lines_elsewhere_and_nothing_when_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, file = Terminal(), io.StringIO()
    assert list(map(type, progress_of(quiet=False, stream=terminal))) == [BarProgress, LineProgress]
    assert list(map(type, progress_of(quiet=False, stream=file))) == [LineProgress]
    assert list(map(type, progress_of(quiet=True, stream=terminal))) == [FailureProgress, LineProgress]
    assert list(map(type, progress_of(quiet=False, log_json=True, stream=terminal))) == [LineProgress]


def test_a_terminal_whose_cursor_does_not_move_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert list(map(type, progress_of(quiet=False, stream=Terminal()))) == [LineProgress]


@pytest.mark.parametrize(
    ("status", "deadline_s", "line"),
    [
        ("done", None, "done a: a.mp4 in 4.0 s"),
        ("done", 6.5, "done a: a.mp4 in 4.0 s, 1.5 s before its deadline"),
        ("done", 4.5, "done a: a.mp4 in 4.0 s, 500 ms too late"),
        ("failed", 6.5, "failed a: denoise 1: out of memory"),
        ("cancelled", 6.5, "cancelled a"),
    ],
)
def test_line_of_an_ended_job_has_file_seconds_and_verdict(
    status: str, deadline_s: float | None, line: str
) -> None:
    assert outcome_line(outcome(job_info("a"), status=status, deadline_s=deadline_s)) == line


def test_line_of_a_done_job_tells_what_the_model_made_otherwise() -> None:
    info = job_info("a")
    made = replace(outcome(info), made=(9, 128, 256))
    assert outcome_line(made) == f"done a: a.mp4 in 4.0 s ({info.difference((9, 128, 256))})"


def test_lines_tell_starts_ends_and_now_and_then_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gfgen.cli.shown.progress"):
        ActedRun(batch(12), num_ranks=2, observers=[LineProgress()]).play()
    records = [record for record in caplog.records if record.name == "gfgen.cli.shown.progress"]
    lines = [record.message for record in records]
    assert lines[0] == "12 jobs on 2 ranks, policy srtf"
    kinds = [line.split()[0] for line in lines[1:]]
    assert (kinds.count("started"), kinds.count("done"), kinds.count("failed")) == (12, 11, 1)
    summaries = [line for line in lines[1:] if "jobs" in line]
    assert 1 <= len(summaries) <= 3
    assert re.match(r"\d+/12 jobs  0:\d\d  \d:\d\d left", summaries[0])
    fields = [record.fields for record in records]
    events = {each["event"] for each in fields}
    assert events == {"run_began", "job_started", "job_done", "job_failed", "run_stands"}
    assert fields[0] == {"event": "run_began", "jobs": 12, "skipped": 0, "ranks": 2, "policy": "srtf"}
    for line, each in zip(lines, fields, strict=True):
        assert each.get("job", "") in line
        assert each.get("error", "") in line


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("has_terminal", [True, False])
def test_a_failure_is_logged_once_whatever_is_shown(
    caplog: pytest.LogCaptureFixture, quiet: bool, has_terminal: bool
) -> None:
    stream = Terminal() if has_terminal else io.StringIO()
    with caplog.at_level(logging.INFO, "gfgen"):
        for progress in progress_of(quiet=quiet, stream=stream):
            progress.ended(outcome(job_info("a"), status="failed"))
            progress.close()
    failures = [record for record in caplog.records if record.message.startswith("failed a: denoise 1")]
    assert [record.levelname for record in failures] == ["ERROR"]


def test_skipped_jobs_are_counted_and_not_listed(caplog: pytest.LogCaptureFixture) -> None:
    observers = with_view([LineProgress()])
    with caplog.at_level(logging.INFO, "gfgen.cli.shown.progress"):
        for observer in observers:
            observer.skipped(2)
            observer.began((job_info("a"),), num_ranks=1, policy="fcfs")
    assert caplog.messages == ["1 job on 1 rank, policy fcfs; 2 done before and skipped"]


def test_bars_show_batch_and_running_jobs_and_leave_the_lines_of_ended_ones() -> None:
    terminal = Terminal()
    clock = iter(range(100_000))
    ActedRun(batch(12), num_ranks=4, observers=[BarProgress(terminal, now=lambda: next(clock))]).play()
    assert "12 jobs on 4 ranks, policy srtf\n" in terminal.text
    assert re.search(r"batch +\|.*\| +5/12 jobs", terminal.text)
    assert re.search(r"step 2/\d+ +rank \d", terminal.text)
    assert len(re.findall(r"done \S+: \S+\.mp4 in ", terminal.text)) == 11
    assert len(re.findall(r"failed \S+: denoise 1: out of memory\n", terminal.text)) == 1


def test_bars_are_ascii_where_the_terminal_is() -> None:
    terminal = Terminal("ascii")
    part = Part(job_info("\u96ea-1"))
    clock = iter(range(100_000))
    ActedRun([part], num_ranks=1, observers=[BarProgress(terminal, now=lambda: next(clock))]).play()
    assert "#####" in terminal.text
    assert "done ?-1: ?-1.mp4" in terminal.text


def test_log_records_go_above_the_bars_and_back_to_the_stream_afterwards() -> None:
    terminal = Terminal()
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("gfgen")
    logger.addHandler(handler)
    try:
        progress = BarProgress(terminal)
        for observer in with_view([progress]):
            observer.began((job_info("a"),), num_ranks=1, policy="srtf")
        logger.warning("a rank is slow")
        assert handler.stream is not terminal
        progress.close()
        assert handler.stream is terminal
    finally:
        logger.removeHandler(handler)
    assert "a rank is slow\n" in terminal.text


@pytest.mark.parametrize("num_writes", [0, 1, 2, 5, 20, 50, 100, 150])
def test_a_terminal_that_is_closed_ends_the_bars_and_not_the_run(
    caplog: pytest.LogCaptureFixture, num_writes: int
) -> None:
    terminal = ClosedTerminal(num_writes=num_writes)
    clock, seen = iter(range(100_000)), Seen()
    handler, logger = logging.StreamHandler(terminal), logging.getLogger("gfgen")
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "gfgen"):
            bars = BarProgress(terminal, now=lambda: next(clock))
            ActedRun(batch(12), num_ranks=4, observers=[bars, seen]).play()
            logger.info("and a record after that")
    finally:
        logger.removeHandler(handler)
    assert terminal.num_left < 0
    assert seen.num_ended == 12
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_jobs_keep_their_rows_and_each_draw_replaces_the_rows_before() -> None:
    terminal = Terminal()
    shown = board.Board(terminal, num_slots=2)
    for names in (("a", "b"), ("b", "c")):
        shown.draw([Line(name, 1, 2, "") for name in ("batch", *names)])
    shown.write("done a")
    shown.close()
    rows = [line.split()[0] for line in terminal.text.replace("\r", "\n").split("\n") if "|" in line]
    assert rows == ["batch", "a", "b", "batch", "c", "b", "batch", "c", "b"]
    assert "\x1b[A\x1b[A\r\x1b[Jdone a\n" in terminal.text
    assert terminal.text.endswith("\x1b[A\x1b[A\r\x1b[J")


def test_wide_characters_count_as_two_columns() -> None:
    name = "\u96ea" * 20
    row, other = board.bars_of([Line(name, 1, 2, "x"), Line("b", 2, 2, "x")], 60, in_ascii=False)
    assert row.startswith("\u96ea" * 9 + "~ |")
    assert len(other) == 60
    assert "\u2588" * 5 in other


def test_bars_that_never_began_can_be_closed() -> None:
    BarProgress(Terminal()).close()


def test_redraws_are_limited() -> None:
    terminal = Terminal()
    ActedRun(batch(12), num_ranks=4, observers=[BarProgress(terminal, now=lambda: 0.0)]).play()
    assert len(re.findall(r"\bbatch\b", terminal.text)) <= 30  # the first, and once for each line above


@pytest.mark.parametrize("columns", [40, 79, 199])
def test_lines_fit_the_terminal_and_bars_are_of_one_width(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(board, "terminal_size", lambda stream: (columns, 24))
    terminal = Terminal("ascii")
    shown = board.Board(terminal, num_slots=2)
    odd = Line("{odd} %s", 1, 9, "prepare      rank 2     0:12 left")
    shown.draw([Line("batch", 12, 12, "12/12 jobs  1:02"), Line("a" * 30, 5, 9, "step 3/6"), odd])
    lines = [re.sub("\x1b.*", "", line) for line in re.split("[\r\n]", terminal.text) if "|" in line]
    assert len(lines) == 3
    assert all(len(line) < columns for line in lines)
    if columns > 40:
        assert len({(line.index("|"), line.rindex("|")) for line in lines}) == 1
        assert "{odd} %s" in lines[2]
        assert "0:12 left" in lines[2]


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert board.printable("a\x1b[2Jb\nc", Terminal()) == "a [2Jb c"


def test_forecast_lets_running_jobs_go_on_and_queues_the_rest() -> None:
    parts = [Part(job_info(name, deadline_s=deadline)) for name, deadline in (("a", 100), ("b", 8), ("c", 9))]
    run = ActedRun(parts, num_ranks=1, observers=[])
    snapshot = run.snapshot()
    first = forecast(snapshot, policy="edf")
    one = parts[0].remaining_s
    assert first.ends_s == pytest.approx({"b": one, "c": 2 * one, "a": 3 * one})
    assert first.late == {"c"}
    assert first.end_s == pytest.approx(3 * one)
    assert list(forecast(snapshot, policy="fcfs").ends_s) == ["a", "b", "c"]
