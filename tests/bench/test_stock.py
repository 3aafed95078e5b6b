"""Stock diffusers on a workload: who is served when, and how it is counted. No diffusers here."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_job

from gfgen.bench import stock, stock_worker
from gfgen.bench.stock import StockOptions, is_stock, stock_options
from gfgen.bench.stock_worker import FileWritten, JobMade, MakeJob, RankAnswer, TryJob
from gfgen.cli.bench.commands import _spelled_out
from gfgen.errors import PolicyError, WorkerError

STEP_S = 0.02


def serving(jobs, *, num_groups=1, num_ranks=1, fails=(), step_s=STEP_S) -> list[tuple[str, str | None]]:
    """(job, error) in the order in which they ended, with ranks that take a moment for each."""

    def rank(connection: Any, *, writes: bool) -> None:
        with suppress(EOFError, OSError):  # the service is over
            while True:
                message = connection.recv()
                assert isinstance(message, MakeJob)
                time.sleep(step_s)
                error = "out of memory" if message.spec.id in fails else None
                connection.send(JobMade(message.spec.id, error))
                if writes and error is None:
                    connection.send(FileWritten(message.spec.id))

    groups = []
    for _ in range(num_groups):
        group = stock._StockGroup([], [])
        for number in range(num_ranks):
            ours, theirs = multiprocessing.Pipe()
            threading.Thread(target=rank, args=(theirs,), kwargs={"writes": number == 0}, daemon=True).start()
            group.connections.append(ours)
        groups.append(group)
    service = stock._Service(jobs, groups, folder=Path("."), way="1 group of 1")
    try:
        outcomes = service.run()
    finally:
        for group in groups:
            group.close()
    assert all(outcome.layouts == ("1 group of 1",) for outcome in outcomes)
    return [(outcome.info.job_id, outcome.error) for outcome in outcomes]


def arriving(job_id, arrival_s, **fields):
    return make_job(job_id, arrival_s=arrival_s, **fields)


def test_whoever_comes_first_is_served_first():
    jobs = [arriving("c", 0.002), arriving("a", 0.0), arriving("b", 0.001, priority=9)]
    assert serving(jobs, num_ranks=2) == [("a", None), ("b", None), ("c", None)]


def test_the_next_job_goes_to_the_group_that_is_free():
    jobs = [arriving(str(number), 0.0) for number in range(6)]
    assert {job_id for job_id, _ in serving(jobs, num_groups=3)} == {str(number) for number in range(6)}


def test_a_job_that_fails_is_counted_and_the_next_one_is_made():
    jobs = [arriving("a", 0.0), arriving("b", 0.0)]
    assert serving(jobs, fails={"a"}) == [("a", "out of memory"), ("b", None)]


def test_ranks_that_may_wait_for_one_that_failed_are_given_up():
    jobs = [arriving("a", 0.0), arriving("b", 0.5)]
    with pytest.raises(WorkerError, match="diffusers: job a: out of memory"):
        serving(jobs, num_ranks=2, fails={"a"})


def test_a_job_that_waits_too_long_fails_and_is_not_made():
    jobs = [arriving("a", 0.0), arriving("b", 0.0, timeout_s=0.05), arriving("c", 0.0)]
    ended = serving(jobs, step_s=0.2)
    assert ended == [("b", "timed out 0.05 s after its arrival"), ("a", None), ("c", None)]


def test_deadlines_count_from_the_arrival():
    jobs = [arriving("a", 0.01, deadline_s=5.0)]
    group = stock._StockGroup([], [])
    service = stock._Service(jobs, [group], folder=Path("."), way="")
    service._end("a", None)
    (outcome,) = service._outcomes
    assert outcome.deadline_s == pytest.approx(5.01)
    assert outcome.met_deadline


class Picky:
    """A pipeline that refuses a prompt unless shards may be uneven."""

    def __init__(self, *, is_uneven):
        self.is_uneven = is_uneven

    def generate(self, spec, *, steps=None, is_to_decode=True):
        if not self.is_uneven:
            raise AssertionError("must be divisible")


def test_a_refusal_is_an_answer():
    message = TryJob(make_job("a").spec)
    refused = stock_worker._answer(Picky(is_uneven=False), message, None)
    assert refused == RankAnswer("AssertionError: must be divisible")
    assert stock_worker._answer(Picky(is_uneven=True), message, None) == RankAnswer()


class Pickier:
    """Groups that accept so many ranks at most, and uneven shards only on them."""

    def __init__(self, most):
        self.most, self.started = most, []

    def start(self, degree, *, is_uneven):
        self.started.append((degree, is_uneven))
        return [SimpleNamespace()] * (4 // degree)

    def refusal(self, group):
        degree, is_uneven = self.started[-1]
        return None if degree == 1 or (degree <= self.most and is_uneven) else "must be divisible"


@pytest.mark.parametrize(
    ("most", "text", "way", "started"),
    [
        (4, "diffusers", "1 group of 4, uneven shards (ulysses_anything)", [(4, False), (4, True)]),
        (
            2,
            "diffusers",
            "2 groups of 2, uneven shards (ulysses_anything)",
            [(4, False), (4, True), (2, False), (2, True)],
        ),
        (4, "diffusers,uneven=false", "4 groups of 1", [(4, False), (2, False), (1, False)]),
        (4, "diffusers,degree=1,compiled=true", "4 groups of 1, blocks compiled", [(1, False)]),
    ],
)
def test_the_largest_degree_that_is_accepted_is_taken(monkeypatch, most, text, way, started):
    picky = Pickier(most)
    monkeypatch.setattr(
        stock, "_started", lambda *args, is_uneven, **_: picky.start(args[3], is_uneven=is_uneven)
    )
    monkeypatch.setattr(stock, "_refusal", lambda _, group, **__: picky.refusal(group))
    ranks = stock_worker.StockRanks(Path("."), 4, "cpu")
    with stock._accepted_groups([make_job("a")], stock_options(text), ranks, lambda line: None) as found:
        assert found[1] == way
    assert picky.started == started


def test_prompts_are_tried_one_by_one_where_ranks_share_them():
    jobs = [make_job("a"), make_job("b"), make_job("c", shape="large")]
    assert stock._texts(jobs) == []
    pictures = [replace(job, info=replace(job.info, family="qwen-image")) for job in jobs]
    assert [job.job_id for job in stock._texts(pictures)] == ["a", "b"]
    assert [job.shape for job in stock._kinds(pictures)] == ["small", "large"]


def test_options_are_read_and_others_refused():
    assert is_stock("diffusers")
    assert is_stock("diffusers,degree=2")
    assert not is_stock("srtf")
    assert stock_options("diffusers,degree=2,uneven=true,compiled=true") == StockOptions(
        "diffusers,degree=2,uneven=true,compiled=true", 2, True, True
    )
    for text in ("diffusers,degree=0", "diffusers,uneven=maybe", "diffusers,ring=2"):
        with pytest.raises(PolicyError, match="is not an option of diffusers"):
            stock_options(text)


def test_a_group_of_more_ranks_than_there_are_is_refused():
    assert stock_options("diffusers,degree=2", num_ranks=2).degree == 2
    assert stock_options("diffusers", num_ranks=1).degree is None
    with pytest.raises(PolicyError, match="diffusers,degree=4: the largest degree on 2 ranks is 2"):
        stock_options("diffusers,degree=4", num_ranks=2)


def test_answers_are_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(stock, "PATIENCE_S", 0.0)
    pairs = [multiprocessing.Pipe() for _ in range(2)]
    group = stock._StockGroup([], [ours for ours, _ in pairs])
    with pytest.raises(WorkerError, match="no answer after 0 s"):
        group.error()


def test_the_first_error_of_a_rank_is_the_answer_of_its_group():
    pairs = [multiprocessing.Pipe() for _ in range(2)]
    group = stock._StockGroup([], [ours for ours, _ in pairs])
    pairs[0][1].send(RankAnswer())
    pairs[1][1].send(RankAnswer())
    pairs[1][1].send(RankAnswer("out of memory"))
    assert group.error() is None
    assert group.error() == "out of memory"


def test_a_process_that_dies_is_told_at_once():
    pairs = [multiprocessing.Pipe() for _ in range(2)]
    group = stock._StockGroup([], [ours for ours, _ in pairs])
    pairs[1][1].close()
    with pytest.raises(WorkerError, match="a process died"):
        group.error()


def test_ranks_leave_an_interrupt_to_their_parent_and_end_without_a_word(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    seen = []
    monkeypatch.setattr(stock_worker, "_pipeline", lambda _: seen.append(signal.getsignal(signal.SIGINT)))
    monkeypatch.setattr(stock_worker.os, "environ", {})
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    try:
        ranks = stock_worker.StockRanks(Path("."), 2, "cpu")
        stock_worker.serve(theirs, stock_worker.StockSettings(ranks, 1, 2, store=""))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_IGN]


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["--compare", "legacy"], ["--against", "legacy"]),
        (["--compare=legacy", "--ranks", "4"], ["--against", "legacy", "--ranks", "4"]),
        (
            ["--compare", "legacy", "--compare", "diffusers,degree=2", "--compare", "srtf"],
            ["--against", "legacy", "--outside", "diffusers,degree=2", "--policy", "srtf"],
        ),
    ],
)
def test_what_else_is_compared_comes_as_the_same_option(words, read):
    assert list(_spelled_out(words)) == read


class Answering:
    """A group that refuses one job, and what it was asked to try."""

    def __init__(self, refuses):
        self.refuses, self.tried = refuses, []

    def tell(self, message):
        self.tried.append(message.spec.id)

    def error(self):
        return "no" if self.tried[-1] == self.refuses else None


@pytest.mark.parametrize(
    ("is_uneven", "refuses", "tried", "refusal"),
    [
        (False, "a", ["b", "c", "a"], "no"),
        (False, "b", ["b"], "no"),
        (False, None, ["b", "c", "a", "b"], None),
        (True, None, ["b", "c", "a"], None),
    ],
)
def test_no_more_is_tried_than_tells_whether_all_jobs_run(is_uneven, refuses, tried, refusal):
    jobs = [make_job("a"), make_job("b"), make_job("c", shape="large")]
    jobs = [replace(job, info=replace(job.info, family="qwen-image")) for job in jobs]
    group: Any = Answering(refuses)
    assert stock._refusal(jobs, group, is_uneven=is_uneven) == refusal
    assert group.tried == tried
